"""Encoded bytes -> pixels: one small interface, several providers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from torch_sink.common import usable_cores
from torch_sink.common.arguments import explains_wrong_calls
from torch_sink.errors import DecodeError
from torch_sink.image.core.settings import default_device
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.jpeg_proof import JPEG_KERNELS
from torch_sink.image.decode.source import Box, Decoded, PixelSource

Sources = Sequence[EncodedSource | PixelSource]
Results = list[Decoded | DecodeError]


class Provider:
    """One way to decode.

    Attributes:
        name: the name that `decode_images(provider=...)` takes.
        what_it_needs: part of a message: what to do where the provider is not usable.
    """

    name: str
    what_it_needs: str

    def usable(self, device: torch.device) -> bool:
        """True where this provider works for images wanted on `device`."""
        return True

    def by_default(self, device: torch.device) -> bool:
        """True where its pixels may equal Pillow's bit for bit, which `is_right` then tells; costs nothing.

        Where False, this provider decodes only if it is named.
        """
        return True

    def is_right(self, device: torch.device) -> bool:
        """True where its pixels on `device` equal Pillow's; called before it decodes without being named."""
        return True

    def takes(self, source: EncodedSource | PixelSource) -> bool:
        """True when this provider can decode this image."""
        return True

    def decode(self, sources: Sources, device: torch.device, boxes: Sequence[Box | None]) -> Results:
        """Pixels of every image, or its error, in order.

        Args:
            sources: the images to decode.
            device: where the pixels are wanted.
            boxes: the part of each image that is needed, None for all of it; a provider may return more.
        """
        raise NotImplementedError


_preferred: str | None = None


class TritonProvider(Provider):
    """The kernels of this package, on any GPU that Triton compiles for, or in its interpreter.

    Files that they do not cover go to the next provider; files that they find damaged go to Pillow, which decodes them
    or raises.
    """

    name = "triton"
    what_it_needs = (
        "it decodes on a GPU: give device='cuda' on a machine that has one; to try its kernels on the CPU, in Triton's "
        "interpreter, set TRITON_INTERPRET=1 in the environment before Python starts"
    )

    def usable(self, device: torch.device) -> bool:
        if device.type == "cpu":
            return os.environ.get("TRITON_INTERPRET") == "1"
        return device.type == "cuda" and torch.cuda.is_available()

    def by_default(self, device: torch.device) -> bool:
        return device.type != "cpu" and not JPEG_KERNELS.is_refuted(device)

    def is_right(self, device: torch.device) -> bool:
        return JPEG_KERNELS.verdict(device).holds

    def takes(self, source: EncodedSource | PixelSource) -> bool:
        return isinstance(source, EncodedSource) and source.header.scan is not None

    def decode(self, sources: Sources, device: torch.device, boxes: Sequence[Box | None]) -> Results:
        from torch_sink.image.decode.jpeg_decoder import decode_jpegs

        found = decode_jpegs(sources, boxes, device)  # type: ignore[arg-type]
        others = [at for at, image in enumerate(found) if image is None]
        again = iter(_pillow([sources[at] for at in others], device))
        return [next(again) if image is None else image for image in found]


class NvjpegProvider(Provider):
    """NVIDIA's decoder, through torchvision. It rounds differently from libjpeg, so it is used only where it is named.

    Takes what the kernels take, except subsampled chroma: torchvision cannot ask nvJPEG for smooth upsampling, and
    nearest-neighbor chroma differs from Pillow by more than a few levels.
    """

    name = "nvjpeg"
    what_it_needs = (
        "it decodes on NVIDIA GPUs: give device='cuda' on a machine that has one, with a torchvision that was built "
        "with nvJPEG"
    )

    def usable(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.is_available() and _nvjpeg() is not None

    def by_default(self, device: torch.device) -> bool:
        return False

    def takes(self, source: EncodedSource | PixelSource) -> bool:
        if not isinstance(source, EncodedSource) or source.header.scan is None:
            return False
        return source.header.scan.sampling == (1, 1) and (source.mode == "RGB" or source.header.mode == "L")

    def decode(self, sources: Sources, device: torch.device, boxes: Sequence[Box | None]) -> Results:
        from torchvision.io import ImageReadMode

        decode = _nvjpeg()
        assert decode is not None  # it is usable
        if device.index is None:
            # torchvision keeps a single decoder, and makes a new one where "cuda" follows "cuda:0".
            device = torch.device(device.type, torch.cuda.current_device())
        results: Results = [DecodeError("", -1, "")] * len(sources)
        # The hardware decoder of Hopper writes when it is called, not in stream order: memory that an earlier kernel
        # of this stream still reads must not be handed to it.
        torch.cuda.current_stream(device).synchronize()  # host sync
        for mode, read_mode in (("RGB", ImageReadMode.RGB), ("L", ImageReadMode.GRAY)):
            chosen = [at for at, source in enumerate(sources) if source.mode == mode]
            if not chosen:
                continue
            data = [torch.frombuffer(bytearray(sources[at].data), dtype=torch.uint8) for at in chosen]  # type: ignore[union-attr]
            try:
                images = decode(data, read_mode.value, device)
            except RuntimeError:
                # Streams of torchvision's own may still write to the images that it has given up.
                torch.cuda.synchronize(device)  # host sync
                # One broken file fails the whole list; Pillow finds it, and decodes the rest.
                for at, result in zip(chosen, _pillow([sources[at] for at in chosen], device), strict=True):
                    results[at] = result
                continue
            for at, image in zip(chosen, images, strict=True):
                results[at] = Decoded(image.contiguous())
        return results


@functools.cache
def _nvjpeg() -> Callable[..., list[torch.Tensor]] | None:
    """torchvision's operator (files, read mode, device) -> images; None where this build has none.

    The Python function around it warns of its deprecation in every call, and a thread cannot suppress warnings.
    """
    import torchvision.io  # noqa: F401 registers it

    return getattr(torch.ops.image, "decode_jpegs_cuda", None) if torch.version.cuda else None


class PillowProvider(Provider):
    """Pillow in a few threads. It takes every image, and its pixels are the reference."""

    name = "pillow"
    what_it_needs = "it works everywhere"

    def decode(self, sources: Sources, device: torch.device, boxes: Sequence[Box | None]) -> Results:
        if len(sources) == 1:
            return [_decode_with_pillow(sources[0])]
        return list(_threads(os.getpid()).map(_decode_with_pillow, sources))


PROVIDERS: dict[str, Provider] = {found.name: found for found in (TritonProvider(), NvjpegProvider(), PillowProvider())}


def _pillow(sources: Sources, device: torch.device) -> Results:
    """Decodes, by Pillow, images that another provider took but failed to decode."""
    return PROVIDERS["pillow"].decode(sources, device, [None] * len(sources)) if sources else []


@functools.lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Decoding threads of the process of this id; a forked child makes its own."""
    return ThreadPoolExecutor(min(usable_cores(), 16), thread_name_prefix="torch_sink-decode")


def _decode_with_pillow(source: EncodedSource | PixelSource) -> Decoded | DecodeError:
    try:
        image = source.image if isinstance(source, PixelSource) else source.decode()
    except DecodeError as error:
        return error
    return Decoded(torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1))


def providers_for(device: torch.device) -> list[Provider]:
    """Usable providers, best first."""
    return [provider for provider in PROVIDERS.values() if provider.usable(device)]


def check_provider(name: str | None, device: torch.device) -> None:
    """Refuses a provider that does not work for images wanted on `device`.

    Raises:
        ValueError: the provider is unknown or not usable; the message says what to do.
    """
    usable = [provider.name for provider in providers_for(device)]
    if name is None or name in usable:
        return
    what_to_do = f"; {PROVIDERS[name].what_it_needs}, or leave the provider out" if name in PROVIDERS else ""
    raise ValueError(
        f"decode provider {name!r} cannot be used for device {str(device)!r}; usable: {usable}{what_to_do}"
    )


def candidates(device: torch.device, provider: str | None = None) -> list[Provider]:
    """Providers that are tried in turn for pixels on a device: the named one, then those that work by default."""
    name = _named(device, provider)
    first = [PROVIDERS[name]] if name else []
    if first == [PROVIDERS["pillow"]]:
        return first  # it takes every image
    return first + [found for found in providers_for(device) if found.by_default(device) and found.name != name]


def _named(device: torch.device, provider: str | None) -> str | None:
    """The provider that a caller or `set_decode_provider` names; None where neither does."""
    return provider or (_preferred if _preferred and PROVIDERS[_preferred].usable(device) else None)


def decode_sources(
    sources: Sources, device: torch.device, provider: str | None = None, boxes: Sequence[Box | None] | None = None
) -> Results:
    """Decodes a ragged batch; an image that the best provider cannot take goes to the next one.

    Args:
        sources: the images to decode.
        device: where the pixels are wanted; a provider may leave them on the host.
        provider: name of the provider to begin with, as in `candidates`. A provider that is named is used even where
            its pixels differ from Pillow's.
        boxes: the part of each image that is needed, None for all of it; by default all of each.
    """
    boxes = boxes if boxes is not None else [None] * len(sources)
    results: list[Decoded | DecodeError | None] = [None] * len(sources)
    name = _named(device, provider)
    for candidate in candidates(device, provider):
        chosen = [at for at, source in enumerate(sources) if results[at] is None and candidate.takes(source)]
        if chosen and (candidate.name == name or candidate.is_right(device)):
            found = candidate.decode([sources[at] for at in chosen], device, [boxes[at] for at in chosen])
            for at, result in zip(chosen, found, strict=True):
                results[at] = result
    return results  # type: ignore[return-value]


def kernels_decode(device: torch.device) -> bool:
    """True where the JPEG kernels are tried first, and were named or passed their self-test."""
    kernels = PROVIDERS["triton"]
    return candidates(device)[0] is kernels and (bool(_named(device, None)) or kernels.is_right(device))


@explains_wrong_calls()
def set_decode_provider(name: str | None) -> None:
    """Chooses the provider that this process tries first wherever none is named, also for batches of the backend.

    Args:
        name: one of `decode_providers()`; None for the default. "nvjpeg" rounds differently from Pillow.

    Raises:
        ValueError: the provider is unknown, or does not work here.

    Examples:
        >>> set_decode_provider("pillow")
        >>> set_decode_provider(None)
    """
    global _preferred
    check_provider(name, torch.device(default_device()))
    _preferred = name


def decode_providers() -> list[str]:
    """Names of the decode providers that work here, best first.

    "triton" is the default on a GPU, after a self-test: it has to decode a few small files there to Pillow's pixels.
    "nvjpeg" decodes only if you ask for it, because its pixels differ slightly from Pillow's. So does "triton" in
    Triton's interpreter, because it is slow there.

    Examples:
        >>> "pillow" in decode_providers()
        True
    """
    return [provider.name for provider in providers_for(torch.device(default_device()))]
