"""A batch by the kernels: decoded and transformed on the device, and what becomes of damaged images."""

from __future__ import annotations

import numpy as np
import torch

from torch_sink.image.core.ops import replay
from torch_sink.image.core.transfer import to_device
from torch_sink.image.execute.damage import survivors
from torch_sink.image.execute.decoding import Decoding
from torch_sink.image.execute.recorded import Made, Recorded, Wanted
from torch_sink.image.execute.run import run_planned

# What the kernels convert values to, other than the dtype of the batch.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def make_on_device(recorded: Recorded, wanted: Wanted) -> Made:
    """Makes a batch, on the current stream of the device.

    Everything is launched as if no file were damaged. Then the host asks which are, and makes those images anew.

    Raises:
        DecodeError: as `survivors` says.
    """
    planned, entries = recorded.plan(), recorded.packed.entry_of_image
    decoding = Decoding(recorded.packed, planned.boxes, wanted.device)
    result = wanted.result(recorded, len(entries))
    whole = result
    if recorded.mixes or not _writes(recorded.dtype, result.dtype) or _keeps_rows(wanted):
        whole = torch.empty(recorded.shape, dtype=recorded.dtype, device=wanted.device)
    run_planned(planned, decoding.pixels.chosen(entries), whole)
    for row in np.flatnonzero(planned.boxes[entries, 2] == 0):
        whole[row].copy_(recorded.packed.source(entries[row]).decode(), non_blocking=True)  # type: ignore[arg-type]
    if not _keeps_rows(wanted):
        _finish(recorded, whole, result)
    again = np.flatnonzero(np.isin(entries, decoding.decode_again()))
    if len(again):
        run_planned(recorded.plan_again(again.tolist()), decoding.pixels.chosen(entries), whole)
    errors = decoding.errors_of(entries)
    left = survivors(errors, len(entries), len(recorded.mixes), wanted.on_decode_error)
    if left.rows is not None:
        result = wanted.result(recorded, len(left.rows))
    if len(again) or errors or _keeps_rows(wanted):
        _finish(recorded, whole, result, left.rows)
    return Made(result, left.rows, left.broken_files)


def _finish(recorded: Recorded, whole: torch.Tensor, result: torch.Tensor, rows: list[int] | None = None) -> None:
    """Mixes a batch and copies it to the result; of some rows only those."""
    mixed = replay(whole, recorded.mixes)
    if rows is not None:
        mixed = mixed[to_device(np.array(rows), whole.device)]
    if mixed is not result:
        result.copy_(mixed)


def _keeps_rows(wanted: Wanted) -> bool:
    """True where damaged images are to leave rows of a given tensor as they are."""
    return wanted.out is not None and wanted.on_decode_error == "skip"


def _writes(dtype: torch.dtype, asked: torch.dtype) -> bool:
    """True where the kernels write values of a batch as the type that is asked for.

    Half precision is made as such, for what is asked for may be wider; the kernels write no other integers.
    """
    return asked == dtype or (dtype.itemsize != 2 and asked in _FLOATS)
