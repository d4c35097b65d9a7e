"""Write docs/support.md, the table of how each of torchvision's transforms runs; with --check only compare.

python examples/update_docs.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torchvision

from torch_sink.cli.support_text import LEGEND, markdown_table
from torch_sink.image.support import support_table

SUPPORT = Path(__file__).resolve().parents[1] / "docs" / "support.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the table is out of date")
    arguments = parser.parse_args()
    text = support_page()
    if not arguments.check:
        SUPPORT.parent.mkdir(exist_ok=True)
        SUPPORT.write_text(text)
        return 0
    if SUPPORT.read_text() == text:
        return 0
    print("docs/support.md is out of date: run python examples/update_docs.py", file=sys.stderr)
    return 1


def support_page() -> str:
    """Return the text of docs/support.md."""
    lines = [
        "# How torchvision's transforms run",
        "",
        f"torchvision {release()}, x86-64; written by `python examples/update_docs.py`, which tries every entry.",
        "`python -m torch_sink support` prints the table for what is installed.",
        "",
        LEGEND,
        "",
        markdown_table(support_table()),
    ]
    return "\n".join(lines) + "\n"


def release() -> str:
    """Return the first two numbers of torchvision's version."""
    return ".".join(torchvision.__version__.split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
