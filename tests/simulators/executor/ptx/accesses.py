"""Loads, stores and atomic operations of warps on a memory, with what is checked and counted at each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .arithmetic import Array
from .memory import Access, OutOfBounds, Region, Space, cells_of
from .program import Instruction

if TYPE_CHECKING:
    from .machine import Frame

_UPDATES = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def fetch(frame: Frame, instruction: Instruction, space: Space, access: Access, size: int, parts: int) -> list[Array]:
    """Loads some elements that lie side by side: for each of them what the lanes get, unsigned integers of `size`."""
    found = [np.empty(len(access.addresses), f"u{size}") for _ in range(parts)]
    for region, chosen, here in _checked(frame, instruction, space, access, size * parts):
        elements, first = region.elements(size)
        index = (here.addresses - first) // size
        for part in range(parts):
            found[part][chosen] = elements[index + part]
        if region.shadow is not None:
            cells = cells_of(here.addresses, region, size * parts)
            if region.known is not None and not region.known[cells].all():
                frame.note("read before it is written", instruction)
            frame.note(region.shadow.read(cells, _stamps(frame, here, size * parts)), instruction)
    return found


def put(frame: Frame, instruction: Instruction, space: Space, access: Access, values: list[Array]) -> None:
    """Stores elements that lie side by side, unsigned integers: for each of them what the lanes hold."""
    size, parts = values[0].itemsize, len(values)
    for region, chosen, here in _checked(frame, instruction, space, access, size * parts):
        elements, first = region.elements(size)
        index = (here.addresses - first) // size
        for part in range(parts):
            new = values[part][chosen]
            changes = elements[index + part] != new
            elements[index + part] = new
            if region.shadow is None:
                continue
            if (elements[index + part] != new).any():
                frame.note("threads store different values in one place", instruction)
            cells = cells_of(here.addresses + size * part, region, size)
            stamps, changed = _stamps(frame, here, size), np.repeat(changes, size)
            if changes.any():
                frame.note(region.shadow.write(cells[changed], stamps[changed]), instruction)
            if not changes.all():
                region.shadow.confirm(cells[~changed], stamps[~changed])
            if region.known is not None:
                region.known[cells] = True


def change(
    frame: Frame, instruction: Instruction, space: Space, access: Access, name: str, values: Array, wanted: bool
) -> Array:
    """Changes elements by an atomic operation, the lanes in an order that is drawn.

    Args:
        name: "add", "min", "max", "and", "or" or "exch".
        values: what each lane adds, or brings.
        wanted: what was there before is asked for.

    Returns:
        What each lane found, where it is wanted.
    """
    before, size = np.zeros_like(values), values.itemsize
    for region, chosen, here in _checked(frame, instruction, space, access, size):
        elements, first = region.elements(size)
        typed, index = elements.view(values.dtype), (here.addresses - first) // size
        if region.shadow is not None:
            cells = cells_of(here.addresses, region, size)
            if region.known is not None and not region.known[cells].all():
                frame.note("read before it is written", instruction)
            frame.note(region.shadow.change_atomically(cells, _stamps(frame, here, size)), instruction)
        if wanted or name == "exch":
            before[chosen] = _one_by_one(typed, index, name, values[chosen], frame.launch.random)
        else:
            _UPDATES[name].at(typed, index, values[chosen])
    return before


def _one_by_one(elements: Array, index: Array, name: str, values: Array, random: np.random.Generator) -> Array:
    """Those that change different elements at the same time, those that change the same in an order that is drawn."""
    before = np.empty_like(values)
    drawn = random.permutation(len(index))
    order = drawn[np.argsort(index[drawn], kind="stable")]
    begins = np.flatnonzero(np.r_[True, np.diff(index[order]) != 0])
    turn = np.arange(len(order)) - np.repeat(begins, np.diff(np.r_[begins, len(order)]))
    for number in range(int(turn.max(initial=-1)) + 1):
        now = order[turn == number]
        before[now] = elements[index[now]]
        elements[index[now]] = values[now] if name == "exch" else _UPDATES[name](before[now], values[now])
    return before


def _checked(
    frame: Frame, instruction: Instruction, space: Space, access: Access, size: int
) -> Iterator[tuple[Region, Array, Access]]:
    """The regions of an access that lies in them; one that does not is a fault."""
    if not len(access.addresses):
        return
    if (access.addresses % size).any():
        raise frame.fault("misaligned", instruction, f"{size} bytes at {int(access.addresses.max()):#x}")
    frame.count_access(instruction, access, size)
    try:
        yield from space.regions(access, size)
    except OutOfBounds as error:
        raise frame.fault("out of bounds", instruction, str(error)) from None


def _stamps(frame: Frame, access: Access, size: int) -> Array:
    return np.repeat(access.stamps(frame.stamps), size)
