"""The atoms of one image -> its stages.

A stage is at most one gather at its head, then any maps and point operations; it ends before the next gather or
statistic. Maps at the very start become the view through which the first head reads its input. What depends on the
kinds of the atoms alone is found once for each sequence of kinds and kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch_sink.image.core.atoms import Atom, Branch, Kind, float_bits
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
_TO_FLOATS = float_bits(1.0)
# The code of an atom: its kind, and its formula above these bits.
_KIND_BITS = 6
_KIND_MASK = (1 << _KIND_BITS) - 1
# That of a table whose bytes stay bytes.
_VALUES_OF_BYTES = _KIND_MASK


class Split(NamedTuple):
    """One stage as positions in the list of atoms.

    Attributes:
        values: the atom by which the head reads bytes as floats, or -1.
        head: position of the gather, or -1.
        tail: the other atoms.
    """

    values: int
    head: int
    tail: tuple[int, ...]


def split_stages(kinds: Sequence[Kind], leading: int) -> list[Split]:
    """Splits a program into stages.

    Args:
        kinds: of its atoms.
        leading: how many atoms the view of the first stage stands for.
    """
    first = leading
    values = -1
    if kinds[first : first + 1] == (Kind.VALUES,) and first + 1 < len(kinds) and kinds[first + 1].role == "gather":
        values, first = first, first + 1
    stages = [Split(values, -1, ())]
    for at in range(first, len(kinds)):
        stage, role = stages[-1], kinds[at].role
        pastes_again = kinds[at] == Kind.PASTE and any(kinds[other] == Kind.PASTE for other in stage.tail)
        if role == "statistic" or pastes_again:
            stages.append(Split(-1, -1, (at,)))
        elif role == "gather" and (stage.head >= 0 or stage.tail):
            stages.append(Split(-1, at, ()))
        elif role == "gather":
            stages[-1] = stage._replace(head=at)
        else:
            stages[-1] = stage._replace(tail=(*stage.tail, at))
    return stages


class Form(NamedTuple):
    """What the kinds of the atoms say of a stage.

    Attributes:
        values: position of the atom by which the head reads bytes as floats, or -1.
        head: position of the gather, or -1.
        tail: positions of what follows.
        reads_floats: its input is float32.
        begins_in_floats: pixels are float32 values in [0, 1] before the tail, and not bytes.
        leaves_floats: its output is float32.
        measured: channels of its input of which something has to be known as a whole.
        is_heavy: only the heavy variant of the kernel does it, wherever it writes.
        down: position of the vertical pass that follows this horizontal one, which makes only the rows that it reads;
            or -1.
    """

    values: int
    head: int
    tail: tuple[int, ...]
    reads_floats: bool
    begins_in_floats: bool
    leaves_floats: bool
    measured: int
    is_heavy: bool
    down: int


def codes_of(atoms: Sequence[Atom]) -> tuple[int, ...]:
    """All that their stages depend on, but for sizes."""
    return tuple(
        [
            kind | formula << _KIND_BITS if kind != Kind.VALUES or values == _TO_FLOATS else _VALUES_OF_BYTES
            for kind, _, values, _, _, formula, *_ in atoms
        ]
    )


@functools.lru_cache(maxsize=4096)
def forms_of(codes: tuple[int, ...], leading: int) -> tuple[Form, ...]:
    """The stages of a program; `leading` atoms are in the view of the first."""
    # A table of bytes is no way to read bytes as floats.
    kinds = tuple(_kind(code) for code in codes)
    splits = split_stages(kinds, leading)
    forms, in_floats, reads_floats = [], False, False
    for number, (values, head, tail) in enumerate(splits):
        begins_in_floats = in_floats = in_floats or values >= 0
        for at in tail:
            in_floats = codes[at] == Kind.VALUES or (
                in_floats and codes[at] != _VALUES_OF_BYTES and kinds[at] != Kind.TO_BYTE
            )
        leaves_floats = in_floats or (head >= 0 and kinds[head] == Kind.FILTER_X)
        measured = 0
        if tail and kinds[tail[0]].role == "statistic":
            measured = 1 if kinds[tail[0]] in (Kind.CONTRAST, Kind.BLEND_MEAN) else 3
        used = [*tail, *([head] if head >= 0 else [])]
        is_heavy = begins_in_floats or any(kinds[at] in _HEAVY or _is_of_tensors(codes[at]) for at in used)
        following = splits[number + 1].head if number + 1 < len(splits) else -1
        is_narrowed = head >= 0 and kinds[head] in _ACROSS and not tail and following >= 0 and kinds[following] in _DOWN
        down = following if is_narrowed else -1
        forms.append(Form(values, head, tail, reads_floats, begins_in_floats, leaves_floats, measured, is_heavy, down))
        reads_floats = leaves_floats
    return tuple(forms)


def _kind(code: int) -> Kind:
    return Kind.LOOKUP if code == _VALUES_OF_BYTES else Kind(code & _KIND_MASK)


def _is_of_tensors(code: int) -> bool:
    """True where it follows a formula of tensors; statistics are the same in both variants."""
    return code > _KIND_MASK and _kind(code).role != "statistic"


@functools.lru_cache(maxsize=4096)
def _leading_maps(codes: tuple[int, ...]) -> tuple[int, bool]:
    """How many maps a program begins with, and whether a head follows them."""
    kinds = [_kind(code) for code in codes]
    maps = next((at for at, kind in enumerate(kinds) if kind.role != "map"), len(kinds))
    rest = kinds[maps + 1 if kinds[maps : maps + 1] == [Kind.VALUES] else maps :]
    return maps, bool(rest) and rest[0].role == "gather"


Axis = tuple[int, int, int, int]


class View(NamedTuple):
    """Input position = step * position + offset on each axis where begin <= position < end; `fill` elsewhere."""

    x: Axis
    y: Axis
    fill: tuple[float, ...] = ()


def whole_view(height: int, width: int) -> View:
    """Every pixel at its own place."""
    return View((1, 0, 0, width), (1, 0, 0, height))


def compose_view(height: int, width: int, atoms: Sequence[Atom], codes: tuple[int, ...]) -> tuple[View, int]:
    """The view that the first maps of a program amount to, and how many these are.

    A map that leaves the image belongs to it where a head follows. Elsewhere the tail has the fill at less cost.
    """
    maps, may_leave = _leading_maps(codes)
    x, y, fill = whole_view(height, width)
    for count in range(maps):
        kind, size, values, _, _, _, _, written, _ = atoms[count]
        if kind == Kind.FLIP:
            flip_x, flip_y, old_width, old_height = values
            x = _flipped(x, old_width) if flip_x else x
            y = _flipped(y, old_height) if flip_y else y
        elif kind == Kind.SHIFT:
            left, top, old_width, old_height = values
            if left < 0 or top < 0 or left + size[1] > old_width or top + size[0] > old_height:
                if not may_leave or (fill and fill != written):
                    return View(x, y, fill), count
                fill = written
            x, y = _shifted(x, left, old_width), _shifted(y, top, old_height)
        else:
            return View(x, y, fill), count
    return View(x, y, fill), maps


def _shifted(axis: Axis, by: int, size: int) -> Axis:
    step, offset, begin, end = axis
    return step, offset + step * by, (begin if begin > 0 else 0) - by, (end if end < size else size) - by


def _flipped(axis: Axis, size: int) -> Axis:
    step, offset, begin, end = axis
    return -step, offset + step * (size - 1), size - end, size - begin


class Stage(NamedTuple):
    """One stage of one image.

    Attributes:
        form: what it consists of.
        atoms: those of the image, which `form` points to.
        view: how it sees its input.
        input_size: (height, width) of its input as the view shows it.
        size: (height, width) of its output.
        rows: of its input, counted in rows of the image, the first that exists and the end of those; None where the
            head says so itself.
        branches: stages of what its head mixes.
    """

    form: Form
    atoms: Sequence[Atom]
    view: View
    input_size: tuple[int, int]
    size: tuple[int, int]
    rows: tuple[int, int] | None
    branches: tuple[list[Stage], ...] = ()


def stages_of(height: int, width: int, atoms: Sequence[Atom]) -> list[Stage]:
    """The stages of one image of bytes of size (height, width), with those of its branches."""
    codes = codes_of(atoms)
    view, leading = compose_view(height, width, atoms, codes)
    size = atoms[leading - 1].size if leading else (height, width)
    stages: list[Stage] = []
    rows = None
    for form in forms_of(codes, leading):
        _, head, tail, *_, down = form
        read, input_size = rows, size
        rows = None
        if tail:
            size = atoms[tail[-1]].size
        elif down >= 0:
            rows = begin, end = needed_rows(atoms[down])
            view = View(view.x, _shifted(view.y, begin, atoms[down].values[0] + 1), view.fill)
            size = end - begin, atoms[head].size[1]
        elif head >= 0:
            size = atoms[head].size
        stages.append(Stage(form, atoms, view, input_size, size, read))
        view = whole_view(*size)
    return _branched(stages, (height, width), leading) if Kind.MIX in codes else stages


def _branched(stages: list[Stage], size: tuple[int, int], leading: int) -> list[Stage]:
    """The stages, with those of its branches in each stage that mixes.

    The branches read what the stage before the mix wrote, or the decoded image where only crops and flips come before.
    """
    made: list[Stage] = []
    for stage in stages:
        head = stage.atoms[stage.form.head] if stage.form.head >= 0 else None
        if head is not None and head.kind == Kind.MIX:
            if not made and any(map(_begins_with_statistic, head.branches)):
                # What is measured has to lie in the workspace.
                made.append(Stage(_COPY, (), stage.view, stage.input_size, stage.input_size, None))
                stage = stage._replace(view=whole_view(*stage.input_size))
            size = made[-1].size if made else size
            before = () if made else stage.atoms[:leading]
            branches = [stages_of(*size, (*before, *branch.atoms)) for branch in head.branches]
            for branch, mixed in zip(branches, head.branches, strict=True):
                del branch[: int(_begins_with_statistic(mixed))]
            stage = stage._replace(branches=tuple(branches))
        made.append(stage)
    return made


_COPY = Form(-1, -1, (), False, False, False, 0, False, -1)


def _begins_with_statistic(branch: Branch) -> bool:
    return bool(branch.atoms) and branch.atoms[0].kind.role == "statistic"


def depth(stages: Sequence[Stage]) -> int:
    """Launches that the stages of an image take, with those of their longest branches."""
    return len(stages) + sum(longest_branch(stage) for stage in stages)


def longest_branch(stage: Stage) -> int:
    """Stages of the longest branch that a stage mixes; 0 for one that mixes nothing."""
    return max(map(len, stage.branches)) if stage.branches else 0
