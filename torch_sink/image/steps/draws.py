"""Numbers from torch's global generator, as torchvision's transforms draw them.

Each function makes the same draws in the same order as torchvision's code, so results and the state of the generator
afterwards are equal.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import torch


class Room:
    """Tensors of one element to draw numbers into, of the default dtype and on the default device."""

    def __init__(self) -> None:
        self.whole = torch.empty(1, dtype=torch.int64)
        self.real = torch.empty(1)


class _KeptRoom(threading.local):
    """A room that each thread keeps, since a new one costs more than a draw; float32 on the CPU."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.whole = torch.empty(1, dtype=torch.int64, device="cpu")
            self.real = torch.empty(1, dtype=torch.float32, device="cpu")
            self.two = torch.empty(2, dtype=torch.float32, device="cpu")
            self.wholes = torch.empty(2, dtype=torch.int64, device="cpu")


kept = _KeptRoom()


def whole(end: int) -> int:
    """A whole number in [0, end)."""
    return kept.whole.random_(0, end).item()  # type: ignore[return-value]


def two_wholes(end: int, other: int) -> Sequence[int]:
    """A whole number in [0, end), then one in [0, other); one call draws both where these are equal."""
    return kept.wholes.random_(0, end).tolist() if end == other else (whole(end), whole(other))


def real(low: float, high: float) -> float:
    """A float32 in [low, high)."""
    return kept.real.uniform_(low, high).item()


def chance() -> float:
    """A float32 in [0, 1)."""
    return kept.real.uniform_().item()


def two_chances() -> list[float]:
    """Two float32 in [0, 1), as `torch.rand(2)` draws them."""
    return kept.two.uniform_().tolist()


def as_float32(value: float) -> float:
    """A number rounded to float32."""
    return ctypes.c_float(value).value


def exponential(low: float, high: float) -> float:
    """A float32 whose logarithm is uniform in [low, high)."""
    return kept.real.uniform_(low, high).exp_().item()


def is_probability(p: Any) -> bool:
    """True for a number in [0, 1], which `as_drawn` takes."""
    return type(p) in (float, int) and 0 <= p <= 1


@functools.lru_cache(maxsize=256)
def as_drawn(probability: float, dtype: torch.dtype = torch.float32) -> float:
    """A probability rounded to the dtype of a draw, in which torch compares the two."""
    return torch.tensor(probability, dtype=dtype, device="cpu").item()


@functools.lru_cache(maxsize=64)
def log_ratio(ratio: tuple[float, ...], dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """The logarithms of the smallest and the largest ratio, as torch computes them in a dtype."""
    low, high = torch.log(torch.tensor(ratio, dtype=dtype)).tolist()
    return low, high


def resized_crop(
    height: int, width: int, scale: Sequence[float], ratio: Sequence[float], logs: Sequence[float],
    room: Room | _KeptRoom,
) -> tuple[int, int, int, int]:  # fmt: skip
    """(top, left, height, width) of a random resized crop; `logs` are the two logarithms of the ratio."""
    area, value, index = height * width, room.real, room.whole
    low, high = logs
    for _ in range(10):
        target_area = area * value.uniform_(scale[0], scale[1]).item()
        aspect_ratio = value.uniform_(low, high).exp_().item()
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return index.random_(0, height - h + 1).item(), index.random_(0, width - w + 1).item(), h, w  # type: ignore[return-value]
    in_ratio = float(width) / float(height)
    w, h = width, height
    if in_ratio < min(ratio):
        h = round(w / min(ratio))
    elif in_ratio > max(ratio):
        w = round(h * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w
