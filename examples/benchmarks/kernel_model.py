"""How long kernels would take on some GPUs, modeled from what they execute; nothing here was measured on one.

Each SM has four schedulers, each of which issues one instruction of a warp a cycle, some units for each kind of
arithmetic, and a load-store unit that does a wavefront a cycle. The time is that of whichever is busy longest, if all
SMs share the work evenly, nobody waits for memory, and the clock is the highest that is named for it: a lower bound.

Units and clocks: NVIDIA's whitepapers of the A100 and H100, whose SMs an H200 has; for the B200 hmc-tech.com/gpus, and
for its units of integers and float64 those of an H100, which is assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

LANES = 32
SCHEDULERS = 4
# Instructions of the machine for one of PTX, where it is not one: assumed.
EXPANDED = {"div.rn.f32": 10, "div.rn.f64": 30, "div.s32": 20, "div.u32": 20, "rem.s32": 20, "rem.u32": 20}
_WIDE_INTEGER = re.compile(r"\.(s64|u64|b64)$|^(mad|mul)\.wide\.[su]32$")
_ELSEWHERE = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "bar", "bra", "brx", "ret", "shfl", "redux", "vote")


class Device(NamedTuple):
    """One GPU.

    Attributes:
        multiprocessors: how many SMs.
        gigahertz: their boost clock.
        units: of one SM, for each kind of arithmetic.
    """

    multiprocessors: int
    gigahertz: float
    units: dict[str, int]


DEVICES = {
    "A100": Device(108, 1.41, {"float32": 64, "float64": 32, "integer": 64}),
    "H200": Device(132, 1.98, {"float32": 128, "float64": 64, "integer": 64}),
    "B200": Device(148, 1.98, {"float32": 128, "float64": 64, "integer": 64}),
}


def kind_of(name: str) -> str:
    """What computes an instruction: "float32", "float64", "integer", or "" for another unit."""
    if name.partition(".")[0] in _ELSEWHERE:
        return ""
    return "float64" if ".f64" in name else "float32" if ".f32" in name else "integer"


def machine_instructions(name: str) -> int:
    """About how many instructions of the machine one of PTX becomes."""
    return EXPANDED.get(name, 2 if kind_of(name) == "integer" and _WIDE_INTEGER.search(name) else 1)


def microseconds(instructions: Mapping[str, int], wavefronts: int, device: Device) -> float:
    """The model's time for what warps execute.

    Args:
        instructions: {name: how often a warp executes it}.
        wavefronts: of loads, stores and atomic operations.
        device: where.
    """
    cycles = {"issue": 0.0, "load-store": float(wavefronts), **dict.fromkeys(device.units, 0.0)}
    for name, times in instructions.items():
        executed = times * machine_instructions(name)
        cycles["issue"] += executed / SCHEDULERS
        if kind := kind_of(name):
            cycles[kind] += executed * LANES / device.units[kind]
    return max(cycles.values()) / (device.multiprocessors * device.gigahertz * 1e3)
