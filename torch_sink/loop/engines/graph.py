"""The engine that replays captured steps: one graph per ring slot, each reading its slot in place."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.errors import SinkError, UnsupportedOperation
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.history import SinkRecord
from torch_sink.loop.core.host_sync import host_sync_allowed, user_place
from torch_sink.loop.core.reasons import Reasons
from torch_sink.loop.engines.baked import Places, fingerprint, same_places
from torch_sink.loop.engines.capture import Capture
from torch_sink.loop.engines.compiled import UsualShape, batch_signature
from torch_sink.loop.engines.eager import Engine
from torch_sink.loop.step.capturable import host_state, make_capturable
from torch_sink.loop.step.schedule import RateTable, Schedule
from torch_sink.loop.step.step import TrainingStep, batch_leaves, batch_tensors
from torch_sink.loop.step.step_log import ReplayedLog
from torch_sink.loop.step.update import python_state, refuse_python_state

_log = logging.getLogger("torch_sink")
WARMUP_STEPS = 3
# DistributedDataParallel rebuilds its buckets and times itself during its first ten steps.
DISTRIBUTED_WARMUP_STEPS = 11
STAGED = "staged"
ODD_BATCHES = "batches of another shape or with other numbers than the usual ones ran uncaptured"


class GraphEngine(Engine):
    """Captures the whole step once per ring slot and replays it: no kernel is launched from Python after that.

    The run's first steps are the warm-up: real, counted, uncaptured, and nothing of them is undone. The last of each
    kind, with an update and without, is a trial: what would make a capture fail is looked for. A batch is read
    where it lies; one that lies in no static slot but has the usual shape is copied to a staging place first; any
    other shape runs uncaptured. Learning rates come from a device table by the cursor of the log, in every kind of
    step. When anything that a graph has baked in changes (a number in `param_groups`, the train or eval state of a
    module, the memory of a parameter, a buffer, a gradient or a state tensor), there is one more trial, and the graphs
    are captured anew. What cannot be captured runs uncaptured from then on.

    Args:
        model: whose step it is.
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
        model: nn.Module,
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
        self._model, self._modules = model, list(model.modules())
        self._tried: set[bool] = set()
        self._tabled = {"params", "lr", "initial_lr"}.union(["betas"] if schedule.cycles_betas else [])
        self._capture, self._reasons, self._lower_mode = capture, reasons, lower_mode
        self._refuse_python_state = refuse_python_state
        self._warmup_left = warmup_steps
        self._replayed_log = step.log
        make_capturable(schedule.optimizer, cycles_betas=schedule.cycles_betas)
        self._rates = RateTable(schedule, step.log.capacity, step.log.device, step.log.cursor)
        self._graphs: dict[tuple[Any, bool], tuple[Any, Callable[[], None]]] = {}
        self._staging: Any = None
        self._shape = UsualShape()
        self._fingerprint: Any = None
        self._plan: list[list[float]] = []
        self._position = 0
        self._may_have_changed = self._callbacks = True
        self._replaced: set[str] = set()
        self._loader: weakref.ref[Any] | None = None
        self._pause: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def host_syncs(self) -> int:
        return super().host_syncs + self.captures

    def running(self) -> AbstractContextManager[Any]:
        return self._capture.stream()

    def attach(self, loader: Any, *, callbacks: bool) -> None:
        self._may_have_changed, self._callbacks = True, callbacks
        self._pause = getattr(loader, "paused", nullcontext)
        if self._graphs and (self._loader is None or self._loader() is not loader):
            self._forget_graphs()  # they read the slots of another ring
        self._loader = weakref.ref(loader)

    def reserve(self, steps: int) -> None:
        log, groups = self._replayed_log, len(self.schedule.optimizer.param_groups)
        if steps > log.capacity or groups != self._rates.groups:
            self._forget_graphs()
            if steps > log.capacity:
                log.reserve(steps)
            self._rates = RateTable(self.schedule, log.capacity, log.device, log.cursor)

    def begin(self, steps: int, iteration: int) -> None:
        self._plan, self._position = [], 0
        if self.mode != "graph":
            super().begin(steps, iteration)
            return
        if self._may_have_changed:
            self._take_changes_in(steps)
        self._may_have_changed = self._callbacks
        self.log.start()
        self._plan = self.schedule.plan(steps, iteration)
        self._rates.write(self._plan)

    def _take_changes_in(self, steps: int) -> None:
        """What callbacks, or the user between two runs, may have changed. It takes a look at every parameter."""
        self.training_step.update.follow_optimizer()
        make_capturable(self.schedule.optimizer, cycles_betas=self.schedule.cycles_betas)
        self.reserve(steps)
        if self._graphs and self._fingerprint != self._baked():
            self._forget_graphs()
            self._tried.clear()
            self._replaced.clear()
            self._reasons.count("graphs were captured again because something baked into them had changed")

    def step(self, batch: Any, tensors: list[Tensor], *, first: bool, last: bool) -> None:
        if self.mode != "graph":
            self._step_uncaptured(batch, tensors, first=first, last=last)
        elif self._warmup_left > 0 or last not in self._tried or not self._ready_to_capture():
            self._warm_up(batch, first=first, last=last)
        else:
            replay = self._graph_for(batch, tensors, last)
            if replay is not None:
                replay()
            elif self.mode == "graph":
                self._launch(batch, first=first, last=last)
            else:
                self._step_uncaptured(batch, tensors, first=first, last=last)
        self._position += 1

    def end(self, steps: int, iteration: int) -> SinkRecord:
        if steps < len(self._plan):
            self.schedule.rewind(steps, iteration)
        return super().end(steps, iteration)

    def close(self) -> None:
        self._forget_graphs()

    def _ready_to_capture(self) -> bool:
        return self.training_step.update.has_warmed_up

    def _step_uncaptured(self, batch: Any, tensors: list[Tensor], *, first: bool, last: bool) -> None:
        """A step in the lower mode: with Python numbers, since optimizers may read what they are given on the host."""
        if not self._plan:
            super().step(batch, tensors, first=first, last=last)
            return
        with self._rates.bound(self._plan[self._position]):
            self.training_step.run(batch, first=first, last=last)

    def _warm_up(self, batch: Any, *, first: bool, last: bool) -> None:
        self._warmup_left -= 1
        signature = _signature(batch)
        # The first batch of a shape is the compiler's, which waits for the device as it likes.
        is_trial = self._warmup_left <= 0 and self._ready_to_capture() and self._shape.knows(signature)
        if not self._shape.accepts(signature) and self._warmup_left < 0:
            self._reasons.count(ODD_BATCHES)
        if not is_trial:
            self._launch(batch, first=first, last=last)
            return
        problems: list[str] = []
        before = Places(self._model, self.schedule.optimizer)
        with self._pause(), self._capture.trial(problems, self.training_step.update.parameters):
            self._launch(batch, first=first, last=last)
        self._tried.add(last)
        self._replaced |= before.replaced()
        if problems:
            self._step_down(problems[0])

    def _launch(self, batch: Any, *, first: bool, last: bool) -> None:
        with self._rates.bound():
            if last:
                self._rates.load_row()
            self.training_step.run(batch, first=first, last=last)

    def _graph_for(self, batch: Any, tensors: list[Tensor], last: bool) -> Callable[[], None] | None:
        slot = getattr(self._loader() if self._loader is not None else None, "slot_index", None)
        known = self._graphs.get((slot, last))
        flat = isinstance(batch, (tuple, list)) and len(tensors) == len(batch)
        if flat and known is not None and same_places(tensors, known[0]):
            return known[1]  # nothing but tensors, all where the graph reads them
        signature = _signature(batch)
        is_known = self._shape.knows(signature)
        if not self._shape.accepts(signature):
            self._reasons.count(ODD_BATCHES)
            return None
        if not is_known:
            return None  # the compiler is busy with it in this step, which no capture would survive
        if slot is None or (known is not None and not same_places(tensors, known[0])):
            return self._staged(batch, tensors, last)
        return known[1] if known is not None else self._record_all(slot, batch, last)

    def _staged(self, batch: Any, tensors: list[Tensor], last: bool) -> Callable[[], None] | None:
        self._reasons.count("batches that lay in no static slot were copied to one place before their step")
        if self._staging is None:
            self._staging = torch.utils._pytree.tree_map_only(Tensor, torch.clone, batch)
        for target, source in zip(batch_tensors(self._staging), tensors, strict=True):
            target.copy_(source, non_blocking=True)
        known = self._graphs.get((STAGED, last))
        return known[1] if known is not None else self._record({STAGED: self._staging}, last).get(STAGED)

    def _record_all(self, slot: int, batch: Any, last: bool) -> Callable[[], None] | None:
        """Record a graph for each slot of the ring at once: device idle, producer parked and caches empty but once."""
        others = getattr(self._loader() if self._loader is not None else None, "static_batches", None)
        batches = {**(others(batch) if others is not None else {}), slot: batch}
        return self._record(batches, last).get(slot)

    def _record(self, batches: dict[Any, Any], last: bool) -> dict[Any, Callable[[], None]]:
        """The replays by slot; none if the step cannot be recorded, now or at all."""
        self._replayed_log.freeze()
        if not self._graphs:
            self._modules = list(self._model.modules())
            self._fingerprint = self._baked()
        replays: dict[Any, Callable[[], None]] = {}
        before = Places(self._model, self.schedule.optimizer)
        try:
            self._check_optimizer()
            with host_sync_allowed(), self._pause():
                for slot, batch in batches.items():
                    replays[slot] = self._capture.record(partial(self._captured, batch, last))
            self._replaced |= before.replaced()
            self._check_optimizer()
        except UnsupportedOperation:
            raise
        except Exception as error:
            before.put_back()
            self._step_down(_describe(error))
            return {}
        if before.has_new_state():
            before.put_back()  # the new state lies in the graphs' memory and would begin anew at each replay
            self._forget_graphs()
            return {}
        self.captures += len(replays)
        self._graphs.update({(slot, last): (batch_tensors(batches[slot]), replays[slot]) for slot in replays})
        return replays

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
                f"the step puts new tensors in the place of {', '.join(sorted(self._replaced))}, and a graph would go "
                "on with the old ones; what is written in place can be captured"
            )
        hidden = python_state(optimizer) + host_state(optimizer)
        if hidden:
            raise SinkError(f"{type(optimizer).__name__} keeps {', '.join(hidden)} on the host")

    def _step_down(self, problem: str) -> None:
        self.mode = self._lower_mode
        self._forget_graphs()
        if not self.training_step.static_gradients:
            self.training_step.update.zero_gradients()
        text = f"the step cannot be captured, so it runs in mode {self.mode!r}: {problem}"
        self._reasons.note(text)
        _log.warning(text)

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._staging = None
        self._capture.reset()

    def _baked(self) -> Any:
        return fingerprint(self._modules, self.training_step, self.schedule.optimizer, self._tabled)


def _signature(batch: Any) -> tuple[Any, ...]:
    """Shapes and the like, and the numbers: a graph holds both as constants."""
    return batch_signature(batch), tuple(leaf for leaf in batch_leaves(batch) if not isinstance(leaf, Tensor))


def _describe(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return line if isinstance(error, SinkError) else f"{type(error).__name__}: {line} (at {user_place(error)})"
