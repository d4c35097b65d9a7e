"""Triton without a device: kernels are launched through its JIT as on an H100, and compiled as far as PTX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024  # that one program may have
STOCK = backends["nvidia"]


class Launched(NamedTuple):
    """One launch.

    Attributes:
        kernel: its name.
        ptx: what was compiled.
        metadata: of the compilation, Triton's.
        grid: programs in x, y and z.
        arguments: all that are no compile-time constants.
    """

    kernel: str
    ptx: str
    metadata: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


Launch = Callable[[Launched], None]


class PtxBackend(STOCK.compiler):  # type: ignore[name-defined]
    """Triton's compiler for NVIDIA's GPUs, which leaves out the assembler."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "ptx"

    def add_stages(self, stages: dict[str, Any], options: Any, language: Any) -> None:
        super().add_stages(stages, options, language)
        del stages["cubin"]

    def hash(self) -> str:
        """Another than the stock compiler's: what it leaves in Triton's cache is of no use to a device."""
        return f"{super().hash()}-ptx"


class TargetDriver:
    """What Triton asks of a driver: the name of a target, and somebody who takes launches."""

    def __init__(self, launch: Launch) -> None:
        properties = {"max_shared_mem": SHARED_BYTES}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, binary, shared, device: (object(), binary.decode(), 0, 0, 1024),
            unload_module=lambda module: None,
        )
        self.launch = launch

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """The launcher of one compiled kernel, with the arguments that Triton gives it."""
        kinds = source.signature.values()

        def run(x: int, y: int, z: int, stream: int, ptx: str, packed: Any, about: Any, *rest: Any) -> None:
            bound = zip(rest[2:], kinds, strict=True)  # after the hooks of enter and exit
            arguments = tuple(argument for argument, kind in bound if kind != "constexpr")
            # Triton keeps this function with the compiled kernel, longer than the driver is active.
            triton.runtime.driver.active.launch(Launched(metadata.name, ptx, metadata, (x, y, z), arguments))

        return run

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device: no real one has this number.
        return "target"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def target_only(launch: Launch) -> contextlib.AbstractContextManager[None]:
    """Every launch of a kernel is compiled for the target and handed to `launch`, with tensors of the CPU.

    Args:
        launch: takes each launch, in place of a device.
    """
    return active_driver(TargetDriver(launch))


@contextlib.contextmanager
def active_driver(driver: TargetDriver) -> Iterator[None]:
    """Every launch of a kernel is compiled for the target and goes through this driver."""
    config = triton.runtime.driver
    before = dict(vars(config))
    backends["nvidia"] = type(STOCK)(compiler=PtxBackend, driver=STOCK.driver)
    config.set_active(driver)
    try:
        yield
    finally:
        backends["nvidia"] = STOCK
        vars(config).update(before)
