"""What a lazy batch consists of, and what it can be asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_sink.damage.report import BrokenFile
from torch_sink.errors import DecodeError
from torch_sink.image.core.ops import Op
from torch_sink.image.core.state import default_device
from torch_sink.image.decode.providers import candidates
from torch_sink.image.decode.source import FinishedSource
from torch_sink.image.execute.packed import Packed
from torch_sink.image.execute.planned import Order, Planned, plan_batch
from torch_sink.image.plan.build import Plan


class Recorded(NamedTuple):
    """A batch that is not computed yet.

    Attributes:
        packed: the sources, and the calls recorded on each image.
        shape: of the batch, [N, C, H, W].
        dtype: of the batch.
        order: how kernels are launched for it.
        destination: device that the backend was set to, as a string; nothing can be executed for "meta".
        interpreted: the kernels run on the CPU under Triton's interpreter.
        mixes: calls recorded on the whole batch, `MixUp` and `CutMix`; they run after every image is made.
    """

    packed: Packed
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: Order
    destination: str = "cpu"
    interpreted: bool = False
    mixes: tuple[Op, ...] = ()

    @property
    def planned(self) -> Planned:
        """How kernels make it."""
        return self.packed.contents.planned

    def plan_again(self, only: Sequence[int]) -> Planned:
        """How kernels make some images of it, each in its row, of pixels that are there."""
        sources, entries = self.packed.sources(), self.packed.entry_of_image.tolist()
        return plan_batch([sources[at] for at in entries], self.packed.calls(), entries, only=only)


class Wanted(NamedTuple):
    """What is asked for."""

    device: torch.device  # where
    dtype: torch.dtype | None = None  # of the result; None for the batch's own
    memory_format: torch.memory_format = torch.contiguous_format  # of a new result
    out: torch.Tensor | None = None  # written to instead of a new tensor, [N, C, H, W]
    on_decode_error: str = "raise"  # "raise", "skip" or "replace"

    def dtype_of_result(self, recorded: Recorded) -> torch.dtype:
        """That of what is written to."""
        return self.out.dtype if self.out is not None else self.dtype or recorded.dtype

    def result(self, recorded: Recorded, count: int) -> torch.Tensor:
        """What `count` rows of a batch are written to."""
        if self.out is not None:
            return self.out[:count]
        shape, dtype = (count, *recorded.shape[1:]), self.dtype_of_result(recorded)
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=self.memory_format)


class Made(NamedTuple):
    """What became of it."""

    tensor: torch.Tensor  # the result
    rows: list[int] | None  # the images that its rows show; None where they are those of the batch, in order
    broken_files: tuple[BrokenFile, ...]  # those whose images were skipped or replaced


class BatchPlan(NamedTuple):
    """How a batch would run: which provider decodes how many images, and the launches. `str()` is readable."""

    decode: Counter[str]  # {provider: images}
    plan: Plan | None  # the launches; None for a batch of finished tensors

    def __str__(self) -> str:
        line = f"decode: {', '.join(f'{count} by {name}' for name, count in self.decode.items())}"
        return line if self.plan is None else f"{line}\n{self.plan}"

    def __repr__(self) -> str:
        return str(self)


def describe(recorded: Recorded) -> BatchPlan:
    """The plan of a batch, where it would run; "meta" stands for the default device."""
    device = torch.device(recorded.destination)
    device = torch.device(default_device()) if device.type == "meta" else device
    decode: Counter[str] = Counter()
    sources = recorded.packed.sources()
    for at in recorded.packed.entry_of_image.tolist():
        source = sources[at]
        if isinstance(source, FinishedSource):
            decode["nobody (finished tensors)"] += 1
        else:
            decode[next(provider.name for provider in candidates(device) if provider.takes(source))] += 1
    return BatchPlan(decode, recorded.planned.plan)


class Survivors(NamedTuple):
    """The images that a result shows."""

    rows: list[int] | None  # which, in order; None where it shows every image at its own place
    broken_files: tuple[BrokenFile, ...] = ()  # those of the others


def survivors(errors: dict[int, DecodeError], count: int, mixes: int, policy: str) -> Survivors:
    """What is left of a batch.

    Args:
        errors: of the images that are damaged, in order.
        count: how many images there are.
        mixes: how often each image takes a part of the one before it, damage included.
        policy: "raise", "skip" a damaged image, or "replace" it by the next good one.

    Raises:
        DecodeError: that of the first image that is damaged, where the policy says so or none is good.
    """
    if not errors:
        return Survivors(None)
    broken_files = tuple(BrokenFile(error.path, error.reason) for error in errors.values())
    for _ in range(mixes):
        errors = errors | {(row + 1) % count: error for row, error in errors.items()}
    first = min(errors)
    if policy == "raise" or len(errors) == count:
        error = errors[first]
        raise DecodeError(error.path, first, error.reason) from error
    good = [row for row in range(count) if row not in errors]
    if policy == "replace":
        following = [next((row for row in good if row >= place), good[0]) for place in range(count)]
        return Survivors(following, broken_files)
    return Survivors(good, broken_files)
