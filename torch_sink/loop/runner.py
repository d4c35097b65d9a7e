"""Runs trainings and evaluations, and keeps engine, evaluators and SinkLoaders from run to run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_sink.common.epochs import begin_epochs_at
from torch_sink.common.ranks import warn
from torch_sink.loop.callbacks import Callback
from torch_sink.loop.core.batches import Wrappers, epoch_length
from torch_sink.loop.core.distributed import forget_shardings
from torch_sink.loop.core.history import Progress, Reasons, RunHistory
from torch_sink.loop.engines.build import Settings, build_engine
from torch_sink.loop.evaluation import Evaluator
from torch_sink.loop.run import TrainingRun
from torch_sink.loop.saving import LoaderPositions
from torch_sink.loop.step.precision import make_precision
from torch_sink.loop.step.state import TrainState
from torch_sink.loop.step.step import Engine
from torch_sink.thread_waits import host_sync_allowed
from torch_sink.tracing import timeline as record_timeline


class Runner:
    """Trains and evaluates a TrainState with the settings of a loop."""

    def __init__(self, state: TrainState, settings: Settings) -> None:
        self.state, self.settings = state, settings
        self.engine: Engine | None = None  # before the first run, and after a state was loaded
        self.wrappers, self.positions = Wrappers(state.device), LoaderPositions()
        self._evaluators: dict[bool, Evaluator] = {}  # False: of the model, True: of its average

    def train(
        self,
        loader: Any,
        callbacks: list[Callback],
        *,
        epochs: int,
        initial_epoch: int = 0,
        sink_size: int | None = None,
        max_steps: int | None = None,
        timeline: str | Path | None = None,
        **options: Any,
    ) -> RunHistory:
        """Train over a loader or SinkLoader; `options` are those of a `TrainingRun`.

        `sink_size` is the number of batches per epoch; None for the SinkLoader's `batches_per_epoch`, -1 for one pass.
        After a call without a step, such as one that failed or found the resumed run complete, a resumed run can be
        completed as before.
        """
        state = self.state
        if state.optimizer is None:
            raise ValueError(
                "this StepLoop has no optimizer, so it evaluates and predicts and cannot train; pass one: "
                "StepLoop(model, loss_fn, optimizer)"
            )
        resumed, state.is_resumed, began = state.is_resumed, False, state.step_count
        if resumed:
            state.progress.count_from(initial_epoch)
        else:
            state.progress = Progress(initial_epoch=initial_epoch)
        with (
            stop_signals(callbacks) as signals,
            nullcontext() if timeline is None else record_timeline(timeline),
            self.positions.opened(loader, self.wrappers) as sink,
        ):
            if initial_epoch and not resumed:
                begin_epochs_at(sink.loader, initial_epoch)
            try:
                batches = sink.batches_per_epoch if sink_size is None else sink_size if sink_size > 0 else None
                state.ranks.check_lengths(epoch_length(sink, batches), max_steps)
                note = self.settings.reasons.note
                run = TrainingRun(
                    state,
                    sink,
                    callbacks,
                    signals,
                    note,
                    epochs=epochs,
                    batches=batches,
                    max_steps=max_steps,
                    initial_epoch=initial_epoch,
                    **options,
                )
                history = run.execute(self.prepare)
            finally:
                if resumed and state.step_count == began:
                    state.is_resumed = True
                    with suppress(Exception):  # a loader that failed may have no position
                        self.positions.load(loader, self.positions.state(loader))
        if resumed and state.step_count == began and history.stopped_by is None:
            warn(
                "nothing was trained: the run that was resumed has completed epoch %d (step %d), and this one ends "
                "after epoch %d%s; ask for more to go on",
                initial_epoch + state.progress.epochs,
                state.progress.steps,
                initial_epoch + epochs,
                "" if max_steps is None else f" or step {max_steps}",
            )
        return history

    @host_sync_allowed()
    def prepare(self, longest_sink: int) -> Engine:
        """Build the engine, or make room in it for sinks of up to `longest_sink` steps."""
        if not self.state.model.training:
            warn("the model is in eval mode; call model.train() before the run unless that is meant")
        if self.engine is None:
            self.engine = build_engine(self.state, self.settings, longest_sink)
        self.engine.reserve(longest_sink)
        return self.engine

    def compile_ahead(self, dataset: Any) -> None:
        """Run forward and backward pass of one batch, so that their compilation is done.

        Weights, gradients, statistics, random generators and the position in the data stay as they were.
        """
        engine, device = self.prepare(1), self.state.device
        generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with self.wrappers.over(dataset) as loader, loader.rehearsal() as batches, engine.running(), generators:
            engine.training_step.rehearse(self.state.model, next(batches))

    def evaluator(self, ema: bool = False) -> Evaluator:
        """The evaluator of the model, or of its average (`ema`), with the compiled code and graphs that it keeps."""
        state = self.state
        if ema:
            state.ranks.share_buffers()  # before ema_model() copies them
        network = state.ema_model() if ema else state.ranks.inner
        if ema in self._evaluators and self._evaluators[ema].network is not network:
            self._evaluators.pop(ema).close()
        if ema not in self._evaluators:
            own = state.precision
            precision = make_precision(own.level, own.dtype, state.device.type, network) if ema else own
            self._evaluators[ema] = self.make_evaluator(state.judging(network, state.forward, precision))
        return self._evaluators[ema]

    def make_evaluator(self, state: TrainState, eval_network: nn.Module | None = None) -> Evaluator:
        """Make an evaluator of the model in `state`, with the training's mode and graph memory; close it after use."""
        settings = replace(self.settings, reasons=Reasons())
        return Evaluator(state, settings, self.wrappers, eval_network=eval_network)

    def explain(self) -> list[str]:
        """Mode, precision and state of the training, and remarks on what ran differently, as lines of text."""
        mode, settings = self.engine.mode if self.engine is not None else "not started", self.settings
        lines = [f"mode: {mode} (asked for {settings.mode!r}, device {self.state.device})"]
        if self.engine is not None:
            lines.append(f"steps of the latest run: {self.engine.counts}")
        lines += self.state.describe()
        if (memory := settings.memory).graphs:
            lines.append(f"graphs: {memory.graphs}, which keep {memory.reserved / 2**20:.0f} MiB of device memory")
        lines += [f"note: {reason}" for reason in settings.reasons.lines()]
        return lines + [line for evaluator in self._evaluators.values() for line in evaluator.explain()]

    def drop_engine(self) -> None:
        """Close the engine; the next run builds another."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def close(self) -> None:
        """Free graphs, compiled code and loaders, and remove the hooks of mixed precision. Idempotent."""
        self.drop_engine()
        for evaluator in self._evaluators.values():
            evaluator.close()
        self.wrappers.close()
        self.state.precision.close()
        if self.state.ranks.sharded:
            forget_shardings()


@contextmanager
def stop_signals(callbacks: Iterable[Callback]) -> Iterator[list[str]]:
    """A context with a list of the names of signals that arrive: SIGINT, SIGTERM and the callbacks' `stop_signals`.

    At the end, also after an error, the former handlers are restored. A SIGINT or SIGTERM that no callback lists then
    has its usual effect: KeyboardInterrupt, the end of the process, or the user's handler. A second SIGINT raises
    KeyboardInterrupt at once. Signals that the process ignores, such as SIGINT in a background job, stay ignored. Other
    threads than the main thread get an empty list.
    """
    received: list[str] = []

    def handle(number: int, frame: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    asked_for = {number for callback in callbacks for number in callback.stop_signals}
    usual = {number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN}
    in_main_thread = threading.current_thread() is threading.main_thread()
    previous: dict[int, Any] = {}
    try:
        for number in (usual | asked_for) if in_main_thread else ():
            previous[number] = signal.signal(number, handle)
        yield received
    except KeyboardInterrupt:
        asked_for.add(signal.SIGINT)  # the second one has had its effect
        raise
    finally:
        for number, handler in previous.items():
            # None: the handler was not installed from Python, which cannot restore it.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for number in previous:
            if number not in asked_for and signal.Signals(number).name in received:
                signal.raise_signal(number)
