"""What a captured graph holds as constants: numbers and addresses that must not change while it is replayed."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from torch_sink.loop.step.step import TrainingStep


def address(tensor: Tensor) -> int:
    """Where a tensor's values lie; of a sharded one, where this rank's part does."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor.data_ptr()
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's own address is 0
    return int(local.data_ptr())


class Places:
    """Where the tensors lie that a step may write to: optimizer state and buffers, as they are now.

    Args:
        model: its buffers.
        optimizer: its state.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._state = _tensors(optimizer.state)
        self._buffers = _tensors({module: module._buffers for module in model.modules()})
        self._addresses = {id(value): address(value) for value in (*self._state.values(), *self._buffers.values())}

    def replaced(self) -> set[str]:
        """Names of what a step has put elsewhere, or made away with, since then."""
        now = Places(self._model, self._optimizer)
        owner_name = type(self._optimizer).__name__
        state = {
            f"{name} of {owner_name}"
            for (owner, name), value in self._state.items()
            if self._moved(value, now._state.get((owner, name)))
        }
        buffers = {
            f"the buffer {name}"
            for (owner, name), value in self._buffers.items()
            if self._moved(value, now._buffers.get((owner, name)))
        }
        return state | buffers

    def has_new_state(self) -> bool:
        """Whether the optimizer has made state since then."""
        return not _tensors(self._optimizer.state).keys() <= self._state.keys()

    def put_back(self) -> None:
        """Undo what a step that was only recorded has done to state and buffers."""
        for parameter, name in _tensors(self._optimizer.state).keys() - self._state.keys():
            del self._optimizer.state[parameter][name]
        for (parameter, name), value in self._state.items():
            self._optimizer.state[parameter][name] = value
        for (module, name), value in self._buffers.items():
            module._buffers[name] = value

    def _moved(self, before: Tensor, now: Tensor | None) -> bool:
        return now is None or address(now) != self._addresses[id(before)]


def _tensors(owners: Any) -> dict[tuple[Any, str], Tensor]:
    return {
        (owner, name): value
        for owner, entries in owners.items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }


def fingerprint(
    modules: list[nn.Module], step: TrainingStep, optimizer: torch.optim.Optimizer, tabled: set[str]
) -> Any:
    """All constants of a graph of `step`; unequal to an earlier one when it must be recorded anew.

    Args:
        modules: all of the model when the graph was recorded, since walking it takes longer than all the rest: their
            members, train or eval state, dropout rates and buffers.
        step: its parameters and, where they stay in place, their gradients.
        optimizer: its state and the numbers in its groups.
        tabled: names of the groups' numbers that a graph reads from the device instead.
    """
    numbers = [
        (name, value if not isinstance(value, Tensor) else address(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in tabled
    ]
    states = [(module.training, module.p if isinstance(module, _DropoutNd) else None) for module in modules]
    members = [id(member) for module in modules for member in module._modules.values()]
    buffers = [address(b) for module in modules for b in module._buffers.values() if b is not None]
    parameters = [(address(p), p.requires_grad) for p in step.update.parameters]
    gradients = [address(p.grad) if p.grad is not None else 0 for p in step.update.parameters if step.static_gradients]
    optimizer_states = [
        address(value)
        for entries in optimizer.state.values()
        for value in entries.values()
        if isinstance(value, Tensor)
    ]
    return numbers, states, members, buffers, parameters, gradients, optimizer_states


def same_places(tensors: list[Tensor], recorded: list[Tensor]) -> bool:
    """Whether tensors lie where recorded ones do. Slots are read in place, so that they are mostly the same objects."""
    if len(tensors) != len(recorded):
        return False
    return all(map(operator.is_, tensors, recorded)) or _addresses(tensors) == _addresses(recorded)


def _addresses(tensors: list[Tensor]) -> list[Any]:
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
