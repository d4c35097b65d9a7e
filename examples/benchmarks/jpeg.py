"""The JPEG kernels, each stage alone: microseconds of a batch, and images per second of all of them.

    python examples/benchmarks/jpeg.py [--data DIR] [--batches 64 256 512 1024]

The times of kernels are the GPU's own, from the profiler; where there is no GPU, only what the host does is timed:
reading headers, laying files out and making their tables. Also says how many images Pillow had to decode again. Prints
a table and writes JSON.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch

from harness import (
    describe,
    device_here,
    device_spans,
    finish,
    in_turns,
    make_parser,
    photographs,
    positive,
    rates,
    read_files,
    save,
)
from torch_sink.cli.worker_cost import percentiles
from torch_sink.image.decode.encoded import EncodedSource, read_jpeg_header
from torch_sink.image.decode.jpeg_block import batch_of, lay_out_jpegs
from torch_sink.image.decode.jpeg_decoder import decode_jpegs
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LaneShape, choose_lane_shape

# Part of a kernel's name -> the stage that it belongs to; everything else is copies, fills and small sums.
STAGES = {
    "unstuff": "unstuff",
    "lookup": "look-up tables",
    "warm_up": "warm-up",
    "compare": "rounds",
    "round": "rounds",
    "finish": "settle and write",
    "dc_kernel": "DC",
    "idct": "inverse transform",
    "color": "color",
}
OTHERS = "copies and sums"


def stage_of(kernel: str) -> str:
    """The stage that a kernel belongs to, by its name."""
    return next((stage for part, stage in STAGES.items() if part in kernel), OTHERS)


def covered_files(files: list[bytes]) -> list[EncodedSource]:
    """Those that the kernels decode."""
    found = []
    for number, data in enumerate(files):
        header = read_jpeg_header(data)
        if header is not None and header.scan is not None:
            found.append(EncodedSource(data, f"file {number}", header, "RGB"))
    return found


def on_the_host(sources: list[EncodedSource], rounds: int) -> dict[str, Any]:
    """Microseconds an image of what the host does: in a data worker headers and layout, later the tables."""
    shape = choose_lane_shape(sum(len(source.data) for source in sources))
    files = lay_out_jpegs(sources)
    boxes = files.whole_images()

    def read_headers() -> None:
        for source in sources:
            read_jpeg_header(source.data)

    def lay_out() -> None:
        lay_out_jpegs(sources)

    def make_tables() -> None:
        batch_of(files, boxes, shape.bits)

    seconds = in_turns({"header": read_headers, "layout": lay_out, "tables": make_tables}, rounds)
    return {name: percentiles([1e6 * value / len(sources) for value in values]) for name, values in seconds.items()}


def on_the_device(sources: list[EncodedSource], device: torch.device, rounds: int) -> dict[str, Any]:
    """Microseconds a batch of each stage and for each shape of lanes; images a second, of kernels and of the call."""
    boxes = [None] * len(sources)

    def decode(shape: LaneShape | None = None) -> Any:
        return decode_jpegs(sources, boxes, device, shape)

    again = sum(image is None for image in decode())
    turns: list[Counter[str]] = []
    for _ in range(rounds):
        spent: Counter[str] = Counter()
        for name, begin, end in device_spans(decode):
            spent[stage_of(name)] += (end - begin) / 1000
        turns.append(spent)
    seconds = in_turns({"decode": decode}, rounds)["decode"]
    result: dict[str, Any] = {
        "stages": {stage: percentiles([spent[stage] for spent in turns]) for stage in turns[0]},
        "images_per_second": rates(len(sources), seconds),
        "decoded_again": again,
    }
    if all(turns):  # the profiler saw kernels
        result["images_per_second_kernels"] = rates(len(sources), [spent.total() / 1e6 for spent in turns])
        by_lanes: dict[str, list[float]] = {f"{shape.bits} bits": [] for shape in LANE_SHAPES}
        for number in range(rounds + 1):
            for shape, spent_in in zip(LANE_SHAPES, by_lanes.values(), strict=True):
                spans = device_spans(partial(decode, shape))
                if number:  # kernels are compiled first
                    spent_in.append(sum(end - begin for _, begin, end in spans) / 1000)
        result["lanes"] = {name: percentiles(values) for name, values in by_lanes.items()}
    return result


def format_table(report: dict[str, Any]) -> str:
    lines = []
    for batch, result in report["batches"].items():
        host = ", ".join(f"{name} {value['p50']:.0f}" for name, value in result["host_us_an_image"].items())
        lines.append(f"batch {batch}: us an image on the host: {host}")
        device = result["device"]
        if device is None:
            lines.append("  kernels: not measured, there is no GPU")
            continue
        lines += [f"  {stage:20}{value['p50']:>10.0f} us" for stage, value in device["stages"].items()]
        kernels = f"{device['images_per_second_kernels']['p50']:.0f}" if device["stages"] else "-"
        lines.append(f"  images/s: {kernels} in kernels, {device['images_per_second']['p50']:.0f} in all")
        lines.append(f"  decoded again by Pillow: {device['decoded_again']}")
        for name, value in device.get("lanes", {}).items():
            lines.append(f"  all stages, lanes of {name}: {value['p50']:.0f} us")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, "jpeg", images=120)
    parser.add_argument("--batches", type=positive, nargs="+", default=[64, 128, 256, 512, 1024], help="images a call")
    parser.add_argument("--rounds", type=positive, default=5, help="how often each is measured")
    arguments = parser.parse_args()
    device = device_here()
    with photographs(arguments) as folder:
        report = describe(arguments, "jpeg.py", folder)
        files = read_files(folder, max(arguments.batches))
    report["batches"] = {}
    for batch in arguments.batches:
        sources = covered_files(files[:batch])
        report["batches"][str(batch)] = {
            "images": len(sources),
            "host_us_an_image": on_the_host(sources, arguments.rounds),
            "device": on_the_device(sources, device, arguments.rounds) if device.type == "cuda" else None,
        }
        save(report, arguments.output)
    finish(report, arguments.output, format_table(report))


if __name__ == "__main__":
    main()
