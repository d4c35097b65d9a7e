"""AMP levels: which part of the forward pass runs in low precision. Parameters stay the float32 tensors they are."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from torch_sink.loop.core.batches import map_tensors
from torch_sink.loop.core.function_dtypes import LOW, FunctionDtypes, recomputing_in

LEVELS = ("O0", "O1", "O2", "O3", "auto")
NORMALIZATION: tuple[type[nn.Module], ...] = (
    _NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
LOSSES: tuple[type[nn.Module], ...] = (_Loss, nn.AdaptiveLogSoftmaxWithLoss)
# Whether normalization, and whether softmax and losses run in float32 -> the table of FunctionDtypes.
_TABLES = {
    (False, False): "low",
    (True, False): "low but normalization",
    (False, True): "low but softmax and losses",
    (True, True): "low but both",
}


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


class CastAtUse(Precision):
    """Runs a model in `dtype` while its parameters stay float32: they are the master weights.

    In `context()` each module finds low precision copies of its own parameters, made by a cast that the backward
    pass goes through, so gradients arrive in float32. Every module with parameters casts its inputs; the model's
    outputs are float32. At O2, normalization runs in float32 and hands low precision on, softmax and losses run in
    float32 and hand that on: as modules and as functions. At O3 normalization takes low precision inputs and
    parameters; the running statistics of BatchNorm stay float32, as in torch's mixed kernels.

    Outside `context()` the model is what it was: the hooks do nothing. Neither they nor this object keep it alive.

    Args:
        keep_float32: module types that run in float32; default the normalization layers at O2, none at O3.
        only: the only module types to run in low precision, with float32 outputs; default all but `keep_float32`.
    """

    casts = True

    def __init__(
        self,
        level: str,
        dtype: torch.dtype,
        model: nn.Module,
        *,
        keep_float32: tuple[type[nn.Module], ...] | None = None,
        only: tuple[type[nn.Module], ...] | None = None,
    ) -> None:
        super().__init__(level, dtype)
        if any(hasattr(parameter, "to_local") for parameter in model.parameters()):
            raise ValueError(
                f"amp={level!r} casts parameters itself and cannot do so for a model sharded by fully_shard; "
                "use amp='O1', or amp='O0' with fully_shard(..., mp_policy=MixedPrecisionPolicy(...))"
            )
        self._keep = keep_float32 if keep_float32 is not None else (NORMALIZATION if level == "O2" else ())
        self._losses = LOSSES if level == "O2" else ()
        self._only = only
        self._table = "white list" if only is not None else _TABLES[self._keep == NORMALIZATION, level == "O2"]
        self._hooks = _Hooks(dtype)
        self._masters: dict[Tensor, Tensor] = {}
        self._handles: list[Any] = []
        self._casts: list[tuple[WeakModule, str, bool]] = []
        self._recurrent: list[WeakModule] = []
        for module in model.modules():
            self._adopt(module)
        self._handles.append(model.register_forward_hook(self._hooks.outputs_to_float32))

    def context(self) -> Any:
        return self._with_copies({})

    def inputs(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self._input_dtype(model)
        return (args, kwargs) if dtype is None else (_cast(args, dtype), _cast(kwargs, dtype))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def _with_copies(self, copies: dict[Tensor, Tensor]) -> Iterator[None]:
        """`context()` with the low precision copies at hand, by parameter; what is missing is made and added."""
        if self._hooks.active:
            # A recomputation that `torch.autograd.grad` began: a mode is not in force in what it handles.
            with self._function_dtypes():
                yield
            return
        self._hooks.active = True
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            self._swap_parameters(copies, swapped)
            with recomputing_in(lambda: self._with_copies(copies)), self._function_dtypes():
                yield
        finally:
            self._masters = {}
            for module, name, parameter in swapped:
                module._parameters[name] = parameter
            self._refresh_recurrent()
            self._hooks.active = False

    def _swap_parameters(
        self, copies: dict[Tensor, Tensor], swapped: list[tuple[nn.Module, str, nn.Parameter]]
    ) -> None:
        """Put low precision copies in the place of parameters, and note whose they were."""
        for reference, name, rounded in self._casts:
            module = reference()
            parameter = module._parameters.get(name) if module is not None else None
            if module is None or parameter is None:  # replaced since
                continue
            copy = copies.get(parameter)
            if copy is None:
                copy = copies[parameter] = parameter.to(self.dtype)
            swapped.append((module, name, parameter))
            module._parameters[name] = copy.float() if rounded else copy  # type: ignore[assignment]
        self._refresh_recurrent()
        self._masters = {copy: parameter for parameter, copy in copies.items()}

    def _function_dtypes(self) -> FunctionDtypes:
        return FunctionDtypes(self._table, self.dtype, self._masters)

    def _adopt(self, module: nn.Module) -> None:
        dtype = self._input_dtype(module)
        if dtype is None:
            return
        if dtype == torch.float32:
            self._handles.append(module.register_forward_pre_hook(self._hooks.inputs_to_float32, with_kwargs=True))
            if isinstance(module, self._keep):
                self._handles.append(module.register_forward_hook(self._hooks.outputs_to_low))
            return
        self._handles.append(module.register_forward_pre_hook(self._hooks.inputs_to_low, with_kwargs=True))
        if self._only is not None:
            self._handles.append(module.register_forward_hook(self._hooks.outputs_to_float32))
        reference = WeakModule(module)
        if isinstance(module, nn.RNNBase):
            self._recurrent.append(reference)
        # torch's mixed BatchNorm takes low precision inputs, but wants parameters and statistics of one dtype.
        rounded = isinstance(module, _NormBase)
        self._casts += [(reference, name, rounded) for name in _own_floating(module)]

    def _input_dtype(self, module: nn.Module) -> torch.dtype | None:
        """What the inputs of a module are cast to, or None."""
        if self._only is not None:
            return self.dtype if isinstance(module, self._only) else None
        if isinstance(module, self._keep + self._losses):
            return torch.float32
        return self.dtype if isinstance(module, NORMALIZATION) or _own_floating(module) else None

    def _refresh_recurrent(self) -> None:
        for reference in self._recurrent:
            module: Any = reference()
            if module is not None:
                module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


class _Hooks:
    """The hooks of a model's modules; they do something while `active` is true, and know none of the modules."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.active = dtype, False

    def inputs_to_low(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (_cast(args, self.dtype), _cast(kwargs, self.dtype)) if self.active else None

    def inputs_to_float32(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (_cast(args, torch.float32), _cast(kwargs, torch.float32)) if self.active else None

    def outputs_to_low(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self.dtype) if self.active else None

    def outputs_to_float32(self, module: nn.Module, args: Any, output: Any) -> Any:
        return to_float32(output) if self.active else None


def _own_floating(module: nn.Module) -> list[str]:
    return [name for name, p in module._parameters.items() if p is not None and p.is_floating_point()]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


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
        raise ValueError(
            f"amp={level!r}: the levels are {', '.join(LEVELS)}; for autocast pass amp='O1', amp_dtype=torch.bfloat16"
        )
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
    return CastAtUse(level, dtype, model)


def precision_of_copy(precision: Precision, copy: nn.Module, device: torch.device) -> Precision:
    """The same level for a copy of the model: O2 and O3 belong to one model."""
    if precision.level in ("O0", "O1"):
        return precision
    return resolve_precision(precision.level, precision.dtype, copy, device)
