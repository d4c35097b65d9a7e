"""What every tensor whose values do not exist yet does: answers questions, records calls, or becomes real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

_plain_call = torch._C.DisableTorchFunctionSubclass

# What torch may ask of a lazy tensor without getting its values.
_METHODS = "size dim ndimension numel nelement element_size is_floating_point is_complex __len__ __dir__"
_FUNCTIONS = "is_floating_point is_complex is_tensor numel"
_PROPERTIES = (
    "shape dtype ndim device layout is_cuda is_cpu is_meta is_sparse is_quantized is_leaf requires_grad grad_fn "
    "itemsize nbytes"
)
_METADATA = {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
}


class Lazy:
    """A tensor whose values do not exist yet, to be inherited from beside a class of tensors.

    Questions for shape and type are answered at once, and calls of which `calls` knows are recorded. Anything else
    first makes the real tensor, of the exact type that stock code would have, and repeats the call on it. From then on
    the lazy tensor stands for the real one, also for writes in place.
    """

    # torch function -> what to do instead; `NotImplemented` means: on the real tensor.
    calls: ClassVar[dict[Callable[..., Any], Callable[..., Any]]]

    @property
    def is_recording(self) -> bool:
        """False once somebody has asked for the values."""
        raise NotImplementedError

    materialize: Callable[[], torch.Tensor]  # the real tensor, made once

    def note_use(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """A call needs the values."""

    def returned_as(self, result: torch.Tensor, function: Callable[..., Any]) -> Any:
        """What a call gives back that returned the real tensor itself."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and args[0].is_recording:
            with _plain_call():
                return func(*args, **kwargs)
        if func in cls.calls and "input" not in kwargs:
            result = cls.calls[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        return run_on_real(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_on_real(func, args, kwargs or {})


def run_on_real(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with the real tensors of the lazy ones among its arguments."""
    lazy: dict[int, Lazy] = {}

    def materialized(value: Any) -> Any:
        if not isinstance(value, Lazy):
            return value
        value.note_use(func, (*args[1:], *kwargs.values()))
        tensor = value.materialize()
        lazy[id(tensor)] = value
        return tensor

    args, kwargs = tree_map(materialized, (args, kwargs))
    result = func(*args, **kwargs)
    # A call in place returns its tensor: give back what the caller holds.
    return lazy[id(result)].returned_as(result, func) if id(result) in lazy else result
