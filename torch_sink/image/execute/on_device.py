"""A batch by the kernels: decoded and transformed on the device, and what becomes of damaged images."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from torch_sink.image.core.ops import WIDE_TYPES, replay
from torch_sink.image.core.transfer import Staging, to_device
from torch_sink.image.execute.damage import survivors
from torch_sink.image.execute.decoding import Decoding, Pixels
from torch_sink.image.execute.planned import Planned, Run
from torch_sink.image.execute.recorded import Made, Recorded, Wanted
from torch_sink.image.plan.lowering import value_table
from torch_sink.image.plan.placed import place_jobs

# What the kernels convert values to, other than the dtype of the batch.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def make_on_device(recorded: Recorded, wanted: Wanted) -> Made:
    """Makes a batch, on the current stream of the device.

    Everything is launched as if no file were damaged. Then the host asks which are, and makes those images anew.

    Raises:
        DecodeError: as `survivors` says.
    """
    planned, entries = recorded.plan(), recorded.packed.entry_of_image
    decoding = Decoding(recorded.packed, planned, wanted.device)
    result = wanted.result(recorded, len(entries))
    whole = result
    if recorded.mixes or not _writes(recorded.dtype, result.dtype) or _keeps_rows(wanted):
        whole = torch.empty(recorded.shape, dtype=recorded.dtype, device=wanted.device)
    run_planned(planned, decoding.pixels.chosen(entries), whole)
    for row in np.flatnonzero(planned.boxes[entries, 2] == 0):
        whole[row].copy_(recorded.packed.source(entries[row]).decode(), non_blocking=True)  # type: ignore[arg-type]
    if not _keeps_rows(wanted):
        _finish(recorded, whole, result)
    decoded_again = decoding.decode_again()
    again = np.flatnonzero(np.isin(entries, decoded_again)) if decoded_again else ()
    if len(again):
        run_planned(recorded.plan_again(list(again)), decoding.pixels.chosen(entries), whole)
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


def run_planned(planned: Planned, pixels: Pixels, out: torch.Tensor) -> None:
    """Runs the plan of a batch.

    Args:
        planned: what to run.
        pixels: of each image of the batch.
        out: [N, C, H, W], written to but for rows of finished tensors; its device is where everything runs.
    """
    for run in planned.runs:
        if run.chain_of_image is None and out.dtype not in WIDE_TYPES:
            launch_run(run, pixels, out)
        elif run.chain_of_image is None:
            made = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            launch_run(run, pixels, made)
            images = to_device(run.images, out.device)
            out[images] = made[images].to(out.dtype)
        else:
            made = torch.empty((len(run.images), *out.shape[1:]), dtype=torch.uint8, device=out.device)
            launch_run(run, pixels, made)
            _look_up(run, made, out)


def launch_run(run: Run, pixels: Pixels, target: torch.Tensor) -> None:
    """Launches a prologue, then as many stages as the longest image of a run has.

    Args:
        run: what to run.
        pixels: of its images, read where they lie.
        target: [rows, C, H, W], written to; its device is where everything runs.
    """
    from torch_sink.triton_kernels.stages.prologue import run_prologue
    from torch_sink.triton_kernels.stages.stage import run_stage
    from torch_sink.triton_kernels.stages.statistics import run_statistics

    device, plan, prologue = target.device, run.plan, run.prologue
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
    given = plan.operations, prologue.work, plan.statistics, plan.tables
    staging = Staging([(plan.jobs.shape, np.int64), *((array.shape, np.int32) for array in given)], device)
    place_jobs(staging.rooms[0], plan, pixels.places_from(workspace), tuple(target.stride()))  # type: ignore[arg-type]
    for room, array in zip(staging.rooms[1:], given, strict=True):
        room[...] = array
    jobs, operations, work, statistics, made_before = staging.send()
    tables = torch.empty(len(plan.tables) + plan.made_entries + 1, dtype=torch.int32, device=device)
    if len(plan.tables):
        tables[: len(plan.tables)] = made_before
    tiles = torch.empty((prologue.tiles, 3), dtype=torch.int32, device=device)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        run_prologue(work, tables, tiles, prologue.shape)
        for launch, (begin, end) in zip(plan.launches, prologue.ranges, strict=True):
            if launch.statistics_begin < launch.statistics_end:
                measured = statistics[launch.statistics_begin : launch.statistics_end]
                run_statistics(workspace, jobs, operations, tables, measured)
            run_stage(
                workspace, target, jobs, operations, tables, tiles[begin:end],
                is_heavy=launch.is_heavy, rows_and_columns=prologue.shape,
            )  # fmt: skip


def _look_up(run: Run, made: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the values of bytes [n, C, H, W] to their rows, one lookup for each chain of calls on values."""
    channel = torch.arange(out.shape[1], device=out.device).view(1, -1, 1, 1)
    for number, chain in enumerate(run.value_chains):
        same = np.flatnonzero(run.chain_of_image == number)
        values = to_device(value_table(*chain), out.device)
        rows, places = to_device(run.images[same], out.device), to_device(same, out.device)
        out[rows] = values[channel, made[places].long()].to(out.dtype)
