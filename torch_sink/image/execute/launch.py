"""Launches the plan of one pass of a batch on its device: memory, tables, and one launch after the other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_sink.image.core.atoms import Program
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import Op
from torch_sink.image.core.transfer import host_buffer, to_device
from torch_sink.image.lower.lowering import value_table
from torch_sink.image.sources.decoded import Decoded

if TYPE_CHECKING:
    from torch_sink.image.plan.build import Plan
    from torch_sink.image.plan.jobs import ImageInput


def run_on_device(
    decoded: Sequence[Decoded], programs: Sequence[Program], rows: Sequence[int], out: torch.Tensor
) -> None:
    """Runs the programs of a batch in as many launches as its longest image has stages.

    Args:
        decoded: pixels of each image; the same object may stand for several.
        programs: what each image goes through.
        rows: position of each image in the batch.
        out: [N, C, H, W], written to; its device is where everything runs.
    """
    from torch_sink.image.plan.build import build_plan
    from torch_sink.triton_kernels.interpreter import is_interpreted

    device = out.device
    inputs, workspace_start = _place(decoded)
    contiguous_rows = list(rows) == list(range(len(rows)))
    target = out if contiguous_rows else torch.empty((len(rows), *out.shape[1:]), dtype=out.dtype, device=device)
    strides = tuple(target.stride())
    plan = build_plan(inputs, programs, workspace_start, strides, is_interpreted())  # type: ignore[arg-type]
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    _fill(workspace, decoded, inputs)
    jobs, operations, tables = (to_device(table, device) for table in (plan.jobs, plan.operations, plan.tables))
    histograms = torch.zeros((max(plan.histograms, 1), 7, 256), dtype=torch.int32, device=device)
    # Anew for each batch: what stays on the device would have to be kept from being freed under another stream.
    values = to_device(_value_tables(plan.value_chains, torch.float32 if plan.in_floats else target.dtype), device)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        _launch_all(plan, workspace, target, jobs, operations, tables, histograms, values)
    if target is not out:
        out[to_device(np.array(rows), device)] = target


def _launch_all(
    plan: Plan,
    workspace: torch.Tensor,
    target: torch.Tensor,
    jobs: torch.Tensor,
    operations: torch.Tensor,
    tables: torch.Tensor,
    histograms: torch.Tensor,
    values: torch.Tensor,
) -> None:
    from torch_sink.triton_kernels.float_stage import run_float_stage
    from torch_sink.triton_kernels.stage import run_stage

    device = workspace.device
    floats = torch.empty(plan.float_elements, dtype=torch.float32, device=device)
    gray_sums = torch.zeros(max(plan.histograms, 1), dtype=torch.int64, device=device)
    for launch in plan.launches:
        # One that is not the last does not write it: its type must not make another variant.
        output = target if launch.is_last else values
        tiles = to_device(launch.tiles, device)
        if launch.on_floats:
            run_float_stage(
                workspace, floats, output, jobs, operations, tables, tiles, gray_sums, values,
                is_last=launch.is_last, has_statistic=launch.has_statistic, is_heavy=launch.is_heavy,
                rows_and_columns=plan.tile_shape,
            )  # fmt: skip
        else:
            run_stage(
                workspace, output, jobs, operations, tables, tiles, histograms, values,
                is_last=launch.is_last, has_float64=launch.is_heavy, has_statistic=launch.has_statistic,
                has_erase=launch.has_erase, rows_and_columns=plan.tile_shape,
            )  # fmt: skip


def _place(decoded: Sequence[Decoded]) -> tuple[list[ImageInput], int]:
    """Where each image will lie in the workspace, and where the rest of the workspace begins."""
    from torch_sink.image.plan.jobs import ImageInput

    inputs, offsets, end = [], {}, 0
    for image in decoded:
        if id(image) not in offsets:
            offsets[id(image)] = end
            end += -(-image.pixels.numel() // 16) * 16
        # Of a part of an image, as if the rest were there: nothing reads outside the part.
        inputs.append(ImageInput(offsets[id(image)] + image.origin, *image.strides, *image.size))
    return inputs, end


def _fill(workspace: torch.Tensor, decoded: Sequence[Decoded], inputs: Sequence[ImageInput]) -> None:
    """Copies pixels to their places: what is on the host in one transfer, the rest one by one."""
    placed = {image.offset - item.origin: item for image, item in zip(inputs, decoded, strict=True)}
    on_host = {offset: item for offset, item in placed.items() if item.pixels.device.type == "cpu"}
    if workspace.device.type == "cpu":
        staging = workspace
    else:
        end = max((offset + item.pixels.numel() for offset, item in on_host.items()), default=0)
        staging = host_buffer(end, torch.uint8, workspace.device) if end else workspace
    for offset, item in on_host.items():
        staging[offset : offset + item.pixels.numel()].copy_(item.pixels.flatten())
    if staging is not workspace:
        workspace[: len(staging)].copy_(staging, non_blocking=True)
    for offset, item in placed.items():
        if offset not in on_host:
            workspace[offset : offset + item.pixels.numel()].copy_(item.pixels.flatten())


@functools.lru_cache(maxsize=64)
def _value_tables(chains: tuple[tuple[tuple[Op, ...], int], ...], dtype: torch.dtype) -> torch.Tensor:
    """float32 [chains, 3, 256] on the host: the values of each uint8.

    They are rounded to `dtype`, that of the result, here: Triton's interpreter cuts off what bfloat16 cannot hold.
    """
    with executing():
        tables = [value_table(channels, chain).to(dtype).float().expand(3, -1) for chain, channels in chains]
    return torch.stack(tables)
