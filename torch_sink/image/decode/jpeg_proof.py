"""The proof of the JPEG kernels: they decode a few small files, whose pixels are compared with Pillow's."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from torch_sink.common.transfer import to_host
from torch_sink.image.core.fallback import executing, image_of
from torch_sink.image.core.proof import Proof
from torch_sink.image.decode.encoded import EncodedSource, encoded_source
from torch_sink.image.decode.source import Box

_SIZE = 67, 45  # width and height, pixels; no multiples of an MCU's


# A file, and the part of it that is wanted, or None for all of it.
_Case = tuple[EncodedSource, Box | None]


def _first_difference(device: torch.device) -> str:
    """Describes the first file whose pixels differ from Pillow's; "" where none does.

    Runs every variant of the kernels that a batch may choose.
    """
    from torch_sink.image.decode.jpeg_decoder import decode_jpegs
    from torch_sink.triton_kernels.launching import is_interpreted
    from torch_sink.triton_kernels.shapes import INTERPRETED_LANE_SHAPE, LANE_SHAPES

    files = list(cases())
    sources, boxes = zip(*files, strict=True)
    for shape in (INTERPRETED_LANE_SHAPE,) if is_interpreted() else LANE_SHAPES:
        for (source, box), image in zip(files, decode_jpegs(sources, boxes, device, shape), strict=True):
            if image is None:
                return f"the kernels take a {source.path} for damaged"
            by_pillow = source.decode()
            if box is not None:
                left, top, width, height = box
                by_pillow = by_pillow.crop((left, top, left + width, top + height))
            expected = torch.from_numpy(np.atleast_3d(np.array(by_pillow))).permute(2, 0, 1)
            if wrong := int((to_host(image.pixels) != expected).sum()):
                return f"{wrong} of {expected.numel()} values of a {source.path} differ from Pillow's"
    return ""


def cases() -> Iterator[_Case]:
    """Files with every sampling and mode that the kernels decode, restart markers, optimized tables, and a crop."""
    with executing():
        photo = picture(*_SIZE)
        for sampling in ("4:4:4", "4:2:2", "4:2:0"):
            yield _case(sampling, encoded(photo, subsampling=sampling, quality=90))
        # Pillow cannot write 4:4:0: the blocks of a 4:2:2 file, with both axes swapped in its header.
        data = encoded(photo, subsampling="4:2:2", quality=90)
        frame = data.index(b"\xff\xc0") + len(b"\xff\xc0") + 3  # length and precision come first
        height, width, components = data[frame : frame + 2], data[frame + 2 : frame + 4], data[frame + 4 :]
        assert components[2] == 0x21
        yield _case("4:4:0", data[:frame] + width + height + components[:2] + b"\x12" + components[3:])
        yield _case("gray", encoded(photo.convert("L"), quality=90))
        yield _case("4:2:0, as gray", encoded(photo, quality=75), mode="L")
        yield _case("4:2:0, restarted", encoded(photo, quality=75, restart_marker_blocks=3, optimize=True))
        yield _case("4:2:0, cropped", encoded(photo, quality=50), box=Box(19, 7, 30, 22))


def _case(name: str, data: bytes, mode: str | None = None, box: Box | None = None) -> _Case:
    source = encoded_source(data, f"{name} file", mode)
    assert source is not None
    return source, box


def picture(width: int, height: int) -> Image.Image:
    """An RGB image of waves, of another length in each channel, and noise."""
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    waves = [np.sin(across / length) * np.cos(down / (length + 3)) for length in (5, 9, 14)]
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    values = 128 + 90 * np.stack(waves, axis=-1) + noise
    return image_of(values.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


JPEG_KERNELS = Proof(
    "jpeg_kernels",
    "Pillow's threads decode JPEG files, not the device",
    _first_difference,
    folders=[Path(__file__).parent],
    kernels="jpeg",
)
