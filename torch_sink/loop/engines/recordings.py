"""Recorded graphs: which one belongs to a batch, and what they hold as constants while they are replayed."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from torch_sink.common.containers import is_flat
from torch_sink.errors import SinkError
from torch_sink.loop.core.batches import UsualShape, batch_constants, batch_tensors, map_tensors
from torch_sink.loop.core.history import Reasons
from torch_sink.loop.engines.capture import CudaCapture
from torch_sink.loop.step.step import TrainingStep
from torch_sink.thread_waits import host_sync_allowed

STAGED = "staged"
ODD_BATCHES = "batches of another shape or with other numbers than the usual ones ran uncaptured"
Replay = Callable[[], Any]


class Recordings:
    """Replays of what is done with a batch: one for each slot of a ring, read in place, and one for all other places.

    A batch that lies in no static slot but has the usual shape is copied to a staging place first; any other shape
    runs unrecorded, and so does the first batch of the usual one, with which libraries and the compiler are busy.
    `pause()` parks the producer of the loader at hand.
    """

    def __init__(self, capture: CudaCapture, reasons: Reasons) -> None:
        self._capture, self._reasons = capture, reasons
        self.shape = UsualShape()
        self.pause: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._replays: dict[tuple[Any, Any], tuple[list[Tensor], Replay]] = {}
        self._staging: Any = None
        self._ring: weakref.ref[Any] | None = None

    def __len__(self) -> int:
        return len(self._replays)

    def attach(self, loader: Any) -> None:
        """Take note of the loader of the coming batches, whose slots are to be read in place."""
        self.pause = getattr(loader, "paused", nullcontext)
        if self._replays and self._ring is not None and self._ring() is not loader:
            self.forget()  # they read the slots of another ring
        self._ring = weakref.ref(loader)

    def find(self, batch: Any, tensors: list[Tensor], kind: Any = None) -> tuple[Any, Any, Replay | None] | None:
        """Slot, batch as it lies there, and the replay, None if it is to be recorded; or None: run it unrecorded."""
        slot = getattr(self._ring() if self._ring is not None else None, "slot_index", None)
        known = self._replays.get((slot, kind))
        if known is not None and is_flat(batch) and same_places(tensors, known[0]):
            return slot, batch, known[1]  # nothing but tensors, all where the graph reads them
        constants = batch_constants(batch)
        is_known = self.shape.knows(constants)
        if not self.shape.accepts(constants):
            self._reasons.count(ODD_BATCHES)
            return None
        if not is_known:
            return None
        if slot is None or (known is not None and not same_places(tensors, known[0])):
            self._stage(batch, tensors)
            slot, batch, known = STAGED, self._staging, self._replays.get((STAGED, kind))
        return slot, batch, known[1] if known is not None else None

    def whole_ring(self, slot: Any, batch: Any) -> dict[Any, Any]:
        """The batch in its slot, and those like it in all others: to be recorded at once, while the device is idle."""
        others = getattr(self._ring() if self._ring is not None else None, "static_batches", None)
        return {slot: batch} if slot == STAGED or others is None else {**others(batch), slot: batch}

    def record(self, function: Callable[[Any], Any], batches: dict[Any, Any]) -> dict[Any, Replay]:
        """Record a function for each slot's batch; `keep` them if nothing speaks against it."""
        with host_sync_allowed(), self.pause():
            return {slot: self._capture.record(partial(function, batch)) for slot, batch in batches.items()}

    def keep(self, replays: dict[Any, Replay], batches: dict[Any, Any], kind: Any = None) -> None:
        """Find these replays from now on."""
        self._replays.update({(slot, kind): (batch_tensors(batches[slot]), replays[slot]) for slot in replays})

    def forget(self) -> None:
        """Destroy all recordings."""
        self._replays.clear()
        self._staging = None
        self._capture.reset()

    def _stage(self, batch: Any, tensors: list[Tensor]) -> None:
        if self._staging is None:
            self._staging = map_tensors(Tensor.clone, batch)
        for target, source in zip(batch_tensors(self._staging), tensors, strict=True):
            target.copy_(source, non_blocking=True)


def address(tensor: Tensor) -> int:
    """Where a tensor's values lie; of a sharded one, where this rank's part does."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor.data_ptr()
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's own address is 0
    return int(local.data_ptr())


def same_places(tensors: list[Tensor], recorded: list[Tensor]) -> bool:
    """Whether tensors lie where recorded ones do. Slots are read in place, so that they are mostly the same objects."""
    if len(tensors) != len(recorded):
        return False
    return all(map(operator.is_, tensors, recorded)) or _addresses(tensors) == _addresses(recorded)


def _addresses(tensors: list[Tensor]) -> list[Any]:
    return [(tensor.data_ptr(), tensor.shape) for tensor in tensors]


class Places:
    """Where the tensors lie that a step may write to: optimizer state and the model's buffers, as they are now."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._before = {key: (value, address(value)) for key, value in self._tensors().items()}

    def check(self) -> None:
        """Raise if a step that was recorded has put a tensor elsewhere: each replay would begin with the old one."""
        now, kind = self._tensors(), type(self._optimizer).__name__
        moved = [key for key, (_, place) in self._before.items() if key not in now or address(now[key]) != place]
        names = {f"the buffer {name}" if isinstance(owner, nn.Module) else f"{name} of {kind}" for owner, name in moved}
        if names:
            raise SinkError(
                f"the step puts new tensors in the place of {', '.join(sorted(names))}, and a graph would go on with "
                "the old ones; what is written in place can be captured"
            )

    def has_new_state(self) -> bool:
        """Whether the optimizer has made state since then."""
        return bool(self._new_state())

    def put_back(self) -> None:
        """Undo what a step that was only recorded has done to state and buffers."""
        for parameter, name in self._new_state():
            del self._optimizer.state[parameter][name]
        for (owner, name), (value, _) in self._before.items():
            entries = owner._buffers if isinstance(owner, nn.Module) else self._optimizer.state[owner]
            entries[name] = value

    def _new_state(self) -> set[Any]:
        return _tensors(self._optimizer.state).keys() - self._before.keys()

    def _tensors(self) -> dict[tuple[Any, str], Tensor]:
        buffers = {module: module._buffers for module in self._model.modules()}
        return _tensors(self._optimizer.state) | _tensors(buffers)


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
    states = [(id(one), one.training, one.p if isinstance(one, _DropoutNd) else None) for one in modules]
    buffers = [address(buffer) for buffer in model.buffers()]
    parameters = [(address(p), p.requires_grad) for p in step.update.parameters]
    gradients = [address(p.grad) if p.grad is not None else 0 for p in step.update.parameters if step.static_gradients]
    return numbers, states, buffers, parameters, gradients, [*map(address, _tensors(optimizer.state).values())]
