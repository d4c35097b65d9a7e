"""Puts the parts of a loop together for a mode, and steps down to the next lower mode where one cannot work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.core.reasons import Reasons
from torch_sink.loop.engines.capture import Capture, CudaCapture
from torch_sink.loop.engines.compiled import CompiledLoss
from torch_sink.loop.engines.eager import Engine
from torch_sink.loop.engines.graph import DISTRIBUTED_WARMUP_STEPS, WARMUP_STEPS, GraphEngine
from torch_sink.loop.engines.jit import JitConfig, compiler_problem
from torch_sink.loop.step.adapters import backward_context
from torch_sink.loop.step.capturable import capture_obstacle, cycles_momentum, takes_betas_from_device
from torch_sink.loop.step.ema import WeightAverage
from torch_sink.loop.step.precision import Precision
from torch_sink.loop.step.scaler import StaticLossScaler
from torch_sink.loop.step.schedule import Schedule
from torch_sink.loop.step.step import LossFunction, TrainingStep, supervised_forward
from torch_sink.loop.step.step_log import ReplayedLog, StepLog
from torch_sink.loop.step.update import OptimizerUpdate


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of; the fields are those of StepLoop, resolved."""

    model: nn.Module
    loss_fn: Callable[..., Any] | None
    forward: Callable[[nn.Module, Any], Any] | None
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    precision: Precision
    scaler: StaticLossScaler | None
    average: WeightAverage | None
    clip_grad_norm: float | None
    accumulate: int
    device: torch.device
    capacity: int
    mode: str
    jit_config: JitConfig
    reasons: Reasons
    ranks: Ranks


def build_engine(parts: EngineParts) -> Engine:
    """The engine for the mode asked for, or for the next lower one that works; the reasons say why."""
    capture = make_capture(parts.device)
    mode = resolve_mode(parts, capture)
    loss_fn: Any = parts.loss_fn  # present whenever forward is not: StepLoop has checked it
    forward = parts.forward or supervised_forward(loss_fn, parts.precision)
    loss_function: Any = LossFunction(parts.model, forward, parts.precision)
    lower_mode = compile_or_eager(parts.model, parts.jit_config, parts.reasons) if mode == "graph" else mode
    if lower_mode == "compile":
        if parts.jit_config.fast_random:
            parts.reasons.note("fast_random: compiled dropout draws other random numbers than eager code")
        loss_function = CompiledLoss(loss_function, parts.model, parts.jit_config, parts.reasons)
    update = OptimizerUpdate(
        parts.model,
        parts.optimizer,
        parts.scaler,
        clip_grad_norm=parts.clip_grad_norm,
        reduce_found_inf=parts.ranks.found_inf_reduction(),
        average=parts.average,
        device=parts.device,
        cycles_betas=parts.schedule.cycles_betas,
    )
    update.mark_warm()
    log = ReplayedLog(parts.device, parts.capacity) if mode == "graph" else StepLog(parts.device)
    step = TrainingStep(
        loss_function,
        update,
        log,
        accumulate=parts.accumulate,
        gradient_sync=parts.ranks.gradient_sync(),
        backward_context=backward_context(parts.model),
        static_gradients=mode == "graph" and parts.accumulate > 1,
    )
    watchable = lower_mode == "eager" and not is_compiled(parts.model) and not parts.ranks.sharded
    if capture is None or mode != "graph":
        return Engine(mode, step, parts.schedule, watchable=watchable, ranks=parts.ranks)
    return GraphEngine(
        parts.model,
        step,
        parts.schedule,
        capture,
        parts.reasons,
        lower_mode=lower_mode,
        watchable=watchable,
        warmup_steps=DISTRIBUTED_WARMUP_STEPS if parts.ranks.many else WARMUP_STEPS,
        ranks=parts.ranks,
        refuse_python_state=parts.mode == "graph",
    )


def make_capture(device: torch.device) -> Capture | None:
    """What records graphs on `device`, or None where nothing does."""
    return CudaCapture(device) if device.type == "cuda" else None


def resolve_mode(parts: EngineParts, capture: Capture | None) -> str:
    """ "eager", "compile" or "graph", after all that speaks against the mode asked for."""
    mode = possible_mode(parts.mode, parts.device, parts.jit_config, parts.reasons, capture)
    if mode == "graph" and cycles_momentum(parts.schedule.scheduler) and not takes_betas_from_device(parts.optimizer):
        name = type(parts.optimizer).__name__
        parts.reasons.note(
            f"the scheduler cycles momentum, which {name} cannot read from the device: it means 'compile' here"
        )
        mode = "compile"
    if mode == "graph" and any(map(has_own_graphs, (*parts.model.modules(), parts.loss_fn, parts.forward))):
        parts.reasons.note(
            "torch.compile makes CUDA graphs of its own here (mode='reduce-overhead' or 'max-autotune'), which cannot "
            "lie inside another: mode 'graph' means 'compile'; compile the model without them, or leave it to the loop"
        )
        mode = "compile"
    obstacle = capture_obstacle(parts.optimizer, parts.device) if mode == "graph" else None
    if obstacle is not None:
        parts.reasons.note(f"{obstacle}: mode 'graph' means 'compile' here")
        mode = "compile"
    return compile_or_eager(parts.model, parts.jit_config, parts.reasons) if mode == "compile" else mode


def possible_mode(mode: str, device: torch.device, config: JitConfig, reasons: Reasons, capture: Capture | None) -> str:
    """What the mode asked for means on a device: "eager", "compile" or "graph"."""
    if mode == "auto":
        mode = "graph" if capture is not None else "eager"
    if mode == "graph" and capture is None:
        reasons.note(f"mode 'graph' needs CUDA and the model is on {device}: it means 'compile' here")
        return "compile"
    if mode == "graph" and config.exc_mode == "no_sink":
        reasons.note("exc_mode='no_sink' asks for no graph: it means 'compile' here")
        return "compile"
    return mode


def compile_or_eager(model: nn.Module, config: JitConfig, reasons: Reasons) -> str:
    """ "compile", or "eager" for what speaks against it."""
    if config.jit_level == "O0":
        reasons.note("jit_level='O0' asks for no compilation: steps run in eager code")
        return "eager"
    if is_compiled(model):
        reasons.note("the model is compiled already, so it is not compiled again")
        return "eager"
    problem = compiler_problem()
    if problem is not None:
        reasons.note(f"mode 'compile' means 'eager' here: {problem}; install g++ to compile")
        return "eager"
    return "compile"


def has_own_graphs(compiled: Any) -> bool:
    """Whether torch.compile was told to capture CUDA graphs of a module or function."""
    config = getattr(getattr(compiled, "dynamo_ctx", None), "compiler_config", None)
    function = getattr(compiled, "_compiled_call_impl", None) or compiled
    if config is None and hasattr(function, "get_compiler_config"):
        config = function.get_compiler_config()
    return bool(config and config.get("triton.cudagraphs"))


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, went through torch.compile."""
    from torch._dynamo import OptimizedModule

    return any(
        isinstance(module, OptimizedModule) or module._compiled_call_impl is not None for module in model.modules()
    )
