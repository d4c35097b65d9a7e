"""The stages of an image whose program branches: each branch is an image of its own until they are mixed.

The branches read what the stage before the mix wrote, or the decoded image where only crops and flips come before.
Where one of them begins with a statistic, the stage before them makes the histogram for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_sink.image.core.atoms import Atom, Kind
from torch_sink.image.plan.stages import Stage, stages_of, whole_view


def branched_stages(height: int, width: int, atoms: Sequence[Atom]) -> list[Stage]:
    """As `stages_of`, with the stages of its branches in each stage that mixes.

    Args:
        height: of the image that the first stage reads.
        width: of the same.
        atoms: of uint8 stages.
    """
    stages = stages_of(height, width, atoms)
    mixes = [stage for stage in stages if stage.head is not None and stage.head.kind == Kind.MIX]
    for stage in mixes:
        at = next(number for number, other in enumerate(stages) if other is stage)
        assert stage.head is not None
        if not any(_begins_with_statistic(branch.atoms) for branch in stage.head.branches):
            size = stages[at - 1].size if at else (height, width)
            leading = [] if at else atoms[: next(number for number, atom in enumerate(atoms) if atom.kind == Kind.MIX)]
            branches = [stages_of(*size, (*leading, *branch.atoms)) for branch in stage.head.branches]
            stages[at] = stage._replace(branches=tuple(map(tuple, branches)))
            continue
        if not at:
            stages.insert(0, Stage(stage.view, None, (), stage.input_size, stage.input_size, False, False))
            at = 1
        stages[at - 1 : at + 1] = _after_shared(stages[at - 1], stage._replace(view=whole_view(*stage.head.size)))
    return stages


def _begins_with_statistic(atoms: Sequence[Atom]) -> bool:
    return bool(atoms) and atoms[0].kind.role == "statistic"


def _after_shared(before: Stage, mix: Stage) -> tuple[Stage, Stage]:
    """A stage and the mix after it, whose branches all read what that stage writes."""
    assert mix.head is not None
    branches = []
    for branch in mix.head.branches:
        stages = stages_of(*before.size, branch.atoms)
        if _begins_with_statistic(branch.atoms):
            # Of the two kinds of gray value, a mix has but one: its calls are all of one family.
            formula = max(before.histogram_formula, stages[0].histogram_formula)
            before = before._replace(writes_histogram=True, histogram_formula=formula)
            del stages[0]  # a copy, for the histogram alone
        branches.append(tuple(stages))
    return before, mix._replace(branches=tuple(branches))


def depth(stages: Sequence[Stage]) -> int:
    """Launches that the stages of an image take, with those of their longest branches."""
    return len(stages) + sum(longest_branch(stage) for stage in stages)


def longest_branch(stage: Stage) -> int:
    """Stages of the longest branch that a stage mixes; 0 for one that mixes nothing."""
    return max(map(len, stage.branches), default=0)
