"""The global random generators of a process, as bytes: small, cheap to send, and safe to load from a file."""

from __future__ import annotations

import array
import random
import struct
from typing import Any

import numpy
import torch

RandomState = bytes

NUMPY_WORDS = 624  # Mersenne Twister
PYTHON_WORDS = 625  # the same with its position
TAIL = struct.Struct("<iid?d")  # numpy: position, has_gauss, gauss; random: has_gauss, gauss


def global_random_state() -> RandomState:
    """State of the global generators of torch (CPU), numpy and random."""
    torch_bytes = torch.get_rng_state().numpy().tobytes()
    legacy: Any = numpy.random.get_state()
    _, words, position, has_gauss, gauss = legacy
    _, python_words, python_gauss = random.getstate()
    tail = TAIL.pack(position, has_gauss, gauss, python_gauss is not None, python_gauss or 0.0)
    return b"".join((words.astype("<u4").tobytes(), array.array("I", python_words).tobytes(), tail, torch_bytes))


def set_global_random_state(state: RandomState) -> None:
    """Puts the global generators of torch (CPU), numpy and random back to `state`."""
    numpy_end = 4 * NUMPY_WORDS
    python_end = numpy_end + 4 * PYTHON_WORDS
    position, has_gauss, gauss, python_has_gauss, python_gauss = TAIL.unpack_from(state, python_end)
    words = numpy.frombuffer(state[:numpy_end], dtype="<u4")
    numpy.random.set_state(("MT19937", words, position, has_gauss, gauss))
    python_words = tuple(array.array("I", state[numpy_end:python_end]))
    random.setstate((3, python_words, python_gauss if python_has_gauss else None))
    torch.set_rng_state(torch.frombuffer(bytearray(state[python_end + TAIL.size :]), dtype=torch.uint8))


def as_tensor(state: bytes) -> torch.Tensor:
    """uint8 `[bytes]`: what a checkpoint holds (`torch.load(weights_only=True)` reads it)."""
    return (
        torch.frombuffer(bytearray(state), dtype=torch.uint8)
        if state
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def as_bytes(state: torch.Tensor) -> bytes:
    """The inverse of `as_tensor`."""
    return state.cpu().numpy().tobytes()  # host sync, only where the checkpoint was mapped to a device
