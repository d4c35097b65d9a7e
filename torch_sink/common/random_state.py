"""Snapshots of random generators, as bytes: small, cheap to send, and safe to load from a file."""

from __future__ import annotations

import array
import random
import struct
from typing import Any

import numpy
import torch

from torch_sink.errors import SinkError

RandomState = bytes
Draws = tuple[torch.Tensor, Any, Any]  # snapshots of the global generators of torch (CPU), numpy and random

NUMPY_WORDS = 624  # Mersenne Twister
PYTHON_WORDS = 625  # the same with its position
TAIL = struct.Struct("<iid?d")  # numpy: position, has_gauss, gauss; random: has_gauss, gauss


def global_draws() -> Draws:
    """Takes a snapshot of the global generators of torch (CPU), numpy and random, for `set_global_draws` only."""
    return torch.get_rng_state(), numpy.random.get_state(legacy=False), random.getstate()


def set_global_draws(draws: Draws) -> None:
    """Puts the global generators back to a snapshot of `global_draws`."""
    torch.set_rng_state(draws[0])
    numpy.random.set_state(draws[1])
    random.setstate(draws[2])


def twister_state(state: Any) -> tuple[numpy.ndarray[Any, Any], int, int, float]:
    """Reads words, position, has_gauss and gauss from numpy's part of `global_draws`.

    Raises:
        SinkError: numpy's global generator is no Mersenne Twister.
    """
    if state["bit_generator"] != "MT19937":
        raise SinkError(
            f"numpy's global generator is {state['bit_generator']}: positions in the data and checkpoints hold the "
            "state of MT19937 only. Leave it in its place (numpy.random.set_bit_generator), and draw from a "
            f"numpy.random.Generator({state['bit_generator']}(seed)) of your own instead"
        )
    return state["state"]["key"], int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])


def global_random_state(draws: Draws | None = None) -> RandomState:
    """Takes a snapshot of the global generators of torch (CPU), numpy and random, as bytes."""
    torch_state, numpy_state, (_, python_words, python_gauss) = draws or global_draws()
    words, position, has_gauss, gauss = twister_state(numpy_state)
    tail = TAIL.pack(position, has_gauss, gauss, python_gauss is not None, python_gauss or 0.0)
    parts = words.astype("<u4").tobytes(), array.array("I", python_words).tobytes(), tail, torch_state.numpy().tobytes()
    return b"".join(parts)


def set_global_random_state(state: RandomState) -> None:
    """Puts the global generators back to a snapshot of `global_random_state`."""
    numpy_end = 4 * NUMPY_WORDS
    python_end = numpy_end + 4 * PYTHON_WORDS
    position, has_gauss, gauss, python_has_gauss, python_gauss = TAIL.unpack_from(state, python_end)
    words = numpy.frombuffer(state[:numpy_end], dtype="<u4")
    numpy.random.set_state(("MT19937", words, position, has_gauss, gauss))
    python_words = tuple(array.array("I", state[numpy_end:python_end]))
    random.setstate((3, python_words, python_gauss if python_has_gauss else None))
    torch.set_rng_state(torch.frombuffer(bytearray(state[python_end + TAIL.size :]), dtype=torch.uint8))


def as_tensor(state: bytes) -> torch.Tensor:
    """Makes a tensor of a snapshot, uint8 [bytes], which `torch.load(weights_only=True)` reads from a checkpoint."""
    return torch.tensor(list(state), dtype=torch.uint8, device="cpu")


def as_bytes(state: torch.Tensor) -> bytes:
    """Makes a snapshot of a tensor of `as_tensor`."""
    return state.cpu().numpy().tobytes()  # host sync, only where the checkpoint was mapped to a device


def _generators_of(loader: Any) -> list[Any]:
    """The generators of a DataLoader and its samplers; None stands for torch's global generator."""
    samplers: list[Any] = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return [part.generator for part in (loader, *samplers) if hasattr(part, "generator")]


def is_seeded(loader: Any) -> bool:
    """Whether neither a DataLoader nor its samplers draw from torch's global generator."""
    return None not in _generators_of(loader)


def find_generators(loader: Any) -> list[torch.Generator]:
    """The torch generators that a DataLoader and its samplers draw from, each once, in a fixed order."""
    found = (one for one in _generators_of(loader) if isinstance(one, torch.Generator))
    return list({id(generator): generator for generator in found}.values())


def generator_states(generators: list[torch.Generator]) -> list[bytes]:
    """Takes a snapshot of each of `generators`."""
    return [generator.get_state().numpy().tobytes() for generator in generators]


def set_generator_states(generators: list[torch.Generator], states: list[bytes]) -> None:
    """Puts generators back to snapshots of `generator_states`; those without a snapshot keep their state."""
    # A checkpoint of another kind of loader holds no snapshots.
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def find_private_generators(dataset: Any) -> list[str]:
    """Names of the generator objects inside a dataset or its transforms, whose states no snapshot holds."""
    kinds = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
    found: list[str] = []
    owners: list[tuple[str, Any]] = [("dataset", dataset)]
    for _ in range(3):  # containers, or objects, inside each other
        parts: list[tuple[str, Any]] = []
        for name, owner in owners:
            inside: list[tuple[Any, Any]]
            if isinstance(owner, (list, tuple)):
                inside, form = list(enumerate(owner[:32])), "{}[{}]"
            else:
                inside, form = list(getattr(owner, "__dict__", {}).items())[:64], "{}.{}"
            parts += ((form.format(name, key), value) for key, value in inside)
        found += (name for name, value in parts if isinstance(value, kinds))
        owners = [one for one in parts if not isinstance(one[1], (*kinds, torch.Tensor, type))]
    return found
