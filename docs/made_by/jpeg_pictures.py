"""Draw the pictures of docs/inside/jpeg.md from files made here: lanes that fall into step, and work per stage.

    python docs/made_by/jpeg_pictures.py [--output docs/images]

A plain decoder walks through the codes of a scan as one lane does. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from torch_sink.cli.photos import make_photo
from torch_sink.image.decode.encoded import JpegHeader, read_jpeg_header

IMAGES = Path(__file__).resolve().parents[1] / "images"
SIZE = (500, 375)
# Bits of a lane, and bits that it begins earlier.
SHAPES = ((1024, 0), (1024, 512), (2048, 512), (4096, 1024))
# Out of step, in step with the codes but not with the units of the MCU, in step.
COLORS = ("#D55E00", "#E69F00", "#009E73")
DARK = {f"{part}.facecolor": "#1b1b1b" for part in ("figure", "axes", "savefig")}

State = tuple[int, int, int]  # position in bits, unit in the MCU, index in zigzag order


class Scan(NamedTuple):
    """A scan without stuffing.

    Attributes:
        header: of its file.
        bits: how many it has.
        windows: the 16 bits from each position on.
        symbols: for each unit of an MCU, DC and AC: length of the code and symbol, by those 16 bits.
    """

    header: JpegHeader
    bits: int
    windows: list[int]
    symbols: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]


def make_scan(subsampling: str) -> Scan:
    """The scan of a photograph that is made here."""
    buffer = io.BytesIO()
    make_photo(*SIZE, seed=1).save(buffer, "JPEG", quality=92, subsampling=subsampling, optimize=True)
    data = buffer.getvalue()
    header = read_jpeg_header(data)
    assert header is not None
    scan = header.scan
    assert scan is not None
    raw = np.frombuffer(data[scan.begin : -2].replace(b"\xff\x00", b"\xff"), np.uint8)
    bits = np.concatenate([np.unpackbits(raw), np.zeros(64, np.uint8)]).astype(np.int32)
    windows = sum(bits[at : len(raw) * 8 + at] << (15 - at) for at in range(16))
    tables = [(codes(data, dc), codes(data, ac)) for dc, ac in zip(scan.dc, scan.ac, strict=True)]
    across, down = scan.sampling
    units = [0] * (across * down) + [1, 2]
    return Scan(header, len(raw) * 8, windows.tolist(), [tables[component] for component in units])


def codes(data: bytes, at: int) -> list[tuple[int, int]]:
    """Length and symbol of the code that each word of 16 bits begins with; unused codes count one bit."""
    table, symbol, first = [(1, 0)] * 65536, at + 16, 0
    for length, count in enumerate(data[at : at + 16], start=1):
        for _ in range(count):
            words = 1 << (16 - length)
            table[first : first + words] = [(length, data[symbol])] * words
            first, symbol = first + words, symbol + 1
    return table


def walk(scan: Scan, state: State, end: int) -> list[State]:
    """The states before each symbol from `state` to the first one at `end` or later."""
    position, unit, index = state
    states = [state]
    while position < end and position < scan.bits:
        length, symbol = scan.symbols[unit][index > 0][scan.windows[position]]
        run, size = divmod(symbol, 16) if index else (0, min(symbol, 15))
        position += length + size
        index = 64 if index and size == 0 and run < 15 else index + run + 1
        if index > 63:
            unit, index = (unit + 1) % len(scan.symbols), 0
        states.append((position, unit, index))
    return states


class Synchronization(NamedTuple):
    """How the lanes of a scan agreed.

    Attributes:
        walks: the states of each lane from its warm-up on.
        wrong: lanes decoded in each round.
        symbols: decoded in the warm-up, in the first pass, and in all rounds.
    """

    walks: list[list[State]]
    wrong: list[int]
    symbols: tuple[int, int, int]


def synchronize(scan: Scan, lane_bits: int, warm_up_bits: int) -> Synchronization:
    """Decodes every lane from a guess, then again those that began wrong, until none did."""
    starts = range(0, scan.bits, lane_bits)
    warm_ups = [walk(scan, (max(start - warm_up_bits, 0), 0, 0), start) for start in starts]
    first = [walk(scan, states[-1], start + lane_bits) for states, start in zip(warm_ups, starts, strict=True)]
    entries, exits = [states[0] for states in first], [states[-1] for states in first]
    items = [(lane, exits[lane - 1]) for lane in range(1, len(starts)) if exits[lane - 1] != entries[lane]]
    wrong, again = [], 0
    while items:
        wrong.append(len(items))
        following = []
        for lane, state in items:
            states = walk(scan, state, starts[lane] + lane_bits)
            again += len(states) - 1
            if states[-1] != exits[lane] and lane + 1 < len(starts):
                following.append((lane + 1, states[-1]))
            exits[lane] = states[-1]
        items = following
    walks = [[*before[:-1], *states] for before, states in zip(warm_ups, first, strict=True)]
    counts = sum(len(states) - 1 for states in warm_ups), sum(len(states) - 1 for states in first), again
    return Synchronization(walks, wrong, counts)


def draw_lanes(output: Path) -> None:
    """How the first lanes of two files fall into step during the warm-up."""
    lane_bits, warm_up_bits, lanes = 1024, 512, 24
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, subsampling in zip(axes, ("4:4:4", "4:2:0"), strict=True):
        scan = make_scan(subsampling)
        truth = {state[0]: state for state in walk(scan, (0, 0, 0), scan.bits)}
        for lane, states in enumerate(synchronize(scan, lane_bits, warm_up_bits).walks[:lanes]):
            for (begin, *_), (end, *_), state in zip(states, states[1:], states, strict=False):
                in_step = 2 if truth.get(begin) == state else 1 if begin in truth else 0
                axis.barh(lane, end - begin, left=begin - lane * lane_bits, color=COLORS[in_step], height=0.8)
        axis.axvline(0, color=plt.rcParams["text.color"], linewidth=0.8)
        axis.set(title=subsampling, xlabel="bits after the lane's first bit", xlim=(-warm_up_bits, lane_bits))
    axes[0].set(ylabel="lane")
    axes[0].invert_yaxis()
    labels = ("out of step", "in step with the codes only", "in step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS]
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(output, dpi=90)


def draw_work(output: Path) -> None:
    """What rounds cost for several lengths of a lane, and what each stage moves."""
    scan = make_scan("4:2:0")
    symbols = len(walk(scan, (0, 0, 0), scan.bits)) - 1
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    names = [f"{bits} bits,\nwarm-up {warm_up}" for bits, warm_up in SHAPES]
    results = [synchronize(scan, *shape) for shape in SHAPES]
    for name, result in zip(names, results, strict=True):
        left.plot(range(len(result.wrong) + 1), [*result.wrong, 0], marker=".", label=name.replace("\n", " "))
    left.set(title="lanes decoded again", xlabel="round", yscale="symlog")
    left.legend(frameon=False, fontsize=8)
    bottom = np.zeros(len(SHAPES))
    for number, stage in enumerate(("warm-up", "first pass", "rounds")):
        shares = np.array([result.symbols[number] / symbols for result in results])
        middle.bar(names, shares, bottom=bottom, label=stage)
        bottom += shares
    middle.bar(names, 1, bottom=bottom, label="write")
    middle.set(title="symbols decoded, for each of the file")
    middle.set(ylim=(0, 1.25 * bottom.max() + 1))
    middle.tick_params(axis="x", labelsize=7)
    middle.legend(frameon=False, ncols=2)
    stages = bytes_moved(scan)
    right.barh(list(stages), [read / 1e6 for read, _ in stages.values()], label="read")
    reads = [read / 1e6 for read, _ in stages.values()]
    right.barh(list(stages), [written / 1e6 for _, written in stages.values()], left=reads, label="written")
    right.invert_yaxis()
    right.set(title=f"megabytes moved, {SIZE[0]} x {SIZE[1]} pixels")
    right.legend(frameon=False)
    figure.savefig(output, dpi=90)


def bytes_moved(scan: Scan) -> dict[str, tuple[int, int]]:
    """Bytes that each stage reads and writes for one file, caches left aside; coefficients are zeroed first."""
    width, height = SIZE
    assert scan.header.scan is not None
    across, down = scan.header.scan.sampling
    blocks = -(-width // (8 * across)) * -(-height // (8 * down)) * len(scan.symbols)
    stream, samples = scan.bits // 8, 64 * blocks
    return {
        "unstuff": (2 * stream, stream),
        "warm-up and first pass": (stream, 0),
        "write": (stream, 2 * 2 * samples),
        "DC": (2 * 2 * blocks, 2 * blocks),
        "inverse transform": (2 * samples, samples),
        "color": (samples, 3 * width * height),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder (default: %(default)s)")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for end, style in (("", []), ("_dark", ["dark_background", DARK])):
        with plt.style.context(style):
            draw_lanes(folder / f"jpeg_lanes{end}.png")
            draw_work(folder / f"jpeg_work{end}.png")


if __name__ == "__main__":
    main()
