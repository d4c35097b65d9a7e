"""Write docs/parity.md: how close the kernels come to stock torchvision, operation by operation.

python docs/made_by/update_parity.py [NAME ...] [--all] [--device cuda]

Measures the rows that the page lacks, those whose promise or number of values is another one now, and those of the
operations that are named, as those of a kernel that was changed; all other rows stay. `--all` measures every row, and
what the page says of other processors. Without a device the kernels run under Triton's interpreter: all of it takes
some minutes.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # the comparison itself

if TYPE_CHECKING:
    from image.parity import Parity, Promise

PAGE = ROOT / "docs" / "parity.md"
Images = Sequence[tuple[str, int, int]]  # mode, height, width
IMAGES = (("RGB", 11, 17), ("L", 9, 1), ("RGB", 1, 13), ("RGB", 26, 35))
LARGE_IMAGES = (*IMAGES, ("RGB", 375, 500), ("L", 600, 801))
SMALL_IMAGES = (("RGB", 11, 17), ("RGB", 26, 35))
VARIABLES = {
    f"{capability}, {mkl}": {"ATEN_CPU_CAPABILITY": capability, "MKL_CBWR": mkl}
    for capability in ("default", "avx2", "avx512")
    for mkl in ("COMPATIBLE", "AVX2")
}
SETTINGS = tuple(VARIABLES)

_PROCESSORS = "## Other processors"
PROMISES = Path(__file__).with_name("parity_promises.md")


Row = tuple[str, str]  # an operation, and what it is compared with


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="an operation to measure again, as the page names it")
    parser.add_argument("--all", action="store_true", help="measure everything again, also for other processors")
    parser.add_argument("--device", default="cpu", help="where the kernels run; on the CPU they are interpreted")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        text, measured, broken = parity_page(arguments.device, arguments.names, arguments.all)
    except ValueError as error:
        parser.error(str(error))
    PAGE.write_text(text)
    print("\n".join(map(str, broken)) or f"wrote {PAGE}: {measured} rows were measured")
    return int(bool(broken))


def parity_page(device: str, names: Sequence[str] = (), everything: bool = False) -> tuple[str, int, list[object]]:
    """Return the text of docs/parity.md, how many rows were measured for it, and those that break their promise.

    Raises:
        ValueError: the page has no operation of one of the names.
    """
    from image.parity import HEADER, in_order, lines_of

    images, page = IMAGES if device == "cpu" else LARGE_IMAGES, PAGE.read_text()
    plan = measure_all(device, images, rows=frozenset())
    if unknown := [name for name in names if not any(is_named(row, name) for row in plan.planned)]:
        raise ValueError(f"no operation of the page is named {unknown}; take the name in its first column")
    before = {(operation, reference): line for line, (operation, reference, *_) in _cells(page).items()}
    stays = {} if everything else {row: before[row] for row in plan.planned if row in before}
    stays = {row: line for row, line in stays.items() if _is_of(line, *plan.planned[row])}
    stays = {row: line for row, line in stays.items() if not any(is_named(row, name) for name in names)}
    parity = measure_all(device, images, rows=frozenset(plan.planned.keys() - stays.keys()))
    processors = {setting: measure_all(device, SMALL_IMAGES, setting) for setting in SETTINGS if everything}
    now = _where(device, images)
    first = _environment(page) if stays else now
    elsewhere = _elsewhere(page, set(stays))
    if first != now:
        elsewhere[now] = sorted([*elsewhere.get(now, ()), *(_label(row) for row in plan.planned if row not in stays)])
    lines = [
        "# How close the kernels come to stock torchvision",
        "",
        PROMISES.read_text(),
        "## Measured",
        "",
        "Written by `python docs/made_by/update_parity.py`, which runs operations through the kernels",
        f"and in stock code, with random arguments: {first}",
        "",
        "Differences are steps of a byte for bytes, and of the range of values for float32.",
        "`tests/kernels/interpreted/test_parity.py` holds the kernels to the promises.",
        "",
        *HEADER,
        *in_order({**stays, **lines_of(parity.rows)}),
    ]
    lines += [f"\n{_ELSEWHERE}{place}\n{'; '.join(rows)}." for place, rows in elsewhere.items() if rows]
    if plan.fallbacks:
        calls = "; ".join(map(_label, plan.fallbacks))
        lines += ["", f"These fall back to stock torchvision, as the fallback report says: {calls}."]
    lines += ["", *(_processor_lines(processors) if processors else [_PROCESSORS + _section(_PROCESSORS)])]
    broken = [*parity.broken_promises(), *chain.from_iterable(each.broken_promises() for each in processors.values())]
    return "\n".join(lines).rstrip() + "\n", len(parity.rows), broken


def is_named(row: Row, name: str) -> bool:
    """Return whether a row is one of an operation: of all of its calls, or of the one call that the name says."""
    return row[0] == name or row[0].startswith(f"{name}, ")


# --- what the page says


def _cells(page: str) -> dict[str, list[str]]:
    """{a line of the table: its cells}."""
    table = page.partition("## Measured")[2].partition(_PROCESSORS)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return {line: line.strip("| ").split(" | ") for line in lines}


def _is_of(line: str, promise: Promise, values: int) -> bool:
    """Return whether a line of the table is of a promise and of so many values."""
    from image.parity import promise_text

    _, _, text, _, _, compared = line.strip("| ").split(" | ")
    return (text, compared) == (promise_text(promise), f"{values:,}")


_ELSEWHERE = "These rows were measured with "
_AT = "with random arguments: "


def _environment(page: str) -> str:
    """Return with what the page says that it was measured."""
    return page.partition(_AT)[2].partition("\n\n")[0].replace("\n", " ")


def _elsewhere(page: str, stays: set[Row]) -> dict[str, list[str]]:
    """{with what some rows were measured: those of them that stay}, where it differs from what the page says first."""
    found = {}
    for part in page.split(f"\n{_ELSEWHERE}")[1:]:
        place, _, rest = part.partition("\n")
        labels = set(rest.partition("\n")[0].rstrip(".").split("; "))
        found[place] = [label for label in sorted(map(_label, stays)) if label in labels]
    return found


def _label(row: Row) -> str:
    return f"{row[0]} ({row[1]})"


def _where(device: str, images: Images) -> str:
    """Return with what rows are measured now."""
    import torch
    import torchvision

    from torch_sink.cli.machine import cpu_name

    kernels = "Triton's interpreter" if device == "cpu" else torch.cuda.get_device_name(device)
    sizes = ", ".join(f"{width} x {height} ({mode})" for mode, height, width in images)
    releases = f"torch {_release(torch)}, torchvision {_release(torchvision)}"
    return f"{releases}, {cpu_name()}; kernels run by {kernels}, on images of {sizes} pixels."


def _section(title: str) -> str:
    """What the page says under its last title."""
    return PAGE.read_text().partition(title)[2]


# --- measuring


def measure_all(device: str, images: Images, setting: str | None = None, rows: frozenset[Row] | None = None) -> Parity:
    """The table for all references, in processes that begin with some environment variables; by default all rows."""
    from image.examples import REFERENCES
    from image.parity import Parity

    before = dict(os.environ)
    os.environ.update(VARIABLES[setting] if setting else {})
    try:
        workers = min(os.cpu_count() or 1, len(REFERENCES)) if device == "cpu" else 1
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(_measured, REFERENCES, repeat(images), repeat(device), repeat(rows)))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return Parity(
        list(chain.from_iterable(part.rows for part in parts)),
        list(chain.from_iterable(part.fallbacks for part in parts)),
        set().union(*(part.recorded for part in parts)),
        dict(chain.from_iterable(part.planned.items() for part in parts)),
    )


def _processor_lines(processors: dict[str, Parity]) -> list[str]:
    lines = [
        _PROCESSORS,
        "",
        "torch and MKL choose their code by the processor; these variables make them choose as on another one.",
        "`tests/kernels/test_processors.py` measures them again.",
        "",
        "| ATEN_CPU_CAPABILITY, MKL_CBWR | operations | promises kept | equal bits | largest difference of float32 |",
        "|---|---:|---:|---:|---:|",
    ]
    for setting, parity in processors.items():
        kept, same = len(parity.rows) - len(parity.broken_promises()), sum(row.share == 1 for row in parity.rows)
        on_floats = [row for row in parity.rows if "float32" in row.reference and "NEAREST" not in row.operation]
        largest = max(row.largest for row in on_floats)
        lines.append(f"| {setting} | {len(parity.rows)} | {kept} | {same} | {largest:.2g} |")
    return lines


def _measured(reference: str, images: Images, device: str, rows: frozenset[Row] | None) -> Parity:
    from image.parity import ImageKind, measure

    kinds = [ImageKind(*image) for image in images]
    return measure(kinds, references=[reference], device=device, chosen=functools.partial(_is_chosen, rows))


def _is_chosen(rows: frozenset[Row] | None, operation: str, reference: str, promise: Promise) -> bool:
    return rows is None or (operation, reference) in rows


def _release(module: object) -> str:
    return ".".join(str(vars(module)["__version__"]).split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
