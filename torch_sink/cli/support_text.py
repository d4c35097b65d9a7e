"""The support table as text."""

from __future__ import annotations

from collections.abc import Sequence

from torch_sink.image.support import SupportRow, support_table

LEGEND = (
    '"kernel": recorded, and made on the device. "exact fallback": stock torchvision runs on the CPU, and '
    '`fallback_report()` counts it. "passes through": nothing to compute. "not applicable": torchvision refuses it.'
)
_TITLES = ("transform or functional", "on Pillow images", "on tensors", "limits")


def format_support(markdown: bool = False) -> str:
    """The support table, with columns for a terminal or as a Markdown table.

    Args:
        markdown: as a Markdown table.
    """
    rows = support_table()
    return markdown_table(rows) if markdown else _columns(rows)


def markdown_table(rows: Sequence[SupportRow]) -> str:
    """Rows of the support table as a Markdown table."""
    lines = [_line(_TITLES), _line(["---"] * len(_TITLES))]
    lines += [_line((f"`{row.name}`", *row[1:])) for row in rows]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _columns(rows: Sequence[SupportRow]) -> str:
    table = [_TITLES, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_TITLES))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, "", LEGEND])
