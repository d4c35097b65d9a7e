"""LazyTensor and LazyTVImage: tensors of stock's exact types to whoever asks."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, default_convert
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import functional as F
from torchvision.transforms import v2
from torchvision.transforms.functional import normalize
from torchvision.utils import make_grid

import torch_sink
from image.cases import encoded, opener
from image.check import assert_same_bits
from torch_sink.image.handles.tensor import Handle, LazyTensor, LazyTVImage

pytestmark = pytest.mark.halved

KINDS: dict[str, Callable[[Any], Any]] = {
    "to_tensor": lambda image: F.to_tensor(image),
    "pil_to_tensor": lambda image: F.pil_to_tensor(image),
    "to_image": lambda image: v2.functional.to_image(image),
    "to_dtype": lambda image: v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True),
}
OPEN = opener(encoded(21, 17, 6, quality=92))


def stock_and_lazy(kind: str, function: Callable[[Any], Any]) -> tuple[Any, Any]:
    results = []
    for name, settings in (("PIL", {}), ("device", {"device": "cpu"})):
        with torch_sink.image_backend(name, **settings):
            tensor = KINDS[kind](OPEN())
            assert isinstance(tensor, Handle) == (name == "device")
            results.append(function(tensor))
    return results[0], results[1]


def assert_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        if isinstance(actual, Handle):
            assert isinstance(actual, type(expected))
            actual = actual.materialize()
        assert_same_bits(actual, expected)
        assert actual.requires_grad == expected.requires_grad
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual == expected


def changed(tensor: Any, function: Callable[[Any], Any]) -> Any:
    """The tensor after a call that works in place, and whether the call gave it back."""
    result = function(tensor)
    return tensor + 0, tensor.shape, result is tensor


def written(tensor: torch.Tensor) -> torch.Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def gradient(tensor: torch.Tensor) -> Any:
    tensor = tensor if tensor.is_floating_point() else tensor.float()
    same = tensor.requires_grad_()
    (tensor * 3).sum().backward()
    return same is tensor, tensor.grad, tensor.is_leaf


def learned(tensor: Any, function: Callable[[Any, torch.Tensor], Any]) -> Any:
    """The gradient of values that become a part of an image."""
    values = torch.linspace(0.1, 0.9, 60).view(3, 4, 5).requires_grad_()
    image = tensor if tensor.is_floating_point() else tensor.float()
    (function(image + 0, values * 1.0) ** 2).sum().backward()
    return values.grad


def box_of_its_own(tensor: Any, values: torch.Tensor) -> Any:
    tensor[:, 2:6, 3:8] = values
    return tensor


def copied_and_written(tensor: Any) -> Any:
    """A copy shares the memory of what it was made of."""
    copied = copy.copy(tensor)
    copied.mul_(2)
    tensor.add_(1)
    return type(copied).__name__, copied + 0, tensor + 0


def repeated(tensor: Any, call: Callable[[Any], Any]) -> Any:
    made = tensor + 0
    for _ in range(1500):
        made = call(made)
    return made.sum().item()


def named_as_ours(tensor: Any) -> Any:
    for name in ("make", "fields", "calls"):
        setattr(tensor, name, name)
    tensor.itself = [tensor]
    made = copy.deepcopy(tensor)
    return vars(made).get("make"), tensor.sum(), tensor.make, made + 0


def gray_copied(tensor: Any) -> Any:
    made = copy.deepcopy(v2.functional.rgb_to_grayscale(tensor, 3))
    try:
        made[0] = 0
    except RuntimeError as error:  # of memory that the channels share
        return str(error)
    return made.stride(), made + 0


# Calls of v2 that find nothing to do.
SAME: list[Callable[[Any], Any]] = [
    lambda t: v2.functional.resize(t, [*t.shape[1:]]),
    lambda t: v2.functional.to_dtype(t, t.dtype, scale=True),
    lambda t: v2.functional.convert_image_dtype(t, t.dtype),
    lambda t: v2.functional.grayscale_to_rgb(t),
    lambda t: v2.functional.erase(t, 1, 2, 3, 4, torch.zeros(3, 1, 1), inplace=True),
    lambda t: F.convert_image_dtype(t, t.dtype),
    lambda t: v2.functional.center_crop(t, [*t.shape[1:]]),
]


def unpickled(tensor: Any) -> Any:
    return pickle.loads(pickle.dumps(tensor))


def kept_attributes(tensor: Any, function: Callable[[Any], Any]) -> Any:
    tensor.path, tensor.boxes = "a.jpg", [1]
    made = function(tensor)
    boxes = getattr(made, "boxes", None)
    return getattr(made, "path", None), boxes, boxes is tensor.boxes


def named(tensor: Any) -> tuple[bool, Any]:
    return isinstance(tensor, tv_tensors.Image), tensor + 0


def assigned(tensor: Any) -> None:
    tensor[0, :2] = 1


def box_assigned(tensor: Any, value: Any) -> Any:
    tensor[:, 2:6, 3:8] = value
    tensor[..., -2:, -3:] = torch.full((1, 1, 1), 0.25)
    tensor[:, 30:, :] = torch.zeros(3, 1, 1)
    return tensor + 0


def contiguous_and_written(tensor: Any) -> Any:
    """One tensor where its memory is contiguous already, else two."""
    dense = tensor.contiguous()
    dense.mul_(2)
    return dense + 0, tensor + 0


def unsqueezed(tensor: Any) -> Any:
    tensor.unsqueeze_(0)
    return tensor.shape, tensor.ndim, tensor.dim(), tensor.size(), len(tensor)


USES: dict[str, Callable[[Any], Any]] = {
    "metadata": lambda t: (t.shape, t.dtype, t.ndim, t.size(), t.size(1), t.dim(), len(t), t.numel(), t.device, t.is_cuda),
    "more metadata": lambda t: (t.is_floating_point(), t.requires_grad, t.is_leaf, t.grad_fn, t.element_size(), t.layout),
    "strides": lambda t: (t.stride(), t.is_contiguous(), t.storage_offset()),
    "arithmetic": lambda t: [t + 1, 2 * t, t - t, t / 2, t.float() ** 2, -t.float(), 1 - t],
    "comparison": lambda t: [t > 0, t == t, t.eq(t).all(), torch.equal(t, t), torch.allclose(t.float(), t.float())],
    "indexing": lambda t: [t[0], t[..., 1:3], t[:, None], t[torch.tensor([0, 2])], t[t > 100]],
    "unpacking": lambda t: [*t],
    "reductions": lambda t: [t.float().mean(), t.sum((1, 2)), t.max().item(), t.float().std().item(), t.argmax()],
    "views": lambda t: [t.permute(1, 2, 0), t.flatten(), t.unsqueeze(0), t.contiguous().view(-1), t.mT, t.reshape(-1, 3), t.chunk(3)],
    "conversions": lambda t: [t.float(), t.half(), t.to(torch.int64), t.double(), t.to("cpu"), t.cpu(), t.type(torch.int32)],
    "copies": lambda t: [t.clone(), t.detach(), t.contiguous(), copy.copy(t), copy.deepcopy(t)],
    "copied, then written": copied_and_written,
    "again and again": lambda t: [repeated(t, call) for call in (*SAME[:-1], copy.copy, torch.Tensor.detach)],
    "attributes named as ours": lambda t: named_as_ours(t),
    "a deep copy of a gray image, written": lambda t: gray_copied(t),
    "what changes nothing": lambda t: [
        [made is t, setattr(made, f"of_{at}", 1), hasattr(t, f"of_{at}"), made.mul_(2) + 0, t + 0]
        for at, call in enumerate(SAME) for made in [call(t)]
    ],
    "attributes": lambda t: [kept_attributes(t, each) for each in (copy.copy, copy.deepcopy, unpickled, torch.clone)],
    "numpy": lambda t: [t.numpy(), np.asarray(t), t.tolist()],
    "dlpack": lambda t: torch.from_dlpack(t.clone()),
    "cat": lambda t: [torch.cat([t, t]), torch.stack([t, t], 1), torch.hstack([t, t + 1])],
    "convolution": lambda t: torch.nn.functional.conv2d(t.float()[None], torch.ones(2, 3, 3, 3)),
    "module": lambda t: torch.nn.AvgPool2d(2)(t.float()),
    "out": lambda t: torch.add(t, t, out=torch.empty(t.shape, dtype=t.dtype)),
    "vmap": lambda t: torch.vmap(lambda row: row * 2)(t),
    "where": lambda t: torch.where(t > 3, t, torch.zeros_like(t)),
    "like": lambda t: [torch.zeros_like(t), torch.full_like(t, 3), t.new_zeros(2), t.new_tensor([1])],
    "in place": lambda t: changed(t, lambda u: u.mul_(2)),
    "assignment": lambda t: changed(t, assigned),
    "a box assigned": lambda t: [box_assigned(t, torch.full((3, 4, 5), 7.25)), box_assigned(t, torch.full((3, 1, 1), 0.5))],
    "a box assigned, one value": lambda t: box_assigned(t, 3),
    "copied into": lambda t: changed(t, lambda u: u.copy_(torch.ones(()))),
    "zeroed": lambda t: changed(t, lambda u: u.zero_()),
    "reshaped in place": unsqueezed,
    "gradient": gradient,
    "gradient of what is written into it": lambda t: [
        learned(t, lambda u, value: F.erase(u, 1, 2, 4, 5, value)),
        learned(t, lambda u, value: F.erase(u, 1, 2, 4, 5, value[:, :1, :1])),
        learned(t, lambda u, value: v2.functional.erase(u, 1, 2, 4, 5, value)),
        learned(t, box_of_its_own),
        learned(t, lambda u, value: F.normalize(u, value[:, 0, 0], [0.5])),
        learned(t, lambda u, value: v2.functional.normalize(u, [0.5], value[:, 1, 1])),
        learned(t, lambda u, value: v2.functional.elastic(u, value.mean().expand(1, *u.shape[1:], 2))),
    ],
    "parameter": lambda t: torch.nn.Parameter(t.float() + 0),
    "parameter of itself": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "contiguous, then written": lambda t: [t.contiguous(), changed(t, lambda u: u.mul_(2)), t.contiguous().mul_(2), t + 0],
    "contiguous and written": contiguous_and_written,
    "contiguous already": lambda t: [u.contiguous() is u for u in (t, t.float(), t.flip(1), F.crop(t, 2, 3, 4, 5), t.contiguous(), F.pad(t.contiguous(), 1))],
    "contiguous in another format": lambda t: t[None].contiguous(memory_format=torch.channels_last),
    "saved": written,
    "pickled": lambda t: pickle.loads(pickle.dumps(t)) + 0,
    "grid": lambda t: make_grid([t.float(), t.float()]),
    "to Pillow": lambda t: v1.ToPILImage()(t).tobytes(),
    "default_convert": lambda t: default_convert({"image": t})["image"] + 0,
    "as_subclass": lambda t: t.as_subclass(torch.Tensor),
    "pure": lambda t: v2.ToPureTensor()(t),
    "string": lambda t: repr(t.clone()),
    "hash": lambda t: hash(t) == hash(t),
    "bool": lambda t: bool(t.float().mean() > -1),
    "isinstance": lambda t: (isinstance(t, torch.Tensor), isinstance(t, tv_tensors.Image), torch.is_tensor(t)),
    "wrapped": lambda t: tv_tensors.Image(t),
    "blur": lambda t: F.gaussian_blur(t, 3),
    "rotate": lambda t: F.rotate(t, 20.0),
    "resize": lambda t: F.resize(t, [7, 8], antialias=True),
    "erase": lambda t: F.erase(t, 1, 2, 4, 5, torch.zeros(3, 1, 1)),
    "jitter": lambda t: F.adjust_contrast(t, 1.5),
    "five crop": lambda t: F.five_crop(t, [4, 4]),
    "v2 blur": lambda t: v2.functional.gaussian_blur(t, 3),
    "v2 perspective": lambda t: v2.functional.perspective(t, [[0, 0], [20, 0], [20, 16], [0, 16]], [[1, 1], [19, 2], [18, 15], [0, 16]]),
    "v2 normalize": lambda t: v2.functional.normalize(v2.functional.to_dtype(t, torch.float32), [1.0], [2.0]),
    "v2 dimensions": lambda t: (v2.functional.get_size(t), v2.functional.get_num_channels(t), F.get_dimensions(t)),
    "float crop outside": lambda t: F.crop(t.float(), -2, -3, 9, 30),
    "crop": lambda t: F.crop(t, 2, 3, 4, 5),
    "pad": lambda t: [F.pad(t, [1, 2]), F.pad(t, 3, padding_mode="reflect"), F.pad(t, [1, 2, 3, 4], 7, "constant")],
    "return type": lambda t: returned(t),
    "types of v1": lambda t: [named(each) for each in (
        *(F.convert_image_dtype(t, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
        *(v2.functional.convert_image_dtype(t, dtype) for dtype in (torch.float16, torch.float32)),
        *(F.rgb_to_grayscale(gray, count) for gray in (t, v2.functional.rgb_to_grayscale(t)) for count in (1, 3)),
        *(call(t) for call in (F.hflip, F.invert, F.autocontrast, lambda u: F.pad(u, 0), lambda u: F.rotate(u, 0))),
    )],
    "type as on another device": lambda t: t.type_as(torch.empty(0, device="meta")).device.type,
    "masks and numbers, flipped": lambda t: [(t > 0.5).flip(0, 1), t.long().flip((0, 2)), (t > 0.5).flip(1)],
    "erased by itself": lambda t: [F.erase(t, 0, 0, *t.shape[1:], t), F.erase(t, 0, 0, *t.shape[1:], t, inplace=True) is t],
}  # fmt: skip


def returned(tensor: torch.Tensor) -> Any:
    with tv_tensors.set_return_type("TVTensor"):
        stacks = torch.stack([tensor, tensor]), default_collate([tensor]), torch.stack([tensor, tensor])[0]
        return tensor + 1, tensor.clone(), tensor[None], stacks


@pytest.mark.parametrize("kind", ["to_tensor", "pil_to_tensor", "to_image", "to_dtype"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.sampled(120)
def test_uses_give_what_stock_gives(kind: str, use: str) -> None:
    stock, lazy = stock_and_lazy(kind, USES[use])
    assert_same(lazy, stock)


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "normalize uint8": ("pil_to_tensor", lambda t: F.normalize(t, [0.5], [0.5])),
    "normalize uint8 v2": ("to_image", lambda t: v2.functional.normalize(t, [0.5], [0.5])),
    "normalize, zero": ("to_tensor", lambda t: F.normalize(t, [0.5], [0.0])),
    "normalize, four": ("to_tensor", lambda t: F.normalize(t, [0.5] * 4, [0.5] * 4)),
    "pad, mirrored too far": ("to_tensor", lambda t: F.pad(t, 40, padding_mode="reflect")),
    "pad, unknown mode": ("to_tensor", lambda t: F.pad(t, 4, padding_mode="no mode")),
    "to_tensor twice": ("to_tensor", lambda t: F.to_tensor(t)),
    "index": ("to_tensor", lambda t: t[7]),
    "shapes": ("to_tensor", lambda t: t + torch.zeros(5)),
    "missing": ("to_tensor", lambda t: t.no_such_thing),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_come_from_the_same_call(name: str) -> None:
    kind, call = REFUSED[name]

    def error(tensor: Any) -> tuple[type, str]:
        with pytest.raises(Exception) as caught:  # noqa: PT011  which one is what is compared
            call(tensor)
        return type(caught.value), str(caught.value)

    stock, lazy = stock_and_lazy(kind, error)
    assert lazy == stock


@pytest.mark.parametrize("kind", ["to_tensor", "to_dtype"])
def test_normalize_in_place_changes_the_handle(kind: str) -> None:
    def in_place(tensor: Any) -> Any:
        result = F.normalize(tensor, [0.5], [0.25], inplace=True)
        assert (result is tensor) != isinstance(tensor, tv_tensors.Image)
        return tensor.clone()

    stock, lazy = stock_and_lazy(kind, in_place)
    assert_same(lazy, stock)


def test_a_handle_keeps_what_it_was_before_a_later_call() -> None:
    def before_and_after(tensor: Any) -> Any:
        kept = F.hflip(tensor)
        tensor.mul_(0)
        return kept + 0, F.hflip(tensor) + 0

    stock, lazy = stock_and_lazy("to_tensor", before_and_after)
    assert_same(lazy, stock)


def test_recorded_calls_answer_without_values() -> None:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        image = OPEN()
        tensor = normalize(F.hflip(F.to_tensor(image)), (0.5,), (0.5,))
        assert type(tensor) is LazyTensor
        assert (tensor.shape, tensor.dtype, tensor.ndim, len(tensor)) == ((3, 17, 21), torch.float32, 3, 3)
        assert tensor.is_recording
        tv = v2.functional.to_image(image)
        assert type(tv) is LazyTVImage
        assert type(v2.ToPureTensor()(tv)) is LazyTensor
        assert type(v2.functional.to_dtype(tv, torch.float32, scale=True)) is LazyTVImage
        with pytest.raises(torch_sink.UnsupportedOperation, match="sum"):
            tensor.sum()


def test_boxes_and_masks_pass_through_stock_code() -> None:
    pipeline = v2.Compose([v2.RandomResizedCrop(9), v2.RandomHorizontalFlip(0.5), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])  # fmt: skip

    def sample(image: Any) -> dict[str, Any]:
        return {
            "image": image,
            "boxes": tv_tensors.BoundingBoxes([[1, 2, 9, 10]], format="XYXY", canvas_size=(17, 21)),
            "mask": tv_tensors.Mask(torch.arange(17 * 21).reshape(1, 17, 21)),
            "label": 3,
        }

    results = []
    for name, settings in (("PIL", {}), ("device", {"device": "cpu"})):
        with torch_sink.image_backend(name, **settings):
            torch.manual_seed(11)
            results.append([pipeline(sample(OPEN())) for _ in range(6)])
    for lazy, stock in zip(results[1], results[0], strict=True):
        assert lazy["image"].is_recording
        assert_same([*lazy.values()], [*stock.values()])
