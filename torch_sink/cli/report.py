"""Reports of `explain` and `bench`, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

_COLUMNS, _BAR_COLUMNS = 110, 40


class Table(NamedTuple):
    """Rows under a head. Columns whose name begins with a space contain numbers, which are aligned to the right.

    Without a head, rows are lines of text.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def as_text(self) -> str:
        if not self.head:
            return "\n".join(short for (line,) in self.rows for short in _wrapped(line))
        columns = [[cell.strip() for cell in column] for column in zip(self.head, *self.rows, strict=True)]
        aligned = []
        for name, column in zip(self.head, columns, strict=True):
            width = max(map(len, column))
            aligned.append([cell.rjust(width) if name[:1] == " " else cell.ljust(width) for cell in column])
        return "\n".join(f"  {'  '.join(row)}".rstrip() for row in zip(*aligned, strict=True))


def bars(title: str, head: str, values: dict[str, float], *, digits: int = 0, note: str = "") -> Table:
    """A table of named numbers with bars; `head` is the name of their column."""
    scale = _BAR_COLUMNS / max(values.values())
    rows = [(name, f"{value:,.{digits}f}", "#" * max(1, round(scale * value))) for name, value in values.items()]
    return Table(title, ("", f" {head}", ""), rows, note)


class Report(NamedTuple):
    """A title, lines about the subject, the conclusion, and tables."""

    title: str
    about: Sequence[str]
    conclusion: str
    parts: Sequence[Table]

    def as_text(self) -> str:
        """Format the report for a terminal."""
        head = "\n".join([self.title, *(f"  {line}" for line in self.about)])
        parts = ["\n".join([part.title, part.as_text(), *_wrapped(part.note)]) for part in self.parts]
        return "\n\n".join([head, *parts, textwrap.fill(self.conclusion, _COLUMNS)])


def _wrapped(text: str) -> list[str]:
    """Wraps a text at the width of a terminal, with an indent that is larger for continued lines."""
    indent = " " * (2 + len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ")
