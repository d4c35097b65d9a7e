"""Calls of each operation, and ways to construct the transforms that call it; one file a family, as in `operations/`.

The parity table compares the kernels with stock code on each, the support table tries each (`support.py`), and the
random pipelines draw from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from image.examples import Arguments, Example, Examples
from image.trials import (
    colors,
    filters,
    mixes,
    moves,
    pointwise,
    resize,
    tones,
    transform,
    values,
    warps,
)
from torch_sink.image.core.ops import Operation

# {name of an operation: calls with arguments drawn at random}, in the order of `operations()`.
EXAMPLES: dict[str, Examples] = {
    **colors.EXAMPLES,
    **filters.EXAMPLES,
    **mixes.EXAMPLES,
    **tones.EXAMPLES,
    **pointwise.EXAMPLES,
    **moves.EXAMPLES,
    **resize.EXAMPLES,
    **transform.EXAMPLES,
    **values.EXAMPLES,
    **warps.EXAMPLES,
}
# {transform class of torchvision: ways to construct it}, the usual one first.
TRANSFORMS: dict[str, Sequence[Example]] = {
    **colors.TRANSFORMS,
    **tones.TRANSFORMS,
    **moves.TRANSFORMS,
    **filters.TRANSFORMS,
    **mixes.TRANSFORMS,
    **resize.TRANSFORMS,
    **values.TRANSFORMS,
    **warps.TRANSFORMS,
}


def examples_of(operation: Operation, a: Arguments) -> list[Example]:
    """The examples of an operation; none where nobody has given any."""
    return list(EXAMPLES[operation.name](a)) if operation.name in EXAMPLES else []
