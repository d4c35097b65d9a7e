"""The engine that replays captured steps: a CUDA graph for each slot of the ring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch_sink.errors import SinkError, UnsupportedOperation
from torch_sink.loop.core.batches import batch_constants
from torch_sink.loop.core.history import Reasons, SinkResults, first_line
from torch_sink.loop.core.host_sync import user_place
from torch_sink.loop.engines.capture import LEFT_BEHIND, ODD_BATCHES, STAGED, CapturedGraphs, CudaCapture, Replay
from torch_sink.loop.engines.memory import Places, fingerprint
from torch_sink.loop.step.optimizers import RateTable, hidden_state, make_capturable, refuse_python_state
from torch_sink.loop.step.state import TrainState
from torch_sink.loop.step.step import Engine, TrainingStep

GIVEN_UP = "graphs were forgotten at the end of a run, because other code would have had no room beside them"
WARMUP_STEPS = 3
LEAST_CAPACITY = 1024  # steps that fit into the log at least: a larger log needs new graphs
# DistributedDataParallel rebuilds its buckets and times itself during its first ten steps.
DISTRIBUTED_WARMUP_STEPS = 11


class GraphEngine(Engine):
    """Captures the whole step once for each slot of the ring and replays it, with one launch from Python.

    The first steps of a run are the warm-up: uncaptured, but counted and not undone. The last one of each kind, with
    and without an update, is a trial, which finds what would make a capture fail. In every kind of step the learning
    rates come from a table on the device, by the cursor of the log.

    Graphs are captured again, after one more trial, when a value changes that they hold as a constant: a number in
    `param_groups`, the training mode of a module, the memory of a parameter, buffer, gradient or optimizer state. A
    step that cannot be captured runs in `lower_mode` from then on, "compile" or "eager". If the user asked for
    mode="graph", an optimizer that counts in Python numbers is an error.
    """

    def __init__(
        self,
        state: TrainState,
        step: TrainingStep,
        capture: CudaCapture,
        reasons: Reasons,
        *,
        lower_mode: str,
        watchable: bool,
        refuses_python_state: bool,
    ) -> None:
        super().__init__("graph", state, step, watchable=watchable)
        self.captures = 0
        self._model = state.model
        self._tabled = {"params", "lr", "initial_lr"}.union(["betas"] if self.schedule.cycles_betas else [])
        self._capture, self._reasons, self._lower_mode = capture, reasons, lower_mode
        self._refuses_python_state = refuses_python_state
        self._warmup_left = DISTRIBUTED_WARMUP_STEPS if self.ranks.many else WARMUP_STEPS
        make_capturable(state.optimizer, cycles_betas=self.schedule.cycles_betas)
        self._rates: RateTable = RateTable(self.schedule, self.log)
        self._graphs = CapturedGraphs(capture, self._reasons)
        self._fingerprint: Any = None
        self._planned = self._executed = 0  # steps planned and executed in this sink
        self._rows = 0  # steps whose learning rates are planned

    @property
    def host_syncs(self) -> int:
        return super().host_syncs + self.captures

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._capture.stream():
            yield
        if not self._capture.memory.make_room():
            self._capture.memory.give_up()
            self._reasons.count(GIVEN_UP)

    @property
    def _reads_table(self) -> bool:
        return self.mode == "graph" or self.schedule.counts_applied

    def attach(self, loader: Any, *, reduces_always: bool) -> None:
        super().attach(loader, reduces_always=reduces_always)
        self._graphs.attach(loader)

    def begin_epoch(self) -> None:
        super().begin_epoch()
        self._graphs.begin()

    def reserve(self, steps: int) -> None:
        log = self.log
        if steps > log.capacity or not self._rates.fits(self.schedule, log):
            self._graphs.forget()  # the graphs write to the old memory of the log
            if steps > log.capacity:
                log.reserve(max(steps, 2 * log.capacity))
            self._rates = RateTable(self.schedule, log)

    def begin(self, updates: Sequence[bool]) -> None:
        if self.mode != "graph":
            super().begin(updates)
            return
        steps = len(updates)
        self.follow()
        if self._graphs and self._fingerprint != self._baked():  # this reads all parameters' addresses
            self._graphs.forget()
            self._graphs.tried.clear()
            self._reasons.count("graphs were captured again because something baked into them had changed")
        self.reserve(steps)
        if self.training_step.static_gradients and not self.state.progress.window:
            # Of an accumulation that a run has left open, or of the user's own backward pass.
            self.training_step.update.zero_gradients(in_place=True)
        self.log.start()
        self.schedule.start(updates)
        self._planned, self._executed = steps, 0
        # The device is idle now, so the scheduler runs ahead only once the first step is launched.
        self._rows = 1 if self.schedule.runs_ahead else steps
        self._write_rates(self._rows)

    def step(self, batch: Any, leaves: list[Any], *, first: bool, last: bool) -> None:
        if self.mode != "graph":
            super().step(batch, leaves, first=first, last=last)
            return
        if self._warmup_left > 0 or last not in self._graphs.tried or not self.training_step.update.has_warmed_up:
            self._warm_up(batch, leaves, first=first, last=last)
        elif replay := self._replay_or_capture(batch, leaves, last):
            replay()
            self._executed += 1
            self.counts.captured += 1
        elif self.mode == "graph":
            self._launch(batch, first=first, last=last)
        else:  # its capture has failed
            super().step(batch, leaves, first=first, last=last)
        if self.mode == "graph" and self._rows < self._planned:
            self._rows = self._planned
            self._rates.write(self.schedule.plan_on(self._planned))

    def end(self, steps: int) -> SinkResults:
        if self.mode == "graph" and steps < self._planned and not self.schedule.counts_applied:
            self.schedule.rewind(steps)
        return super().end(steps)

    def follow(self) -> None:
        super().follow()
        make_capturable(self.schedule.optimizer, cycles_betas=self.schedule.cycles_betas)

    def close(self) -> None:
        self._graphs.forget()

    def _warm_up(self, batch: Any, leaves: list[Any], *, first: bool, last: bool) -> None:
        self._warmup_left -= 1
        constants, graphs = batch_constants(leaves), self._graphs
        # The compiler runs for the first batch of a shape, and may wait for the device.
        is_trial = self._warmup_left <= 0 and self.training_step.update.has_warmed_up and graphs.knows(constants)
        if not graphs.accepts(constants) and self._warmup_left < 0:
            self._reasons.count(ODD_BATCHES)
        if not is_trial:
            self._launch(batch, first=first, last=last)
            return
        problems: list[str] = []
        before = Places(self._model, self.schedule.optimizer)
        with self._graphs.pause(), self._capture.trial(problems):
            self._launch(batch, first=first, last=last)
        graphs.tried.add(last)
        if problem := next(iter(problems), before.problem()):
            self._step_down(problem)

    def _launch(self, batch: Any, *, first: bool, last: bool) -> None:
        with self._between_replays():
            self._run_with_table(batch, None, first=first, last=last)
        self._executed += 1
        loss = self.training_step.loss_function
        self.counts.add_launched(compiled=loss.ran_compiled, odd=self._graphs.was_odd)

    @contextmanager
    def _between_replays(self) -> Iterator[None]:
        """A context for work that runs uncaptured, in the memory of the graphs if there are any."""
        if not self._graphs:
            yield
            return
        memory = self._capture.memory
        memory.make_room()
        try:
            with memory.lent():
                yield
        finally:
            self._drop_gradients()  # the next replay writes to their memory
            if not memory.take_back():
                self._reasons.count(LEFT_BEHIND)

    def _drop_gradients(self) -> None:
        if not self.training_step.static_gradients:
            self.training_step.update.zero_gradients()

    def _replay_or_capture(self, batch: Any, leaves: list[Any], last: bool) -> Replay | None:
        """The replay of a step, captured now if it is not yet; None if it runs uncaptured, this time or from now on."""
        found = self._graphs.find(batch, leaves, last)
        if found is None:
            return None
        slot, batch, replay = found
        if slot == STAGED:
            self._reasons.count("batches that lay in no static slot were copied to one place before their step")
        return replay or self._capture_step(self._graphs.whole_ring(slot, batch), last).get(slot)

    def _capture_step(self, batches: dict[Any, Any], last: bool) -> dict[Any, Replay]:
        """Capture a step for each slot; returns the replays by slot, none if the step cannot be captured."""
        optimizer = self.schedule.optimizer

        def captured(batch: Any) -> None:
            self._run_with_table(batch, None, first=not self.training_step.static_gradients, last=last)
            self._drop_gradients()  # other graphs of the pool would overwrite them

        if not self._graphs:
            self._fingerprint = self._baked()
        before = Places(self._model, optimizer)
        try:
            if self._refuses_python_state:
                refuse_python_state(optimizer)
            if hidden := hidden_state(optimizer):
                raise SinkError(f"{type(optimizer).__name__} keeps {', '.join(hidden)} on the host")
            self._drop_gradients()  # a capture can neither use nor free their memory
            replays = self._graphs.capture(captured, batches)
            if problem := before.problem():
                raise SinkError(problem)
        except UnsupportedOperation:
            raise
        except Exception as error:
            before.put_back()
            is_ours = isinstance(error, SinkError)
            problem = str(error) if is_ours else f"{first_line(error)} (at {user_place(error)})"
            if self.ranks.many:
                # Only all ranks together could reset the reducer, and the others may have captured the step.
                raise SinkError(
                    f"the step cannot be captured on rank {self.ranks.rank}, and others may have captured it: {problem}"
                    "; with several processes pass mode='compile'"
                ) from error
            self.ranks.reset_reducer()
            self._step_down(problem)
            return {}
        if before.new_state():
            before.put_back()  # the new state lies in the pool, and each replay would initialize it again
            self._graphs.forget()
            return {}
        self.captures += len(replays)
        self._graphs.keep(replays, batches, last)
        return replays

    def _step_down(self, problem: str) -> None:
        self.mode = self._lower_mode
        self._graphs.forget()
        if self.schedule.counts_applied:
            self._rates.write(self.schedule.plan_on(self._planned))
        else:
            self.schedule.rewind(self._executed)
        self._drop_gradients()
        self._reasons.warn(f"the step cannot be captured, so it runs in mode {self.mode!r}: {problem}")

    def _baked(self) -> Any:
        return fingerprint(self._model, self.training_step, self.schedule.optimizer, self._tabled)
