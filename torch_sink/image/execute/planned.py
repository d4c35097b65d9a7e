"""The plan of a batch: one for each group of images that run together. Made where it is collated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import Program
from torch_sink.image.core.ops import Op
from torch_sink.image.execute.programs import programs_of, run_together, shape_of
from torch_sink.image.plan.build import Plan, build_plan
from torch_sink.image.sources.source import FinishedSource, Source

# channels, and calls that turn each of their uint8 values into one of a type that the kernels do not write
ValueChain = tuple[int, tuple[Op, ...]]


class Run(NamedTuple):
    """Images that run together.

    Attributes:
        plan: of their launches; images are known by their position in the batch.
        images: int64 [n], these positions.
        value_chains: where the kernels write bytes whose values are then looked up, what these are. The kernels'
            result has a row for each of `images` then, else rows of the result are those of the batch.
        chain_of_image: int64 [n], which of `value_chains` each image has; None without.
    """

    plan: Plan
    images: np.ndarray
    value_chains: tuple[ValueChain, ...] = ()
    chain_of_image: np.ndarray | None = None

    def __str__(self) -> str:
        lines = [str(self.plan)]
        lines += [f"looked up: {', '.join(map(str, calls))}" for _, calls in self.value_chains]
        return "\n".join(lines)


class Planned(NamedTuple):
    """The plan of a batch.

    Attributes:
        runs: in order.
        boxes: int32 [sources, 4], the part of each source that its images read: left, top, width, height; all 0 where
            nobody reads it.
    """

    runs: tuple[Run, ...]
    boxes: np.ndarray


def plan_batch(
    images: Sequence[Source],
    calls: Sequence[tuple[Op, ...]],
    entry_of_image: Sequence[int],
    only: Sequence[int] | None = None,
) -> Planned:
    """The plan of a batch.

    Args:
        images: the source of each; finished tensors need no plan.
        calls: recorded on each.
        entry_of_image: which of the distinct sources that is.
        only: images that are made, as they are among all of them; by default all.
    """
    chosen = [
        at
        for at, image in enumerate(images)
        if not isinstance(image, FinishedSource) and (only is None or at in only)
    ]
    programs = programs_of([images[at] for at in chosen], [calls[at] for at in chosen])
    shapes = [shape_of(images[at])[:2] for at in chosen]
    runs = [
        _run([chosen[at] for at in together], [programs[at] for at in together], [shapes[at] for at in together])
        for together in run_together(programs)
    ]
    return Planned(tuple(runs), _boxes(runs, np.asarray(entry_of_image)))


def _run(images: Sequence[int], programs: Sequence[Program], shapes: Sequence[tuple[int, int]]) -> Run:
    """The run of some images."""
    if not programs[0].value_ops:
        return Run(build_plan(shapes, programs, images, images), np.array(images))
    chains: dict[ValueChain, int] = {}
    numbers = [chains.setdefault((each.out_channels, each.value_ops), len(chains)) for each in programs]
    plan = build_plan(shapes, programs, images, range(len(images)))
    return Run(plan, np.array(images), tuple(chains), np.array(numbers))


def _boxes(runs: Sequence[Run], entry_of_image: np.ndarray) -> np.ndarray:
    """What images read of their sources."""
    begins = np.full((entry_of_image.max() + 1, 2), np.iinfo(np.int32).max, np.int32)
    ends = np.zeros_like(begins)
    for run in runs:
        found, entries = run.plan.boxes, entry_of_image[run.images]
        np.minimum.at(begins, entries, found[:, :2])
        np.maximum.at(ends, entries, found[:, :2] + found[:, 2:])
    boxes = np.concatenate([begins, ends - begins], axis=1)
    boxes[ends[:, 0] == 0] = 0  # nobody reads it
    return boxes
