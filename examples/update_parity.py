"""Write docs/parity.md: how close the kernels come to stock torchvision, operation by operation.

python examples/update_parity.py [--device cuda]

Without a device the kernels run under Triton's interpreter, which takes some minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_sink.cli.parity import ImageKind, Parity

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parity.md"
# mode, height, width
IMAGES = (("RGB", 11, 17), ("L", 9, 1), ("RGB", 1, 13), ("RGB", 26, 35))
LARGE_IMAGES = (*IMAGES, ("RGB", 375, 500), ("L", 600, 801))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="where the kernels run; on the CPU they are interpreted")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    text, broken = parity_page(arguments.device)
    PAGE.write_text(text)
    print("\n".join(map(str, broken)) or f"wrote {PAGE}")
    return int(bool(broken))


def parity_page(device: str) -> tuple[str, list[object]]:
    """Return the text of docs/parity.md, and the rows that break their promise."""
    import torch
    import torchvision

    from torch_sink.cli.parity import ImageKind, Parity, markdown
    from torch_sink.cli.parity_calls import REFERENCES

    images = [ImageKind(*image) for image in (IMAGES if device == "cpu" else LARGE_IMAGES)]
    workers = min(os.cpu_count() or 1, len(REFERENCES)) if device == "cpu" else 1
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(_measured, REFERENCES, repeat(images), repeat(device)))
    parity = Parity(
        list(chain.from_iterable(part.rows for part in parts)),
        list(chain.from_iterable(part.fallbacks for part in parts)),
        set().union(*(part.recorded for part in parts)),
    )
    where = "Triton's interpreter" if device == "cpu" else torch.cuda.get_device_name(device)
    releases = f"torch {_release(torch)}, torchvision {_release(torchvision)}, x86-64"
    lines = [
        "# How close the kernels come to stock torchvision",
        "",
        "Written by `python examples/update_parity.py`, which runs every operation through the kernels and in stock",
        f"code, with random arguments: {releases};",
        f"kernels run by {where}, on images of {', '.join(map(str, images))} pixels.",
        "",
        "What an operation is compared with depends on what it is called on: Pillow images, or the tensors of",
        "`transforms` (v1) and `transforms.v2`, whose formulas differ. Differences are steps of a byte for bytes, and",
        "of the range of values for float32. Where batches are executed in stock code, on a machine without an",
        "accelerator, every operation gives equal bits. `tests/kernels/interpreted/test_parity.py` holds the kernels",
        "to the promises.",
        "",
        markdown(parity),
    ]
    if parity.fallbacks:
        calls = "; ".join(f"{operation} ({reference})" for operation, reference in parity.fallbacks)
        lines += ["", f"In stock code, as the fallback report says: {calls}."]
    return "\n".join(lines) + "\n", list(parity.broken_promises())


def _measured(reference: str, images: list[ImageKind], device: str) -> Parity:
    from torch_sink.cli.parity import measure

    return measure(images, references=[reference], device=device)


def _release(module: object) -> str:
    return ".".join(str(vars(module)["__version__"]).split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
