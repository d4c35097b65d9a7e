"""What instructions of PTX cost a machine, for the model of time of `torch_sink.cli.machine`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

ARITHMETIC = ("float32", "float64", "integer")
# Instructions of the machine for one of PTX, where it is not one: assumed.
EXPANDED = {"div.rn.f32": 10, "div.rn.f64": 30, "div.s32": 20, "div.u32": 20, "rem.s32": 20, "rem.u32": 20}
_WIDE_INTEGER = re.compile(r"\.(s64|u64|b64)$|^(mad|mul)\.wide\.[su]32$")
_ELSEWHERE = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix", "bar", "bra", "brx", "ret", "shfl", "redux", "vote")


def work_of(instructions: Mapping[str, int], wavefronts: int) -> Counter[str]:
    """Sums up what warps execute: instructions in all ("issue") and by kind of arithmetic, and "load-store".

    Args:
        instructions: {name in PTX: how often a warp executes it}.
        wavefronts: of loads, stores and atomic operations.
    """
    work: Counter[str] = Counter({"load-store": wavefronts})
    for name, times in instructions.items():
        kind = _kind_of(name)
        executed = times * EXPANDED.get(name, 2 if kind == "integer" and _WIDE_INTEGER.search(name) else 1)
        work["issue"] += executed
        if kind:
            work[kind] += executed
    return work


def _kind_of(name: str) -> str:
    """What computes an instruction: "float32", "float64", "integer", or "" for another unit."""
    if name.partition(".")[0] in _ELSEWHERE:
        return ""
    return "float64" if ".f64" in name else "float32" if ".f32" in name else "integer"
