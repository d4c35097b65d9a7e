"""O2 and O3: the model computes in low precision with float32 parameters, which are cast where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from torch_sink.loop.core.batches import map_tensors
from torch_sink.loop.core.function_dtypes import FunctionDtypes, recomputing_in
from torch_sink.loop.step.precision import Precision, WeakModule, to_float32

NORMALIZATION: tuple[type[nn.Module], ...] = (
    _NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
LOSSES: tuple[type[nn.Module], ...] = (_Loss, nn.AdaptiveLogSoftmaxWithLoss)


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
        self._table = self._functions_table()
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

    def _functions_table(self) -> str:
        if self._only is not None:
            return "white list"
        normalization = self._keep == NORMALIZATION
        if self._losses:
            return "low but both" if normalization else "low but softmax and losses"
        return "low but normalization" if normalization else "low"

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
