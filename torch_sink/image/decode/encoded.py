"""A JPEG file that is not decoded yet: its bytes, and what its markers say of its size and kind.

The markers are read as far as needed to know these, and that libjpeg takes the file.

The JPEG kernels cover what cameras, encoders and datasets write: Huffman-coded sequential files of 8 bits with one
interleaved scan, gray, or YCbCr with chroma at full size, or halved along either axis or both. Other files are left to
libjpeg.

Marker names and segment layouts: ITU-T T.81, annex B. What is refused beyond it is what libjpeg-turbo refuses
(`jdmarker.c`, `jdinput.c`, `jdhuff.c`, `jdphuff.c`, `jdsample.c`), whose `default_decompress_parms` (`jdapimin.c`) also
guesses the color spaces.
"""

from __future__ import annotations

import functools
import io
import operator
import os
import re
import stat
from collections.abc import Callable
from typing import NamedTuple

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from torch_sink.damage.report import decode_errors
from torch_sink.errors import DecodeError

# --- the markers

# Bits 0 to 3 of a table's kind are its number. A set of tables is a number with a bit for each kind.
DC, AC, QUANTIZATION = 0x00, 0x10, 0x20
START_OF_IMAGE = b"\xff\xd8\xff"
_END_OF_IMAGE = b"\xff\xd9"
# In the data of a scan, 0xFF is followed by 0 where it is data, or by a restart marker; 0xFF before 0xFF is padding.
_MARKER_AFTER_SCAN = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended sequential, progressive; all Huffman coded
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
# Markers of extensions, arithmetic coding and hierarchical files.
_RESERVED = (0xC8, 0xCC, 0xDE, 0xDF, *range(0xF0, 0xFE))
_REFUSED = frozenset((*_OTHER_FRAMES, *_RESERVED, *range(0xD0, 0xD9)))  # 0xD0 on: restarts, a second image
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
_LONGEST_SIDE = 65500
_MOST_BLOCKS_IN_A_UNIT = 10
_LUMA_SAMPLINGS = frozenset((0x11, 0x21, 0x12, 0x22))  # horizontal factor in the high four bits
_CHROMA_SAMPLINGS = b"\x11\x11"
_RGB_IDENTIFIERS = b"RGB"
_HUFFMAN = frozenset(kind | number for kind in (DC, AC) for number in range(4))
_ONE_TABLE = {kind: ((kind, 1),) for kind in _HUFFMAN}
_LONGEST_TABLE = 2 + 17 + 256  # of a segment with one table: its length, a kind, counts, symbols
_WORDS_OF_A_CODE = tuple(1 << (16 - bits) for bits in range(1, 17))
_YCC = 1  # the color transform in an Adobe marker


# The luma's sampling, the number of components, and what reads the places of their quantization, DC and AC tables.
_Covered = tuple[tuple[int, int], int, Callable[[dict[int, int]], tuple[int, ...]]]


class BaselineScan(NamedTuple):
    """Positions in a file that the kernels cover, in bytes; the scan ends at the last two bytes of the file."""

    begin: int  # first byte of the entropy-coded data
    sampling: tuple[int, int]  # horizontal and vertical factor of the luma; always (1, 1) for a gray file
    restart_interval: int  # MCUs between two restart markers; 0 where there are none
    quantization: tuple[int, ...]  # for each component, the byte before its 64 values, which says their precision
    dc: tuple[int, ...]  # for each component, the 16 counts of its DC codes; the symbols follow
    ac: tuple[int, ...]  # for each component, the 16 counts of its AC codes; the symbols follow


class JpegHeader(NamedTuple):
    """The size and kind of a complete JPEG file."""

    width: int  # in pixels
    height: int
    mode: str  # Pillow's mode of the decoded file: "L", "RGB" or "CMYK"
    scan: BaselineScan | None = None  # None where the kernels do not cover the file


def read_jpeg_header(data: bytes, *, thorough: bool = False) -> JpegHeader | None:
    """Walks the markers up to the first scan; where there are several scans, up to the last.

    Args:
        data: the whole file.
        thorough: checks everything that can make libjpeg raise, so also the codes of a baseline file's Huffman tables,
            and the data of its only scan, for a marker among them.

    Returns:
        The header, or None when the file is no JPEG, ends early, has a marker on the way that libjpeg stops at, or
        holds what Pillow treats specially (multi-picture files, arithmetic coding, 12 bits). Those are opened by
        Pillow at once, which raises or decodes as always.
    """
    if data[:3] != START_OF_IMAGE or data[-2:] != _END_OF_IMAGE:
        return None
    position, tables, frame, scans = 2, 0, b"", 0
    progressive, restart_interval, is_ycc, only_scan = False, 0, True, None
    places: dict[int, int] = {}
    try:
        while True:
            if data[position] != 0xFF:
                return None
            marker = data[position + 1]
            if marker == 0xD9:
                break
            length = (data[position + 2] << 8) | data[position + 3]
            body, after = position + 4, position + 2 + length
            if marker == 0xDB or marker == 0xC4:
                if marker == 0xDB:
                    found = _quantization_tables(data[body:after])
                elif after != body + 17 + sum(data[body + 1 : body + 17]) or progressive or thorough:
                    found = _huffman_tables(data[body:after], progressive or thorough)
                else:  # one table, as most encoders write them
                    found = _ONE_TABLE.get(data[body], ()) if length <= _LONGEST_TABLE else ()
                if not found or after > len(data):
                    return None
                for kind, place in found:
                    tables |= 1 << kind
                    places[kind] = body + place
            elif marker == 0xDA:
                needed = _tables_of_scan(data[body:after], frame[5:], progressive)
                if not needed or needed & ~tables:
                    return None
                scans += 1
                if not progressive and data[body] == frame[5]:
                    if thorough and next_marker(data, after) != len(data) - 2:
                        return None
                    covered = _covered(frame[5:], data[body:after]) if is_ycc and frame[0] == 8 else None
                    if covered is not None:
                        sampling, count, kinds = covered
                        at = kinds(places)
                        tables_at = at[:count], at[count : 2 * count], at[2 * count :]
                        only_scan = BaselineScan(after, sampling, restart_interval, *tables_at)
                    break
                after = next_marker(data, after)
            elif marker in _FRAMES:
                if frame:
                    return None
                frame, progressive = data[body:after], marker == 0xC2
            elif marker == 0xE2 and data[body : body + 4] == b"MPF\0":
                return None
            elif marker == 0xEE:
                is_ycc = is_ycc and (data[body : body + 5] != b"Adobe" or length < 14 or data[body + 11] == _YCC)
            elif marker == 0xDD:
                if length != 4:
                    return None
                restart_interval = (data[body] << 8) | data[body + 1]
            elif marker in _REFUSED or marker < 0xC0 or length < 2:
                return None
            position = after
        height, width = (frame[1] << 8) | frame[2], (frame[3] << 8) | frame[4]
        fits = 0 < width <= _LONGEST_SIDE and 0 < height <= _LONGEST_SIDE
        if not scans or frame[0] != 8 or not fits or _components(frame[5:]) is None:
            return None
        return JpegHeader(width, height, _MODES[frame[5]], only_scan)
    except IndexError:
        return None


def next_marker(data: bytes | memoryview, position: int) -> int:
    """The position where the data of a scan end."""
    following = _MARKER_AFTER_SCAN.search(data, position)
    return len(data) if following is None else following.start()


@functools.lru_cache(maxsize=256)
def _components(frame: bytes) -> dict[int, tuple[int, int]] | None:
    """{identifier: (blocks in a unit, bit of its quantization table)}, or None where libjpeg refuses them.

    `frame` is a frame header from its number of components on.
    """
    count = frame[0]
    if count not in _MODES or len(frame) != 1 + 3 * count:
        return None
    samplings = frame[2::3]
    for factors in ([sampling >> 4 for sampling in samplings], [sampling & 15 for sampling in samplings]):
        # libjpeg enlarges components by whole factors.
        if not 1 <= min(factors) <= max(factors) <= 4 or any(max(factors) % factor for factor in factors):
            return None
    components = {
        identifier: ((sampling >> 4) * (sampling & 15), 1 << (QUANTIZATION + table))
        for identifier, sampling, table in zip(frame[1::3], samplings, frame[3::3], strict=True)
    }
    return components if len(components) == count else None


@functools.lru_cache(maxsize=256)
def _covered(frame: bytes, scan: bytes) -> _Covered | None:
    """What kernels need of two headers, from their number of components on; None where they do not cover them."""
    count = frame[0]
    identifiers, samplings = frame[1::3], frame[2::3]
    if count not in (1, 3) or scan[0] != count or scan[1:-3:2] != identifiers:
        return None
    sampling = (1, 1)
    if count == 3:
        if samplings[0] not in _LUMA_SAMPLINGS or samplings[1:] != _CHROMA_SAMPLINGS or identifiers == _RGB_IDENTIFIERS:
            return None
        sampling = samplings[0] >> 4, samplings[0] & 15
    choices = scan[2:-3:2]
    quantization = (QUANTIZATION | table for table in frame[3::3])
    codes = *(DC | choice >> 4 for choice in choices), *(AC | choice & 15 for choice in choices)
    return sampling, count, operator.itemgetter(*quantization, *codes)


@functools.lru_cache(maxsize=256)
def _tables_of_scan(scan: bytes, frame: bytes, progressive: bool) -> int:
    """The set of tables that a scan needs; 0 where libjpeg refuses its header.

    Both headers are given from their number of components on; `frame` is empty where the file has none yet.
    """
    components = _components(frame) if frame else None
    count = scan[0]
    if components is None or not 1 <= count <= 4 or len(scan) != 4 + 2 * count:
        return 0
    first, last, high, low = scan[-3], scan[-2], scan[-1] >> 4, scan[-1] & 15
    if progressive:
        spectrum_fits = last == 0 if first == 0 else first <= last <= 63 and count == 1
        if not spectrum_fits or (high and low != high - 1) or low > 13:
            return 0
    remaining = dict(components)
    tables = blocks = 0
    for identifier, choice in zip(scan[1:-3:2], scan[2:-3:2], strict=True):
        if identifier not in remaining:
            return 0
        blocks_of_component, quantization = remaining.pop(identifier)
        blocks += blocks_of_component
        tables |= quantization
        if not progressive or (first == 0 and high == 0):
            tables |= 1 << (DC + (choice >> 4))
        if not progressive or first:
            tables |= 1 << (AC + (choice & 15))
    return tables if count == 1 or blocks <= _MOST_BLOCKS_IN_A_UNIT else 0


# (kind, position in the segment) of each table that a segment defines; () where it is damaged.
_Tables = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=256)
def _quantization_tables(segment: bytes) -> _Tables:
    tables, position = [], 0
    while position < len(segment):
        kind = segment[position]
        if kind & 15 > 3 or kind > 0x1F:
            return ()
        tables.append((QUANTIZATION + (kind & 15), position))
        position += 129 if kind > 15 else 65
    return tuple(tables) if position == len(segment) else ()


@functools.lru_cache(maxsize=256)
def _huffman_tables(segment: bytes, check_codes: bool) -> _Tables:
    """The Huffman tables of a segment. The codes of a baseline file are left to the decoder of its only scan."""
    tables, position = [], 0
    while position < len(segment):
        kind = segment[position]
        counts = segment[position + 1 : position + 17]  # codes of 1, 2, ... 16 bits
        symbols, position = position + 17, position + 17 + sum(counts)
        if kind not in _HUFFMAN or position - symbols > 256:
            return ()
        if check_codes:
            # Each code takes a share of all words of 16 bits; at least the word of ones has to be left.
            if sum(map(operator.mul, counts, _WORDS_OF_A_CODE)) >= 1 << 16:
                return ()
            if kind < AC and max(segment[symbols:position], default=0) > 15:
                return ()
        tables.append((kind, symbols - 16))
    return tuple(tables) if position == len(segment) else ()


# --- the file

IN_MEMORY = "an image in memory"  # in the place of a path


class EncodedSource(NamedTuple):
    """A complete JPEG file that is not decoded yet."""

    data: bytes | memoryview  # the file; bytes, or a view of the block that a batch travels in
    path: str  # for messages
    header: JpegHeader
    mode: str  # "L" or "RGB", the mode to decode to

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels."""
        return self.header.width, self.header.height

    def is_sound(self) -> bool:
        """Whether every byte of the file is such that `decode` cannot raise; what stock code decodes may be unsound."""
        return read_jpeg_header(bytes(self.data), thorough=True) is not None and _opens(self)

    def open(self) -> Image.Image:
        """The file as stock Pillow opens it: the header is read, with its `info`."""
        return JpegImageFile(io.BytesIO(self.data), self.path)

    def decode(self) -> Image.Image:
        """A plain Pillow image in `mode`.

        Raises:
            DecodeError: the scan of the file is damaged.
        """
        try:
            image = self.open()
            if image.mode != self.mode:
                return image.convert(self.mode)
            image.load()
            return image._new(image.im)  # like `copy`, but of the same memory
        except (OSError, SyntaxError, ValueError) as error:
            raise DecodeError(self.path, -1, str(error)) from error


def encoded_source(data: bytes, path: str, mode: str | None = None, *, thorough: bool = False) -> EncodedSource | None:
    """A source for `data`; None when Pillow has to open it at once (no JPEG, damaged, or suspiciously large).

    Where broken files are skipped or replaced, a file that could raise later raises now: its sample is left out.

    With `thorough` it is None for files that could raise later, even where broken files raise. `mode` is "L" or "RGB",
    by default the file's own, or "RGB" for CMYK files.
    """
    thorough = thorough or decode_errors.policy != "raise"
    header = read_jpeg_header(data, thorough=thorough)
    if header is None:
        return None
    if Image.MAX_IMAGE_PIXELS is not None and header.width * header.height > Image.MAX_IMAGE_PIXELS:
        return None
    if mode is None:
        mode = "RGB" if header.mode == "CMYK" else header.mode
    source = EncodedSource(data, path, header, mode)
    return source if not thorough or _opens(source) else None


def _opens(source: EncodedSource) -> bool:
    try:
        source.open()
    except Exception:
        return False
    return True


def read_file(path: str | os.PathLike[str], beginning: bytes = b"") -> bytes | None:
    """The bytes of a file; None, where it can be read again, for one that begins with others than `beginning`."""
    descriptor = os.open(os.fspath(path), os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        about = os.fstat(descriptor)
        looks_first = beginning and stat.S_ISREG(about.st_mode) and hasattr(os, "pread")
        if looks_first and os.pread(descriptor, len(beginning), 0) != beginning:
            return None
        data = os.read(descriptor, about.st_size + 1)
        if len(data) == about.st_size:
            return data
        rest = iter(lambda: os.read(descriptor, 1 << 20), b"")  # a pipe, or a file that is being written
        return b"".join([data, *rest])
    except OSError as error:
        error.filename = os.fspath(path)  # of a folder, which can be opened
        raise
    finally:
        os.close(descriptor)
