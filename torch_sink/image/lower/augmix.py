"""AugMix -> an atom that adds up the results of its branches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_sink.image.lower.floats import LOWER_FLOAT, lowers_float
from torch_sink.image.ops import Op
from torch_sink.image.plan.atoms import LOWER, Atom, Branch, FloatKind, Kind, lowers

_Terms = tuple[tuple[float, tuple[Op, ...]], ...]


def _augmix(
    state: Any, terms: _Terms, dtype: torch.dtype, *, lower: Mapping[str, Callable[..., None]], kind: Kind | FloatKind
) -> None:
    """MIX: (number of branches,), the weight of the image itself as the factor, and the branches."""
    branches = []
    for weight, chain in terms[1:]:
        branch = type(state)(state.height, state.width, state.channels)
        for op in chain:
            lower[op.name](branch, *op.args)
        branches.append(Branch(weight, tuple(branch.atoms)))
    size = state.height, state.width
    state.atoms.append(Atom(kind, size, (len(branches),), terms[0][0], branches=tuple(branches)))


lowers("augmix")(functools.partial(_augmix, lower=LOWER, kind=Kind.MIX))
lowers_float("augmix")(functools.partial(_augmix, lower=LOWER_FLOAT, kind=FloatKind.MIX))
