"""What a training changes outside of its model: its loss function, and further parameters that the optimizer holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_sink.common.ranks import warn
from torch_sink.loop.step.state import TrainState

LOSS_PREFIX = "loss_fn."


class Outside:
    """What is not in the model of a training, as it is now.

    Attributes:
        loss_fn: the loss function, if it is a module; None else.
        parameters: those that the optimizer trains, by their place in its groups, as "group.number".
        names: of those that the loss function holds, by `id`.
    """

    def __init__(self, training: TrainState) -> None:
        self._model, self._trains = training.model, training.optimizer is not None
        self.loss_fn = loss_fn = training.loss_fn if isinstance(training.loss_fn, nn.Module) else None
        self._loads_buffers = False
        self.parameters: dict[str, nn.Parameter] = {}
        inside = set(map(id, training.model.parameters()))
        for number, group in enumerate(training.optimizer.param_groups if training.optimizer is not None else ()):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) not in inside:
                    self.parameters[f"{number}.{place}"] = parameter
        named = () if loss_fn is None else loss_fn.named_parameters()
        self.names = {id(one): LOSS_PREFIX + name for name, one in named if id(one) not in inside}

    def state_dict(self) -> dict[str, Any]:
        """The state, without copies; empty for what there is not.

        "loss_fn" is that of `loss_fn.state_dict()`, without tensors that the model holds too, and "loss_fn_buffers" are
        the buffers that it leaves out. "other_parameters" are those that the optimizer trains and the loss function
        does not hold, such as those of a module that `forward` uses.
        """
        state: dict[str, Any] = {"loss_fn": {}, "loss_fn_buffers": {}, "other_parameters": {}}
        if self.loss_fn is not None:
            state["loss_fn"] = loss = self._loss_state()
            hidden = {name: buffer.detach() for name, buffer in self._buffers().items() if name not in loss}
            state["loss_fn_buffers"] = hidden
        for place, parameter in self.parameters.items():
            if id(parameter) not in self.names:
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
        then, now = state["loss_fn"], self._loss_state()
        if then.keys() != now.keys():
            names = [", ".join(sorted(one)) or "nothing" for one in (then, now)]
            yield f"saved with a loss_fn that holds {names[0]}, and the one of this loop holds {names[1]}"
        own = {"loss_fn": now, "loss_fn_buffers": self._buffers(), "other_parameters": self.parameters}
        what = ("loss_fn holds", "loss_fn holds the buffer", "the optimizer has, outside of the model, parameter")
        for text, (part, tensors) in zip(what, own.items(), strict=True):
            for name, saved in state[part].items():
                one = tensors.get(name)
                if isinstance(one, Tensor) and not is_lazy(one) and one.shape != saved.shape:
                    yield f"saved where {text} {name} {list(saved.shape)}, and in this loop it is {list(one.shape)}"

    def load_loss(self, state: dict[str, Any]) -> None:
        """Load the state of the loss function; another one, as a loop that does not train may have, stays as it is."""
        if self.loss_fn is None or (not self._trains and [*self.differences(state)]):
            return
        shared = self._shared()
        of_model = {name: value for name, value in self.loss_fn.state_dict().items() if name in shared}
        self.loss_fn.load_state_dict({**of_model, **state["loss_fn"]})
        self._loads_buffers = True

    def load(self, state: dict[str, Any]) -> None:
        """Load buffers, parameters and gradients, in place; after `load_loss`. It does not fail."""
        for name, buffer in self._buffers().items() if self._loads_buffers else ():
            if name in state["loss_fn_buffers"]:
                buffer.copy_(state["loss_fn_buffers"][name])
        gradients = state.get("other_gradients", {})
        for place, parameter in self.parameters.items():
            if place in state.get("other_parameters", {}):
                parameter.copy_(state["other_parameters"][place])
            gradient = gradients.get(place)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
        if self.parameters and "other_parameters" not in state:
            warn(
                "the state is of an earlier version, which did not save parameters outside of the model: %d that the "
                "optimizer trains, of loss_fn or of what forward= uses, stay as they are now. Load them yourself "
                "before the run, or begin the training anew",
                len(self.parameters),
            )

    def _loss_state(self) -> dict[str, Any]:
        if self.loss_fn is None:
            return {}
        shared = self._shared()
        return {name: value for name, value in self.loss_fn.state_dict().items() if name not in shared}

    def _buffers(self) -> dict[str, Tensor]:
        """The buffers of the loss function that are not the model's."""
        if self.loss_fn is None:
            return {}
        shared = self._shared()
        return {name: buffer for name, buffer in self.loss_fn.named_buffers() if name not in shared}

    def _shared(self) -> set[str]:
        """The names, in the loss function, of tensors that the model holds too."""
        if self.loss_fn is None:
            return set()
        inside = {*map(id, self._model.parameters()), *map(id, self._model.buffers())}
        parameters = self.loss_fn.named_parameters(remove_duplicate=False)
        buffers = self.loss_fn.named_buffers(remove_duplicate=False)
        return {name for name, one in (*parameters, *buffers) if id(one) in inside}


def may_be_same(then: str, now: str) -> bool:
    """Whether names of parameters agree; an earlier version had no names for those of a loss function."""
    return then == now or (then == "?" and now.startswith(LOSS_PREFIX))
