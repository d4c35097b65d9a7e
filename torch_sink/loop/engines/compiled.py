"""Forward pass and loss through torch.compile, with a way back to eager code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_sink.loop.core.reasons import Reasons
from torch_sink.loop.engines.jit import JitConfig, compile_function, with_code_of_its_own
from torch_sink.loop.step.step import LossFunction, batch_tensors


def batch_signature(batch: Any) -> tuple[Any, ...]:
    """Shapes, strides, dtypes and devices of a batch's tensors: equal signatures can share compiled code."""
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in batch_tensors(batch))


class UsualShape:
    """The one shape of batches that is compiled or captured: the first, unless another soon proves to be the usual one.

    A run may begin with an odd shape, as one that is resumed before the last batch of an epoch does. So a shape that
    comes twice in a row, before the first has come again, takes its place.
    """

    def __init__(self) -> None:
        self._usual: Any = None
        self._latest: Any = None
        self._settled = False

    def knows(self, signature: Any) -> bool:
        """Whether batches of this shape were the usual ones before."""
        return bool(signature == self._usual)

    def accepts(self, signature: Any) -> bool:
        """Whether a batch has the usual shape; to be asked for every batch."""
        if self._usual is None:
            self._usual = signature
        elif signature == self._usual:
            self._settled = True
        elif not self._settled and signature == self._latest:
            self._usual, self._settled = signature, True
        self._latest = signature
        return bool(signature == self._usual)


class CompiledLoss:
    """Compiles a loss function for the usual shape of batches; other shapes run the eager function.

    Recompiling for a short last batch costs tens of seconds and saves milliseconds.

    Args:
        eager: the function to compile.
        model: its buffers are put back if compiling fails half-way.
        config: settings of the compiler.
        reasons: told what ran in eager code, and why.
    """

    def __init__(self, eager: LossFunction, model: nn.Module, config: JitConfig, reasons: Reasons) -> None:
        self._eager, self._model, self._config, self._reasons = eager, model, config, reasons
        self._compiled = compile_function(with_code_of_its_own(lambda batch: eager(batch)), config)
        self._shape = UsualShape()
        self._called = self._failed = False

    def __call__(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        if self._failed:
            return self._eager(batch)
        if not self._config.dynamic and not self._shape.accepts(batch_signature(batch)):
            self._reasons.count("batches of another shape than the usual one ran uncompiled")
            return self._eager(batch)
        return self._compiled(batch) if self._called else self._first(batch)

    def _first(self, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        self._called = True
        random = torch.get_rng_state()
        buffers = [buffer.detach().clone() for buffer in self._model.buffers()]
        try:
            return self._compiled(batch)
        except Exception as error:
            if self._config.fullgraph or not _is_compiler_error(error):
                raise
            self._failed = True
            self._reasons.note(f"compiling failed, so steps run in eager code: {_first_line(error)}")
        torch.set_rng_state(random)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(value)
        return self._eager(batch)


def _is_compiler_error(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
