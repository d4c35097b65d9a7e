"""The programs of a batch -> a Plan: which launch does what to which image, ready for the kernels.

Every image's last stage runs in the last launch, so a batch costs as many launches as its longest image has stages.
Where some images go on in float32 after the conversion to tensors, all do: the uint8 stages of all images come first,
then the float stages, and a batch costs as many launches as the longest image of each kind has stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_sink.image.atoms import Atom, FloatKind, Kind, Program
from torch_sink.image.ops import Op
from torch_sink.image.stages import Stage, only_crops_and_flips, stages_of
from torch_sink.triton_kernels import program as layout
from torch_sink.triton_kernels.stage import tile_shape

_JOB = {name: value.value for name, value in vars(layout).items() if hasattr(value, "value")}
_TABLE_COLUMN = {Kind.REMAP: 2, Kind.LOOKUP: 2, Kind.GRID: 10, FloatKind.WARP: 10}
_HEAD_TABLE_COLUMN = 8
# What works in float64, or needs as many registers.
_FLOAT64_KINDS = frozenset(
    (Kind.HUE, Kind.WARP, Kind.BLUR, Kind.BLUR_X, Kind.BLUR_Y, Kind.RESIZE_X, Kind.RESIZE_Y, Kind.GRID)
)
# What hands float32 values to the next stage.
_FLOAT_OUTPUTS = (Kind.BLUR_X, Kind.RESIZE_X)
_HEAVY_FLOAT_KINDS = frozenset(
    (Kind.ERASE, Kind.PASTE, FloatKind.HUE, *(kind for kind in FloatKind if kind >= FloatKind.BILINEAR))
)
_ALIGNMENT_BYTES = 16
_ALIGNMENT_FLOATS = 4


class ImageInput(NamedTuple):
    """A decoded image in the workspace: offset and strides in bytes, size in pixels."""

    offset: int
    row: int
    column: int
    channel: int
    height: int
    width: int


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
        self.floats = 0
        self.chains: dict[tuple[tuple[Op, ...], int], int] = {}

    def reserve(self, number_of_bytes: int) -> int:
        offset = self.workspace
        self.workspace += -(-number_of_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return offset

    def reserve_floats(self, elements: int) -> int:
        offset = self.floats
        self.floats += -(-elements // _ALIGNMENT_FLOATS) * _ALIGNMENT_FLOATS
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
        row[0], row[_JOB["FORMULA"]] = int(atom.kind), int(atom.formula)
        row[1 : 1 + len(atom.values)] = atom.values
        for number, table in enumerate(atom.tables):
            row[_TABLE_COLUMN.get(atom.kind, _HEAD_TABLE_COLUMN) + number] = self.add_table(table)
        if atom.factor:
            row[_JOB["FACTOR"]] = int(np.float32(atom.factor).view(np.int32))
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
    in_floats = any(program.float_atoms is not None for program in programs)
    chains = [_stages(image, program, in_floats) for image, program in zip(inputs, programs, strict=True)]
    byte_depth, float_depth = (max(len(chain[on_floats]) for chain in chains) for on_floats in (0, 1))
    slots: list[list[tuple[int, Stage]]] = [[] for _ in range(byte_depth + float_depth)]
    for index, (image, program, (byte_stages, float_stages)) in enumerate(zip(inputs, programs, chains, strict=True)):
        job = _Image(builder, index, image, program, output_strides)
        for number, stage in enumerate(byte_stages, byte_depth - len(byte_stages)):
            slots[number].append((job.add_byte_stage(stage, number == len(slots) - 1), stage))
        following = [*float_stages[1:], None]
        for number, stage in enumerate(float_stages):
            slot = slots[len(slots) - len(float_stages) + number]
            slot.append((job.add_float_stage(stage, following[number]), stage))
    return Plan(
        tuple(_launch(slot, shape, at >= byte_depth, at == len(slots) - 1) for at, slot in enumerate(slots)),
        shape,
        np.array(builder.jobs, dtype=np.int64),
        np.array(builder.operations, dtype=np.int32).reshape(-1, _JOB["OPERATION_COLUMNS"]),
        np.concatenate([table.ravel() for table in builder.tables]) if builder.tables else np.zeros(1, np.int32),
        builder.histograms,
        builder.workspace,
        builder.floats,
        in_floats,
        tuple(builder.chains),
        programs[0].out_channels,
        programs[0].size,
    )


def _stages(image: ImageInput, program: Program, in_floats: bool) -> tuple[list[Stage], list[Stage]]:
    """The uint8 stages and the float stages of one image."""
    height, width = image.height, image.width
    if not in_floats:
        return stages_of(height, width, program.atoms), []
    atoms, float_atoms = program.atoms, program.float_atoms or ()
    if only_crops_and_flips(height, width, atoms):
        # They cost nothing as the view of the first float stage.
        return [], stages_of(height, width, (*atoms, *float_atoms))
    height, width = atoms[-1].size
    return stages_of(image.height, image.width, atoms), stages_of(height, width, float_atoms)


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


class _Image:
    """Adds the jobs of one image, in order; remembers where its pixels lie meanwhile."""

    def __init__(
        self,
        builder: _Builder,
        index: int,
        image: ImageInput,
        program: Program,
        output_strides: tuple[int, int, int, int],
    ) -> None:
        batch, channel, row, column = output_strides
        self.builder, self.program = builder, program
        self.output = (index * batch, row, column, channel)
        self.source: tuple[int, int, int, int] = image.offset, image.row, image.column, image.channel
        self.from_bytes = 1
        self.histogram = -1

    def add_byte_stage(self, stage: Stage, is_last: bool) -> int:
        """The number of the new job; `is_last`: it writes the result."""
        height, width = stage.size
        target = self.output
        if not is_last:
            # Planes of the three channels, one after the other: neighbours in a row are neighbours in memory.
            value_bytes = 4 if stage.head is not None and stage.head.kind in _FLOAT_OUTPUTS else 1
            offset = self.builder.reserve(3 * height * width * value_bytes) // value_bytes
            target = (offset, width, 1, height * width)
        fill = stage.view.fill[0] if stage.view.fill else 0
        return self._add(stage, target, is_last, fill)

    def add_float_stage(self, stage: Stage, following: Stage | None) -> int:
        """The number of the new job; `following`: the stage after it, None where it writes the result."""
        builder, (height, width) = self.builder, stage.size
        target = self.output
        if following is not None:
            target = (builder.reserve_floats(3 * height * width), width, 1, height * width)
        fill, statistic = -1, -1
        if stage.view.fill:
            fill = builder.add_operation(Atom(Kind.SHIFT, stage.size, (0, 0, 0, 0, *stage.view.fill)))
        if following is not None and stage.writes_histogram:
            statistic = builder.add_operation(following.tail[0])
        number = self._add(stage, target, following is None, fill, statistic)
        self.from_bytes = 0
        return number

    def _add(
        self, stage: Stage, target: tuple[int, int, int, int], is_last: bool, fill: int, statistic: int = -1
    ) -> int:
        builder, (height, width) = self.builder, stage.size
        histogram_written = -1
        if stage.writes_histogram:
            histogram_written = builder.histograms
            builder.histograms += 1
        head = builder.add_operation(stage.head) if stage.head is not None else -1
        tail_begin = len(builder.operations)
        for atom in stage.tail:
            builder.add_operation(atom)
        chain = self.program.value_ops, self.program.value_channels
        job = [*self.source, *target, height, width, self.program.out_channels if is_last else 3]
        job += [*stage.view.x, *stage.view.y, fill, head, tail_begin, len(builder.operations)]
        job += [self.histogram if stage.reads_histogram else -1, histogram_written]
        job += [builder.chains.setdefault(chain, len(builder.chains)), self.from_bytes, statistic]
        job.append(stage.histogram_formula)
        self.source, self.histogram = target, histogram_written
        builder.jobs.append(job)
        return len(builder.jobs) - 1


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
