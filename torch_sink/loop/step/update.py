"""The optimizer update of a step: unscale, clip, step or skip, adjust the scale, average the weights.

It does not wait for the device after the first updates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torch_sink.common.integrations import without_wrappers
from torch_sink.loop.core.distributed import largest_of_ranks
from torch_sink.loop.step.optimizers import (
    add_missing_momentum,
    leave_fused_for_sparse,
    make_capturable,
    refuse_python_state,
)
from torch_sink.thread_waits import host_sync_allowed


class Scaler(Protocol):
    """The part of a loss scaler that an update uses."""

    def scale(self, inputs: Any) -> Any: ...
    def inverse(self) -> Tensor: ...
    def adjust(self, grads_finite: Tensor | bool) -> bool: ...


class WeightAverage:
    """average = decay * average + (1 - decay) * weights after every update; the first update copies the weights.

    The results equal those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, which reads its
    counter on the host.
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
        """Add the current weights to the average, unless `skipped` (float32 []) is 1: the update was skipped."""
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
        weights = {name: parameter.detach() for name, parameter in self._module.named_parameters()}
        return {"started": self.started, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state in place."""
        self.started = bool(state["started"])
        weights = state["weights"]
        for name, average in self._module.named_parameters():
            average.detach().copy_(weights[name])


class OptimizerUpdate:
    """Applies the gradients of a model.

    With a loss scaler, an update whose gradients are not finite is skipped on the device: by the optimizer's kernel if
    it takes `found_inf`, else by a mask that restores parameters and state. The mask needs existing state, because
    several optimizers initialize theirs to values other than zero. So the host checks for overflow until every
    parameter with a gradient has had one finite update, and the average has begun.

    Args:
        model: its parameters are clipped; None for an update of the optimizer's parameters only.
        agrees: whether to make the overflow flag equal on all ranks, each of which sees only some of the gradients.
        cycles_betas: whether a scheduler changes the optimizer's betas.
    """

    def __init__(
        self,
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer,
        scaler: Scaler | None,
        device: torch.device,
        *,
        clip_grad_norm: float | None = None,
        agrees: bool = False,
        average: WeightAverage | None = None,
        cycles_betas: bool = False,
    ) -> None:
        self.optimizer, self.scaler, self.average = optimizer, scaler, average
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self.host_checks = 0
        self.has_warmed_up = False  # whether the latest update needed no host check
        self._clip_grad_norm, self._agrees, self._cycles_betas = clip_grad_norm, agrees, cycles_betas
        self._model_parameters = list(model.parameters()) if model is not None else []
        self.parameters: list[nn.Parameter] = []
        self._owned = -1
        self.follow_optimizer()
        # A parameter with loaded state has had an update.
        self._warm_parameters = {parameter for parameter in self.parameters if parameter in optimizer.state}

    @property
    def _warm(self) -> bool:
        """Whether the next update, with the current gradients, needs no check on the host.

        State may exist before the first update (Adagrad's, or loaded state), the average does not.
        """
        average_began = self.average is None or self.average.started
        return average_began and self._warm_parameters.issuperset(self._with_gradients())

    def _with_gradients(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.parameters if parameter.grad is not None)

    def follow_optimizer(self) -> None:
        """Include parameters that were added to the optimizer since the last call, as by `add_param_group`."""
        count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        if count != self._owned:
            owned = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self.parameters = list(dict.fromkeys([*self._model_parameters, *owned]))
            self._owned = count
            if self.scaler is not None:
                make_capturable(self.optimizer, cycles_betas=self._cycles_betas)

    def zero_gradients(self, *, in_place: bool = False) -> None:
        """Drop the gradients of all parameters of model and optimizer, or set them to zero `in_place`."""
        if in_place:
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            return
        for parameter in self.parameters:
            parameter.grad = None

    def apply(self) -> None:
        """Update parameters, optimizer state, scale and average from the gradients."""
        if self.scaler is None:
            self._clip()
            leave_fused_for_sparse(self.optimizer)
            self._step()
            if self.average is not None:
                self.average.update()
            self.has_warmed_up = True
            return
        self.unscale()
        self._clip()
        self.step()
        self.scaler.adjust(self.found_inf == 0)

    def unscale(self) -> None:
        """Divide the gradients by the scaler's scale, and set `found_inf` to whether one of them is not finite."""
        scaler: Any = self.scaler
        self.found_inf.zero_()
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self._with_gradients():
            gradient: Any = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local = local._values() if local.is_sparse else local
            groups.setdefault((local.device, local.dtype), []).append(local)
        inverse_scale = scaler.inverse()
        for group in groups.values():
            torch._amp_foreach_non_finite_check_and_unscale_(group, self.found_inf, inverse_scale)
        if self._agrees:
            largest_of_ranks(self.found_inf)

    def step(self) -> None:
        """Update parameters, optimizer state and average, unless `found_inf` says to skip."""
        leave_fused_for_sparse(self.optimizer)
        if self._warm:
            self._step_masked()
        else:
            self._step_checked()
        self.has_warmed_up = self._warm

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
        self._warm_parameters.update(self._with_gradients())
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
            skipped = self.found_inf.bool()
            with torch.no_grad():  # the tensors are listed again, because the step may have replaced them
                for now, old in zip(self._written_tensors(), before, strict=True):
                    now.copy_(torch.where(skipped.to(now.device), old, now))
        if self.average is not None:
            self.average.update(self.found_inf)

    def _written_tensors(self) -> list[Tensor]:
        written: list[Tensor] = []
        for parameter in self._with_gradients():
            written.append(parameter)
            written += [v for v in self.optimizer.state.get(parameter, {}).values() if isinstance(v, Tensor)]
        return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in written]
