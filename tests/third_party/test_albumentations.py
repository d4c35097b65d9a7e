"""Albumentations: arrays from handles, arrays between transforms of torchvision, images from arrays and from OpenCV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import v2

import torch_sink
from third_party.compare import Later, assert_same_as_stock
from torch_sink.cli import bench, explain
from torch_sink.cli.photos import write_photos
from torch_sink.cli.pipelines import pipeline_of
from torch_sink.cli.worker_cost import said_beside_stock

A = Later("albumentations")


class OnArrays:
    """An Albumentations pipeline between transforms of torchvision, as a dataset would call it."""

    def __init__(self, steps: list[Any], before: Any = None, after: Any = None, *, read: Any = np.asarray) -> None:
        self.augment = A.Compose(steps, seed=5)
        self.before, self.after, self.read = before, after, read

    def __call__(self, image: Any) -> Any:
        image = image if self.before is None else self.before(image)
        array = self.augment(image=self.read(image))["image"]
        return array.tolist() if self.after is None else self.after(array)


def alone() -> OnArrays:
    from albumentations.pytorch import ToTensorV2

    steps = [
        A.RandomResizedCrop(size=(24, 24)), A.HorizontalFlip(), A.ColorJitter(), A.GaussNoise(p=1.0), A.Normalize(),
        ToTensorV2(),
    ]  # fmt: skip
    return OnArrays(steps, after=lambda tensor: tensor)


def after_recorded_calls() -> OnArrays:
    before = transforms.Compose([transforms.RandomResizedCrop(24), transforms.RandomHorizontalFlip()])
    return OnArrays([A.RandomBrightnessContrast(p=1.0), A.CLAHE(p=1.0)], before)


def in_the_middle() -> OnArrays:
    after = transforms.Compose([transforms.ToPILImage(), transforms.RandomCrop(20), transforms.ToTensor()])
    return OnArrays([A.RandomRotate90(), A.ToGray(p=0.5)], transforms.Resize((32, 32)), after, read=np.array)


def before_v2() -> OnArrays:
    after = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(20), v2.RandomHorizontalFlip()])
    return OnArrays([A.Affine(rotate=20, p=1.0)], v2.Resize((32, 32)), after)


@pytest.mark.parametrize("make", [alone, after_recorded_calls, in_the_middle, before_v2])
def test_same_as_stock(make: Callable[[], OnArrays]) -> None:
    assert_same_as_stock(make, seeds=3)


class Photos(Dataset[Any]):
    """Photographs that OpenCV reads."""

    def __init__(self, files: list[Path], make: Callable[[Any], Any]) -> None:
        self.files, self.make = files, make

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        import cv2

        return self.make(cv2.cvtColor(cv2.imread(str(self.files[index])), cv2.COLOR_BGR2RGB)), index


def by_torchvision() -> Callable[[Any], Any]:
    return transforms.Compose([transforms.ToTensor(), transforms.RandomCrop(24)])


def by_albumentations() -> Callable[[Any], Any]:
    augment = alone().augment
    return lambda array: augment(image=array)["image"]


@pytest.mark.parametrize(
    ("make", "more", "got"),
    [
        (by_torchvision, "", "transforms.ToTensor got a numpy uint8 array"),
        (by_albumentations, ", albumentations.Compose", ""),
    ],
)
def test_what_opencv_has_read_is_named_with_the_line_to_write_instead(
    make: Callable[[], Callable[[Any], Any]],
    more: str,
    got: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("albumentations", reason="the extra third-party is not installed")
    # A measurement in which torch_sink happens to be faster: it is noise, and no reason to recommend it.
    faster, more_faster = {"p50": 0.001}, dict.fromkeys(("least", "p50", "most"), 1.1)
    cost = {f"{side}_ms": faster for side in ("stock", "torch_sink", "on_cpu")}
    cost |= {"ratio": more_faster, "on_cpu_ratio": more_faster, "fallbacks": {}, "batch_size": 4}
    monkeypatch.setattr(bench, "measure_worker_cost", lambda *_, **__: cost)
    monkeypatch.setattr(explain, "measured_beside_stock", lambda *_: (0.001, said_beside_stock(cost)))
    loader = DataLoader(Photos(write_photos(tmp_path, count=4), make()), 4)
    monkeypatch.setattr(bench, "open_pipeline", lambda *_: pipeline_of("photos", loader))
    with torch_sink.image_backend("device"), torch_sink.explain("cuda"):
        list(loader)
        report = str(torch_sink.fallback_report())
    explained = capsys.readouterr().out
    found = bench.run(None, "photos", workers=0, quick=True)
    for said in (report, explained, bench.report_of(found).as_text()):
        words = " ".join(said.split())
        assert "Photos gave float32 [4, 3, 24, 24], int64 [4], made by cv2.imread, cv2.cvtColor" + more in words
        assert got in words
        assert 'Image.open(path).convert("RGB")' in words
        assert "torch_sink support" not in words
        assert " pays" not in words
