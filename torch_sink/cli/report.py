"""Reports of `explain` and `bench`, as text for a terminal and as a self-contained HTML page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

_COLUMNS, _BAR_COLUMNS = 110, 40
_LIMIT = "  <- the limit"
MOST_COLUMNS_OF_A_PHONE = 3  # a narrow page stacks the cells of a row in tables with more


class Table(NamedTuple):
    """Rows under a head. Columns whose name begins with a space contain numbers, which are aligned to the right.

    Without a head, rows are lines of text. A page draws a cell of # as a bar.
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

    def as_html(self) -> str:
        columns = [(name.strip(), " class=number" if name[:1] == " " else "") for name in self.head or [""]]
        heads = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in columns) if self.head else ""
        rows = [
            "".join(
                f'<td{kind} data-head="{escape(name)}">{_cell(cell)}</td>'
                for (name, kind), cell in zip(columns, row, strict=True)
            )
            for row in self.rows
        ]
        lines = [f"<tr>{cells}</tr>" for cells in (heads, *rows) if cells]
        kind = " class=stacked" if len(self.head) > MOST_COLUMNS_OF_A_PHONE else ""
        return f'<div class="scroll"><table{kind}>\n' + "\n".join(lines) + "\n</table></div>"


def bars(title: str, head: str, values: dict[str, float], *, limit: str = "", digits: int = 0, note: str = "") -> Table:
    """A table of named numbers with bars; `head` is the name of their column, `limit` that of one to emphasize."""
    scale = _BAR_COLUMNS / max(values.values())
    rows = [
        (name, f"{value:,.{digits}f}", "#" * max(1, round(scale * value)) + _LIMIT * (name == limit))
        for name, value in values.items()
    ]
    return Table(title, ("", f" {head}", ""), rows, note)


class Report(NamedTuple):
    """A title, lines about the subject, the verdict, and tables."""

    title: str
    about: Sequence[str]
    verdict: str
    parts: Sequence[Table]

    def as_text(self) -> str:
        """Format the report for a terminal."""
        head = "\n".join([self.title, *(f"  {line}" for line in self.about)])
        parts = ["\n".join([part.title, part.as_text(), *_wrapped(part.note)]) for part in self.parts]
        return "\n\n".join([head, *parts, textwrap.fill(self.verdict, _COLUMNS)])

    def as_html(self) -> str:
        """Format the report as a page with a light and a dark theme."""
        notes = [f"<p class=note>{escape(line)}</p>" for line in self.about]
        body = [*notes, f"<p class=verdict>{escape(self.verdict)}</p>"]
        for part in self.parts:
            body += [f"<h2>{escape(part.title)}</h2>", part.as_html()]
            body += [f"<p class=note>{escape(part.note)}</p>"] if part.note else []
        page = files("torch_sink.cli").joinpath("report.html").read_text(encoding="utf-8")
        return page.replace("{{title}}", escape(self.title)).replace("{{body}}", "\n".join(body))


def _wrapped(text: str) -> list[str]:
    """Wraps a text at the width of a terminal, with an indent that is larger for continued lines."""
    indent = " " * (2 + len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _cell(text: str) -> str:
    text = text.strip()
    words = text.lstrip("#")
    shown = escape(words.replace("<-", "\N{LEFTWARDS ARROW}").replace("->", "\N{RIGHTWARDS ARROW}"))
    if words == text:
        return shown
    kind = "bar limit" if text.endswith(_LIMIT) else "bar"
    share = 100 * (len(text) - len(words)) / _BAR_COLUMNS
    return f'<div class="{kind}" style="width: calc({share:g}% - 7em * {share / 100:g})"></div>{shown}'
