"""Generators of the devices: a seed and an offset, as CUDA's Philox generators have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Generator:
    """State of a device's default generator.

    Attributes:
        seed: of all draws.
        offset: of the next draw outside of graphs.
        is_capturing: what torch 2.11 believes; it stays true when a capture fails.
    """

    def __init__(self) -> None:
        self.seed, self.offset, self.is_capturing = 0, 0, False

    def draw(self) -> int:
        """The offset of a draw outside of graphs."""
        if self.is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.offset += 4
        return self.offset - 4

    def advance(self, increment: int) -> int:
        """A graph is replayed: the offset of its first draw."""
        if self.is_capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        self.offset += increment
        return self.offset - increment

    def get_state(self, offset_in_graph: int | None = None) -> torch.Tensor:
        """uint8 [16], on the CPU."""
        offset = self.offset if offset_in_graph is None else offset_in_graph
        return torch.tensor([self.seed, offset], dtype=torch.int64, device="cpu").view(torch.uint8)

    def offset_in_graph(self, state: torch.Tensor) -> int:
        """The offset of a state that is put back while a graph is captured."""
        seed, offset = state.clone().view(torch.int64).tolist()
        if seed != self.seed:
            raise RuntimeError("set_current_seed can be called during stream capture only if new seed is the same")
        return int(offset)

    def set_state(self, state: torch.Tensor) -> None:
        """Put back what `get_state` gave."""
        self.seed, self.offset = state.clone().view(torch.int64).tolist()


def run_with(seed: int, offset: int, function: Callable[[], Any]) -> Any:
    """Run a kernel of the CPU with draws that depend on seed and offset only."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed((seed * 1_000_003 + offset) % 2**63)
    try:
        return function()
    finally:
        generator.set_state(before)
