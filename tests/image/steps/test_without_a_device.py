"""Without a device: samples are stock code's, and the report and `strict` say what a device would do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


@pytest.fixture
def here() -> Iterator[None]:
    with torch_sink.image_backend("device", device="cpu"):
        yield


@pytest.mark.parametrize("first", range(400, 520, 40))
@pytest.mark.filterwarnings("ignore")
def test_samples_and_draws_are_stocks(first: int, here: None) -> None:
    waiting = 0
    for seed in range(first, first + 40):
        image = photo(seed).convert("L") if seed % 7 == 0 else photo(seed)
        container = random_container(seed)
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


def test_later_writes_are_not_seen(here: None) -> None:
    container, image = v1.Compose([v1.ToTensor()]), photo()
    made, expected = container(image), np.asarray(image).copy()
    image.putpixel((0, 0), (1, 2, 3))
    assert torch.equal(made.mul(255).round().byte(), torch.from_numpy(expected).permute(2, 0, 1))


def test_a_change_in_place_is_made_once(here: None) -> None:
    container = v1.Compose([v1.ToTensor(), v1.CenterCrop(9), v1.Normalize((0.5,), (0.2,), inplace=True)])
    made = container(photo())
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
@pytest.mark.sampled(4)
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


def test_the_report_counts_every_sample() -> None:
    container = v1.Compose([v1.Pad(1), Reads(), v1.PILToTensor()])
    with torch_sink.image_backend("device", device="cpu"):
        for seed in range(300):
            container(photo(seed))
        ((operation, reason), count) = next(iter(torch_sink.fallback_report().counts.items()))
    assert (operation, reason) == (
        "pixels of a Pillow image",
        "read by other code: image.steps.test_without_a_device.Reads.__call__",
    )
    assert count == 100


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


def test_errors_are_stocks(here: None) -> None:
    container = v1.Compose([v1.Pad(1), lambda image: F.crop(image, 0, 0, 1) if image.width < 30 else image])
    container(photo())
    for _ in range(2):
        with pytest.raises(TypeError, match="crop"):
            container(photo(size=(9, 9)))
        assert not is_executing()
    assert isinstance(container(photo()), Image.Image)


def test_samples_that_raise_at_first_do_not_harm_later_ones() -> None:
    container = v1.Compose([v1.RandomCrop(16), v1.ToTensor()])
    with torch_sink.image_backend("device", device="cpu"):
        for _ in range(20):
            with pytest.raises(ValueError, match="crop size"):
                container(photo(size=(4, 4)))
        made = [container(photo(seed)) for seed in range(20)]
    assert all(type(each) in HANDLES for each in made)


@pytest.mark.parametrize(("container", "image"), [(v2.Compose([v2.ToImage()]), photo()), (v1.Compose([]), photo())])
def test_unknown_keywords_raise(container: Any, image: Image.Image, here: None) -> None:
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
@pytest.mark.sampled(4)
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
