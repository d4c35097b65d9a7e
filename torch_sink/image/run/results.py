"""What a batch can be asked for, and what becomes of it where files are damaged."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_sink.damage.report import BrokenFile
from torch_sink.errors import DecodeError
from torch_sink.image.program.program import Program


class Wanted(NamedTuple):
    """What is asked for."""

    device: torch.device  # where
    dtype: torch.dtype | None = None  # of the result; None for the batch's own
    memory_format: torch.memory_format = torch.contiguous_format  # of a new result
    out: torch.Tensor | None = None  # written to instead of a new tensor, [N, C, H, W]
    on_decode_error: str = "raise"  # "raise", "skip" or "replace"

    def dtype_of_result(self, program: Program) -> torch.dtype:
        """That of what is written to."""
        return self.out.dtype if self.out is not None else self.dtype or program.dtype

    def result(self, program: Program, count: int) -> torch.Tensor:
        """What `count` rows of a batch are written to."""
        if self.out is not None:
            return self.out[:count]
        shape, dtype = (count, *program.shape[1:]), self.dtype_of_result(program)
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=self.memory_format)


class Made(NamedTuple):
    """A batch that was made."""

    tensor: torch.Tensor  # the result
    rows: list[int] | None  # the images that its rows show; None where they are those of the batch, in order
    broken_files: tuple[BrokenFile, ...]  # those whose images were skipped or replaced


def survivors(
    errors: dict[int, DecodeError], count: int, mixes: int, policy: str
) -> tuple[list[int] | None, tuple[BrokenFile, ...]]:
    """The images that a result shows, in order, or None where it shows every image; and the files of the others.

    Args:
        errors: of the images that are damaged, in order.
        count: how many images there are.
        mixes: how often each image takes a part of the one before it, damage included.
        policy: "raise", "skip" a damaged image, or "replace" it by the next good one.

    Raises:
        DecodeError: that of the first image that is damaged, where the policy says so or none is good.
    """
    if not errors:
        return None, ()
    broken_files = tuple(BrokenFile(error.path, error.reason) for error in errors.values())
    for _ in range(mixes):
        errors = errors | {(row + 1) % count: error for row, error in errors.items()}
    first = min(errors)
    if policy == "raise" or len(errors) == count:
        error = errors[first]
        raise DecodeError(error.path, first, error.reason) from error
    good = [row for row in range(count) if row not in errors]
    if policy == "replace":
        return [next((row for row in good if row >= place), good[0]) for place in range(count)], broken_files
    return good, broken_files
