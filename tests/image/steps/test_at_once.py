"""Without a device, images in memory are made at once; the report and `strict` still say what a device would do."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from call_path import count_calls
from PIL import Image
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener, encoded
from image.check import assert_same_bits
from image.decode.test_bad_input import broken_table
from image.random_pipelines import same_value
from image.steps.containers import photo, random_container, seeded
from torch_sink.image.core.fallback import is_executing
from torch_sink.image.handles.tensor import HANDLES
from torch_sink.image.steps import containers

pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend without a device; the first sample of each transform is recorded, all others are made at once."""
    monkeypatch.setattr(containers, "_IN_A_ROW", 1)
    monkeypatch.setattr(containers, "_TRIED_AGAIN", sys.maxsize)
    with torch_sink.image_backend("device", device="cpu"):
        yield


def recorded_once(container: Any, *images: Any) -> Any:
    container(*images)
    return container


@pytest.mark.parametrize("first", range(400, 520, 40))
@pytest.mark.filterwarnings("ignore")
def test_samples_and_draws_are_stocks(first: int, at_once: None) -> None:
    waiting = 0
    for seed in range(first, first + 40):
        image = photo(seed).convert("L") if seed % 7 == 0 else photo(seed)
        container = random_container(seed)
        seeded(seed, lambda image=image, run=container: run(image))
        actual, state = seeded(seed, lambda image=image, run=container: run(image))
        with torch_sink.image_backend("PIL"):
            expected, stock_state = seeded(seed, lambda image=image, run=container: run(image))
        assert state == stock_state
        assert not is_executing()
        waiting += type(actual) in HANDLES
        if isinstance(expected, (Image.Image, torch.Tensor)):
            assert isinstance(actual, type(expected))
            same_value(actual, expected)
        else:
            assert actual == expected
    assert waiting > 5


def test_types(at_once: None) -> None:
    """A batch gains by its conversion and normalization as a whole; all else is an ordinary image or tensor."""
    normalize = v1.Normalize((0.5,), (0.2,))
    for transforms, kind in (
        ([v1.CenterCrop(9)], Image.Image),
        ([v1.PILToTensor()], torch.Tensor),
        ([v1.PILToTensor(), v1.CenterCrop(9), v1.ConvertImageDtype(torch.float64)], torch.Tensor),
        ([v1.ToTensor(), v1.CenterCrop(9)], torch.Tensor),
        ([v1.Lambda(lambda image: image), v1.ToTensor(), normalize], torch.Tensor),
    ):
        assert type(recorded_once(v1.Compose(transforms), photo())(photo())) is kind
    for transforms in ([v1.CenterCrop(9), v1.ToTensor(), normalize], [v1.ToTensor(), v1.RandomCrop(9), normalize]):
        made = recorded_once(v1.Compose(transforms), photo())(img=photo())
        assert len(made.lazy_ops) == len(transforms)


def test_views_that_a_users_transform_makes_wait(at_once: None) -> None:
    view = v1.Compose([v1.RandomCrop(9), v1.ToTensor()])
    run = recorded_once(v1.Compose([lambda image: [view(image), view(image)]]), photo(1))
    assert all(each.is_recording for each in run(photo(2)))
    run = recorded_once(v1.Compose([lambda image: [view(image).numpy()]]), photo(1))
    assert type(run(photo(2))[0]) is np.ndarray


def test_later_writes_are_not_seen(at_once: None) -> None:
    container, image = recorded_once(v1.Compose([v1.ToTensor()]), photo()), photo()
    made, expected = container(image), np.asarray(image).copy()
    image.putpixel((0, 0), (1, 2, 3))
    assert torch.equal(made.mul(255).round().byte(), torch.from_numpy(expected).permute(2, 0, 1))


def test_a_change_in_place_is_made_once(at_once: None) -> None:
    container = v1.Compose([v1.ToTensor(), v1.CenterCrop(9), v1.Normalize((0.5,), (0.2,), inplace=True)])
    made = recorded_once(container, photo())(photo())
    with torch_sink.image_backend("PIL"):
        expected = container(photo())
    assert repr(made) == repr(made) == repr(expected)
    assert torch.equal(made, expected)


class Reads:
    """A transform that reads pixels, of one image in three."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, image: Any) -> Any:
        self.calls += 1
        if self.calls % 3 == 0:
            np.asarray(image)
        return image


class Images(Dataset[Any]):
    """Images in memory, and what a transform makes of them."""

    def __init__(self, transform: Callable[[Any], Any], count: int = 120) -> None:
        self.transform, self.images = transform, [array_opener(44, 42, seed)() for seed in range(count)]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.images[index])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "transforms",
    [
        [v1.RandomCrop(16, padding=2), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize((0.5,), (0.2,))],
        [v1.PILToTensor(), v1.Lambda(lambda image: F.resize(image, [9, 9])), v1.Lambda(lambda image: image.numpy())],
        [v1.ElasticTransform(9.0, interpolation=v1.InterpolationMode.BICUBIC), v1.ToTensor()],
    ],
)
def test_batches_of_workers_and_their_report(workers: int, transforms: list[Any]) -> None:
    options: dict[str, Any] = {"batch_size": 30, "num_workers": workers}
    options["multiprocessing_context"] = "fork" if workers else None
    dataset = Images(v1.Compose(transforms))
    torch.manual_seed(5)
    expected = list(DataLoader(dataset, **options))
    with torch_sink.image_backend("device", device="cpu"):
        torch.manual_seed(5)
        made = list(DataLoader(dataset, **options))
        counts = list(torch_sink.fallback_report().counts.values())
    assert counts == ([] if type(transforms[0]) is v1.RandomCrop else [120])
    for actual, stock in zip(made, expected, strict=True):
        assert type(actual) is torch.Tensor
        assert_same_bits(actual, stock)


def test_the_report_counts_what_recorded_samples_said() -> None:
    container = v1.Compose([v1.Pad(1), Reads(), v1.PILToTensor()])
    with torch_sink.image_backend("device", device="cpu"):
        for seed in range(300):
            container(photo(seed))
        ((operation, reason), count) = next(iter(torch_sink.fallback_report().counts.items()))
    assert (operation, reason) == (
        "pixels of a Pillow image",
        "read by other code: image.steps.test_at_once.Reads.__call__",
    )
    assert 80 < count < 120


def test_strict_looks_at_every_sample() -> None:
    reads = Reads()
    container = v1.Compose([v1.Pad(1), reads, v1.PILToTensor()])
    with torch_sink.image_backend("device", device="cpu"):
        for seed in range(30):
            container(photo(seed))
    with torch_sink.image_backend("device", device="cpu", strict=True):
        assert all(container(photo(seed)).is_recording for seed in range(2))
        with pytest.raises(torch_sink.UnsupportedOperation, match="Reads"):
            container(photo())


def test_errors_are_stocks(at_once: None) -> None:
    container = v1.Compose([v1.Pad(1), lambda image: F.crop(image, 0, 0, 1) if image.width < 30 else image])
    container(photo())
    for _ in range(2):
        with pytest.raises(TypeError, match="crop"):
            container(photo(size=(9, 9)))
        assert not is_executing()
    assert type(container(photo())) is Image.Image


def test_samples_that_raise_at_first_do_not_harm_later_ones() -> None:
    container = v1.Compose([v1.RandomCrop(16), v1.ToTensor()])
    with torch_sink.image_backend("device", device="cpu"):
        for _ in range(20):
            with pytest.raises(ValueError, match="crop size"):
                container(photo(size=(4, 4)))
        made = [container(photo(seed)) for seed in range(20)]
    assert all(type(each) in HANDLES for each in made)


@pytest.mark.parametrize(("container", "image"), [(v2.Compose([v2.ToImage()]), photo()), (v1.Compose([]), photo())])
def test_unknown_keywords_raise(container: Any, image: Image.Image, at_once: None) -> None:
    for _ in range(3):
        with pytest.raises(TypeError, match="unexpected keyword argument 'foo'"):
            container(image, foo=1)
        container(image)


@pytest.mark.parametrize("workers", [0, 2])
def test_files_wait_for_the_policy_of_their_batch(tmp_path: Path, workers: int) -> None:
    """Samples of JPEG files are recorded, those of other files made at once; damage is found as before."""
    folder = tmp_path / "class"
    folder.mkdir()
    for at in range(48):
        (folder / f"{at:02d}.jpg").write_bytes(broken_table() if at == 30 else encoded(30, 31, at))
        photo(at, (30, 31)).save(folder / f"{at:02d}.png")
    transform = v1.Compose([v1.RandomCrop(24, pad_if_needed=True), v1.ToTensor()])
    options: dict[str, Any] = {"batch_size": 96, "num_workers": workers}
    options["multiprocessing_context"] = "fork" if workers else None
    with torch_sink.image_backend("device", device="cpu"):
        batches: Any = iter(DataLoader(ImageFolder(str(tmp_path), transform), **options))
        with pytest.raises(OSError, match=r"30\.jpg"):
            list(batches)
    if workers:
        # Not when its garbage is collected: on Python 3.12 the queue's thread then closes what is already closed.
        batches._shutdown_workers()
    with torch_sink.image_backend("device", device="cpu", on_decode_error="skip"):
        torch.manual_seed(3)
        ((images, labels),) = DataLoader(ImageFolder(str(tmp_path), transform), **options)
        assert not torch_sink.fallback_report()
        assert [Path(file).name for file in torch_sink.decode_report().files] == ["30.jpg"]
    assert len(images) == len(labels) == 95
    (folder / "30.jpg").unlink()
    torch.manual_seed(3)
    ((expected, _),) = DataLoader(ImageFolder(str(tmp_path), transform), **options)
    assert_same_bits(images, expected)


class Detection(Dataset[Any]):
    """Images in memory with boxes and a mask, as dicts or pairs."""

    def __init__(self, transform: Callable[..., Any], is_pair: bool) -> None:
        self.transform, self.is_pair = transform, is_pair

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        image = photo(index, (40, 36))
        boxes = tv_tensors.BoundingBoxes([[3, 4, 20, 30]], format="XYXY", canvas_size=(36, 40))  # type: ignore[call-overload]
        mask = tv_tensors.Mask(torch.full((1, 36, 40), index, dtype=torch.uint8))
        if self.is_pair:
            return self.transform(image, {"boxes": boxes, "mask": mask})
        return self.transform({"image": image, "boxes": boxes, "mask": mask, "name": str(index)})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("is_float", [False, True])
def test_samples_with_boxes_and_masks(workers: int, is_pair: bool, is_float: bool) -> None:
    to_float = (
        [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.2])] if is_float else [v2.ToDtype(torch.float64)]
    )
    transform = v2.Compose(
        [v2.RandomZoomOut(), v2.RandomHorizontalFlip(), v2.ToImage(), *to_float, v2.Resize((20, 24))]
    )
    options: dict[str, Any] = {"batch_size": 20, "num_workers": workers}
    options["multiprocessing_context"] = "fork" if workers else None
    loader = DataLoader(Detection(transform, is_pair), **options)
    torch.manual_seed(4)
    expected = list(loader)
    with torch_sink.image_backend("device", device="cpu"):
        torch.manual_seed(4)
        made = list(loader)
        counts = list(torch_sink.fallback_report().counts.values())
    assert counts == ([] if is_float else [40])
    for actual, stock in zip(tree_leaves(made), tree_leaves(expected), strict=True):
        if isinstance(stock, torch.Tensor):
            assert_same_bits(actual, stock)
        else:
            assert actual == stock


# --- what it costs


@pytest.mark.once
@pytest.mark.parametrize(
    ("transforms", "most"),
    [
        ([v1.PILToTensor(), v1.CenterCrop(9)], 9),
        ([v1.PILToTensor(), v1.Lambda(lambda image: F.crop(image, 1, 2, 9, 9))], 8),
        ([v1.PILToTensor(), v1.FiveCrop(9)], 18),
        ([v1.Resize(9), v1.PILToTensor()], 8),
        ([v2.ToImage(), v2.CenterCrop(9)], 20),
        ([v2.ToImage(), v2.RandomHorizontalFlip(1.0)], 20),
        ([v1.CenterCrop(9), v1.ToTensor()], 0),
        ([v1.RandomCrop(9), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize((0.5,), (0.2,))], 0),
    ],
)
def test_calls_that_a_sample_adds(transforms: list[Any], most: int) -> None:
    """Counted instead of timed."""
    module = v1 if transforms[0].__module__.endswith("transforms.transforms") else v2
    container, image = module.Compose(transforms), photo()
    counts = []
    for device in (None, "cpu"):
        with torch_sink.image_backend("device" if device else "PIL", device=device):
            for seed in range(20):
                torch.manual_seed(seed)
                random.seed(seed)
                container(image)
            counts.append(count_calls(lambda: container(image)))
    assert counts[1] <= counts[0] + most, counts
