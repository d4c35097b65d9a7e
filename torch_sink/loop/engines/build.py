"""Chooses the mode of training steps and forward passes, or the next lower mode if that one cannot work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from torch_sink.common.containers import leaves
from torch_sink.common.integrations import backward_context
from torch_sink.loop.core.batches import map_tensors
from torch_sink.loop.core.history import Reasons, StepCounts, StepLog, first_line
from torch_sink.loop.core.host_sync import user_place
from torch_sink.loop.engines.capture import LEFT_BEHIND, CapturedGraphs, CudaCapture, overrides_stale_streams
from torch_sink.loop.engines.graph import LEAST_CAPACITY, GraphEngine
from torch_sink.loop.engines.jit import CompiledLoss, JitConfig, compiler_problem
from torch_sink.loop.engines.memory import GraphMemory, Places, places_of
from torch_sink.loop.step.optimizers import ADAMS, cycles_momentum
from torch_sink.loop.step.precision import ForwardPass
from torch_sink.loop.step.state import TrainState
from torch_sink.loop.step.step import EagerLoss, Engine, LossFunction, TrainingStep
from torch_sink.loop.step.update import OptimizerUpdate
from torch_sink.thread_waits import waits_watched

Mode = Literal["auto", "eager", "compile", "graph"]


@dataclass(frozen=True)
class EngineSettings:
    """How steps and forward passes run: mode, compiler settings, device, and the memory of graphs.

    `reasons` collects what ran differently, and why.
    """

    mode: Mode
    jit_config: JitConfig
    device: torch.device
    reasons: Reasons = field(default_factory=Reasons)
    memory: GraphMemory = field(default_factory=GraphMemory)


def build_engine(state: TrainState, settings: EngineSettings, capacity: int) -> Engine:
    """Build the engine for sinks of up to `capacity` steps, in the requested mode or the next lower one that works."""
    model = state.model
    mode, lower_mode = resolve_modes(model, settings, lambda: _capture_obstacle(state))
    forward = ForwardPass(model, state.loss_fn, state.forward, state.precision)

    loss_function: LossFunction = EagerLoss(forward.loss)
    if lower_mode == "compile":
        if settings.jit_config.fast_random:
            settings.reasons.note("fast_random: compiled dropout draws other random numbers than eager code")
        loss_function = CompiledLoss(forward.loss, model, settings.jit_config, settings.reasons)
    update = OptimizerUpdate(
        model,
        state.optimizer,
        state.scaler,
        state.device,
        clip_grad_norm=state.clip_grad_norm,
        agrees=state.ranks.many,
        average=state.average,
        cycles_betas=state.schedule.cycles_betas,
    )
    step = TrainingStep(
        loss_function,
        update,
        StepLog(state.device, max(capacity, LEAST_CAPACITY) if mode == "graph" else capacity),
        accumulate=state.accumulate,
        gradient_sync=state.ranks.gradient_sync,
        backward_context=backward_context(model),
        static_gradients=mode == "graph" and state.accumulate > 1,
    )
    watchable = lower_mode == "eager" and not is_compiled(model) and not state.ranks.sharded
    capture = make_capture(state.device, settings.memory)
    if mode != "graph" or capture is None:
        return Engine(mode, state, step, watchable=watchable)
    refuses = settings.mode == "graph"
    return GraphEngine(
        state, step, capture, settings.reasons, lower_mode=lower_mode, watchable=watchable, refuses_python_state=refuses
    )


def make_capture(device: torch.device, memory: GraphMemory) -> CudaCapture | None:
    """A capture of graphs on `device`; None for a device without CUDA graphs."""
    return CudaCapture(device, memory) if device.type == "cuda" else None


def resolve_modes(
    model: nn.Module, settings: EngineSettings, obstacle: Callable[[], str | None] = lambda: None
) -> tuple[str, str]:
    """The mode that works here, and the mode in which "graph" runs what it cannot capture.

    `obstacle` returns why nothing can be captured, or None.
    """
    mode, reasons, capture = settings.mode, settings.reasons, make_capture(settings.device, settings.memory)
    if mode == "auto":
        mode = "graph" if capture is not None else "eager"
    in_threads = any(isinstance(one, nn.DataParallel) and len(one.device_ids) > 1 for one in model.modules())
    if mode != "eager" and in_threads:
        reasons.note(
            "nn.DataParallel drives its devices from threads of one process, so steps run in eager code; "
            "DistributedDataParallel, with a process for each device, is compiled and captured"
        )
        mode = "eager"
    if mode == "eager":
        return mode, mode
    if mode == "graph":
        if capture is None:
            problem: str | None = f"mode 'graph' needs CUDA and the model is on {settings.device}"
        elif settings.jit_config.exc_mode == "no_sink":
            problem = "exc_mode='no_sink' asks for no graph"
        elif any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            problem = (
                "models sharded by fully_shard are not captured: their collectives run on streams of their own, and a "
                "capture that failed would leave them in the middle of a backward pass"
            )
        else:
            problem = obstacle()
        if problem is not None:
            reasons.note(f"{problem}: it means 'compile' here")
            mode = "compile"
    lower = "eager"
    if settings.jit_config.jit_level == "O0":
        reasons.note("jit_level='O0' asks for no compilation: steps run in eager code")
    elif is_compiled(model):
        reasons.note("the model is compiled already, so it is not compiled again")
    elif problem := compiler_problem():
        reasons.note(f"mode 'compile' means 'eager' here: {problem}; install g++ to compile")
    else:
        lower = "compile"
    return (mode if mode == "graph" else lower), lower


def _capture_obstacle(state: TrainState) -> str | None:
    """Why no step can be captured, as far as it can be told before a trial."""
    name, groups = type(state.optimizer).__name__, state.optimizer.param_groups
    # Adam and AdamW read their first beta from the device, in the form that steps one tensor at a time. Others compare
    # momentum with zero on the host, and fused kernels take betas as numbers.
    as_numbers = any(group.get("fused") or group.get("differentiable") for group in groups)
    if cycles_momentum(state.schedule.scheduler) and (as_numbers or type(state.optimizer) not in ADAMS):
        return f"the scheduler cycles momentum, which {name} cannot read from the device"
    if problem := _nested_graphs(state.model, state.loss_fn, state.forward):
        return problem
    if any(isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse for one in state.model.modules()):
        return "an embedding makes sparse gradients, whose update waits for the device (sparse=False makes dense ones)"
    if state.ranks.many and not overrides_stale_streams():
        return "DistributedDataParallel binds gradients to another stream, which torch 2.13 and later can capture"
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if parameter.device != state.device:
            return f"{name} holds parameters on {parameter.device}, outside {state.device}"
        if not parameter.is_floating_point():
            return f"{name} holds parameters of {parameter.dtype}, whose steps read the learning rate on the host"
    return None


def _nested_graphs(model: nn.Module, *functions: Any) -> str | None:
    """Why a model or functions for which torch.compile makes CUDA graphs cannot be captured; None for all others."""
    for compiled in (*model.modules(), *functions):
        config = getattr(getattr(compiled, "dynamo_ctx", None), "compiler_config", None)
        function = getattr(compiled, "_compiled_call_impl", None) or compiled
        if config is None and hasattr(function, "get_compiler_config"):
            config = function.get_compiler_config()
        if config and config.get("triton.cudagraphs"):
            return (
                "torch.compile makes CUDA graphs of its own here (mode='reduce-overhead' or 'max-autotune'), which "
                "cannot lie inside those of mode 'graph' (compile the model without them, or leave it to the loop)"
            )
    return None


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, went through torch.compile."""
    from torch._dynamo import OptimizedModule

    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in model.modules()
    )


class Inference:
    """A function of a batch without gradients: compiled, and in mode "graph" captured once and replayed.

    The graph reads from one place, to which batches are copied. It is captured again when the model has other layers,
    or when its parameters or buffers have moved. The first call with a batch of the usual shape lets the compiler run,
    which may wait for the device; the second is a trial, which finds what would make a capture fail. After a capture
    that failed, the mode is the next lower one.

    Args:
        function: `function(batch)`, which calls the model.
        parts: functions that it may call, checked for CUDA graphs of torch.compile.
    """

    def __init__(
        self, function: Callable[[Any], Any], model: nn.Module, settings: EngineSettings, parts: tuple[Any, ...] = ()
    ) -> None:
        self._model, self._reasons = model, settings.reasons
        self.counts = StepCounts()  # of the batches of the latest evaluation
        self.mode, self._lower_mode = resolve_modes(model, settings, lambda: _nested_graphs(model, *parts))
        compiles = self._lower_mode == "compile"
        self._function: LossFunction = EagerLoss(function)
        if compiles:
            self._function = CompiledLoss(function, model, settings.jit_config, settings.reasons)
        # One capture per function, so that its graphs can be destroyed without those of other functions.
        capture = make_capture(settings.device, settings.memory) if self.mode == "graph" else None
        self._graphs = CapturedGraphs(capture, settings.reasons) if capture is not None else None
        self.reuses_results = self._graphs is not None  # the next call overwrites the result of a call
        self._places: Any = None

    @contextmanager
    def running(self, loader: Any) -> Iterator[None]:
        """A context for calls with the batches of a SinkLoader, or with other ones (None)."""
        if loader is not None:
            self.counts = StepCounts()
            self._function.begin()
        if self._graphs is None:
            yield
            return
        if loader is not None:
            self._graphs.begin()
        places = places_of(self._model)
        if self._graphs and places != self._places:
            self._graphs.forget()
        self._places = places
        self._graphs.pause = getattr(loader, "_paused", nullcontext)
        self._graphs.cuda.memory.make_room()
        with self._graphs.cuda.stream():
            yield

    def __call__(self, batch: Any) -> Any:
        graphs = self._graphs
        if graphs is None:
            return self._launch(batch)
        found = graphs.find(batch, leaves(batch)) if self.mode == "graph" else None
        if found is None:
            return self._run_between_replays(graphs.cuda.memory, batch)
        slot, batch, replay = found
        if graphs.tried:
            replay = replay or self._capture_pass(graphs, slot, batch)
            if replay is None:
                return self._launch(batch)
            self.counts.captured += 1
            return replay()
        problems: list[str] = []
        before = Places(self._model)
        with graphs.pause(), waits_watched():
            result = self._run_between_replays(graphs.cuda.memory, batch, graphs.cuda.trial(problems))
        graphs.tried.add(None)
        if problem := next(iter(problems), before.problem()):
            self._step_down(graphs, problem)
        return result

    def close(self) -> None:
        """Release what the device holds."""
        if self._graphs is not None:
            self._graphs.forget()

    def _launch(self, batch: Any) -> Any:
        """Run uncaptured."""
        result = self._function(batch, None)
        odd = self._graphs.was_odd if self.mode == "graph" and self._graphs is not None else self._function.was_odd
        self.counts.add_launched(compiled=self._function.ran_compiled, odd=odd)
        return result

    def _run_between_replays(
        self, memory: GraphMemory, batch: Any, context: AbstractContextManager[Any] | None = None
    ) -> Any:
        """Run uncaptured, and copy results out of the pool, whose memory the next replay may overwrite."""
        try:
            with memory.lent() as is_lent, context or nullcontext():
                result = self._launch(batch)
            if is_lent:
                result = map_tensors(torch.clone, result)
            return result
        finally:
            if not memory.take_back():
                self._reasons.count(LEFT_BEHIND)

    def _capture_pass(self, graphs: CapturedGraphs, slot: Any, batch: Any) -> Callable[[], Any] | None:
        result: list[Any] = []

        def function(batch: Any) -> None:
            result[:] = [self._function(batch, None)]

        def replay() -> Any:
            launch()
            return result[0]

        before = Places(self._model)
        try:
            launch = graphs.capture(function, {slot: batch})[slot]
            problem = before.problem()
        except Exception as error:
            problem = f"{first_line(error)} (at {user_place(error)})"
        if problem is not None:
            before.put_back()
            self._step_down(graphs, problem)
            return None
        graphs.keep({slot: replay}, {slot: batch})
        return replay

    def _step_down(self, graphs: CapturedGraphs, problem: str) -> None:
        self.mode = self._lower_mode
        self._reasons.warn(f"forward passes cannot be captured, so they run in mode {self.mode!r}: {problem}")
        graphs.forget()
