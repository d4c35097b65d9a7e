"""The short examples, run as a user runs them, on files; none falls back without saying so, none is long."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import models

import torch_sink
from torch_sink.cli.photos import write_photos

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINES = 60
# What the examples need beyond torchvision.
OTHERS = {
    "finetune_timm": "timm",
    "lightning_module": "lightning",
    "accelerate_loop": "accelerate",
    "hf_datasets": "datasets",
    "webdataset_shards": "webdataset",
}
SHORT = ["01_image_backend", "02_sink_loader", "03_step_loop", "04_mixed_precision", "mindspore_style", "inference"]
SHORT += ["self_supervised", "contrastive", "segmentation", *OTHERS]
NOTHING_FELL_BACK = "no fallbacks"
SAYS = {
    "01_image_backend": NOTHING_FELL_BACK,
    "02_sink_loader": "too few batches to tell",
    "03_step_loop": "resumed at step 6",
    "04_mixed_precision": "O3: last loss",
    "mindspore_style": "epoch: 4 step: 10, loss is",
    "inference": "24 images classified; no broken files",
    "self_supervised": NOTHING_FELL_BACK,
    "contrastive": NOTHING_FELL_BACK,
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, count=24)
    return folder


@pytest.fixture(scope="module")
def masks(tmp_path_factory: pytest.TempPathFactory, photos: Path) -> Path:
    """Eight images, and masks of three classes with a palette, as VOC's."""
    folder = tmp_path_factory.mktemp("masks")
    (folder / "images").mkdir()
    (folder / "masks").mkdir()
    numbers = np.random.default_rng(0)
    for photo in sorted(photos.rglob("*.jpg"))[:8]:
        image = Image.open(photo).convert("RGB")
        image.save(folder / "images" / f"{photo.stem}.jpg")
        mask = Image.fromarray(numbers.integers(0, 3, (image.height, image.width), dtype=np.uint8))
        mask.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
        mask.save(folder / "masks" / f"{photo.stem}.png")
    return folder


def run(name: str, capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> str:
    """In this process, where torch and torchvision are loaded already; with a network that is trained sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        patch.setattr(models, "resnet18", models.shufflenet_v2_x0_5)
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        finally:
            torch_sink.set_image_backend("PIL")
    return capsys.readouterr().out


def run_alone(name: str, *arguments: Path) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.once
@pytest.mark.parametrize("name", SAYS)
def test_an_example_on_a_folder_of_images(name: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SAYS[name] in run(name, capsys, photos)


@pytest.mark.once
def test_segmentation(masks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tv_tensors.Mask" in run("segmentation", capsys, masks)


@pytest.mark.once
def test_the_recipe_for_imagenet_stops_and_resumes(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "val"):
        (tmp_path / part).symlink_to(photos)
    options = "--model shufflenet_v2_x0_5 --epochs 2 --batch-size 8 --workers 0 --warmup-epochs 1 --train-size 32"
    options += f" --val-resize 36 --val-size 32 --checkpoint-steps 2 --steps-per-sync 2 --output {tmp_path}/checkpoints"
    printed = run("imagenet", capsys, tmp_path, *options.split(), "--max-steps", "4")
    assert "epoch: 1 step: 2, loss is" in printed
    assert "'top5': 1.0" in printed
    assert NOTHING_FELL_BACK in printed
    printed = run("imagenet", capsys, tmp_path, *options.split(), "--resume")
    assert "resumed at step 4" in printed
    assert "\n2 steps, " in printed


@pytest.mark.once_on_oldest
@pytest.mark.parametrize("name", OTHERS)
def test_an_example_with_another_library(name: str, photos: Path) -> None:
    pytest.importorskip(OTHERS[name])
    assert NOTHING_FELL_BACK in run_alone(name, photos)


@pytest.mark.once
def test_the_index_names_every_example_and_none_is_long() -> None:
    index = (EXAMPLES / "README.md").read_text()
    named = re.findall(r"\(([\w]+)\.py\)", index)
    assert named == [*SHORT, "train_image_folder", "imagenet", "train_distributed"]
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= LINES for name in SHORT)
