"""Whether the JPEG kernels give Pillow's pixels on this machine: they decode small files before anybody's own."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import platform
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image, features

from torch_sink.image.core.fallback import executing
from torch_sink.image.core.state import to_host
from torch_sink.image.decode.source import Box, EncodedSource, encoded_source

_FILE = "jpeg_kernels.json"
_SIZE = 67, 45  # pixels: no side is a multiple of an MCU's


class Verdict(NamedTuple):
    """What came of decoding the files."""

    holds: bool  # the kernels gave Pillow's pixels for all of them
    reason: str = ""  # else the first difference, or the error
    lasts: bool = True  # it would be the same in another process; an error may be gone there


class _Case(NamedTuple):
    """A file, the part of it that is wanted (None for all), and what the file has to show."""

    name: str
    source: EncodedSource
    box: Box | None = None


def verdict(device: torch.device) -> Verdict:
    """Whether the kernels are right on a device: found out once for each driver and Triton, then read from its cache.

    Warns where they are not.
    """
    device = _with_index(device)
    if device not in _FOUND:
        _FOUND[device] = found = _recalled_or_proved(device)
        if not found.holds:
            warnings.warn(
                f"Pillow's threads decode JPEG files, not the device: {found.reason}. See python -m torch_sink doctor",
                RuntimeWarning,
                stacklevel=2,
            )
    return _FOUND[device]


def is_refuted(device: torch.device) -> bool:
    """True where this process has found the kernels wrong; finds nothing out."""
    found = _FOUND.get(_with_index(device))
    return found is not None and not found.holds


_FOUND: dict[torch.device, Verdict] = {}  # by this process


def prove(device: torch.device) -> Verdict:
    """Decodes the files on a device, with every kernel that a batch may choose, and compares with Pillow.

    Args:
        device: where; the CPU in a process with Triton's interpreter.
    """
    try:
        difference = _first_difference(device)
    except Exception as error:  # whatever a compiler, a driver or a device raises
        text = str(error).strip().partition("\n")[0]
        return Verdict(False, f"{type(error).__name__}: {text}", lasts=False)
    return Verdict(not difference, difference)


def _first_difference(device: torch.device) -> str:
    """The first file whose pixels are not Pillow's, in words; "" where there is none."""
    from torch_sink.image.decode.jpeg_decoder import decode_jpegs
    from torch_sink.triton_kernels.launching import is_interpreted
    from torch_sink.triton_kernels.shapes import INTERPRETED_LANE_SHAPE, LANE_SHAPES

    files = list(cases())
    sources, boxes = [case.source for case in files], [case.box for case in files]
    for shape in (INTERPRETED_LANE_SHAPE,) if is_interpreted() else LANE_SHAPES:
        for case, image in zip(files, decode_jpegs(sources, boxes, device, shape), strict=True):
            if image is None:
                return f"the kernels take a {case.name} file for damaged"
            expected = _pillows_pixels(case)
            wrong = int((to_host(image.pixels) != expected).sum())
            if wrong:
                return f"{wrong} of {expected.numel()} values of a {case.name} file differ from Pillow's"
    return ""


def _pillows_pixels(case: _Case) -> torch.Tensor:
    """uint8 [C, H, W]."""
    image = case.source.decode()
    if case.box is not None:
        left, top, width, height = case.box
        image = image.crop((left, top, left + width, top + height))
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1)


def cases() -> Iterator[_Case]:
    """Every sampling and mode that the kernels decode, restart markers, tables of a file's own, a part of an image."""
    with executing():
        picture = _picture(*_SIZE)
        gray = picture.convert("L")
        for sampling in ("4:4:4", "4:2:2", "4:2:0"):
            yield _case(sampling, encoded(picture, subsampling=sampling, quality=90))
        yield _case("4:4:0", _with_halved_height(encoded(picture, subsampling="4:2:2", quality=90)))
        yield _case("gray", encoded(gray, quality=90))
        yield _case("4:2:0, as gray", encoded(picture, quality=75), mode="L")
        yield _case("4:2:0, restarted", encoded(picture, quality=75, restart_marker_blocks=3, optimize=True))
        yield _case("4:2:0, cropped", encoded(picture, quality=50), box=Box(19, 7, 30, 22))


def _case(name: str, data: bytes, mode: str | None = None, box: Box | None = None) -> _Case:
    source = encoded_source(data, f"{name} file of torch_sink", mode)
    assert source is not None
    return _Case(name, source, box)


def _picture(width: int, height: int) -> Image.Image:
    """Waves of another length in each channel, and noise."""
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    waves = [np.sin(across / length) * np.cos(down / (length + 3)) for length in (5, 9, 14)]
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 3))
    values = 128 + 90 * np.stack(waves, axis=-1) + noise
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def _with_halved_height(data: bytes) -> bytes:
    """A 4:2:2 file as a 4:4:0 one, which Pillow does not write: the same units, in an image that lies on its side."""
    frame = data.index(b"\xff\xc0") + len(b"\xff\xc0") + 3  # length and precision come first
    height, width, components = data[frame : frame + 2], data[frame + 2 : frame + 4], data[frame + 4 :]
    assert components[2] == 0x21
    return data[:frame] + width + height + components[:2] + b"\x12" + components[3:]


def _with_index(device: torch.device) -> torch.device:
    """The device that "cuda" means."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _fingerprint(device: torch.device) -> str:
    """Equal where the kernels would do the same: of the device, its driver, the releases at work, and our own code."""
    import triton

    from torch_sink.triton_kernels import jpeg as kernels

    facts = [torch.cuda.get_device_name(device), _driver(), torch.__version__, triton.__version__]
    facts += [PIL.__version__, str(features.version("libjpeg_turbo"))]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for folder in (Path(__file__).parent, Path(kernels.__file__).parent, Path(kernels.__file__).parents[1]):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _driver() -> str:
    """Release of the driver's kernel module; where the system hides it (WSL), what the driver's library says."""
    for path in (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.is_file():
            return path.read_text().strip()
    version = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{platform.release()} {version.value}"


def _recalled_or_proved(device: torch.device) -> Verdict:
    """What an earlier process found, or this one does, which leaves it to later ones."""
    from triton.runtime.cache import get_cache_manager

    key = _fingerprint(device)
    # Where the cache cannot be read or written, each process finds out again.
    with suppress(OSError, RuntimeError, ValueError, TypeError):
        if path := get_cache_manager(key).get_file(_FILE):
            return Verdict(*json.loads(Path(path).read_text()))
    found = prove(device)
    with suppress(OSError, RuntimeError):
        if found.lasts:
            get_cache_manager(key).put(json.dumps(found), _FILE, binary=False)
    return found
