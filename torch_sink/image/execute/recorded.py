"""What a lazy batch consists of, and what it can be asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_sink.damage.cause import BrokenFile
from torch_sink.image.core.ops import Op
from torch_sink.image.execute.packed import Packed
from torch_sink.image.execute.planned import Planned, plan_batch


class Recorded(NamedTuple):
    """A batch that is not computed yet.

    Attributes:
        packed: the sources, and the calls recorded on each image.
        shape: of the batch, [N, C, H, W].
        dtype: of the batch.
        destination: device that the backend was set to, as a string; nothing can be executed for "meta".
        interpreted: the kernels run on the CPU under Triton's interpreter.
        mixes: calls recorded on the whole batch, `MixUp` and `CutMix`; they run after every image is made.
        planned: how kernels make it; None where none are expected to.
    """

    packed: Packed
    shape: tuple[int, ...]
    dtype: torch.dtype
    destination: str = "cpu"
    interpreted: bool = False
    mixes: tuple[Op, ...] = ()
    planned: Planned | None = None

    def plan(self) -> Planned:
        """How kernels make it, found now where nobody did before."""
        return self.planned or self.plan_again()

    def plan_again(self, only: Sequence[int] | None = None) -> Planned:
        """How kernels make it, or some images of it, each in its row."""
        sources, entries = self.packed.sources(), self.packed.entry_of_image.tolist()
        return plan_batch([sources[at] for at in entries], self.packed.calls(), entries, only)


class Wanted(NamedTuple):
    """What is asked for.

    Attributes:
        device: where.
        dtype: of the result; None for the batch's own.
        memory_format: of a new result.
        out: written to instead of a new tensor, [N, C, H, W].
        on_decode_error: "raise", "skip" or "replace".
    """

    device: torch.device
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    out: torch.Tensor | None = None
    on_decode_error: str = "raise"

    def result(self, recorded: Recorded, count: int) -> torch.Tensor:
        """What `count` rows of a batch are written to."""
        if self.out is not None:
            return self.out[:count]
        shape, dtype = (count, *recorded.shape[1:]), self.dtype or recorded.dtype
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=self.memory_format)


class Made(NamedTuple):
    """What became of it.

    Attributes:
        tensor: the result.
        rows: the images that its rows show; None where they are those of the batch, in order.
        broken_files: those whose images were skipped or replaced.
    """

    tensor: torch.Tensor
    rows: list[int] | None
    broken_files: tuple[BrokenFile, ...]
