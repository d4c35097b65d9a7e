"""The plan of a batch: recorded calls, lowered, and launched together. Made where the batch is collated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import Lowering
from torch_sink.image.core.ops import Op
from torch_sink.image.decode.jpeg_block import JpegFiles
from torch_sink.image.decode.jpeg_tables import JpegPlan, plan_jpegs
from torch_sink.image.decode.source import FinishedSource, Source
from torch_sink.image.plan.build import Plan, Prologue, build_plan, prologue_of
from torch_sink.image.plan.lowering import lower
from torch_sink.triton_kernels.shapes import stage_tile

# channels, and calls that turn each of their uint8 values into one of a type that the kernels do not write
ValueChain = tuple[int, tuple[Op, ...]]


def shape_of(source: Source) -> tuple[int, int, int]:
    """Height and width in pixels and channels, 1 or 3, of a source that is no finished tensor."""
    width, height = source.size  # type: ignore[union-attr]
    return height, width, 3 if source.mode == "RGB" else 1  # type: ignore[union-attr]


class Run(NamedTuple):
    """Images that run together.

    Attributes:
        plan: of their launches; images are known by their position in the batch.
        prologue: what is made on the device before these.
        images: int64 [n], these positions.
        value_chains: where the kernels write bytes whose values are then looked up, what these are. The kernels'
            result has a row for each of `images` then, else rows of the result are those of the batch.
        chain_of_image: int64 [n], which of `value_chains` each image has; None without.
    """

    plan: Plan
    prologue: Prologue
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
        jpegs: how the JPEG files among the sources are decoded; None where pixels are there already.
    """

    runs: tuple[Run, ...]
    boxes: np.ndarray
    jpegs: JpegPlan | None


def plan_batch(
    images: Sequence[Source],
    calls: Sequence[tuple[Op, ...]],
    entry_of_image: Sequence[int],
    jpegs: JpegFiles | None = None,
    *,
    only: Sequence[int] | None = None,
) -> Planned:
    """The plan of a batch.

    Args:
        images: the source of each; finished tensors need no plan.
        calls: recorded on each.
        entry_of_image: which of the distinct sources that is.
        jpegs: those among the sources; None where they are decoded already.
        only: images that are made, as they are among all of them; by default all.
    """
    wanted = range(len(images)) if only is None else only
    chosen = [at for at in wanted if not isinstance(images[at], FinishedSource)]
    states = [lower(*shape_of(images[at]), calls[at]) for at in chosen]
    runs = []
    # Images whose bytes are looked up afterwards run by themselves.
    for are_looked_up in (False, True):
        here = [(at, state) for at, state in zip(chosen, states, strict=True) if bool(state.value_ops) == are_looked_up]
        if here:
            numbers, together = zip(*here, strict=True)
            runs.append(_run(numbers, together, [shape_of(images[at])[:2] for at in numbers]))
    boxes = _boxes(runs, np.asarray(entry_of_image))
    return Planned(tuple(runs), boxes, None if jpegs is None else plan_jpegs(jpegs, boxes[jpegs.sources]))


def _run(images: Sequence[int], states: Sequence[Lowering], shapes: Sequence[tuple[int, int]]) -> Run:
    """The run of some images."""
    chains: dict[ValueChain, int] = {}
    numbers, results = None, images
    if states[0].value_ops:
        chain_of_image = [(state.channels, tuple(state.value_ops)) for state in states]
        numbers = np.array([chains.setdefault(chain, len(chains)) for chain in chain_of_image])
        results = range(len(images))
    plan = build_plan(shapes, states, images, results)
    prologue = prologue_of(plan, stage_tile())
    return Run(plan, prologue, np.array(images), tuple(chains), numbers)


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
