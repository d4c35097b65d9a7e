"""The files of a batch become pixels: what the JPEG kernels take is launched, and nobody waits for it at first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.errors import DecodeError
from torch_sink.image.core.state import host_buffer, to_host_later
from torch_sink.image.decode.providers import decode_sources, launch_packed
from torch_sink.image.decode.source import Box, Decoded
from torch_sink.image.execute.packed import Packed
from torch_sink.image.execute.planned import Order, Planned


class Pixels(NamedTuple):
    """Pixels of some images, all on the device that the batch is made on.

    Attributes:
        places: int64 [images, 4], the address of pixel (0, 0) of each, and bytes between rows, columns and channels.
        owners: the tensors that they lie in.
    """

    places: np.ndarray
    owners: tuple[torch.Tensor, ...]

    def places_from(self, workspace: torch.Tensor) -> np.ndarray:
        """`places` with positions in bytes from the beginning of a tensor."""
        return self.places - np.array([workspace.data_ptr(), 0, 0, 0])

    def chosen(self, images: np.ndarray) -> Pixels:
        """Those of some images."""
        return Pixels(self.places[images], self.owners)

    def replaced(self, images: Sequence[int] | np.ndarray, other: Pixels) -> Pixels:
        """These with other pixels for some images."""
        places = self.places.copy()
        places[images] = other.places
        return Pixels(places, self.owners + other.owners)


def pixels_of(images: Sequence[Decoded | DecodeError], device: torch.device) -> Pixels:
    """Those of images on the host or the device; what is on the host goes to the device in one transfer.

    Args:
        images: in the place of one that is damaged a single 0 is read everywhere.
        device: where they are wanted.
    """
    places = np.zeros((len(images), 4), np.int64)
    there = [(at, image) for at, image in enumerate(images) if isinstance(image, Decoded)]
    owners = _sent([image.pixels.as_strided((image.pixels.numel(),), (1,)) for _, image in there], device)
    for (at, image), owner in zip(there, owners, strict=True):
        places[at] = image.place
        places[at, 0] += owner.data_ptr()
    if len(there) < len(images):
        owners.append(torch.zeros(1, dtype=torch.uint8, device=device))
        places[[isinstance(image, DecodeError) for image in images], 0] = owners[-1].data_ptr()
    return Pixels(places, tuple(owners))


def _sent(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """uint8 tensors [bytes] on the device: those of the host in one transfer, the others themselves."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if device.type == "cpu" or not on_host:
        return tensors
    sizes = [len(tensor) for tensor in on_host]
    together = torch.cat(on_host, out=host_buffer(sum(sizes), torch.uint8, device))
    arrived = iter(together.to(device, non_blocking=True).split(sizes))
    return [next(arrived) if tensor.device.type == "cpu" else tensor for tensor in tensors]


class Decoding:
    """A batch whose decoding has begun.

    Args:
        packed: its sources; those that nobody reads are left out.
        order: how the JPEG files are decoded.
        host: uint8 [bytes], which its arrays lie in.
        plan: gives the plan of the batch; asked only where the order does not say enough.
        device: where the pixels are wanted.

    Attributes:
        errors: by number of source, those that are known.
        workspace: uint8 [bytes] for the stages, where they read all pixels at the places that the order expects; else
            None.
    """

    def __init__(
        self, packed: Packed, order: Order, host: torch.Tensor, plan: Callable[[], Planned], device: torch.device
    ) -> None:
        self._packed, self._plan, self._device = packed, plan, device
        self.errors: dict[int, DecodeError] = {}
        self._changed: list[tuple[Sequence[int], Pixels]] = []  # of some sources, instead of what was launched
        self.workspace: torch.Tensor | None = None
        jpegs, spare_bytes = order.jpegs_in(host), order.workspace_bytes if order.is_placed else 0
        self._launched = launch_packed(jpegs, packed.blob, device, spare_bytes) if jpegs else None
        # It travels while the host goes on.
        self._status = to_host_later(self._launched.status) if self._launched is not None else None
        if self._launched is not None and order.is_placed:
            (owner,) = self._launched.owners
            self.workspace = owner[len(owner) - spare_bytes :]
        else:
            self._decode_rest()

    @functools.cached_property
    def _files(self) -> np.ndarray:
        """Sources that kernels decode."""
        jpegs = self._plan().jpegs
        return np.zeros(0, np.int32) if jpegs is None or self._launched is None else jpegs.sources

    def _decode_rest(self) -> None:
        """Decodes what the kernels do not, before anything else happens."""
        boxes = self._plan().boxes
        is_read = boxes[:, 2] > 0
        is_read[self._files] = False
        places = np.flatnonzero(is_read).tolist()
        if not places:
            return
        sources = [self._packed.source(at) for at in places]
        parts = [_part(boxes[at], *source.size) for at, source in zip(places, sources, strict=True)]  # type: ignore[union-attr]
        images = decode_sources(sources, self._device, boxes=parts)  # type: ignore[arg-type]
        self._take(places, images)

    def _take(self, places: list[int], images: Sequence[Decoded | DecodeError]) -> None:
        found = zip(places, images, strict=True)
        self.errors |= {at: image for at, image in found if isinstance(image, DecodeError)}
        self._changed.append((places, pixels_of(images, self._device)))

    @property
    def pixels(self) -> Pixels:
        """Those of each source. What is damaged may be anything."""
        pixels = Pixels(np.zeros((len(self._plan().boxes), 4), np.int64), ())
        jpegs = self._plan().jpegs
        if self._launched is not None and jpegs is not None:
            launched = self._launched._replace(plan=jpegs)
            pixels = pixels.replaced(self._files, Pixels(launched.places, launched.owners))
        for places, other in self._changed:
            pixels = pixels.replaced(places, other)
        return pixels

    def errors_of(self, sources: np.ndarray) -> dict[int, DecodeError]:
        """By position, those of some sources."""
        return {row: self.errors[at] for row, at in enumerate(sources.tolist()) if at in self.errors}

    def decode_again(self) -> list[int]:
        """Waits for the kernels; Pillow decodes what they found damaged. Returns which sources have new pixels."""
        status = None if self._status is None else self._status()
        found = [] if status is None else status.tolist()
        if not any(found):
            return []
        damaged = self._files[np.flatnonzero(found)].tolist()
        images = decode_sources([self._packed.source(at) for at in damaged], self._device, "pillow")  # type: ignore[misc]
        self._take(damaged, images)
        return [at for at in damaged if at not in self.errors]


def _part(box: np.ndarray, width: int, height: int) -> Box | None:
    """A box; None where it is the whole image."""
    found = Box(*box.tolist())
    return None if found == (0, 0, width, height) else found
