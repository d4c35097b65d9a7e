"""`Recording`: an image that does not exist yet, as a value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torch_sink.image.core.ops import PIXELS, InPlaceOp, Op


class Recording(NamedTuple):
    """Where an image begins, and the calls recorded on it. Each call makes another recording.

    What programs hold, a `LazyImage`, a `LazyTensor` or a `LazyTVImage`, holds one of these.

    Attributes:
        source: a `Source` of `image/decode`, where the pixels come from.
        calls: recorded so far, in order.
        shape: (channels, height, width) of the tensor, or of the one that a Pillow image would become.
        dtype: of the tensor; torch.uint8 for a Pillow image.
        mode: of the Pillow image, "L", "RGB" or "P"; None for a tensor.
    """

    source: Any
    calls: tuple[Op, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8
    mode: str | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels, as Pillow gives it."""
        return self.shape[2], self.shape[1]

    def record(
        self, op: Op, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, mode: str | None = None,
        before: tuple[Op, ...] = (),
    ) -> Any:  # fmt: skip
        """The recording with one more call, and what the call changes of the shape, the dtype and the mode.

        `before` are calls that come before it. `NotImplemented` on a mask or on whole numbers, unless the call moves
        them or maps each to another value.
        """
        source, calls, old_shape, old_dtype, old_mode = self
        if old_dtype not in PIXELS and not (op.operation.is_value or op.operation.moves):
            return NotImplemented
        calls = (*calls, *before, op)
        return _new(Recording, (source, calls, shape or old_shape, dtype or old_dtype, mode or old_mode))

    def copied(self) -> Recording:
        """An equal one, for a call that makes a copy of the image."""
        return _new(Recording, self)

    def as_tensor(self, op: Op, dtype: torch.dtype) -> Recording:
        """The tensor that a conversion makes of a Pillow image."""
        return _new(Recording, (self.source, (*self.calls, op), self.shape, dtype, None))

    def as_image(self, op: Op) -> Recording:
        """The Pillow image that a conversion makes of a tensor of bytes."""
        return Recording(self.source, (*self.calls, op), self.shape, mode="RGB" if self.shape[0] == 3 else "L")

    def of_pixels(self, source: Any, calls: tuple[Op, ...] = ()) -> Recording:
        """The same image made of another source, by the calls that are left."""
        return Recording(source, calls, self.shape, self.dtype, self.mode)


_new: Any = tuple.__new__  # without the call of Python that a class costs, in what every transform calls


def record_maybe_in_place(image: Recording, in_place: bool, name: str, args: tuple[Any, ...]) -> Any:
    """Records a call that gives a new tensor, or changes the tensor itself."""
    return image.record((InPlaceOp if in_place else Op)(name, args))
