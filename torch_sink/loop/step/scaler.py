"""Loss scalers with their state on the device, so that neither scaling nor adjusting waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from torch_sink.common.arguments import check_number, explains_wrong_calls
from torch_sink.common.containers import map_leaves
from torch_sink.errors import SinkError
from torch_sink.loop.core.history import SinkResults
from torch_sink.loop.step.update import OptimizerUpdate
from torch_sink.thread_waits import host_sync_allowed

LONGEST_OVERFLOW = 1000


def all_finite(inputs: Tensor | Iterable[Tensor | None]) -> Tensor:
    """Tell whether every value of every tensor is finite, without waiting for the device.

    Args:
        inputs: tensors of any shape and dtype; None, as for a parameter without gradient, counts as finite.

    Returns:
        A bool tensor of shape [], on the device of the first tensor.

    Raises:
        ValueError: `inputs` holds no tensor.
    """
    tensors = [inputs] if isinstance(inputs, Tensor) else [tensor for tensor in inputs if tensor is not None]
    if not tensors:
        raise ValueError("all_finite got no tensor; pass at least one")
    dense = [tensor._values() if tensor.is_sparse else tensor for tensor in tensors]
    return torch.stack([tensor.isfinite().all().to(dense[0].device) for tensor in dense]).all()


def grads_finite(source: torch.optim.Optimizer | nn.Module | Iterable[Tensor]) -> Tensor:
    """Tell whether every gradient is finite, without waiting for the device.

    Args:
        source: an optimizer, a module, or parameters; those without a gradient are ignored.

    Returns:
        A bool tensor of shape [], on the device of the gradients.

    Raises:
        ValueError: there is no gradient.
    """
    parameters: Iterable[Tensor]
    if isinstance(source, torch.optim.Optimizer):
        parameters = [parameter for group in source.param_groups for parameter in group["params"]]
    else:
        parameters = source.parameters() if isinstance(source, nn.Module) else source
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise ValueError("grads_finite found no gradient; call it after backward()")
    return all_finite(gradients)


class StaticLossScaler:
    """Multiplies the loss by a fixed number; updates with gradients that are not finite are skipped.

    Args:
        scale_value: factor, at least 1.

    Raises:
        TypeError: `scale_value` is no number.
        ValueError: `scale_value` is below 1.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = StaticLossScaler(1024.0)
        >>> scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        >>> finite = scaler.step(optimizer)  # skipped on the device where a gradient is not finite
        >>> bool(finite), scaler.adjust(finite)
        (True, False)
    """

    @explains_wrong_calls()
    def __init__(self, scale_value: float) -> None:
        check_number("scale_value", scale_value)
        if not scale_value >= 1:
            raise ValueError(f"scale_value={scale_value!r}: a loss scale is at least 1")
        self._updates: dict[torch.optim.Optimizer, OptimizerUpdate] = {}
        self._unscaled: set[torch.optim.Optimizer] = set()
        self.scale_value = torch.tensor(float(scale_value), dtype=torch.float32, device="cpu")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._scale_text()})"

    def _scale_text(self) -> str:
        if self.scale_value.device.type != "cpu":  # reading it would wait for the device
            return f"scale_value=<on {self.scale_value.device}>"
        with host_sync_allowed():
            return f"scale_value={self.scale_value.item():g}"

    def to(self, device: torch.device) -> StaticLossScaler:
        """Move the state to `device`; returns the scaler itself."""
        with host_sync_allowed():  # once per run
            for name, value in self.state_dict().items():
                setattr(self, name, value.to(device))
        return self

    def scale(self, inputs: Any) -> Any:
        """Multiply a tensor, or nested lists, tuples and dicts of them, by the scale.

        The state moves to the device of what is scaled. A float16 scalar becomes float32, whose range the scale needs.
        """

        def scaled(tensor: Tensor) -> Tensor:
            if tensor.device != self.scale_value.device:
                self.to(tensor.device)
            return tensor * self.scale_value

        return _map_scalable(scaled, inputs)

    def unscale(self, inputs: Any) -> Any:
        """Multiply a tensor, or nested lists, tuples and dicts of them, by the inverse of the scale."""
        inverse = self.inverse()
        return _map_scalable(lambda tensor: tensor * inverse, inputs)

    @_disable_dynamo
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, as before clipping them by their norm.

        Raises:
            RuntimeError: done already since the optimizer's last step.
            ValueError: no parameter of the optimizer has a gradient.
        """
        if optimizer in self._unscaled:
            raise RuntimeError("unscale_() has been called for this optimizer since its last step()")
        self._update_of(optimizer).unscale()
        self._unscaled.add(optimizer)

    @_disable_dynamo
    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Unscale the gradients, unless `unscale_` did, and step the optimizer unless one of them is not finite.

        The step is skipped on the device, without a host sync. After a step in which the optimizer has made state, as
        it does until the first update that succeeds, the host reads the overflow flag: what was made may have to go.
        Parameters and state are bit-identical to those of `torch.amp.GradScaler.step`. Compiled code breaks its graph
        here.

        Args:
            optimizer: a dense torch.optim optimizer that keeps tensors in its state. On CUDA this sets its flag
                `capturable`, or `fused` for SGD, so that no arithmetic runs on the host.

        Returns:
            Whether all gradients are finite, a bool tensor of shape []: what `adjust` takes. With several optimizers,
            `adjust(first & second)`.

        Raises:
            ValueError: no parameter of the optimizer has a gradient.
            UnsupportedOperation: the optimizer counts in Python numbers.
        """
        update = self._update_of(optimizer)
        if optimizer in self._unscaled:
            self._unscaled.discard(optimizer)
        else:
            update.unscale()
        update.step()
        return update.found_inf == 0

    def _update_of(self, optimizer: torch.optim.Optimizer) -> OptimizerUpdate:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            raise ValueError("no parameter of the optimizer has a gradient; call backward() on the scaled loss first")
        if optimizer not in self._updates:
            sharded = any(hasattr(gradient, "to_local") for gradient in gradients)
            self._updates[optimizer] = OptimizerUpdate(None, optimizer, self, gradients[0].device, agrees=sharded)
        update = self._updates[optimizer]
        update.follow()
        return update

    def inverse(self) -> Tensor:
        """1 / scale as float32 of shape [], rounded once from float64."""
        return self.scale_value.double().reciprocal().float()

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Does nothing, because a static scale never changes; returns False."""
        return False

    def state_dict(self) -> dict[str, Tensor]:
        """Device tensors that hold the whole state."""
        return {"scale_value": self.scale_value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load a state in place: captured graphs go on reading the same memory."""
        for name, value in self.state_dict().items():
            value.copy_(state[name])


class DynamicLossScaler(StaticLossScaler):
    """Grows the scale after a window of finite steps and shrinks it at an overflow.

    After `scale_window` finite steps in a row the scale is multiplied by `scale_factor` unless the product is not
    finite in float32; after a step with a gradient that is not finite it is divided by it, down to 1 at the least.

    Args:
        scale_value: first scale, at least 1.
        scale_factor: above 1.
        scale_window: finite steps in a row before the scale grows, at least 1.

    Raises:
        TypeError: an argument that is no number.
        ValueError: an argument outside the bounds above.
    """

    @explains_wrong_calls()
    def __init__(self, scale_value: float = 2.0**16, scale_factor: float = 2, scale_window: int = 2000) -> None:
        super().__init__(scale_value)
        check_number("scale_factor", scale_factor)
        if not scale_factor > 1:
            raise ValueError(f"scale_factor={scale_factor!r}: the factor is above 1")
        if isinstance(scale_window, bool) or not isinstance(scale_window, int) or scale_window < 1:
            raise ValueError(f"scale_window={scale_window!r}: the window is an int of at least 1")
        self.scale_factor, self.scale_window = float(scale_factor), scale_window
        self.counter = torch.tensor(0, dtype=torch.int32, device="cpu")

    def __repr__(self) -> str:
        rule = f"scale_factor={self.scale_factor:g}, scale_window={self.scale_window}"
        return f"{type(self).__name__}({self._scale_text()}, {rule})"

    def adjust(self, grads_finite: Tensor | bool) -> bool:
        """Update scale and counter in place, without waiting for the device. Returns True."""
        finite = torch.as_tensor(grads_finite, device=self.counter.device).reshape(())
        factor, window = self.scale_factor, self.scale_window
        torch._amp_update_scale_(self.scale_value, self.counter, (~finite).float(), factor, 1 / factor, window)
        self.scale_value.clamp_(min=1)
        return True

    def state_dict(self) -> dict[str, Tensor]:
        """Device tensors that hold the whole state."""
        return {"scale_value": self.scale_value, "counter": self.counter}


def _map_scalable(function: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    def of(leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"cannot scale {type(leaf).__name__}; pass a tensor, or a list, tuple or dict of tensors")
        return function(leaf)

    return map_leaves(inputs, of)


class OverflowCount:
    """Aborts a run whose updates all overflow, because the gradients are not finite at any loss scale.

    This applies to dynamic scalers only; with a static one, the user has asked to skip such updates.
    """

    def __init__(self, scaler: StaticLossScaler | None) -> None:
        self._counts, self._in_a_row = isinstance(scaler, DynamicLossScaler), 0

    def add(self, sink: SinkResults, last_step: int) -> None:
        """Count the overflows of a sink that ended with step `last_step`."""
        if not self._counts:
            return
        first = last_step - len(sink.overflows) + 1
        for index in sink.updates.nonzero().flatten().tolist():
            self.add_update(first + index, skipped=bool(sink.overflows[index]))

    def add_update(self, step: int, *, skipped: bool) -> None:
        """Count one update."""
        self._in_a_row = self._in_a_row + 1 if skipped and self._counts else 0
        if self._in_a_row >= LONGEST_OVERFLOW:
            raise SinkError(
                f"{LONGEST_OVERFLOW} optimizer updates in a row overflowed, the last at step {step}: the gradients "
                "are not finite at any loss scale; check the data and the learning rate, or use torch.bfloat16"
            )


def resolve_loss_scaler(
    loss_scaler: str | StaticLossScaler | None,
    level: str,
    dtype: torch.dtype,
    device: torch.device,
    own: torch.amp.GradScaler | None = None,
) -> StaticLossScaler | None:
    """Turn the `loss_scaler` argument into a scaler on `device`, or None.

    "default" means dynamic scaling for float16 and none otherwise: bfloat16 has the range of float32. For an optimizer
    that another library prepared with a GradScaler (`own`), it means one with the same scale, factor and window.
    """
    if loss_scaler is None:
        return None
    if isinstance(loss_scaler, StaticLossScaler):
        return loss_scaler.to(device)
    if loss_scaler == "default":
        if own is not None:
            return DynamicLossScaler(own.get_scale(), own.get_growth_factor(), own.get_growth_interval()).to(device)
        return DynamicLossScaler().to(device) if level != "O0" and dtype == torch.float16 else None
    raise TypeError(
        f"loss_scaler={loss_scaler!r}: pass 'default', None, or a torch_sink.amp.StaticLossScaler or DynamicLossScaler"
    )
