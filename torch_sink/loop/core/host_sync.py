"""Finds the lines of code at which the host waits for the device."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_sink import thread_waits, tracing
from torch_sink.common import arguments
from torch_sink.errors import HostSyncError
from torch_sink.thread_waits import device_waits, here, host_sync_allowed

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the loop
_OPTIMIZER_FOLDER = os.path.join(_TORCH_FOLDER, "optim") + os.sep

# Files with frames between a user's line and the operator that it calls.
_WATCHING_FILES = (
    *(arguments.__file__, thread_waits.__file__, tracing.__file__, warnings.__file__),
    warnings.catch_warnings.__init__.__code__.co_filename,  # since Python 3.14 a module of its own
)

_BY_REASON = {
    "reads one element (item, float, bool, an index that is a tensor)": "_local_scalar_dense is_nonzero",
    "has a shape that depends on the data": "nonzero nonzero_numpy masked_select _unique _unique2 unique_dim "
    "unique_consecutive bincount",
    "compares on the host": "equal",
    "checks for errors on the host (there is a form that does not, such as inv_ex)": "_linalg_check_errors",
    # These wait inside their kernels, which dispatch modes do not see.
    "checks for errors on the host": "_linalg_eigh _linalg_svd linalg_eig linalg_lstsq",
    "checks the probabilities on the host": "multinomial",
    "counts the distinct rows on the host (embedding without max_norm does not)": "embedding_renorm_",
}
# Operators for whose result, or its shape, the host has to wait, and why.
_WAITING_OPERATORS = {f"aten::{name}": reason for reason, names in _BY_REASON.items() for name in names.split()}
_WAITING_OPERATORS["torchvision::nms"] = "has a shape that depends on the data"
# Functions that copy from a device but do not reach the dispatcher for tensors on the CPU, and their names.
_WAITING_FUNCTIONS: dict[Any, str] = {
    **{getattr(Tensor, name): name for name in ("tolist", "numpy", "cpu", "allclose", "equal")},
    **{torch.allclose: "allclose", torch.equal: "equal", Tensor.__array__: "numpy.asarray"},
    **{Tensor.__repr__: "print or repr", Tensor.__format__: "format"},
}
_MAKING_FUNCTIONS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


def caller() -> tuple[str, bool]:
    """File and line of the innermost frame outside torch and the loop, and whether it called an optimizer."""
    inside_optimizer = False
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if _is_foreign(name):
            return f"{name}:{line}", inside_optimizer
        inside_optimizer = inside_optimizer or name.startswith(_OPTIMIZER_FOLDER)
    return "unknown place", inside_optimizer


def innermost_file() -> str:
    """The file of the innermost frame that is no watch's: the one that called an operator."""
    names = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next(name for name in names if name not in _WATCHING_FILES and not name.startswith(_OWN_FOLDER))


def user_place(error: BaseException) -> str:
    """File and line of the innermost frame of an error outside torch and the loop."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    foreign = [f"{name}:{line}" for name, line in places if _is_foreign(name)]
    return foreign[-1] if foreign else "unknown place"


def _is_foreign(filename: str) -> bool:
    return not filename.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<")) and filename not in _WATCHING_FILES


def _reason(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    name = operator._schema.name
    if name in _WAITING_OPERATORS:
        return _WAITING_OPERATORS[name]
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[0], Tensor):
        return "has a shape that depends on the data (pass output_size)"
    if name == "aten::normal" and len(args) > 1 and isinstance(args[1], Tensor):
        return "checks the deviations on the host (mean + std * torch.randn_like(mean) does not)"
    if name == "aten::histc":
        low, high = (*args[2:], 0, 0)[:2]
        return "looks for the bounds on the host (pass min and max)" if low == high else None
    if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
        masked = any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        filled = name != "aten::index" and args[2].numel() == 1  # a fill runs as masked_fill, which does not wait
        return "indexes with a mask, so its shape depends on the data" if masked and not filled else None
    if name in ("aten::_to_copy", "aten::copy_"):
        return _copy_reason(name, args, kwargs)
    return None


def _copy_reason(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if name == "aten::copy_":
        target, source = args[0], args[1]
        target_device, waits = target.device, not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        target, source = None, args[0]
        target_device, waits = kwargs.get("device") or source.device, not kwargs.get("non_blocking", False)
    if target_device.type == source.device.type:
        return None
    host_side = source if source.device.type == "cpu" else target
    pageable = host_side is not None and not host_side.is_pinned()
    if waits or (pageable and host_side.numel() > 1):
        return f"copies from {source.device} to {target_device} and waits (pin the host side, use non_blocking=True)"
    return None


def _function_reason(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if func is Tensor.to:
        device = args[1] if len(args) > 1 else kwargs.get("device")
        # Only a string counts: in a run on the CPU, a torch.device may be the device of the model.
        goes_to_host = isinstance(device, str) and device.startswith("cpu") and not kwargs.get("non_blocking")
        return "to('cpu')" if goes_to_host else None
    if func in _MAKING_FUNCTIONS:
        data = args[-1] if args else kwargs.get("data")
        holds_tensors = isinstance(data, (list, tuple)) and any(isinstance(d, Tensor) for d in tree_leaves(data))
        return f"{func.__name__} of tensors reads each of them and" if holds_tensors else None
    return _WAITING_FUNCTIONS.get(func)


class _OperatorWatch(TorchDispatchMode):
    """A dispatch mode that reports each operator for which the host waits."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reason = None if here.allowances else _reason(func, args, kwargs)
        if reason is not None:
            place, inside_optimizer = caller()
            # torch.optim keeps step counters on the CPU on purpose: reading them does not wait.
            if not (inside_optimizer and args[0].device.type == "cpu"):
                where = " in the optimizer" if inside_optimizer else ""
                self._report(place, f"{func._schema.name}{where} {reason}")
        return func(*args, **kwargs)


class _FunctionWatch(TorchFunctionMode):
    """A function mode that reports functions that copy to the host but bypass the dispatcher on the CPU."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        super().__init__()
        self._report = report

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        func, kwargs = getattr(func, "untraced", func), kwargs or {}  # a timeline wraps some functions
        name = None if here.allowances else _function_reason(func, args, kwargs)
        if name is not None:
            self._report(caller()[0], f"{name} brings a tensor to the host")
        else:
            is_read = func is functional.one_hot and args[0].device.type == "cpu"  # to check it, on the CPU only
            if not is_read or (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) < 0:
                return func(*args, **kwargs)
        with host_sync_allowed():
            return func(*args, **kwargs)


@contextmanager
def watch_host_syncs(report: Callable[[str, str], None]) -> Iterator[None]:
    """A context that calls `report(place, what)` for each wait of the host in eager code of this thread."""
    # Without this stance, the compiler skips functions that run under these modes, and torch 2.11 does so forever.
    with torch.compiler.set_stance("force_eager"), _OperatorWatch(report), _FunctionWatch(report):
        here.watches += 1
        try:
            yield
        finally:
            here.watches -= 1


@contextmanager
def no_host_sync() -> Iterator[None]:
    """A context that raises if the host waits for the device inside; it works on the CPU too, and so proves GPU code.

    It reports reads of single elements (`item`, `float`, `if tensor`, a tensor as index), results whose shape depends
    on the data (`nonzero`, mask indexing, `unique`), copies between host and device that wait, and `tolist`, `numpy`,
    `cpu`, `to("cpu")`, `print`. Exempt are counters that torch.optim keeps on the CPU, and what torch_sink does between
    sinks: reading the log, all events of callbacks, making batches, saving, resuming, compiling ahead. A model, a loss,
    metrics and the function of a `data_sink` are not exempt, nor is a model that a callback evaluates.

    Only eager code of the calling thread is watched, its backward passes included, which on CUDA otherwise run in a
    thread of autograd; compiled functions run their eager code inside. Not reported are
    other threads, `torch.cuda.synchronize`, `Event.synchronize`, pickling, reads of a tensor's memory by its address,
    waits inside kernels of a library, and the replay of a captured graph. On the CPU, `to` with a device that is not
    spelled "cpu" and tensors made from numbers are not reported either. On CUDA, torch's sync debug mode is used too,
    which sees waits below the dispatcher; its warnings about other threads are ignored. An operator takes about 10
    microseconds longer: use this in tests, not in training.

    Raises:
        HostSyncError: at the line that waits; the message names file and line.
    """

    def raise_sync(place: str, what: str = "torch's sync debug mode sees a synchronizing CUDA operation") -> None:
        raise HostSyncError(
            f"the host waits for the device at {place}: {what}; keep the value on the device, or move this to a "
            "callback"
        )

    waits = device_waits(lambda: raise_sync(caller()[0])) if torch.cuda.is_initialized() else nullcontext()
    with waits, watch_host_syncs(raise_sync):
        yield
