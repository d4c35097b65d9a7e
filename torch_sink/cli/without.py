"""What fallbacks cost a data worker: its CPU time for an image with the transforms that fall back, and without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from torch_sink.cli.pipelines import Pipeline
from torch_sink.cli.worker_cost import worker_seconds
from torch_sink.common.patches import Patches
from torch_sink.errors import SinkError
from torch_sink.image.core.fallback import ledger


class Cost(NamedTuple):
    """CPU seconds of an image in a worker, where a GPU makes the pixels."""

    names: list[str]  # the transforms that fall back
    with_them: float
    without: float


class _Chains:
    """A layer over both `Compose`, which notes those of their transforms that fall back, or leaves them out."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.calls = 0  # that fell back
        self.leaves_out = False

    def over(self, _: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in for `Compose.__call__` and for `forward`."""

        def call(compose: Any, *inputs: Any) -> Any:
            is_one = len(inputs) == 1
            for transform in compose.transforms:
                if not (self.leaves_out and any(transform is each for each in self.found)):
                    outputs = self._noted(transform, inputs)
                    inputs = (outputs,) if is_one else outputs
            return inputs[0] if is_one else inputs

        return call

    def _noted(self, transform: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        fallbacks, calls = ledger.counts.total(), self.calls
        outputs = transform(*inputs)
        if ledger.counts.total() > fallbacks and self.calls == calls:  # of chains in chains, the innermost
            self.calls += 1
            self.found += [] if any(transform is each for each in self.found) else [transform]
        return outputs


_seconds = partial(worker_seconds, workers=0)  # in this process, where the layer lies


def cost_of_fallbacks(pipeline: Pipeline, images: int) -> Cost | None:
    """Measures a pipeline on so many images with its fallbacks and without the transforms that they come from.

    None where that cannot be measured: they come from no transform of a `Compose`, or what follows needs them.
    """
    chains, patches = _Chains(), Patches()
    try:
        with torch_sink.image_backend("device", device="meta"):  # it has stand-ins of its own, under this layer
            patches.replace(v1.Compose, "__call__", chains.over)
            patches.replace(v2.Compose, "forward", chains.over)
            _seconds(pipeline, images, seed=0)  # finds them
            if not chains.found:
                return None
            with_them = _seconds(pipeline, images, seed=1)
            chains.leaves_out = True
            without = _seconds(pipeline, images, seed=1)
    except (ValueError, SinkError):
        return None
    finally:
        patches.undo()
    return Cost([_name_of(transform) for transform in chains.found], with_them, without)


def said_of(cost: Cost | None) -> str:
    """For readers: a fallback costs more than its own call."""
    if cost is None:
        return (
            "Their cost cannot be measured apart: they come from no transform of a Compose, or what follows needs "
            "them. The worker's time is that with them."
        )
    names, *seconds = cost
    with_them, without = (f"{1e6 * each:,.0f} us" for each in seconds)
    return (
        f"Measured, where a GPU makes the pixels: an image costs {with_them} with {' and '.join(names)}, and {without} "
        "without, a batch's way out of the worker not counted. The difference is the calls, the decoding, and every "
        "transform before them."
    )


def _name_of(transform: Any) -> str:
    """Of a function, or of what a `Lambda` calls; else of the class."""
    function = getattr(transform, "lambd", transform)
    return str(getattr(function, "__qualname__", type(transform).__name__)).replace("<locals>.", "")
