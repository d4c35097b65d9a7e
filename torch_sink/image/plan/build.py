"""The programs of images that run together -> a Plan: which launch does what to which image, as arrays.

Every image's last stage runs in the last launch, so a batch costs as many launches as its longest image has stages.
Branches end in the launch before the one that mixes them.
Where some images go on in float32 after the conversion to tensors, all do: the uint8 stages of all images come first,
then the float stages, and a batch costs as many launches as the longest image of each kind has stages.

A plan is made where the batch is collated, often in a data worker. It says nothing of addresses: `placed.py` adds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import FloatKind, Kind, Program
from torch_sink.image.core.ops import Op
from torch_sink.image.plan.branches import branched_stages, depth, longest_branch
from torch_sink.image.plan.jobs import COLUMN, ImageJobs, RowBuilder
from torch_sink.image.plan.regions import region_read
from torch_sink.image.plan.stages import Stage, only_crops_and_flips, stages_of

# What works in float64 or int64, or needs as many registers.
_FLOAT64_KINDS = frozenset(
    (Kind.HUE, Kind.WARP, Kind.BLUR, Kind.BLUR_X, Kind.BLUR_Y, Kind.RESIZE_X, Kind.RESIZE_Y, Kind.GRID, Kind.BOX_BLUR)
)
_HEAVY_FLOAT_KINDS = frozenset(
    (
        *(Kind.ERASE, Kind.PASTE, FloatKind.HUE),
        *(kind for kind in FloatKind if kind >= FloatKind.BILINEAR),
    )
)
_NAMES = {int(kind): kind.name.lower() for kind in (*Kind, *FloatKind)}
_MOST_SHOWN = 4


class Launch(NamedTuple):
    """One launch: its jobs, and which variant of which kernel it needs.

    Attributes:
        begin: of its jobs in `Plan.slot_jobs`.
        end: of the same.
        on_floats: the float stage kernel runs; else the one on uint8.
        is_last: it writes the result.
        is_heavy: some image needs what only the larger variant can do.
        has_statistic: histograms or other statistics are made or read.
        has_erase: uint8 kernel: boxes are erased.
    """

    begin: int
    end: int
    on_floats: bool
    is_last: bool
    is_heavy: bool
    has_statistic: bool
    has_erase: bool


class Plan(NamedTuple):
    """What runs where, for images that run together. `str()` is readable.

    Attributes:
        launches: in order.
        jobs: int32 [jobs, JOB_COLUMNS], int64 where an offset needs it. A SOURCE of -1 stands for the pixels of image
            SOURCE_ROW, a TARGET of -1 for row TARGET_ROW of the result.
        slot_jobs: int32 [jobs], the jobs in the order of the launches.
        operations: int32 [rows, OPERATION_COLUMNS].
        tables: int32 [entries].
        boxes: int32 [images, 4], the part of each image that is read: left, top, width, height.
        histograms: how many statistics of whole images are needed.
        workspace_bytes: for the outputs of all uint8 stages but the last of the batch.
        float_elements: float32 elements for the outputs of all float stages but the last; 0 without float stages.
        in_floats: the float kernel writes the result.
        value_chains: distinct chains of calls that turn uint8 into floats, each with the channels it applies to.
        out_channels: channels of the result.
        size: (height, width) of the result.
    """

    launches: tuple[Launch, ...]
    jobs: np.ndarray
    slot_jobs: np.ndarray
    operations: np.ndarray
    tables: np.ndarray
    boxes: np.ndarray
    histograms: int
    workspace_bytes: int
    float_elements: int
    in_floats: bool
    value_chains: tuple[tuple[tuple[Op, ...], int], ...]
    out_channels: int
    size: tuple[int, int]

    def work(self, launch: Launch) -> Counter[str]:
        """How many images of a launch run which stage."""
        return Counter(map(self._stage, self.jobs[self.slot_jobs[launch.begin : launch.end]].tolist()))

    def _stage(self, job: Sequence[int]) -> str:
        rows = [job[COLUMN["HEAD"]]] if job[COLUMN["HEAD"]] >= 0 else []
        rows += range(job[COLUMN["TAIL_BEGIN"]], job[COLUMN["TAIL_END"]])
        return " + ".join(_NAMES[int(self.operations[row, 0])] for row in rows) or "copy"

    def __str__(self) -> str:
        lines = []
        for number, launch in enumerate(self.launches, 1):
            found = self.work(launch)
            work = "; ".join(f"{count} x {text}" for text, count in found.most_common(_MOST_SHOWN))
            more = len(found) - _MOST_SHOWN
            values = " on floats" if launch.on_floats else ""
            lines.append(f"launch {number}{values}: {work}{f'; {more} other mixtures' if more > 0 else ''}")
        chains = " | ".join(", ".join(map(str, chain)) for chain, _ in self.value_chains)
        height, width = self.size
        lines.append(f"values: {chains} -> [{self.out_channels}, {height}, {width}]")
        return "\n".join(lines)


def build_plan(
    shapes: Sequence[tuple[int, int]], programs: Sequence[Program], images: Sequence[int], rows: Sequence[int]
) -> Plan:
    """The plan of some images.

    Args:
        shapes: (height, width) of what each begins with.
        programs: what each goes through; all end in the same shape.
        images: which pixels each begins with, by number.
        rows: which row of the result each becomes.
    """
    builder = RowBuilder()
    in_floats = any(program.float_atoms is not None for program in programs)
    chains = [_stages(shape, program, in_floats) for shape, program in zip(shapes, programs, strict=True)]
    byte_depth, float_depth = (max(depth(chain[on_floats]) for chain in chains) for on_floats in (0, 1))
    slots: list[list[tuple[int, Stage]]] = [[] for _ in range(byte_depth + float_depth)]
    for image, row, program, (byte_stages, float_stages) in zip(images, rows, programs, chains, strict=True):
        job = ImageJobs(builder, image, row, program)
        for stages, end, on_floats in ((byte_stages, byte_depth, False), (float_stages, len(slots), True)):
            at = end - depth(stages)
            for following_at, stage in enumerate(stages, 1):
                following = stages[following_at] if following_at < len(stages) else None
                at += longest_branch(stage)
                for branch, mixed in zip(stage.branches, stage.head.branches if stage.head else (), strict=True):
                    numbers = job.add_branch(branch, mixed.weight)
                    for slot, number, part in zip(slots[at - len(branch) : at], numbers, branch, strict=True):
                        slot.append((number, part))
                is_last = at == len(slots) - 1
                slots[at].append((job.add_stage(stage, following, on_floats=on_floats, is_last=is_last), stage))
                at += 1
    return Plan(
        tuple(_launches(slots, byte_depth)),
        _smallest(np.array(builder.jobs, dtype=np.int64)),
        np.array([number for slot in slots for number, _ in slot], dtype=np.int32),
        np.array(builder.operations, dtype=np.int32).reshape(-1, COLUMN["OPERATION_COLUMNS"]),
        np.concatenate([table.ravel() for table in builder.tables]) if builder.tables else np.zeros(1, np.int32),
        np.array([region_read(*shape, *chain) for shape, chain in zip(shapes, chains, strict=True)], dtype=np.int32),
        builder.histograms,
        builder.workspace,
        builder.floats,
        in_floats,
        tuple(builder.chains),
        programs[0].out_channels,
        programs[0].size,
    )


def _smallest(jobs: np.ndarray) -> np.ndarray:
    """As int32 where that holds them, for the way to another process."""
    return jobs.astype(np.int32) if abs(jobs).max(initial=0) <= np.iinfo(np.int32).max else jobs


def _stages(shape: tuple[int, int], program: Program, in_floats: bool) -> tuple[list[Stage], list[Stage]]:
    """The uint8 stages and the float stages of one image; where one image has float stages, all have."""
    height, width = shape
    if not in_floats:
        return branched_stages(height, width, program.atoms), []
    atoms, float_atoms = program.atoms, program.float_atoms or ()
    if only_crops_and_flips(height, width, atoms):
        # They cost nothing as the view of the first float stage.
        return [], stages_of(height, width, (*atoms, *float_atoms))
    height, width = atoms[-1].size
    return branched_stages(*shape, atoms), stages_of(height, width, float_atoms)


def _launches(slots: Sequence[Sequence[tuple[int, Stage]]], byte_depth: int) -> list[Launch]:
    launches, end = [], 0
    for at, slot in enumerate(slots):
        kinds = {atom.kind for _, stage in slot for atom in stage.tail}
        kinds |= {stage.head.kind for _, stage in slot if stage.head is not None}
        heavy = _HEAVY_FLOAT_KINDS if at >= byte_depth else _FLOAT64_KINDS
        begin, end = end, end + len(slot)
        launches.append(
            Launch(
                begin,
                end,
                on_floats=at >= byte_depth,
                is_last=at == len(slots) - 1,
                is_heavy=not kinds.isdisjoint(heavy) or any(stage.uses_tensor_formulas for _, stage in slot),
                has_statistic=any(stage.reads_histogram or stage.writes_histogram for _, stage in slot),
                has_erase=not kinds.isdisjoint((Kind.ERASE, Kind.PASTE)),
            )
        )
    return launches
