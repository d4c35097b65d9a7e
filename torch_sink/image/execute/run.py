"""Runs the plan of a batch, pass by pass: decoded pixels -> the batch."""

from __future__ import annotations

import numpy as np
import torch

from torch_sink.image.core.transfer import to_device
from torch_sink.image.execute.launch import launch_plan
from torch_sink.image.execute.pixels import Pixels, pixels_in
from torch_sink.image.execute.planned import Planned, Run
from torch_sink.image.execute.programs import values_of


def run_planned(planned: Planned, pixels: Pixels, out: torch.Tensor) -> None:
    """Runs the plan of a batch, pass by pass.

    Args:
        planned: what to run.
        pixels: of each image of the batch.
        out: [N, C, H, W], written to but for rows of finished tensors; its device is where everything runs.
    """
    for run in planned.runs:
        if run.is_last and run.chain_of_image is None:
            launch_plan(run.plan, pixels, out)
            continue
        shape = (len(run.images), run.plan.out_channels, *run.plan.size)
        made = torch.empty(shape, dtype=torch.uint8, device=out.device)
        launch_plan(run.plan, pixels, made)
        if run.is_last:
            _look_up(run, made, out)
        else:
            pixels = pixels.replaced(run.images, pixels_in(made))


def _look_up(run: Run, made: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the values of bytes [n, C, H, W] to their rows, one lookup for each chain of calls on values."""
    channel = torch.arange(out.shape[1], device=out.device).view(1, -1, 1, 1)
    for number, chain in enumerate(run.value_chains):
        same = np.flatnonzero(run.chain_of_image == number)
        values = to_device(values_of(*chain), out.device)
        rows, places = to_device(run.images[same], out.device), to_device(same, out.device)
        out[rows] = values[channel, made[places].long()].to(out.dtype)
