"""What `explain` and `bench` found, as text for a terminal and as an HTML page that needs no network."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_COLUMNS, _BAR_COLUMNS = 110, 40
_STYLE = """
  :root { color-scheme: light dark; --text: #1f2328; --note: #59636e; --page: #ffffff; --band: #f3f5f7;
          --line: #d1d9e0; --bar: #0969da; --limit: #bc4c00; }
  @media (prefers-color-scheme: dark) { :root { --text: #f0f6fc; --note: #a8b1bb; --page: #0d1117; --band: #161b22;
          --line: #3d444d; --bar: #58a6ff; --limit: #f0883e; } }
  body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--text); background: var(--page);
         max-width: 960px; margin: 0 auto; padding: 24px 20px 48px; }
  h1 { font-size: 22px; margin: 0 0 4px; }
  h2 { font-size: 16px; margin: 28px 0 6px; }
  p { margin: 4px 0; }
  .note { color: var(--note); font-size: 13px; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th { color: var(--note); font-weight: 600; font-size: 13px; }
  th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
  th.number, td.number { text-align: right; white-space: nowrap; }
  .bars { display: grid; grid-template-columns: max-content 1fr; gap: 6px 14px; align-items: center; }
  .track { background: var(--band); border-radius: 4px; }
  .bar { background: var(--bar); border-radius: 4px; min-width: 2px; height: 22px; display: flex; align-items: center; }
  .bar span { white-space: nowrap; margin-left: calc(100% + 8px); }
  .long span { margin-left: auto; margin-right: 8px; color: var(--page); }
  .limit { background: var(--limit); }
  .verdict { background: var(--band); border-left: 4px solid var(--limit); padding: 8px 14px; margin: 12px 0; }
"""


def _wrapped(text: str) -> list[str]:
    """Lines that a terminal holds, indented; what continues a line is indented further."""
    indent = " " * (2 + len(text) - len(text.lstrip()))
    return textwrap.wrap(text.strip(), _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ")


class Table(NamedTuple):
    """Rows under a head.

    Attributes:
        title: above it.
        head: names of the columns.
        rows: their cells. Columns whose name begins with a space hold numbers, and are aligned to the right.
        note: below it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def as_text(self) -> str:
        table = [self.head, *self.rows]
        widths = [max(len(row[column].strip()) for row in table) for column in range(len(self.head))]
        lines = []
        for row in table:
            cells = zip(row, widths, self.head, strict=True)
            aligned = [f"{cell.strip():{'>' if name[0] == ' ' else '<'}{width}}" for cell, width, name in cells]
            lines.append(f"  {'  '.join(aligned)}".rstrip())
        return "\n".join([self.title, *lines, *_wrapped(self.note)])

    def as_html(self) -> str:
        kinds = [' class="number"' if name[0] == " " else "" for name in self.head]
        head, *rows = [
            "".join(f"<{tag}{kind}>{escape(cell.strip())}</{tag}>" for cell, kind in zip(row, kinds, strict=True))
            for tag, row in (("th", self.head), *(("td", row) for row in self.rows))
        ]
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        return f'<div class="scroll"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


class Bars(NamedTuple):
    """Numbers, and how large they are beside each other.

    Attributes:
        title: above them, with their unit.
        values: (name, number).
        limit: the name that stands out; "" for none.
        digits: behind the point.
        note: below them.
    """

    title: str
    values: Sequence[tuple[str, float]]
    limit: str = ""
    digits: int = 0
    note: str = ""

    def _shares(self) -> list[tuple[str, str, float]]:
        largest = max(value for _, value in self.values)
        return [(name, f"{value:,.{self.digits}f}", value / largest) for name, value in self.values]

    def as_text(self) -> str:
        width = max(len(name) for name, _ in self.values)
        lines = [self.title]
        for name, number, share in self._shares():
            bar = "#" * max(1, round(_BAR_COLUMNS * share))
            lines.append(f"  {name:{width}}  {bar} {number}{'  <- the limit' if name == self.limit else ''}")
        return "\n".join([*lines, *_wrapped(self.note)])

    def as_html(self) -> str:
        rows = []
        for name, number, share in self._shares():
            kind = "bar" + (" limit" if name == self.limit else "") + (" long" if share > 0.6 else "")
            bar = f'<div class="{kind}" style="width: {100 * share:.2f}%"><span>{number}</span></div>'
            rows.append(f'<div>{escape(name)}</div><div class="track">{bar}</div>')
        return '<div class="bars">\n' + "\n".join(rows) + "\n</div>"


class Text(NamedTuple):
    """Lines as they are."""

    title: str
    lines: Sequence[str]
    note: str = ""

    def as_text(self) -> str:
        return "\n".join([self.title, *(short for line in self.lines for short in _wrapped(line))])

    def as_html(self) -> str:
        return "".join(f"<p>{escape(line)}</p>\n" for line in self.lines)


class Report(NamedTuple):
    """A page.

    Attributes:
        title: what was looked at.
        about: lines below it.
        verdict: the answer; "" for none.
        parts: in order.
    """

    title: str
    about: Sequence[str]
    verdict: str
    parts: Sequence[Table | Bars | Text]

    def as_text(self) -> str:
        """For a terminal."""
        head = "\n".join([self.title, *(f"  {line}" for line in self.about)])
        verdict = "\n".join(line.strip() for line in _wrapped(self.verdict))
        return "\n\n".join([head, *(part.as_text() for part in self.parts), verdict]).rstrip()

    def as_html(self) -> str:
        """A page of its own, for light and dark."""
        about = "".join(f'<p class="note">{escape(line)}</p>\n' for line in self.about)
        verdict = f'<p class="verdict">{escape(self.verdict)}</p>\n' if self.verdict else ""
        parts = "\n".join(
            f"<h2>{escape(part.title)}</h2>\n{part.as_html()}"
            + (f'\n<p class="note">{escape(part.note)}</p>' if part.note else "")
            for part in self.parts
        )
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
            f"<body>\n<h1>{escape(self.title)}</h1>\n{about}{verdict}{parts}\n</body>\n</html>\n"
        )
