"""The last station of a batch: lazy leaves are executed, image batches get their dtype and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torch_sink.common.containers import (
    agree_on_positions,
    is_flat,
    is_lazy,
    leaves,
    map_leaves,
    select_rows,
    select_samples,
)
from torch_sink.damage.report import NO_LOSS, Loss, or_current


@dataclass(frozen=True)
class ImageFormat:
    """How image batches are produced.

    Attributes:
        device: where lazy leaves are executed.
        dtype: dtype of image batches; None keeps what the pipeline says.
        memory_format: layout of image batches.
        on_decode_error: "raise", "skip" or "replace"; "raise" leaves it to the image backend.
    """

    device: torch.device
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format
    on_decode_error: str = "raise"

    @property
    def keeps_tensors(self) -> bool:
        """Whether ordinary tensors are delivered as they are."""
        return self.dtype is None and self.memory_format is torch.contiguous_format

    def is_image(self, leaf: torch.Tensor) -> bool:
        """Floating-point tensors `[N, C, H, W]` are taken for images; masks, labels and boxes are left alone."""
        return leaf.ndim == 4 and leaf.is_floating_point()

    def dtype_of(self, leaf: torch.Tensor) -> torch.dtype:
        """The dtype in which an ordinary tensor leaf is delivered."""
        return self.dtype if self.dtype is not None and self.is_image(leaf) else leaf.dtype

    def layout_of(self, leaf: torch.Tensor) -> torch.memory_format:
        """The memory format in which a lazy or ordinary leaf is delivered."""
        wanted = leaf.ndim == 4 and (is_lazy(leaf) or leaf.is_floating_point())
        return self.memory_format if wanted else torch.contiguous_format


def execute_lazy(
    batch: Any, form: ImageFormat, out_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> tuple[Any, Loss]:
    """Executes every lazy leaf of `batch` on the current stream and drops lost samples from the other leaves.

    Args:
        batch: nested containers; a lazy leaf has the method `__torch_sink_execute__`.
        form: device, dtype, layout and what to do with samples that cannot be decoded.
        out_of: gives the preallocated tensor to execute a lazy leaf into, or None.

    Returns:
        The batch with ordinary tensors in the place of lazy leaves, and the samples lost.
    """
    lazy = [] if is_flat(batch) else [leaf for leaf in leaves(batch) if is_lazy(leaf)]
    if not lazy:
        return batch, NO_LOSS
    results, policy = {}, or_current(form.on_decode_error)
    for leaf in lazy:
        if id(leaf) not in results:
            results[id(leaf)] = leaf.__torch_sink_execute__(
                form.device,
                dtype=form.dtype,
                memory_format=form.memory_format,
                out=out_of(leaf),
                on_decode_error=policy,
            )
    files = tuple(file for leaf in lazy for file in getattr(leaf, "broken_files", ()))
    batch_size = int(lazy[0].shape[0])
    shown = [positions for _, positions in results.values()]
    wanted = agree_on_positions(shown, batch_size, policy)
    if wanted is not None and len(results) > 1:
        results = {key: (_rows(tensor, rows, wanted), wanted) for key, (tensor, rows) in results.items()}
    done = {id(tensor) for tensor, _ in results.values()}
    batch = map_leaves(batch, lambda leaf: results[id(leaf)][0] if is_lazy(leaf) else leaf)
    if wanted is None:
        return batch, NO_LOSS
    batch = select_samples(batch, wanted, batch_size, lambda leaf: id(leaf) in done)
    return batch, Loss(batch_size - len(wanted), len(wanted) - len(set(wanted)), files)


def _rows(tensor: torch.Tensor, shown: list[int] | None, wanted: list[int]) -> torch.Tensor:
    rows = torch.tensor(select_rows(shown, wanted), dtype=torch.long, device=tensor.device)
    return tensor.index_select(0, rows)


def stage_on_host(batch: Any, form: ImageFormat) -> tuple[Any, Loss]:
    """A batch for the CPU: the source's own tensors, not copies, unless a dtype or layout was asked for."""
    batch, loss = execute_lazy(batch, form, lambda leaf: None)
    if form.keeps_tensors:
        return batch, loss

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and form.is_image(leaf):
            return leaf.to(dtype=form.dtype_of(leaf), memory_format=form.memory_format)
        return leaf

    return map_leaves(batch, convert), loss
