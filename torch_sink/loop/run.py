"""One call of `StepLoop.run`: epochs, sinks, callbacks and stops around an engine that executes steps."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from torch_sink.common.containers import leaves as leaves_of
from torch_sink.errors import SinkError, add_hints, add_note
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext, ranks_in_context, tell
from torch_sink.loop.core.batches import epoch_length, tensors_among
from torch_sink.loop.core.history import RunHistory, SinkResults
from torch_sink.loop.core.host_sync import watch_host_syncs
from torch_sink.loop.step.state import TrainState
from torch_sink.loop.step.step import Engine, check_device
from torch_sink.thread_waits import host_sync_allowed

if TYPE_CHECKING:
    from torch_sink.sink import SinkLoader

_END = object()
UNKNOWN_EPOCH_SINK = 1000


class TrainingRun:
    """Executes one run over a SinkLoader, for `StepLoop.run`.

    Invariant: between `Engine.begin` and `Engine.end` nothing here waits for the device.
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
        **fields: Any,
    ) -> None:
        """Prepare a run of `epochs` epochs with `batches` batches each; `fields` are added to the RunContext."""
        from torch_sink.sink.traversal import Batches

        self._state, self._loader, self._signals, self._note = state, loader, signals, note
        self.device = state.device  # for timelines
        self._callbacks = sorted(callbacks, key=lambda one: not one.comes_first)
        self._epochs, self._max_steps = epochs, max_steps
        self._batches = batches
        self._epoch_length = length = epoch_length(loader, batches)
        self._longest_sink = steps_per_sync if steps_per_sync > 0 else length or UNKNOWN_EPOCH_SINK
        self._failure: Exception | None = None
        self._cut_off = False
        self._leaves: list[Any] | None = None  # of the latest batch; None where they are not known
        self._own_iterator: Any = Batches
        self._next_epoch: Iterator[Any] | None = None
        asked_for = (signal.Signals(number).name for callback in callbacks for number in callback.stop_signals)
        self._returns_on = {"GracefulExit", *asked_for}
        self._host_syncs_before = 0
        self._began = time.perf_counter()
        self._waited = 0.0
        self._is_interrupted = False  # by a signal to any rank that no callback asked for
        self.history = state.history = RunHistory(_groups=len(state.optimizer.param_groups))
        bounds = [max_steps, None if length is None else length * epochs]
        self._arguments = about = RunArguments(train_network=state.model, network=state.model, mode="train")
        about.update(loss_fn=state.loss_fn, optimizer=state.optimizer, accumulate=state.accumulate)
        about.update(train_dataset=loader, list_callback=self._callbacks, dataset_sink_mode=True)
        about.update(epoch_num=epochs, cur_epoch_num=0, batch_num=length, cur_step_num=state.step_count)
        about.update(total_steps=min((bound for bound in bounds if bound is not None), default=None))
        about.update(ranks_in_context(state.ranks), history=self.history, stop_reasons=signals, **fields)
        self._context = RunContext(about)

    def execute(self, prepare: Callable[[int], Engine]) -> RunHistory:
        """Run to the end, to a stop, or to an error, which is raised once the history has the steps before it."""
        self._check_ranks()
        engine = prepare(self._longest_sink)
        self._host_syncs_before = engine.host_syncs
        self._began = time.perf_counter()
        engine.attach(self._loader, callbacks=bool(self._callbacks))
        with ExitStack() as stack:
            stack.enter_context(engine.running())
            for callback in self._callbacks:
                stack.enter_context(callback)
            self._event("on_train_begin")
            stack.callback(setattr, self._loader, "is_last_epoch", False)
            while not self._finished():
                self._loader.is_last_epoch = self._state.progress.epochs + 1 >= self._epochs
                self._epoch(engine)
            self.history.seconds = time.perf_counter() - self._began
            self._event("on_train_end")
        if self._is_interrupted and not self._signals:
            raise SinkError(
                f"a signal to another rank ended the run after step {self._state.step_count} on all of them"
            )
        return self.history

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

    def _epoch(self, engine: Engine) -> None:
        progress = self._state.progress
        self._arguments.cur_epoch_num = progress.epochs + 1 + (self._arguments.initial_epoch or 0)
        self._event("on_train_epoch_begin")
        if self._train_epoch(engine):
            engine.schedule.advance(epoch_ended=True)
            progress.epochs, progress.epoch_steps = progress.epochs + 1, 0
        self._event("on_train_epoch_end")

    def _train_epoch(self, engine: Engine) -> bool:
        """Train until the epoch ends (True), or until a stop inside it (False)."""
        iterator, batch = self._open_epoch()
        if self._next_epoch is not None:
            return True
        while True:
            if batch is not _END:
                self._sink(engine, iterator, batch)
            if self._failure is not None:
                raise self._failure
            if self._cut_off or batch is _END:
                return not self._cut_off
            if self._finished():
                if self._remaining() != 0:
                    return False
                if self._fetch(iterator) is _END:
                    return True
                self._loader.give_back()
                return False
            batch = self._fetch(iterator)

    def _open_epoch(self) -> tuple[Iterator[Any], Any]:
        """Returns the epoch's iterator and first batch.

        A checkpoint may be from the last step of an epoch, before its end was seen: `len(loader)` does not prove the
        end, because broken samples are left out and streams may be longer. A loader that is resumed there continues
        with the next epoch. Its first batch is then given back, and the iterator is kept for that epoch.
        """
        resumed = self._state.progress.epoch_steps > 0
        before = self._loader.state_dict()["epoch"] if resumed else None
        iterator, self._next_epoch = self._next_epoch or self._loader.epoch(self._batches), None
        batch = self._fetch(iterator)
        if resumed and batch is not _END and self._loader.state_dict()["epoch"] != before:
            self._loader.give_back()
            self._next_epoch = iterator
        return iterator, batch

    def _sink(self, engine: Engine, iterator: Iterator[Any], batch: Any) -> None:
        state, progress = self._state, self._state.progress
        bounds = [self._longest_sink, self._remaining() or None]
        if self._max_steps is not None:
            bounds.append(self._max_steps - progress.steps)
        bounds += [callback.steps_to_boundary(state.step_count) for callback in self._callbacks]
        planned = max(1, min(bound for bound in bounds if bound is not None))
        self._arguments.cur_step_num = state.step_count + planned
        self._arguments.train_dataset_element = batch
        try:
            self._event("on_train_step_begin")
        except BaseException:
            self._loader.give_back()
            raise
        if self._callbacks:
            self._leaves = None  # they may have put others into the batch
        began, executed = state.step_count, 0
        self._arguments.inside_sink = True
        engine.begin(planned, began)
        try:
            while True:
                self._step(engine, batch)
                executed += 1
                if executed == planned or (self._signals and not state.ranks.many):
                    break
                batch = self._fetch(iterator)
                if batch is _END:
                    break
        finally:
            state.step_count = began + executed
            progress.epoch_steps += executed
            progress.steps += executed
        if self._failure is not None and state.ranks.many:
            raise self._failure  # the other ranks are at another step, so there is no common sink to finish
        with host_sync_allowed():
            self._finish_sink(engine.end(executed, began), engine)

    def _step(self, engine: Engine, batch: Any) -> None:
        state = self._state
        leaves = leaves_of(batch) if self._leaves is None else self._leaves
        tensors = tensors_among(leaves)
        check_device(tensors, state.model_devices)
        if tensors and tensors[0].dim():
            self.history.samples += tensors[0].shape[0]
        iteration = state.step_count = state.step_count + 1
        first, last = (iteration - 1) % state.accumulate == 0, iteration % state.accumulate == 0
        watched, engine.watches_next_step = engine.watches_next_step, False

        try:
            with watch_host_syncs(self._note_wait) if watched else nullcontext():
                engine.step(batch, leaves, first=first, last=last)
        except Exception as error:
            shapes = [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]
            add_note(error, f"in step {iteration}, with a batch of {', '.join(shapes) or 'no tensor'}")
            add_hints(error)
            raise

    def _note_wait(self, place: str, what: str) -> None:
        self._note(f"the step makes the host wait for the device at {place}: {what}")

    def _finish_sink(self, results: SinkResults, engine: Engine) -> None:
        self.history.add(results)
        self.history.seconds = time.perf_counter() - self._began
        self.history.host_syncs += 1 + engine.host_syncs - self._host_syncs_before
        self._host_syncs_before = engine.host_syncs
        self._arguments.update(
            cur_step_num=self._state.step_count,
            inside_sink=False,
            net_outputs=results.losses[-1],
            losses=results.losses,
            overflows=results.overflows,
            learning_rates=results.learning_rates,
            step_metrics=results.metrics,
        )
        self._state.overflows.add(results, self._state.step_count)
        self._event("on_train_step_end")

    def _fetch(self, iterator: Any) -> Any:
        """Returns the next batch; `_END` at the epoch's end and at an error, which is raised after the sink."""
        began = time.perf_counter()
        try:
            batch = next(iterator, _END)
            # Only the SinkLoader's own iterator gives a batch as it was in the slot, where its leaves were found.
            given, leaves = iterator.given if type(iterator) is self._own_iterator else (None, None)
            self._leaves = leaves if given is batch else None
            return batch
        except Exception as error:
            # Ctrl-C in a terminal kills the workers too, so after a signal their error is not raised.
            self._cut_off = True
            self._failure = None if self._signals else error
            return _END
        finally:
            self._waited += time.perf_counter() - began

    def _remaining(self) -> int | None:
        if self._epoch_length is None:
            return None
        return max(0, self._epoch_length - self._state.progress.epoch_steps)

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

    def _event(self, name: str) -> None:
        self._arguments.wait_seconds = self._waited
        try:
            tell(self._callbacks, name, self._context)
        except torch.OutOfMemoryError as error:
            add_hints(error)
            raise
