"""StepLoop: trains many iterations per host sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from torch_sink.common.arguments import (
    check_bool,
    check_choice,
    check_count,
    check_path,
    explains_wrong_calls,
)
from torch_sink.common.epochs import begin_epochs_at
from torch_sink.common.ranks import warn
from torch_sink.errors import SinkError
from torch_sink.loop.callbacks import Callback, check_callbacks
from torch_sink.loop.checkpoints import check_prefix
from torch_sink.loop.core.batches import epoch_length
from torch_sink.loop.core.distributed import forget_shardings
from torch_sink.loop.core.history import Progress, Reasons, RunHistory
from torch_sink.loop.core.signals import stop_signals
from torch_sink.loop.engines.build import EngineSettings, Mode, build_engine
from torch_sink.loop.engines.jit import JitConfig
from torch_sink.loop.evaluation import Evaluator
from torch_sink.loop.metrics import Metrics
from torch_sink.loop.run import TrainingRun
from torch_sink.loop.saving import load_state, resume, save, state_of
from torch_sink.loop.step.optimizers import When
from torch_sink.loop.step.precision import Level, make_precision
from torch_sink.loop.step.scaler import StaticLossScaler
from torch_sink.loop.step.state import TrainState, check_forward
from torch_sink.loop.step.step import Engine
from torch_sink.thread_waits import host_sync_allowed
from torch_sink.tracing import timeline as record_timeline


class StepLoop:
    """Trains a model; the host waits for the device once per `steps_per_sync` iterations.

    An iteration is one batch. On the CPU the default mode is bit-identical to a plain PyTorch loop: losses, parameters,
    optimizer state and random numbers. As there, calling `model.train()` or `model.eval()` is up to you.

    Args:
        model: on its device, with float32 parameters. May be wrapped in DistributedDataParallel or sharded.
        loss_fn: `loss_fn(model(x), y)` -> tensor of one element. Not called, and may be None, if `forward` is given.
        optimizer: any dense torch.optim optimizer but LBFGS, for the model's parameters; None to evaluate and predict.
        steps_per_sync: iterations per host sync; -1 for a whole epoch.
        amp: "O0" float32; "O1" autocast; "O2" autocast with low precision between layers, and normalization and loss in
            float32; "O3" as "O2" with normalization in low precision; "auto" O2 on an accelerator, O0 on the CPU.
        amp_dtype: torch.bfloat16 or torch.float16.
        loss_scaler: "default" (dynamic for float16, none for bfloat16), None, or a scaler of `torch_sink.amp`.
        scheduler: a torch.optim.lr_scheduler, or None.
        schedule: when the scheduler steps, required with one: "epoch" at each epoch's end, as in most tutorials; "step"
            after each optimizer update, for schedules that count updates, such as OneCycleLR; "applied" as "step", but
            not after an update that was skipped for overflow.
        clip_grad_norm: largest norm of the gradients, or None.
        accumulate: iterations per optimizer update; each loss is divided by it. What is left at an epoch's end makes
            an update there.
        ema: decay of a moving average of the weights, such as 0.999, or None; see `ema_model`.
        mode: "auto" ("graph" on CUDA, "eager" elsewhere), "eager", "compile" or "graph".
        jit_config: how "compile" and "graph" compile.
        forward: `forward(model, batch)` -> loss, or (loss, dict of named tensors), for batches that are not (x, y).
        device: raises if the model is on another device; default the model's.

    Attributes:
        step_count: iterations trained so far, in all runs.
        history: of the latest run, even if it was interrupted or failed; None before the first.
        progress: `epochs`, `epoch_steps` and `steps` of the current run, or of the latest one.

    Raises:
        TypeError, ValueError: an argument that cannot be used; the message says what can.

    Examples:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loop = StepLoop(model, torch.nn.functional.cross_entropy, optimizer, steps_per_sync=10)
        >>> history = loop.run([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 25)
        >>> history.steps, history.host_syncs
        (25, 3)
    """

    @explains_wrong_calls(
        of_a_run="it belongs to the run: StepLoop(...).run(loader, epochs=..., callbacks=[...], max_steps=...)",
        metrics="it belongs to an evaluation: StepLoop(...).evaluate(loader, metrics=...)",
    )
    @host_sync_allowed()
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        steps_per_sync: int = 100,
        amp: Level = "O0",
        amp_dtype: torch.dtype = torch.bfloat16,
        loss_scaler: Literal["default"] | StaticLossScaler | None = "default",
        scheduler: Any | None = None,
        schedule: When | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        mode: Mode = "auto",
        jit_config: JitConfig | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        from torch_sink.sink.kept import KeptLoaders

        check_count("steps_per_sync", steps_per_sync, minimum=1, special=-1, meaning="a whole epoch")
        check_choice("mode", mode, get_args(Mode))
        if jit_config is not None and not isinstance(jit_config, JitConfig):
            raise TypeError(f"jit_config is a {type(jit_config).__name__}; pass a torch_sink.JitConfig")
        self.state = state = TrainState(
            model,
            loss_fn,
            optimizer,
            amp=amp,
            amp_dtype=amp_dtype,
            loss_scaler=loss_scaler,
            scheduler=scheduler,
            schedule=schedule,
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
            ema=ema,
            forward=forward,
            device=device,
        )
        self.model, self.optimizer, self.scheduler, self.scaler = model, state.optimizer, state.scheduler, state.scaler
        self.ranks, self.schedule, self.device = state.ranks, state.schedule, state.device
        self.steps_per_sync = steps_per_sync
        self.settings = EngineSettings(mode, jit_config or JitConfig(), self.device)
        if loss_fn is not None and forward is not None:
            self.settings.reasons.note("forward= computes the loss, so loss_fn is not called")
        self.engine: Engine | None = None  # before the first run, and after a state was loaded
        self.loaders = KeptLoaders(self.device)
        # Of the model (False), of its average (True), and of a `Model`.
        self._evaluators: dict[bool | Literal["Model"], Evaluator] = {}
        self._is_running = False

    @property
    def step_count(self) -> int:
        """Iterations trained so far, in all runs."""
        return self.state.step_count

    @property
    def history(self) -> RunHistory | None:
        """The history of the latest run, even if it was interrupted or failed; None before the first."""
        return self.state.history

    @property
    def progress(self) -> Progress:
        """The numbers of epochs and steps of the current run, or of the latest one."""
        return self.state.progress

    @explains_wrong_calls(
        of_an_evaluation="it belongs to a callback: run(loader, callbacks=[torch_sink.Evaluation(valid_loader)])",
        of_a_loader="it belongs to the loader: run(DataLoader(dataset, {name}=...))",
    )
    def run(
        self,
        loader: Any,
        *,
        epochs: int = 1,
        callbacks: Callback | list[Callback] | tuple[Callback, ...] = (),
        max_steps: int | None = None,
        timeline: str | Path | None = None,
    ) -> RunHistory:
        """Train.

        Ctrl-C and SIGTERM end the run after the current step. The loop, the loader's position and `loop.history` are
        then those of a run with so many steps, and ModelCheckpoint saves them. Afterwards KeyboardInterrupt is raised,
        or SIGTERM has its usual effect. With an `OnRequestExit` for the signal, `run` returns instead.

        Args:
            loader: a SinkLoader, or a loader that it can wrap. The run calls `set_epoch` of samplers and datasets that
                have it, going on from the program's own value.
            epochs: epochs of this run; after `resume`, of the interrupted run, which is completed.
            callbacks: called in their order.
            max_steps: iterations of this run, or of the interrupted one.
            timeline: path of a page that shows what ran when; see `torch_sink.timeline`.

        Returns:
            The loss, learning rate and overflow of every iteration.

        Raises:
            KeyboardInterrupt: Ctrl-C, see above.
            SinkError: 1,000 optimizer updates in a row overflowed, a signal stopped another rank, or a run of this loop
                is under way, as in a callback.
            ValueError, TypeError: the batch, loss or model cannot be used, or the ranks' epochs differ in length; the
                message says what can.
        """
        check_count("epochs", epochs, minimum=0)
        check_count("max_steps", max_steps, minimum=1, meaning="no bound")
        return self.run_epochs(
            loader,
            check_callbacks(callbacks),
            epochs=epochs,
            max_steps=max_steps,
            timeline=timeline,
            steps_per_sync=self.steps_per_sync,
        )

    @explains_wrong_calls(
        of_a_run="it belongs to a training: StepLoop(...).run(loader, epochs=..., callbacks=[...])",
        of_a_loader="it belongs to the loader: evaluate(DataLoader(dataset, {name}=...))",
    )
    def evaluate(
        self,
        loader: Any,
        *,
        metrics: Metrics | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        ema: bool = False,
    ) -> dict[str, Any]:
        """Evaluate one pass over a loader, in the mode and precision of training, with one host sync.

        The loss is the mean of the batches' losses, weighted by their samples (see `RunHistory.samples`). That of a
        `loss_fn` whose `reduction` is "sum" is the sum over all batches, divided by the samples.

        With more than one process, all of them call it, each with a share of any length; all get the same results. The
        position of a SinkLoader does not change. For evaluations during a run see `torch_sink.Evaluation`.

        Args:
            loader: a SinkLoader, or a loader that it can wrap.
            metrics: a set of "accuracy", "top5", "miou" and "loss", or name -> object with `reset`, `update(output,
                *labels)` and `compute`, such as `Accuracy`, `MeanIoU` and those of torchmetrics.
            forward: `forward(model, batch)` -> (loss or None, output, labels); default `loss_fn(model(x), y)` for
                batches (x, y), or the loop's `forward`, whose loss and named values are averaged.
            ema: evaluate the averaged weights.

        Returns:
            "loss" and the metrics, as Python numbers.

        Raises:
            TypeError, ValueError: a batch or a metric that cannot be used.
            SinkError: `ema=True`, but the loop was made without `ema`.

        Examples:
            >>> model = torch.nn.Linear(3, 2)
            >>> loop = StepLoop(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> sorted(loop.evaluate([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))], metrics={"accuracy"}))
            ['accuracy', 'loss']
        """
        check_bool("ema", ema)
        check_forward(forward)
        return self.evaluator(ema).evaluate(loader, metrics, forward=forward)

    @explains_wrong_calls()
    def predict(self, *inputs: Any, ema: bool = False) -> Any:
        """Compute the model's outputs for one batch, in evaluation mode and without gradients.

        It runs in the mode and precision of training. The loop needs no optimizer for it.

        Args:
            inputs: what the model takes, as in `predict(images)`; tensors, also in nested containers, are moved to its
                device.
            ema: predict with the averaged weights.

        Returns:
            The outputs on the model's device, in memory that no later call overwrites; float32 at every `amp` level.

        Raises:
            TypeError: the input is a loader or nothing, and not a batch.
            SinkError: `ema=True`, but the loop was made without `ema`.

        Examples:
            >>> loop = StepLoop(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
            >>> loop.predict(torch.zeros(4, 3)).shape
            torch.Size([4, 2])
        """
        check_bool("ema", ema)
        return self.evaluator(ema).predict(inputs)

    @host_sync_allowed()
    def state_dict(self) -> dict[str, Any]:
        """The state of model, optimizer, scheduler, scaler, average, random generators and progress, without copies.

        It also holds what training changes in a `loss_fn` that is a module, and parameters that the optimizer trains
        outside of both. The states of a sharded model and its optimizer are missing: `save` writes their shards.
        """
        return state_of(self.state)

    @explains_wrong_calls()
    @host_sync_allowed()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`; the next `run` completes the interrupted one.

        For `save` and ModelCheckpoint it is a new training, which replaces and deletes no earlier checkpoints.

        Raises:
            ValueError: no state of a StepLoop, or that of another training: another optimizer, scheduler, scaler,
                precision or `accumulate`, other parameter groups, a `loss_fn` that lacks what was saved of it, with or
                without an average. Nothing is loaded then.
            RuntimeError: the state of another model. Nothing is loaded then.
        """
        load_state(self.state, state)
        self._drop_engine()

    @explains_wrong_calls(callbacks="to save during a run: run(loader, callbacks=[torch_sink.ModelCheckpoint(...)])")
    @host_sync_allowed()
    def save(
        self,
        directory: str | Path,
        loader: Any = None,
        *,
        prefix: str = "CKP",
        about: dict[str, Any] | None = None,
    ) -> Path:
        """Write a complete checkpoint, or none. With more than one process, all of them call it.

        One of this training is replaced, if it has the same name; one of another training is renamed to
        `{prefix}-{step:08d}.older1`.

        Args:
            directory: parent of the checkpoint's directory `{prefix}-{step:08d}`.
            loader: the loader of `run`, whose position is saved too.
            prefix: first part of the name.
            about: plain values for the manifest, `complete.json`, such as a metric.

        Returns:
            Path of the checkpoint.

        Raises:
            TypeError, ValueError: an argument that cannot be used.
            OSError: the directory cannot be written to.
        """
        check_path("directory", directory)
        check_prefix(prefix)
        if about is not None and not isinstance(about, dict):
            raise TypeError(f"about is a {type(about).__name__}; pass a dict of plain values")
        return save(self.state, self.loaders, Path(directory), loader, prefix, about)

    @explains_wrong_calls(prefix="resume takes the newest checkpoint of any prefix; save those of others elsewhere")
    @host_sync_allowed()
    def resume(self, directory: str | Path, loader: Any = None, *, must_exist: bool = False) -> int:
        """Load the complete checkpoint under `directory` that was written last, whatever its step.

        With more than one process, all of them call it.

        Args:
            directory: the directory that was given to `save` or ModelCheckpoint.
            loader: the loader for `run`, whose position is loaded too.
            must_exist: raise if there is no checkpoint, instead of logging a warning.

        Returns:
            The step count; 0 if there is no checkpoint.

        Raises:
            FileNotFoundError: no complete checkpoint, and `must_exist`.
            NotADirectoryError, ValueError: `directory` is a file, or is itself a checkpoint.
            ValueError, RuntimeError: the checkpoint is of another training or model; see `load_state_dict`.
            SinkError: the ranks find different checkpoints, or the checkpoint is of another number of them.
        """
        check_path("directory", directory)
        check_bool("must_exist", must_exist)
        if resume(self.state, self.loaders, Path(directory), loader, must_exist=must_exist):
            self._drop_engine()
        return self.step_count

    def explain(self) -> str:
        """Mode, precision and state of the training, and why something ran in a lower mode, as text."""
        mode, settings = self.engine.mode if self.engine is not None else "not started", self.settings
        lines = [f"mode: {mode} (asked for {settings.mode!r}, device {self.device})"]
        if self.engine is not None:
            lines.append(f"steps of the latest run: {self.engine.counts}")
        lines += self.state.describe()
        if (memory := settings.memory).graphs:
            lines.append(f"graphs: {memory.graphs}, which keep {memory.reserved / 2**20:.0f} MiB of device memory")
        lines += [f"note: {reason}" for reason in settings.reasons.lines()]
        return "\n".join(lines + [line for evaluator in self._evaluators.values() for line in evaluator.explain()])

    @host_sync_allowed()
    def ema_model(self) -> nn.Module:
        """The model with averaged weights.

        Raises:
            SinkError: the loop was made without `ema`.
        """
        return self.state.ema_model()

    @host_sync_allowed()
    def close(self) -> None:
        """Free graphs, compiled code and loaders, and remove the hooks of mixed precision. Idempotent."""
        self._drop_engine()
        for evaluator in self._evaluators.values():
            evaluator.close()
        self.loaders.close()
        self.state.precision.close()
        if self.ranks.sharded:
            forget_shardings()

    def __repr__(self) -> str:
        """Model, optimizer, options and step count."""
        return (
            f"StepLoop({type(self.model).__name__}, {type(self.optimizer).__name__}, "
            f"steps_per_sync={self.steps_per_sync}, amp={self.state.precision.level!r}, mode={self.settings.mode!r}, "
            f"accumulate={self.state.accumulate}, device={str(self.device)!r}, step_count={self.step_count})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or copied, in the user's terms."""
        raise TypeError(
            "a StepLoop cannot be pickled or copied: it holds compiled code, graphs and loaders. Save it with "
            "loop.save(folder), or send loop.state_dict() and load it into a loop that the other process makes"
        )

    def __enter__(self) -> StepLoop:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    # For `Model`, and for callbacks.

    def run_epochs(
        self,
        loader: Any,
        callbacks: list[Callback],
        *,
        epochs: int,
        steps_per_sync: int,
        initial_epoch: int = 0,
        sink_size: int | None = None,
        max_steps: int | None = None,
        timeline: str | Path | None = None,
        numbers_own_steps: bool = False,
        **fields: Any,
    ) -> RunHistory:
        """Train, for `run` and for `Model`, which have checked the arguments.

        `sink_size` is the number of batches per epoch; None for the SinkLoader's `batches_per_epoch`, -1 for one pass.
        The other arguments are those of a `TrainingRun`. After a call without a step, such as one that failed or found
        the resumed run complete, a resumed run can be completed as before.
        """
        state = self.state
        if state.optimizer is None:
            raise ValueError(
                "this StepLoop has no optimizer, so it evaluates and predicts and cannot train; pass one: "
                "StepLoop(model, loss_fn, optimizer)"
            )
        if self._is_running:
            raise SinkError(
                "a run of this StepLoop is under way, and another one, such as in a callback, would take its place; "
                "make another StepLoop for it, or call run when this one has returned. evaluate and predict are allowed"
            )
        resumed, state.is_resumed, began = state.is_resumed, False, state.step_count
        if resumed:
            state.progress.count_from(initial_epoch)
        else:
            state.progress = Progress(initial_epoch=initial_epoch)
        with (
            self._marked_as_running(),
            stop_signals([number for callback in callbacks for number in callback.stop_signals]) as signals,
            nullcontext() if timeline is None else record_timeline(timeline),
            self.loaders.in_run(loader) as sink,
        ):
            if initial_epoch and not resumed:
                begin_epochs_at(sink.loader, initial_epoch)
            try:
                batches = sink.batches_per_epoch if sink_size is None else sink_size if sink_size > 0 else None
                state.ranks.check_lengths(epoch_length(sink, batches), max_steps)
                run = TrainingRun(
                    state,
                    sink,
                    callbacks,
                    signals,
                    self.settings.reasons.note,
                    epochs=epochs,
                    max_steps=max_steps,
                    batches=batches,
                    steps_per_sync=steps_per_sync,
                    numbers_own_steps=numbers_own_steps,
                    loop=self,
                    initial_epoch=initial_epoch,
                    **fields,
                )
                history = run.execute(self.prepare)
            finally:
                if resumed and state.step_count == began:
                    state.is_resumed = True
                    with suppress(Exception):  # a loader that failed may have no position
                        self.loaders.stay(loader)
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

    @contextmanager
    def _marked_as_running(self) -> Iterator[None]:
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @host_sync_allowed()
    def prepare(self, longest_sink: int) -> Engine:
        """Build the engine, or make room in it for sinks of up to `longest_sink` steps."""
        if not self.model.training:
            warn("the model is in eval mode; call model.train() before the run unless that is meant")
        if self.engine is None:
            self.engine = build_engine(self.state, self.settings, longest_sink)
        self.engine.reserve(longest_sink)
        return self.engine

    def compile_ahead(self, dataset: Any) -> None:
        """Run forward and backward pass of one batch, so that their compilation is done.

        Weights, gradients, statistics, random generators and the position in the data stay as they were.
        """
        engine = self.prepare(1)
        generators = torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
        with self.loaders.over(dataset) as loader, loader._rehearsal() as batches, engine.running(), generators:
            first = next(batches, None)
            if first is None:
                raise ValueError(f"{type(loader.loader).__name__} gave no batch to compile for; give it at least one")
            engine.training_step.rehearse(self.model, first)

    def evaluator(self, ema: bool = False) -> Evaluator:
        """The evaluator of the model, or of its average (`ema`), with the compiled code and graphs that it keeps."""
        state = self.state
        if ema:
            self.ranks.share_buffers()  # before ema_model() copies them
        network = state.ema_model() if ema else self.ranks.inner
        if ema in self._evaluators and self._evaluators[ema].network is not network:
            self._evaluators.pop(ema).close()
        if ema not in self._evaluators:
            own = state.precision
            precision = make_precision(own.level, own.dtype, self.device.type, network) if ema else own
            self._evaluators[ema] = self._make_evaluator(state.judging(network, state.forward, precision))
        return self._evaluators[ema]

    def evaluator_of_model(self, eval_network: nn.Module | None) -> Evaluator:
        """The evaluator of a `Model`, which judges by its loss function or by `eval_network`; closed with the loop."""
        made = self._make_evaluator(self.state.judging(self.ranks.inner, None), eval_network)
        self._evaluators["Model"] = made
        return made

    def _make_evaluator(self, state: TrainState, eval_network: nn.Module | None = None) -> Evaluator:
        """Make an evaluator of the model in `state`, with the training's mode and graph memory."""
        settings = replace(self.settings, reasons=Reasons())
        return Evaluator(state, settings, self.loaders, eval_network=eval_network)

    def _drop_engine(self) -> None:
        """Close the engine; the next run builds another."""
        if self.engine is not None:
            self.engine.close()
        self.engine = None
