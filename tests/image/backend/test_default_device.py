"""Scripts may name a default device for the tensors they make; what stays on the host must not follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.jpeg_cases import open_file
from torch.utils.data import default_collate
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import encoded
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode.jpeg_block import lay_out_jpegs
from torch_sink.image.decode.jpeg_decoder import block_on_device

Call = Callable[[Any], Any]
# Sizes and values of their own: tables that an earlier test left would hide a fault.
CALLS: dict[str, Call] = {
    "Pillow image": lambda image: F1.normalize(F1.to_tensor(F1.resize(image, [23, 29])), [0.41] * 3, [0.27] * 3),
    "affine": lambda image: F1.affine(F1.pil_to_tensor(image), 13.5, [1, 2], 1.1, [3.0, 4.0]),
    "perspective": lambda image: F2.perspective(
        F1.pil_to_tensor(image), [[0, 0], [30, 0], [30, 36], [0, 36]], [[1, 2], [29, 1], [28, 35], [2, 34]]
    ),
    "elastic": lambda image: F2.elastic(F1.pil_to_tensor(image), torch.full((1, 37, 31, 2), 0.02, device="cpu")),
    "nearest": lambda image: F1.resize(F1.pil_to_tensor(image), [19, 21], InterpolationMode.NEAREST),
    "posterize": lambda image: F1.posterize(F1.pil_to_tensor(image), 3),
    "gamma": lambda image: F2.adjust_gamma(F1.pil_to_tensor(image), 1.37),
    "erased floats": lambda image: F1.normalize(
        F1.erase(F1.to_tensor(image), 1, 2, 5, 6, torch.full((3, 1, 1), 0.35, device="cpu")), [0.43] * 3, [0.2] * 3
    ),
}  # fmt: skip


def planned(call: Call, default: torch.device) -> list[Any]:
    """What the device would get of a batch of one image."""
    with torch_sink.image_backend("device", device="meta", strict=True):
        handle = call(make_photo(31, 37, 5))
        with default:
            batch = default_collate([handle])
    return [batch.program.packed.blob.tolist(), *map(repr, batch.program[1:])]


def made(call: Call, default: torch.device) -> list[Any]:
    """The batch of one image, made on the CPU."""
    with torch_sink.image_backend("device", device="cpu"):
        handle = call(make_photo(31, 37, 5))
        with default:
            batch = default_collate([handle])
    return [batch.dtype, batch.shape, batch.numpy().tobytes()]


@pytest.mark.parametrize("make", [planned, made])
@pytest.mark.parametrize("name", CALLS)
def test_batches_stay_on_the_host(name: str, make: Callable[[Call, torch.device], list[Any]]) -> None:
    elsewhere = make(CALLS[name], torch.device("meta"))
    assert elsewhere == make(CALLS[name], torch.device("cpu"))


def test_decoded_images() -> None:
    files = [encoded(40, 20, 1), encoded(20, 20, 2, "L"), encoded(21, 20, 3, "RGB", "PNG")]
    with torch.device("meta"):
        elsewhere = torch_sink.decode_images(files, device="cpu")
    for image, expected in zip(elsewhere, torch_sink.decode_images(files, device="cpu"), strict=True):
        assert torch.equal(image, expected)


def test_the_block_of_files() -> None:
    file = open_file(encoded(40, 20, 1))
    assert file is not None
    laid_out = lay_out_jpegs([file.source])
    with torch.device("meta"):
        block = block_on_device(laid_out, torch.device("cpu"))
    assert torch.equal(block, laid_out.chunks.write(torch.empty(laid_out.chunks.size, dtype=torch.uint8)))
