"""What programs do to images with tensors' own methods, as `image.float() / 255` and `image[:, :224]`, records."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import opener
from image.check import assert_same_bits, device_in_use
from image.source_files import saved
from torch_sink.cli.photos import make_photo
from torch_sink.image.handles.tensor import HANDLES, Handle

pytestmark = pytest.mark.halved

PHOTO = make_photo(31, 23, 5)
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225])[:, None, None]
SOURCES: dict[str, Callable[[], torch.Tensor]] = {
    "uint8": lambda: F.pil_to_tensor(opener(saved(PHOTO, "JPEG"))()),
    "float32": lambda: F.to_tensor(opener(saved(PHOTO, "JPEG"))()),
    "uint8 image": lambda: v2.functional.to_image(opener(saved(PHOTO, "JPEG"))()),
    "float32 image": lambda: v2.functional.to_dtype(
        v2.functional.to_image(opener(saved(PHOTO, "JPEG"))()), torch.float32, True
    ),
    "gray": lambda: F.pil_to_tensor(Image.open(io.BytesIO(saved(PHOTO.convert("L"), "JPEG")))),
}
ALL, BYTES, FLOATS, GRAY = ("uint8", "float32", "uint8 image", "float32 image"), ("uint8", "uint8 image"), (
    "float32", "float32 image",
), ("gray",)  # fmt: skip

RECORDED: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "float() / 255": (ALL, lambda x: x.float() / 255),
    "/ 255": (ALL, lambda x: x / 255),
    "/ 255.0": (ALL, lambda x: x / 255.0),
    "/ 127.5 - 1": (ALL, lambda x: x / 127.5 - 1),
    "div": (ALL, lambda x: torch.div(x.div(3), 85)),
    "times a float": (ALL, lambda x: x * (1 / 255)),
    "a float times it": (ALL, lambda x: 0.5 * x),
    "minus a float": (ALL, lambda x: x - 0.5),
    "plus a float": (ALL, lambda x: 0.25 + x),
    "to": (ALL, lambda x: x.to(torch.float32)),
    "to, by name, without waiting": (ALL, lambda x: x.to(dtype=torch.float32, non_blocking=True)),
    "to half": (ALL, lambda x: x.to(torch.float16)),
    "half": (BYTES, lambda x: x.half()),
    "bfloat16": (BYTES, lambda x: x.bfloat16()),
    "in place": (BYTES, lambda x: x.float().div_(127.5).sub_(1)),
    "minus mean, by std": (FLOATS, lambda x: (x - MEAN) / STD),
    "bytes minus mean, by std": (BYTES, lambda x: (x.float() / 255 - MEAN) / STD),
    "minus mean, by std, in place": (("float32",), lambda x: x.sub_(MEAN).div_(STD)),
    "plus mean": (FLOATS, lambda x: x + MEAN),
    "one value": (FLOATS, lambda x: x - MEAN[:1]),
    "from 1": (FLOATS, lambda x: 1 - x),
    "from 1, twice": (FLOATS, lambda x: 1.0 - (0.5 - x)),
    "from 255": (BYTES, lambda x: 255 - x),
    "a box": (ALL, lambda x: x[:, 3:17, 2:30]),
    "a box, short": (ALL, lambda x: x[..., 3:17, -20:]),
    "a box of a box": (ALL, lambda x: x[:, 3:17][..., 2:9]),
    "the first channels": (ALL, lambda x: x[:3]),
    "everything": (ALL, lambda x: x[...]),
    "BGR": (ALL, lambda x: x[[2, 1, 0]]),
    "BGR, long": (ALL, lambda x: x[[2, 1, 0], :, :]),
    "BGR, short": (ALL, lambda x: x[[2, 0, 1], ...]),
    "flip": (ALL, lambda x: x.flip(-1)),
    "flip, a list": (ALL, lambda x: torch.flip(x, [1])),
    "flip, both": (ALL, lambda x: x.flip(1, 2)),
    "flip, by name": (ALL, lambda x: torch.flip(x, dims=(-2,))),
    "repeat": (GRAY, lambda x: x.repeat(3, 1, 1)),
    "repeat, a list": (GRAY, lambda x: x.repeat([3, 1, 1])),
    "expand": (GRAY, lambda x: x.expand(3, -1, -1)),
    "expand, sizes": (GRAY, lambda x: x.expand(3, *x.shape[1:])),
    "three times": (GRAY, lambda x: torch.cat([x, x, x])),
    "three times, by name": (GRAY, lambda x: torch.cat((x.float(),) * 3, dim=0)),
    "what was expanded, resized": (GRAY, lambda x: F.hflip((x / 255).expand(3, -1, -1))),
    "repeated floats": (GRAY, lambda x: (x.float() / 255).repeat(3, 1, 1) - MEAN),
    "what a call in place returned": (("float32 image",), lambda x: x.sub_(MEAN).div_(STD)),
    "from a tensor": (FLOATS, lambda x: MEAN - x),
    "minus an int": (BYTES, lambda x: x - 3),
    "from 254": (BYTES, lambda x: 254 - x),
    "times an int": (BYTES, lambda x: x * 2),
    "what was detached and written to": (FLOATS, lambda x: [x.detach().sub_(0.5), x]),
    "bytes in place": (BYTES, lambda x: operator.iadd(x, 1)),
    "channels the other way": (ALL, lambda x: x.flip(0)),
    "twice the same": (ALL, lambda x: torch.flip(x, [-3])),
    "type": (ALL, lambda x: x.type(torch.float32)),
    "rot90": (ALL, lambda x: torch.rot90(x, 1, [1, 2])),
    "rot90, back": (ALL, lambda x: x.rot90(1, (2, 1))),
    "rot90, negative": (ALL, lambda x: torch.rot90(x, -1, (-2, -1))),
    "clone": (ALL, lambda x: x.clone()),
    "a clone that is written to": (FLOATS, lambda x: [x.clone().mul_(2), x]),
    "detach": (ALL, lambda x: x.detach()),
    "a clone of a box": (ALL, lambda x: x[:, 3:9, 2:7].clone()),
    "a type by its name": (ALL, lambda x: x.type(torch.float32, non_blocking=True)),
    "type as": (ALL, lambda x: x.type_as(MEAN)),
    "rot90, not at all": (ALL, lambda x: x.rot90(4, (1, 2))),
    "rot90, twice": (ALL, lambda x: x.rot90(-2, (1, 2))),
    "a clone, contiguous": (ALL, lambda x: x.clone(memory_format=torch.contiguous_format)),
    "a clone by torch": (ALL, lambda x: torch.clone(x)),
    "a clone of what was expanded": (GRAY, lambda x: (x / 255).expand(3, -1, -1).clone()),
    "a clone of a clone": (FLOATS, lambda x: [copy := x.clone(), copy.clone().sub_(1), copy.add_(1), x.div_(2)]),
    "flip, all three": (ALL, lambda x: x.flip(0, 1, 2)),
    "transposed": (ALL, lambda x: x.transpose(1, 2)),
    "transposed, a flip behind": (ALL, lambda x: torch.transpose(x, -1, -2).flip(-1)),
    "permuted": (ALL, lambda x: x.permute(0, 2, 1)),
    "permuted, a list": (ALL, lambda x: torch.permute(x, (0, -1, -2))),
    "mT": (ALL, lambda x: x.mT),
    "swapped": (ALL, lambda x: x.swapaxes(2, 1)),
    "transposed and contiguous": (ALL, lambda x: x.mT.contiguous()),
}
IN_STOCK_CODE: dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]] = {
    "a mean that spreads": (GRAY, lambda x: x.float() - MEAN),
    "a mean of another type": (FLOATS, lambda x: x - MEAN.double()),
    "a mean that learns": (FLOATS, lambda x: (x - MEAN.clone().requires_grad_()).detach()),
    "a mean of another shape": (FLOATS, lambda x: x - MEAN[None]),
    "a mask, flipped with its channels": (ALL, lambda x: (x > 0.5).flip(0, 1)),
    "whole numbers, flipped with their channels": (BYTES, lambda x: x.long().flip((0, 2))),
    "a step": (ALL, lambda x: x[:, ::2]),
    "a channel": (ALL, lambda x: x[0]),
    "the first channel": (ALL, lambda x: x[:1]),
    "no rows": (ALL, lambda x: x[:, 5:5]),
    "two channels": (ALL, lambda x: x[[0, 1]]),
    "values": (ALL, lambda x: x[x > 0.5]),
    "an old type": (ALL, lambda x: x.type(torch.FloatTensor)),
    "turned with channels": (ALL, lambda x: torch.rot90(x)),
    "repeated rows": (GRAY, lambda x: x.repeat(3, 2, 1)),
    "repeated colors": (ALL, lambda x: x.repeat(3, 1, 1)),
    "three others": (GRAY, lambda x: torch.cat([x, F.hflip(x), x])),
    "four times": (GRAY, lambda x: torch.cat([x] * 4)),
    "three colors": (ALL, lambda x: torch.cat([x, x, x])),
    "a fourth dimension": (GRAY, lambda x: x.expand(2, 3, -1, -1)),
    "a part of a box that is written to": (FLOATS, lambda x: [x[:, 3:9].mul_(2), x]),
    "what was expanded and written to": (GRAY, lambda x: [spread := x.expand(3, -1, -1), x.fill_(3), spread]),
    "from a double": (FLOATS, lambda x: MEAN.double() - x),
    "channels last": (ALL, lambda x: x.permute(1, 2, 0)),
    "transposed with channels": (ALL, lambda x: x.transpose(0, 2)),
    "transposed and written to": (FLOATS, lambda x: [x.mT.mul_(2), x]),
    "a copy": (FLOATS, lambda x: x.to(torch.float32, copy=True)),
}
CASES = [
    pytest.param(kind, calls, name, id=f"{name}-{kind}")
    for calls in (RECORDED, IN_STOCK_CODE)
    for name, (kinds, _) in calls.items()
    for kind in kinds
]


def results(kind: str, call: Callable[[Any], Any]) -> list[Any]:
    image = SOURCES[kind]()
    made = call(image)
    return made if isinstance(made, list) else [made]


@pytest.mark.parametrize(("kind", "calls", "name"), CASES)
@pytest.mark.sampled(160)
def test_methods(kind: str, calls: dict[str, Any], name: str) -> None:
    call = calls[name][1]
    expected = results(kind, call)
    with torch_sink.image_backend("device", device="cpu"):
        made = results(kind, call)
        assert bool(torch_sink.fallback_report()) == (calls is IN_STOCK_CODE)
        assert all(type(ours) in HANDLES and ours.is_recording for ours in made) == (calls is RECORDED)
        for ours, stock in zip(made, expected, strict=True):
            assert ours.shape == stock.shape
            assert_same_bits(ours.materialize() if isinstance(ours, Handle) else ours, stock)


BATCHES = ["float() / 255", "/ 127.5 - 1", "minus mean, by std", "bytes minus mean, by std", "from 1, twice", "BGR"]
BATCHES += ["transposed, a flip behind", "rot90", "flip, all three", "a clone of what was expanded", "minus an int"]
BATCHES += ["a box of a box", "flip, both", "from 255", "to half", "repeated floats", "expand", "three times"]


def check_batch(kind: str, name: str) -> None:
    def batch() -> torch.Tensor:
        return default_collate(results(kind, RECORDED[name][1]) * 2)

    expected = batch().as_subclass(torch.Tensor)
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        assert_same_bits(batch().to(device_in_use()).cpu(), expected)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for name in BATCHES for kind in RECORDED[name][0]])
def test_batches(kind: str, name: str) -> None:
    check_batch(kind, name)
