"""Write docs/support.md, the table of how each of torchvision's transforms runs; with --check only compare.

python docs/made_by/update_support.py [--check]
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

import torch_sink
from torch_sink.cli import SUPPORT_COLUMNS, SUPPORT_LEGEND
from torch_sink.image.decode.source import EncodedSource
from torch_sink.image.support import support_table

SUPPORT = Path(__file__).resolve().parents[1] / "support.md"


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
    print("docs/support.md is out of date: run python docs/made_by/update_support.py", file=sys.stderr)
    return 1


def support_page() -> str:
    """Return the text of docs/support.md."""
    lines = [
        "# How torchvision's transforms run",
        "",
        f"torchvision {release()}, x86-64 with AVX2; written by `python docs/made_by/update_support.py`,",
        "which tries all.",
        "`python -m torch_sink support` prints the table for the releases and the processor at hand;",
        "`python -m torch_sink support ColorJitter blur` prints the rows whose names contain one of these.",
        "",
        "Without AVX2 stock torchvision resizes uint8 tensors through float32; last bits then depend on the processor.",
        "That is recorded; solarize, posterize, autocontrast, equalize and gamma behind it are exact fallbacks there.",
        "",
        SUPPORT_LEGEND,
        "",
        *(f"| {' | '.join(cells)} |" for cells in support_lines()),
        "",
        "## Files decoded to tensors",
        "",
        "`read_image`, `decode_image` and `decode_jpeg` of `torchvision.io`, by the mode that is asked for. What",
        'follows records, but for "exact fallback": an ordinary tensor, which `fallback_report()` counts.',
        "",
        *decoder_table(),
    ]
    return "\n".join(lines) + "\n"


def support_lines() -> Iterator[Sequence[str]]:
    """Yield the cells of each line of the support table."""
    yield SUPPORT_COLUMNS
    yield ["---"] * len(SUPPORT_COLUMNS)
    for name, *cells in support_table():
        yield [f"`{name}`", *cells]


MODES = (ImageReadMode.UNCHANGED, ImageReadMode.RGB, ImageReadMode.GRAY)


def decoder_table() -> list[str]:
    """Return the lines of a table: where files of each kind are decoded."""
    photo = Image.radial_gradient("L").resize((32, 24)).convert("RGB")
    kinds = {
        "JPEG": encoded(photo, "JPEG"),
        "JPEG, gray": encoded(photo.convert("L"), "JPEG"),
        "JPEG, progressive": encoded(photo, "JPEG", progressive=True),
        "JPEG, CMYK": encoded(photo.convert("CMYK"), "JPEG"),
        "PNG, WebP, GIF": encoded(photo, "PNG"),
        "PNG, WebP with alpha": encoded(photo.convert("RGBA"), "PNG"),
    }
    lines = [f"| file | {' | '.join(mode.name for mode in MODES)} |", "| --- | --- | --- | --- |"]
    with torch_sink.image_backend("device", device="meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, data in kinds.items():
            lines.append(f"| {kind} | {' | '.join(where_decoded(data, mode) for mode in MODES)} |")
    return lines


def encoded(image: Image.Image, kind: str, **options: object) -> torch.Tensor:
    """Return a file as a tensor of bytes."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def where_decoded(data: torch.Tensor, mode: ImageReadMode) -> str:
    """Return what a file becomes under the backend."""
    image = decode_image(data, mode)
    if type(image) is torch.Tensor:
        return "exact fallback"
    return (
        "on the device" if isinstance(image.lazy_recording.source, EncodedSource) else "in the worker, by torchvision"
    )


def release() -> str:
    """Return the first two numbers of torchvision's version."""
    return ".".join(torchvision.__version__.split(".")[:2])


if __name__ == "__main__":
    sys.exit(main())
