"""One call of `StepLoop.run`: epochs, sinks, callbacks and stops around an engine that executes steps."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from torch_sink.common.containers import leaves as leaves_of
from torch_sink.errors import SinkError, add_hints, add_note
from torch_sink.loop.callbacks import Callback, RunArguments, RunContext, ranks_in_context, tell
from torch_sink.loop.core.batches import epoch_length, tensors_among
from torch_sink.loop.core.history import RunHistory, SinkRecord
from torch_sink.loop.core.host_sync import watch_host_syncs
from torch_sink.loop.core.loaders import Sink
from torch_sink.loop.signals import signals_asked_for
from torch_sink.loop.step.step import Engine, check_device
from torch_sink.loop.step.train_state import TrainState
from torch_sink.thread_waits import host_sync_allowed

_END = object()
UNKNOWN_EPOCH_SINK = 1000


class TrainingRun:
    """Executes a run over a SinkLoader; made by `StepLoop.run` and used once.

    Invariant: between `Engine.begin` and `Engine.end` nothing here waits for the device.
    """

    def __init__(
        self,
        state: TrainState,
        loader: Sink,
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
        """A run of so many epochs of so many batches; `fields` are further ones of the RunContext."""
        self._state, self._loader, self._signals, self._note = state, loader, signals, note
        self.device = state.device  # for timelines
        self._callbacks = sorted(callbacks, key=lambda one: not one.comes_first)
        self._epochs, self._max_steps = epochs, max_steps
        self._batches, self._steps_per_sync = batches, steps_per_sync
        self._epoch_length = length = epoch_length(loader, batches)
        self._failure: Exception | None = None
        self._cut_off = False
        self._leaves: list[Any] | None = None  # of the latest batch; None where they are not known
        self._next_epoch: Iterator[Any] | None = None
        self._returns_on = {"GracefulExit", *(signal.Signals(number).name for number in signals_asked_for(callbacks))}
        self._host_syncs_before = 0
        self._began = time.perf_counter()
        self._waited = 0.0
        self._is_interrupted = False  # by a signal to any rank that no callback asked for
        self.history = state.history = RunHistory(_groups=len(state.optimizer.param_groups))
        bounds = [max_steps, None if length is None else length * epochs]
        self._arguments = about = RunArguments(train_network=state.model, network=state.model, mode="train")
        about.update(
            loss_fn=state.loss_fn, optimizer=state.optimizer, train_dataset=loader, accumulate=state.accumulate
        )
        about.update(epoch_num=epochs, cur_epoch_num=0, batch_num=length, cur_step_num=state.step_count)
        about.update(total_steps=min((bound for bound in bounds if bound is not None), default=None))
        about.update(history=self.history, list_callback=self._callbacks, dataset_sink_mode=True)
        about.update(stop_reasons=self._signals)
        about.update(ranks_in_context(state.ranks), **fields)
        self._context = RunContext(self._arguments)

    def execute(self, prepare: Callable[[int], Engine]) -> RunHistory:
        """Run to the end, to a stop, or to an error, which is raised after the steps before it are recorded."""
        self._check_ranks()
        engine = prepare(self._limit())
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
        """Raise on all ranks unless all have the callbacks for which the others would wait, or make longer sinks."""
        names = [type(one).__qualname__ for one in self._callbacks if one.on_all_ranks or _ends_sinks(one)]
        if self._state.ranks.many and any(other != names for other in self._state.ranks.gather(names)):
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
            engine.schedule.after_epoch()
            progress.epochs, progress.epoch_steps = progress.epochs + 1, 0
        self._event("on_train_epoch_end")

    def _train_epoch(self, engine: Engine) -> bool:
        """Train to the end of the epoch (True) or to a stop in the middle of it (False)."""
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
                return self._remaining() == 0 and self._is_at_the_end(iterator)
            batch = self._fetch(iterator)

    def _open_epoch(self) -> tuple[Iterator[Any], Any]:
        """The epoch's iterator and first batch.

        A checkpoint may lie at the very end of an epoch, before its end was seen: what `len(loader)` says is no proof,
        for broken samples are left out and streams may be longer. The loader, when resumed there, goes on with the next
        epoch: its batch is given back, and the iterator kept for that one.
        """
        resumed = self._state.progress.epoch_steps > 0
        before = self._loader.state_dict()["epoch"] if resumed else None
        iterator, self._next_epoch = self._next_epoch or self._loader.epoch(self._batches), None
        batch = self._fetch(iterator)
        if resumed and batch is not _END and self._loader.state_dict()["epoch"] != before:
            self._loader.give_back()
            self._next_epoch = iterator
        return iterator, batch

    def _is_at_the_end(self, iterator: Iterator[Any]) -> bool:
        if self._fetch(iterator) is _END:
            return True
        self._loader.give_back()
        return False

    def _sink(self, engine: Engine, iterator: Iterator[Any], batch: Any) -> None:
        state, progress = self._state, self._state.progress
        planned = self._sink_length()
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
            raise self._failure  # the other ranks are at another step: there is nothing to agree on
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

    def _finish_sink(self, record: SinkRecord, engine: Engine) -> None:
        self.history.add(record)
        self.history.seconds = time.perf_counter() - self._began
        self.history.host_syncs += 1 + engine.host_syncs - self._host_syncs_before
        self._host_syncs_before = engine.host_syncs
        self._arguments.update(
            cur_step_num=self._state.step_count,
            inside_sink=False,
            net_outputs=record.losses[-1],
            losses=record.losses,
            overflows=record.overflows,
            learning_rates=record.learning_rates,
            step_metrics=record.metrics,
        )
        self._state.overflows.add(record, self._state.step_count)
        self._event("on_train_step_end")

    def _fetch(self, iterator: Iterator[Any]) -> Any:
        """The next batch, `_END` at the epoch's end, and also at an error, which is kept for after the sink."""
        began = time.perf_counter()
        try:
            batch = next(iterator, _END)
            self._leaves = getattr(iterator, "leaves", None)  # of the SinkLoader's own iterator: found in the slot
            return batch
        except Exception as error:
            # A terminal's Ctrl-C kills the workers too; their death is then no news.
            self._cut_off = True
            self._failure = None if self._signals else error
            return _END
        finally:
            self._waited += time.perf_counter() - began

    def _sink_length(self) -> int:
        bounds = [self._limit(), self._remaining() or None]
        if self._max_steps is not None:
            bounds.append(self._max_steps - self._state.progress.steps)
        bounds += [callback.steps_to_boundary(self._state.step_count) for callback in self._callbacks]
        return max(1, min(bound for bound in bounds if bound is not None))

    def _limit(self) -> int:
        size = self._steps_per_sync
        return size if size > 0 else self._epoch_length or UNKNOWN_EPOCH_SINK

    def _remaining(self) -> int | None:
        if self._epoch_length is None:
            return None
        return max(0, self._epoch_length - self._state.progress.epoch_steps)

    def _finished(self) -> bool:
        """Whether nothing is left to do, or what asks for a stop: a signal to any rank, or a callback on any rank."""
        state = self._state
        signalled, requested = bool(self._signals), self._context.get_stop_requested()
        interrupted = not self._returns_on.issuperset(self._signals)
        if state.ranks.many:
            # What came to one rank holds for all: they stop after the same sink, or the others would wait for ever.
            flags = [signalled, interrupted, requested]
            signalled, interrupted, requested = state.ranks.agree_on_rates(flags, state.optimizer)
        self._is_interrupted = interrupted
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


def _ends_sinks(callback: Callback) -> bool:
    return type(callback).steps_to_boundary is not Callback.steps_to_boundary
