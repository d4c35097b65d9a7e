"""Compiling a training step ahead of time, on a batch of which nothing else is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_sink.loop.checkpoints.files import random_state, set_random_state
from torch_sink.loop.checkpoints.positions import sink_over
from torch_sink.loop.core.progress import epoch_length
from torch_sink.loop.run import UNKNOWN_EPOCH_SINK

if TYPE_CHECKING:
    from torch_sink.loop.step_loop import StepLoop


def compile_ahead(loop: StepLoop, dataset: Any, epoch_size: int = -1) -> None:
    """Run forward and backward pass of one batch, so that everything compiled of them is compiled.

    Weights, gradients, statistics, random generators and the position in the data are left as they were.

    Args:
        loop: that will train.
        dataset: what `run` will be given.
        epoch_size: steps in an epoch; -1 for one pass of the dataset.
    """
    with sink_over(dataset, loop.device, epoch_size) as loader:
        steps = epoch_size if epoch_size > 0 else epoch_length(loader) or UNKNOWN_EPOCH_SINK
        engine = loop.prepare(steps if loop.sink_size == -1 else loop.sink_size)
        with loader.rehearsal() as batches, engine.running():
            batch = next(batches)
            _leave_nothing(loop, lambda: engine.training_step.rehearse(batch))


def _leave_nothing(loop: StepLoop, rehearse: Any) -> None:
    parameters = [*loop.model.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in loop.model.buffers()]
    draws = random_state()
    for parameter in parameters:
        parameter.grad = None
    try:
        rehearse()
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        set_random_state(draws)
