"""What runs in stock code gives stock's values, is counted also in workers, and raises under strict=True."""

from __future__ import annotations

import io
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from image.check import assert_same_bits
from torch_sink import fallback_report
from torch_sink.image.core.origins import NOTHING_RECORDED

pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


def inverted(image: Any) -> Any:
    """What a user's own transform does: it reads pixels."""
    return image.point(lambda value: 255 - value)


def transform() -> v1.Compose:
    return v1.Compose(
        [v1.RandomResizedCrop(20), v1.Lambda(inverted), v1.RandomHorizontalFlip(), v1.GaussianBlur(3), v1.ToTensor()]
    )


class Photos(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.transform = transform()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(opener(encoded(30, 31, index))())


@pytest.mark.parametrize("workers", [0, 2])
def test_fallbacks_are_exact_and_counted(workers: int) -> None:
    loader = {"batch_size": 3, "num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    torch.manual_seed(4)
    expected = list(DataLoader(Photos(), **loader))
    with torch_sink.image_backend("device", device="cpu"):
        assert not fallback_report()
        torch.manual_seed(4)
        made = list(DataLoader(Photos(), **loader))
        report = fallback_report()
    for batch, stock_batch in zip(made, expected, strict=True):
        assert_same_bits(batch.to("cpu"), stock_batch)
    assert report
    assert len(report) == len(report.counts)
    by_reason = {reason: count for (operation, reason), count in report.counts.items()}
    assert any("inverted" in reason and count == 6 for reason, count in by_reason.items()), str(report)
    table = str(report).splitlines()
    assert table[0].split() == ["operation", "reason", "count"]
    assert len(table) == len(report) + 1


def test_counting_begins_when_the_backend_is_set() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        inverted(opener(encoded(30, 31))())
        assert fallback_report()
    assert fallback_report()
    with torch_sink.image_backend("device", device="cpu"):
        assert not fallback_report()
        assert str(fallback_report()) == NOTHING_RECORDED


class OrdinaryTensors(Dataset[Any]):
    """What no backend sees: arrays that a dataset makes itself."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return v1.functional.resize(torch.full((3, 8, 8), index, dtype=torch.uint8), [4, 4])


class Photographs(OrdinaryTensors):
    def __getitem__(self, index: int) -> torch.Tensor:
        return v1.functional.to_tensor(v1.functional.resize(opener(encoded(30, 31, index))(), [4, 4]))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_report_says_where_nothing_fell_back(workers: int) -> None:
    said = []
    for dataset in (OrdinaryTensors(), Photographs()):
        with torch_sink.image_backend("device", device="cpu"):
            loader = DataLoader(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
            assert len(list(loader)) == 4
            report = fallback_report()
            assert not report
            assert len(report) == 0
            said.append(str(report).splitlines()[0])
    assert said == [NOTHING_RECORDED, "no fallbacks"]


@pytest.mark.parametrize(
    "step",
    [v1.Lambda(inverted), v2.Lambda(inverted), v2.JPEG((50, 50))],
    ids=lambda step: type(step).__name__,
)
def test_strict_raises_and_names_the_operation(step: Any) -> None:
    image = opener(encoded(30, 31))
    with torch_sink.image_backend("device", device="cpu"):
        step(image())
    with (
        torch_sink.image_backend("device", device="cpu", strict=True),
        pytest.raises(torch_sink.UnsupportedOperation, match=r"would run in stock code.*strict=False"),
    ):
        step(image())


def test_strict_reaches_workers() -> None:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        loader = DataLoader(Photos(), batch_size=3, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(torch_sink.UnsupportedOperation, match="would run in stock code"):
            next(iter(loader))


@pytest.mark.once_on_oldest
def test_recording_resumes_after_a_fallback() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        handle = transform()(opener(encoded(30, 31))())
        assert handle.is_recording
        after = v1.Compose([v1.Lambda(inverted), v1.Resize(10), v1.ToTensor()])(opener(encoded(30, 31))())
        assert [op.name for op in after.lazy_recording.calls] == ["pil.resize", "to_tensor"]


def only_row() -> tuple[str, str]:
    (row,) = fallback_report().counts
    return row


class Histogram:
    """A transform that reads pixels in a method."""

    def __call__(self, image: Any) -> Any:
        return image.histogram()


@pytest.mark.parametrize("compose", [v1.Compose, v2.Compose])
@pytest.mark.parametrize(
    ("step", "named"),
    [
        (np.array, "numpy.array"),
        (v1.Lambda(np.array), "numpy.array"),
        (lambda image: np.zeros_like(image), "test_fallback.<lambda>"),
        (Histogram(), "test_fallback.Histogram.__call__"),
        (inverted, "test_fallback.inverted"),
    ],
    ids=["C function", "C function in Lambda", "lambda", "method", "function"],
)
def test_the_reason_names_the_code_that_read_pixels(step: Any, named: str, compose: type) -> None:
    image = opener(encoded(30, 31))
    with torch_sink.image_backend("device", device="cpu"):
        compose([step])(image())
        _, reason = only_row()
    assert reason.startswith("read by other code: ")
    assert named in reason


def test_wrong_arguments_are_an_error_and_no_fallback() -> None:
    for strict in (False, True):
        with torch_sink.image_backend("device", device="cpu", strict=strict):
            tensor = v1.ToTensor()(opener(encoded(30, 31))())
            with pytest.raises(RuntimeError, match="must match the size"):
                v1.Normalize((0.5, 0.5), (0.5, 0.5))(tensor)
            assert not fallback_report()


def test_a_single_image_that_is_moved_says_so() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        v1.ToTensor()(opener(encoded(30, 31))()).to("meta", non_blocking=True)
        operation, reason = only_row()
    assert operation == "torch: to"
    assert reason.startswith("one image is moved by itself, a batch is made on the device: ")
    assert "test_a_single_image" in reason
    with torch_sink.image_backend("device", device="cpu"):
        v1.ToTensor()(opener(encoded(30, 31))()).to(torch.float64)
        assert only_row()[1].startswith("tensor read by other code: ")


@pytest.mark.parametrize(("mode", "advice"), [("P", ""), ("RGBA", ": convert it to 'RGB' or 'L' first")])
def test_advice_about_modes_destroys_no_masks(mode: str, advice: str) -> None:
    """The values of a palette image may be classes, which a conversion would replace by colors."""
    mask = opener(encoded(30, 31))().convert(mode)
    expected = v1.functional.to_grayscale(mask).tobytes()
    with torch_sink.image_backend("device", device="cpu"):
        assert v1.functional.to_grayscale(mask).tobytes() == expected
        assert only_row() == ("Pillow image", f"no kernel for mode {mode!r}{advice}")


@pytest.mark.parametrize(
    ("views", "records"),
    [
        ((v1.GaussianBlur(9, 1.0), v1.RandomSolarize(128, 1.0)), False),
        ((v1.RandomSolarize(128, 1.0), v1.GaussianBlur(9, 1.0)), True),
        ((v1.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(1.3))), v1.RandomSolarize(128, 1.0)), True),
    ],
    ids=["torchvision's blur, then solarize", "solarize, then blur", "Pillow's blur, then solarize"],
)
def test_second_views_record_as_the_docs_say(views: tuple[Any, ...], records: bool) -> None:
    pipeline = v1.Compose([*views, v1.PILToTensor()])
    expected = pipeline(opener(encoded(30, 31))())
    with torch_sink.image_backend("device", device="cpu"):
        assert torch.equal(pipeline(opener(encoded(30, 31))()).materialize(), expected)
        assert bool(torch_sink.fallback_report()) != records


@pytest.mark.parametrize("module", [v1.functional, v2.functional], ids=["v1", "v2"])
def test_an_image_that_is_cropped_and_resized_counts_once(module: Any) -> None:
    image = Image.new("RGBA", (30, 20))
    with torch_sink.image_backend("device", device="meta"):
        module.resized_crop(image, 0, 0, 9, 9, [5, 5])
        assert list(fallback_report().counts.values()) == [1]


def test_naming_the_code_that_read_pixels_keeps_nothing_of_it_alive() -> None:
    """A training loop that reads a batch on the CPU would hold what it had then until it ends."""
    with torch_sink.image_backend("device", device="cpu"):
        image = Image.open(io.BytesIO(encoded(30, 20)))
        result = torch.zeros(3)
        left = weakref.ref(result)
        image.filter(ImageFilter.RankFilter(3, 2))
        del result
    assert fallback_report()
    assert left() is None
