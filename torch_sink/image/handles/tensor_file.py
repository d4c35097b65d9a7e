"""What torchvision's decoders to tensors give while the backend is on: `decode_image`, `read_image`, `decode_jpeg`.

The operators that they call are replaced, not the functions themselves: functions that were imported by name before the
backend was set record as well, and their checks of arguments stay torchvision's own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode

from torch_sink.image.core.fallback import executing, is_executing, report_fallback
from torch_sink.image.core.ops import Op, replay
from torch_sink.image.decode import proof
from torch_sink.image.handles.tensor import LazyTensor
from torch_sink.image.sources.source import EncodedSource, PixelSource, encoded_source

_APP1 = 0xE1
# The calls that turn an image as the orientation in its EXIF data asks for, and whether they swap its sides.
_FLIP_X, _FLIP_Y = Op("v1.hflip"), Op("v1.vflip")
_LEFT, _RIGHT = Op("v2.quarter_turns", (1,)), Op("v2.quarter_turns", (3,))
_TURNS: tuple[tuple[tuple[Op, ...], bool], ...] = (
    *(((), False), ((_FLIP_X,), False), ((_FLIP_X, _FLIP_Y), False), ((_FLIP_Y,), False)),
    *(((_LEFT, _FLIP_Y), True), ((_RIGHT,), True), ((_LEFT, _FLIP_X), True), ((_LEFT,), True)),
)
_last_read = threading.local()


class Operator:
    """Stand-in for an operator of `torch.ops.image`; whatever else is asked of it, the stock one answers."""

    def __init__(self, stock: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._stock, self._call = stock, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stock(*args, **kwargs) if is_executing() else self._call(self._stock, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def read_file(stock: Callable[..., Any], path: str) -> torch.Tensor:
    """The bytes of a file; whose they are is known until the next file is read."""
    data = stock(path)
    _last_read.file = weakref.ref(data), path
    return data


def decode_file(stock: Callable[..., Any], data: Any, mode: int, apply_exif_orientation: bool = False) -> Any:
    """A handle for a file that the JPEG kernels cover; what else there is, is decoded here."""
    source = _source(data, mode) if type(data) is torch.Tensor else None
    if source is None:
        return decode_pixels(stock, data, mode, apply_exif_orientation)
    turns, swapped = _turns(stock, bytes(source.data)) if apply_exif_orientation else _TURNS[0]
    width, height = reversed(source.size) if swapped else source.size
    shape = (1 if source.mode == "L" else 3, height, width)
    return LazyTensor(source, (Op("pil_to_tensor"), *turns), shape, torch.uint8)


def decode_pixels(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pixels that stock code decoded, as a handle on which operations record."""
    pixels = stock(*args, **kwargs)
    reason = _reason_against(pixels)
    if reason:
        report_fallback("torchvision.io", reason)
        return pixels
    array = pixels.permute(1, 2, 0).numpy()
    source = PixelSource(Image.fromarray(array if len(pixels) == 3 else array[:, :, 0]), _path_of(args[0]))
    return LazyTensor(source, (Op("pil_to_tensor"),), tuple(pixels.shape), torch.uint8)  # type: ignore[arg-type]


def _reason_against(pixels: torch.Tensor) -> str:
    """Why no handle can stand for a tensor; "" where one can."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 3 or pixels.shape[0] not in (1, 3):
        return f"no kernel for {pixels.dtype} tensors of shape {'x'.join(map(str, pixels.shape[:-2]))} x height x width"
    return "" if pixels.permute(1, 2, 0).is_contiguous() else "turned by its EXIF data"


def _source(data: torch.Tensor, mode: int) -> EncodedSource | None:
    """The file whose decoded pixels a handle can stand for, or None where stock code should decode it, or raise."""
    unchanged, gray, rgb = (each.value for each in (ImageReadMode.UNCHANGED, ImageReadMode.GRAY, ImageReadMode.RGB))
    if mode not in (unchanged, gray, rgb) or data.dtype != torch.uint8 or data.ndim != 1 or data.device.type != "cpu":
        return None
    # Nothing may raise later: stock code raises here.
    source = encoded_source(data.numpy().tobytes(), _path_of(data), thorough=True)
    if source is None or source.header.scan is None or source.header.scan.sampling in _samplings_of_their_own():
        return None
    if mode == rgb:
        return source._replace(mode="RGB")
    # The gray of a color file is its luma here, and another formula in Pillow.
    return source if mode == unchanged or source.mode == "L" else None


def _path_of(data: torch.Tensor) -> str:
    file, path = getattr(_last_read, "file", (None, ""))
    return path if file is not None and file() is data else "an image in memory"


@functools.cache
def _samplings_of_their_own() -> frozenset[tuple[int, int]]:
    """The samplings of which torchvision's libjpeg makes other pixels than Pillow's, and the kernels, do.

    For instance (1, 2) before torchvision 0.29, which repeats chroma rows where the newer libjpeg interpolates.
    """
    found = set()
    with executing():
        for case in proof.cases():
            data = torch.frombuffer(bytearray(case.source.data), dtype=torch.uint8)
            pixels = torch.ops.image.decode_jpeg(data, ImageReadMode.UNCHANGED.value)
            image = np.asarray(case.source.open())
            is_same = np.array_equal(pixels.permute(1, 2, 0).numpy().reshape(image.shape), image)
            if case.source.header.scan is not None and not is_same:
                found.add(case.source.header.scan.sampling)
    return frozenset(found)


def _turns(stock: Callable[..., Any], data: bytes) -> tuple[tuple[Op, ...], bool]:
    """The calls that turn an image as stock code turns it, found by decoding a tiny file with the same EXIF data."""
    segment = _exif_segment(data)
    if not segment:
        return _TURNS[0]
    tiny = _tiny_file()
    plain, turned = (
        stock(torch.frombuffer(bytearray(tiny[:2] + segment + tiny[2:]), dtype=torch.uint8), 0, is_turned)[0]
        for is_turned in (False, True)
    )
    looks = [replay(plain[None], ops)[0] for ops, _ in _TURNS]
    return _TURNS[next(at for at, look in enumerate(looks) if torch.equal(look, turned))]


def _exif_segment(data: bytes) -> bytes:
    """The first segment of a file that may hold EXIF data, with its marker; b"" where there is none."""
    position = 2
    while data[position + 1] != 0xDA:
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if data[position + 1] == _APP1:
            return data[position:end]
        position = end
    return b""


@functools.cache
def _tiny_file() -> bytes:
    """A gray JPEG file of 4 x 4 pixels that looks different from every side."""
    ramp = np.arange(0, 256, 16, dtype=np.uint8).reshape(4, 4)
    return proof.encoded(Image.fromarray(ramp), quality=100)


# By name, what stands in for an operator.
OPERATORS: dict[str, Callable[..., Any]] = {
    "read_file": read_file,
    "decode_image": decode_file,
    "decode_jpeg": decode_file,
    "decode_png": decode_pixels,
    "decode_webp": decode_pixels,
}
