"""Count the rounds that the lanes of JPEG files need to agree, and write the table into docs/inside/jpeg.md.

    python examples/benchmarks/jpeg_rounds.py FOLDER [--large 24] [--plain 12] [--print]

Repeats what the passes of the entropy decoder do (`torch_sink/triton_kernels/jpeg/passes.py`), for the lanes of many
files at once in NumPy. Besides the files of the folder it counts `--large` files in 4:2:0 of 12 megapixels, each made
of photographs from the folder, and `--plain` files of 3 megapixels in which one photograph lies on a white ground, as
in the catalogs of shops. Files with restart markers are left out. No GPU is needed.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from report_tables import insert_between
from torch_sink.image.decode.encoded import EncodedSource, read_jpeg_header
from torch_sink.image.decode.jpeg_block import JpegFile, jpeg_file
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LaneShape, lane_count

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inside" / "jpeg.md"
BEGIN = "<!-- table: written by examples/benchmarks/jpeg_rounds.py -->\n"
END = "<!-- end of rounds -->"
LARGE_SIZE = 4032, 3024  # width and height in pixels
TILE_SIZE = 504, 378
PLAIN_SIZE = 2016, 1512
QUALITIES = 75, 85, 90, 95
END_OF_BLOCK = 96  # a step beyond any place in the zigzag order
FILES_AT_ONCE = 32


class Lanes(NamedTuple):
    """The lanes of some files, one file after the other.

    Attributes:
        stream: uint8 [bytes], the scans without stuffing, with zeros between them.
        codes: uint16 [tables, 65536], by the 16 bits from a position: bits to advance, step times 32.
        tables: int32 [files, 2, 3], rows of `codes` for DC and AC of each component.
        units: int32 [files, 2], blocks of an MCU, those of luma.
        file: int32 [lanes], the file of each lane.
        origin: int64 [lanes], bit of `stream` at which the scan of the lane's file begins.
        begin: int64 [lanes], first bit of the lane in its scan.
        end: int64 [lanes], the bit after its last.
        bits: int64 [lanes], bits of the scan.
    """

    stream: np.ndarray
    codes: np.ndarray
    tables: np.ndarray
    units: np.ndarray
    file: np.ndarray
    origin: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    bits: np.ndarray


def opened(data: bytes) -> JpegFile | None:
    """A file with a single segment that the kernels decode; None for any other."""
    header = read_jpeg_header(data)
    file = header and jpeg_file(EncodedSource(data, "", header, header.mode))
    return file if file and not file.scan.restart_interval else None


def lanes_of(files: Sequence[JpegFile], lane_bits: int) -> Lanes:
    """The lanes of files."""
    rows: dict[tuple[bytes, bool], int] = {}
    scans, tables, units, counts = [], [], [], []
    for file in files:
        data, scan = file.source.data, file.scan
        stuffed = bytes(data[scan.begin : -2])
        scans.append(stuffed.replace(b"\xff\0", b"\xff"))
        counts.append(lane_count(len(stuffed), lane_bits))
        of_classes = []
        for is_ac, places in enumerate((scan.dc, scan.ac)):
            found = [bytes(data[at : at + 16 + sum(data[at : at + 16])]) for at in places * (3 // len(places))]
            of_classes.append([rows.setdefault((table, bool(is_ac)), len(rows)) for table in found])
        tables.append(of_classes)
        units.append((file.counts[1], file.counts[1] - len(scan.dc) + 1))
    first_bits = np.cumsum([0, *(8 * (len(scan) + 8) for scan in scans)])
    number = np.concatenate([np.arange(count) for count in counts])
    owner = np.repeat(np.arange(len(files)), counts)
    bits = np.array([8 * len(scan) for scan in scans])[owner]
    begin = number * lane_bits
    return Lanes(
        np.frombuffer(b"".join(scan + bytes(8) for scan in scans), np.uint8),
        np.stack([_codes(table, is_ac=is_ac) for table, is_ac in rows]),
        np.array(tables),
        np.array(units),
        owner,
        first_bits[owner],
        begin,
        np.minimum(begin + lane_bits, bits),
        bits,
    )


def _codes(table: bytes, *, is_ac: bool) -> np.ndarray:
    """A row of `Lanes.codes`; bits without a code advance by one."""
    found, first, symbols = np.ones(1 << 16, np.uint16), 0, iter(table[16:])
    for length, count in enumerate(table[:16], start=1):
        for _ in range(count):
            run, size = divmod(next(symbols), 16)
            ends = is_ac and size == 0
            step = (16 if run == 15 else END_OF_BLOCK) if ends else run + 1 if is_ac else 1
            found[first : first + (1 << 16 - length)] = length + size + 32 * step
            first += 1 << 16 - length
    return found


State = tuple[np.ndarray, np.ndarray, np.ndarray]  # position in the scan, unit of the MCU, place in the zigzag order


def walk(lanes: Lanes, chosen: np.ndarray, state: State, until: np.ndarray) -> State:
    """The states of the chosen lanes after the symbols that start before the bit `until` of each."""
    position, unit, place = (each.copy() for each in state)
    active = np.flatnonzero(position < until)
    while len(active):
        file = lanes.file[chosen[active]]
        at, in_mcu, index = position[active], unit[active], place[active]
        bit = lanes.origin[chosen[active]] + at
        byte = bit >> 3
        word = sum(lanes.stream[byte + more].astype(np.int64) << (16 - 8 * more) for more in range(3))
        window = (word >> (8 - (bit & 7))) & 0xFFFF
        of_mcu, luma = lanes.units[file].T
        component = np.clip(in_mcu - luma + 1, 0, 2)
        entry = lanes.codes[lanes.tables[file, (index > 0).astype(int), component], window].astype(np.int64)
        index = index + (entry >> 5)
        ends = index > 63
        position[active] = at + (entry & 31)
        place[active] = np.where(ends, 0, index)
        unit[active] = np.where(ends, (in_mcu + 1) % of_mcu, in_mcu)
        active = active[position[active] < until[active]]
    return position, unit, place


def count_rounds(files: Sequence[JpegFile], shape: LaneShape) -> np.ndarray:
    """How many lanes of each file are decoded again in each round, int64 [rounds, files], until there are none."""
    lanes = lanes_of(files, shape.bits)
    every = np.arange(len(lanes.begin))
    zero = np.zeros(len(every), np.int64)
    early = np.where(lanes.begin < lanes.bits, np.maximum(lanes.begin - shape.warm_up_bits, 0), lanes.begin)
    entries = walk(lanes, every, (early, zero, zero), lanes.begin)
    exits = walk(lanes, every, entries, lanes.end)
    has_left = (lanes.begin > 0) & (lanes.begin < lanes.bits)
    before = tuple(np.roll(each, 1) for each in exits)
    wrong = np.flatnonzero(has_left & _differ(before, entries))
    entry = tuple(each[wrong] for each in before)
    counts = []
    while len(wrong):
        counts.append(np.bincount(lanes.file[wrong], minlength=len(files)))
        found = walk(lanes, wrong, entry, lanes.end[wrong])
        changes = _differ(found, tuple(each[wrong] for each in exits)) & (lanes.end[wrong] < lanes.bits[wrong])
        for each, new in zip(exits, found, strict=True):
            each[wrong] = new
        wrong, entry = wrong[changes] + 1, tuple(each[changes] for each in found)
    return np.array(counts).reshape(-1, len(files))


def _differ(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> np.ndarray:
    return np.any([one != other for one, other in zip(first, second, strict=True)], axis=0)


def large_files(photographs: Sequence[bytes], count: int) -> Iterator[bytes]:
    """Files in 4:2:0 of 12 megapixels: in turn one photograph enlarged, with grain, and many side by side."""
    chance = np.random.default_rng(0)
    for number in range(count):
        if number % 2:
            photograph = _photograph(photographs[chance.integers(len(photographs))], LARGE_SIZE)
            values = np.asarray(photograph, np.int16) + chance.normal(0, number % 3, (*LARGE_SIZE[::-1], 1))
            image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        else:
            image = Image.new("RGB", LARGE_SIZE)
            for left in range(0, LARGE_SIZE[0], TILE_SIZE[0]):
                for top in range(0, LARGE_SIZE[1], TILE_SIZE[1]):
                    image.paste(_photograph(photographs[chance.integers(len(photographs))], TILE_SIZE), (left, top))
        yield _encoded(image, QUALITIES[number % len(QUALITIES)])


def plain_files(photographs: Sequence[bytes], count: int) -> Iterator[bytes]:
    """Files in 4:2:0 of 3 megapixels: one photograph in the middle of a white ground."""
    for number in range(count):
        image = Image.new("RGB", PLAIN_SIZE, "white")
        photograph = _photograph(photographs[number % len(photographs)], TILE_SIZE)
        image.paste(photograph, tuple((outer - inner) // 2 for outer, inner in zip(PLAIN_SIZE, TILE_SIZE, strict=True)))
        yield _encoded(image, QUALITIES[number % len(QUALITIES)])


def _encoded(image: Image.Image, quality: int) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.getvalue()


def _photograph(data: bytes, size: tuple[int, int]) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB").resize(size, Image.Resampling.LANCZOS)


def rounds_of(files: Iterable[bytes]) -> dict[LaneShape, list[np.ndarray]]:
    """For each shape of lanes and each file that the kernels decode: the lanes of each of its rounds."""
    found: dict[LaneShape, list[np.ndarray]] = {shape: [] for shape in LANE_SHAPES}
    waiting: list[JpegFile] = []

    def count() -> None:
        for shape in LANE_SHAPES if waiting else ():
            found[shape] += [rounds[rounds > 0] for rounds in count_rounds(waiting, shape).T]
        waiting.clear()

    for data in files:
        if file := opened(data):
            waiting.append(file)
        if sum(len(each.source.data) for each in waiting) > FILES_AT_ONCE << 17:
            count()
    count()
    return found


def table(files: dict[str, dict[LaneShape, list[np.ndarray]]]) -> str:
    """The lines between the two markers."""
    lines = [
        "| files | bits of a lane | lanes decoded again, round by round | rounds for all | files that go on alone | "
        "most rounds of a file |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in files.items():
        for shape, rounds in found.items():
            most = max(map(len, rounds))
            sums = [sum(int(of_file[number]) for of_file in rounds if len(of_file) > number) for number in range(6)]
            again = ", ".join(f"{each:,}" for each in sums if each) + (", ..." if most > len(sums) else "")
            alone = sum(len(of_file) > shape.rounds for of_file in rounds)
            cells = [f"{len(rounds)} {name}", f"{shape.bits}", again, f"{shape.rounds}", f"{alone}", f"{most}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="a tree with JPEG files, such as photographs of ImageNet")
    parser.add_argument("--large", type=int, default=24, help="large files to make of them (default: %(default)s)")
    parser.add_argument(
        "--plain", type=int, default=12, help="files with a white ground to make (default: %(default)s)"
    )
    parser.add_argument("--print", action="store_true", help="print the table, and leave the page as it is")
    arguments = parser.parse_args()
    paths = sorted(path for path in arguments.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        raise SystemExit(f"{arguments.folder} has no JPEG files; give a folder of photographs")
    photographs = [path.read_bytes() for path in paths]
    counted = {"photographs": rounds_of(photographs)}
    if arguments.large:
        counted["of 12 megapixels, 4:2:0"] = rounds_of(large_files(photographs, arguments.large))
    if arguments.plain:
        counted["of 3 megapixels, 4:2:0, on a white ground"] = rounds_of(plain_files(photographs, arguments.plain))
    made = table(counted)
    if arguments.print:
        sys.stdout.write(made)
        return
    PAGE.write_text(insert_between(PAGE.read_text(), BEGIN, END, made))


if __name__ == "__main__":
    main()
