"""What no kernel may do, by kernel and line of its source."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from .program import Instruction


class Finding(NamedTuple):
    """Something that a kernel did.

    Attributes:
        kind: in words, for instance "out of bounds".
        kernel: its name.
        line: of its source, "tail.py:61".
        instruction: the name of the one that did it.
    """

    kind: str
    kernel: str
    line: str
    instruction: str

    def __str__(self) -> str:
        return f"{self.kernel}, {self.line}, {self.instruction}: {self.kind}"


class Fault(Exception):
    """A launch cannot go on after what was found."""


class Findings(Counter[Finding]):
    """How often each was found, over all launches."""

    def note(self, kind: str, kernel: str, instruction: Instruction) -> None:
        """Counts it."""
        self[Finding(kind, kernel, instruction.line, instruction.name)] += 1

    def fail(self, kind: str, kernel: str, instruction: Instruction, detail: str) -> Fault:
        """Counts it, and returns what to raise."""
        self.note(kind, kernel, instruction)
        return Fault(f"{Finding(kind, kernel, instruction.line, instruction.name)}: {detail}")
