"""Launches a plan on its device: memory, tables, and one launch after the other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from torch_sink.image.core.transfer import to_device

if TYPE_CHECKING:
    from torch_sink.image.execute.pixels import Pixels
    from torch_sink.image.plan.build import Plan


def launch_plan(plan: Plan, pixels: Pixels, target: torch.Tensor) -> None:
    """Runs a plan: a prologue, then as many stages as its longest image has.

    Args:
        plan: what to run.
        pixels: of its images, read where they lie.
        target: [rows, C, H, W], written to; its device is where everything runs.
    """
    from torch_sink.image.plan.placed import placed_jobs, prologue_of
    from torch_sink.triton_kernels.launching import is_interpreted
    from torch_sink.triton_kernels.stages.prologue import run_prologue
    from torch_sink.triton_kernels.stages.stage import run_stage, tile_shape
    from torch_sink.triton_kernels.stages.statistics import run_statistics

    device = target.device
    shape = tile_shape(interpreted=is_interpreted())
    prologue = prologue_of(plan, shape)
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
    placed = placed_jobs(plan, pixels.places_from(workspace), tuple(target.stride()))  # type: ignore[arg-type]
    jobs, operations, work = (to_device(rows, device) for rows in (placed, plan.operations, prologue.work))
    statistics = to_device(plan.statistics, device)
    tables = torch.empty(len(plan.tables) + plan.made_entries + 1, dtype=torch.int32, device=device)
    tables[: len(plan.tables)] = to_device(plan.tables, device)
    tiles = torch.empty((prologue.tiles, 3), dtype=torch.int32, device=device)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        run_prologue(work, tables, tiles, shape)
        for launch, (begin, end) in zip(plan.launches, prologue.ranges, strict=True):
            if launch.statistics_begin < launch.statistics_end:
                measured = statistics[launch.statistics_begin : launch.statistics_end]
                run_statistics(workspace, jobs, operations, tables, measured)
            run_stage(
                workspace, target, jobs, operations, tables, tiles[begin:end],
                is_heavy=launch.is_heavy, rows_and_columns=shape,
            )  # fmt: skip
