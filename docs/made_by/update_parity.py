"""Write docs/parity.md: how close the kernels come to stock torchvision, operation by operation.

python docs/made_by/update_parity.py [--device cuda] [--table]

Without a device the kernels run under Triton's interpreter, which takes some minutes. `--table` measures the table
alone and leaves what the page says of other processors, for a change that adds or renames calls.
"""

from __future__ import annotations

import argparse
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
    from image.parity import Parity

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="where the kernels run; on the CPU they are interpreted")
    parser.add_argument("--table", action="store_true", help="leave what the page says of other processors")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    text, broken = parity_page(arguments.device, arguments.table)
    PAGE.write_text(text)
    print("\n".join(map(str, broken)) or f"wrote {PAGE}")
    return int(bool(broken))


def parity_page(device: str, table_alone: bool = False) -> tuple[str, list[object]]:
    """Return the text of docs/parity.md, and the rows that break their promise."""
    import torch
    import torchvision
    from image.parity import markdown

    from torch_sink.cli.machine import cpu_name

    images = IMAGES if device == "cpu" else LARGE_IMAGES
    parity = measure_all(device, images)
    processors = {setting: measure_all(device, SMALL_IMAGES, setting) for setting in SETTINGS if not table_alone}
    where = "Triton's interpreter" if device == "cpu" else torch.cuda.get_device_name(device)
    sizes = ", ".join(f"{width} x {height} ({mode})" for mode, height, width in images)
    lines = [
        "# How close the kernels come to stock torchvision",
        "",
        PROMISES.read_text(),
        "## Measured",
        "",
        "Written by `python docs/made_by/update_parity.py`, which runs every operation through the kernels",
        f"and in stock code, with random arguments: torch {_release(torch)}, torchvision {_release(torchvision)},",
        f"{cpu_name()}; kernels run by {where}, on images of {sizes} pixels.",
        "",
        "Differences are steps of a byte for bytes, and of the range of values for float32.",
        "`tests/kernels/interpreted/test_parity.py` holds the kernels to the promises.",
        "",
        markdown(parity),
    ]
    if parity.fallbacks:
        calls = "; ".join(f"{operation} ({reference})" for operation, reference in parity.fallbacks)
        lines += ["", f"These fall back to stock torchvision, as the fallback report says: {calls}."]
    lines += ["", *(_processor_lines(processors) if processors else [_PROCESSORS + _section(_PROCESSORS)])]
    broken = [*parity.broken_promises(), *chain.from_iterable(each.broken_promises() for each in processors.values())]
    return "\n".join(lines).rstrip() + "\n", broken


def _section(title: str) -> str:
    """What the page says under its last title."""
    return PAGE.read_text().partition(title)[2]


def measure_all(device: str, images: Images, setting: dict[str, str] | None = None) -> Parity:
    """The table for all references, in processes that begin with some environment variables."""
    from image.parity import Parity

    from torch_sink.image.core.examples import REFERENCES

    before = dict(os.environ)
    os.environ.update(VARIABLES[setting] if setting else {})
    try:
        workers = min(os.cpu_count() or 1, len(REFERENCES)) if device == "cpu" else 1
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(_measured, REFERENCES, repeat(images), repeat(device)))
    finally:
        os.environ.clear()
        os.environ.update(before)
    return Parity(
        list(chain.from_iterable(part.rows for part in parts)),
        list(chain.from_iterable(part.fallbacks for part in parts)),
        set().union(*(part.recorded for part in parts)),
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


def _measured(reference: str, images: Images, device: str) -> Parity:
    from image.parity import ImageKind, measure

    return measure([ImageKind(*image) for image in images], references=[reference], device=device)


def _release(module: object) -> str:
    return ".".join(str(vars(module)["__version__"]).split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
