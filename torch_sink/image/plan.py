"""The programs of a batch -> a Plan: which launch does what to which image, ready for the kernels.

Every image's last stage runs in the last launch, so a batch costs as many launches as its longest image has stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.atoms import Atom, Kind, Program
from torch_sink.image.ops import Op
from torch_sink.image.stages import Stage, stages_of
from torch_sink.triton_kernels import program as layout
from torch_sink.triton_kernels.stage import tile_shape

_JOB = {name: value.value for name, value in vars(layout).items() if hasattr(value, "value")}
_FACTOR_COLUMN = _JOB["OPERATION_COLUMNS"] - 1
_TABLE_COLUMN = {Kind.REMAP: 2, Kind.LOOKUP: 2}
_HEAD_TABLE_COLUMN = 8
# What works in float64, or needs as many registers.
_FLOAT64_KINDS = frozenset((Kind.HUE, Kind.WARP, Kind.BLUR, Kind.BLUR_X, Kind.BLUR_Y))
_ALIGNMENT_BYTES = 16


class ImageInput(NamedTuple):
    """A decoded image in the workspace: offset and strides in bytes, size in pixels."""

    offset: int
    row: int
    column: int
    channel: int
    height: int
    width: int


class Launch(NamedTuple):
    """One launch: its jobs' rows, its tiles, and which variant of the kernel it needs."""

    tiles: np.ndarray
    is_last: bool
    has_float64: bool
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
        histograms: how many histograms the batch needs.
        workspace_bytes: for decoded images and the outputs of all stages but the last.
        value_chains: distinct chains of calls that turn uint8 into the values of the result.
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
    value_chains: tuple[tuple[Op, ...], ...]
    out_channels: int
    size: tuple[int, int]

    def __str__(self) -> str:
        lines = []
        for number, launch in enumerate(self.launches, 1):
            work = "; ".join(f"{count} x {text}" for text, count in launch.description.most_common(4))
            more = len(launch.description) - 4
            lines.append(f"launch {number}: {work}{f'; {more} other mixtures' if more > 0 else ''}")
        chains = " | ".join(", ".join(map(str, chain)) for chain in self.value_chains)
        height, width = self.size
        lines.append(f"values: {chains} -> [{self.out_channels}, {height}, {width}]")
        return "\n".join(lines)


class _Builder:
    """Collects the rows of a plan."""

    def __init__(self) -> None:
        self.jobs: list[list[int]] = []
        self.operations: list[list[int]] = []
        self.tables: list[np.ndarray] = []
        self.table_offsets: dict[int, int] = {}
        self.table_entries = 0
        self.histograms = 0
        self.workspace = 0
        self.chains: dict[tuple[Op, ...], int] = {}

    def reserve(self, number_of_bytes: int) -> int:
        offset = self.workspace
        self.workspace += -(-number_of_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offset

    def add_table(self, table: np.ndarray) -> int:
        # Tables come from caches, so the same one may serve many images.
        if id(table) not in self.table_offsets:
            self.table_offsets[id(table)] = self.table_entries
            self.table_entries += table.size
            self.tables.append(table)
        return self.table_offsets[id(table)]

    def add_operation(self, atom: Atom) -> int:
        row = [0] * _JOB["OPERATION_COLUMNS"]
        row[0] = int(atom.kind)
        row[1 : 1 + len(atom.values)] = atom.values
        for number, table in enumerate(atom.tables):
            row[_TABLE_COLUMN.get(atom.kind, _HEAD_TABLE_COLUMN) + number] = self.add_table(table)
        if atom.factor:
            row[_FACTOR_COLUMN] = int(np.float32(atom.factor).view(np.int32))
        self.operations.append(row)
        return len(self.operations) - 1


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
    builder, shape = _Builder(), tile_shape(interpreted=interpreted)
    builder.reserve(decoded_bytes)
    chains = [stages_of(image.height, image.width, program) for image, program in zip(inputs, programs, strict=True)]
    depth = max(map(len, chains))
    slots: list[list[tuple[int, Stage]]] = [[] for _ in range(depth)]
    for index, (image, program, stages) in enumerate(zip(inputs, programs, chains, strict=True)):
        _add_image(builder, slots, index, image, program, stages, output_strides)
    launches = []
    for number, slot in enumerate(slots):
        kinds = {atom.kind for _, stage in slot for atom in stage.tail}
        kinds |= {stage.head.kind for _, stage in slot if stage.head is not None}
        statistic = any(stage.reads_histogram or stage.writes_histogram for _, stage in slot)
        launches.append(
            Launch(
                _tiles(slot, shape),
                number == depth - 1,
                not kinds.isdisjoint(_FLOAT64_KINDS),
                statistic,
                Kind.ERASE in kinds,
                Counter(str(stage) for _, stage in slot),
            )
        )
    return Plan(
        tuple(launches),
        shape,
        np.array(builder.jobs, dtype=np.int64),
        np.array(builder.operations, dtype=np.int32).reshape(-1, _JOB["OPERATION_COLUMNS"]),
        np.concatenate([table.ravel() for table in builder.tables]) if builder.tables else np.zeros(1, np.int32),
        builder.histograms,
        builder.workspace,
        tuple(builder.chains),
        programs[0].out_channels,
        programs[0].size,
    )


def _add_image(
    builder: _Builder,
    slots: list[list[tuple[int, Stage]]],
    index: int,
    image: ImageInput,
    program: Program,
    stages: list[Stage],
    output_strides: tuple[int, int, int, int],
) -> None:
    source: tuple[int, int, int, int] = image.offset, image.row, image.column, image.channel
    histogram_read = -1
    for number, stage in enumerate(stages):
        height, width = stage.size
        is_last = number == len(stages) - 1
        if is_last:
            batch, channel, row, column = output_strides
            target = (index * batch, row, column, channel)
            channels = program.out_channels
        else:
            # Planes of the three channels, one after the other: neighbours in a row are neighbours in memory.
            value_bytes = 4 if stage.head is not None and stage.head.kind == Kind.BLUR_X else 1
            offset = builder.reserve(3 * height * width * value_bytes) // value_bytes
            target = (offset, width, 1, height * width)
            channels = 3
        histogram_written = -1
        if stage.writes_histogram:
            histogram_written = builder.histograms
            builder.histograms += 1
        head = builder.add_operation(stage.head) if stage.head is not None else -1
        tail_begin = len(builder.operations)
        for atom in stage.tail:
            builder.add_operation(atom)
        job = [*source, *target, height, width, channels, *stage.view.x, *stage.view.y, stage.view.fill or 0]
        job += [head, tail_begin, len(builder.operations)]
        job += [histogram_read if stage.reads_histogram else -1, histogram_written]
        job.append(builder.chains.setdefault(program.value_ops, len(builder.chains)))
        slots[len(slots) - len(stages) + number].append((len(builder.jobs), stage))
        builder.jobs.append(job)
        source, histogram_read = target, histogram_written


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
