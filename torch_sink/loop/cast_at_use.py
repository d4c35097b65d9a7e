"""O2 and O3: the model computes in low precision with float32 parameters, which are cast where they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torch_sink.loop.precision import Precision, map_container, to_float32

NORMALISATION: tuple[type[nn.Module], ...] = (_NormBase, nn.LayerNorm, nn.GroupNorm)


class CastAtUse(Precision):
    """Runs a model in `dtype` while its parameters stay float32: they are the master weights.

    In `context()` each module finds low precision copies of its own parameters, made by a cast that the backward
    pass goes through, so gradients arrive in float32. Every module with parameters casts its inputs; the model's
    outputs are float32. At O2, normalisation runs in float32 and hands low precision on. At O3 it takes low precision
    inputs and parameters; the running statistics of BatchNorm stay float32, as in torch's mixed kernels.

    Outside `context()` the model is what it was: the hooks do nothing.

    Args:
        level: "O2" or "O3".
        dtype: torch.bfloat16 or torch.float16.
        model: its parameters are float32.
        keep_float32: module types that run in float32; default the normalisation layers at O2, none at O3.
        only: the only module types to run in low precision, with float32 outputs; default all but `keep_float32`.

    Raises:
        ValueError: the model is sharded by FSDP2, which casts by its own MixedPrecisionPolicy.
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
        self._keep = keep_float32 if keep_float32 is not None else (NORMALISATION if level == "O2" else ())
        self._only = only
        self._active = False
        self._handles: list[Any] = []
        self._casts: list[tuple[nn.Module, str, nn.Parameter, bool]] = []
        self._recurrent: list[nn.RNNBase] = []
        for module in model.modules():
            self._adopt(module)
        self._handles.append(model.register_forward_hook(self._outputs_to_float32))

    @contextmanager
    def context(self) -> Iterator[None]:
        if self._active:
            yield
            return
        self._active = True
        copies: dict[nn.Parameter, Tensor] = {}
        for module, name, parameter, rounded in self._casts:
            copy = copies.get(parameter)
            if copy is None:
                copy = copies[parameter] = parameter.to(self.dtype)
            module._parameters[name] = copy.float() if rounded else copy  # type: ignore[assignment]
        self._refresh_recurrent()
        try:
            yield
        finally:
            for module, name, parameter, _ in self._casts:
                module._parameters[name] = parameter
            self._refresh_recurrent()
            self._active = False

    def outputs(self, outputs: Any) -> Any:
        return to_float32(outputs)

    def loss(self, loss: Tensor) -> Tensor:
        return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _adopt(self, module: nn.Module) -> None:
        own = [(name, p) for name, p in module._parameters.items() if p is not None and p.is_floating_point()]
        if self._only is not None and not isinstance(module, self._only):
            return
        if isinstance(module, self._keep):
            self._handles.append(module.register_forward_pre_hook(self._inputs_to_float32, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._outputs_to_low))
            return
        if self._only is not None:
            self._handles.append(module.register_forward_hook(self._outputs_to_float32))
        if isinstance(module, nn.RNNBase):
            self._recurrent.append(module)
        # torch's mixed BatchNorm takes low precision inputs, but wants parameters and statistics of one dtype.
        rounded = isinstance(module, _NormBase)
        self._casts += [(module, name, parameter, rounded) for name, parameter in own]
        if own or isinstance(module, NORMALISATION) or self._only is not None:
            self._handles.append(module.register_forward_pre_hook(self._inputs_to_low, with_kwargs=True))

    def _refresh_recurrent(self) -> None:
        for module in self._recurrent:
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        return map_container(lambda member: self._cast(member, dtype), value)

    def _inputs_to_low(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (self._cast(args, self.dtype), self._cast(kwargs, self.dtype)) if self._active else None

    def _inputs_to_float32(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (self._cast(args, torch.float32), self._cast(kwargs, torch.float32)) if self._active else None

    def _outputs_to_low(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._cast(output, self.dtype) if self._active else None

    def _outputs_to_float32(self, module: nn.Module, args: Any, output: Any) -> Any:
        return to_float32(output) if self._active else None
