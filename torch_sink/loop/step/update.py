"""The optimizer update of a step: unscale, clip, step or skip, adjust the scale, average the weights.

It does not wait for the device after the first updates.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, is_lazy

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
    """average = decay * average + (1 - decay) * weights after every update; a weight's first update copies it.

    The results equal those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, which reads its
    counter on the host. Where the model has other layers or parameters than before, the averaged model gets them too
    (`follow`): what is left of the old ones keeps its average, found by the parameter itself or else by its name.
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
        self.leaves_out: tuple[Any, ...] = ()  # objects whose methods are hooks that the averaged model does not get
        self._modules: list[weakref.ref[nn.Module]] = []  # of the source, as they were when it was copied
        self._layout: Any = None
        self._weights: list[Tensor] = []  # the parameters of the source
        self._averages: list[Tensor] = []
        self._names: list[str] = []
        self._unbegun: set[str] = set()  # names of weights without an update
        self.follow()

    @property
    def started(self) -> bool:
        """Whether every weight has had an update."""
        return not self._unbegun

    def follow(self) -> None:
        """Take over layers and parameters that the model has got since the last call."""
        modules = [*self._source.modules()]
        layout = [_layout_of(module) for module in modules]
        if layout != self._layout or any(known() is not now for known, now in zip(self._modules, modules, strict=True)):
            self._copy_source()
            self._modules, self._layout = [weakref.ref(module) for module in modules], layout
        self._weights = [*self._source.parameters()]

    @torch.no_grad()
    def _copy_source(self) -> None:
        by_parameter = {id(weight): place for place, weight in enumerate(self._weights)}
        by_name = {name: place for place, name in enumerate(self._names)}
        old, unbegun = self._averages, {place for name, place in by_name.items() if name in self._unbegun}
        self._module = _copied(self._source, self.leaves_out)
        named = [*self._source.named_parameters()]
        self._names, self._averages = [name for name, _ in named], [*self._module.parameters()]
        self._unbegun = set()
        for (name, weight), average in zip(named, self._averages, strict=True):
            average.requires_grad = False
            place = by_parameter.get(id(weight), by_name.get(name))
            known = place is not None and place not in unbegun and old[place].shape == weight.shape
            if known and place is not None:
                average.copy_(old[place])
            else:
                self._unbegun.add(name)

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Add the current weights to the average, unless `skipped` (float32 []) is 1: the update was skipped.

        `skipped` is None for the first update of a weight: the host knows that it was not skipped.
        """
        if not self.started:
            self.follow()  # the first forward pass makes the weights of lazy layers
        if self._unbegun:
            pairs = [*zip(self._names, self._averages, self._weights, strict=True)]
            begun = [(average, weight) for name, average, weight in pairs if name not in self._unbegun]
            for name, average, weight in pairs:
                if name in self._unbegun:
                    average.copy_(weight)
            if begun:
                self._average([one for one, _ in begun], [one for _, one in begun])
            self._unbegun = set()
        else:
            weights = self._weights if skipped is None else self._averages_or_weights(skipped)
            self._average(self._averages, weights)

    def _average(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        """As `get_ema_multi_avg_fn` does: integers, such as the weights of quantized layers, lose their fractions."""
        if all(map(torch.is_floating_point, averages)):
            torch._foreach_lerp_(averages, weights, 1 - self._decay)
            return
        for average, weight in zip(averages, weights, strict=True):
            if average.is_floating_point() or average.is_complex():
                average.lerp_(weight, 1 - self._decay)
            else:
                average.copy_(average * self._decay + weight * (1 - self._decay))

    def _averages_or_weights(self, skipped: Tensor) -> list[Tensor]:
        """The averages themselves if the update was skipped, else the weights, which the device decides: new tensors.

        For all tensors of a kind together: one call for each of them would cost more than the rest of the update.
        """
        chosen: list[Any] = [None] * len(self._weights)
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, weight in enumerate(self._weights):
            kinds.setdefault((weight.device, weight.dtype), []).append(place)
        for (device, dtype), places in kinds.items():
            flag = skipped.to(device, dtype)
            found = torch._foreach_mul([self._weights[place] for place in places], 1 - flag)
            torch._foreach_add_(found, torch._foreach_mul([self._averages[place] for place in places], flag))
            for place, tensor in zip(places, found, strict=True):
                chosen[place] = tensor
        return chosen

    def addresses(self) -> list[int]:
        """Where the averages are, for graphs, which go on writing there."""
        return [average.data_ptr() for average in self._averages]

    @torch.no_grad()
    def model(self) -> nn.Module:
        """The averaged model; its buffers are copied from the model that trains."""
        self.follow()
        for target, source in zip(self._module.buffers(), self._source.buffers(), strict=True):
            target.copy_(source)
        return self._module

    def state_dict(self) -> dict[str, Any]:
        """Weights by name, whether they have begun, and the names of those that have not although others have."""
        self.follow()
        weights = {name: parameter.detach() for name, parameter in self._module.named_parameters()}
        started = len(self._unbegun) < len(weights)
        return {"started": started, "weights": weights, "unbegun": sorted(self._unbegun) if started else []}

    def differences(self, weights: dict[str, Tensor]) -> Iterator[str]:
        """What keeps weights by name from being loaded."""
        self.follow()
        known = dict(zip(self._names, self._averages, strict=True))
        for name in [*known, *(name for name in weights if name not in known)]:
            if name not in weights or name not in known:
                yield f"saved with{'' if name in weights else 'out'} an average of {name}, unlike this loop's"
            elif not is_lazy(known[name]) and known[name].shape != weights[name].shape:
                shapes = list(weights[name].shape), list(known[name].shape)
                yield f"saved with an average of {name} of shape {shapes[0]}, and this loop has {shapes[1]}"

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state in place."""
        self.follow()
        self._unbegun = set(state.get("unbegun", ())) if state["started"] else set(self._names)
        for name, average in zip(self._names, self._averages, strict=True):
            average.copy_(state["weights"][name])


def _layout_of(module: nn.Module) -> Any:
    """What a copy of a module has to have in common with it: type, and names and shapes of what it holds."""
    held = [*module._parameters.items(), *module._buffers.items()]
    tensors = [(name, None if one is None or is_lazy(one) else (one.shape, one.dtype)) for name, one in held]
    return type(module), [*module._modules.keys()], tensors


def _copied(model: nn.Module, leaves_out: tuple[Any, ...]) -> nn.Module:
    """A deep copy of a model, without the hooks that are methods of `leaves_out`.

    Tensors with a history, which cannot be copied, are copied without it: pruning and the older `weight_norm` keep one,
    and compute it again before each forward pass. Buffers of lazy layers cannot be copied either, and are made anew.
    """
    memo = {id(one): one for one in leaves_out}
    for module in model.modules():
        for value in vars(module).values() if not isinstance(module, torch.jit.ScriptModule) else ():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
        for buffer in module.buffers(recurse=False):
            if is_lazy(buffer):
                memo[id(buffer)] = UninitializedBuffer(device=buffer.device, dtype=buffer.dtype)  # type: ignore[call-arg]
    made = copy.deepcopy(model, memo)
    for module in made.modules() if leaves_out else ():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number in [n for n, hook in hooks.items() if getattr(hook, "__self__", None) in leaves_out]:
                del hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
    return made


def _held_by(model: nn.Module) -> list[nn.Parameter | None]:
    """What all modules hold as parameters, by module: found several times faster than by `model.parameters()`."""
    held: list[nn.Parameter | None] = []
    modules, seen = [model], {id(model)}
    for module in modules:  # which grows on the way
        held += module._parameters.values()
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return held


class OptimizerUpdate:
    """Applies the gradients of a model.

    With a loss scaler, an update whose gradients are not finite is skipped on the device: by the optimizer's kernel if
    it takes `found_inf`, else by a mask that restores parameters and state. A mask cannot take back state that the step
    has made, as the first one does, or the first after the program has emptied the state. The host then reads the flag,
    and drops what was made. It also reads it until the average of every weight has begun.

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
        self.has_warmed_up = False  # whether the next update needs no host check, unless its step makes state
        self._clip_grad_norm, self._agrees, self._cycles_betas = clip_grad_norm, agrees, cycles_betas
        self._model, self._model_parameters = model, list[nn.Parameter]()
        self.parameters: list[nn.Parameter] = []  # of model and optimizer
        self._known: list[int] = []
        self._alive: Any = None
        self.follow()

    def _with_gradients(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.parameters if parameter.grad is not None)

    def follow(self) -> None:
        """Take over what model and optimizer hold now: parameters may have been added, replaced or dropped.

        Flags and state may have been loaded, too, which brings the counters of another device.
        """
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        held = [] if self._model is None else _held_by(self._model)
        owned = [parameter for group in groups for parameter in group["params"]]
        # A scaler in a loop of the user's own calls this at every step. What is compared is alive, so ids are unique.
        known = [id(groups), id(optimizer.state), *map(id, held), *map(id, owned)]
        if known == self._known:
            return
        self._known, self._alive = known, (groups, optimizer.state, held)
        self._model_parameters = [] if self._model is None else [*self._model.parameters()]
        self.parameters = list(dict.fromkeys([*self._model_parameters, *owned]))
        if self.scaler is not None:
            make_capturable(optimizer, cycles_betas=self._cycles_betas)
            refuse_python_state(optimizer)

    def zero_gradients(self, *, in_place: bool = False) -> None:
        """Drop the gradients of all parameters of model and optimizer, or set them to zero `in_place`."""
        if in_place:
            if gradients := [parameter.grad for parameter in self.parameters if parameter.grad is not None]:
                torch._foreach_zero_(gradients)
            return
        for parameter in self.parameters:
            parameter.grad = None

    def apply(self, *, zeroes: bool) -> None:
        """Update parameters, optimizer state, scale and average from the gradients, which `zeroes` sets to zero."""
        if self.scaler is None:
            self._clip()
            leave_fused_for_sparse(self.optimizer)
            self._step()
            if self.average is not None:
                self.average.update()
            self.has_warmed_up = True
        else:
            self.unscale()
            self._clip()
            self.step()
            self.scaler.adjust(self.found_inf == 0)
        if zeroes:
            self.zero_gradients(in_place=True)

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
        entries = [*map(len, self.optimizer.state.values())]
        self._step_masked()
        made = [*map(len, self.optimizer.state.values())] != entries
        self.has_warmed_up = not made and (self.average is None or self.average.started)
        if self.has_warmed_up:
            if self.average is not None:
                self.average.update(self.found_inf)
            return
        if made and self.found_inf.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # nothing is computed, and the engine gives the capture up
        self.host_checks += 1
        with host_sync_allowed():
            overflow = bool(self.found_inf.item())  # host sync
        if overflow:
            self._drop_entries(entries)
            return
        refuse_python_state(self.optimizer)
        if self.average is not None:
            self.average.update()
        self.has_warmed_up = True

    def was_skipped(self) -> bool:
        """Whether the latest update was skipped for overflow; the host waits for the device."""
        if self.scaler is None:
            return False
        self.host_checks += 1
        with host_sync_allowed():
            return bool(self.found_inf.item())  # host sync

    def _drop_entries(self, before: list[int]) -> None:
        """Remove state that was made since the owners had so many entries: the latest owners and entries."""
        state = self.optimizer.state
        for place, owner in enumerate([*state]):
            if place >= len(before):
                del state[owner]
                continue
            for name in [*state[owner]][before[place] :]:
                del state[owner][name]

    def _clip(self) -> None:
        if self._clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._model_parameters, self._clip_grad_norm)

    def _step(self) -> None:
        add_missing_momentum(self.optimizer)
        self.optimizer.step()

    def _step_masked(self) -> None:
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            optimizer: Any = self.optimizer
            optimizer.grad_scale, optimizer.found_inf = None, self.found_inf
            try:
                self._step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        else:
            parameters = [*self._with_gradients()]
            before = [[tensor.detach().clone() for tensor in self._written_by(one)] for one in parameters]
            self._step()
            skipped = self.found_inf.bool()
            with torch.no_grad():  # the tensors are listed again, because the step may have replaced them
                for one, old in zip(parameters, before, strict=True):
                    for now, then in zip(self._written_by(one), old, strict=False):  # what the step has made comes last
                        now.copy_(torch.where(skipped.to(now.device), then, now))

    def _written_by(self, parameter: nn.Parameter) -> list[Tensor]:
        """The tensors of a parameter that a step writes to."""
        values = self.optimizer.state.get(parameter, {}).values()
        written = [parameter, *(value for value in values if isinstance(value, Tensor))]
        return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in written]
