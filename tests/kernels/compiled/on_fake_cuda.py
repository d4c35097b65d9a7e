"""The project's launches run compiled, on tensors of the fake CUDA device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fake_cuda import FakeCuda
from fake_cuda.kernels import check_pointers, on_host

from kernels.compiled.project import Executor, load_kernels, noting_pixels
from kernels.compiled.ptx.machine import Options
from kernels.compiled.target import Launched, target_only


@contextlib.contextmanager
def compiled_on_fake_cuda(cuda: FakeCuda) -> Iterator[Executor]:
    """Launches take tensors of the fake device, wait in its streams, and run compiled."""
    load_kernels()
    executor = Executor(Options())

    def queue(launched: Launched) -> None:
        check_pointers(cuda, launched.arguments)
        arguments, pixels = on_host(cuda, launched.arguments), on_host(cuda, executor.pixels)
        queued = launched._replace(arguments=arguments)
        cuda.current_stream().issue(lambda: executor.run(queued, pixels), launched.kernel)

    with target_only(queue), noting_pixels(executor):
        yield executor
