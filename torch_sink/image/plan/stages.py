"""The atoms of one image -> its stages.

A stage is at most one gather at its head, then any maps and point operations; it ends before the next gather or
statistic. Maps at the very start become the view through which the first head reads its input. The split depends on
the kinds of the atoms alone, so it is made once for each sequence of kinds and kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch_sink.image.core.atoms import Atom, FloatKind, Formula, Kind
from torch_sink.image.lower.float_geometry import needed_float_rows
from torch_sink.image.lower.geometry import needed_rows


class StageSplit(NamedTuple):
    """One stage as positions in the list of atoms.

    Attributes:
        view: leading maps that the head reads through.
        head: position of the gather, or -1.
        tail: the other atoms.
        reads_histogram: its tail begins with a statistic.
        writes_histogram: the next stage's tail begins with a statistic.
    """

    view: tuple[int, ...]
    head: int
    tail: tuple[int, ...]
    reads_histogram: bool
    writes_histogram: bool


@functools.lru_cache(maxsize=4096)
def split_stages(kinds: tuple[Kind | FloatKind, ...], with_view: bool) -> tuple[StageSplit, ...]:
    """Splits a program into stages.

    Args:
        kinds: of its atoms.
        with_view: leading maps become the view of the first head; otherwise they are a stage of their own.
    """
    leading = next((at for at, kind in enumerate(kinds) if kind.role != "map"), len(kinds)) if with_view else 0
    stages = [StageSplit(tuple(range(leading)), -1, (), False, False)]
    for at in range(leading, len(kinds)):
        stage, role = stages[-1], kinds[at].role
        if role == "statistic":
            stages[-1] = stage._replace(writes_histogram=True)
            stages.append(StageSplit((), -1, (at,), True, False))
        elif role == "gather" and (stage.head >= 0 or stage.tail):
            stages.append(StageSplit((), at, (), False, False))
        elif role == "gather":
            stages[-1] = stage._replace(head=at)
        else:
            stages[-1] = stage._replace(tail=(*stage.tail, at))
    return tuple(stages)


class View(NamedTuple):
    """Input position = step * position + offset on each axis where begin <= position < end; `fill` elsewhere.

    A fill is what follows the first four values of a SHIFT atom.
    """

    x: tuple[int, int, int, int]
    y: tuple[int, int, int, int]
    fill: tuple[int, ...] | None


def compose_view(height: int, width: int, maps: Sequence[Atom]) -> View | None:
    """The view that a chain of maps amounts to, or None where no view can say it."""
    x, y, fill = whole_view(height, width)
    for atom in maps:
        if atom.kind == Kind.FLIP:
            flip_x, flip_y, old_width, old_height = atom.values
            x = _flipped(x, old_width) if flip_x else x
            y = _flipped(y, old_height) if flip_y else y
        elif atom.kind == Kind.SHIFT:
            left, top, old_width, old_height, *fill_values = atom.values
            color = tuple(fill_values)
            leaves = left < 0 or top < 0 or left + atom.size[1] > old_width or top + atom.size[0] > old_height
            if leaves and fill is not None and fill != color:
                return None
            fill = color if leaves else fill
            x, y = _shifted(x, left, old_width), _shifted(y, top, old_height)
        else:
            return None
    return View(x, y, fill)


def whole_view(height: int, width: int) -> View:
    """Every pixel at its own place."""
    return View((1, 0, 0, width), (1, 0, 0, height), None)


def _shifted(axis: tuple[int, int, int, int], by: int, size: int) -> tuple[int, int, int, int]:
    step, offset, begin, end = axis
    return step, offset + step * by, max(begin, 0) - by, min(end, size) - by


def _flipped(axis: tuple[int, int, int, int], size: int) -> tuple[int, int, int, int]:
    step, offset, begin, end = axis
    return -step, offset + step * (size - 1), size - end, size - begin


class Stage(NamedTuple):
    """One stage of one image, with its parameters.

    Sizes are (height, width), that of the input as the view shows it. `histogram_formula` says whose gray values its
    histogram counts, `branches` are the stages of what its head mixes.
    """

    view: View
    head: Atom | None
    tail: tuple[Atom, ...]
    input_size: tuple[int, int]
    size: tuple[int, int]
    reads_histogram: bool
    writes_histogram: bool
    histogram_formula: Formula = Formula.PILLOW
    branches: tuple[tuple[Stage, ...], ...] = ()

    @property
    def uses_tensor_formulas(self) -> bool:
        """True where an operation, or the gray values of its histogram, need the formulas for tensors."""
        head = () if self.head is None else (self.head,)
        return any((self.histogram_formula, *(atom.formula for atom in (*head, *self.tail))))

    def __str__(self) -> str:
        parts = [self.head.kind.name.lower()] if self.head else []
        parts += [atom.kind.name.lower() for atom in self.tail]
        return " + ".join(parts) or "copy"


def only_crops_and_flips(height: int, width: int, atoms: Sequence[Atom]) -> bool:
    """True where the atoms of an image of that size are a view of it alone, with nothing outside."""
    view = compose_view(height, width, atoms) if all(atom.kind.role == "map" for atom in atoms) else None
    return view is not None and view.fill is None


def stages_of(height: int, width: int, atoms: Sequence[Atom]) -> list[Stage]:
    """The stages of one image of size (height, width)."""
    kinds = tuple(atom.kind for atom in atoms)
    splits = split_stages(kinds, True)
    first_view = compose_view(height, width, [atoms[at] for at in splits[0].view])
    if first_view is None:
        splits, first_view = split_stages(kinds, False), whole_view(height, width)
    stages: list[Stage] = []
    size, view = (height, width), first_view
    for at in splits[0].view:
        size = atoms[at].size
    for number, split in enumerate(splits):
        head = atoms[split.head] if split.head >= 0 else None
        if number:
            view = whole_view(*size)
        if head is not None and head.kind in _ACROSS and not split.tail and number + 1 < len(splits):
            following = splits[number + 1].head
            if following >= 0 and atoms[following].kind in _DOWN:
                view, head = _needed_rows_only(view, head, atoms[following])
        if head is not None and head.kind in _DOWN and stages and not stages[-1].tail:
            head = _below_origin(head, stages[-1].head)
        tail = tuple(atoms[at] for at in split.tail)
        input_size = size
        size = tail[-1].size if tail else head.size if head is not None else size
        formula = atoms[splits[number + 1].tail[0]].formula if split.writes_histogram else Formula.PILLOW
        stages.append(Stage(view, head, tail, input_size, size, split.reads_histogram, split.writes_histogram, formula))
    return stages


_ACROSS = (Kind.RESAMPLE_X, FloatKind.RESAMPLE_X)
_DOWN = (Kind.RESAMPLE_Y, FloatKind.RESAMPLE_Y)


def _rows_read(down: Atom) -> tuple[int, int]:
    return needed_rows(down) if down.kind == Kind.RESAMPLE_Y else needed_float_rows(down)


def _needed_rows_only(view: View, across: Atom, down: Atom) -> tuple[View, Atom]:
    """The horizontal pass makes only the rows that the vertical pass after it reads."""
    begin, end = _rows_read(down)
    rows = _shifted(view.y, begin, max(down.values[0], 0))
    return view._replace(y=rows), across._replace(size=(end - begin, across.size[1]))


def _below_origin(down: Atom, before: Atom | None) -> Atom:
    """Tells the vertical pass which row its input begins with."""
    if before is None or before.kind not in _ACROSS:
        return down
    begin = _rows_read(down)[0]
    return down._replace(values=(*down.values[:4], begin, *down.values[5:]))
