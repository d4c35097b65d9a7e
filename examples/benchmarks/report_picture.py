"""The picture of docs/inside/image_backend.md: a JPEG file on its way into a batch, with figures of the results."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from report_tables import Report
from torch_sink.cli.pipelines import CROP
from worker_rows import LARGE

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "jpeg_to_batch.svg"
PIPELINE = "v1 train"
CHANNELS, FLOAT_BYTES = 3, 4
# Steps of the decoder, and the kernels that each consists of.
DECODER = {
    "Unstuff bytes": ("assign", "count unstuffed", "sum before", "unstuff"),
    "Sync lanes": ("lookup", "warm up", "compare", "round", "count"),
    "Huffman codes": ("finish", "sum dc", "add dc"),
    "DCT, colors": ("idct", "color"),
}
WIDTH, HEIGHT, MARGIN = 1000, 630, 20
STYLE = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
    .head { font-weight: 600; font-size: 16px; }
    .note { font-size: 12px; fill: #59636e; }
    .page { fill: #ffffff; }
    .band { fill: #f3f5f7; stroke: #d1d9e0; }
    .box { fill: #ffffff; stroke: #59636e; }
    .data { fill: #ddf4e4; stroke: #1a7f37; }
    .way { stroke: #0969da; stroke-width: 2; fill: none; marker-end: url(#tip); }
    .rare { stroke: #9a6700; stroke-width: 2; stroke-dasharray: 6 4; fill: none; marker-end: url(#rare-tip); }
    .tip { fill: #0969da; }
    .rare-tip { fill: #9a6700; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .note { fill: #a8b1bb; }
      .page { fill: #0d1117; }
      .band { fill: #161b22; stroke: #3d444d; }
      .box { fill: #0d1117; stroke: #a8b1bb; }
      .data { fill: #12351f; stroke: #3fb950; }
      .way { stroke: #58a6ff; }
      .rare { stroke: #d29922; }
      .tip { fill: #58a6ff; }
      .rare-tip { fill: #d29922; }
    }"""


class Box(NamedTuple):
    """A rectangle with a line of text, and smaller ones below it.

    Attributes:
        kind: of the rectangle: "box" for work, "data" for memory.
        x, y, width, height: in pixels.
        title: its first line.
        notes: the other lines.
    """

    kind: str
    x: int
    y: int
    width: int
    height: int
    title: str
    notes: tuple[str, ...] = ()

    def svg(self) -> str:
        middle, top = self.x + self.width // 2, self.y + 26
        lines = [f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" '
                 f'height="{self.height}" rx="6"/>', text(middle, top, self.title)]  # fmt: skip
        return "\n".join(lines + [text(middle, top + 19 + 16 * at, note, "note") for at, note in enumerate(self.notes)])


def text(x: int, y: int, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def way(*places: tuple[int, int], kind: str = "way") -> str:
    """An arrow through places: "way" of every batch, or "rare" for one with damaged files."""
    return f'<path class="{kind}" d="M{" L".join(f"{x} {y}" for x, y in places)}"/>'


def band(y: int, height: int, title: str, note: str) -> str:
    frame = f'<rect class="band" x="{MARGIN}" y="{y}" width="{WIDTH - 2 * MARGIN}" height="{height}" rx="10"/>'
    head = text(MARGIN + 16, y + 26, title, "head", "start")
    return "\n".join([frame, head, text(WIDTH - MARGIN - 16, y + 26, note, "note", "end")])


def row(y: int, height: int, boxes: list[tuple[str, str, tuple[str, ...]]]) -> list[Box]:
    """Boxes of one width from left to right."""
    gap, inner = 16, WIDTH - 4 * MARGIN
    width = (inner - gap * (len(boxes) - 1)) // len(boxes)
    return [
        Box(kind, 2 * MARGIN + at * (width + gap), y, width, height, title, notes)
        for at, (kind, title, notes) in enumerate(boxes)
    ]


def joined(boxes: list[Box]) -> Iterable[str]:
    """Arrows from each box to the next."""
    for one, other in pairwise(boxes):
        middle = one.y + one.height // 2
        yield way((one.x + one.width, middle), (other.x - 3, middle))


def instructions(rows: list[Report], names: Iterable[str]) -> float:
    """What some kernels execute for an image, in millions of instructions of a thread."""
    return sum(found["instructions_an_image"] for found in rows if found["name"] in set(names)) / 1e6


def picture(results: dict[str, Report]) -> str:
    """The SVG.

    Args:
        results: by the names of their files: "worker_cost", "slabs", "host_cost" and "kernels".
    """
    worker, slabs = results["worker_cost"], results["slabs"]
    cost, counts = worker["worker_cost"][f"{PIPELINE}, batch {LARGE}"], results["kernels"]["counts"]
    host = results["host_cost"]["host_cost"][PIPELINE]["pinned"]
    size = results["host_cost"]["options"]["batch"]
    file_kb = slabs["photographs"]["mean_bytes"] / 1e3
    batch_kb = CHANNELS * CROP * CROP * FLOAT_BYTES / 1e3
    lanes = counts["decoder"][counts["lanes"][str(LARGE)]]
    decoding = [(title, instructions(lanes, kernels)) for title, kernels in DECODER.items()]
    stages = instructions(counts["pipelines"], [counts["pipelines"][0]["name"]])
    shape = "\N{MULTIPLICATION SIGN}".join(map(str, (size, CHANNELS, CROP, CROP)))
    in_worker = row(70, 70, [
        ("box", "Read the file", (f"{file_kb:.0f} kB, header parsed",)),
        ("box", "Run the transforms", ("random draws; calls recorded",)),
        ("box", "Lower the calls", ("to work for kernels",)),
        ("box", "Make the Program", ("stages and launches of the batch",)),
    ])  # fmt: skip
    block = Box("data", 330, 185, 340, 62, f"One block of shared memory: {size * file_kb / 1e3:.0f} MB",
                (f"{size} files, and the arrays of the Program",))  # fmt: skip
    launch = Box("box", 240, 310, 290, 62, f"Launch: {host['us_an_image']['in all']['p50']:.1f} µs",
                 (f"{host['launches']} launches for a batch, no wait for the GPU",))  # fmt: skip
    damaged = Box("box", 565, 310, 270, 62, "Pillow decodes damaged files", ("only if the kernels found any",))
    *decoder, prologue, _, _ = on_gpu = row(482, 70, [
        *[("box", title, (f"{millions:.1f} million",)) for title, millions in decoding],
        ("box", "Prologue", ("places, weights",)),
        ("box", "Stages", ("crop, resize, ...", f"{stages:.1f} million")),
        ("data", "Batch", (shape, f"{batch_kb:.0f} kB an image")),
    ])  # fmt: skip
    last, first = in_worker[-1], on_gpu[0]
    bottom, top = damaged.y + damaged.height, first.y - 3
    pieces = [
        band(24, 132, "Data worker", f"CPU for one image: {cost['slabs_ms']['p50']:.2f} ms; "
             f"with stock torchvision {cost['stock_ms']['p50']:.2f} ms"),
        band(264, 122, "Training process", "the time is for one image of a batch"),
        band(394, 174, "GPU", "instructions of a thread for one image: "
             f"{sum(millions for _, millions in decoding) + stages:.0f} million in all"),
        *[box.svg() for box in (*in_worker, block, launch, damaged, *on_gpu)],
        *joined(in_worker), *joined(on_gpu),
        way((last.x + last.width // 2, last.y + last.height), (last.x + last.width // 2, 216), (673, 216)),
        way((430, 247), (430, 307)),
        way((330, 216), (210, 216), (210, 450), (first.x + 60, 450), (first.x + 60, top)),
        text(200, 208, f"one copy to the GPU, {file_kb:.0f} kB an image", "note", "middle"),
        way((385, 372), (385, 391)),
        way((decoder[-1].x + 60, first.y), (decoder[-1].x + 60, 450), (547, 450), (547, 341), (562, 341), kind="rare"),
        way((prologue.x + 60, bottom), (prologue.x + 60, top), kind="rare"),
        text(prologue.x + 72, 450, "their places are overwritten,", "note", "start"),
        text(prologue.x + 72, 466, "the same launches run again", "note", "start"),
        text(MARGIN, 592, _source(results), "note", "start"),
        text(MARGIN, 612, "Instructions: counted by running the compiled kernels on the CPU (docs/inside/kernels.md). "
             "No GPU has been measured.", "note", "start"),
    ]  # fmt: skip
    title = ("A JPEG file on its way into a batch: the data worker makes the Program, one block is copied to the GPU, "
             "which decodes the file and runs the launches of the Program")  # fmt: skip
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>", f"<style>{STYLE}\n</style>",
        "<defs>", *(
            f'<marker id="{kind}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path class="{kind}" d="M0 0 L10 5 L0 10 z"/></marker>' for kind in ("tip", "rare-tip")
        ), "</defs>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>', *pieces, "</svg>", "",
    ])  # fmt: skip


def _source(results: dict[str, Report]) -> str:
    machine = results["host_cost"]["machine"]
    return (f"CPU times: {machine['cpu']}, pipeline \"{PIPELINE}\", files in page-locked slabs, "
            "medians of examples/benchmarks/results/.")  # fmt: skip


def read_figures(folder: Path) -> dict[str, Report]:
    """The results that the picture shows."""
    names = ("worker_cost", "slabs", "host_cost", "kernels")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
