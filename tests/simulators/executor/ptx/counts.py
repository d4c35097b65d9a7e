"""What a launch executes: instructions of warps, and what its accesses to memory take.

A request is one instruction of one warp. A sector is 32 bytes of global memory; a wavefront is what the load-store unit
of an SM does in one cycle: a line of 128 bytes of global memory, or one word of each bank of shared memory.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .memory import Access
from .program import Instruction, Program

_SECTOR_BYTES, _LINE_BYTES, _BANKS = 32, 128, 32
_BITS_OF_ADDRESS = 48


class Counts:
    """The counts of one launch.

    Attributes:
        instructions: of warps, by name.
        requests, sectors, wavefronts: by "ld.global", "st.shared" and so on.
    """

    def __init__(self, program: Program) -> None:
        self._blocks = [Counter(item.name for item in block.instructions) for block in program.blocks]
        self.instructions: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.sectors: Counter[str] = Counter()
        self.wavefronts: Counter[str] = Counter()

    def block(self, number: int, warps: int) -> None:
        """Some warps ran a block."""
        for name, times in self._blocks[number].items():
            self.instructions[name] += warps * times

    def add(self, other: Counts) -> None:
        """Adds those of another launch."""
        for mine, its in zip(vars(self).values(), vars(other).values(), strict=True):
            if isinstance(mine, Counter):
                mine.update(its)

    def access(self, instruction: Instruction, access: Access, size: int) -> None:
        """Some warps accessed memory, `size` bytes a lane."""
        is_shared = any(modifier.startswith("shared") for modifier in instruction.modifiers)
        kind = f"{instruction.opcode}.{'shared' if is_shared else 'global'}"
        self.requests[kind] += len(np.unique(access.rows))
        if is_shared:
            self.wavefronts[kind] += _conflicts(access, size)
            return
        # An element of up to 16 bytes lies in one sector.
        sectors = np.unique(_of_warps(access.rows, access.addresses // _SECTOR_BYTES))
        self.sectors[kind] += len(sectors)
        self.wavefronts[kind] += len(np.unique(sectors // (_LINE_BYTES // _SECTOR_BYTES)))


def _of_warps(rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return rows.astype(np.int64) << _BITS_OF_ADDRESS | numbers


def _conflicts(access: Access, size: int) -> int:
    """Words of the bank that is asked for most, of each warp."""
    words = (access.addresses[:, None] // 4 + np.arange(max(1, size // 4))).reshape(-1)
    rows = np.repeat(access.rows, max(1, size // 4))
    distinct = np.unique(_of_warps(rows, words))
    bank = (distinct >> _BITS_OF_ADDRESS) * _BANKS + distinct % _BANKS
    return int(np.bincount(bank, minlength=_BANKS * (int(rows.max()) + 1)).reshape(-1, _BANKS).max(axis=1).sum())
