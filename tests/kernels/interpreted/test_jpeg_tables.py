"""The look-up tables of Huffman codes and the bytes without stuffing, each by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
from image.check import device_in_use

from kernels.jpeg_cases import COLUMN, encode, noise, open_file, photo
from kernels.jpeg_golden import Damaged, codes_of
from torch_sink.triton_kernels.jpeg import symbols
from torch_sink.triton_kernels.jpeg.lanes import count_unstuffed_kernel, sum_before_kernel, unstuff_kernel
from torch_sink.triton_kernels.jpeg.symbols import lookup_kernel
from torch_sink.triton_kernels.launching import compiler_options

FIRST_BITS, FIRST_ENTRIES = symbols.FIRST_BITS.value, symbols.FIRST_ENTRIES.value
GROUP_ENTRIES, GROUPS = symbols.GROUP_ENTRIES.value, symbols.GROUPS.value
LOOKUP_ENTRIES, END, UNUSED = symbols.LOOKUP_ENTRIES.value, symbols.END.value, symbols.UNUSED.value
DC, AC = 0, 1


def tables_of(data: bytes) -> list[tuple[int, bytes]]:
    """The DC and AC tables of a file: class, then counts and symbols."""
    scan = open_file(data).scan
    return [
        (kind, data[at : at + 16 + sum(data[at : at + 16])])
        for kind, places in ((DC, scan.dc), (AC, scan.ac))
        for at in set(places)
    ]


def random_table(seed: int) -> bytes:
    """Codes of any length; their lengths use up all words but one, or fewer."""
    random = np.random.default_rng(seed)
    counts, free = [], 1
    for length in range(1, 17):
        free *= 2
        count = int(random.integers(0, max(1, min(free - 1, 255 - sum(counts)) // (2 if length < 9 else 1) + 1)))
        counts.append(count)
        free -= count
    return bytes(counts) + random.permutation(256).astype(np.uint8).tobytes()[: sum(counts)]


def entry_of(kind: int, length: int, symbol: int) -> int:
    """What `lookup` says about entries, with words instead of formulas."""
    run, size = divmod(symbol, 16)
    if kind == DC:
        step = 1
    elif size:
        step = run + 1
    else:
        step = 16 if run == 15 else END
    return (length + size) | size << 5 | step << 9


def golden_entries(kind: int, table: bytes) -> np.ndarray:
    """The entries for all words of 16 bits."""
    entries = np.full(1 << 16, UNUSED)
    for (length, code), symbol in codes_of(table).items():
        first = code << (16 - length)
        entries[first : first + (1 << (16 - length))] = entry_of(kind, length, symbol)
    return entries


def made_entries(tables: list[tuple[int, bytes]]) -> np.ndarray:
    """int [tables, 65536]: what the kernels find for each word of 16 bits."""
    rows = b"".join(table.ljust(COLUMN["TABLE_CLASS"], b"\0") + bytes([kind]) for kind, table in tables)
    huffman = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(len(tables), COLUMN["HUFFMAN_COLUMNS"])
    lookups = torch.full((len(tables), LOOKUP_ENTRIES), 0x5A5A, dtype=torch.int32).to(torch.uint16)
    huffman, lookups = huffman.to(device_in_use()), lookups.to(device_in_use())
    lookup_kernel[(len(tables),)](huffman, lookups, BLOCK=triton.next_power_of_2(LOOKUP_ENTRIES), **compiler_options())
    values = lookups.cpu().numpy().astype(np.int64)
    words = np.arange(1 << 16)
    first = values[:, words >> (16 - FIRST_BITS)]
    rest = (first >> 5) * GROUP_ENTRIES + words % GROUP_ENTRIES
    is_long = first & 31 == 0
    return np.where(is_long, np.take_along_axis(values, np.where(is_long, rest, 0), axis=1), first)


FILE_TABLES = [
    *tables_of(encode(photo(16, 16))),
    *tables_of(encode(photo(40, 40), optimize=True, quality=98)),
    *tables_of(encode(noise(64, 64), optimize=True, quality=70, subsampling="4:4:4")),
]
ONE_CODE = bytes(15) + b"\x01\x05"
EMPTY = bytes(16)


def test_tables_of_files() -> None:
    for (kind, table), made in zip(FILE_TABLES, made_entries(FILE_TABLES), strict=True):
        np.testing.assert_array_equal(made, golden_entries(kind, table))


def test_any_table() -> None:
    tables = [(AC, random_table(seed)) for seed in range(12)] + [(DC, ONE_CODE), (AC, ONE_CODE), (AC, EMPTY)]
    crowded = 0
    for (kind, table), made in zip(tables, made_entries(tables), strict=True):
        expected = golden_entries(kind, table)
        # Words from here on have no entries of their own.
        first_long = sum(count << (15 - at) for at, count in enumerate(table[:FIRST_BITS]))
        end = first_long + GROUPS * GROUP_ENTRIES
        crowded += bool((expected[end:] != UNUSED).any())
        np.testing.assert_array_equal(made[:end], expected[:end])
        assert (made[end:] == UNUSED).all()
    assert 0 < crowded < len(tables), "some have room for all codes, some have not"


BAD_TABLES = {
    "a code of ones": (AC, b"\x02" + bytes(15) + b"\x01\x02"),
    "a long code of ones": (AC, b"\x01" * 15 + b"\x02" + bytes(range(17))),
    "too many codes": (AC, b"\x03" + bytes(15) + b"\x01\x02\x03"),
    "too many symbols": (AC, bytes(11) + b"\xff" + bytes(3) + b"\x02" + bytes(240)),
    "a DC value of 16 bits": (DC, b"\0\x02" + bytes(14) + b"\x01\x10"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_what_is_no_table(name: str) -> None:
    (made,) = made_entries([BAD_TABLES[name]])
    assert (made == UNUSED).all()


def test_an_ac_symbol_may_be_large() -> None:
    _, table = BAD_TABLES["a DC value of 16 bits"]
    (made,) = made_entries([(AC, table)])
    np.testing.assert_array_equal(made, golden_entries(AC, table))


# The marker that ends it, and whatever lies between two files.
AFTER_A_SEGMENT = b"\xff\xd9" + b"\xff\xff\0\xd8\xff" * 20


def unstuffed(segments: list[bytes], lane_bytes: int) -> tuple[list[bytes], list[int]]:
    """What the kernels leave of segments, each of an image of its own, and the statuses."""
    padded = [segment + AFTER_A_SEGMENT[: 64 + -len(segment) % 16] for segment in segments]
    table = np.zeros((len(segments), COLUMN["SEGMENT_COLUMNS"]), np.int32)
    lanes = [8 * len(segment) // (8 * lane_bytes) + 1 for segment in segments]
    table[:, COLUMN["SEGMENT_IMAGE"]] = np.arange(len(segments))
    table[:, COLUMN["FIRST_BYTE"]] = np.cumsum([0, *map(len, padded[:-1])])
    table[:, COLUMN["BYTES"]] = [len(segment) for segment in segments]
    table[:, COLUMN["FIRST_LANE"]] = np.cumsum([0, *lanes[:-1]])
    table[:, COLUMN["LANES"]] = lanes
    block = triton.next_power_of_2(sum(lanes))
    owners = np.pad(np.repeat(np.arange(len(segments), dtype=np.int32), lanes), (0, block - sum(lanes)), "edge")
    stream = torch.frombuffer(bytearray(b"".join(padded)), dtype=torch.uint8)
    rows, stream, result = (tensor.to(device_in_use()) for tensor in (torch.from_numpy(table), stream, stream + 90))
    of_lanes = torch.from_numpy(owners).to(device_in_use())
    kept, before = torch.full((2, block), -1, dtype=torch.int32, device=device_in_use())
    totals, status = torch.zeros((2, len(segments)), dtype=torch.int32, device=device_in_use())
    grid, shape = (len(segments),), {"LANE_BYTES": lane_bytes, "BLOCK": block, **compiler_options()}
    count_unstuffed_kernel[(1,)](stream, rows, of_lanes, kept, status, **shape)
    sum_before_kernel[grid](kept, before, totals, rows, BLOCK=64, **compiler_options())
    unstuff_kernel[(1,)](stream, rows, of_lanes, before, totals, result, **shape)
    in_order = result.cpu().view(-1, 4).flip(1).flatten().numpy().tobytes()
    firsts = table[:, COLUMN["FIRST_BYTE"]].tolist()
    ends = [first + total for first, total in zip(firsts, totals.tolist(), strict=True)]
    assert all(in_order[end : end + 15] == bytes(15) for end in ends), "zeros follow"
    return [in_order[first:end] for first, end in zip(firsts, ends, strict=True)], status.tolist()


def stuffed_bytes(length: int, seed: int) -> bytes:
    """Data of a scan with many bytes 0xFF, at most `length` of them."""
    random = np.random.default_rng(seed)
    data = random.choice(np.array([0, 0x12, 0xFF], np.uint8), length).tobytes().replace(b"\xff", b"\xff\0")
    return data[:length] if data[:length][-1:] != b"\xff" else data[: length - 1]


@pytest.mark.parametrize("lane_bytes", [16, 64])
def test_unstuffing(lane_bytes: int) -> None:
    segments = [stuffed_bytes(length, length) for length in (0, 1, 2, 3, 15, 16, 17, 18, 63, 64, 65, 200, 1000)]
    assert any(segment[15:17] == b"\xff\0" for segment in segments), "a pair across two lanes"
    found, statuses = unstuffed(segments, lane_bytes)
    assert found == [segment.replace(b"\xff\0", b"\xff") for segment in segments]
    assert not any(statuses)


def test_markers_are_noticed() -> None:
    segments = [b"abc\xff", b"abc\xff\xd0d", bytes(15) + b"\xff\xff\0", b"\xff", bytes(15) + b"\xff"]
    _, statuses = unstuffed([*segments, b"\xff\0\xff\0", b"\0" * 40], 16)
    assert statuses == [*[COLUMN["FOREIGN_MARKER"]] * 5, 0, 0]


def test_a_plain_decoder_refuses_the_same_tables() -> None:
    for kind, table in BAD_TABLES.values():
        if kind == AC and sum(table[:16]) <= 256:
            with pytest.raises(Damaged):
                codes_of(table)
