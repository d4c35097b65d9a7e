"""Where the decoded pixels of a batch lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.errors import DecodeError
from torch_sink.image.core.transfer import host_buffer
from torch_sink.image.sources.source import Decoded

_ALIGNMENT_BYTES = 16


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
    owners = _sent([image.pixels for _, image in there], device)
    for (at, image), pixels in zip(there, owners, strict=True):
        places[at] = pixels.data_ptr() + image.origin, *image.strides
    if len(there) < len(images):
        owners.append(torch.zeros(_ALIGNMENT_BYTES, dtype=torch.uint8, device=device))
        places[[isinstance(image, DecodeError) for image in images], 0] = owners[-1].data_ptr()
    return Pixels(places, tuple(owners))


def _sent(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """uint8 tensors on the device: those of the host in one transfer, the others themselves."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    if device.type == "cpu" or not on_host:
        return list(tensors)
    sizes = np.array([tensor.numel() for tensor in on_host])
    ends = np.cumsum(-(-sizes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    begins = (ends - -(-sizes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES).tolist()
    staging = host_buffer(int(ends[-1]), torch.uint8, device)
    for begin, tensor in zip(begins, on_host, strict=True):
        staging[begin : begin + tensor.numel()].copy_(tensor.flatten())
    arrived = staging.to(device, non_blocking=True)
    places = iter(begins)
    return [arrived[next(places) :] if tensor.device.type == "cpu" else tensor for tensor in tensors]
