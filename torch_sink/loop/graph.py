"""The engine that replays captured steps: one graph per ring slot, each reading its slot in place."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from torch_sink.errors import SinkError, UnsupportedOperation
from torch_sink.loop.capturable import host_state, make_capturable
from torch_sink.loop.capture import Capture
from torch_sink.loop.compiled_loss import UsualShape, batch_signature
from torch_sink.loop.distributed import Ranks
from torch_sink.loop.engine import Engine
from torch_sink.loop.history import SinkRecord
from torch_sink.loop.host_sync import host_sync_allowed, user_place
from torch_sink.loop.reasons import Reasons
from torch_sink.loop.schedule import RateTable, Schedule
from torch_sink.loop.step import TrainingStep, batch_leaves, batch_tensors
from torch_sink.loop.step_log import ReplayedLog
from torch_sink.loop.update import python_state, refuse_python_state

_log = logging.getLogger("torch_sink")
WARMUP_STEPS = 3
# DistributedDataParallel rebuilds its buckets and times itself during its first ten steps.
DISTRIBUTED_WARMUP_STEPS = 11
STAGED = "staged"


class GraphEngine(Engine):
    """Captures the whole step once per ring slot and replays it: no kernel is launched from Python after that.

    The run's first steps are the warm-up: real, counted, uncaptured, and nothing of them is undone. A batch is read
    where it lies; one that lies in no static slot but has the usual shape is copied to a staging place first; any
    other shape runs uncaptured. Learning rates come from a device table by the cursor of the log, in every kind of
    step. When anything that a graph has baked in changes (a number in `param_groups`, the memory of a parameter, a
    gradient or a state tensor), the graphs are captured anew. What cannot be captured runs uncaptured from then on.

    Args:
        step: the training step, with a ReplayedLog.
        schedule: planned ahead for each sink.
        capture: records and replays.
        reasons: told what ran uncaptured, and why.
        warmup_steps: least number of uncaptured steps before the first capture.
        lower_mode: name of the mode of uncaptured steps, "compile" or "eager".
        watchable: see Engine.
        ranks: the processes, or None for one.
        refuse_python_state: raise for optimizers that count in Python numbers, instead of stepping down.
    """

    def __init__(
        self,
        step: TrainingStep,
        schedule: Schedule,
        capture: Capture,
        reasons: Reasons,
        *,
        warmup_steps: int = WARMUP_STEPS,
        lower_mode: str = "compile",
        watchable: bool = False,
        refuse_python_state: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__("graph", step, schedule, watchable=watchable, ranks=ranks)
        if not isinstance(step.log, ReplayedLog):
            raise TypeError(f"a captured step writes to a ReplayedLog, and its log is a {type(step.log).__name__}")
        self.captures = 0
        self._capture, self._reasons, self._lower_mode = capture, reasons, lower_mode
        self._refuse_python_state = refuse_python_state
        self._warmup_left = warmup_steps
        self._rates = RateTable(schedule, step.log.capacity, step.log.device, step.log.cursor)
        self._freeze_log = step.log.freeze
        self._graphs: dict[tuple[Any, bool], tuple[Any, Callable[[], None]]] = {}
        self._staging: Any = None
        self._shape = UsualShape()
        self._fingerprint: Any = None
        self._planned = 0
        self._replaced: set[str] = set()
        self._loader: weakref.ref[Any] | None = None
        self._pause: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def host_syncs(self) -> int:
        return super().host_syncs + self.captures

    def running(self) -> AbstractContextManager[Any]:
        return self._capture.stream()

    def attach(self, loader: Any) -> None:
        self._pause = getattr(loader, "paused", nullcontext)
        if self._graphs and (self._loader is None or self._loader() is not loader):
            self._forget_graphs()  # they read the slots of another ring
        self._loader = weakref.ref(loader)

    def begin(self, steps: int, iteration: int) -> None:
        self.log.start()
        self._planned = steps
        make_capturable(self.schedule.optimizer)
        self._rates.write(self.schedule.plan(steps, iteration))
        if self._graphs and self._fingerprint != self._baked():
            self._forget_graphs()
            self._reasons.count("graphs were captured again because something baked into them had changed")

    def step(self, batch: Any, *, first: bool, last: bool) -> None:
        if self._warmup_left > 0 or self.mode != "graph" or not self._ready_to_capture():
            self._warmup_left -= 1
            self._shape.accepts(_signature(batch))
            before = self._state_places() if self.mode == "graph" else {}
            self._launch(batch, first=first, last=last)
            after = self._state_places() if before else {}
            self._replaced.update(name for key, (name, place) in before.items() if after.get(key) != (name, place))
            return
        replay = self._graph_for(batch, last)
        if replay is None:
            self._launch(batch, first=first, last=last)
        else:
            replay()

    def end(self, steps: int, iteration: int) -> SinkRecord:
        if steps < self._planned:
            self.schedule.rewind(steps, iteration)
        return super().end(steps, iteration)

    def close(self) -> None:
        self._forget_graphs()

    def _ready_to_capture(self) -> bool:
        return self.training_step.update.has_warmed_up

    def _launch(self, batch: Any, *, first: bool, last: bool) -> None:
        with self._rates.bound():
            if last:
                self._rates.load_row()
            self.training_step.run(batch, first=first, last=last)

    def _graph_for(self, batch: Any, last: bool) -> Callable[[], None] | None:
        slot = getattr(self._loader() if self._loader is not None else None, "slot_index", None)
        tensors = batch_tensors(batch)
        places = [(tensor.data_ptr(), tensor.shape) for tensor in tensors]
        known = self._graphs.get((slot, last))
        flat = isinstance(batch, (tuple, list)) and len(tensors) == len(batch)
        if flat and known is not None and known[0] == places:
            return known[1]  # nothing but tensors, all where the graph reads them
        signature = _signature(batch)
        is_known = self._shape.knows(signature)
        if not self._shape.accepts(signature):
            self._reasons.count("batches of another shape or with other numbers than the usual ones ran uncaptured")
            return None
        if not is_known:
            return None  # the compiler is busy with it in this step, which no capture would survive
        if slot is None or (known is not None and known[0] != places):
            return self._staged(batch, tensors, last)
        return known[1] if known is not None else self._record((slot, last), places, batch, last)

    def _staged(self, batch: Any, tensors: list[Tensor], last: bool) -> Callable[[], None] | None:
        self._reasons.count("batches that lay in no static slot were copied to one place before their step")
        if self._staging is None:
            self._staging = torch.utils._pytree.tree_map_only(Tensor, torch.clone, batch)
        for target, source in zip(batch_tensors(self._staging), tensors, strict=True):
            target.copy_(source, non_blocking=True)
        known = self._graphs.get((STAGED, last))
        return known[1] if known is not None else self._record((STAGED, last), [], self._staging, last)

    def _record(self, key: tuple[Any, bool], places: list[Any], batch: Any, last: bool) -> Callable[[], None] | None:
        self._freeze_log()
        if not self._graphs:
            self._fingerprint = self._baked()
        try:
            self._check_optimizer()
            with host_sync_allowed(), self._pause():
                replay = self._capture.record(lambda: self._captured(batch, last))
        except UnsupportedOperation:
            raise
        except Exception as error:
            self._step_down(error)
            return None
        self.captures += 1
        self._graphs[key] = places, replay
        return replay

    def _captured(self, batch: Any, last: bool) -> None:
        static = self.training_step.static_gradients
        self._launch(batch, first=not static, last=last)
        if not static:
            # Gradients that lived on in the pool would be overwritten by the other graphs that share it.
            self.training_step.update.zero_gradients()

    def _check_optimizer(self) -> None:
        optimizer = self.schedule.optimizer
        if self._refuse_python_state or not python_state(optimizer):
            refuse_python_state(optimizer)
        if self._replaced:
            raise SinkError(
                f"{type(optimizer).__name__} puts new tensors in the place of {', '.join(sorted(self._replaced))}, and "
                "a graph would go on with the old ones; an optimizer that writes to its state in place can be captured"
            )
        hidden = python_state(optimizer) + host_state(optimizer)
        if hidden:
            raise SinkError(f"{type(optimizer).__name__} keeps {', '.join(hidden)} on the host")

    def _step_down(self, error: Exception) -> None:
        self.mode = self._lower_mode
        self._forget_graphs()
        if not self.training_step.static_gradients:
            self.training_step.update.zero_gradients()
        line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        text = f"the step cannot be captured, so it runs in mode {self.mode!r}: {type(error).__name__}: {line}"
        self._reasons.note(f"{text} (at {user_place(error)})")
        _log.warning(text)

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._staging = None
        self._capture.reset()

    def _state_places(self) -> dict[tuple[int, str], tuple[str, int]]:
        """Where the optimizer's state tensors lie, with their names."""
        return {
            (id(parameter), name): (name, value.data_ptr())
            for parameter, entries in self.schedule.optimizer.state.items()
            for name, value in entries.items()
            if isinstance(value, Tensor)
        }

    def _baked(self) -> tuple[Any, ...]:
        """All that a graph holds as a constant: numbers of the groups, and addresses."""
        optimizer, static = self.schedule.optimizer, self.training_step.static_gradients
        tabled = ("params", "lr", "initial_lr", *(("betas",) if self.schedule.cycles_betas else ()))
        numbers = tuple(
            (name, value if not isinstance(value, Tensor) else value.data_ptr())
            for group in optimizer.param_groups
            for name, value in group.items()
            if name not in tabled
        )
        parameters = self.training_step.update.parameters
        addresses = tuple(parameter.data_ptr() for parameter in parameters)
        gradients = tuple(p.grad.data_ptr() if static and p.grad is not None else 0 for p in parameters)
        states = tuple(
            value.data_ptr()
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, Tensor)
        )
        return numbers, addresses, gradients, states


def _signature(batch: Any) -> tuple[Any, ...]:
    """Shapes and the like, and the numbers: a graph holds both as constants."""
    return batch_signature(batch), tuple(leaf for leaf in batch_leaves(batch) if not isinstance(leaf, Tensor))
