"""The project's launches run compiled, on tensors of the CPU, without a device."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pkgutil
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch

import torch_sink.triton_kernels
from simulators.executor.ptx.counts import Counts
from simulators.executor.ptx.findings import Finding, Findings
from simulators.executor.ptx.machine import Executable, Launch, Options
from simulators.executor.ptx.program import parse
from simulators.executor.target import Launched, target_only
from torch_sink.image.run import device
from torch_sink.image.run.device import DecodedImages, Launches
from torch_sink.triton_kernels.jpeg_rows import NOT_CONVERGED

_stock_empty = torch.empty
_garbage = torch.Generator().manual_seed(1)


class Executor:
    """Runs launches one after the other.

    Args:
        options: how.
        change: what to do to the PTX first, to break it on purpose.

    Attributes:
        findings: what the kernels did that none may do.
        launches: how many there were of each kernel.
        programs: their PTX, unchanged.
        counts: by kernel, where the options ask for them.
        elsewhere: tensors that launches use without getting them.
    """

    def __init__(self, options: Options, change: Callable[[str], str] = str) -> None:
        self.options, self.change = options, change
        self.findings = Findings()
        self.launches: Counter[str] = Counter()
        self.programs: set[str] = set()
        self.counts: dict[str, Counts] = {}
        self.elsewhere: tuple[torch.Tensor, ...] = ()

    def __call__(self, launched: Launched) -> None:
        self.run(launched, self.elsewhere)

    def run(self, launched: Launched, elsewhere: Sequence[torch.Tensor]) -> None:
        """Runs a launch, whose tables hold addresses of tensors elsewhere; all tensors are on the CPU."""
        self.launches[launched.kernel] += 1
        self.programs.add(launched.ptx)
        executable, shared = executable_of(self.change(launched.ptx)), launched.metadata.shared
        found = Findings()
        launch = Launch(executable, launched.grid, launched.arguments, shared, found, self.options, elsewhere)
        try:
            launch.run()
        finally:
            self.findings.update({finding: n for finding, n in found.items() if not is_harmless(finding, launched)})
        if launch.counts is not None:
            self.counts.setdefault(launched.kernel, Counts(executable.program)).add(launch.counts)

    @property
    def faults(self) -> list[str]:
        """The findings, in words."""
        return [f"{finding} ({times} times)" for finding, times in self.findings.items()]

    def may_use(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """The launches that follow read and write these tensors, where jobs say so."""
        self.elsewhere = tensors


def is_harmless(finding: Finding, launched: Launched) -> bool:
    """Whether it is one of the few that are allowed, each with its reason.

    Where the lanes of an image do not agree after the last round, two of them may store to one place. It does not
    matter which is last: the status of the image says so, and Pillow decodes it.
    """
    kinds = ("write after write without barrier", "threads store different values in one place")
    if finding.kernel != "finish_kernel" or finding.kind not in kinds:
        return False
    status = launched.arguments[14]
    return bool((status & NOT_CONVERGED).any())


@functools.cache
def executable_of(ptx: str) -> Executable:
    """A program's steps are made once."""
    return Executable(parse(ptx))


@contextlib.contextmanager
def compiled_on_cpu(options: Options | None = None, change: Callable[[str], str] = str) -> Iterator[Executor]:
    """The package takes tensors of the CPU to kernels, compiled, and memory that nobody wrote holds garbage."""
    load_kernels()
    executor = Executor(options or Options(), change)
    with (
        target_only(executor),
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        mock.patch.object(torch, "empty", _empty_with_garbage),
        noting_memory(executor.may_use),
    ):
        yield executor


@contextlib.contextmanager
def noting_memory(note: Callable[[tuple[torch.Tensor, ...]], None]) -> Iterator[None]:
    """Around launches whose jobs say where pixels lie, and all batches but the first, `note` gets these tensors."""
    decode, places_of, begin, run = DecodedImages._decode, device.places_of, Launches.__init__, Launches.run
    owners_of: dict[int, Sequence[torch.Tensor]] = {}  # by the array of their places, while it lives
    pixels: weakref.WeakKeyDictionary[Launches, Sequence[torch.Tensor]] = weakref.WeakKeyDictionary()

    def noted(places: Any, owners: Sequence[torch.Tensor]) -> None:
        if id(places) not in owners_of:
            weakref.finalize(places, owners_of.pop, id(places), None)
        owners_of[id(places)] = owners

    def noting_decoded(images: DecodedImages, *arguments: Any, **how: Any) -> None:
        decode(images, *arguments, **how)
        noted(images.places, images.owners)

    def noting_places(images: Any, memory: torch.Tensor) -> Any:
        places, owners = places_of(images, memory)
        noted(places, owners)
        return places, owners

    def noting_begin(
        launches: Launches, program: Any, memory: torch.Tensor, layouts: Any = None, places: Any = None
    ) -> None:
        pixels[launches] = owners_of.get(id(places), ())
        begin(launches, program, memory, layouts, places)

    def noting_run(launches: Launches, batches: Any, outputs: Sequence[torch.Tensor]) -> None:
        note((*pixels[launches], *outputs[1:]))
        run(launches, batches, outputs)
        note(())

    with (
        mock.patch.object(DecodedImages, "_decode", noting_decoded),
        mock.patch.object(device, "places_of", noting_places),
        mock.patch.object(Launches, "__init__", noting_begin),
        mock.patch.object(Launches, "run", noting_run),
    ):
        yield


@functools.cache
def load_kernels() -> None:
    """All of them, while they are not interpreted; the variable is looked at when they are loaded, by Triton."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("this process interprets kernels")
    package = torch_sink.triton_kernels
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def _empty_with_garbage(*arguments: Any, **options: Any) -> torch.Tensor:
    tensor = _stock_empty(*arguments, **options)
    if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.dtype != torch.bool:
        memory = _stock_empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory.random_(0, 256, generator=_garbage)
    return tensor
