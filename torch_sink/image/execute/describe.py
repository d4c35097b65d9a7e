"""Says how a batch would run, from its plan and the headers of its images alone."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_sink.image.core.state import default_device
from torch_sink.image.decode.providers import candidates
from torch_sink.image.execute.planned import Run
from torch_sink.image.sources.source import FinishedSource

if TYPE_CHECKING:
    from torch_sink.image.execute.recorded import Recorded
    from torch_sink.image.plan.build import Plan


class BatchPlan(NamedTuple):
    """How a batch would run: which provider decodes how many images, and the launches. `str()` is readable.

    Attributes:
        decode: {provider: images}.
        runs: images that run together, in order.
    """

    decode: Counter[str]
    runs: tuple[Run, ...]

    @property
    def plan(self) -> Plan | None:
        """The launches that end in the result; None for a batch of finished tensors."""
        return self.runs[-1].plan if self.runs else None

    def __str__(self) -> str:
        lines = [f"decode: {', '.join(f'{count} by {name}' for name, count in self.decode.items())}"]
        return "\n".join(lines + [str(run) for run in self.runs])

    def __repr__(self) -> str:
        return str(self)


def describe(recorded: Recorded) -> BatchPlan:
    """The plan of a batch, where it would run; "meta" stands for the default device."""
    device = torch.device(recorded.destination)
    device = torch.device(default_device()) if device.type == "meta" else device
    decode: Counter[str] = Counter()
    sources = recorded.packed.sources()
    for at in recorded.packed.entry_of_image.tolist():
        source = sources[at]
        if isinstance(source, FinishedSource):
            decode["nobody (finished tensors)"] += 1
        else:
            decode[next(provider.name for provider in candidates(device) if provider.takes(source))] += 1
    return BatchPlan(decode, recorded.plan().runs)
