"""What a training changes outside of its model: its loss function, and further parameters that the optimizer holds."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_sink.common.ranks import warn
from torch_sink.loop.step.state import TrainState

LOSS_PREFIX = "loss_fn."


class Outside:
    """What is not in the model of a training, as it is now.

    Of the loss function, parameters that require a gradient or that the optimizer holds belong to the training. Buffers
    and frozen parameters do so once their values have changed since the first run began: running statistics, or a
    teacher that is an average. Until then they are the program's, as class weights and a frozen teacher are: not saved,
    and in another program what that one gives.

    Attributes:
        loss_fn: the loss function; an empty module for one that is none.
        parameters: those that the optimizer trains, by their place in its groups, as "group.number".
        names: of those that the loss function holds, by `id`.
    """

    def __init__(self, training: TrainState) -> None:
        self._training = training
        self.loss_fn = training.loss_fn if isinstance(training.loss_fn, nn.Module) else nn.Module()
        self.parameters: dict[str, nn.Parameter] = {}
        self.names: dict[int, str] = {}
        self._shared: set[str] = set()  # names, in the loss function, of tensors that the model holds too
        self._maybe_given: dict[str, Tensor] = {}  # buffers and frozen parameters of the loss function alone, by name
        model, loss_fn = training.model, self.loss_fn
        inside = {*map(id, model.parameters()), *map(id, model.buffers())}
        for number, group in enumerate(training.optimizer.param_groups if training.optimizer is not None else ()):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in inside:
                    self.parameters[f"{number}.{place}"] = parameter
        trained = set(map(id, self.parameters.values()))
        parameters = loss_fn.named_parameters(remove_duplicate=False)
        named: Iterator[tuple[str, Tensor]] = chain(parameters, loss_fn.named_buffers(remove_duplicate=False))
        for name, one in named:
            if id(one) in inside:
                self._shared.add(name)
                continue
            if isinstance(one, nn.Parameter):
                self.names.setdefault(id(one), LOSS_PREFIX + name)
            if not one.requires_grad and id(one) not in trained:
                self._maybe_given[name] = one

    def begin_run(self) -> None:
        """Keep what the program gave, before the first step changes it."""
        if self._training.history is None:
            tensors = {name: one for name, one in self._maybe_given.items() if not is_lazy(one)}
            copies = {
                name: _on_host(_own_part(one)) for name, one in tensors.items() if name not in self._training.given
            }
            self._training.given = {**copies, **self._training.given}

    def state_dict(self) -> dict[str, Any]:
        """The state, without copies; empty for what there is not.

        "loss_fn" is that of `loss_fn.state_dict()`, without what the program gave and tensors that the model holds too,
        and "loss_fn_buffers" are buffers that it leaves out. "other_parameters" are those that the optimizer trains
        and "loss_fn" does not hold, such as those of a module that `forward` uses.
        """
        whole, stays = self.loss_fn.state_dict(), {*self._shared}
        state: dict[str, dict[str, Any]] = {"loss_fn": {}, "loss_fn_buffers": {}, "other_parameters": {}}
        for name, tensor in self._maybe_given.items():
            if not self._has_changed(name, tensor):
                stays.add(name)
            elif name not in whole:
                state["loss_fn_buffers"][name] = tensor.detach()
        for name, value in whole.items():
            if name not in stays and self._can_load(name, value):
                state["loss_fn"][name] = value
        for place, parameter in self.parameters.items():
            if self.names.get(id(parameter), "").removeprefix(LOSS_PREFIX) not in state["loss_fn"]:
                state["other_parameters"][place] = parameter.detach()
        return state

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of an accumulation, by the places of their parameters."""
        found = {place: parameter.grad for place, parameter in self.parameters.items()}
        return {place: gradient.detach() for place, gradient in found.items() if gradient is not None}

    def differences(self, state: dict[str, Any]) -> Iterator[str]:
        """What keeps a state from being loaded, for each difference; an earlier version has saved none of it."""
        if "other_parameters" not in state:
            return
        then, whole = state["loss_fn"], self.loss_fn.state_dict()
        now = {name: value for name, value in whole.items() if name not in self._shared}
        if not then.keys() <= now.keys():
            names = [", ".join(sorted(one)) or "nothing" for one in (then, now)]
            yield f"saved with a loss_fn that holds {names[0]}, and the one of this loop holds {names[1]}"
        own = {"loss_fn": now, "loss_fn_buffers": self._maybe_given, "other_parameters": self.parameters}
        what = ("loss_fn holds", "loss_fn holds the buffer", "the optimizer has, outside of the model, parameter")
        for text, (part, tensors) in zip(what, own.items(), strict=True):
            for name, saved in state[part].items():
                one = tensors.get(name)
                if not isinstance(one, Tensor) or not isinstance(saved, Tensor) or is_lazy(one):
                    continue
                if one.shape != saved.shape:
                    yield f"saved where {text} {name} {list(saved.shape)}, and in this loop it is {list(one.shape)}"

    def load(self, state: dict[str, Any], undo: ExitStack) -> None:
        """Load a state, in place for existing tensors, and register how to undo that.

        A loop that does not train may have another loss function, which stays as it is.
        """
        is_earlier, trains = "other_parameters" not in state, self._training.optimizer is not None
        if not is_earlier and (trains or not [*self.differences(state)]):
            self._load_loss(state["loss_fn"], state["loss_fn_buffers"], undo)
        values, gradients = state.get("other_parameters", {}), state.get("other_gradients", {})
        for place, parameter in self.parameters.items():
            if place in values:
                _copy(parameter, values[place], undo)
            undo.callback(setattr, parameter, "grad", parameter.grad)
            gradient = gradients.get(place)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
        if self.parameters and is_earlier:
            warn(
                "the state is of an earlier version, which did not save parameters outside of the model: %d that the "
                "optimizer trains, of loss_fn or of what forward= uses, stay as they are now. Load them yourself "
                "before the run, or begin the training anew",
                len(self.parameters),
            )

    def _load_loss(self, saved: dict[str, Any], hidden: dict[str, Tensor], undo: ExitStack) -> None:
        training, own, given = self._training, self.loss_fn.state_dict(), self._training.given
        undo.callback(setattr, training, "given", given)
        training.given = {**given, **dict.fromkeys((*saved, *hidden))}
        undo.callback(self.loss_fn.load_state_dict, {**own, **{name: _on_host(own[name]) for name in saved}})
        self.loss_fn.load_state_dict({**own, **saved})
        for name, tensor in self._maybe_given.items():  # what a run of this loop has changed goes back, too
            value, target = _own_part(hidden.get(name, given.get(name))), _own_part(tensor)
            if name not in saved and value is not None and value.shape == target.shape:
                _copy(target, value, undo)

    def _has_changed(self, name: str, tensor: Tensor) -> bool:
        """Whether it is not, or not known to be, what the program gave."""
        if name not in self._training.given:
            return self._training.history is not None  # it was made in a run
        value = self._training.given[name]
        now = _own_part(tensor)
        return value is None or value.dtype != now.dtype or not torch.equal(value, now.to("cpu"))  # host sync

    def _can_load(self, name: str, value: Any) -> bool:
        """Whether a part of the loss function's state loads with `weights_only=True`; else a warning says so, once."""
        if isinstance(value, Tensor):
            return True
        file = io.BytesIO()
        try:
            torch.save(value, file)
        except Exception as error:  # what `pickle` raises depends on the value
            found = [f"what cannot be written ({error})"]
        else:
            file.seek(0)
            found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if found and name not in self._training.told_parts:
            self._training.told_parts.add(name)
            warn(
                "%s of loss_fn's state is not saved: it holds %s, which would not load with weights_only=True; keep "
                "tensors and plain numbers in it, or name the class to torch.serialization.add_safe_globals",
                name,
                ", ".join(found),
            )
        return not found


def _on_host(value: Any) -> Any:
    """A copy on the host, because the device may have no room for it."""
    if isinstance(value, Tensor) and not is_lazy(value):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _own_part(tensor: Any) -> Any:
    """What of a tensor lies on this rank: a sharded one, as of a large teacher, is not compared as a whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _copy(tensor: Tensor, value: Tensor, undo: ExitStack) -> None:
    undo.callback(tensor.copy_, _on_host(tensor))
    tensor.copy_(value)


def may_be_same(then: str, now: str) -> bool:
    """Whether names of parameters agree; an earlier version had no names for those of a loss function."""
    return then == now or (then == "?" and now.startswith(LOSS_PREFIX))
