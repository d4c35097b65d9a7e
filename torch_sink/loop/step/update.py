"""The optimizer update of a training step: unscale, clip, step or skip, adjust the scale. Never waits, once warm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.errors import UnsupportedOperation
from torch_sink.loop.core.host_sync import host_sync_allowed
from torch_sink.loop.step.capturable import add_missing_momentum, make_capturable
from torch_sink.loop.step.ema import WeightAverage
from torch_sink.loop.step.scaler import StaticLossScaler, unscale_gradients


class OptimizerUpdate:
    """Applies the gradients of a model.

    With a loss scaler, an update whose gradients are not finite is skipped on the device: by the optimizer's own
    kernel where it takes `found_inf`, else by a mask that puts the old parameters and state back. The mask needs the
    state to exist, and several optimizers begin with values other than zero; so until every parameter at hand has
    gone through one finite update, and the average has begun, overflow is checked on the host.

    Args:
        model: its parameters are clipped.
        optimizer: a dense torch.optim optimizer.
        scaler: on the parameters' device, or None for no check.
        clip_grad_norm: largest gradient norm, or None.
        reduce_found_inf: called with `found_inf` (float32 []); makes it equal on all ranks.
        average: moving average of the weights, or None.
        device: of the parameters.
        cycles_betas: whether a scheduler changes the optimizer's betas.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: StaticLossScaler | None,
        *,
        clip_grad_norm: float | None,
        reduce_found_inf: Callable[[Tensor], None] | None,
        average: WeightAverage | None,
        device: torch.device,
        cycles_betas: bool = False,
    ) -> None:
        self._cycles_betas = cycles_betas
        self.optimizer, self.scaler, self.average = optimizer, scaler, average
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.host_checks = 0
        self._updated = False
        self._clip_grad_norm, self._reduce_found_inf = clip_grad_norm, reduce_found_inf
        self._model_parameters = list(model.parameters())
        self.parameters: list[nn.Parameter] = []
        self._owned = -1
        self.follow_optimizer()
        self._warm_patterns: set[tuple[bool, ...]] = set()

    @property
    def warm(self) -> bool:
        """Whether the next update, with the gradients now present, can do without the host."""
        return self.scaler is None or (self._average_began and self._pattern() in self._warm_patterns)

    @property
    def has_warmed_up(self) -> bool:
        """Whether the latest update had all state at hand, and the next like it can do without the host."""
        return self._average_began and self._updated

    @property
    def _average_began(self) -> bool:
        """State may be there before the first update (Adagrad's, or what was loaded); an average is not."""
        return self.average is None or self.average.started

    def follow_optimizer(self) -> None:
        """Take in parameters that the optimizer was given since, as by `add_param_group`."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count != self._owned:
            owned = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self.parameters = list(dict.fromkeys([*self._model_parameters, *owned]))
            self._owned = count
            if self.scaler is not None:
                make_capturable(self.optimizer, cycles_betas=self._cycles_betas)

    def zero_gradients(self, *, in_place: bool = False) -> None:
        """Forget the gradients of every parameter of the model and of the optimizer, or set them to zero in place."""
        if in_place:
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            return
        for parameter in self.parameters:
            parameter.grad = None

    def apply(self) -> None:
        """Update parameters, optimizer state, scale and average from the gradients."""
        if self.scaler is None:
            self._clip()
            self._step()
            self._updated = True
            if self.average is not None:
                self.average.update()
            return
        self.unscale()
        self._clip()
        self.step()
        self.scaler.adjust(self.found_inf == 0)

    def unscale(self) -> None:
        """Divide the gradients by the scaler's scale, and set `found_inf` to whether one of them is not finite."""
        scaler: Any = self.scaler
        self.found_inf.zero_()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        unscale_gradients(gradients, self.found_inf, scaler.inverse())
        if self._reduce_found_inf is not None:
            self._reduce_found_inf(self.found_inf)

    def step(self) -> None:
        """Update parameters, optimizer state and average, unless `found_inf` says to skip."""
        if self.warm:
            self._step_masked()
        else:
            self._step_checked()
        self._updated = self.warm

    def mark_warm(self) -> None:
        """After optimizer state was loaded: every parameter with state counts as having gone through an update."""
        state = self.optimizer.state
        if state:
            self._warm_patterns.add(tuple(parameter in state for parameter in self.parameters))

    def _pattern(self) -> tuple[bool, ...]:
        return tuple(parameter.grad is not None for parameter in self.parameters)

    def _clip(self) -> None:
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._model_parameters, self._clip_grad_norm)

    def _step(self) -> None:
        add_missing_momentum(self.optimizer)
        self.optimizer.step()

    def _step_checked(self) -> None:
        self.host_checks += 1
        with host_sync_allowed():
            overflow = bool(self.found_inf.item())  # host sync
        if overflow:
            return
        self._step()
        refuse_python_state(self.optimizer)
        self._warm_patterns.add(self._pattern())
        if self.average is not None:
            self.average.update()

    def _step_masked(self) -> None:
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            optimizer: Any = self.optimizer
            optimizer.grad_scale, optimizer.found_inf = None, self.found_inf
            try:
                self._step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        else:
            before = [tensor.detach().clone() for tensor in self._written_tensors()]
            self._step()
            self._put_back(self._written_tensors(), before)  # asked again: a step may have replaced them
        if self.average is not None:
            self.average.update(self.found_inf)

    @torch.no_grad()
    def _put_back(self, tensors: list[Tensor], before: list[Tensor]) -> None:
        skipped = self.found_inf.bool()
        for now, old in zip(tensors, before, strict=True):
            condition = skipped if now.device == skipped.device else skipped.to(now.device)
            now.copy_(torch.where(condition, old, now))

    def _written_tensors(self) -> list[Tensor]:
        written: list[Tensor] = []
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            written.append(parameter)
            if parameter in self.optimizer.state:
                written += [v for v in self.optimizer.state[parameter].values() if isinstance(v, Tensor)]
        return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in written]


def refuse_python_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise if the optimizer counts in Python numbers, which neither a mask nor a captured graph can reach.

    Raises:
        UnsupportedOperation: names the optimizer and the entries.
    """
    found = python_state(optimizer)
    if found:
        raise UnsupportedOperation(
            f"{type(optimizer).__name__} keeps Python numbers in its state ({', '.join(found)}), which cannot be "
            "skipped or replayed on the device; use an optimizer that keeps tensors, or mode='eager' without a scaler"
        )


def python_state(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the state entries that are Python numbers."""
    names: dict[str, None] = {}
    state: dict[Any, Any]
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                names[str(name)] = None
    return list(names)
