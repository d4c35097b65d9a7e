"""AMP levels: which part of the forward pass runs in low precision. Parameters stay the float32 tensors they are."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from torch_sink.loop.core.batches import map_tensors
from torch_sink.loop.core.function_dtypes import LOW, FunctionDtypes, recomputing_in

LEVELS = ("O0", "O1", "O2", "O3", "auto")


class Precision:
    """O0: the forward pass in the dtype of the model. Where `casts` is false, nothing here need be called."""

    casts = False

    def __init__(self, level: str, dtype: torch.dtype) -> None:
        self.level, self.dtype = level, dtype

    def context(self) -> AbstractContextManager[Any]:
        """Context of the forward pass and the loss."""
        return nullcontext()

    def inputs(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the forward of `model` itself gets, where it was called from outside `context()`."""
        return args, kwargs

    def outputs(self, outputs: Any) -> Any:
        """What the loss function gets for the model's outputs, and the backward pass for the loss."""
        return to_float32(outputs) if self.casts else outputs

    def close(self) -> None:
        """Leave the model as it was found."""


class Autocast(Precision):
    """O1: torch.autocast chooses the dtype by operator; outputs and loss are float32.

    On CUDA, autocast computes softmax, normalization and losses in float32. On the CPU it would not, so it is told to.
    """

    casts = True

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        super().__init__("O1", dtype)
        self._device_type = device_type

    def context(self) -> AbstractContextManager[Any]:
        if self._device_type != "cpu":
            return torch.autocast(self._device_type, dtype=self.dtype)
        return self._cpu_context()

    @contextmanager
    def _cpu_context(self) -> Iterator[None]:
        rules = FunctionDtypes("autocast on the CPU", self.dtype)
        with torch.autocast("cpu", dtype=self.dtype), recomputing_in(self._cpu_context), rules:
            yield


class WeakModule:
    """A reference that does not keep a module alive, and that is copied and pickled together with it."""

    def __init__(self, module: nn.Module) -> None:
        self._reference = weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        return self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakModule:
        return WeakModule(copy.deepcopy(self._reference(), memo))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakModule, (self._reference(),)


class PrecisionForward:
    """Stands in for a model's `forward`, and runs it under a precision."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._model, self._precision = WeakModule(model), precision
        self._own = model.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        model: Any = self._model()
        return inspect.signature(self._own or type(model).forward.__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        if model is None:
            raise ReferenceError("the model that this forward belongs to is gone; keep the model, not its forward")
        with self._precision.context():
            args, kwargs = self._precision.inputs(model, args, kwargs)
            outputs = type(model).forward(model, *args, **kwargs) if self._own is None else self._own(*args, **kwargs)
            return self._precision.outputs(outputs)


def to_float32(value: Any) -> Any:
    """Cast the float16 and bfloat16 tensors in nested containers to float32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype in LOW else tensor, value)


def resolve_precision(level: str, dtype: torch.dtype, model: nn.Module, device: torch.device) -> Precision:
    """Turn the `amp` and `amp_dtype` arguments into a Precision."""
    if level not in LEVELS:
        raise ValueError(f"amp={level!r}: the levels are {', '.join(LEVELS)}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"amp_dtype={dtype!r}: pass torch.bfloat16 or torch.float16")
    if isinstance(model.__dict__.get("forward"), PrecisionForward) and level != "O0":
        raise ValueError(
            f"amp={level!r}, but the model went through auto_mixed_precision already; "
            "pass amp='O0', or the model as it was"
        )
    if level == "auto":
        level = "O0" if device.type == "cpu" else "O2"
    if level == "O0":
        return Precision("O0", dtype)
    if level == "O1":
        return Autocast(dtype, device.type)
    from torch_sink.loop.step.cast_at_use import CastAtUse

    return CastAtUse(level, dtype, model)


def precision_of_copy(precision: Precision, copy: nn.Module, device: torch.device) -> Precision:
    """The same level for a copy of the model: O2 and O3 belong to one model."""
    if precision.level in ("O0", "O1"):
        return precision
    return resolve_precision(precision.level, precision.dtype, copy, device)
