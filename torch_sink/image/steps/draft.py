"""Draft: what a container hands from transform to transform, and turns into a handle at the end."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from PIL import Image
from torch.nn.modules.module import _has_any_global_hook

from torch_sink.image.core.fallback import count_dispatch_modes, count_function_modes, is_executing
from torch_sink.image.core.ops import InPlaceOp, Op, recorder
from torch_sink.image.decode.source import made_here
from torch_sink.image.handles.array import ArrayImage, agrees, pixels_of
from torch_sink.image.handles.image import RECORDED_MODES, LazyImage
from torch_sink.image.handles.tensor import LazyTensor, LazyTVImage, is_expanded
from torch_sink.image.operations.crops import check_size

Shape = tuple[int, int, int]


class Draft:
    """A Pillow image, and the calls recorded on it. Recorders take a draft as they take a handle.

    Attributes:
        origin: the image before these calls: a handle or an ordinary image.
        kind: type of the handle that the draft becomes.
        ops: the calls.
        lazy_shape: (channels, height, width) after the calls.
        lazy_dtype: dtype of the values after the calls.
        beside: masks, boxes and points of the sample, as they are before a v2 transform.
        moves: parameters with which a v2 transform also transforms these; None where it leaves them as they are.
    """

    __slots__ = ("beside", "kind", "lazy_dtype", "lazy_shape", "moves", "ops", "origin")
    beside: list[Any]
    moves: dict[str, Any] | None

    def __init__(self, origin: Any, ops: tuple[Op, ...], shape: Shape, kind: Any, dtype: torch.dtype) -> None:
        self.origin, self.ops, self.lazy_shape, self.kind, self.lazy_dtype = origin, ops, shape, kind, dtype

    @property
    def lazy_ops(self) -> tuple[Op, ...]:
        """The calls on the origin, then those of the draft."""
        return self.origin.lazy_ops + self.ops if type(self.origin) is LazyImage else self.ops

    @property
    def size(self) -> tuple[int, int]:
        return self.lazy_shape[2], self.lazy_shape[1]

    @property
    def width(self) -> int:
        return self.lazy_shape[2]

    @property
    def height(self) -> int:
        return self.lazy_shape[1]

    @property
    def mode(self) -> str:
        """The mode of the Pillow image."""
        return "RGB" if self.lazy_shape[0] == 3 else "L"

    def record(
        self, *ops: Op, size: tuple[int, int] | None = None, mode: str | None = None, shape: Shape | None = None,
        dtype: torch.dtype | None = None, is_view: bool = False,
    ) -> Draft:  # fmt: skip
        """A new draft with more calls; arguments as for handles. A draft shares no memory, so `is_view` is unused."""
        if shape is None:
            channels, height, width = self.lazy_shape
            width, height = size or (width, height)
            shape = (3 if mode == "RGB" else 1) if mode else channels, height, width
        return Draft(self.origin, self.ops + ops, shape, self.kind, dtype or self.lazy_dtype)

    def copy(self) -> Draft:
        """A draft that is another image with the same pixels."""
        if self.ops:
            return self
        is_lazy = type(self.origin) is LazyImage
        copied = self.origin.copy() if is_lazy else LazyImage(pixels_of(self.origin), (), self.size, self.mode)
        return Draft(copied, (), self.lazy_shape, self.kind, self.lazy_dtype)

    def crop(self, box: tuple[int, int, int, int]) -> Draft:
        """Crops a Pillow image at (left, upper, right, lower)."""
        left, upper, right, lower = box
        shape = self.lazy_shape[0], lower - upper, right - left
        check_size(self.size, box)
        return Draft(self.origin, (*self.ops, Op("pil.crop", (box,))), shape, self.kind, self.lazy_dtype)

    # `Image.rotate` calls these.
    transform = recorder("Image.transform")
    transpose = recorder("Image.transpose")

    def as_tensor(self, op: Op, dtype: torch.dtype, *, as_tv_image: bool = False) -> Draft:
        """The tensor [C, H, W] that a conversion of a Pillow image makes."""
        kind = LazyTVImage if as_tv_image else LazyTensor
        return Draft(self.origin, (*self.ops, op), self.lazy_shape, kind, dtype)

    def as_pure_tensor(self) -> Draft:
        return Draft(self.origin, self.ops, self.lazy_shape, LazyTensor, self.lazy_dtype)

    @property
    def changes_in_place(self) -> bool:
        """Whether a call in place can be recorded."""
        return not is_expanded(self.ops)

    def record_in_place(self, op: InPlaceOp) -> Draft:
        return self.record(op)

    def as_image(self) -> Draft:
        """The Pillow image of a uint8 tensor that was made from one."""
        return Draft(self.origin, (*self.ops, Op("to_pil_image")), self.lazy_shape, LazyImage, torch.uint8)

    def handle(self) -> Any:
        """The handle of this draft; `origin` itself where nothing was recorded."""
        origin, ops = self.origin, self.ops
        if self.kind is LazyImage:
            if not ops:
                return origin
            if type(origin) is LazyImage:
                return origin.record(*ops, size=self.size, mode=self.mode)
            return LazyImage(pixels_of(origin), ops, self.size, self.mode)
        if type(origin) is not LazyImage:
            return self.kind(pixels_of(origin), ops, self.lazy_shape, self.lazy_dtype)
        source, before = origin.recipe()
        ops = before + ops
        if "lazy_has_views" in vars(origin):  # a batch would hold their decoded files
            source, ops = made_here(source, ops)
        made = self.kind(source, ops, self.lazy_shape, self.lazy_dtype)
        vars(origin)["lazy_first"] = weakref.ref(made), threading.get_ident()  # the first view, for `LazyImage.recipe`
        return made


def draft_of(image: Any) -> Any:
    """A draft of an image; the image itself where its transforms have to be called.

    They have to where no handle can stand for the image, where hooks or modes change what calls of torch do, and where
    the image has a transparent color, which calls convert, or raise an error, at once.
    """
    kind = type(image)
    if kind not in (ArrayImage, Image.Image) and (kind is not LazyImage or not image.is_recording):
        return image
    width, height = image.size
    if image.mode not in RECORDED_MODES or not width or not height or is_executing():
        return image
    if "transparency" in vars(image).get("info", ()) or not (kind is LazyImage or agrees(image)):
        return image
    is_usual = torch.get_default_dtype() is torch.float32 and not _has_any_global_hook()
    if not is_usual or count_function_modes() or count_dispatch_modes():
        return image
    return Draft(image, (), (3 if image.mode == "RGB" else 1, height, width), LazyImage, torch.uint8)


def finished(image: Any) -> Any:
    """The handle of a draft; returns anything else unchanged."""
    return image.handle() if type(image) is Draft else image
