"""Try each of torchvision's transforms, and write how it runs to the package's data and to docs/support.md.

python docs/made_by/update_support.py [--check]

The data, `torch_sink/image/support.tsv`, have a line for each row, and for each release of torchvision that changed it.
A row stays as it is where the trials find the same; another one begins with the installed release, and if an earlier
one is known to have brought it, `since` can be set to that: new lines are printed. The page is about the newest release
that is tested, and only written there. With `--check` both are compared and stay.
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torchvision
from PIL import Image
from torchvision.io import ImageReadMode, decode_image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # the trials

from image.trials.support import tried_rows

import torch_sink
from torch_sink.cli import SUPPORT_COLUMNS, SUPPORT_LEGEND
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.support import SupportRow, support_table
from torch_sink.releases import NEWEST, numbers_of

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "docs" / "support.md"
DATA = ROOT / "torch_sink" / "image" / "support.tsv"
COLUMNS = ("name", "since", "on_pillow", "on_tensor", "limits")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the table is out of date")
    arguments = parser.parse_args()
    before = DATA.read_text() if DATA.exists() else ""
    data = data_with(tried_rows(), before, release())
    if not arguments.check:
        DATA.write_text(data)
        new = [line for line in data.splitlines()[1:] if line not in before.splitlines()]
        print(*(new or ["no row changed"]), sep="\n")  # their `since`, and lines of releases in between, may be wrong
        if is_newest():
            SUPPORT.write_text(support_page())
        return 0
    if data == before and (not is_newest() or SUPPORT.read_text() == support_page()):
        return 0
    print("the support table is out of date: run python docs/made_by/update_support.py", file=sys.stderr)
    return 1


def is_newest() -> bool:
    """Return whether torchvision's release is the one that the page is about."""
    return release() == NEWEST["torchvision"]


def data_with(rows: Sequence[SupportRow], before: str, since: str) -> str:
    """Return the text of the data, with the rows of one release of torchvision, e.g. "0.29"."""
    known: dict[str, dict[str, list[str]]] = {}  # {name: {release: the other cells}}
    for line in before.splitlines()[1:]:
        name, begun, *cells = line.split("\t")
        known.setdefault(name, {})[begun] = cells
    for name, *cells in rows:
        held, made = known.setdefault(name, {}), list(filter(None, cells))  # most have no limits
        if held_by(held, since) != made:
            held[since] = made
    lines = [COLUMNS]
    for name in sorted(known, key=lambda name: (".functional." in name, name)):
        last = None
        for begun in sorted(known[name], key=numbers_of):
            cells = known[name][begun]
            lines += [(name, begun, *cells)] if cells != last else []
            last = cells
    return "".join("\t".join(line) + "\n" for line in lines)


def held_by(cells_of: Mapping[str, list[str]], release: str) -> list[str] | None:
    """Return the cells of a row that hold for a release, the last ones that begin with it or before it."""
    begun = [each for each in cells_of if numbers_of(each) <= numbers_of(release)]
    return cells_of[max(begun, key=numbers_of)] if begun else None


def support_page() -> str:
    """Return the text of docs/support.md."""
    lines = [
        "# How torchvision's transforms run",
        "",
        f"torchvision {release()}; written by `python docs/made_by/update_support.py`, which tries all.",
        "`python -m torch_sink support` prints the table for the torchvision that is installed;",
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
