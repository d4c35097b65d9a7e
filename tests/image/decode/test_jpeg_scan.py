"""Which JPEG files the kernels are given, and the arrays that describe them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image.cases import encoded
from image.jpeg_files import COLUMN, SAMPLINGS, batch_and_tables, jpeg, segments_of
from torch_sink.image.decode import jpeg_block as block
from torch_sink.image.decode.encoded import EncodedSource, read_jpeg_header
from torch_sink.image.decode.jpeg_block import joined, jpeg_file, lay_out_jpegs
from torch_sink.image.decode.source import Box, PixelSource
from torch_sink.triton_kernels.shapes import TileShape, lane_count

ROOT = Path(__file__).resolve().parents[3]
FACTORS = {"4:4:4": (1, 1), "4:2:2": (2, 1), "4:2:0": (2, 2), "4:4:0": (1, 2), "gray": (1, 1)}


def source(data: bytes, mode: str = "RGB") -> EncodedSource:
    header = read_jpeg_header(data)
    assert header is not None
    return EncodedSource(data, "a file", header, mode)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_the_kernels_cover(sampling: str) -> None:
    data = jpeg(33, 17, sampling, restart_blocks=2)
    scan = source(data).header.scan
    assert scan is not None
    assert scan.sampling == FACTORS[sampling]
    assert scan.restart_interval == 2
    assert data[scan.begin - 3 : scan.begin] == b"\x00\x3f\x00"
    assert len(scan.quantization) == len(scan.dc) == len(scan.ac) == (1 if sampling == "gray" else 3)


def changed(data: bytes, marker: bytes, at: int, value: int) -> bytes:
    """One byte, counted from a marker, set to something else."""
    place = data.index(marker) + at
    return data[:place] + bytes((value,)) + data[place + 1 :]


ADOBE_RGB, ADOBE_YCC = (b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes((kind,)) for kind in (0, 1))
COLOR, GRAY = jpeg(33, 17, "4:2:0"), jpeg(33, 17, "gray")
OUTSIDE = {
    "progressive": encoded(33, 17, progressive=True),
    "CMYK": encoded(33, 17, 0, "CMYK"),
    "chroma larger than 1x1": changed(jpeg(33, 17, "4:4:4"), b"\xff\xc0", 14, 0x21),
    "luma 4x1": changed(COLOR, b"\xff\xc0", 11, 0x41),
    "RGB by its identifiers": changed(
        changed(changed(changed(changed(changed(
            COLOR, b"\xff\xc0", 10, 82), b"\xff\xc0", 13, 71), b"\xff\xc0", 16, 66),
            b"\xff\xda", 5, 82), b"\xff\xda", 7, 71), b"\xff\xda", 9, 66,
    ),
    "RGB by its Adobe marker": COLOR[:2] + ADOBE_RGB + COLOR[2:],
    "components of the scan in another order": changed(
        changed(COLOR, b"\xff\xda", 7, 3), b"\xff\xda", 9, 2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_they_do_not_cover(name: str) -> None:
    assert source(OUTSIDE[name]).header.scan is None


def test_color_spaces_that_are_ycc_all_the_same() -> None:
    assert source(COLOR[:2] + ADOBE_YCC + COLOR[2:]).header.scan is not None
    assert source(changed(GRAY, b"\xff\xc0", 11, 0x22)).header.scan is not None


def test_restart_markers_cut_the_scan() -> None:
    data = jpeg(33, 17, "4:2:0", restart_blocks=1)
    file = jpeg_file(source(data))
    assert file is not None
    assert len(segments_of(file)) == 6
    pieces = [data[begin : begin + length] for begin, length in segments_of(file)]
    assert (
        b"".join(piece + bytes((0xFF, 0xD0 + number)) for number, piece in enumerate(pieces))[:-2]
        == (data[file.scan.begin : -2])
    )
    assert jpeg_file(source(data.replace(b"\xff\xd1", b"\xff\xd2", 1))) is None
    assert jpeg_file(source(data.replace(b"\xff\xd4", b"\xff\x00", 1))) is None


def test_the_arrays_of_a_batch() -> None:
    sources = [source(jpeg(33, 17, "4:2:0", restart_blocks=2)), source(GRAY, "L"), source(jpeg(20, 40, "4:4:0"))]
    laid_out = lay_out_jpegs(sources)
    together = laid_out.chunks.write(torch.empty(laid_out.chunks.size, dtype=torch.uint8)).numpy().tobytes()
    batch, (images, segments, _) = batch_and_tables(laid_out, laid_out.whole_images(), 256)
    blocks = [3 * 2 * 6, 5 * 3, 3 * 3 * 4]
    assert images[:, COLUMN["FIRST_BLOCK"]].tolist() == [0, blocks[0], blocks[0] + blocks[1]]
    assert batch.blocks == sum(blocks)
    assert segments[:, COLUMN["SEGMENT_IMAGE"]].tolist() == [0, 0, 0, 1, 2]
    assert segments[:, COLUMN["SEGMENT_BLOCKS"]].tolist() == [12, 12, 12, 15, 36]
    files = [file for file in map(jpeg_file, sources) if file is not None]
    places = [(file.source.data, *place) for file in files for place in segments_of(file)]
    ends = [-64]
    for row, (data, begin, length) in zip(segments, places, strict=True):
        first = batch.stream + row[COLUMN["FIRST_BYTE"]]
        assert first % 16 == 0
        assert together[first : first + length] == data[begin : begin + length]
        assert first >= ends[-1] + 64
        ends.append(first + length)
        assert row[COLUMN["LANES"]] == lane_count(length, 256)
    huffman = np.frombuffer(together, np.uint8)[batch.huffman :][: batch.huffman_rows * 273].reshape(-1, 273)
    assert batch.huffman >= ends[-1] + 64
    assert len(np.unique(huffman, axis=0)) == len(huffman)
    tables = np.frombuffer(together[batch.quantization :], np.int32).reshape(-1, 64)
    assert batch.huffman % 16 == batch.quantization % 16 == 0
    for file, row in zip(files, images, strict=True):
        quantized = Image.open(io.BytesIO(file.source.data)).quantization  # type: ignore[attr-defined]
        assert sorted(tables[row[COLUMN["QUANTIZATION"]]].tolist()) == sorted(quantized[0])
        dc = file.scan.dc[0]
        counts = huffman[row[COLUMN["DC_TABLE"]]]
        assert counts[:16].tobytes() == file.source.data[dc : dc + 16]
        assert counts[272] == 0
        assert huffman[row[COLUMN["AC_TABLE"]], 272] == 1


def test_every_file_can_be_cut_out_of_the_block_again() -> None:
    chances = zip(SAMPLINGS * 2, (0, 1, 0, 3, 0, 2, 0, 0, 1, 0), (0, 3) * 5, strict=True)
    sources = [
        source(
            COLOR[:2] + b"\xff\xfe" + bytes((0, 2 + more)) + bytes(more) + jpeg(40, 21, name, restart_blocks=every)[2:]
        )
        for name, every, more in chances
    ]
    sources.insert(3, source(OUTSIDE["progressive"]))
    sources.insert(7, PixelSource(Image.new("RGB", (3, 4))))
    laid_out = lay_out_jpegs(sources)
    together = laid_out.chunks.write(torch.empty(laid_out.chunks.size, dtype=torch.uint8)).numpy()
    assert len(together) == laid_out.chunks.size
    assert sorted({0, *range(2), *range(2, 12)} - {3, 7}) == list(laid_out.pieces) == laid_out.sources.tolist()
    for at, pieces in laid_out.pieces.items():
        assert joined(together, pieces) == sources[at].data  # type: ignore[union-attr]


def test_files_with_more_tables_than_the_kernels_can_number_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "_MOST_TABLES", 4)
    own_tables = [source(jpeg(40, 21, seed=seed, optimize=True)) for seed in range(3)]
    laid_out = lay_out_jpegs(own_tables)
    assert list(laid_out.pieces) == [0]
    assert laid_out.huffman[1] == 4


def noise(seed: int) -> bytes:
    """A gray file with Huffman tables of its own."""
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, seed % 20 + 1), np.uint8))
    image.save(file := io.BytesIO(), "JPEG", quality=60, optimize=True)
    return file.getvalue()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_quantization_table_that_looks_like_the_codes_of_another_file(order: tuple[int, int]) -> None:
    def codes(data: bytes) -> bytes:
        scan = source(data).header.scan
        assert scan is not None
        return data[min(scan.dc + scan.ac) - 1 : scan.begin]

    whole = next(data for data in map(noise, range(4000)) if len(codes(data)) == 65)
    place = whole.index(b"\xff\xdb\x00\x43\x00") + 4
    odd = whole[:place] + codes(whole) + whole[place + 65 :]
    laid_out = lay_out_jpegs([source((whole, odd)[at]) for at in order])
    values, dc, ac = np.split(laid_out.headers.T[COLUMN["QUANTIZATION"] : COLUMN["IMAGE_COLUMNS"]], 3)
    assert values.tolist() == [[0, 1]] * 3
    assert sorted([dc[0].tolist(), ac[0].tolist()]) == [[0, 0], [1, 1]]


def test_files_can_be_launched_in_parts() -> None:
    sources = [
        source(jpeg(40, 21, name, restart_blocks=every)) for name, every in zip(SAMPLINGS, (0, 1, 0, 3, 2), strict=True)
    ]
    files = lay_out_jpegs(sources)
    whole, (whole_images, whole_segments, _) = batch_and_tables(files, files.whole_images(), 256)
    for first, last in ((0, 5), (0, 2), (1, 4), (4, 5)):
        part, (images, segments, _) = batch_and_tables(files.part(first, last), files.whole_images()[first:last], 256)
        begins = part.stream + segments[:, COLUMN["FIRST_BYTE"]]
        is_inside = (whole_segments[:, 0] >= first) & (whole_segments[:, 0] < last)
        assert begins.tolist() == (whole.stream + whole_segments[is_inside, COLUMN["FIRST_BYTE"]]).tolist()
        begins, of_part = whole_images[first:last, COLUMN["FIRST_BLOCK"]], images[:, COLUMN["FIRST_BLOCK"]]
        assert of_part.tolist() == (begins - begins[0]).tolist()


WINDOW = ("MCU_LEFT", "MCU_TOP", "MCUS_ACROSS", "MCUS_DOWN", "BLOCK_TILES", "PIXEL_TILES")
WINDOW += ("FIRST_BLOCK_TILE", "FIRST_PIXEL_TILE")


@pytest.mark.parametrize("box", [Box(0, 0, 61, 47), Box(16, 16, 16, 16), Box(60, 46, 1, 1), Box(15, 31, 3, 2)])
def test_windows_hold_the_box_and_the_chroma_beside_it(box: Box) -> None:
    files = lay_out_jpegs([source(jpeg(61, 47, "4:2:0"))] * 2)
    batch, (_, _, windows) = batch_and_tables(files, np.array([box, box]), 256, TileShape(2, 4, 8, 16))
    row = {name: int(windows[1, COLUMN[name]]) for name in WINDOW}
    left, right = 16 * row["MCU_LEFT"], 16 * (row["MCU_LEFT"] + row["MCUS_ACROSS"])
    top, bottom = 16 * row["MCU_TOP"], 16 * (row["MCU_TOP"] + row["MCUS_DOWN"])
    # A pixel needs the chroma samples at distance 1, which stand for two pixels.
    assert left <= max(box.left - 2, 0)
    assert right >= min(box.left + box.width + 2, 61)
    assert top <= max(box.top - 2, 0)
    assert bottom >= min(box.top + box.height + 2, 47)
    assert right - left <= box.width + 2 * 18
    tiles = {
        ((top + y) // 8, (left + x) // 16)
        for y in range(box.top - top, box.top - top + box.height)
        for x in range(box.left - left, box.left - left + box.width)
    }
    assert row["PIXEL_TILES"] == row["FIRST_PIXEL_TILE"] == len(tiles)
    across, down = row["MCUS_ACROSS"], row["MCUS_DOWN"]
    planes = ((2 * across, 2 * down), (across, down), (across, down))
    block_tiles = {
        (plane, y // 2, x // 4)
        for plane, (columns, rows) in enumerate(planes)
        for y in range(rows)
        for x in range(columns)
    }
    assert row["BLOCK_TILES"] == row["FIRST_BLOCK_TILE"] == len(block_tiles)
    assert batch.pixel_tiles == 2 * len(tiles)


def test_a_file_too_short_for_its_blocks_is_not_packed() -> None:
    data = bytearray(jpeg(33, 17, "4:4:4"))
    frame = data.index(b"\xff\xc0")
    scan_bytes = len(data) - 2 - source(bytes(data)).header.scan.begin  # type: ignore[union-attr]
    # In rows of 8 blocks, three components and two bits each.
    for rows, fits in ((scan_bytes // 6, True), (scan_bytes // 6 + 1, False), (8000, False)):
        data[frame + 5 : frame + 9] = (8 * rows).to_bytes(2, "big") + (64).to_bytes(2, "big")
        assert (jpeg_file(source(bytes(data))) is not None) == fits


def test_the_page_holds_the_estimate_of_its_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "benchmarks"))
    import jpeg_fusion

    text = jpeg_fusion.PAGE.read_text()
    assert jpeg_fusion.page_with_table(text) == text, "run python examples/benchmarks/jpeg_fusion.py"
