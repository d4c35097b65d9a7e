"""Executes the launches of a target without a device."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator

from .ptx.findings import Findings
from .ptx.machine import Executable, Launch, Options
from .ptx.program import parse
from .target import Launched, target_only


class Executor:
    """Runs launches one after the other.

    Args:
        options: how.

    Attributes:
        findings: what the kernels did that none may do.
        launches: how many there were of each kernel.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.findings = Findings()
        self.launches: Counter[str] = Counter()

    def __call__(self, launched: Launched) -> None:
        executable = executable_of(launched.ptx)
        shared = launched.metadata.shared
        self.launches[launched.kernel] += 1
        Launch(executable, launched.grid, launched.arguments, shared, self.findings, self.options).run()


@functools.cache
def executable_of(ptx: str) -> Executable:
    return Executable(parse(ptx))


@contextlib.contextmanager
def executed(options: Options | None = None) -> Iterator[Executor]:
    executor = Executor(options)
    with target_only(executor):
        yield executor
