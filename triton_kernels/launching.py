"""Launches kernels: compiler options, a launcher with little overhead, and the variants of kernels."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_ALIGNMENT_BYTES = 16
_ADDRESS, _DTYPE = torch.Tensor.data_ptr, operator.attrgetter("dtype")
WARPS = 4  # warps of a kernel without a reason for another number
# Names of kernel arguments that are int32 numbers; they come after the tensors.
_NUMBERS = ("lanes", "settling", "lane_bits", "warm_up_bits", "first_tile")
# Name of a tensor argument -> Triton's type of it; all others are int32.
_TYPES = {
    **dict.fromkeys(("workspace", "stream", "unstuffed", "huffman", "planes", "pixels"), "*u8"),
    **dict.fromkeys(("jobs", "places", "layouts", "items", "next_items"), "*i64"),
    "lookups": "*u16",
    "coefficients": "*i16",
}


def compiler_options(warps: int = WARPS, registers: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch: warps of a program, and most registers of a thread, for NVIDIA's compiler only."""
    # For equal bits the compiler must not fuse a multiply and an add, unless a kernel asks for it.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return options if registers is None or torch.version.cuda is None else {**options, "maxnreg": registers}


class Launcher:
    """Launches a kernel again and again with arguments of the same types.

    For each launch Triton's JIT inspects every argument and every global of the kernel, which takes several times as
    long as the launch itself. This class finds the compiled kernel by a key of the arguments instead. The key contains
    Triton's knobs for debugging and instrumentation; set other knobs, and hooks of the compiler's stages, before the
    first launch.

    Args:
        kernel: what to launch; its arguments are tensors, then numbers that are not specialized, then constants.
        warps: as for `compiler_options`.
        registers: as for `compiler_options`.

    Attributes:
        name: name of the kernel.
    """

    def __init__(self, kernel: Any, warps: int = WARPS, registers: int | None = None) -> None:
        self.name = kernel.__name__
        self._kernel, self._warps, self._registers = kernel, warps, registers
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(
        self, grid: Sequence[int], tensors: Sequence[torch.Tensor], numbers: tuple[int, ...] = (), **constants: Any
    ) -> None:
        """Launches the kernel on the current stream of the current device.

        Args:
            grid: number of programs in one to three dimensions.
            tensors: the arguments that are pointers.
            numbers: the arguments that are int32 numbers.
            constants: the compile-time constants, in the order of the arguments.
        """
        self.prepared(grid, tensors, numbers, **constants)(*tensors)

    def prepared(
        self, grid: Sequence[int], tensors: Sequence[torch.Tensor], numbers: tuple[int, ...] = (), **constants: Any
    ) -> Callable[..., None]:
        """A function that launches the kernel with these tensors, or with others of the same types and alignment."""
        rest = (*numbers, *constants.values())
        key = self._key(tensors, numbers, constants.values())
        if (compiled := self._compiled.get(key)) is not None:
            launch = compiled[(*grid, 1, 1)[:3]]
            return lambda *tensors: launch(*tensors, *rest)

        def launch_first(*tensors: torch.Tensor) -> None:
            options = compiler_options(self._warps, self._registers)
            compiled = self._kernel[grid](*tensors, *numbers, **constants, **options)
            if key and isinstance(compiled, CompiledKernel):
                self._compiled[key] = compiled

        return launch_first

    def _key(
        self, tensors: Sequence[torch.Tensor], numbers: tuple[int, ...], constants: Iterable[Any]
    ) -> tuple[Any, ...]:
        """The key of the compiled kernel; () if Triton's JIT has to find it, or the interpreter runs it."""
        if is_interpreted() or self._kernel.pre_run_hooks:
            return ()
        if functools.reduce(operator.or_, map(_ADDRESS, tensors)) % _ALIGNMENT_BYTES:
            return ()
        device = triton.runtime.driver.active.get_current_device()
        # One kernel takes all numbers that fit into its type: those of a batch, such as its lanes, make no new key.
        fit = [-(1 << 31) <= number < 1 << 31 for number in numbers]
        mode = getattr(knobs.compilation, "instrumentation_mode", "")  # from Triton 3.5 on
        key = (device, knobs.runtime.debug, mode, *fit, *constants, *map(_DTYPE, tensors))
        if torch.version.hip is None:
            return key
        # On AMD GPUs, tensors whose offsets do not fit into 31 bits need other code.
        return (*key, *[tensor.untyped_storage().nbytes() >> 31 for tensor in tensors])


def allocated(parts: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device | str) -> list[torch.Tensor]:
    """Allocates tensors of these shapes, of one or two dimensions, in one piece of memory: at multiples of 16 bytes."""
    begins, end = [], 0
    for shape, dtype in parts:
        begins.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    typed = {dtype: memory.view(dtype) for dtype in {dtype for _, dtype in parts}}
    return [
        typed[dtype].as_strided(shape, (*shape[1:], 1), begin // dtype.itemsize)
        for begin, (shape, dtype) in zip(begins, parts, strict=True)
    ]


@triton.jit  # type: ignore[untyped-decorator]
def probe_kernel(values):  # type: ignore[no-untyped-def]
    """Writes 1 to values[0], uint8: the smallest kernel, to test whether kernels can be launched."""
    tl.store(values, 1)


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels; it takes time per operation, so large tiles are faster there."""
    return not isinstance(probe_kernel, JITFunction)


class Variant(NamedTuple):
    """A kernel with compile-time constants that a launcher may choose.

    Attributes:
        kernel: the function under `triton.jit`.
        name: for instance "stage, light, bfloat16".
        constants: every compile-time constant.
        warps: `num_warps`.
        registers: `maxnreg` on NVIDIA GPUs, None for the compiler's choice.
        fuses: whether the kernel asks for fused multiply-adds, as torch's kernels use them.
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
        """Name of each pointer argument -> Triton's type; all pointers are aligned to 16 bytes."""
        names = [name for name in self.kernel.arg_names if name not in (*self.constants, *_NUMBERS)]
        return {name: self.output if name == "output" else _TYPES.get(name, "*i32") for name in names}

    @property
    def signature(self) -> dict[str, str]:
        """Name of every argument -> Triton's type."""
        numbers = [name for name in self.kernel.arg_names if name in _NUMBERS]
        return {**self.pointers, **dict.fromkeys(numbers, "i32"), **dict.fromkeys(self.constants, "constexpr")}
