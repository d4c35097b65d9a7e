"""The header of a JPEG file, read far enough to know size and kind, and to trust that the file is whole.

Marker names and segment layouts: ITU-T T.81, annex B.
"""

from __future__ import annotations

from typing import NamedTuple

_START_OF_IMAGE = b"\xff\xd8\xff"
_END_OF_IMAGE = b"\xff\xd9"
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended sequential, progressive; all Huffman coded
_REFUSED_FRAMES = frozenset((0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF))
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}


class JpegHeader(NamedTuple):
    """What the header of a complete JPEG file says.

    Attributes:
        width: pixels.
        height: pixels.
        mode: Pillow's mode of the decoded file: "L", "RGB" or "CMYK".
        progressive: several scans refine the coefficients.
        full_chroma: every component is stored at full size (4:4:4, or a single component).
        adobe: an Adobe marker is there, which may change the colour space.
    """

    width: int
    height: int
    mode: str
    progressive: bool
    full_chroma: bool
    adobe: bool


def read_jpeg_header(data: bytes) -> JpegHeader | None:
    """Walks the markers up to the first scan.

    Args:
        data: the whole file.

    Returns:
        The header, or None when the file is no JPEG, ends early, is damaged before its first scan, or holds what
        Pillow treats specially (multi-picture files, arithmetic coding, 12 bits). Those go to Pillow at once, which
        raises or decodes as it always does.
    """
    if data[:3] != _START_OF_IMAGE or data[-2:] != _END_OF_IMAGE:
        return None
    position, frame, adobe, tables = 2, None, False, 0
    try:
        while True:
            if data[position] != 0xFF:
                return None
            marker = data[position + 1]
            length = (data[position + 2] << 8) | data[position + 3]
            body, after = position + 4, position + 2 + length
            if marker in _FRAMES:
                if frame is not None:
                    return None
                frame = (marker, body, length)
            elif marker == 0xDA:
                break
            elif marker == 0xDB:
                if not _quantisation_tables_fit(data, body, after):
                    return None
                tables |= 1
            elif marker == 0xC4:
                if not _huffman_tables_fit(data, body, after):
                    return None
                tables |= 2
            elif marker == 0xE2 and data[body : body + 4] == b"MPF\0":
                return None
            elif marker == 0xEE:
                adobe = True
            elif marker in _REFUSED_FRAMES or marker < 0xC0 or 0xD0 <= marker <= 0xD9 or length < 2:
                return None
            position = after
        if frame is None or tables != 3:
            return None
        return _read_frame(data, *frame, adobe)
    except IndexError:
        return None


def _read_frame(data: bytes, marker: int, body: int, length: int, adobe: bool) -> JpegHeader | None:
    height = (data[body + 1] << 8) | data[body + 2]
    width = (data[body + 3] << 8) | data[body + 4]
    components = data[body + 5]
    mode = _MODES.get(components)
    if data[body] != 8 or not width or not height or mode is None or length != 8 + 3 * components:
        return None
    sampling = data[body + 7]
    for component in range(components):
        factors = data[body + 7 + 3 * component]
        if not 1 <= factors >> 4 <= 4 or not 1 <= factors & 15 <= 4:
            return None
    full_chroma = all(data[body + 7 + 3 * component] == sampling for component in range(components))
    return JpegHeader(width, height, mode, marker == 0xC2, full_chroma, adobe)


def _quantisation_tables_fit(data: bytes, position: int, end: int) -> bool:
    while position < end:
        position += 129 if data[position] >> 4 else 65
    return position == end


def _huffman_tables_fit(data: bytes, position: int, end: int) -> bool:
    while position < end:
        position += 17 + sum(data[position + 1 : position + 17])
    return position == end
