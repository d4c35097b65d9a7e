"""Exponential moving average of a model's weights, kept on the device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.core.distributed import without_wrappers


class WeightAverage:
    """average = decay * average + (1 - decay) * weights after every update; the first update copies the weights.

    The numbers equal `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, which reads its
    counter on the host.

    Args:
        model: the model that trains. Wrappers of DistributedDataParallel and torch.compile are looked through.
        decay: between 0 and 1.

    Raises:
        TypeError: `decay` is not a number.
        ValueError: `decay` is not between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)):
            raise TypeError(f"ema={decay!r}: pass the decay, a number between 0 and 1 such as 0.999, or None")
        if not 0 <= decay <= 1:
            raise ValueError(f"ema={decay!r}: the decay is between 0 and 1, such as 0.999")
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            raise ValueError(
                "ema keeps whole weights, which a model sharded by fully_shard has on no rank; pass ema=None"
            )
        inner = without_wrappers(model)
        self._source = inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner
        self._decay = decay
        self._module = copy.deepcopy(self._source).requires_grad_(False)
        self._weights = [parameter.detach() for parameter in self._source.parameters()]
        self._averages = [parameter.detach() for parameter in self._module.parameters()]
        self.started = False

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Take the weights in.

        Args:
            skipped: float32 [], 1 where the update was skipped and the average must stay; None means it was not.
        """
        if not self.started:
            torch._foreach_copy_(self._averages, self._weights)
            self.started = True
        elif skipped is None:
            torch._foreach_lerp_(self._averages, self._weights, 1 - self._decay)
        else:
            weight = (1 - skipped) * (1 - self._decay)
            for average, current in zip(self._averages, self._weights, strict=True):
                average.lerp_(current, weight.to(average.dtype))

    def model(self) -> nn.Module:
        """The averaged model; its buffers are copied from the model that trains."""
        for target, source in zip(self._module.buffers(), self._source.buffers(), strict=True):
            target.copy_(source)
        return self._module

    def state_dict(self) -> dict[str, Any]:
        """Weights by name, and whether the first update has happened."""
        return {"started": self.started, "weights": dict(self._named())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy a state in, in place."""
        self.started = bool(state["started"])
        weights = state["weights"]
        for name, average in self._named():
            average.copy_(weights[name])

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self._module.named_parameters()]
