"""The stages of an image whose program branches: each branch is an image of its own until they are mixed.

The branches read what the stage before the mix wrote, or the decoded image where only crops and flips come before.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_sink.image.core.atoms import Atom, Kind
from torch_sink.image.plan.stages import Stage, stages_of, whole_view


def branched_stages(height: int, width: int, atoms: Sequence[Atom]) -> list[Stage]:
    """As `stages_of`, with the stages of its branches in each stage that mixes."""
    stages = stages_of(height, width, atoms)
    for stage in list(stages):
        if stage.head is None or stage.head.kind != Kind.MIX:
            continue
        at = next(number for number, other in enumerate(stages) if other is stage)
        mixed = stage.head.branches
        begin_with_statistic = [_begins_with_statistic(branch.atoms) for branch in mixed]
        if at == 0 and any(begin_with_statistic):
            # What is measured has to lie in the workspace.
            stages.insert(0, Stage(stage.view, None, None, (), stage.input_size, stage.input_size, False, False))
            stage, at = stage._replace(view=whole_view(*stage.input_size)), 1
        size = stages[at - 1].size if at else (height, width)
        leading = [] if at else atoms[: next(number for number, atom in enumerate(atoms) if atom.kind == Kind.MIX)]
        branches = [stages_of(*size, (*leading, *branch.atoms)) for branch in mixed]
        for branch, has_copy in zip(branches, begin_with_statistic, strict=True):
            del branch[: int(has_copy)]
        stages[at] = stage._replace(branches=tuple(map(tuple, branches)))
    return stages


def _begins_with_statistic(atoms: Sequence[Atom]) -> bool:
    return bool(atoms) and atoms[0].kind.role == "statistic"


def depth(stages: Sequence[Stage]) -> int:
    """Launches that the stages of an image take, with those of their longest branches."""
    return len(stages) + sum(longest_branch(stage) for stage in stages)


def longest_branch(stage: Stage) -> int:
    """Stages of the longest branch that a stage mixes; 0 for one that mixes nothing."""
    return max(map(len, stage.branches)) if stage.branches else 0
