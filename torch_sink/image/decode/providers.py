"""Encoded bytes -> pixels: one small interface, several providers."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from torch_sink.errors import DecodeError
from torch_sink.image.decode.decoded import Box, Decoded
from torch_sink.image.source import EncodedSource, PixelSource
from torch_sink.image.state import default_device


class Provider(Protocol):
    """One way to decode.

    Attributes:
        name: as `decode_images(provider=...)` takes it.
        exact: its pixels are Pillow's, bit for bit.
        by_default: it works for images unasked; else only where it is named.
        decodes_boxes: it saves work where only a part of an image is needed.
    """

    name: str
    exact: bool
    by_default: bool
    decodes_boxes: bool

    def usable(self, device: torch.device) -> bool:
        """True where this provider works for images wanted on `device`."""

    def takes(self, source: EncodedSource | PixelSource) -> bool:
        """True when this provider can decode this image."""

    def decode(
        self, sources: Sequence[EncodedSource | PixelSource], device: torch.device, boxes: Sequence[Box | None]
    ) -> list[Decoded | DecodeError]:
        """Pixels of every image, or its error, in order.

        Args:
            sources: what to decode.
            device: where the pixels are wanted.
            boxes: the part of each image that is needed, None for all of it; a provider may give more.
        """


PROVIDERS: dict[str, Provider] = {}
_preferred: str | None = None


def _register(provider: type[Provider]) -> type[Provider]:
    if provider.name in PROVIDERS:
        raise ValueError(f"decode provider {provider.name!r} is registered twice")
    PROVIDERS[provider.name] = provider()
    return provider


@_register
class NvjpegProvider:
    """NVIDIA's decoder, through torchvision.

    Takes files without subsampled chroma only: torchvision cannot ask nvJPEG for smooth chroma, and nearest chroma is
    further from Pillow than this package promises.
    """

    name = "nvjpeg"
    exact = False
    by_default = True
    decodes_boxes = False

    def usable(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.is_available() and torch.version.cuda is not None

    def takes(self, source: EncodedSource | PixelSource) -> bool:
        if not isinstance(source, EncodedSource):
            return False
        header = source.header
        return (
            header.full_chroma
            and not header.progressive
            and not header.adobe
            and header.mode != "CMYK"
            and (source.mode == "RGB" or header.mode == "L")
        )

    def decode(
        self, sources: Sequence[EncodedSource | PixelSource], device: torch.device, boxes: Sequence[Box | None]
    ) -> list[Decoded | DecodeError]:
        from torchvision.io import ImageReadMode, decode_jpeg

        results: list[Decoded | DecodeError] = [DecodeError("", -1, "")] * len(sources)
        # The hardware decoder of Hopper writes when it is called, not in stream order: memory that an earlier kernel
        # of this stream still reads must not be handed to it.
        torch.cuda.current_stream(device).synchronize()  # host sync
        for mode in ("RGB", "L"):
            chosen = [at for at, source in enumerate(sources) if source.mode == mode]
            if not chosen:
                continue
            data = [torch.frombuffer(bytearray(sources[at].data), dtype=torch.uint8) for at in chosen]  # type: ignore[union-attr]
            read_mode = ImageReadMode.RGB if mode == "RGB" else ImageReadMode.GRAY
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    images = decode_jpeg(data, mode=read_mode, device=device)
            except RuntimeError:
                # One broken stream fails the whole list; Pillow says which, and decodes the rest.
                for at, result in zip(chosen, _pillow([sources[at] for at in chosen], device), strict=True):
                    results[at] = result
                continue
            for at, image in zip(chosen, images, strict=True):
                results[at] = Decoded(image.contiguous(), channels_last=False)
        return results


@_register
class TritonProvider:
    """The kernels of this package, on any GPU that Triton compiles for, or in its interpreter.

    What they do not cover goes to the next provider; a file that they find damaged is given to Pillow, whose pixels or
    error it gets.
    """

    name = "triton"
    exact = True
    by_default = False
    decodes_boxes = True

    def usable(self, device: torch.device) -> bool:
        if device.type == "cpu":
            return os.environ.get("TRITON_INTERPRET") == "1"
        return device.type == "cuda" and torch.cuda.is_available()

    def takes(self, source: EncodedSource | PixelSource) -> bool:
        return isinstance(source, EncodedSource) and source.header.scan is not None

    def decode(
        self, sources: Sequence[EncodedSource | PixelSource], device: torch.device, boxes: Sequence[Box | None]
    ) -> list[Decoded | DecodeError]:
        from torch_sink.image.decode.jpeg import decode_jpegs

        found = decode_jpegs(sources, boxes, device)  # type: ignore[arg-type]
        others = [at for at, image in enumerate(found) if image is None]
        again = iter(_pillow([sources[at] for at in others], device))
        return [next(again) if image is None else image for image in found]


@_register
class PillowProvider:
    """Pillow in a few threads; it takes everything, and defines what is right."""

    name = "pillow"
    exact = True
    by_default = True
    decodes_boxes = False

    def usable(self, device: torch.device) -> bool:
        return True

    def takes(self, source: EncodedSource | PixelSource) -> bool:
        return True

    def decode(
        self, sources: Sequence[EncodedSource | PixelSource], device: torch.device, boxes: Sequence[Box | None]
    ) -> list[Decoded | DecodeError]:
        if len(sources) == 1:
            return [_decode_with_pillow(sources[0])]
        return list(_threads(os.getpid()).map(_decode_with_pillow, sources))


def _pillow(sources: Sequence[EncodedSource | PixelSource], device: torch.device) -> list[Decoded | DecodeError]:
    """What Pillow makes of images that another provider could not decode after all."""
    return PROVIDERS["pillow"].decode(sources, device, [None] * len(sources)) if sources else []


@functools.lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Decoding threads of this process; a forked child makes its own."""
    return ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), 16), thread_name_prefix="torch_sink-decode")


def _decode_with_pillow(source: EncodedSource | PixelSource) -> Decoded | DecodeError:
    try:
        image = source.image if isinstance(source, PixelSource) else source.decode()
    except DecodeError as error:
        return error
    pixels = torch.from_numpy(np.array(image))
    return Decoded(pixels if pixels.ndim == 3 else pixels[:, :, None], channels_last=True)


def providers_for(device: torch.device) -> list[Provider]:
    """Usable providers, best first."""
    return [provider for provider in PROVIDERS.values() if provider.usable(device)]


def candidates(device: torch.device, provider: str | None = None) -> list[Provider]:
    """Providers that images go to in turn: the one that is named and those after it, or those that work by default.

    Args:
        device: where pixels are wanted.
        provider: name of the provider to begin with; by default what `set_decode_provider` says.
    """
    usable = providers_for(device)
    names = [found.name for found in usable]
    provider = provider or (_preferred if _preferred in names else None)
    if provider is None:
        return [found for found in usable if found.by_default]
    return usable[names.index(provider) :]


def decodes_boxes(device: torch.device) -> bool:
    """True where it is worth knowing which parts of images are needed."""
    return any(provider.decodes_boxes for provider in candidates(device))


def decode_sources(
    sources: Sequence[EncodedSource | PixelSource],
    device: torch.device,
    provider: str | None = None,
    boxes: Sequence[Box | None] | None = None,
) -> list[Decoded | DecodeError]:
    """Decodes a ragged batch; an image that the best provider cannot take goes to the next one.

    Args:
        sources: what to decode.
        device: where the pixels are wanted; a provider may leave them on the host.
        provider: name of the provider to begin with, as `candidates` takes it.
        boxes: the part of each image that is needed, None for all of it; by default all of each.
    """
    boxes = boxes if boxes is not None else [None] * len(sources)
    results: list[Decoded | DecodeError | None] = [None] * len(sources)
    for candidate in candidates(device, provider):
        chosen = [at for at, source in enumerate(sources) if results[at] is None and candidate.takes(source)]
        if chosen:
            found = candidate.decode([sources[at] for at in chosen], device, [boxes[at] for at in chosen])
            for at, result in zip(chosen, found, strict=True):
                results[at] = result
    return results  # type: ignore[return-value]


def set_decode_provider(name: str | None) -> None:
    """Chooses the provider that this process begins with wherever none is named, batches of the backend included.

    Args:
        name: one of `decode_providers()`; None for what is best by default.

    Raises:
        ValueError: the provider is unknown, or does not work here.

    Example:
        >>> set_decode_provider("pillow")
        >>> set_decode_provider(None)
    """
    global _preferred
    if name is not None and name not in decode_providers():
        raise ValueError(f"decode provider {name!r} cannot be used here; usable: {decode_providers()}")
    _preferred = name


def decode_providers() -> list[str]:
    """Names of the decode providers that work here, best first; "triton" decodes only where it is named.

    Example:
        >>> "pillow" in decode_providers()
        True
    """
    return [provider.name for provider in providers_for(torch.device(default_device()))]
