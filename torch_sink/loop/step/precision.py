"""AMP levels: which part of the forward pass runs in low precision. Parameters stay the float32 tensors they are."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.loss import _Loss

from torch_sink.common.integrations import without_wrappers
from torch_sink.loop.core.batches import batch_tensors, map_tensors

LEVELS = ("O0", "O1", "O2", "O3", "auto")
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
    """O0: the forward pass in the dtype of the model."""

    def __init__(self, level: str, dtype: torch.dtype, device_type: str = "cpu") -> None:
        self.level, self.dtype, self.device_type = level, dtype, device_type

    def context(self) -> AbstractContextManager[Any]:
        """Context of the forward pass."""
        return nullcontext()

    def loss_context(self) -> AbstractContextManager[Any]:
        """Context, inside the other one, of a loss function."""
        return nullcontext()

    def inputs(self, inputs: Any) -> Any:
        """What a forward gets that runs in `context()`."""
        return inputs

    def outputs(self, outputs: Any) -> Any:
        """What the loss function gets for the model's outputs, and the backward pass for the loss."""
        return outputs

    def close(self) -> None:
        """Leave the model as it was found."""


class Autocast(Precision):
    """O1: torch.autocast chooses the dtype by operator; outputs and loss are float32."""

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)

    def outputs(self, outputs: Any) -> Any:
        return to_float32(outputs)


class LayerCasts(Autocast):
    """O2 and O3: torch.autocast, and what goes from layer to layer is in low precision.

    Layers with parameters hand low precision on, and so does dropout, behind which the residual stream of a transformer
    begins. So do normalization layers, which compute in float32 at O2 (`float_norms`). The model's outputs and the loss
    function are float32. All of it is done by hooks that look whether autocast is in force: outside `context()` the
    model is what it was, and an activation checkpoint, which restores autocast, recomputes what it computed.
    """

    def __init__(
        self, level: str, dtype: torch.dtype, device_type: str, model: nn.Module, *, float_norms: bool | None = None
    ) -> None:
        super().__init__(level, dtype, device_type)
        to_low, to_float = _Cast(dtype, dtype), _Cast(torch.float32, dtype)
        float_norms = level == "O2" if float_norms is None else float_norms
        inner = without_wrappers(model)  # what the model computes last is not rounded, in whatever it was wrapped
        outermost = model, inner, without_wrappers(getattr(inner, "module", inner))
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False  # a loop may go without being closed
        for module in model.modules():
            if isinstance(module, _Loss):
                self._handles.append(module.register_forward_pre_hook(to_float.inputs, with_kwargs=True))
            elif isinstance(module, NORMALIZATION):
                # RMSNorm has no kernel for low precision inputs with float32 weights.
                norm_gets = to_float if float_norms or isinstance(module, nn.RMSNorm) else to_low
                self._handles.append(module.register_forward_pre_hook(norm_gets.inputs, with_kwargs=True))
                self._handles.append(module.register_forward_hook(to_low.outputs))
            elif isinstance(module, _DropoutNd) or (
                module not in outermost and any(True for _ in module.parameters(recurse=False))
            ):
                self._handles.append(module.register_forward_hook(to_low.outputs))
        self._handles.append(model.register_forward_hook(to_float.outputs))

    def loss_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, enabled=False)

    def close(self) -> None:
        _remove(self._handles)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class _Cast:
    """Hooks that cast float32 and low precision to `target` where autocast to `low` is in force."""

    def __init__(self, target: torch.dtype, low: torch.dtype) -> None:
        self.target, self.low = target, low

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
        return tensor.to(self.target) if torch.get_autocast_dtype(device) == self.low else tensor


class FullPrecision(Precision):
    """A part of a model in low precision that runs in float32 and hands low precision on."""

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, enabled=False)

    def inputs(self, inputs: Any) -> Any:
        return to_float32(inputs)

    def outputs(self, outputs: Any) -> Any:
        return _Cast(self.dtype, self.dtype).cast(outputs)


class PrecisionForward:
    """Stands in for a module's `forward`, and runs it under a precision."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        self._reference, self._precision = weakref.ref(module), precision  # it lies in the module
        self._own = module.__dict__.get("forward")

    def __reduce__(self) -> tuple[Any, ...]:
        return _forward_of, (self._module(), self._precision, self._own)

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
        # The model may have moved since; what has no parameters goes by what it gets.
        module = self._module()
        for tensor in [*islice(module.parameters(), 1)] or batch_tensors((args, kwargs))[:1]:
            self._precision.device_type = tensor.device.type
        with self._precision.context():
            args, kwargs = self._precision.inputs((args, kwargs))
            outputs = self._forward(module)(*args, **kwargs)
        return self._precision.outputs(outputs)


def _forward_of(module: nn.Module, precision: Precision, own: Any) -> PrecisionForward:
    made = PrecisionForward(module, precision)  # of a module that is being copied, whose attributes are not there yet
    made._own = own
    return made


def to_float32(value: Any) -> Any:
    """Cast the float16 and bfloat16 tensors in nested containers to float32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in LOW else tensor, value)


def resolve_level(level: str, dtype: torch.dtype, model: nn.Module, device: torch.device) -> str:
    """Check the `amp` and `amp_dtype` arguments; "auto" becomes a level."""
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
    """The precision of a model; O2 and O3 belong to it alone, and hang hooks on it until they are closed or gone."""
    if level in ("O0", "O1"):
        return (Precision if level == "O0" else Autocast)(level, dtype, device_type)
    return LayerCasts(level, dtype, device_type, model, float_norms=float_norms)
