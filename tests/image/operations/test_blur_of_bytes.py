"""The blur that makes values on the CPU has the bits of stock torchvision, for weights that are denormal numbers too."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_sink.image.core.ops import STOCK
from torch_sink.image.operations.functionals import stock_of

pytestmark = pytest.mark.halved

SIGMAS = (0.1, 0.3, 0.7, 1.0, 1.9, 5.0)


def images() -> list[torch.Tensor]:
    """Flat, almost flat and noisy ones, of one to four channels, contiguous and as Pillow lays pixels out."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (4, 37, 41), generator=generator, dtype=torch.uint8)
    dots = torch.zeros(3, 37, 41, dtype=torch.uint8)
    dots[:, 18, 20] = 255
    dots[:, 0, 0] = 1
    white = torch.full((3, 37, 41), 255, dtype=torch.uint8)
    laid_out = noise[:3].permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return [noise, noise[:3], noise[:1], dots, white, torch.zeros_like(white), white - dots, laid_out]


@pytest.mark.parametrize("name", ["v1.gaussian_blur", "v2.gaussian_blur"])
def test_bytes_are_those_of_stock_code(name: str) -> None:
    stock = stock_of("gaussian_blur")[name]
    for size, image in itertools.product(((3, 3), (9, 9), (23, 23), (31, 5)), images()):
        for sigma in itertools.product(SIGMAS, SIGMAS[::3]):
            made = STOCK[name](image, size, sigma)
            assert torch.equal(made, stock(image, list(size), list(sigma))), (size, sigma)


@pytest.mark.parametrize("name", ["v1.gaussian_blur", "v2.gaussian_blur"])
def test_sums_are_those_of_stock_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they are rounded to bytes, down to the denormal numbers that a dot leaves far from itself."""
    sums: list[torch.Tensor] = []
    round_ = torch.Tensor.round_
    monkeypatch.setattr(torch.Tensor, "round_", lambda values: sums.append(values.clone()) or round_(values))
    monkeypatch.setattr(torch, "round", lambda values: sums.append(values.clone()) or round_(values))
    saw_denormal = False
    for size, image in itertools.product(((9, 9), (23, 23)), images()):
        for sigma in SIGMAS:
            STOCK[name](image, size, (sigma, sigma))
            stock_of("gaussian_blur")[name](image, list(size), [sigma, sigma])
            made, expected = sums[-2:]
            assert torch.equal(made.reshape(expected.shape), expected), (size, sigma)
            small = expected[(expected != 0) & (expected < 2.0**-126)]
            saw_denormal |= bool(len(small))
    assert saw_denormal
