"""The atoms of one image -> its stages.

A stage is at most one gather at its head, then any maps and point operations; it ends before the next gather or
statistic. Maps at the very start become the view through which the first head reads its input. The split depends on
the kinds of the atoms alone, so it is made once for each sequence of kinds and kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch_sink.image.core.atoms import Atom, Formula, Kind, float_bits
from torch_sink.image.operations.resize_tables import needed_rows

_ACROSS = (Kind.RESAMPLE_X, Kind.FILTER_X)
_DOWN = (Kind.RESAMPLE_Y, Kind.FILTER_Y)
# What only the heavy variant of the kernel does, besides floats and the formulas of tensors.
_HEAVY = frozenset(
    (
        *(Kind.FILTER_X, Kind.FILTER_Y, Kind.GRID, Kind.WARP, Kind.BOX_BLUR),
        *(Kind.NORMALIZE, Kind.TO_BYTE, Kind.CLAMP, Kind.BLEND_MEAN),
    )
)
_TO_FLOATS = (Kind.VALUES, float_bits(1.0))


class StageSplit(NamedTuple):
    """One stage as positions in the list of atoms.

    Attributes:
        values: the atom by which the head reads bytes as floats, or -1.
        head: position of the gather, or -1.
        tail: the other atoms.
    """

    values: int
    head: int
    tail: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def split_stages(kinds: tuple[Kind, ...], leading: int) -> tuple[StageSplit, ...]:
    """Splits a program into stages.

    Args:
        kinds: of its atoms.
        leading: how many atoms the view of the first stage stands for.
    """
    first = leading
    values = -1
    if kinds[first : first + 1] == (Kind.VALUES,) and first + 1 < len(kinds) and kinds[first + 1].role == "gather":
        values, first = first, first + 1
    stages = [StageSplit(values, -1, ())]
    for at in range(first, len(kinds)):
        stage, role = stages[-1], kinds[at].role
        pastes_again = kinds[at] == Kind.PASTE and any(kinds[other] == Kind.PASTE for other in stage.tail)
        if role == "statistic" or pastes_again:
            stages.append(StageSplit(-1, -1, (at,)))
        elif role == "gather" and (stage.head >= 0 or stage.tail):
            stages.append(StageSplit(-1, at, ()))
        elif role == "gather":
            stages[-1] = stage._replace(head=at)
        else:
            stages[-1] = stage._replace(tail=(*stage.tail, at))
    return tuple(stages)


class View(NamedTuple):
    """Input position = step * position + offset on each axis where begin <= position < end; `fill` elsewhere."""

    x: tuple[int, int, int, int]
    y: tuple[int, int, int, int]
    fill: tuple[float, ...] = ()


def whole_view(height: int, width: int) -> View:
    """Every pixel at its own place."""
    return View((1, 0, 0, width), (1, 0, 0, height))


def compose_view(height: int, width: int, atoms: Sequence[Atom]) -> tuple[View, int]:
    """The view that the first maps of a program amount to, and how many these are.

    A map that leaves the image belongs to it where a head follows. Elsewhere the tail has the fill at less cost.
    """
    maps = next((at for at, atom in enumerate(atoms) if atom.kind.role != "map"), len(atoms))
    rest = atoms[maps + 1 if maps < len(atoms) and _split_kind(atoms[maps]) == Kind.VALUES else maps :]
    may_leave = bool(rest) and rest[0].kind.role == "gather"
    x, y, fill = whole_view(height, width)
    for count, atom in enumerate(atoms[:maps]):
        if atom.kind == Kind.FLIP:
            flip_x, flip_y, old_width, old_height = atom.values
            x = _flipped(x, old_width) if flip_x else x
            y = _flipped(y, old_height) if flip_y else y
        elif atom.kind == Kind.SHIFT:
            left, top, old_width, old_height = atom.values
            leaves = left < 0 or top < 0 or left + atom.size[1] > old_width or top + atom.size[0] > old_height
            if leaves and (not may_leave or (fill and fill != atom.fill)):
                return View(x, y, fill), count
            fill = atom.fill if leaves else fill
            x, y = _shifted(x, left, old_width), _shifted(y, top, old_height)
        else:
            return View(x, y, fill), count
    return View(x, y, fill), maps


def _shifted(axis: tuple[int, int, int, int], by: int, size: int) -> tuple[int, int, int, int]:
    step, offset, begin, end = axis
    return step, offset + step * by, max(begin, 0) - by, min(end, size) - by


def _flipped(axis: tuple[int, int, int, int], size: int) -> tuple[int, int, int, int]:
    step, offset, begin, end = axis
    return -step, offset + step * (size - 1), size - end, size - begin


class Stage(NamedTuple):
    """One stage of one image, with its parameters.

    Attributes:
        view: how it sees its input.
        values: the table by which it reads bytes as floats; None where it reads what is there.
        head: a gather, or None.
        tail: what follows.
        input_size: (height, width) of its input as the view shows it.
        size: (height, width) of its output.
        begins_in_floats: pixels are float32 values in [0, 1] before the tail, and not bytes.
        leaves_floats: its output is float32.
        branches: stages of what its head mixes.
    """

    view: View
    values: Atom | None
    head: Atom | None
    tail: tuple[Atom, ...]
    input_size: tuple[int, int]
    size: tuple[int, int]
    begins_in_floats: bool
    leaves_floats: bool
    branches: tuple[tuple[Stage, ...], ...] = ()

    @property
    def measures(self) -> bool:
        """True where something has to be known of its whole input."""
        return bool(self.tail) and self.tail[0].kind.role == "statistic"

    @property
    def is_heavy(self) -> bool:
        """True where only the heavy variant of the kernel does it, wherever it writes."""
        atoms = self.tail if self.head is None else (self.head, *self.tail)
        return (
            self.begins_in_floats
            or bool(self.view.fill)
            or any(
                atom.kind in _HEAVY or (atom.formula != Formula.PILLOW and atom.kind.role != "statistic")
                for atom in atoms
            )
        )

    def __str__(self) -> str:
        parts = [self.head.kind.name.lower()] if self.head else []
        parts += [atom.kind.name.lower() for atom in self.tail]
        return " + ".join(parts) or "copy"


def stages_of(height: int, width: int, atoms: Sequence[Atom]) -> list[Stage]:
    """The stages of one image of bytes of size (height, width)."""
    view, leading = compose_view(height, width, atoms)
    splits = split_stages(tuple(map(_split_kind, atoms)), leading)
    size = atoms[leading - 1].size if leading else (height, width)
    stages: list[Stage] = []
    in_floats = False
    rows: tuple[int, int] | None = None  # that the stage before has made, of those that this one could read
    for number, split in enumerate(splits):
        head = atoms[split.head] if split.head >= 0 else None
        tail = tuple(atoms[at] for at in split.tail)
        following = (
            atoms[splits[number + 1].head] if number + 1 < len(splits) and splits[number + 1].head >= 0 else None
        )
        if rows and head is not None:
            head, rows = _below_origin(head, *rows), None
        elif head is not None and head.kind in _ACROSS and not tail and following and following.kind in _DOWN:
            rows = needed_rows(following)
            view, head = _these_rows_only(view, head, following, *rows)
        input_size, size = size, tail[-1].size if tail else head.size if head is not None else size
        begins_in_floats = in_floats = in_floats or split.values >= 0
        for atom in tail:
            in_floats = _leaves_floats(atom, in_floats)
        values = atoms[split.values] if split.values >= 0 else None
        leaves_floats = in_floats or (head is not None and head.kind == Kind.FILTER_X)
        stages.append(Stage(view, values, head, tail, input_size, size, begins_in_floats, leaves_floats))
        view = whole_view(*size)
    return stages


def _split_kind(atom: Atom) -> Kind:
    """Its kind; a table of bytes is no way to read bytes as floats."""
    return Kind.LOOKUP if atom.kind == Kind.VALUES and atom.values != _TO_FLOATS[1] else atom.kind


def _leaves_floats(atom: Atom, in_floats: bool) -> bool:
    if atom.kind == Kind.VALUES:
        return (atom.kind, atom.values) == _TO_FLOATS
    return in_floats and atom.kind != Kind.TO_BYTE


def _these_rows_only(view: View, across: Atom, down: Atom, begin: int, end: int) -> tuple[View, Atom]:
    """The horizontal pass makes only the rows that the vertical pass after it reads."""
    rows = _shifted(view.y, begin, down.values[0] + 1)
    return view._replace(y=rows), across._replace(size=(end - begin, across.size[1]))


def _below_origin(down: Atom, begin: int, end: int) -> Atom:
    """Tells the vertical pass with which row of the image its input begins, and with which it ends."""
    if (begin, end) == (0, down.values[0] + 1):
        return down
    return down._replace(values=(end - 1, *down.values[1:6], begin, *down.values[7:]))
