"""Says how a batch would run, from the headers of its images alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_sink.image.core.atoms import Program
from torch_sink.image.core.ops import Op
from torch_sink.image.core.state import default_device
from torch_sink.image.decode.providers import candidates
from torch_sink.image.execute.programs import ImageShape, earlier_passes, programs_of, shape_of
from torch_sink.image.sources.source import FinishedSource, Source

if TYPE_CHECKING:
    from torch_sink.image.plan.build import Plan


class BatchPlan(NamedTuple):
    """How a batch would run: which provider decodes how many images, and the launches. `str()` is readable.

    Attributes:
        decode: {provider: images}.
        plan: the launches of the last pass; None for a batch of finished tensors.
        earlier: the launches of what runs before it, and whose floats become bytes again, in order.
    """

    decode: Counter[str]
    plan: Plan | None
    earlier: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        lines = [f"decode: {', '.join(f'{count} by {name}' for name, count in self.decode.items())}"]
        return "\n".join(lines + [str(plan) for plan in (*self.earlier, self.plan) if plan is not None])

    def __repr__(self) -> str:
        return str(self)


def describe(images: Sequence[Source], programs: Sequence[tuple[Op, ...]], device: torch.device) -> BatchPlan:
    """The plan of a batch, made from the headers of its images alone.

    Args:
        images: source of each image.
        programs: calls recorded on each.
        device: where the batch would run; "meta" is planned as the default device.
    """
    device = torch.device(default_device()) if device.type == "meta" else device
    decode: Counter[str] = Counter()
    chosen = []
    for source, ops in zip(images, programs, strict=True):
        if isinstance(source, FinishedSource):
            decode["nobody (finished tensors)"] += 1
            continue
        decode[next(provider.name for provider in candidates(device) if provider.takes(source))] += 1
        chosen.append((source, ops))
    if not chosen:
        return BatchPlan(decode, None)
    sources, calls = zip(*chosen, strict=True)
    lowered = programs_of(sources, calls)
    shapes, earlier = [shape_of(source) for source in sources], []
    for group in earlier_passes(lowered):
        earlier.append(_planned([shapes[at] for at, _ in group], [program for _, program in group]))
        for at, program in group:
            shapes[at] = ImageShape(*program.size, program.out_channels)
    return BatchPlan(decode, _planned(shapes, [passes[-1] for passes in lowered]), tuple(earlier))


def _planned(shapes: Sequence[ImageShape], programs: Sequence[Program]) -> Plan:
    from torch_sink.image.plan.build import build_plan
    from torch_sink.image.plan.jobs import ImageInput

    inputs = [ImageInput(0, 0, 0, 0, shape.height, shape.width) for shape in shapes]
    height, width = programs[0].size
    strides = (programs[0].out_channels * height * width, height * width, width, 1)
    return build_plan(inputs, programs, 0, strides, interpreted=False)
