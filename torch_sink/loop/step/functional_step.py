"""Loss scaling in a step of one's own. Imported by the first such step, since it imports the compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_sink.loop.step.update import OptimizerUpdate

if TYPE_CHECKING:
    from torch_sink.loop.step.scaler import StaticLossScaler


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eagerly(scaler: StaticLossScaler, name: str, optimizer: torch.optim.Optimizer) -> Any:
    """Call a method of the scaler's FunctionalSteps; compiled code leaves its graph for it, and so keeps its bits."""
    if scaler._steps is None:
        scaler._steps = FunctionalSteps(scaler)
    return getattr(scaler._steps, name)(optimizer)


class FunctionalSteps:
    """The optimizers that a scaler steps."""

    def __init__(self, scaler: StaticLossScaler) -> None:
        self._scaler = scaler
        self._updates: dict[torch.optim.Optimizer, OptimizerUpdate] = {}
        self._unscaled: set[torch.optim.Optimizer] = set()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place; `step` then leaves that out."""
        if optimizer in self._unscaled:
            raise RuntimeError("unscale_() has been called for this optimizer since its last step()")
        self._update(optimizer).unscale()
        self._unscaled.add(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Step an optimizer unless a gradient is not finite; returns whether all are, as a bool []."""
        update = self._update(optimizer)
        if optimizer in self._unscaled:
            self._unscaled.discard(optimizer)
        else:
            update.unscale()
        update.step()
        return update.found_inf == 0

    def _update(self, optimizer: torch.optim.Optimizer) -> OptimizerUpdate:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            raise ValueError("no parameter of the optimizer has a gradient; call backward() on the scaled loss first")
        if optimizer not in self._updates:
            sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
            device = gradients[0].device
            self._updates[optimizer] = OptimizerUpdate(None, optimizer, self._scaler, device, agrees=sharded)
        update = self._updates[optimizer]
        update.follow_optimizer()
        return update
