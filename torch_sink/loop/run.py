"""One call of `StepLoop.run`: epochs, sinks, callbacks and stops around an engine that executes steps."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from torch_sink.common.containers import leaves as leaves_of
from torch_sink.common.ranks import warn
from torch_sink.errors import SinkError, add_hints, add_note
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext, ranks_in_context, tell
from torch_sink.loop.core.batches import epoch_length, tensors_among
from torch_sink.loop.core.history import RunHistory, SinkResults
from torch_sink.loop.core.host_sync import watch_host_syncs
from torch_sink.loop.core.sample_counter import SampleCounter
from torch_sink.loop.outside import Outside
from torch_sink.loop.step.state import TrainState
from torch_sink.loop.step.step import Engine, check_device
from torch_sink.thread_waits import host_sync_allowed

if TYPE_CHECKING:
    from torch_sink.sink import SinkLoader

_END = object()
UNKNOWN_EPOCH_SINK = 1000


class TrainingRun:
    """Executes one run over a SinkLoader, for `StepLoop`.

    Invariant: between `Engine.begin` and `Engine.end` nothing here waits for the device.

    Args:
        state: of the training.
        loader: the batches.
        callbacks: as the user listed them.
        signals: to it the names of signals are added that arrive.
        note: takes remarks for `StepLoop.explain`.
        epochs, max_steps, steps_per_sync: as for `StepLoop`.
        batches: in an epoch; None for one pass of the loader.
        numbers_own_steps: whether `cur_step_num` counts the steps of this run, or else those of the loop.
        fields: of the RunContext, besides those of every run.
    """

    def __init__(
        self,
        state: TrainState,
        loader: SinkLoader,
        callbacks: list[Callback],
        signals: list[str],
        note: Callable[[str], None],
        *,
        epochs: int,
        max_steps: int | None,
        batches: int | None,
        steps_per_sync: int,
        numbers_own_steps: bool,
        **fields: Any,
    ) -> None:
        self._state, self._loader, self._signals, self._note = state, loader, signals, note
        self.device = state.device  # for timelines
        self._callbacks = sorted(callbacks, key=lambda one: not one.comes_first)
        self._epochs, self._max_steps, self._batches = epochs, max_steps, batches
        self._epoch_length = length = epoch_length(loader, batches)
        self._longest_sink = steps_per_sync if steps_per_sync > 0 else length or UNKNOWN_EPOCH_SINK
        self._failure: Exception | None = None  # of the loader, raised after the sink
        self._cut_off = False  # no further batch comes, because of a failure, or after a signal
        self._leaves: list[Any] | None = None  # of the latest batch; None where they are not known
        self._samples: int | None = None  # in it, as its loader has counted; None where it has not
        self._counter = SampleCounter(loader.loader)
        asked_for = (signal.Signals(number).name for callback in callbacks for number in callback.stop_signals)
        self._returns_on = {"GracefulExit", *asked_for}
        self._is_interrupted = False  # by a signal to any rank that no callback asked for
        self._host_syncs_before = 0
        self._began = time.perf_counter()
        self._waited = 0.0
        self._steps_before = state.step_count - state.progress.steps if numbers_own_steps else 0
        with host_sync_allowed():
            Outside(state).begin_run()
        self.history = state.history = RunHistory(_groups=len(state.optimizer.param_groups))
        self._arguments = about = RunArguments(train_network=state.model, network=state.model, mode="train")
        about.update(loss_fn=state.loss_fn, optimizer=state.optimizer, accumulate=state.accumulate)
        about.update(train_dataset=loader, list_callback=self._callbacks, dataset_sink_mode=True)
        about.update(epoch_num=epochs, cur_epoch_num=0, batch_num=length, cur_step_num=self._step_number)
        about.update(total_steps=self._total_steps())
        about.update(ranks_in_context(state.ranks), history=self.history, _stop_reasons=signals, **fields)
        self._context = RunContext(about)

    # The run, from the outside in: epochs, the sinks of an epoch, the steps of a sink.

    def execute(self, prepare: Callable[[int], Engine]) -> RunHistory:
        """Run to the end, to a stop, or to an error, which is raised once the history has the steps before it.

        `prepare` makes the engine for sinks of up to so many steps.
        """
        self._check_ranks()
        self._state.schedule.check_place("code between two runs")
        self._engine = engine = prepare(self._longest_sink)
        self._host_syncs_before = engine.host_syncs
        self._began = time.perf_counter()
        engine.attach(self._loader, reduces_always=self._state.ranks.many and self._epoch_length is None)
        with ExitStack() as stack:
            stack.enter_context(engine.running())
            for callback in self._callbacks:
                stack.enter_context(callback)
            self._event("on_train_begin")
            self._state.schedule.watch()
            stack.callback(self._leave_epoch)
            while not self._finished():
                self._epoch()
            self.history.seconds = time.perf_counter() - self._began
            self._warn_of_odd_steps()
            self._warn_of_open_window()
            self._event("on_train_end", sorted(self._callbacks, key=lambda one: not one.saves_training))
        if self._is_interrupted and not self._signals:
            raise SinkError(
                f"a signal to another rank ended the run after step {self._state.step_count} on all of them"
            )
        return self.history

    def _epoch(self) -> None:
        progress = self._state.progress
        self._arguments.cur_epoch_num = progress.epochs + 1 + (self._arguments.initial_epoch or 0)
        self._event("on_train_epoch_begin")
        # `epoch_ended`: in a sink before the checkpoint, whose loader stands at the next epoch.
        if progress.epoch_ended or self._train_epoch():
            self._engine.schedule.advance(epoch_ended=True)
            progress.epochs, progress.epoch_steps, progress.epoch_ended = progress.epochs + 1, 0, False
        self._event("on_train_epoch_end")

    def _train_epoch(self) -> bool:
        """Train until the epoch ends (True), or until a stop inside it (False)."""
        progress = self._state.progress
        # A checkpoint may be from the last step of an epoch, before its end was seen: `len(loader)` does not prove the
        # end, because broken samples are left out and streams may be longer. A resumed run then finds nothing left.
        resumed = progress.epoch_steps > 0
        self._engine.begin_epoch()
        iterator = self._loader._epoch(self._batches, numbers_passes=True, may_be_empty=resumed)
        while (batch := self._fetch(iterator)) is not _END:
            self._sink(iterator, batch)
            if self._cut_off or progress.epoch_ended:
                break
            if self._finished():
                return self._remaining() == 0 and self._ends_here(iterator)
        if self._failure is not None:
            raise self._failure
        if not self._cut_off and not progress.epoch_ended:
            self._close_window()
        return not self._cut_off

    def _sink(self, iterator: Iterator[Any], batch: Any) -> None:
        state, progress, engine = self._state, self._state.progress, self._engine
        updates = self._plan_sink()
        if self._callbacks:
            self._begin_sink(batch, len(updates))
        began, executed = state.step_count, 0
        engine.begin(updates)
        try:
            while batch is not _END:
                self._step(batch, last=updates[executed])
                progress.window = 0 if updates[executed] else progress.window + 1
                executed += 1
                if executed == len(updates) or (self._signals and not state.ranks.many):
                    break
                batch = self._fetch(iterator)
        except Exception:
            if not state.ranks.many:  # it could wait for the others, which are at another step
                with suppress(Exception), host_sync_allowed():  # a device that has failed gives nothing
                    self._record(engine.end(executed))
            raise
        finally:
            state.step_count = began + executed
            progress.epoch_steps += executed
            progress.steps += executed
        if self._failure is not None and state.ranks.many:
            raise self._failure  # the other ranks are at another step, so there is no common sink to finish
        with host_sync_allowed():
            self._record(results := engine.end(executed))
            if batch is _END and not self._cut_off:
                self._close_window(results)
                progress.epoch_ended = True  # callbacks may save or stop before the epoch is counted
            self._finish_sink(results)

    def _step(self, batch: Any, *, last: bool) -> None:
        state, engine = self._state, self._engine
        leaves = leaves_of(batch) if self._leaves is None else self._leaves
        tensors = tensors_among(leaves)
        check_device(tensors, state.model_devices)
        iteration = state.step_count = state.step_count + 1
        samples = self._counter.count(batch, leaves) if self._samples is None else self._samples
        watched, engine.watches_next_step = engine.watches_next_step, False
        try:
            with watch_host_syncs(self._note_wait) if watched else nullcontext():
                engine.step(batch, leaves, first=state.progress.window == 0, last=last)
        except Exception as error:
            shapes = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]
            add_note(error, f"in step {iteration}, with a batch of {', '.join(shapes) or 'no tensor'}")
            add_hints(error)
            raise
        self.history.samples += samples

    # Batches.

    def _fetch(self, iterator: Any) -> Any:
        """Returns the next batch; `_END` at the epoch's end and at an error, which is raised after the sink."""
        began = time.perf_counter()
        try:
            batch = next(iterator, _END)
            self._leaves, self._samples = self._loader._known_of_latest(iterator, batch)
            return batch
        except Exception as error:
            # Ctrl-C in a terminal kills the workers too, so after a signal their error is not raised.
            self._cut_off = True
            self._failure = None if self._signals else error
            return _END
        finally:
            self._waited += time.perf_counter() - began

    def _ends_here(self, iterator: Iterator[Any]) -> bool:
        """Whether the epoch ends behind the steps that it was to have; a batch that comes after all is given back."""
        if self._fetch(iterator) is not _END:
            self._loader._give_back()
            return False
        if not self._cut_off:
            self._close_window()
        return True

    def _leave_epoch(self) -> None:
        """At the run's end, inside an epoch or not: the next run begins a new pass, and so another epoch of it."""
        progress = self._state.progress
        if progress.epoch_steps and not progress.epoch_ended:
            self._loader._number_next_pass()

    # How long sinks are, and where updates are due.

    def _plan_sink(self) -> list[bool]:
        """For each step of the next sink, whether an update follows: after each k-th, and after the epoch's last."""
        state, progress, left = self._state, self._state.progress, self._remaining()
        bounds = [self._longest_sink, left or None]
        if self._max_steps is not None:
            bounds.append(self._max_steps - progress.steps)
        bounds += [callback.steps_to_boundary(state.step_count) for callback in self._callbacks]
        steps = max(1, min(bound for bound in bounds if bound is not None))
        if state.accumulate == 1:
            return [True] * steps
        updates, window = [], progress.window
        for step in range(1, steps + 1):
            window += 1
            updates.append(window == state.accumulate or step == left)
            window = 0 if updates[-1] else window
        return updates

    def _close_window(self, results: SinkResults | None = None) -> None:
        """At an epoch's end that nobody has announced, update with the gradients that are left, between two sinks.

        Callbacks have not seen the sink of `results` yet.
        """
        state = self._state
        if not state.progress.window:
            return
        if state.ranks.many and self._epoch_length is not None:  # for which the gradients were not reduced
            raise SinkError(
                f"an epoch of {self._epoch_length} batches, as len() of the loader says, ended after "
                f"{state.progress.epoch_steps}, inside an accumulation of {state.accumulate}, whose gradients the "
                "ranks have not exchanged; give the loader its true length, or pass SinkLoader(batches_per_epoch=...)"
            )
        with host_sync_allowed():
            skipped = self._engine.update_now()
        state.progress.window = 0
        self.history.note_update(skipped=skipped)
        self._note_syncs(0)
        if results is None:
            state.overflows.add_update(state.step_count, skipped=skipped)

    def _remaining(self) -> int | None:
        """Batches that are left of the epoch; None if it has no length."""
        if self._epoch_length is None:
            return None
        return max(0, self._epoch_length - self._state.progress.epoch_steps)

    def _total_steps(self) -> int | None:
        """The step of this run at which it ends, as far as that is known."""
        progress, length, bounds = self._state.progress, self._epoch_length, [self._max_steps]
        if length is not None:
            done = length if progress.epoch_ended else progress.epoch_steps
            bounds.append(progress.steps + max(length * (self._epochs - progress.epochs) - done, 0))
        return min((bound for bound in bounds if bound is not None), default=None)

    def _finished(self) -> bool:
        """Whether the run is complete, or a signal or a callback on any rank asks for its end."""
        state = self._state
        signalled, requested = bool(self._signals), self._context.get_stop_requested()
        interrupted = not self._returns_on.issuperset(self._signals)
        # All ranks stop after the same sink, or the others would wait forever.
        flags = [signalled, interrupted, requested]
        signalled, self._is_interrupted, requested = state.ranks.agree_on_rates(flags, state.optimizer)
        reached = self._max_steps is not None and state.progress.steps >= self._max_steps
        if signalled or requested:
            self.history.stopped_by = [*self._signals, "another rank"][0] if signalled else "request_stop"
        return signalled or requested or reached or state.progress.epochs >= self._epochs

    # What callbacks and the history are told.

    @property
    def _step_number(self) -> int:
        return self._state.step_count - self._steps_before

    def _event(self, name: str, callbacks: list[Callback] | None = None) -> None:
        self._arguments.wait_seconds = self._waited
        told = self._callbacks if callbacks is None else callbacks
        try:
            tell(told, name, self._context, self._state.schedule.check_place)
        except torch.OutOfMemoryError as error:
            add_hints(error)
            raise

    def _begin_sink(self, batch: Any, planned: int) -> None:
        self._arguments.cur_step_num = self._step_number + planned
        self._arguments.train_dataset_element = batch
        try:
            self._event("on_train_step_begin")
        except BaseException:
            self._loader._give_back()
            raise
        self._leaves = None  # callbacks may have put others into the batch
        self._arguments["_inside_sink"] = True

    def _finish_sink(self, results: SinkResults) -> None:
        self._state.overflows.add(results, self._state.step_count)
        if not self._callbacks:
            return
        self._arguments.update(
            cur_step_num=self._step_number,
            _inside_sink=False,
            net_outputs=results.losses[-1],
            losses=results.losses,
            overflows=results.overflows,
            updates=results.updates,
            learning_rates=results.learning_rates,
            step_metrics=results.metrics,
        )
        self._event("on_train_step_end")

    def _record(self, results: SinkResults) -> None:
        if results.losses.size(0):
            self.history.add(results)
            self.history.note_counts(self._engine.counts)
        self.history.seconds = time.perf_counter() - self._began
        self._note_syncs(1)

    def _note_syncs(self, ends_of_sinks: int) -> None:
        before, self._host_syncs_before = self._host_syncs_before, self._engine.host_syncs
        self.history.host_syncs += ends_of_sinks + self._host_syncs_before - before

    def _note_wait(self, place: str, what: str) -> None:
        self._note(f"the step makes the host wait for the device at {place}: {what}")

    # What is checked before and after.

    def _check_ranks(self) -> None:
        """Raise on all ranks unless they agree on the callbacks that wait for other ranks or end sinks."""
        ends_any = Callback.steps_to_boundary
        shared = (one for one in self._callbacks if one.on_all_ranks or type(one).steps_to_boundary is not ends_any)
        names = [type(one).__qualname__ for one in shared]
        if any(other != names for other in self._state.ranks.gather(names)):
            raise ValueError(
                f"the ranks have different callbacks, this one {', '.join(names) or 'none'}; callbacks that save, "
                "evaluate, decide or end sinks (steps_to_boundary) work together: give them to all ranks, in the same "
                "order"
            )

    def _warn_of_odd_steps(self) -> None:
        """Half of the steps or more ran in a lower mode than the loop's, because few batches have one shape."""
        counts, steps = self._engine.counts, self.history.steps
        if steps and 2 * counts.odd >= steps:
            warn(
                "of the run's %d steps, %d had batches of another shape, or with other numbers, than the usual ones, "
                "and so were not %s (%s); give batches one shape, or compile once for all shapes with "
                "StepLoop(mode='compile', jit_config=JitConfig(dynamic=True))",
                steps,
                counts.odd,
                "captured" if self._engine.mode == "graph" else "compiled",
                counts,
            )

    def _warn_of_open_window(self) -> None:
        if window := self._state.progress.window:
            warn(
                "the run ended after step %d, inside an accumulation: the gradients of %d of its %d steps are in "
                "no update yet; a run that resumes here goes on with them, any other begins without",
                self._state.step_count,
                window,
                self._state.accumulate,
            )
