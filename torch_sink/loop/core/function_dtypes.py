"""What module hooks cannot see of a precision: functions called inside a forward, and checkpoints' recomputation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

LOW = (torch.float16, torch.bfloat16)
Rule = Callable[["FunctionDtypes", Any, tuple[Any, ...], dict[str, Any]], Any]
Rules = dict[Any, Rule]


class FunctionDtypes(TorchFunctionMode):
    """Inside, the functions of a table get their floating point tensors in the dtype that the table says.

    Args:
        table: key of `TABLES`.
        dtype: torch.bfloat16 or torch.float16; what "low precision" means.
        masters: low precision copy of a parameter -> the parameter, which is what functions in float32 get.
    """

    def __init__(self, table: str, dtype: torch.dtype, masters: dict[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        # The key and not the table: torch 2.15 cannot guard compiled code by such a dict of a mode.
        self.table, self.dtype, self.masters = table, dtype, masters if masters is not None else {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = TABLES[self.table].get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self, func, args, kwargs or {})

    def widened(self, value: Any) -> Any:
        """A low precision tensor as float32; a list or tuple of them too, and anything else as it is."""
        if isinstance(value, Tensor):
            if value.dtype not in LOW:
                return value
            return self.masters[value] if value in self.masters else value.float()
        return type(value)(map(self.widened, value)) if type(value) in (list, tuple) else value


def in_float32(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute in float32 and hand float32 on."""
    return func(*map(mode.widened, args), **{name: mode.widened(value) for name, value in kwargs.items()})


def in_float32_and_back(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute in float32 and hand the dtype of the input on."""
    source = args[0] if args else kwargs.get("input")
    result = in_float32(mode, func, args, kwargs)
    return result.to(source.dtype) if isinstance(source, Tensor) and source.dtype in LOW else result


def in_one_dtype(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where float32 meets low precision, compute in low precision."""
    if not _mixed(args, kwargs):
        return func(*args, **kwargs)
    return func(*_cast(args, mode.dtype), **{name: _cast(value, mode.dtype) for name, value in kwargs.items()})


def in_widest_dtype(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where float32 meets low precision, compute in float32."""
    return in_float32(mode, func, args, kwargs) if _mixed(args, kwargs) else func(*args, **kwargs)


def in_dtype_of_first(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write into a tensor in its own dtype."""
    dtype = args[0].dtype
    if dtype not in LOW and dtype != torch.float32:
        return func(*args, **kwargs)
    return func(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})


def inside_the_mode(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the body of a function that calls others of the table: a mode does not see what it handles itself."""
    with mode:
        return _BODIES[func](*args, **kwargs)


def inside_a_checkpoint(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The compiler asks the mode about a checkpoint, and traces what is inside it without the mode."""

    def run(*inputs: Any, **named: Any) -> Any:
        with mode:
            return args[0](*inputs, **named)

    return func(run, *args[1:], **kwargs)


def _unflatten(mode: FunctionDtypes, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the method does: releases of torch that have named tensors cannot compile its `super()` under a mode."""
    return torch.unflatten(*args, **kwargs)


def _mixed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtypes = _dtypes(args) | _dtypes(tuple(kwargs.values()))
    return torch.float32 in dtypes and not dtypes.isdisjoint(LOW)


def _dtypes(values: Any) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    for value in values:
        if isinstance(value, Tensor):
            found.add(value.dtype)
        elif type(value) in (list, tuple):
            found |= _dtypes(value)
    return found


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in LOW or value.dtype == torch.float32 else value
    return type(value)(_cast(member, dtype) for member in value) if type(value) in (list, tuple) else value


def _without_handlers(func: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional that does not ask for a handler of its own, while those that it calls do."""
    answers = {name: (lambda *args: False) for name in func.__globals__ if name.startswith("has_torch_function")}
    body = FunctionType(func.__code__, func.__globals__ | answers, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _named(names: str, *owners: Any) -> list[Any]:
    """The functions of these names; releases of torch differ in what they have."""
    return [getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)]


_BODIES = {
    func: _without_handlers(func) for func in _named("multi_head_attention_forward linear_cross_entropy", functional)
}

_SOFTMAX = _named("softmax log_softmax logsumexp", torch, Tensor, functional, torch.special) + _named(
    "softmin gumbel_softmax", functional
)
_LOSSES = _named(
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss "
    "gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss "
    "multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss "
    "triplet_margin_loss triplet_margin_with_distance_loss",
    functional,
    torch,
)
_NORMALIZATION = _named("batch_norm group_norm instance_norm layer_norm rms_norm", functional, torch) + _named(
    "local_response_norm normalize", functional
)
_PRODUCTS = (
    _named(
        "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
        "conv_transpose3d dot einsum inner matmul mm mv tensordot vdot",
        torch,
        Tensor,
    )
    + _named("__matmul__ __rmatmul__", Tensor)
    + _named("bilinear linear prelu scaled_dot_product_attention", functional)
    + _named("multi_dot vecdot", torch.linalg)
)
# What has no kernels for low precision.
_DECOMPOSITIONS = [
    function
    for module in (torch.linalg, torch.fft)
    for name, function in vars(module).items()
    if isinstance(function, BuiltinFunctionType) and name not in ("cross", "diagonal", "matmul", "multi_dot", "vecdot")
] + _named(
    "cdist cholesky det geqrf inverse istft logdet matrix_exp matrix_power nanquantile pdist pinverse qr quantile "
    "slogdet stft svd trace",
    torch,
    Tensor,
)
_WRITES = _named(
    "__setitem__ index_add index_add_ index_copy index_copy_ index_put index_put_ masked_scatter masked_scatter_ "
    "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_",
    torch,
    Tensor,
)

NORMALIZATION_RULES: Rules = dict.fromkeys(_NORMALIZATION, in_float32_and_back)
SOFTMAX_AND_LOSS_RULES: Rules = dict.fromkeys(_SOFTMAX + _LOSSES, in_float32)
_CALLING_RULES: Rules = (
    dict.fromkeys(_BODIES, inside_the_mode)
    | dict.fromkeys(
        (torch_checkpoint.checkpoint, torch.ops.higher_order.tag_activation_checkpoint), inside_a_checkpoint
    )
    | ({Tensor.unflatten: _unflatten} if hasattr(Tensor, "refine_names") else {})
)
# Autocast on the CPU leaves these to the dtype of their input; on CUDA it has lists of its own.
CPU_AUTOCAST_RULES: Rules = _CALLING_RULES | NORMALIZATION_RULES | SOFTMAX_AND_LOSS_RULES
# What a model that computes in low precision must not fail at, because a buffer or a softmax is float32.
MIXTURE_RULES: Rules = (
    dict.fromkeys(_PRODUCTS, in_one_dtype)
    | dict.fromkeys(_DECOMPOSITIONS, in_float32)
    | dict.fromkeys(_WRITES, in_dtype_of_first)
    | {functional.grid_sample: in_float32_and_back}
    | _CALLING_RULES
)
TABLES: dict[str, Rules] = {
    "autocast on the CPU": CPU_AUTOCAST_RULES,
    # Where only some modules compute in low precision; a module may use the parameters of another one.
    "white list": dict.fromkeys(_PRODUCTS, in_widest_dtype) | _CALLING_RULES,
    "low": MIXTURE_RULES,
    "low but normalization": MIXTURE_RULES | NORMALIZATION_RULES,
    "low but softmax and losses": MIXTURE_RULES | SOFTMAX_AND_LOSS_RULES,
    "low but both": MIXTURE_RULES | CPU_AUTOCAST_RULES,
}

Reenter = Callable[[], AbstractContextManager[Any]]


class _Recomputation(threading.local):
    """What an activation checkpoint that begins in this thread is to be recomputed in."""

    reenter: Reenter | None = None


_recomputation, _lock = _Recomputation(), threading.Lock()
_stock: list[Any] = []
_regions = 0


@contextmanager
def recomputing_in(reenter: Reenter) -> Iterator[None]:
    """Checkpoints that begin inside recompute their activations inside `reenter()`, whenever that is.

    torch.utils.checkpoint recomputes in the backward pass, where it restores autocast and nothing else. So while
    anything is inside here, two names of its module stand for functions that pass the context on; both forms of
    checkpoints, and all functions that are built upon them, look these names up when they are called. Compiled code
    needs none of this: there the compiler recomputes what it has traced.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before, _recomputation.reenter = _recomputation.reenter, reenter
    _divert(+1)
    try:
        yield
    finally:
        _divert(-1)
        _recomputation.reenter = before


def _divert(regions: int) -> None:
    """Count a region in or out; the first one diverts torch's names, and the last one puts them back."""
    global _regions
    with _lock:
        _regions += regions
        if _regions == 0:
            torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction = _stock  # type: ignore[misc]
        elif not isinstance(torch_checkpoint.CheckpointFunction, _ReentrantCheckpoint):
            _stock[:] = torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction
            torch_checkpoint._CheckpointFrame = _frame  # type: ignore[assignment, misc]
            torch_checkpoint.CheckpointFunction = _ReentrantCheckpoint()  # type: ignore[assignment, misc]


def _frame(recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _stock[0](_inside(_recomputation.reenter, recompute), *args, **kwargs)


class _ReentrantCheckpoint:
    """Stands for `CheckpointFunction`, of which only `apply` is used."""

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        return _stock[1].apply(_inside(_recomputation.reenter, function), *args)


def _inside(reenter: Reenter | None, function: Callable[..., Any]) -> Callable[..., Any]:
    if reenter is None:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        with reenter():
            return function(*args, **kwargs)

    return run
