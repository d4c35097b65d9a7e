"""JPEG files of many kinds, small enough for the interpreter, and their entropy decoding by the kernels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from image.check import device_in_use
from image.jpeg_files import COLUMN, segments_of
from PIL import Image, ImageDraw

from kernels.jpeg_golden import decode_segment
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode.encoded import EncodedSource, read_jpeg_header
from torch_sink.image.decode.jpeg_block import JpegBatch, JpegFile, batch_of, jpeg_file, lay_out_jpegs
from torch_sink.image.decode.jpeg_decoder import Inputs, JpegDecoder, block_on_device
from torch_sink.triton_kernels.shapes import LaneShape, TileShape, choose_lane_shape, tile_shape


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Something like a photograph."""
    return make_photo(max(width, 16), max(height, 16), seed=seed).crop((0, 0, width, height))


def noise(width: int, height: int) -> Image.Image:
    """No two pixels have to do with each other."""
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def bilevel(width: int, height: int) -> Image.Image:
    """Pixels that are black or white, by chance."""
    return noise(width, height).convert("L").point(lambda value: 255 * (value > 127)).convert("RGB")


def stripes(width: int, height: int) -> Image.Image:
    """Upright stripes, each as wide as a block."""
    values = np.where(np.arange(width) // 8 % 2, 200, 0).astype(np.uint8)
    return Image.fromarray(np.tile(values, (height, 1))).convert("RGB")


def text(width: int, height: int) -> Image.Image:
    """A white page with a few letters."""
    page = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(page).text((width // 3, height // 3), "Abc 123", fill="black")
    return page


def encode(image: Image.Image, **options: Any) -> bytes:
    """A file; the options are those of Pillow's `save`."""
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def encode_440(width: int, height: int, **options: Any) -> bytes:
    """A file with chroma at half the height, in multiples of 16 pixels: one at half the width, with another header.

    Pillow does not write them. An MCU has the same units either way, so the data stay valid.
    """
    data = encode(photo(2 * width, height // 2), subsampling="4:2:2", **options)
    frame = data.index(b"\xff\xc0") + 5
    sizes = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    assert data[frame + 6] == 0x21
    return data[:frame] + sizes + data[frame + 4 : frame + 6] + b"\x12" + data[frame + 7 :]


def clean_files() -> dict[str, bytes]:
    """Files of all kinds that the kernels cover."""
    files = {}
    for sampling in ("4:4:4", "4:2:2", "4:2:0"):
        for width, height in ((1, 1), (8, 8), (17, 9), (33, 50), (64, 64)):
            options = {"subsampling": sampling, "optimize": width % 2 == 1}
            files[f"{sampling}, {width} x {height}"] = encode(photo(width, height), quality=80, **options)
        files[f"{sampling}, restart"] = encode(photo(50, 40), subsampling=sampling, restart_marker_blocks=2)
        for name, image in {"white": Image.new("RGB", (96, 64), "white"), "text": text(96, 64)}.items():
            files[f"{sampling}, {name}"] = encode(image, subsampling=sampling)
    # Where blocks are full to the last coefficient, lanes agree late: these files are short.
    for name, image in {"noise": noise(16, 8), "bilevel": bilevel(8, 16)}.items():
        files[name] = encode(image, quality=70)
        files[f"{name}, optimized"] = encode(image, quality=95, subsampling="4:4:4", optimize=True)
    files["4:4:0"] = encode_440(48, 64, quality=85)
    files["4:4:0, optimized"] = encode_440(16, 16, quality=85, optimize=True)
    files["gray"] = encode(photo(50, 60).convert("L"))
    # DC coefficients of more blocks than a program sums at once.
    blocks = noise(47, 47).convert("L")
    files["gray, many blocks"] = encode(blocks.resize((8 * 47, 8 * 47), Image.Resampling.NEAREST), quality=50)
    files["gray, restart every row"] = encode(photo(30, 50).convert("L"), restart_marker_rows=1)
    for quality in (1, 10, 30, 50, 90, 95, 98, 100):
        size = (40, 32) if quality < 95 else (16, 9)
        files[f"quality {quality}"] = encode(photo(*size, seed=quality), quality=quality)
    return files


def open_file(data: bytes) -> JpegFile | None:
    """A file for a batch; None where the kernels do not cover it."""
    header = read_jpeg_header(data)
    if header is None or header.scan is None:
        return None
    return jpeg_file(EncodedSource(data, "a test's file", header, header.mode))


def open_clean_files() -> dict[str, JpegFile]:
    """`clean_files`, for a batch."""
    opened = {name: open_file(data) for name, data in clean_files().items()}
    assert None not in opened.values()
    return opened  # type: ignore[return-value]


def damaged_files(number: int, seed: int) -> list[JpegFile]:
    """Files whose headers and restart markers are sound, but not the data of their scans."""
    options = ({"subsampling": "4:4:4"}, {"optimize": True}, {"restart_marker_blocks": 2}, {"subsampling": "4:2:2"})
    sound = [encode(photo(33, 20, seed=seed), quality=60, **some) for some in options]
    sound.append(encode(photo(33, 20, seed=seed).convert("L"), quality=60))
    random = np.random.default_rng(seed)
    return [damage(open_file(sound[count % len(sound)]), count // len(sound), random) for count in range(number)]


def damage(file: JpegFile, kind: int, random: np.random.Generator) -> JpegFile:
    """One kind of damage at a place drawn at random."""
    data, begin, end = file.source.data, file.scan.begin, len(file.source.data) - 2
    while True:
        at = int(random.integers(begin, end))
        further = min(at + 7, end)
        changed = [
            data[:at] + bytes([data[at] ^ 1 << int(random.integers(8))]) + data[at + 1 :],
            data[:at] + random.bytes(1) + data[at + 1 :],
            data[:at] + data[end:],
            data[:at] + bytes(further - at) + data[further:],
            data[:further] + data[at:],
            data[:end] + random.bytes(1 + at % 2) + data[end:],
            data[:at] + b"\xff\0\xff\0\xff\0" + data[at:],
        ][kind % 7]
        opened = open_file(changed)
        if opened is not None:
            return opened


def golden_coefficients(file: JpegFile) -> np.ndarray:
    """int16 [blocks, 64], by plain Python; raises Damaged."""
    data, scan = file.source.data, file.scan
    across, down = scan.sampling
    dc, ac = ([data[at : at + 16 + sum(data[at : at + 16])] for at in places] for places in (scan.dc, scan.ac))
    units = [across * down, 1, 1][: len(dc)]
    components = list(zip(units, dc, ac, strict=True))
    width, height = file.source.size
    mcus = -(-width // (8 * across)) * -(-height // (8 * down))
    step = scan.restart_interval or mcus
    segments = [
        decode_segment(data[begin : begin + length], components, min(step, mcus - number * step))
        for number, (begin, length) in enumerate(segments_of(file))
    ]
    return np.concatenate(segments)


class Decoded(NamedTuple):
    """What the kernels make of one file: its status, and int16 [blocks, 64]."""

    status: int
    coefficients: np.ndarray


class PackedFiles(NamedTuple):
    """Files as the kernels get them: their tables, and views of their block on the device."""

    batch: JpegBatch
    inputs: Inputs


def pack_files(files: Sequence[JpegFile], bits: int, tile: TileShape | None = None) -> PackedFiles:
    """Whole files for lanes of so many bits, by default with the tiles of this process."""
    laid_out = lay_out_jpegs([file.source for file in files])
    assert len(laid_out.headers) == len(files)
    batch, tables, _ = batch_of(laid_out, laid_out.whole_images(), bits, tile or tile_shape())
    batch = batch.moved(laid_out.chunks.add_array(tables))
    return PackedFiles(batch, Inputs.of_block(block_on_device(laid_out, torch.device(device_in_use())), batch))


def new_decoder(batch: JpegBatch, inputs: Inputs, shape: LaneShape) -> JpegDecoder:
    """A decoder with rubbish in its memory."""
    decoder = JpegDecoder(batch, inputs, shape)
    for memory in (*vars(decoder).values(), *decoder._entropy):
        if isinstance(memory, torch.Tensor):
            memory.view(torch.uint8).fill_(0x5A)
    return decoder


def results(decoder: JpegDecoder, batch: JpegBatch) -> list[Decoded]:
    """What came of a batch."""
    status, coefficients = decoder.status.cpu(), decoder.coefficients.cpu().numpy()
    of_images = np.split(coefficients, decoder._inputs.images[1:, COLUMN["FIRST_BLOCK"]].cpu().numpy())
    return [Decoded(*result) for result in zip(status.tolist(), of_images, strict=True)]


def decode_files(files: Sequence[JpegFile], shape: LaneShape | None = None) -> list[Decoded]:
    """All files in one batch.

    Args:
        files: what `open_file` opens.
        shape: of the lanes, by default the one that the decoder would choose.
    """
    shape = shape or choose_lane_shape(0)
    batch, inputs = pack_files(files, shape.bits)
    decoder = new_decoder(batch, inputs, shape)
    decoder.decode_coefficients()
    return results(decoder, batch)
