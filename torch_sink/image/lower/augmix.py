"""AugMix -> an atom that adds up the results of its branches."""

from __future__ import annotations

import torch

from torch_sink.image.core.atoms import LOWER, Atom, Branch, Kind, Lowering, lowers
from torch_sink.image.core.ops import Op


@lowers("augmix")
def _augmix(state: Lowering, terms: tuple[tuple[float, tuple[Op, ...]], ...], dtype: torch.dtype) -> None:
    """MIX: (number of branches,), the weight of the image itself as the factor, and the branches."""
    branches = []
    for weight, chain in terms[1:]:
        branch = Lowering(state.height, state.width, state.channels)
        for op in chain:
            LOWER[op.name](branch, *op.args)
        branches.append(Branch(weight, tuple(branch.atoms)))
    size = state.height, state.width
    state.atoms.append(Atom(Kind.MIX, size, (len(branches),), terms[0][0], branches=tuple(branches)))
