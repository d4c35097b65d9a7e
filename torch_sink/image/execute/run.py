"""Runs the plan of a batch: decoded pixels -> the batch."""

from __future__ import annotations

import numpy as np
import torch

from torch_sink.image.core.ops import WIDE_TYPES
from torch_sink.image.core.transfer import to_device
from torch_sink.image.execute.launch import launch_plan
from torch_sink.image.execute.pixels import Pixels
from torch_sink.image.execute.planned import Planned, Run
from torch_sink.image.plan.lowering import value_table


def run_planned(planned: Planned, pixels: Pixels, out: torch.Tensor) -> None:
    """Runs the plan of a batch.

    Args:
        planned: what to run.
        pixels: of each image of the batch.
        out: [N, C, H, W], written to but for rows of finished tensors; its device is where everything runs.
    """
    for run in planned.runs:
        if run.chain_of_image is None and out.dtype not in WIDE_TYPES:
            launch_plan(run.plan, pixels, out)
        elif run.chain_of_image is None:
            made = torch.empty(out.shape, dtype=torch.float32, device=out.device)
            launch_plan(run.plan, pixels, made)
            images = to_device(run.images, out.device)
            out[images] = made[images].to(out.dtype)
        else:
            made = torch.empty((len(run.images), *out.shape[1:]), dtype=torch.uint8, device=out.device)
            launch_plan(run.plan, pixels, made)
            _look_up(run, made, out)


def _look_up(run: Run, made: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the values of bytes [n, C, H, W] to their rows, one lookup for each chain of calls on values."""
    channel = torch.arange(out.shape[1], device=out.device).view(1, -1, 1, 1)
    for number, chain in enumerate(run.value_chains):
        same = np.flatnonzero(run.chain_of_image == number)
        values = to_device(value_table(*chain), out.device)
        rows, places = to_device(run.images[same], out.device), to_device(same, out.device)
        out[rows] = values[channel, made[places].long()].to(out.dtype)
