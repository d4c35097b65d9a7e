"""Launches a plan on its device: memory, tables, and one launch after the other."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import Op
from torch_sink.image.core.transfer import to_device
from torch_sink.image.lower.lowering import value_table

if TYPE_CHECKING:
    from torch_sink.image.execute.pixels import Pixels
    from torch_sink.image.plan.build import Plan


def launch_plan(plan: Plan, pixels: Pixels, target: torch.Tensor) -> None:
    """Runs a plan in as many launches as its longest image has stages.

    Args:
        plan: what to run.
        pixels: of its images, read where they lie.
        target: [rows, C, H, W], written to; its device is where everything runs.
    """
    from torch_sink.image.plan.placed import placed_jobs
    from torch_sink.triton_kernels.interpreter import is_interpreted
    from torch_sink.triton_kernels.stage import tile_shape

    device = target.device
    workspace = torch.empty(max(plan.workspace_bytes, 1), dtype=torch.uint8, device=device)
    placed = placed_jobs(plan, pixels.places_from(workspace), tuple(target.stride()))  # type: ignore[arg-type]
    jobs, operations, tables = (to_device(table, device) for table in (placed, plan.operations, plan.tables))
    histograms = torch.zeros((max(plan.histograms, 1), 7, 256), dtype=torch.int32, device=device)
    # Anew for each batch: what stays on the device would have to be kept from being freed under another stream.
    values = to_device(_value_tables(plan.value_chains, torch.float32 if plan.in_floats else target.dtype), device)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        shape = tile_shape(interpreted=is_interpreted())
        _launch_all(plan, shape, workspace, target, jobs, operations, tables, histograms, values)


def _launch_all(
    plan: Plan,
    shape: tuple[int, int],
    workspace: torch.Tensor,
    target: torch.Tensor,
    jobs: torch.Tensor,
    operations: torch.Tensor,
    tables: torch.Tensor,
    histograms: torch.Tensor,
    values: torch.Tensor,
) -> None:
    from torch_sink.image.plan.placed import tiles_of
    from torch_sink.triton_kernels.float_stage import run_float_stage
    from torch_sink.triton_kernels.stage import run_stage

    device = workspace.device
    floats = torch.empty(plan.float_elements, dtype=torch.float32, device=device)
    gray_sums = torch.zeros(max(plan.histograms, 1), dtype=torch.int64, device=device)
    for launch, tiles_on_host in zip(plan.launches, tiles_of(plan, shape), strict=True):
        # One that is not the last does not write it: its type must not make another variant.
        output = target if launch.is_last else values
        tiles = to_device(tiles_on_host, device)
        if launch.on_floats:
            run_float_stage(
                workspace, floats, output, jobs, operations, tables, tiles, gray_sums, values,
                is_last=launch.is_last, has_statistic=launch.has_statistic, is_heavy=launch.is_heavy,
                rows_and_columns=shape,
            )  # fmt: skip
        else:
            run_stage(
                workspace, output, jobs, operations, tables, tiles, histograms, values,
                is_last=launch.is_last, has_float64=launch.is_heavy, has_statistic=launch.has_statistic,
                has_erase=launch.has_erase, rows_and_columns=shape,
            )  # fmt: skip


@functools.lru_cache(maxsize=64)
def _value_tables(chains: tuple[tuple[tuple[Op, ...], int], ...], dtype: torch.dtype) -> torch.Tensor:
    """float32 [chains, 3, 256] on the host: the values of each uint8.

    They are rounded to `dtype`, that of the result, here: Triton's interpreter cuts off what bfloat16 cannot hold.
    """
    with executing():
        tables = [value_table(channels, chain).to(dtype).float().expand(3, -1) for chain, channels in chains]
    return torch.stack(tables)
