"""Stand-ins for functions of torch that read a tensor without telling it: they get tensors with values.

A lazy tensor is told of functions that call `__torch_function__`, and of every operation that reaches the dispatcher.
It is not told of compilers and tracers, which inspect their arguments, nor of a few functions that read memory at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._dynamo.variables import builder
from torch.fx.experimental import proxy_tensor

from torch_sink.image.handles.lazy import Lazy, make_real
from torch_sink.image.stand_ins import around

Stock = Callable[..., Any]


def on_real_tensors(stock: Stock) -> Stock:
    """The function, which makes the values of the lazy tensors among its arguments first."""

    @functools.wraps(stock)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        make_real(stock, (*args, *kwargs.values()))
        return stock(*args, **kwargs)

    return stand_in


def as_subclass(stock: Stock) -> Stock:
    """For `Tensor.as_subclass`, which each transform of v2 calls several times."""

    def stand_in(self: Any, cls: Any) -> Any:
        return stock(self, cls) if not isinstance(self, Lazy) else on_real_tensors(stock)(self, cls)

    return functools.wraps(stock)(stand_in)


def apply(stock: Any) -> Any:
    """For `autograd.Function.apply`, whose results share the history of gradients of what C++ code holds."""

    is_its_own = isinstance(stock, classmethod)  # in some releases it is inherited

    @functools.wraps(torch.autograd.Function.apply)
    def stand_in(cls: Any, *args: Any, **kwargs: Any) -> Any:
        make_real(cls, (args, kwargs))
        call = stock.__get__(None, cls) if is_its_own else super(torch.autograd.Function, cls).apply
        return call(*args, **kwargs)

    return classmethod(stand_in)


def compiler(stock: Stock, *args: Any, **kwargs: Any) -> Any:
    """For functions such as `torch.compile`, which return a function that inspects its arguments: it gets real tensors.

    The guards of the compiled code then hold for the next batch as well.
    """
    compiled = stock(*args, **kwargs)
    if not isinstance(compiled, FunctionType):
        return compiled  # a module, which calls such a function
    made: Any = on_real_tensors(compiled)
    if hasattr(made, "_torchdynamo_wrapper_id"):
        made._torchdynamo_wrapper_id = id(made)
    return made


def trace(stock: Stock, tracer: Any, value: Any) -> Any:
    """For the builder of Dynamo's variables, which meets lazy tensors in closures, globals and attributes."""
    if isinstance(value, Lazy):
        make_real(torch.compile, (value,))
    return stock(tracer, value)


def data(stock: Any) -> property:
    """For `Tensor.data`, whose setter shares the memory of any tensor."""

    def share(tensor: torch.Tensor, other: Any) -> None:
        make_real(torch.Tensor.set_, (other,))
        stock.__set__(tensor, other)

    return property(stock.__get__, share, doc=stock.__doc__)


def new_parameter(stock: Stock, cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """For `Parameter.__new__`, which wants tensors whose `detach` returns their own type."""
    return stock(cls, data.materialize() if isinstance(data, Lazy) else data, requires_grad)


# torch 2.8 has no DLPack 1.0. Where its code calls a function that it lacks, the row says so.
_HAS_DLPACK_1 = "_to_dlpack_versioned" in torch.Tensor.__dlpack__.__code__.co_names
_TAKE_REAL_TENSORS = {
    torch._C: ("_to_dlpack", "_to_dlpack_versioned") if _HAS_DLPACK_1 else ("_to_dlpack",),
    torch.Tensor: ("_view_func", "_view_func_unsafe"),
    torch.utils: ("swap_tensors",),
    torch.utils.dlpack: ("to_dlpack",),
    torch: ("to_dlpack",),
    torch.jit: ("trace", "trace_module"),
    torch.export: ("export",),
    torch.onnx: ("export",),
}
# Rows of the table of stand-ins, as in `reroute`: owner, attribute, and stock object -> stand-in.
PLACES: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    *((module, name, on_real_tensors) for module, names in _TAKE_REAL_TENSORS.items() for name in names),
    (torch.Tensor, "as_subclass", as_subclass),
    (torch.Tensor, "data", data),
    (torch.nn.Parameter, "__new__", around(new_parameter)),
    (torch.autograd.Function, "apply", apply),
    (eval_frame._TorchDynamoContext, "__call__", around(compiler)),
    (builder.VariableBuilder, "__call__", around(trace)),
    (proxy_tensor, "make_fx", around(compiler)),
)
