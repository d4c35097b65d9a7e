"""AMP levels: which part of the forward pass runs in low precision. Parameters stay the float32 tensors they are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

LEVELS = ("O0", "O1", "O2", "O3", "auto")


class Precision:
    """O0: the forward pass in the dtype of the model.

    Attributes:
        level: the level after "auto" was resolved.
        dtype: low precision dtype of the level; unused by O0.
        casts: whether anything is cast; if not, `context`, `outputs` and `loss` need not be called.
    """

    casts = False

    def __init__(self, level: str, dtype: torch.dtype) -> None:
        self.level, self.dtype = level, dtype

    def context(self) -> AbstractContextManager[Any]:
        """Context of the forward pass and the loss."""
        return nullcontext()

    def outputs(self, outputs: Any) -> Any:
        """What the loss function gets for the model's outputs."""
        return outputs

    def loss(self, loss: Tensor) -> Tensor:
        """The loss in the dtype that the backward pass starts from."""
        return loss

    def close(self) -> None:
        """Leave the model as it was found."""


class Autocast(Precision):
    """O1: torch.autocast chooses the dtype by operator; outputs and loss are float32."""

    casts = True

    def __init__(self, dtype: torch.dtype, device_type: str) -> None:
        super().__init__("O1", dtype)
        self._device_type = device_type

    def context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device_type, dtype=self.dtype)

    def outputs(self, outputs: Any) -> Any:
        return to_float32(outputs)

    def loss(self, loss: Tensor) -> Tensor:
        return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


class PrecisionForward:
    """Stands in for a model's `forward`, and runs it under a precision."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._forward, self._precision = model.forward, precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.context():
            return self._precision.outputs(self._forward(*args, **kwargs))


def to_float32(value: Any) -> Any:
    """Cast the float16 and bfloat16 tensors in nested lists, tuples and dicts to float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    return map_container(to_float32, value)


def map_container(function: Any, value: Any) -> Any:
    """Apply `function` to the members of a list, tuple, named tuple or dict; return anything else as it is."""
    if isinstance(value, dict):
        return type(value)((key, function(member)) for key, member in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(function(member) for member in value))
    if isinstance(value, (list, tuple)):
        return type(value)(function(member) for member in value)
    return value


def resolve_precision(level: str, dtype: torch.dtype, model: nn.Module, device: torch.device) -> Precision:
    """Turn the `amp` and `amp_dtype` arguments into a Precision.

    Raises:
        ValueError: unknown level, or a dtype that is neither float16 nor bfloat16.
    """
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
    from torch_sink.loop.cast_at_use import CastAtUse

    return CastAtUse(level, dtype, model)


def precision_of_copy(precision: Precision, copy: nn.Module, device: torch.device) -> Precision:
    """The same level for a copy of the model: O2 and O3 belong to one model."""
    if precision.level in ("O0", "O1"):
        return precision
    return resolve_precision(precision.level, precision.dtype, copy, device)
