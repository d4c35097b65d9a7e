"""How kernels are launched: what the compiler is asked for, and what a variant of a kernel is to it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

WARPS = 4  # of a kernel that has no reason for another number
# Arguments of kernels that are numbers, int32; they come after the tensors.
_NUMBERS = ("columns", "first_column", "lane_bits", "warm_up_bits")
# Triton's type of each tensor, wherever it is an argument; all others are int32.
_TYPES = {
    **dict.fromkeys(("workspace", "stream", "unstuffed", "huffman", "planes", "pixels"), "*u8"),
    **dict.fromkeys(("jobs", "items", "next_items"), "*i64"),
    "lookups": "*u16",
    "coefficients": "*i16",
}


def compiler_options(warps: int = WARPS, registers: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch.

    Args:
        warps: of a program.
        registers: the most that a thread may use; only NVIDIA's compiler has such an option.
    """
    # Equal bits: a multiply and an add may not become one rounding, unless a kernel says so.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return options if registers is None or torch.version.cuda is None else {**options, "maxnreg": registers}


class Repeated:
    """A kernel that is launched time and again with arguments of the same types and alignments.

    For each launch Triton looks at all arguments, to find what it has compiled for them. Here it does so once.

    Args:
        kernel: what to launch.
        programs: of a launch.
        constants: its compile-time constants, its last arguments in order.
        options: as `compiler_options` gives them.
    """

    def __init__(self, kernel: Any, programs: int, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._constants, self._options = constants, options
        self._compiled: Any = None

    def __call__(self, *arguments: Any) -> None:
        """Launches it."""
        if isinstance(self._compiled, CompiledKernel):
            self._compiled[self._grid](*arguments, *self._constants.values())
        else:
            # The interpreter compiles nothing.
            self._compiled = self._kernel[self._grid](*arguments, **self._constants, **self._options)


@triton.jit
def _nothing():
    pass


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, which pays for operations, not for pixels: it likes large tiles."""
    return not isinstance(_nothing, JITFunction)


class Variant(NamedTuple):
    """One kernel with its compile-time constants, as a launcher may choose it.

    Attributes:
        kernel: the function under `triton.jit`.
        name: for instance "stage, light, bfloat16".
        constants: every compile-time constant.
        warps: `num_warps`.
        registers: `maxnreg` on NVIDIA's GPUs, None where the compiler may choose.
        fuses: the kernel itself asks for multiply-adds with one rounding, as torch's kernels have them.
        output: Triton's type of a pointer to the batch; "" for a kernel that does not write it.
    """

    kernel: Any
    name: str
    constants: dict[str, Any]
    warps: int = WARPS
    registers: int | None = None
    fuses: bool = False
    output: str = ""

    @property
    def pointers(self) -> dict[str, str]:
        """Triton's type of each argument that is a pointer; all are aligned to 16 bytes."""
        names = [name for name in self.kernel.arg_names if name not in (*self.constants, *_NUMBERS)]
        return {name: self.output if name == "output" else _TYPES.get(name, "*i32") for name in names}

    @property
    def signature(self) -> dict[str, str]:
        """Triton's type of every argument."""
        numbers = [name for name in self.kernel.arg_names if name in _NUMBERS]
        return {**self.pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(self.constants, "constexpr")}
