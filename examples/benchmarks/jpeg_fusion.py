"""Write into docs/inside/jpeg.md what making the colors inside the resize would save and cost; --check only compares.

    python examples/benchmarks/jpeg_fusion.py [--check]

An estimate, from sizes and formulas. The decoder writes the RGB pixels of a crop, and the horizontal pass of the resize
reads them. A resize that made the colors itself would save both, and make them again for each of its taps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torchvision.transforms import RandomResizedCrop

from report_tables import insert_between

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inside" / "jpeg.md"
BEGIN = "<!-- table: written by examples/benchmarks/jpeg_fusion.py -->\n"
END = "<!-- end of table -->"
PHOTO = (500, 375)  # width and height in pixels, the usual size of ImageNet
OUTPUT = 224
CROPS = 1000
CHANNELS = 3
# For one pixel, in the formulas of `color.py`: loads, additions, multiplications, shifts, comparisons. Addresses are
# left aside. One component takes 4 loads and 12 operations from 2 x 2 samples, or a load; the colors take 19.
FULL_CHROMA, HALVED_CHROMA = 3 + 19, 1 + 2 * (4 + 12) + 19
# Instructions of a thread a second, and bytes a second: data sheets' multiprocessors x 128 x clock, and bandwidth.
DEVICES = {
    "A100 80GB": (108 * 128 * 1.41e9, 2.04e12),
    "H200": (132 * 128 * 1.78e9, 4.8e12),
    "B200": (148 * 128 * 1.85e9, 8.0e12),
}


def taps(size: int) -> int:
    """How many pixels all outputs of a resize from `size` pixels to OUTPUT read, by Pillow's bilinear filter."""
    scale = size / OUTPUT
    support = max(scale, 1.0)
    total = 0
    for place in range(OUTPUT):
        center = (place + 0.5) * scale
        total += min(int(center + support + 0.5), size) - max(int(center - support + 0.5), 0)
    return total


def averages() -> tuple[float, float]:
    """Of the crops of training: their pixels, and how many the taps of the horizontal pass read."""
    torch.manual_seed(0)
    photo = torch.empty(1, PHOTO[1], PHOTO[0])
    crops = [RandomResizedCrop.get_params(photo, [0.08, 1.0], [3 / 4, 4 / 3])[2:] for _ in range(CROPS)]
    pixels = sum(height * width for height, width in crops) / CROPS
    return pixels, sum(height * taps(width) for height, width in crops) / CROPS


def table() -> str:
    """The lines between the two markers."""
    pixels, reads = averages()
    lines = [
        f"Crops of `RandomResizedCrop({OUTPUT})` from {PHOTO[0]} x {PHOTO[1]} pixels have {pixels / 1000:.0f} thousand "
        "pixels on average, and",
        f"the taps of the horizontal pass read each of them {reads / pixels:.1f} times.",
        "",
        f"It would not move {2 * CHANNELS * pixels / 1000:.0f} kB, and execute "
        f"{(reads - pixels) * FULL_CHROMA / 1e6:.1f} million instructions more for 4:4:4,",
        f"{(reads - pixels) * HALVED_CHROMA / 1e6:.1f} million for 4:2:0. What a device could execute while it moves "
        "as much:",
        "",
        "| device | million instructions |",
        "|---|---|",
    ]
    saved = 2 * CHANNELS * pixels
    for name, (instructions, bandwidth) in DEVICES.items():
        lines.append(f"| {name} | {saved / bandwidth * instructions / 1e6:.1f} |")
    return "\n".join(lines) + "\n"


def page_with_table(text: str) -> str:
    """The page's text with a new table between its two markers."""
    return insert_between(text, BEGIN, END, table())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the table is out of date")
    old = PAGE.read_text()
    new = page_with_table(old)
    if parser.parse_args().check:
        print(f"docs/inside/jpeg.md is {'up to date' if new == old else 'out of date'}", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
