"""What the compile gate holds kernels to: nothing spilled, nothing inexact, not worse than a record."""

from __future__ import annotations

from typing import Any

LARGEST_GROWTH = 1.10


def faults(rows: list[dict[str, Any]]) -> list[str]:
    """What no kernel may do, in sentences."""
    found = [f"{row['variant']} on {row['target']} spills {row['spills']} bytes" for row in rows if row["spills"]]
    return found + [f"{row['variant']} on {row['target']}: {row['inexact']}" for row in rows if row["inexact"]]


def regressions(rows: list[dict[str, Any]], committed: list[dict[str, Any]]) -> list[str]:
    """Where rows are worse than committed ones: narrower stores, or many more instructions."""
    before = {(row["variant"], row["target"]): row for row in committed}
    found = []
    for row in rows:
        name = f"{row['variant']} on {row['target']}"
        old = before.get((row["variant"], row["target"]))
        if old is None:
            found.append(f"{name} is new")
            continue
        width, width_before = mean_bits(row["stores"]), mean_bits(old["stores"])
        if width < width_before:
            found.append(f"{name} stores {width:.1f} bits at once, before {width_before:.1f}")
        if row["instructions"] > LARGEST_GROWTH * old["instructions"]:
            found.append(f"{name} has {row['instructions']} instructions, before {old['instructions']}")
    return found


def mean_bits(accesses: dict[str, int]) -> float:
    """Mean width of accesses, given as {bits: how many}."""
    return sum(int(bits) * count for bits, count in accesses.items()) / max(sum(accesses.values()), 1)
