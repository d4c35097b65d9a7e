"""The plan of a batch: one for each group of images that run together in a pass. Made where it is collated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from torch_sink.image.core.atoms import Program
from torch_sink.image.core.ops import Op
from torch_sink.image.execute.programs import ImageShape, earlier_passes, is_wide, last_passes, programs_of, shape_of
from torch_sink.image.plan.build import Plan, build_plan
from torch_sink.image.sources.source import FinishedSource, Source

# channels, and calls that turn each of their uint8 values into one of a type that the kernels do not write
ValueChain = tuple[int, tuple[Op, ...]]


class Run(NamedTuple):
    """Images that run together.

    Attributes:
        plan: of their launches; images are known by their position in the batch.
        images: int64 [n], these positions.
        is_last: the last pass of these images; rows of the result are those of the batch. The result of an earlier
            one, uint8 with a row for each of `images`, is what their next pass begins with.
        value_chains: where the kernels write bytes whose values are then looked up, what these are.
        chain_of_image: int64 [n], which of `value_chains` each image has.
    """

    plan: Plan
    images: np.ndarray
    is_last: bool
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
    dtype: torch.dtype,
    only: Sequence[int] | None = None,
) -> Planned:
    """The plan of a batch.

    Args:
        images: the source of each; finished tensors need no plan.
        calls: recorded on each.
        entry_of_image: which of the distinct sources that is.
        dtype: of the batch.
        only: images that are made, as they are among all of them; by default all.
    """
    boxes = np.zeros((max(entry_of_image) + 1, 4), np.int32)
    chosen = [at for at, image in enumerate(images) if not isinstance(image, FinishedSource)]
    if not chosen:
        return Planned((), boxes)
    programs = programs_of([images[at] for at in chosen], [calls[at] for at in chosen], dtype)
    if only is not None:
        programs = [passes for at, passes in zip(chosen, programs, strict=True) if at in only]
        chosen = [at for at in chosen if at in only]
    shapes = [shape_of(images[at]) for at in chosen]
    runs = []
    for group in earlier_passes(programs):
        positions, lowered = zip(*group, strict=True)
        runs.append(_run(positions, lowered, shapes, chosen, is_last=False))
        for at, program in group:
            shapes[at] = ImageShape(*program.size, program.out_channels)
    for together in last_passes(programs):
        runs.append(_run(together, [programs[at][-1] for at in together], shapes, chosen, is_last=True))
    _gather_boxes(boxes, runs, np.asarray(entry_of_image))
    return Planned(tuple(runs), boxes)


def _run(
    positions: Sequence[int],
    programs: Sequence[Program],
    shapes: Sequence[ImageShape],
    chosen: Sequence[int],
    *,
    is_last: bool,
) -> Run:
    """The run of some of the chosen images."""
    images = [chosen[at] for at in positions]
    begun = [shapes[at][:2] for at in positions]
    if not is_last:
        return Run(build_plan(begun, programs, images, range(len(images))), np.array(images), is_last)
    if not is_wide(programs[0]):
        return Run(build_plan(begun, programs, images, images), np.array(images), is_last)
    of_bytes = [program._replace(value_ops=(Op("pil_to_tensor"),)) for program in programs]
    plan = build_plan(begun, of_bytes, images, range(len(images)))
    chains: dict[ValueChain, int] = {}
    numbers = [chains.setdefault((each.value_channels, each.value_ops), len(chains)) for each in programs]
    return Run(plan, np.array(images), is_last, tuple(chains), np.array(numbers))


def _gather_boxes(boxes: np.ndarray, runs: Sequence[Run], entry_of_image: np.ndarray) -> None:
    """Writes down what the first pass of every image reads of its source."""
    read: set[int] = set()
    ends = np.zeros((len(boxes), 2), np.int32)
    begins = np.full((len(boxes), 2), np.iinfo(np.int32).max, np.int32)
    for run in runs:
        first = np.array([image not in read for image in run.images.tolist()])
        read.update(run.images.tolist())
        found, entries = run.plan.boxes[first], entry_of_image[run.images[first]]
        np.minimum.at(begins, entries, found[:, :2])
        np.maximum.at(ends, entries, found[:, :2] + found[:, 2:])
    is_read = ends[:, 0] > 0
    boxes[is_read, :2] = begins[is_read]
    boxes[is_read, 2:] = (ends - begins)[is_read]
