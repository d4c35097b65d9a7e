"""The files of a batch become pixels: what the JPEG kernels take is launched, and nobody waits for it at first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from torch_sink.errors import DecodeError
from torch_sink.image.core.transfer import to_host_later
from torch_sink.image.decode.providers import decode_sources, launch_packed
from torch_sink.image.execute.packed import Packed
from torch_sink.image.execute.pixels import Pixels, pixels_of
from torch_sink.image.sources.source import Box, Decoded


class Decoding:
    """A batch whose decoding has begun.

    Args:
        packed: its sources; those that nobody reads are left out.
        boxes: int32 [sources, 4], the part of each that is read.
        device: where the pixels are wanted.

    Attributes:
        pixels: of each source. What is damaged may be anything.
        errors: by number of source, those that are known.
    """

    def __init__(self, packed: Packed, boxes: np.ndarray, device: torch.device) -> None:
        self._packed, self._device = packed, device
        files = packed.jpegs.sources
        self._launched = launch_packed(packed.jpegs, boxes[files], packed.blob, device)
        self._status: Callable[[], torch.Tensor] | None = None
        is_read = boxes[:, 2] > 0
        if self._launched is not None:
            # It travels while the host goes on.
            self._status = to_host_later(self._launched.status)
            is_read[files] = False
        others = np.flatnonzero(is_read).tolist()
        sources = [packed.source(at) for at in others]
        parts = [_part(boxes[at], *source.size) for at, source in zip(others, sources, strict=True)]  # type: ignore[union-attr]
        found = dict(zip(others, decode_sources(sources, device, boxes=parts), strict=True))  # type: ignore[arg-type]
        self.errors = {at: image for at, image in found.items() if isinstance(image, DecodeError)}
        nothing = Pixels(np.zeros((len(boxes), 4), np.int64), ())
        self.pixels = nothing.replaced(others, pixels_of(list(found.values()), device))
        if self._launched is not None:
            self.pixels = self.pixels.replaced(files, Pixels(self._launched.places, self._launched.owners))

    def errors_of(self, sources: np.ndarray) -> dict[int, DecodeError]:
        """By position, those of some sources."""
        if not self.errors:
            return {}
        return {row: self.errors[at] for row, at in enumerate(sources.tolist()) if at in self.errors}

    def decode_again(self) -> list[int]:
        """Waits for the kernels; Pillow decodes what they found damaged. Returns which sources have new pixels."""
        if self._status is None or self._launched is None:
            return []
        damaged = self._launched.files.sources[np.flatnonzero(self._status().numpy())].tolist()
        images = decode_sources([self._packed.source(at) for at in damaged], self._device, "pillow")  # type: ignore[misc]
        found = dict(zip(damaged, images, strict=True))
        self.errors |= {at: image for at, image in found.items() if isinstance(image, DecodeError)}
        decoded = {at: image for at, image in found.items() if isinstance(image, Decoded)}
        self.pixels = self.pixels.replaced(list(decoded), pixels_of(list(decoded.values()), self._device))
        return list(decoded)


def _part(box: np.ndarray, width: int, height: int) -> Box | None:
    """A box; None where it is the whole image."""
    found = Box(*box.tolist())
    return None if found == (0, 0, width, height) else found
