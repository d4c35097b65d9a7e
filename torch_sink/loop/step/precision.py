"""The forward pass of a batch, and its precision: AMP levels, under which parameters stay float32 tensors."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss

from torch_sink.common.integrations import without_wrappers
from torch_sink.loop.core.batches import batch_tensors, map_tensors

Function = Callable[[nn.Module, Any], Any]
Level = Literal["O0", "O1", "O2", "O3", "auto"]
LEVELS = get_args(Level)
LOW = (torch.float16, torch.bfloat16)
NORMALIZATION: tuple[type[nn.Module], ...] = (
    _NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)


class Precision:
    """O0: the forward pass runs in the dtype of the model. O1: torch.autocast chooses that of each operator."""

    def __init__(self, level: str, dtype: torch.dtype, device_type: str = "cpu") -> None:
        self.level, self.dtype, self.device_type = level, dtype, device_type

    def context(self) -> AbstractContextManager[Any]:
        """A context for the forward pass."""
        return nullcontext() if self.level == "O0" else torch.autocast(self.device_type, dtype=self.dtype)

    def loss_context(self) -> AbstractContextManager[Any]:
        """A context for the loss function, inside `context()`."""
        return nullcontext()

    def inputs(self, inputs: Any) -> Any:
        """Casts the arguments of a forward that runs in `context()`."""
        return inputs

    def outputs(self, outputs: Any) -> Any:
        """Casts the model's outputs for the loss function, and the loss for the backward pass."""
        return outputs if self.level == "O0" else to_float32(outputs)

    casts: tuple[_Cast, ...] = ()  # the objects whose methods are hooks of the model

    def follow(self, model: nn.Module) -> None:
        """Take over layers that the model has got since the last call."""

    def close(self) -> None:
        """Remove all hooks from the model."""


class LayerCasts(Precision):
    """O2 and O3: torch.autocast, with low precision for the tensors between layers.

    The outputs of layers with parameters are cast to low precision, and those of dropout, after which the residual
    stream of a transformer begins. So are those of normalization layers, which compute in float32 at O2
    (`float_norms`). The model's outputs and the loss function are float32. The casts are hooks that act only under
    autocast: outside `context()` the model computes as before, and an activation checkpoint, which restores autocast,
    recomputes with the same casts.
    """

    def __init__(
        self, level: str, dtype: torch.dtype, device_type: str, model: nn.Module, *, float_norms: bool | None = None
    ) -> None:
        super().__init__(level, dtype, device_type)
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ValueError(
                f"amp={level!r} casts the tensors between layers by hooks, which a TorchScript module does not run; "
                "pass amp='O1', or the model as it was before torch.jit"
            )
        self._to_low, self._to_float = self.casts = _Cast(dtype, dtype), _Cast(torch.float32, dtype)
        self._float_norms = level == "O2" if float_norms is None else float_norms
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False  # a loop may be collected without close()
        self._hook_all(model)
        self._handles.append(model.register_forward_hook(self._to_float.outputs))

    def follow(self, model: nn.Module) -> None:
        if self._handles:  # not closed
            self._hook_all(model)

    def _hook_all(self, model: nn.Module) -> None:
        inner = without_wrappers(model)  # the model's last outputs are not rounded, with or without wrappers
        outermost = model, inner, without_wrappers(getattr(inner, "module", inner))
        for module in model.modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if not any(getattr(hook, "__self__", None) in self.casts for hook in hooks):
                self._hook(module, is_outermost=module in outermost)

    def _hook(self, module: nn.Module, *, is_outermost: bool) -> None:
        to_low, to_float, handles = self._to_low, self._to_float, self._handles
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if isinstance(module, _Loss):
            handles.append(module.register_forward_pre_hook(to_float.inputs, with_kwargs=True))
        elif isinstance(module, NORMALIZATION):
            # RMSNorm has no kernel for low-precision inputs with float32 weights.
            norm_gets = to_float if self._float_norms or isinstance(module, nn.RMSNorm) else to_low
            handles.append(module.register_forward_pre_hook(norm_gets.inputs, with_kwargs=True))
            handles.append(module.register_forward_hook(to_low.outputs))
        elif isinstance(module, _DropoutNd) or (not is_outermost and has_parameters):
            handles.append(module.register_forward_hook(to_low.outputs))

    def loss_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, enabled=False)

    def close(self) -> None:
        _remove(self._handles)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class _Cast:
    """Hooks that cast float32 and low-precision tensors to `dtype` under autocast to `low`."""

    def __init__(self, dtype: torch.dtype, low: torch.dtype) -> None:
        self.dtype, self.low = dtype, low

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.cast(args), self.cast(kwargs)

    def outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.cast(output)

    def cast(self, value: Any) -> Any:
        return map_tensors(self._cast_tensor, value)

    def _cast_tensor(self, tensor: Tensor) -> Tensor:
        device = tensor.device.type
        if tensor.dtype not in (*LOW, torch.float32) or not torch.is_autocast_enabled(device):
            return tensor
        return tensor.to(self.dtype) if torch.get_autocast_dtype(device) == self.low else tensor


class FullPrecision(Precision):
    """The precision of a float32 part of a model in low precision: its outputs are cast to low precision."""

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, enabled=False)

    def inputs(self, inputs: Any) -> Any:
        return to_float32(inputs)

    def outputs(self, outputs: Any) -> Any:
        return _Cast(self.dtype, self.dtype).cast(outputs)


class PrecisionForward:
    """Stand-in for a module's `forward` that runs it under a precision."""

    def __init__(self, module: nn.Module, precision: Precision, *own: Any) -> None:
        self._reference, self._precision = weakref.ref(module), precision  # weak: the module keeps this
        # While a module is copied, its attributes do not exist yet, and its own forward is passed.
        self._own = own[0] if own else module.__dict__.get("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        return PrecisionForward, (self._module(), self._precision, self._own)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._forward(self._module()))

    def _module(self) -> nn.Module:
        module = self._reference()
        if module is None:
            raise ReferenceError("the model that this forward belongs to is gone; keep the model, not its forward")
        return module

    def _forward(self, module: Any) -> Callable[..., Any]:
        return self._own or type(module).forward.__get__(module)  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The device now: the model may have moved. A module without parameters takes that of its arguments.
        module = self._module()
        for tensor in [*islice(module.parameters(), 1)] or batch_tensors((args, kwargs))[:1]:
            self._precision.device_type = tensor.device.type
        with self._precision.context():
            args, kwargs = self._precision.inputs((args, kwargs))
            outputs = self._forward(module)(*args, **kwargs)
        return self._precision.outputs(outputs)


def to_float32(value: Any) -> Any:
    """Cast the float16 and bfloat16 tensors in nested containers to float32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in LOW else tensor, value)


def resolve_level(level: str, dtype: torch.dtype, model: nn.Module, device: torch.device) -> str:
    """Check the `amp` and `amp_dtype` arguments; returns the level, for "auto" that of the device."""
    if level not in LEVELS:
        raise ValueError(
            f"amp={level!r}: the levels are {', '.join(LEVELS)}; for autocast pass amp='O1', amp_dtype=torch.bfloat16"
        )
    if dtype not in LOW:
        raise ValueError(f"amp_dtype={dtype!r}: pass torch.bfloat16 or torch.float16")
    if isinstance(model.__dict__.get("forward"), PrecisionForward) and level != "O0":
        raise ValueError(
            f"amp={level!r}, but the model went through auto_mixed_precision already; "
            "pass amp='O0', or the model as it was"
        )
    return level if level != "auto" else "O0" if device.type == "cpu" else "O2"


def make_precision(
    level: str, dtype: torch.dtype, device_type: str, model: nn.Module, *, float_norms: bool | None = None
) -> Precision:
    """Make the precision of a model; for O2 and O3, the model has hooks until it is closed or collected."""
    if level in ("O0", "O1"):
        return Precision(level, dtype, device_type)
    return LayerCasts(level, dtype, device_type, model, float_norms=float_norms)


class Judged(NamedTuple):
    """The results of an evaluation of one batch."""

    loss: Tensor | None  # its mean over the batch, or one value per sample
    output: Any
    labels: tuple[Any, ...]
    named: dict[str, Tensor]  # further means over the batch, by name


class ForwardPass:
    """The forward pass of a model and its loss, under a precision, for training and for evaluation.

    In mode "compile", its methods are compiled. Without `function(model, batch)`, the loss of a batch (x, y) is
    `loss_fn(model(x), y)`.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, function: Function | None, precision: Precision
    ) -> None:
        self._model, self._loss_fn, self._function, self._precision = model, loss_fn, function, precision

    def loss(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """The loss of a batch, attached to its autograd graph, and the named values that `function` returns with it."""
        if self._function is None:
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise TypeError(
                    f"the batch is {_shown(batch)}; a tuple or list (x, y) trains by loss_fn(model(x), y), for "
                    "anything else pass forward=lambda model, batch: loss"
                )
            return self._precision.outputs(self._run(batch)[0]), {}
        result = self._run(batch)
        loss, named = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(named, dict):
            raise TypeError(f"forward returned (loss, {type(named).__name__}); return loss, or (loss, dict)")
        return self._precision.outputs(loss), named

    def mean_loss(self, batch: Any) -> Judged:
        """Evaluates a batch by the `function` that trains, which returns the loss, or (loss, dict of named tensors)."""
        loss, named = self.loss(batch)
        return Judged(loss, None, (), dict(named))

    def judged(self, batch: Any) -> Judged:
        """Evaluates a batch by the loss function, or by a `function` that returns (loss, output, *labels)."""
        has_labels = isinstance(batch, (tuple, list)) and len(batch) > 1
        if self._function is None and not (has_labels and (len(batch) == 2 or self._loss_fn is None)):
            raise TypeError(
                f"the batch is {_shown(batch)}; an evaluation takes (x, y) batches, or a function that gives "
                "(loss, output, labels): Model(..., eval_network=...), StepLoop.evaluate(..., forward=...)"
            )
        result = self._run(batch)
        if not isinstance(result, (tuple, list)) or not result:
            raise TypeError(f"the evaluation gave a {type(result).__name__}; return (loss, output, labels)")
        loss, output, *labels = (*result, None) if len(result) == 1 else result
        return Judged(loss, self._precision.outputs(output), tuple(labels), {})

    def _run(self, batch: Any) -> Any:
        """Runs the forward pass: returns the result of `function`, or (loss, output, *labels) without one."""
        precision = self._precision
        with precision.context():
            if self._function is not None:
                return self._function(self._model, batch)
            inputs, *labels = batch
            output = precision.outputs(self._model(inputs))
            if self._loss_fn is None:
                return None, output, *labels
            with precision.loss_context():
                return self._loss_fn(output, *labels), output, *labels


def _shown(batch: Any) -> str:
    return f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else "")
