"""Views of a handle: what changes one of them in place changes the others, as in stock code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.check import assert_same_bits
from image.handles.test_lazy_tensor import KINDS, OPEN, stock_and_lazy

pytestmark = pytest.mark.halved


def copied(tensor: Any) -> torch.Tensor:
    return getattr(tensor, "materialize", tensor.clone)().clone()


def same_after(kind: str, function: Callable[[Any], list[torch.Tensor]]) -> None:
    stock, lazy = stock_and_lazy(kind, lambda image: list(map(copied, function(image))))
    for one, other in zip(lazy, stock, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("kind", ["to_tensor", "to_dtype"])
@pytest.mark.parametrize("written_first", [False, True])
def test_crops_share_memory_as_views_do(kind: str, written_first: bool) -> None:
    """What changes one crop in place changes the part of the others that overlaps, and the image itself."""
    functional = F if kind == "to_tensor" else v2.functional

    def crops() -> list[torch.Tensor]:
        image = KINDS[kind](OPEN())
        views = functional.ten_crop(image, [12, 14])
        if written_first:
            functional.normalize(image, [0.5] * 3, [0.25] * 3, inplace=True)
        functional.normalize(views[4], [0.5] * 3, [0.25] * 3, inplace=True)
        functional.erase(views[7], 2, 3, 4, 5, torch.zeros(3, 1, 1), inplace=True)
        return [image.clone(), *(view.clone() for view in views)]

    expected = crops()
    with torch_sink.image_backend("device", device="cpu"):
        made = crops()
    for one, other in zip(made, expected, strict=True):
        assert_same_bits(one, other)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "crop": lambda image: F.crop(image, 2, 3, 9, 8),
    "v2 crop": lambda image: v2.functional.crop(image, 2, 3, 9, 8),
    "center crop": lambda image: v1.CenterCrop(9)(image),
    "v2 center crop": lambda image: v2.CenterCrop(9)(image),
    "random crop": lambda image: v2.RandomCrop(9)(image),
    "crop of a crop": lambda image: F.crop(F.crop(image, 2, 3, 9, 8), 1, 0, 4, 5),
    "to image": lambda image: v2.functional.to_image(image),
    "tv_tensors.Image": lambda image: tv_tensors.Image(image),
    "wrap": lambda image: tv_tensors.wrap(image, like=tv_tensors.Image(torch.zeros(1, 1, 1))),
    "pure": lambda image: v2.ToPureTensor()(image),
    "as_subclass": lambda image: image.as_subclass(torch.Tensor),
    "contiguous": lambda image: image.contiguous(),
    "unchanged dtype": lambda image: v2.functional.to_dtype(image, image.dtype),
}
NO_VIEWS: dict[str, Callable[[Any], Any]] = {
    "crop beyond": lambda image: F.crop(image, -2, 3, 9, 8),
    "flip": lambda image: F.hflip(image),
    "contiguous crop": lambda image: F.crop(image, 2, 3, 9, 8).contiguous(),
    "turn": lambda image: v2.functional.rotate(image, 180),
}


@pytest.mark.parametrize("kind", ["to_tensor", "to_dtype"])
@pytest.mark.parametrize("name", [*VIEWS, *NO_VIEWS])
def test_what_changes_a_view_changes_the_image(kind: str, name: str) -> None:
    view_of = {**VIEWS, **NO_VIEWS}[name]

    def image_and_view(image: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        view, after = view_of(image), F.vflip(image)
        view.mul_(2)
        return [image, view, after]

    def changed_the_other_way(image: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        view = view_of(image)
        image.add_(1)
        return [image, view]

    same_after(kind, image_and_view)
    same_after(kind, changed_the_other_way)


def as_argument(whole: Any) -> Any:
    F.crop(whole, 2, 3, 9, 8).mul_(2)
    return whole


def in_a_generator(whole: Any) -> Any:
    def parts(whole: Any) -> Iterator[Any]:
        yield F.crop(whole, 2, 3, 9, 8).mul_(2)
        yield whole

    return list(parts(whole))[1]


def in_a_closure(whole: Any) -> Any:
    def change() -> Any:
        F.crop(whole, 2, 3, 9, 8).mul_(2)
        return whole

    return change()


def in_a_tuple(*held: Any) -> Any:
    F.crop(held[0], 2, 3, 9, 8).mul_(2)
    return held[0]


@pytest.mark.parametrize("holder", [as_argument, in_a_generator, in_a_closure, in_a_tuple])
def test_a_change_of_a_part_is_seen_by_whoever_holds_the_whole(holder: Callable[[Any], Any]) -> None:
    """Python 3.14 lends references to functions and operators, and does not count them."""
    same_after("to_tensor", lambda image: [holder(F.vflip(image))])
    same_after("to_tensor", lambda image: [holder(image), image])


def test_a_part_of_what_nobody_holds_is_changed_by_a_recorded_call() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        image = KINDS["to_tensor"](OPEN())
        part = F.crop(F.vflip(image), 2, 3, 9, 8)
        part.mul_(2)
        assert part.is_recording
        held = F.vflip(image)
        other = F.crop(held, 2, 3, 9, 8)
        other.mul_(2)
        assert not hasattr(other, "is_recording"), "its values were made, and those of the whole"


@pytest.mark.parametrize("kind", ["to_tensor", "to_dtype"])
def test_views_of_an_image_that_nobody_holds_share_its_memory(kind: str) -> None:
    def overlapping(image: Any) -> list[torch.Tensor]:
        whole = F.vflip(image)
        first, second = F.crop(whole, 0, 0, 9, 9), F.crop(whole, 4, 4, 9, 9)
        del whole
        first.zero_()
        return [first, second]

    same_after(kind, overlapping)


IN_PLACE = (v1.Normalize([0.5] * 3, [0.25] * 3, inplace=True), v1.RandomErasing(1.0, inplace=True))


@pytest.mark.parametrize("moves", [[], [v1.CenterCrop(9)], [v1.CenterCrop(15), v1.RandomCrop(9)]], ids=len)
def test_what_nobody_else_sees_changes_in_place_without_pixels(moves: list[Any]) -> None:
    pipeline = v1.Compose([v1.ToTensor(), *moves, *IN_PLACE])
    torch.manual_seed(5)
    expected = pipeline(OPEN())
    torch.manual_seed(5)
    with torch_sink.image_backend("device", device="cpu", strict=True):
        made = pipeline(OPEN())
        assert made.is_recording
        assert_same_bits(made.materialize(), expected)


@pytest.mark.parametrize("holds", ["the image", "another part", "an expanded image"])
def test_what_somebody_else_sees_is_made_first(holds: str) -> None:
    def run() -> list[Any]:
        image: Any = v1.ToTensor()(OPEN())
        if holds == "an expanded image":
            image = F.rgb_to_grayscale(image, 3)
        parts = [F.crop(image, 1, 1, 8, 8)]
        parts += [F.crop(image, 3, 2, 8, 8)] if holds == "another part" else [image] if holds == "the image" else []
        del image
        IN_PLACE[0](parts[0])
        return parts

    expected: Any
    try:
        expected = run()
    except RuntimeError as error:
        expected = error
    with torch_sink.image_backend("device", device="cpu"):
        if isinstance(expected, RuntimeError):
            with pytest.raises(RuntimeError, match=re.escape(str(expected)[:40])):
                run()
            return
        for made, stock in zip(run(), expected, strict=True):
            assert_same_bits(copied(made), stock.clone())
        assert torch_sink.fallback_report()


def _argument(image: Any) -> list[Any]:
    part = F.crop(image, 1, 1, 8, 8)
    IN_PLACE[0](part)
    return [part, image]


def _several(*images: Any) -> list[Any]:
    part = F.crop(images[0], 1, 1, 8, 8)
    IN_PLACE[0](part)
    return [part, *images]


def _closure(image: Any) -> list[Any]:
    def look() -> Any:
        return image

    part = F.crop(look(), 1, 1, 8, 8)
    IN_PLACE[0](part)
    return [part, look()]


def _generator(image: Any) -> list[Any]:
    def parts(held: Any) -> Iterator[Any]:
        yield F.crop(held, 1, 1, 8, 8)
        yield held

    made = parts(image)
    del image
    part = next(made)
    IN_PLACE[0](part)
    return [part, *made]


HOLDERS: dict[str, Callable[[], list[Any]]] = {
    "an argument": lambda: _argument(v1.ToTensor()(OPEN())),
    "an argument of two functions": lambda: (lambda image: _argument(image))(v1.ToTensor()(OPEN())),
    "several arguments": lambda: _several(v1.ToTensor()(OPEN())),
    "a closure": lambda: _closure(v1.ToTensor()(OPEN())),
    "a generator": lambda: _generator(v1.ToTensor()(OPEN())),
    "a loop": lambda: [one for image in [v1.ToTensor()(OPEN())] for one in _argument(image)],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_the_image_sees_a_change_of_its_part(holder: str) -> None:
    """However Python counts a reference, and when its interpreter has specialized the code, too."""
    expected = HOLDERS[holder]()
    with torch_sink.image_backend("device", device="cpu"):
        for _ in range(20):
            for made, stock in zip(HOLDERS[holder](), expected, strict=True):
                assert_same_bits(copied(made), stock.clone())
        assert torch_sink.fallback_report()
