"""Where the tensors lie that a step reads and writes, and what a captured graph holds of them as constants."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from torch_sink.loop.step.step import TrainingStep


class Places:
    """Where the tensors lie that a step may write to: optimizer state and the model's buffers, as they are now."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._kind = model, type(optimizer).__name__
        self._state: Any = optimizer.state if optimizer is not None else {}
        self._before = {key: (value, address(value)) for key, value in self._tensors().items()}

    def problem(self) -> str | None:
        """What a step since then has put elsewhere, where each replay would begin with the old one; None if nothing."""
        now, kind = self._tensors(), self._kind
        moved = [key for key, (_, place) in self._before.items() if key not in now or address(now[key]) != place]
        names = {f"the buffer {name}" if isinstance(owner, nn.Module) else f"{name} of {kind}" for owner, name in moved}
        if not names:
            return None
        return (
            f"the step puts new tensors in the place of {', '.join(sorted(names))}, and a graph would go on with the "
            "old ones; what is written in place can be captured"
        )

    def has_new_state(self) -> bool:
        """Whether the optimizer has made state since then."""
        return bool(self._new_state())

    def put_back(self) -> None:
        """Undo what a step that was only recorded has done to state and buffers."""
        for parameter, name in self._new_state():
            del self._state[parameter][name]
        for (owner, name), (value, _) in self._before.items():
            entries = owner._buffers if isinstance(owner, nn.Module) else self._state[owner]
            entries[name] = value

    def _new_state(self) -> set[Any]:
        return _tensors(self._state).keys() - self._before.keys()

    def _tensors(self) -> dict[tuple[Any, str], Tensor]:
        buffers = {module: module._buffers for module in self._model.modules()}
        return _tensors(self._state) | _tensors(buffers)


def _tensors(owners: Any) -> dict[tuple[Any, str], Tensor]:
    entries = ((owner, name, value) for owner, named in owners.items() for name, value in named.items())
    return {(owner, name): value for owner, name, value in entries if isinstance(value, Tensor)}


def fingerprint(model: nn.Module, step: TrainingStep, optimizer: torch.optim.Optimizer, tabled: set[str]) -> Any:
    """All constants of a graph of `step`; unequal to an earlier one when it must be recorded anew.

    `tabled` are names of the optimizer's numbers that a graph reads from the device instead.
    """
    numbers = [
        (name, value if not isinstance(value, Tensor) else address(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in tabled
    ]
    modules = [*model.modules()]
    states = [(one, one.training, one.p if isinstance(one, _DropoutNd) else None) for one in modules]
    # Not by model.buffers(), which takes four times as long: the device has nothing to do meanwhile.
    buffers = [address(buffer) for one in modules for buffer in one._buffers.values() if buffer is not None]
    parameters = [(address(p), p.requires_grad) for p in step.update.parameters]
    gradients = [address(p.grad) if p.grad is not None else 0 for p in step.update.parameters if step.static_gradients]
    entries = (entry for of_parameter in optimizer.state.values() for entry in of_parameter.values())
    optimizer_state = [address(entry) for entry in entries if isinstance(entry, Tensor)]
    return numbers, states, buffers, parameters, gradients, optimizer_state


def address(tensor: Tensor) -> int:
    """Where a tensor's values lie; of a sharded one, where this rank's part does."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor.data_ptr()
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's own address is 0
    return int(local.data_ptr())
