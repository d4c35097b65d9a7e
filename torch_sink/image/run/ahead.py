"""Compiles kernels ahead of time, on all cores, for this machine's GPU or another one."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from torch_sink.common import usable_cores
from torch_sink.errors import SinkError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel

    from torch_sink.triton_kernels.launching import Variant

_DTYPES = {
    "u8": torch.uint8, "u16": torch.uint16, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64,
}  # fmt: skip


class Outcome(NamedTuple):
    """How the compilation of a variant of a kernel ended."""

    name: str
    was_there: bool  # whether Triton's cache held the variant already
    seconds: float  # time that the compilation took
    error: str = ""  # the compiler's message; "" where the variant is in the cache


def target_named(name: str | None) -> GPUTarget:
    """The GPU that kernels are compiled for.

    Args:
        name: for instance "cuda:90" or "hip:gfx942"; by default this machine's.

    Raises:
        SinkError: there is no GPU here and none was named, or this build of torch cannot launch on the named one.
        ValueError: the name is not a target's.
    """
    from triton.backends.compiler import GPUTarget

    if name is None:
        if not torch.cuda.is_available():
            raise SinkError("no GPU here to compile for; name one, for instance --target cuda:90 for an H100 or H200")
        # Triton's driver would say this too, but it needs a C compiler.
        if torch.version.hip is None:
            major, minor = torch.cuda.get_device_capability()
            return GPUTarget("cuda", 10 * major + minor, 32)
        found = torch.cuda.get_device_properties()
        return GPUTarget("hip", found.gcnArchName.partition(":")[0], found.warp_size)
    backend, _, arch = name.partition(":")
    if backend not in ("cuda", "hip") or not arch or (backend == "cuda" and not arch.isdigit()):
        raise ValueError(f"no such target: {name!r}; give for instance cuda:80, cuda:90, cuda:100 or hip:gfx942")
    if (torch.version.cuda if backend == "cuda" else torch.version.hip) is None:
        raise SinkError(f"torch {torch.__version__} launches nothing on {name}: what it compiles is of no use there")
    return GPUTarget(backend, int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


class _Target:
    """A driver for Triton that names a target to compile for and launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> object:
        # Triton caches compiled kernels by device; for a new object it has none, so it compiles.
        return self

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def _compiling_for(target: GPUTarget) -> Iterator[None]:
    from triton.runtime.driver import driver

    before = dict(vars(driver))  # not its property, which looks for a GPU
    driver.set_active(_Target(target))
    try:
        yield
    finally:
        vars(driver).update(before)


def every_variant(target: GPUTarget) -> list[Variant]:
    """Every variant of every kernel, the slowest to compile first."""
    from torch_sink.triton_kernels.jpeg import jpeg_variants
    from torch_sink.triton_kernels.stages import variants

    return [*variants(), *jpeg_variants(target.warp_size)]


def compile_all(target: GPUTarget) -> Iterator[Outcome]:
    """Compiles every variant into Triton's cache, in several processes, and yields outcomes as they finish."""
    count = len(every_variant(target))
    # Not forked: this process may hold a device, or threads.
    with ProcessPoolExecutor(min(usable_cores(), count), mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_variant, number, target) for number in range(count)]):
            yield done.result()


def compile_variant(number: int, target: GPUTarget) -> Outcome:
    """Compiles one variant into Triton's cache, under the key by which launches of batches look it up."""
    from triton import knobs

    variant = every_variant(target)[number]
    hits: list[bool] = []
    started = time.perf_counter()
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **about: hits.append(about["cache_hit"])
    error = ""
    try:
        with _compiling_for(target):
            _compiled(variant)
    except Exception as raised:  # by a compiler; the other variants go on
        error = f"{type(raised).__name__}: {raised}"
    finally:
        knobs.compilation.listener = before
    return Outcome(variant.name, hits == [True], time.perf_counter() - started, error)


def load_variant(variant: Variant) -> str:
    """Loads a compiled variant on the current device, as its first launch would; returns why it cannot, or "".

    Triton up to 3.6 then builds a launcher with a C compiler, which takes a good part of a second for each signature.
    """
    try:
        _compiled(variant).run  # noqa: B018 this property loads the kernel
    except Exception as raised:  # by Triton, the C compiler or the driver
        return f"{type(raised).__name__}: {raised}"
    return ""


def _compiled(variant: Variant) -> CompiledKernel:
    """The compiled kernel of a variant, from Triton's cache where it is there."""
    from torch_sink.triton_kernels.launching import compiler_options

    kinds = [variant.signature[name] for name in variant.kernel.arg_names if name not in variant.constants]
    # Kernels are not specialized on the values of numbers, so any number stands for all.
    arguments = [_DTYPES[kind.removeprefix("*")] if kind.startswith("*") else 0 for kind in kinds]
    options = {**variant.constants, **compiler_options(variant.warps, variant.registers)}
    return variant.kernel.warmup(*arguments, grid=(1,), **options)
