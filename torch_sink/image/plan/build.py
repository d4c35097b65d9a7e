"""The programs of a batch -> a Plan: which launch does what to which image, ready for the kernels.

Every image's last stage runs in the last launch, so a batch costs as many launches as its longest image has stages.
Branches end in the launch before the one that mixes them.
Where some images go on in float32 after the conversion to tensors, all do: the uint8 stages of all images come first,
then the float stages, and a batch costs as many launches as the longest image of each kind has stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.core.atoms import FloatKind, Kind, Program
from torch_sink.image.core.ops import Op
from torch_sink.image.plan.branches import branched_stages, depth, longest_branch
from torch_sink.image.plan.jobs import COLUMN, ImageInput, ImageJobs, RowBuilder
from torch_sink.image.plan.stages import Stage, only_crops_and_flips, stages_of
from torch_sink.triton_kernels.stage import tile_shape

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


class Launch(NamedTuple):
    """One launch: its tiles, and which variant of which kernel it needs.

    Attributes:
        tiles: int32 [tiles, 3], job, first row and first column of each.
        on_floats: the float stage kernel runs; else the one on uint8.
        is_last: it writes the result.
        is_heavy: some image needs what only the larger variant can do.
        has_statistic: histograms or other statistics are made or read.
        has_erase: uint8 kernel: boxes are erased.
        description: how many images run which stage.
    """

    tiles: np.ndarray
    on_floats: bool
    is_last: bool
    is_heavy: bool
    has_statistic: bool
    has_erase: bool
    description: Counter[str]


class Plan(NamedTuple):
    """What runs where, for one batch. `str()` is readable.

    Attributes:
        launches: in order.
        tile_shape: (rows, columns) of a tile.
        jobs: int64 [jobs, JOB_COLUMNS].
        operations: int32 [rows, OPERATION_COLUMNS].
        tables: int32 [entries].
        histograms: how many statistics of whole images the batch needs.
        workspace_bytes: for decoded images and the outputs of all uint8 stages but the last of the batch.
        float_elements: float32 elements for the outputs of all float stages but the last; 0 without float stages.
        in_floats: the float kernel writes the result.
        value_chains: distinct chains of calls that turn uint8 into floats, each with the channels it applies to.
        out_channels: channels of the result.
        size: (height, width) of the result.
    """

    launches: tuple[Launch, ...]
    tile_shape: tuple[int, int]
    jobs: np.ndarray
    operations: np.ndarray
    tables: np.ndarray
    histograms: int
    workspace_bytes: int
    float_elements: int
    in_floats: bool
    value_chains: tuple[tuple[tuple[Op, ...], int], ...]
    out_channels: int
    size: tuple[int, int]

    def __str__(self) -> str:
        lines = []
        for number, launch in enumerate(self.launches, 1):
            work = "; ".join(f"{count} x {text}" for text, count in launch.description.most_common(4))
            more = len(launch.description) - 4
            values = " on floats" if launch.on_floats else ""
            lines.append(f"launch {number}{values}: {work}{f'; {more} other mixtures' if more > 0 else ''}")
        chains = " | ".join(", ".join(map(str, chain)) for chain, _ in self.value_chains)
        height, width = self.size
        lines.append(f"values: {chains} -> [{self.out_channels}, {height}, {width}]")
        return "\n".join(lines)


def build_plan(
    inputs: Sequence[ImageInput],
    programs: Sequence[Program],
    decoded_bytes: int,
    output_strides: tuple[int, int, int, int],
    interpreted: bool,
) -> Plan:
    """The plan of a batch.

    Args:
        inputs: where each image's decoded pixels lie.
        programs: what each image goes through; all end in the same shape.
        decoded_bytes: how much of the workspace the decoded images take.
        output_strides: of the result [N, C, H, W], in elements.
        interpreted: the kernels run under Triton's interpreter, which likes large tiles.
    """
    builder, shape = RowBuilder(), tile_shape(interpreted=interpreted)
    builder.reserve(decoded_bytes)
    in_floats = any(program.float_atoms is not None for program in programs)
    chains = chains_of(inputs, programs)
    byte_depth, float_depth = (max(depth(chain[on_floats]) for chain in chains) for on_floats in (0, 1))
    slots: list[list[tuple[int, Stage]]] = [[] for _ in range(byte_depth + float_depth)]
    for index, (image, program, (byte_stages, float_stages)) in enumerate(zip(inputs, programs, chains, strict=True)):
        job = ImageJobs(builder, index, image, program, output_strides)
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
        tuple(_launch(slot, shape, at >= byte_depth, at == len(slots) - 1) for at, slot in enumerate(slots)),
        shape,
        np.array(builder.jobs, dtype=np.int64),
        np.array(builder.operations, dtype=np.int32).reshape(-1, COLUMN["OPERATION_COLUMNS"]),
        np.concatenate([table.ravel() for table in builder.tables]) if builder.tables else np.zeros(1, np.int32),
        builder.histograms,
        builder.workspace,
        builder.floats,
        in_floats,
        tuple(builder.chains),
        programs[0].out_channels,
        programs[0].size,
    )


def chains_of(inputs: Sequence[ImageInput], programs: Sequence[Program]) -> list[tuple[list[Stage], list[Stage]]]:
    """The uint8 stages and the float stages of each image; where one image has float stages, all have."""
    in_floats = any(program.float_atoms is not None for program in programs)
    return [_stages(image, program, in_floats) for image, program in zip(inputs, programs, strict=True)]


def _stages(image: ImageInput, program: Program, in_floats: bool) -> tuple[list[Stage], list[Stage]]:
    """The uint8 stages and the float stages of one image."""
    height, width = image.height, image.width
    if not in_floats:
        return branched_stages(height, width, program.atoms), []
    atoms, float_atoms = program.atoms, program.float_atoms or ()
    if only_crops_and_flips(height, width, atoms):
        # They cost nothing as the view of the first float stage.
        return [], stages_of(height, width, (*atoms, *float_atoms))
    height, width = atoms[-1].size
    float_stages = stages_of(height, width, float_atoms)
    return branched_stages(image.height, image.width, atoms), float_stages


def _launch(slot: list[tuple[int, Stage]], shape: tuple[int, int], on_floats: bool, is_last: bool) -> Launch:
    kinds = {atom.kind for _, stage in slot for atom in stage.tail}
    kinds |= {stage.head.kind for _, stage in slot if stage.head is not None}
    return Launch(
        _tiles(slot, shape),
        on_floats,
        is_last,
        not kinds.isdisjoint(_HEAVY_FLOAT_KINDS if on_floats else _FLOAT64_KINDS)
        or any(stage.uses_tensor_formulas for _, stage in slot),
        any(stage.reads_histogram or stage.writes_histogram for _, stage in slot),
        not kinds.isdisjoint((Kind.ERASE, Kind.PASTE)),
        Counter(str(stage) for _, stage in slot),
    )


def _tiles(slot: list[tuple[int, Stage]], shape: tuple[int, int]) -> np.ndarray:
    """int32 [tiles, 3]: job, first row, first column of each tile of a launch."""
    if not slot:
        return np.zeros((0, 3), np.int32)
    rows, columns = shape
    jobs = np.array([job for job, _ in slot])
    sizes = np.array([stage.size for _, stage in slot])
    down, across = -(-sizes[:, 0] // rows), -(-sizes[:, 1] // columns)
    counts = down * across
    job_of_tile = np.repeat(np.arange(len(slot)), counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tile_row, tile_column = np.divmod(within, across[job_of_tile])
    return np.stack([jobs[job_of_tile], tile_row * rows, tile_column * columns], axis=1).astype(np.int32)
