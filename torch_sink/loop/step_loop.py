"""StepLoop: trains any number of iterations per host sync."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.common.arguments import evaluation_places, explains_other_names, loader_places, run_places
from torch_sink.errors import SinkError
from torch_sink.loop.callbacks import Callback, check_callbacks, stop_signals
from torch_sink.loop.core import arguments as check
from torch_sink.loop.core.batches import epoch_length
from torch_sink.loop.core.distributed import Ranks, forget_shardings
from torch_sink.loop.core.history import Progress, Reasons, RunHistory
from torch_sink.loop.core.loaders import Wrappers
from torch_sink.loop.engines.build import Settings, build_engine
from torch_sink.loop.engines.jit import JitConfig
from torch_sink.loop.evaluation import Evaluator
from torch_sink.loop.loop_state import LoaderPositions, load_loop_state, loop_state, resume_loop, save_loop
from torch_sink.loop.run import TrainingRun
from torch_sink.loop.step.optimizers import Schedule
from torch_sink.loop.step.precision import make_precision, resolve_level
from torch_sink.loop.step.scaler import DynamicLossScaler, OverflowCount, StaticLossScaler, resolve_loss_scaler
from torch_sink.loop.step.step import Engine
from torch_sink.loop.step.update import WeightAverage
from torch_sink.thread_waits import host_sync_allowed
from torch_sink.tracing import timeline as record_timeline

_log = logging.getLogger("torch_sink")


class StepLoop:
    """Trains a model; the host waits for the device once per `steps_per_sync` iterations.

    An iteration is one batch. On the CPU the default mode gives bit for bit what the plain PyTorch loop gives: same
    losses, parameters, optimizer state and random draws. The model's train or eval state is the caller's, as there.

    Args:
        model: on its device, with float32 parameters. May be wrapped in DistributedDataParallel or sharded.
        loss_fn: `loss_fn(model(x), y)` -> tensor of one element. Not called, and may be None, when `forward` is given.
        optimizer: any dense torch.optim optimizer but LBFGS, of the model's parameters.
        steps_per_sync: iterations per host sync; -1 for a whole epoch.
        amp: "O0" float32; "O1" autocast; "O2" autocast with low precision from layer to layer, normalization and loss
            in float32; "O3" normalization in low precision too; "auto": O2 on an accelerator, O0 on the CPU.
        amp_dtype: torch.bfloat16 or torch.float16.
        loss_scaler: "default" (dynamic for float16, none for bfloat16), None, or a scaler of `torch_sink.amp`.
        scheduler: a torch.optim.lr_scheduler, or None.
        schedule: when the scheduler steps, to be given with one: "epoch" at each epoch's end, as in most tutorials;
            "step" after each optimizer update, for schedules that count updates, such as OneCycleLR.
        clip_grad_norm: largest norm of the gradients, or None.
        accumulate: iterations per optimizer update; each loss is divided by it.
        ema: decay of a moving average of the weights, such as 0.999, or None; see `ema_model`.
        mode: "auto" ("graph" on CUDA, "eager" elsewhere), "eager", "compile" or "graph".
        jit_config: how "compile" and "graph" compile.
        forward: `forward(model, batch)` -> loss, or (loss, dict of named tensors), for batches that are not (x, y).
        device: checked against the model's; default the model's.

    Attributes:
        step_count: iterations trained so far, in all runs.
        history: of the latest run, also of one that was interrupted or failed; None before the first.

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

    @explains_other_names(
        **run_places("it belongs to the run: StepLoop(...).run(loader, epochs=..., callbacks=[...], max_steps=...)"),
        metrics="it belongs to an evaluation: StepLoop(...).evaluate(loader, metrics=...)",
    )
    @host_sync_allowed()
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor] | None,
        optimizer: torch.optim.Optimizer,
        *,
        steps_per_sync: int = 100,
        amp: str = "O0",
        amp_dtype: torch.dtype = torch.bfloat16,
        loss_scaler: str | StaticLossScaler | None = "default",
        scheduler: Any | None = None,
        schedule: str | None = None,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        mode: str = "auto",
        jit_config: JitConfig | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check.check_model(model)
        check.check_functions(loss_fn, forward)
        check.check_count("steps_per_sync", steps_per_sync, minimum=1, special=-1, meaning="a whole epoch")
        check.check_count("accumulate", accumulate, minimum=1)
        check.check_choice("mode", mode, check.MODES)
        check.check_clip(clip_grad_norm)
        if jit_config is not None and not isinstance(jit_config, JitConfig):
            raise TypeError(f"jit_config is a {type(jit_config).__name__}; pass a torch_sink.JitConfig")
        self.ranks = Ranks(model)
        self.model, self.loss_fn, self.steps_per_sync, self.accumulate = model, loss_fn, steps_per_sync, accumulate
        self.device = check.resolve_device(model, device)
        self.model_devices = frozenset(parameter.device for parameter in model.parameters())
        self.average = WeightAverage(model, ema) if ema is not None else None
        level = resolve_level(amp, amp_dtype, model, self.device)
        self.optimizer = check.unwrap_optimizer(optimizer, level)
        check.check_optimizer_covers(model, self.optimizer)
        self.scheduler = check.unwrap_scheduler(scheduler, self.optimizer)
        check.check_schedule(schedule, self.scheduler)
        self.scaler = resolve_loss_scaler(loss_scaler, level, amp_dtype, self.device, check.own_scaler(optimizer))
        if isinstance(self.scaler, DynamicLossScaler) and level != "O0" and amp_dtype is torch.bfloat16:
            _log.warning("bfloat16 has the range of float32, so a DynamicLossScaler does nothing for it; leave it out")
        self.step_count = 0
        self.history: RunHistory | None = None
        self.progress = Progress()
        self.settings = Settings(mode, jit_config or JitConfig(), self.device)
        if loss_fn is not None and forward is not None:
            self.settings.reasons.note("forward= computes the loss, so loss_fn is not called")
        repeats, per_epoch = check.scheduler_repeats(scheduler), schedule == "epoch"
        self.schedule = Schedule(
            self.optimizer, self.scheduler, per_epoch=per_epoch, accumulate=accumulate, repeats=repeats
        )
        self.forward, self.clip_grad_norm = forward, clip_grad_norm
        self._engine: Engine | None = None
        self._resumed = False
        self.overflows = OverflowCount(self.scaler, accumulate)
        self.wrappers, self._positions = Wrappers(self.device), LoaderPositions()
        self._evaluators: dict[bool, Evaluator] = {}  # of the model, and of its average (True)
        # Last: its hooks are not to stay on a model that was refused, nor to be copied into the average.
        self.precision = make_precision(level, amp_dtype, self.device.type, model)

    @explains_other_names(
        **evaluation_places("it belongs to a callback: run(loader, callbacks=[torch_sink.Evaluation(valid_loader)])"),
        **loader_places("it belongs to the loader: run(DataLoader(dataset, batch_size=...))"),
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

        Ctrl-C and SIGTERM end the run after the current step: the loop, the loader's position and `loop.history` are
        then those of a run of so many steps, and ModelCheckpoint saves them. After that, KeyboardInterrupt is raised,
        and SIGTERM does what it does elsewhere. With an `OnRequestExit` for the signal, `run` returns instead.

        Args:
            loader: a SinkLoader, or anything that one can wrap.
            epochs: epochs of this run; after `resume`, of the interrupted run that is completed.
            callbacks: called in their order.
            max_steps: iterations of this run, counted as `epochs` are.
            timeline: where to write a page that shows what ran when; see `torch_sink.timeline`.

        Returns:
            Every iteration's loss, learning rate and overflow.

        Raises:
            KeyboardInterrupt: Ctrl-C, see above.
            SinkError: 1,000 optimizer updates in a row overflowed, or a signal stopped another rank.
            ValueError, TypeError: the batch, loss or model does not fit, or the ranks' epochs differ in length; the
                message says what does.
        """
        check.check_count("epochs", epochs, minimum=0)
        if max_steps is not None:
            check.check_count("max_steps", max_steps, minimum=1)
        return self.run_with(loader, epochs, check_callbacks(callbacks), max_steps=max_steps, timeline=timeline)

    def run_with(
        self,
        loader: Any,
        epochs: int,
        callbacks: list[Callback],
        *,
        max_steps: int | None = None,
        timeline: str | Path | None = None,
        sink_size: int | None = None,
        steps_per_sync: int | None = None,
        **fields: Any,
    ) -> RunHistory:
        """`run` with MindSpore's `sink_size`, other `steps_per_sync`, and further fields for the RunContext."""
        resumed, self._resumed, began = self._resumed, False, self.step_count
        if not resumed:
            self.progress = Progress()
        with (
            stop_signals(callbacks) as signals,
            nullcontext() if timeline is None else record_timeline(timeline),
            self._positions.opened(loader, self.wrappers) as sink,
        ):
            try:
                batches = sink.batches_per_epoch if sink_size is None else sink_size if sink_size > 0 else None
                self.ranks.check_lengths(epoch_length(sink, batches), max_steps)
                steps = self.steps_per_sync if steps_per_sync is None else steps_per_sync
                return TrainingRun(
                    self, sink, epochs, callbacks, max_steps, signals, fields, batches=batches, steps_per_sync=steps
                ).execute()
            except BaseException:
                if resumed and self.step_count == began:  # the next run is the one that completes what was interrupted
                    self._resumed = True
                    self._positions.keep(loader)
                raise

    def evaluate(
        self,
        loader: Any,
        *,
        metrics: Any = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        ema: bool = False,
    ) -> dict[str, Any]:
        """Evaluate the whole of a loader, in the mode and precision of training, with one host sync.

        With more than one process all of them call it, each with its share, of any length; all get the same results.
        A SinkLoader is left where it was. For evaluations during a run see `torch_sink.Evaluation`.

        Args:
            loader: a SinkLoader, or anything that one can wrap.
            metrics: a set of "accuracy", "top5" and "loss", or name -> object with `reset`, `update(output, *labels)`
                and `compute`, such as those of torchmetrics.
            forward: `forward(model, batch)` -> (loss or None, output, labels); default `loss_fn(model(x), *labels)` of
                batches (x, labels), or the means of what the loop's own `forward` returns.
            ema: evaluate the averaged weights.

        Returns:
            "loss" and the metrics, as Python numbers.

        Raises:
            TypeError, ValueError: a batch or a metric that does not fit.
            SinkError: `ema=True`, and the loop was made without `ema`.

        Examples:
            >>> model = torch.nn.Linear(3, 2)
            >>> loop = StepLoop(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> sorted(loop.evaluate([(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))], metrics={"accuracy"}))
            ['accuracy', 'loss']
        """
        return self.evaluator(ema).evaluate(loader, metrics, forward=forward)

    def evaluator(self, ema: bool = False) -> Evaluator:
        """What evaluates the model, or its average; kept with all that was compiled and captured."""
        if ema:
            self.ranks.share_buffers()  # before the average copies them
        network = self.ema_model() if ema else self.ranks.inner
        if ema not in self._evaluators:
            settings = replace(self.settings, reasons=Reasons())
            precision = self.precision
            if ema:
                precision = make_precision(precision.level, precision.dtype, self.device.type, network)
            self._evaluators[ema] = Evaluator(
                network, self.ranks, self.loss_fn, precision, settings, self.wrappers, forward=self.forward
            )
        return self._evaluators[ema]

    @host_sync_allowed()
    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer, scheduler, scaler, average, random generators and progress; tensors are not copied.

        Without model and optimizer if the model is sharded: `save` writes the shards.
        """
        return loop_state(self)

    @host_sync_allowed()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; the next `run` completes the interrupted one."""
        load_loop_state(self, state)
        self._resumed = True
        self._drop_engine()

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

        Args:
            directory: parent of the checkpoint's directory `{prefix}-{step:08d}`.
            loader: its position is saved too: what `run` was given.
            prefix: first part of the name.
            about: plain values for its manifest, `complete.json`, such as a metric.

        Returns:
            Path of the checkpoint.
        """
        position = self._positions.state(loader) if loader is not None else None
        further = {"loader": position} if loader is not None else {}
        return save_loop(self, Path(directory), prefix, further, about)

    @host_sync_allowed()
    def resume(self, directory: str | Path, loader: Any = None, *, must_exist: bool = False) -> int:
        """Load the newest complete checkpoint under `directory`. With more than one process, all of them call it.

        Args:
            directory: what `save` or ModelCheckpoint was given.
            loader: gets its position back: what `run` will be given.
            must_exist: raise if there is no checkpoint; otherwise a warning says so.

        Returns:
            The step count; 0 if there is no checkpoint.

        Raises:
            FileNotFoundError: no complete checkpoint, and `must_exist`.
            NotADirectoryError, ValueError: `directory` is a file, or is itself a checkpoint.
            RuntimeError: the checkpoint is of another model.
        """
        state = resume_loop(self, Path(directory))
        if state is None:
            problem = f"there is no complete checkpoint in {Path(directory).absolute()}"
            if must_exist:
                raise FileNotFoundError(f"{problem}; check the path, or resume(..., must_exist=False) to begin anew")
            _log.warning("%s: training begins at step 0; resume(..., must_exist=True) makes this an error", problem)
            return 0
        if loader is not None and state.get("loader") is not None:
            self._positions.load(loader, state["loader"])
        elif self.progress.epoch_steps:
            _log.warning(
                "the checkpoint was taken after %d steps of an epoch, whose batches come again from the first: for the "
                "others alone, save(directory, loader) and resume(directory, loader) take the loader",
                self.progress.epoch_steps,
            )
        return self.step_count

    def explain(self) -> str:
        """How the steps run, and why: mode, precision, and everything that ran in a lower mode."""
        mode = self._engine.mode if self._engine is not None else "not started"
        lines = [
            f"mode: {mode} (asked for {self.settings.mode!r}, device {self.device})",
            f"amp: {self.precision.level}" + ("" if self.precision.level == "O0" else f" {self.precision.dtype}"),
            f"loss scaler: {type(self.scaler).__name__ if self.scaler is not None else 'none'}",
            f"steps: {self.step_count}, optimizer: {type(self.optimizer).__name__}, accumulate: {self.accumulate}",
        ]
        if (memory := self.settings.memory).graphs:
            lines.append(f"graphs: {memory.graphs}, which keep {memory.reserved / 2**20:.0f} MiB of device memory")
        lines += [f"note: {reason}" for reason in self.settings.reasons.lines()]
        for evaluator in self._evaluators.values():
            lines += evaluator.explain()
        return "\n".join(lines)

    @host_sync_allowed()
    def ema_model(self) -> nn.Module:
        """The model with averaged weights.

        Raises:
            SinkError: the loop was made without `ema`.
        """
        if self.average is None:
            raise SinkError("this loop keeps no average of the weights; make it with StepLoop(..., ema=0.999)")
        return self.average.model()

    @host_sync_allowed()
    def close(self) -> None:
        """Release what the device holds and leave the model as it was found. Idempotent."""
        self._drop_engine()
        for evaluator in self._evaluators.values():
            evaluator.close()
        self.wrappers.close()
        self.precision.close()
        if self.ranks.sharded:
            forget_shardings()

    def __repr__(self) -> str:
        """What is trained, by what, how, and how far."""
        return (
            f"StepLoop({type(self.model).__name__}, {type(self.optimizer).__name__}, "
            f"steps_per_sync={self.steps_per_sync}, amp={self.precision.level!r}, mode={self.settings.mode!r}, "
            f"accumulate={self.accumulate}, device={str(self.device)!r}, step_count={self.step_count})"
        )

    def __enter__(self) -> StepLoop:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    @host_sync_allowed()
    def prepare(self, longest_sink: int) -> Engine:
        """The engine for sinks of up to `longest_sink` steps; kept between runs."""
        if not self.model.training:
            _log.warning("the model is in eval mode; call model.train() before the run unless that is meant")
        if self._engine is None:
            self._engine = build_engine(self, longest_sink)
        self._engine.reserve(longest_sink)
        return self._engine

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
