"""A batch by the kernels: decoded and transformed on the device, and what becomes of damaged images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch

from torch_sink.image.core.ops import replay
from torch_sink.image.core.state import send, to_device
from torch_sink.image.execute.decoding import Decoding, Pixels
from torch_sink.image.execute.planned import Order, Planned, order_alone
from torch_sink.image.execute.recorded import Made, Recorded, Wanted, survivors
from torch_sink.image.plan.build import placed_jobs

# What the kernels convert values to, other than the dtype of the batch.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def make_on_device(recorded: Recorded, wanted: Wanted) -> Made:
    """Makes a batch, on the current stream of the device.

    Everything is launched as if no file were damaged. Then the host asks which are, and makes those images anew.

    Raises:
        DecodeError: as `survivors` says.
    """
    order, host, plan = recorded.order, recorded.packed.blob, functools.cache(recorded.plan)
    if order is None:
        order, host = order_alone(plan(), recorded.packed.entry_of_image, recorded.shape)
    decoding = Decoding(recorded.packed, order, host, plan, wanted.device)
    result = wanted.result(recorded, recorded.shape[0])
    whole = result
    if recorded.mixes or not _writes(recorded.dtype, result.dtype) or _keeps_rows(wanted):
        whole = torch.empty(recorded.shape, dtype=recorded.dtype, device=wanted.device, memory_format=order.layout)
    run_order(order, host, plan, lambda: _of_images(recorded, decoding), whole, decoding.workspace)
    if not order.is_complete:
        entries = recorded.packed.entry_of_image
        for row in np.flatnonzero(plan().boxes[entries, 2] == 0):
            whole[row].copy_(recorded.packed.source(entries[row]).decode(), non_blocking=True)  # type: ignore[arg-type]
    if not _keeps_rows(wanted):
        _finish(recorded, whole, result)
    decoded_again = decoding.decode_again()
    again: list[int] = []
    if decoded_again:
        again = np.flatnonzero(np.isin(recorded.packed.entry_of_image, decoded_again)).tolist()
        run_planned(recorded.plan_again(again), _of_images(recorded, decoding), whole)
    errors = decoding.errors_of(recorded.packed.entry_of_image) if decoding.errors else {}
    left = survivors(errors, recorded.shape[0], len(recorded.mixes), wanted.on_decode_error)
    if left.rows is not None:
        result = wanted.result(recorded, len(left.rows))
    if again or errors or _keeps_rows(wanted):
        _finish(recorded, whole, result, left.rows)
    return Made(result, left.rows, left.broken_files)


def _of_images(recorded: Recorded, decoding: Decoding) -> Pixels:
    return decoding.pixels.chosen(recorded.packed.entry_of_image)


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
    """Runs a plan that was made just now.

    Args:
        planned: what to run.
        pixels: of each image of the batch.
        out: [N, C, H, W], written to but for rows of finished tensors; its device is where everything runs.
    """
    order, host = order_alone(planned, np.zeros(len(out), np.int32), tuple(out.shape))
    run_order(order, host, lambda: planned, lambda: pixels, out)


def run_order(
    order: Order,
    host: torch.Tensor,
    plan: Callable[[], Planned],
    pixels: Callable[[], Pixels],
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
) -> None:
    """Runs the plan of a batch.

    Args:
        order: of its launches.
        host: uint8 [bytes], which its arrays lie in.
        plan: gives the plan; asked only where the order does not say enough.
        pixels: gives those of each image; asked only where they do not lie where the order expects them.
        out: [N, C, H, W], written to but for rows of finished tensors; its device is where everything runs.
        workspace: uint8 [bytes] of the device, behind the pixels that the order expects there; None without.
    """
    if not order.launches:
        return
    if workspace is not None and out.is_contiguous(memory_format=order.layout):
        launch_run(order, host, workspace, out)
        return
    if workspace is None:
        workspace = torch.empty(order.workspace_bytes, dtype=torch.uint8, device=out.device)
    launched = plan().plan
    assert launched is not None  # there are launches
    launch_run(order, host, workspace, out, placed_jobs(launched, pixels().places_from(workspace), out.stride()))


def launch_run(
    order: Order, host: torch.Tensor, workspace: torch.Tensor, target: torch.Tensor, jobs: np.ndarray | None = None
) -> None:
    """Launches a prologue, then as many stages as the longest image has.

    Args:
        order: of the batch.
        host: uint8 [bytes], which its arrays lie in.
        workspace: uint8 [bytes], from which the jobs count where pixels lie.
        target: [N, C, H, W], written to; its device is where everything runs.
        jobs: int64 [jobs, JOB_COLUMNS], in the place of those that lie there.
    """
    from torch_sink.triton_kernels.stages.prologue import run_prologue
    from torch_sink.triton_kernels.stages.stage import run_stage
    from torch_sink.triton_kernels.stages.statistics import run_statistics

    device = target.device
    (last, tiles, columns) = order.arrays[-1]
    memory = torch.empty(last + tiles * columns, dtype=torch.int32, device=device)
    given = host.narrow(0, order.begin, order.size).view(torch.int32)
    if jobs is not None:
        given = torch.cat([torch.from_numpy(jobs).view(torch.int32).flatten(), given[jobs.nbytes // given.itemsize :]])
    send(given, memory.narrow(0, 0, len(given)))
    ours, operations, work, statistics, tables, tiles_of_all = [
        memory.as_strided((rows, columns), (columns, 1), begin) for begin, rows, columns in order.arrays
    ]
    ours = ours.view(torch.int64)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        run_prologue(work, tables, tiles_of_all, order.tile)
        for launch, (begin, end) in zip(order.launches, order.ranges, strict=True):
            if launch.statistics_begin < launch.statistics_end:
                measured = statistics[launch.statistics_begin : launch.statistics_end]
                run_statistics(workspace, ours, operations, tables, measured)
            run_stage(
                workspace, target, ours, operations, tables, tiles_of_all[begin:end],
                is_heavy=launch.is_heavy, rows_and_columns=order.tile,
            )  # fmt: skip
