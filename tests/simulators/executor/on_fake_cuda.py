"""The project's launches run compiled, on tensors of the fake CUDA device, checked as a device's driver checks them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from simulators.executor.project import Executor, load_kernels, noting_memory
from simulators.executor.ptx.machine import Options
from simulators.executor.target import Launched, TargetDriver, active_driver
from simulators.fake_cuda import FakeCuda
from simulators.fake_cuda.kernels import check_pointers, on_host

_MOST_PROGRAMS = (1 << 31) - 1, (1 << 16) - 1, (1 << 16) - 1  # in x, y and z
_ALIGNMENT_BYTES = 16
_DTYPES = {
    "*u8": torch.uint8, "*u16": torch.uint16, "*i16": torch.int16, "*i32": torch.int32, "*i64": torch.int64,
    "*fp16": torch.float16, "*bf16": torch.bfloat16, "*fp32": torch.float32, "*fp64": torch.float64,
}  # fmt: skip


class FakeCudaDriver(TargetDriver):
    """What Triton asks of the fake device.

    Attributes:
        cuda: the device.
        executor: of the kernels.
    """

    def __init__(self, cuda: FakeCuda, executor: Executor) -> None:
        super().__init__(self._queue)
        self.cuda, self.executor = cuda, executor
        self._jobs = threading.local()  # the tensors that jobs of this thread's next launches say the places of

    def get_current_device(self) -> int:  # type: ignore[override]
        return self.cuda.index_of()

    def get_active_torch_device(self) -> torch.device:
        return self.cuda.device_of()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The launcher of one compiled kernel, which looks at its arguments first."""
        launch, kinds = super().launcher_cls(source, metadata), tuple(source.signature.values())

        def run(x: int, y: int, z: int, *rest: Any) -> None:
            check_grid((x, y, z))
            arguments = rest[-len(kinds) :]
            # Triton keeps this function with the compiled kernel, longer than the driver is active.
            check_pointers(triton.runtime.driver.active.cuda, arguments)
            for at, (argument, kind) in enumerate(zip(arguments, kinds, strict=True)):
                check_argument(argument, kind, is_aligned=bool(source.attrs.get((at,))))
            if x * y * z:
                launch(x, y, z, *rest)

        return run

    def _queue(self, launched: Launched) -> None:
        arguments, elsewhere = on_host(self.cuda, launched.arguments), getattr(self._jobs, "elsewhere", ())
        queued = launched._replace(arguments=arguments)
        self.cuda.current_stream().issue(lambda: self.executor.run(queued, elsewhere), launched.kernel)

    def may_use(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """The launches of this thread that follow use these tensors, where jobs say so. None is kept alive for that."""
        self._jobs.elsewhere = on_host(self.cuda, tensors)


def check_grid(grid: tuple[int, int, int]) -> None:
    """Raises what the driver raises for too many programs."""
    if any(not 0 <= programs <= most for programs, most in zip(grid, _MOST_PROGRAMS, strict=True)):
        raise RuntimeError(f"Triton Error [CUDA]: invalid argument, a grid of {grid}")


def check_argument(argument: Any, kind: str, *, is_aligned: bool) -> None:
    """What a device does with an argument that is not what the kernel was compiled for.

    Args:
        argument: of a launch.
        kind: Triton's type of it.
        is_aligned: the compiler relied on an address that is a multiple of 16.
    """
    if kind in _DTYPES and argument.dtype != _DTYPES[kind]:
        raise TypeError(f"{argument.dtype} for a kernel that was compiled for {kind}")
    if kind in _DTYPES and is_aligned and argument.data_ptr() % _ALIGNMENT_BYTES:
        raise RuntimeError("CUDA error: misaligned address")
    if kind == "i32" and not -(1 << 31) <= argument < 1 << 31:
        raise OverflowError(f"{argument} does not fit into int32")


@contextlib.contextmanager
def compiled_on_fake_cuda(cuda: FakeCuda, options: Options | None = None) -> Iterator[Executor]:
    """Launches take tensors of the fake device, wait in its streams, and run compiled."""
    load_kernels()
    driver = FakeCudaDriver(cuda, Executor(options or Options()))
    with active_driver(driver), noting_memory(driver.may_use):
        yield driver.executor
