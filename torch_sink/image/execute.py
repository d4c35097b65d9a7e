"""Programs + sources -> a tensor: in stock code on the CPU, or as a plan of kernel launches on a device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torch_sink.errors import DecodeError
from torch_sink.image.decode.decoded import Box, Decoded
from torch_sink.image.decode.providers import candidates, decode_sources
from torch_sink.image.fallback import executing
from torch_sink.image.lower.lowering import lower, value_table
from torch_sink.image.ops import WIDE_TYPES, Op, replay
from torch_sink.image.plan.atoms import Atom, Kind, Program
from torch_sink.image.plan.passes import passes_of
from torch_sink.image.source import FinishedSource, Source
from torch_sink.image.state import default_device

if TYPE_CHECKING:
    from torch_sink.image.plan.build import Plan
    from torch_sink.image.plan.jobs import ImageInput


# --- on the CPU, in stock code


def run_image_on_cpu(source: Source, ops: tuple[Op, ...], target: torch.Tensor) -> None:
    """Makes one image of a batch.

    Args:
        source: where its pixels come from.
        ops: calls recorded on it.
        target: [C, H, W], written to.

    Raises:
        DecodeError: the file is damaged.
    """
    with executing():
        ends_as_usual = len(ops) >= 2 and ops[-1].name == "v1.normalize" and ops[-2].name == "to_tensor"
        if ends_as_usual and target.dtype == torch.float32:
            # Same arithmetic on the same values as the stock calls, without their three temporary tensors.
            pixels = replay(replay(source.decode(), ops[:-2]), (Op("pil_to_tensor"),))
            torch.div(pixels, 255, out=target)
            mean, std = _statistics(*ops[-1].args)
            target.sub_(mean).div_(std)
            return
        target.copy_(replay(source.decode(), ops))


@functools.lru_cache(maxsize=64)
def _statistics(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std))  # type: ignore[return-value]


# --- on a device, in kernels


def decoded_images(
    sources: Sequence[Source], device: torch.device, boxes: Sequence[Box | None]
) -> list[Decoded | DecodeError | FinishedSource]:
    """Pixels of every source that is not a finished tensor: those of its box, where there is one, or all of them."""
    encoded = [at for at, source in enumerate(sources) if not isinstance(source, FinishedSource)]
    chosen = [sources[at] for at in encoded]
    pixels = iter(decode_sources(chosen, device, boxes=[boxes[at] for at in encoded]))  # type: ignore[arg-type]
    return [source if isinstance(source, FinishedSource) else next(pixels) for source in sources]


class ImageShape(NamedTuple):
    """What a pass of an image begins with: height and width in pixels, 1 or 3 channels."""

    height: int
    width: int
    channels: int


def shape_of(source: Source) -> ImageShape:
    """The shape of a source that is no finished tensor."""
    width, height = source.size  # type: ignore[union-attr]
    return ImageShape(height, width, 3 if source.mode == "RGB" else 1)  # type: ignore[union-attr]


def programs_of(
    sources: Sequence[Source], calls: Sequence[tuple[Op, ...]], dtype: torch.dtype = torch.float32
) -> list[tuple[Program, ...]]:
    """Lowers the calls of every image.

    Args:
        sources: of the images, none a finished tensor.
        calls: recorded on each.
        dtype: of the batch.

    Returns:
        The programs of each image, one for each of its passes.
    """
    shapes, passes = [shape_of(source) for source in sources], [passes_of(ops) for ops in calls]
    lowered = [_lowered(shape, ops, in_floats=False) for shape, ops in zip(shapes, passes, strict=True)]
    # Tables hold half precision and wide types, but the kernel on floats does not compute in them.
    if dtype in (torch.float32, torch.uint8) and any(programs[-1].float_atoms is not None for programs in lowered):
        # Then the float kernel writes the result, of every image.
        for at, (shape, ops) in enumerate(zip(shapes, passes, strict=True)):
            if lowered[at][-1].float_atoms is None:
                lowered[at] = _lowered(shape, ops, in_floats=True)
    if dtype in WIDE_TYPES:
        for at, (shape, ops) in enumerate(zip(shapes, passes, strict=True)):
            if any(map(_writes_floats, lowered[at][-1].atoms)):
                lowered[at] = _lowered(shape, ops, in_floats=True)
    return lowered


def _writes_floats(atom: Atom) -> bool:
    """True for a box of float32 values that the kernel on bytes writes beside those of its tables."""
    return atom.kind in (Kind.ERASE, Kind.PASTE) and bool(atom.values[5])


def _lowered(shape: ImageShape, passes: Sequence[tuple[Op, ...]], *, in_floats: bool) -> tuple[Program, ...]:
    programs = []
    for number, ops in enumerate(passes, 1):
        program = lower(*shape, ops, in_floats and number == len(passes))
        programs.append(program)
        shape = ImageShape(*program.size, program.out_channels)
    return tuple(programs)


def run_programs(
    decoded: Sequence[Decoded], programs: Sequence[tuple[Program, ...]], rows: Sequence[int], out: torch.Tensor
) -> None:
    """Runs the programs of a batch, pass by pass.

    Args:
        decoded: pixels of each image; the same object may stand for several.
        programs: what each image goes through, as `programs_of` gives them.
        rows: position of each image in the batch.
        out: [N, C, H, W], written to; its device is where everything runs.
    """
    images = list(decoded)
    for group in earlier_passes(programs):
        first = group[0][1]
        made = torch.empty((len(group), first.out_channels, *first.size), dtype=torch.uint8, device=out.device)
        run_on_device([images[at] for at, _ in group], [program for _, program in group], range(len(group)), made)
        for row, (at, _) in enumerate(group):
            images[at] = Decoded(made[row], channels_last=False)
    for together in last_passes(programs):
        last = [programs[at][-1] for at in together]
        run = _run_in_wide_type if _is_wide(last[0]) else run_on_device
        run([images[at] for at in together], last, [rows[at] for at in together], out)


def earlier_passes(programs: Sequence[tuple[Program, ...]]) -> Iterator[list[tuple[int, Program]]]:
    """What runs before the last passes, in order: (position of an image, its program), of those written alike."""
    for number in range(max(map(len, programs)) - 1):
        groups: dict[tuple[Any, ...], list[tuple[int, Program]]] = {}
        for at, passes in enumerate(programs):
            if number < len(passes) - 1:
                program = passes[number]
                key = program.out_channels, program.size, program.float_atoms is None
                groups.setdefault(key, []).append((at, program))
        yield from groups.values()


def last_passes(programs: Sequence[tuple[Program, ...]]) -> list[list[int]]:
    """Positions of the images that one kernel makes the results of; one group where they are float32 or bytes."""
    groups: dict[tuple[bool, bool], list[int]] = {}
    for at, passes in enumerate(programs):
        groups.setdefault((passes[-1].float_atoms is not None, _is_wide(passes[-1])), []).append(at)
    return [groups[key] for key in sorted(groups)]


def _is_wide(program: Program) -> bool:
    """True where the values of bytes are of a type that the kernels do not write."""
    return program.float_atoms is None and _values_of(program).dtype in WIDE_TYPES


def _values_of(program: Program) -> torch.Tensor:
    with executing():
        return value_table(program.value_channels, program.value_ops)


def _run_in_wide_type(
    decoded: Sequence[Decoded], programs: Sequence[Program], rows: Sequence[int], out: torch.Tensor
) -> None:
    """As `run_on_device`: makes bytes, then looks up their values, one lookup for each chain of calls on values."""
    made = torch.empty((len(rows), *out.shape[1:]), dtype=torch.uint8, device=out.device)
    of_bytes = [program._replace(value_ops=(Op("pil_to_tensor"),)) for program in programs]
    run_on_device(decoded, of_bytes, range(len(rows)), made)
    channel = torch.arange(out.shape[1], device=out.device).view(1, -1, 1, 1)
    for chain in {(program.value_channels, program.value_ops) for program in programs}:
        same = [at for at, program in enumerate(programs) if (program.value_channels, program.value_ops) == chain]
        values = _values_of(programs[same[0]]).to(out.device)
        places = torch.tensor([rows[at] for at in same], device=out.device)
        out[places] = values[channel, made[torch.tensor(same, device=out.device)].long()].to(out.dtype)


def run_on_device(
    decoded: Sequence[Decoded], programs: Sequence[Program], rows: Sequence[int], out: torch.Tensor
) -> None:
    """Runs the programs of a batch in as many launches as its longest image has stages.

    Args:
        decoded: pixels of each image; the same object may stand for several.
        programs: what each image goes through.
        rows: position of each image in the batch.
        out: [N, C, H, W], written to; its device is where everything runs.
    """
    from torch_sink.image.plan.build import build_plan

    device = out.device
    inputs, workspace_start = _place(decoded)
    contiguous_rows = list(rows) == list(range(len(rows)))
    target = out if contiguous_rows else torch.empty((len(rows), *out.shape[1:]), dtype=out.dtype, device=device)
    strides = tuple(target.stride())
    plan = build_plan(inputs, programs, workspace_start, strides, device.type == "cpu")  # type: ignore[arg-type]
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
    _fill(workspace, decoded, inputs)
    jobs, operations, tables = (_to(table, device) for table in (plan.jobs, plan.operations, plan.tables))
    histograms = torch.zeros((max(plan.histograms, 1), 7, 256), dtype=torch.int32, device=device)
    values = _value_tables(plan.value_chains, torch.float32 if plan.in_floats else target.dtype, device)
    # Triton launches on the current device, wherever the tensors are.
    with nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index):
        _launch_all(plan, workspace, target, jobs, operations, tables, histograms, values)
    if target is not out:
        out[torch.tensor(rows, device=device)] = target


def _launch_all(
    plan: Plan,
    workspace: torch.Tensor,
    target: torch.Tensor,
    jobs: torch.Tensor,
    operations: torch.Tensor,
    tables: torch.Tensor,
    histograms: torch.Tensor,
    values: torch.Tensor,
) -> None:
    from torch_sink.triton_kernels.float_stage import new_records, run_float_stage
    from torch_sink.triton_kernels.stage import run_stage

    device = workspace.device
    floats = torch.empty(plan.float_elements, dtype=torch.float32, device=device)
    records, gray_sums = new_records(plan.histograms if plan.in_floats else 0, device)
    for launch in plan.launches:
        tiles = _to(launch.tiles, device)
        if launch.on_floats:
            run_float_stage(
                workspace, floats, target, jobs, operations, tables, tiles, records, gray_sums, values,
                is_last=launch.is_last, has_statistic=launch.has_statistic, is_heavy=launch.is_heavy,
                rows_and_columns=plan.tile_shape,
            )  # fmt: skip
        else:
            run_stage(
                workspace, target, jobs, operations, tables, tiles, histograms, values,
                is_last=launch.is_last, has_float64=launch.is_heavy, has_statistic=launch.has_statistic,
                has_erase=launch.has_erase, rows_and_columns=plan.tile_shape,
            )  # fmt: skip


def _to(table: np.ndarray, device: torch.device) -> torch.Tensor:
    on_host = torch.from_numpy(table)
    return on_host if device.type == "cpu" else on_host.pin_memory().to(device, non_blocking=True)


def _place(decoded: Sequence[Decoded]) -> tuple[list[ImageInput], int]:
    """Where each image will lie in the workspace, and where the rest of the workspace begins."""
    from torch_sink.image.plan.jobs import ImageInput

    inputs, offsets, end = [], {}, 0
    for image in decoded:
        if id(image) not in offsets:
            offsets[id(image)] = end
            end += -(-image.pixels.numel() // 16) * 16
        # Of a part of an image, as if the rest were there: nothing reads outside the part.
        inputs.append(ImageInput(offsets[id(image)] + image.origin, *image.strides, *image.size))
    return inputs, end


def _fill(workspace: torch.Tensor, decoded: Sequence[Decoded], inputs: Sequence[ImageInput]) -> None:
    """Copies pixels to their places: what is on the host in one transfer, the rest one by one."""
    placed = {image.offset - item.origin: item for image, item in zip(inputs, decoded, strict=True)}
    on_host = {offset: item for offset, item in placed.items() if item.pixels.device.type == "cpu"}
    if workspace.device.type == "cpu":
        staging = workspace
    else:
        end = max((offset + item.pixels.numel() for offset, item in on_host.items()), default=0)
        staging = torch.empty(end, dtype=torch.uint8, pin_memory=True) if end else workspace
    for offset, item in on_host.items():
        staging[offset : offset + item.pixels.numel()].copy_(item.pixels.flatten())
    if staging is not workspace:
        workspace[: len(staging)].copy_(staging, non_blocking=True)
    for offset, item in placed.items():
        if offset not in on_host:
            workspace[offset : offset + item.pixels.numel()].copy_(item.pixels.flatten())


@functools.lru_cache(maxsize=64)
def _value_tables(
    chains: tuple[tuple[tuple[Op, ...], int], ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """float32 [chains, 3, 256]: the values of each uint8; stays on the device for the batches to come.

    They are rounded to `dtype`, that of the result, here: Triton's interpreter cuts off what bfloat16 cannot hold.
    """
    with executing():
        tables = [value_table(channels, chain).to(dtype).float().expand(3, -1) for chain, channels in chains]
    return torch.stack(tables).to(device)


# --- saying what would run


class BatchPlan(NamedTuple):
    """How a batch would run: which provider decodes how many images, and the launches. `str()` is readable.

    Attributes:
        decode: {provider: images}.
        plan: the launches of the last pass; None for a batch of finished tensors.
        earlier: the launches of what runs before it, and whose floats become bytes again, in order.
    """

    decode: Counter[str]
    plan: Plan | None
    earlier: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        lines = [f"decode: {', '.join(f'{count} by {name}' for name, count in self.decode.items())}"]
        return "\n".join(lines + [str(plan) for plan in (*self.earlier, self.plan) if plan is not None])

    def __repr__(self) -> str:
        return str(self)


def describe(images: Sequence[Source], programs: Sequence[tuple[Op, ...]], device: torch.device) -> BatchPlan:
    """The plan of a batch, made from the headers of its images alone.

    Args:
        images: source of each image.
        programs: calls recorded on each.
        device: where the batch would run; "meta" is planned as the default device.
    """
    device = torch.device(default_device()) if device.type == "meta" else device
    decode: Counter[str] = Counter()
    chosen = []
    for source, ops in zip(images, programs, strict=True):
        if isinstance(source, FinishedSource):
            decode["nobody (finished tensors)"] += 1
            continue
        decode[next(provider.name for provider in candidates(device) if provider.takes(source))] += 1
        chosen.append((source, ops))
    if not chosen:
        return BatchPlan(decode, None)
    sources, calls = zip(*chosen, strict=True)
    lowered = programs_of(sources, calls)
    shapes, earlier = [shape_of(source) for source in sources], []
    for group in earlier_passes(lowered):
        earlier.append(_planned([shapes[at] for at, _ in group], [program for _, program in group]))
        for at, program in group:
            shapes[at] = ImageShape(*program.size, program.out_channels)
    return BatchPlan(decode, _planned(shapes, [passes[-1] for passes in lowered]), tuple(earlier))


def _planned(shapes: Sequence[ImageShape], programs: Sequence[Program]) -> Plan:
    from torch_sink.image.plan.build import build_plan
    from torch_sink.image.plan.jobs import ImageInput

    inputs = [ImageInput(0, 0, 0, 0, shape.height, shape.width) for shape in shapes]
    height, width = programs[0].size
    strides = (programs[0].out_channels * height * width, height * width, width, 1)
    return build_plan(inputs, programs, 0, strides, interpreted=False)
