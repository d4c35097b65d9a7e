"""Count what the image backend replaces in other packages, by reason, in docs/inside/image_backend.md.

python docs/made_by/update_places.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torchvision

from torch_sink.image.reroute import rows_by_reason

PAGE = Path(__file__).resolve().parents[1] / "inside" / "image_backend.md"
BEGIN, END = "<!-- places: written by docs/made_by/update_places.py -->", "<!-- end of places -->"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the table is out of date")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    wanted = with_table(page)
    if not arguments.check:
        PAGE.write_text(wanted)
    elif page != wanted:
        print("the table of places is out of date: run python docs/made_by/update_places.py", file=sys.stderr)
    return int(arguments.check and page != wanted)


def with_table(page: str) -> str:
    """Return the page with the table of the releases at hand."""
    before, _, rest = page.partition(BEGIN)
    return before + "\n".join([BEGIN, *table(), END]) + rest.partition(END)[2]


def table() -> list[str]:
    """Return the lines of the table."""
    counts = {reason: len([*found]) for reason, found in rows_by_reason()}
    lines = [f"With torchvision {release()} these are {sum(counts.values())} places:", "", "| places | reason |"]
    return [*lines, "| ---: | --- |", *(f"| {count} | {reason} |" for reason, count in counts.items() if count)]


def release() -> str:
    """Return the first two numbers of torchvision's version."""
    return ".".join(torchvision.__version__.split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
