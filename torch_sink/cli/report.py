"""What `explain` and `bench` found, as text for a terminal and as an HTML page that needs no network."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

_COLUMNS, _BAR_COLUMNS = 110, 40


def _wrapped(text: str) -> list[str]:
    """Lines that a terminal holds, indented; what continues a line is indented further."""
    indent = " " * (2 + len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ")


def _paragraphs(lines: Sequence[str], kind: str = "") -> str:
    return "\n".join(f"<p{f' class={kind}' if kind else ''}>{escape(line)}</p>" for line in lines if line)


class Table(NamedTuple):
    """Rows under a head; columns whose name begins with a space hold numbers, and are aligned to the right."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def as_text(self) -> str:
        columns = [[cell.strip() for cell in column] for column in zip(self.head, *self.rows, strict=True)]
        aligned = []
        for name, column in zip(self.head, columns, strict=True):
            width = max(map(len, column))
            aligned.append([cell.rjust(width) if name[0] == " " else cell.ljust(width) for cell in column])
        return "\n".join(f"  {'  '.join(row)}".rstrip() for row in zip(*aligned, strict=True))

    def as_html(self) -> str:
        kinds = [" class=number" if name[0] == " " else "" for name in self.head]
        rows = [
            "".join(f"<{tag}{kind}>{escape(cell.strip())}</{tag}>" for cell, kind in zip(row, kinds, strict=True))
            for tag, row in (("th", self.head), *(("td", row) for row in self.rows))
        ]
        return '<div class="scroll"><table>\n<tr>' + "</tr>\n<tr>".join(rows) + "</tr>\n</table></div>"


class Bars(NamedTuple):
    """Numbers by their names, and how large they are beside each other; `limit` is the name that stands out."""

    title: str
    values: Sequence[tuple[str, float]]
    limit: str = ""
    digits: int = 0  # behind the point
    note: str = ""

    def _shares(self) -> list[tuple[str, str, float]]:
        largest = max(value for _, value in self.values)
        return [(name, f"{value:,.{self.digits}f}", value / largest) for name, value in self.values]

    def as_text(self) -> str:
        width = max(len(name) for name, _ in self.values)
        return "\n".join(
            f"  {name:{width}}  {'#' * max(1, round(_BAR_COLUMNS * share))} {number}"
            + "  <- the limit" * (name == self.limit)
            for name, number, share in self._shares()
        )

    def as_html(self) -> str:
        rows = []
        for name, number, share in self._shares():
            kind = "bar" + " limit" * (name == self.limit) + " long" * (share > 0.6)
            bar = f'<div class="{kind}" style="width: {100 * share:.2f}%"><span>{number}</span></div>'
            rows.append(f'<div>{escape(name)}</div><div class="track">{bar}</div>')
        return '<div class="bars">\n' + "\n".join(rows) + "\n</div>"


class Text(NamedTuple):
    """Lines as they are."""

    title: str
    lines: Sequence[str]
    note: str = ""

    def as_text(self) -> str:
        return "\n".join(short for line in self.lines for short in _wrapped(line))

    def as_html(self) -> str:
        return _paragraphs(self.lines)


Part = Table | Bars | Text


class Report(NamedTuple):
    """A page: what was looked at, lines about it, the answer, and its parts in order."""

    title: str
    about: Sequence[str]
    verdict: str
    parts: Sequence[Part]

    def as_text(self) -> str:
        """For a terminal."""
        head = "\n".join([self.title, *(f"  {line}" for line in self.about)])
        parts = ["\n".join([part.title, part.as_text(), *_wrapped(part.note)]) for part in self.parts]
        return "\n\n".join([head, *parts, textwrap.fill(self.verdict, _COLUMNS)])

    def as_html(self) -> str:
        """A page of its own, for light and dark."""
        body = [_paragraphs(self.about, "note"), _paragraphs([self.verdict], "verdict")]
        for part in self.parts:
            body += [f"<h2>{escape(part.title)}</h2>", part.as_html(), _paragraphs([part.note], "note")]
        page = files("torch_sink.cli").joinpath("report.html").read_text(encoding="utf-8")
        return page.replace("{{title}}", escape(self.title)).replace("{{body}}", "\n".join(body))
