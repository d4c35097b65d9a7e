"""Slots, in which ready batches wait: lazy leaves are executed on the way, images get their dtype and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_sink.common.arguments import check_choice, named_device
from torch_sink.common.containers import Flat, agree_on_positions, flatten, is_flat, is_lazy, select_samples
from torch_sink.common.pool import Pool
from torch_sink.damage.report import POLICIES, DecodeReport, Policy, decode_errors


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device to deliver to, else the current accelerator, else the CPU; raises ValueError if it is not there."""
    if device is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
    wanted = named_device(device)
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(wanted)!r} is not supported by SinkLoader: give 'cpu' or 'cuda'")
    if wanted.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() or (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={str(wanted)!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices. "
            "Give device='cpu', or None for what this machine has."
        )
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)


@dataclass(frozen=True)
class ImageFormat:
    """Device, dtype and layout of image batches, and what becomes of samples that cannot be decoded."""

    device: torch.device
    dtype: torch.dtype | None = None  # None keeps what the pipeline says
    memory_format: torch.memory_format = torch.contiguous_format
    on_decode_error: Policy | None = None  # leaves it to the image backend

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {self.dtype!r}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype={self.dtype} is not allowed: image batches are made in a floating-point dtype")
        check_choice("memory_format", self.memory_format, (torch.contiguous_format, torch.channels_last))
        check_choice("on_decode_error", self.on_decode_error, (None, *POLICIES))

    @property
    def keeps_tensors(self) -> bool:
        """Whether ordinary tensors are delivered as they are."""
        return self.dtype is None and self.memory_format is torch.contiguous_format

    def is_image(self, leaf: torch.Tensor) -> bool:
        """Floating-point tensors `[N, C, H, W]` are taken for images; masks, labels and boxes are left alone."""
        return leaf.ndim == 4 and leaf.is_floating_point()

    def dtype_of(self, leaf: torch.Tensor) -> torch.dtype:
        """The dtype in which a lazy or ordinary leaf is delivered."""
        return self.dtype if self.dtype is not None and (is_lazy(leaf) or self.is_image(leaf)) else leaf.dtype

    def layout_of(self, leaf: torch.Tensor) -> torch.memory_format:
        """The memory format in which a lazy or ordinary leaf is delivered."""
        wanted = leaf.ndim == 4 and (is_lazy(leaf) or leaf.is_floating_point())
        return self.memory_format if wanted else torch.contiguous_format

    def convert(self, leaf: Any) -> Any:
        """An image in the wanted dtype and layout; any other leaf as it is."""
        if not isinstance(leaf, torch.Tensor) or not self.is_image(leaf):
            return leaf
        return leaf.to(dtype=self.dtype_of(leaf), memory_format=self.memory_format)


class Slots:
    """As many slots as batches may exist at a time. On the CPU a slot refers to the loader's own tensors.

    `fill` is called by the producer, `open` and `free` by the consumer; a slot is with one of them only.
    """

    reads_pinned = False  # of the pass under way: page-locked batches are read where they are

    def __init__(self, count: int, form: ImageFormat) -> None:
        self.count = count
        self.form = form

    def share(self, make_pool: Callable[[], Pool | None]) -> None:
        """Has workers write to slabs, from which batches are copied to a device; to be called before the first pass.

        Not on the CPU, where the consumer gets the loader's own tensors and may keep them as long as it likes.
        """

    def fill(self, slot: int, batch: Any) -> tuple[Any, list[Any], DecodeReport | None]:
        """Puts a batch of the loader into a slot: returns what the consumer gets, its leaves, and what was lost."""
        if self.form.keeps_tensors and is_flat(batch):
            return batch, list(batch), None
        flat = flatten(batch)
        filled, loss = execute_lazy(flat, self.form, {})
        if not self.form.keeps_tensors:
            filled = filled._replace(leaves=[self.form.convert(leaf) for leaf in filled.leaves])
        return batch if filled is flat else filled.batch(), filled.leaves, loss

    def open(self, slot: int) -> None:
        """Makes the batch of the slot readable on the current stream."""

    def free(self, slot: int) -> None:
        """Notes that the consumer has issued its last use of the slot."""

    def static_index(self, slot: int) -> int | None:
        """`slot`, if its batch lies in the fixed memory of the slot and fills it; else None."""
        return None

    def static_batches(self, batch: Any) -> dict[int, Any]:
        """For each slot, `batch` with the tensors of that slot's fixed memory in the place of its own."""
        return {}

    def describe(self) -> str:
        """Number and memory of the slots, for `repr`."""
        return f"slots={self.count} of references to the loader's own tensors"

    def start_over(self) -> None:
        """Allows the next batch to have another shape: slots that do not fit it are allocated anew."""

    def bytes_planned(self) -> int | None:
        """Bytes of all slots when they are preallocated, and of what makes a batch in them; else None."""
        return None

    def close(self) -> None:
        """Waits until nothing is in flight and gives the memory back."""


def execute_lazy(batch: Flat, form: ImageFormat, targets: dict[int, torch.Tensor]) -> tuple[Flat, DecodeReport | None]:
    """Executes every lazy leaf of `batch` on the current stream and drops lost samples from the other leaves.

    `targets` has by the `id` of a lazy leaf, where it is planned for, the preallocated tensor to execute it into.
    """
    lazy = {id(leaf): leaf for leaf in batch.leaves if is_lazy(leaf)}
    if not lazy:
        return batch, None
    policy = form.on_decode_error or decode_errors.policy
    how = {
        key: {
            "dtype": form.dtype,
            "memory_format": form.layout_of(leaf),
            "out": targets.get(key),
            "on_decode_error": policy,
        }
        for key, leaf in lazy.items()
    }
    by_class: dict[type, dict[int, Any]] = {}
    for key, leaf in lazy.items():
        by_class.setdefault(type(leaf), {})[key] = leaf
    results: dict[int, tuple[torch.Tensor, list[int] | None]] = {}
    for kind, leaves in by_class.items():
        together = getattr(kind, "__torch_sink_execute_all__", None)
        if together is not None and len(leaves) > 1:
            results |= zip(leaves, together([*leaves.values()], form.device, [how[key] for key in leaves]), strict=True)
        else:
            results |= {key: leaf.__torch_sink_execute__(form.device, **how[key]) for key, leaf in leaves.items()}
    of_size: dict[int, list[int]] = {}
    for key, leaf in lazy.items():
        of_size.setdefault(int(leaf.shape[0]), []).append(key)
    kept: dict[int, list[int] | None] = {}  # batches of different sizes hold different samples
    for size, keys in of_size.items():
        kept[size] = wanted = agree_on_positions([results[key][1] for key in keys], size, policy)
        if wanted is None or len(keys) == 1:
            continue
        for key in keys:
            tensor, shown = results[key]
            found = wanted if shown is None else [shown.index(position) for position in wanted]
            rows = torch.tensor(found, dtype=torch.long, device=tensor.device)
            results[key] = tensor.index_select(0, rows), wanted
    batch = batch._replace(leaves=[results[id(leaf)][0] if id(leaf) in lazy else leaf for leaf in batch.leaves])
    lost = [(size, wanted) for size, wanted in kept.items() if wanted is not None]
    if not lost:
        return batch, None
    done = {id(results[key][0]): size for size, keys in of_size.items() for key in keys}
    rest = select_samples(batch.batch(), kept, done)
    files = dict(file for leaf in lazy.values() for file in getattr(leaf, "broken_files", ()))
    skipped = sum(size - len(wanted) for size, wanted in lost)
    return flatten(rest), DecodeReport(skipped, sum(len(wanted) - len({*wanted}) for _, wanted in lost), files)
