"""Encoded bytes -> pixels: providers, the host's half of the JPEG decoder in Triton, and `decode_images`."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from PIL import Image

from torch_sink.common.arguments import explains_wrong_calls
from torch_sink.common.transfer import to_device
from torch_sink.errors import DecodeError
from torch_sink.image.core.fallback import executing
from torch_sink.image.core.settings import available_device, default_device
from torch_sink.image.decode.encoded import EncodedSource, encoded_source, read_file
from torch_sink.image.decode.providers import check_provider, decode_sources
from torch_sink.image.decode.source import PixelSource


@explains_wrong_calls()
def decode_images(
    sources: Sequence[bytes | str | Path],
    *,
    device: torch.device | str | None = None,
    provider: str | None = None,
    mode: Literal["RGB", "L"] = "RGB",
    on_error: Literal["raise", "none"] = "raise",
) -> list[torch.Tensor]:
    """Decodes images of any sizes and formats in one call.

    Args:
        sources: files' contents, or paths; any format that Pillow reads.
        device: device of the results; default the current accelerator, else the CPU.
        provider: one of `decode_providers()`; an image that it cannot take goes to the next one.
        mode: "RGB" or "L".
        on_error: "raise", or "none" to get None in the place of a broken, missing or unreadable image.

    Returns:
        uint8 tensors [C, H, W] in [0, 255] on `device`, in order.

    Raises:
        DecodeError: an image is broken and `on_error` is "raise".
        OSError: a file is missing or cannot be read, and `on_error` is "raise".
        RuntimeError: the device is not there.
        ValueError: an unknown provider, mode or on_error, or a provider that does not work for the device.
    """
    device = torch.device(default_device() if device is None else available_device(device))
    if isinstance(sources, (bytes, bytearray, str, os.PathLike)):
        raise TypeError(f"sources must be a list of bytes or paths, got one {type(sources).__name__}; put it in a list")
    check_provider(provider, device)
    if mode not in ("RGB", "L"):
        raise ValueError(f"mode must be 'RGB' or 'L', got {mode!r}")
    if on_error not in ("raise", "none"):
        raise ValueError(f"on_error must be 'raise' or 'none', got {on_error!r}")
    prepared = [_prepare(source, index, mode) for index, source in enumerate(sources)]
    good = [source for source in prepared if not isinstance(source, OSError)]
    decoded = iter(decode_sources(good, device, provider))
    images: list[torch.Tensor] = []
    for index, source in enumerate(prepared):
        result = source if isinstance(source, OSError) else next(decoded)
        if isinstance(result, OSError):
            if on_error == "raise" and isinstance(result, DecodeError):
                raise DecodeError(result.path, index, result.reason) from result
            if on_error == "raise":
                raise result
            images.append(None)  # type: ignore[arg-type]
            continue
        images.append(to_device(result.pixels, device).contiguous())
    return images


def _prepare(source: bytes | str | Path, index: int, mode: str) -> EncodedSource | PixelSource | OSError:
    if isinstance(source, (bytes, bytearray, memoryview)):
        data, path = bytes(source), f"bytes at position {index}"
    elif isinstance(source, (str, os.PathLike)):
        try:
            data, path = read_file(source) or b"", os.fspath(source)
        except OSError as error:
            return error
    else:
        raise TypeError(f"sources must be bytes or paths, got {type(source).__name__} at position {index}")
    encoded = encoded_source(data, path, mode)
    if encoded is not None:
        return encoded
    try:
        with executing(), Image.open(io.BytesIO(data)) as image:
            return PixelSource(Image.Image.convert(image, mode), path)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return DecodeError(path, index, str(error))
