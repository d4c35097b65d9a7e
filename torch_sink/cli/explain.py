"""The command `explain`: recorded operations, launches and fallbacks of a pipeline, and the stage that limits it.

Operations and launches are counted in one recorded batch. The data worker is measured. The other stages are modeled:
the copy from the bandwidth of the bus, kernels by `machine`, and the host from a measured cost per image and launch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

import torch_sink
from torch_sink.cli import machine
from torch_sink.cli.image_files import ImageFiles, look_at, said_of_files
from torch_sink.cli.machine import DEVICES, ESTIMATED, costs, features_of_batch, launches_of
from torch_sink.cli.pipelines import Images, Pipeline, seed_everything
from torch_sink.cli.progress import step
from torch_sink.cli.report import Report, Table, bars
from torch_sink.cli.worker_cost import Cost, cost_of_fallbacks, measured_beside_stock, said_of
from torch_sink.common import usable_cores
from torch_sink.damage.report import current_policy
from torch_sink.image.core.fallback import FallbackReport
from torch_sink.image.core.first_batch import origins_of
from torch_sink.image.core.origins import OPEN, said_of_nothing_recorded
from torch_sink.image.decode.source import EncodedSource, FinishedSource, PixelSource
from torch_sink.image.handles.kept import said_of_images_in
from torch_sink.image.handles.tensor import Handle
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.collate import collate_handles

CPU, WORKER, GPU_STAGES = "cpu", "worker", "decode + kernels"
MEASURED_IMAGES = 64  # in each round
_MOST_DECODED = 8  # files, to measure what Pillow takes for one
_MOST_SHOWN = 8  # lines of a plan, and shapes
_NOTHING = "nothing, "  # begins a remedy where nothing has to be done
# Part of a reason in the fallback report -> what to do.
REMEDIES = {
    "tensor read by other code": "do it behind the loader, on the batch, or by a call that is recorded: the page "
    "'Image backend' lists them. The call costs more than itself: the worker decodes the image and runs every "
    "transform before it",
    "read by other code": "use torchvision's transform of the same effect (python -m torch_sink support lists "
    "them). The call costs more than itself: the worker decodes the image and runs every transform before it",
    "with these arguments": "another interpolation, fill, size or type, or do it earlier, on the Pillow image: "
    "python -m torch_sink support lists the limits",
    "that become": "convert the batch behind that, on the device: batch.to(device).double()",
    "no kernel for mode": 'convert the image first: image.convert("RGB"), as ImageFolder does',
    "x height x width": "read the file with mode=ImageReadMode.RGB",
    "no kernel for": "do it on the Pillow image, before the conversion to a tensor",
    "is a class of its own": "use a Pillow image, where you can choose",
    "turned by its EXIF data": f"{_NOTHING}or store such files upright",
    "mode, size or palette was changed": f"{_NOTHING}or change the image before its first transform",
    "one image is moved by itself": "move batches, or image[None]",
    "used on the CPU before": "move the batch to the device first, then compute",
    "a mask is made from its image": f"{_NOTHING}masks are small",
    "did not prove themselves": "python -m torch_sink doctor says what is wrong with driver, compiler or build",
}
ADVICE = {
    WORKER: "More cores for workers help; so does a GPU, which takes this work from them: --device h200.",
    "host": "Larger batches help: they need as many launches as small ones.",
    "copy": "Smaller files help: the bus carries them as they are.",
    GPU_STAGES: "The GPU is what limits: smaller files or fewer operations help.",
}


class Stage(NamedTuple):
    """A stage of the data path, and the cost of one image there; all stages work at the same time."""

    name: str
    place: str
    bytes_in: float | None  # None if unknown
    bytes_out: float
    seconds: float
    at_once: int = 1  # images that it works on at the same time


class Explained(NamedTuple):
    """The answer about one pipeline."""

    name: str  # of the pipeline
    images: int  # in the batch
    device: str  # "cpu", or a name in `DEVICES`
    workers: int
    batches: list[LazyBatch]  # in the batch: several if its samples have several crops
    fallbacks: Counter[tuple[str, ...]]  # (operation, reason) -> count
    stages: list[Stage]
    beside_stock: str = ""  # whether the image backend pays in the data worker
    cost: Cost | None = None  # of the fallbacks, if it can be measured
    origins: Sequence[str] = ()  # what made samples that were not recorded, and what to do, as lines
    kept: str = ""  # a remark on images that the dataset keeps
    files: ImageFiles | None = None  # those of the folder, or of the batch
    assumes_workers: bool = False  # whether the loader has no workers

    @property
    def rates(self) -> dict[str, float]:
        """Images per second of each stage alone. Decoder and kernels share the GPU, so they are one stage."""
        on_gpu = sum(stage.seconds for stage in self.stages if stage.place == self.device)
        rates = {stage.name: stage.at_once / stage.seconds for stage in self.stages if stage.place != self.device}
        return rates | ({GPU_STAGES: 1 / on_gpu} if on_gpu else {})

    @property
    def limit(self) -> str:
        """The name of the slowest stage."""
        return min(self.rates, key=self.rates.__getitem__)


def explain(pipeline: Pipeline, device: str | None = None, workers: int | None = None) -> Explained:
    """Examine one batch of a pipeline, and the cost of an image in each stage.

    Args:
        device: "cpu" or a name in `DEVICES`, in upper or lower case; None for this machine's.
        workers: number of data workers; None for that of the pipeline's loader, else one for each core.

    Raises:
        ValueError: the device or the number of workers cannot be used, or the pipeline raises.
    """
    chosen, cores = known_device(device), usable_cores()
    count = next(given for given in (workers, pipeline.workers or None, cores) if given is not None)
    if count < 1:
        raise ValueError(f"--workers {count} make no batches; give 1 or more")
    policy = current_policy()  # that of the process, inside `with torch_sink.explain():`
    with step("Recording a batch"), torch_sink.image_backend("device", device="meta", on_decode_error=policy):
        seed_everything(0)
        images, _, batch = next(pipeline.batches())
        leaves = (collate_handles([leaf]) if isinstance(leaf, Handle) else leaf for leaf in tree_leaves(batch))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        report = torch_sink.fallback_report()
    batches = [leaf for leaf in tensors if type(leaf) is LazyBatch]
    fallbacks, origins = report.counts, said_of_origins(pipeline, report, batch)
    place = CPU if chosen == CPU else "meta"
    measured = max(images, MEASURED_IMAGES)
    seconds, beside_stock = measured_beside_stock(pipeline, measured, place, policy, step)
    at_once = count if device is not None and chosen != CPU else min(count, cores)
    worker = Stage(WORKER, f"this machine, {machine.cpu_name()}", None, 0, seconds, at_once)
    stages = list(_stages(worker, tensors, batches, images, chosen))
    cost = None
    if _are_costly(fallbacks):
        with step("Measuring a data worker without the fallbacks"):
            cost = cost_of_fallbacks(pipeline, measured)
    kept, files = said_of_images_in(pipeline.dataset), pipeline.files or _files_of(batches)
    assumed = workers is None and pipeline.workers == 0
    return Explained(
        pipeline.name, images, chosen, count, batches, fallbacks, stages, beside_stock, cost, origins, kept, files,
        assumed,
    )  # fmt: skip


def said_of_origins(pipeline: Pipeline, report: FallbackReport, batch: Any) -> list[str]:
    """What made the samples of a batch that was not recorded, and what to do, as lines."""
    lines = report.said_of_origins
    is_recorded = any(type(leaf) is LazyBatch or isinstance(leaf, Handle) for leaf in tree_leaves(batch))
    if not (is_recorded or report or lines):  # images were opened, but the batch holds none of them
        lines = said_of_nothing_recorded(origins_of(pipeline.dataset, batch))
    return [line.replace(f"{Images.__module__}.{Images.__qualname__}", pipeline.name) for line in lines]


def _files_of(batches: Sequence[LazyBatch]) -> ImageFiles | None:
    """The files that a batch was made of; None where it says none."""
    named = {source.path: None for batch in batches for source in batch.program.packed.sources()}
    paths = [path for path in map(Path, named) if path.is_file()]
    return look_at(paths) if paths else None


def known_device(name: str | None) -> str:
    """The name of a device as in `DEVICES`, or "cpu"; raises ValueError for an unknown one."""
    known = {each.lower(): each for each in (CPU, *DEVICES)}
    if name is not None:
        wanted, said = name.lower(), f"--device {name} is not known"
    else:
        here = (machine.gpu_name() if torch.cuda.is_available() else None) or CPU
        said, here = f"there are no figures for {here}", here.lower().replace(" ", "")
        wanted = next((each for each in known if each in here), "")
    if wanted not in known:
        raise ValueError(f"{said}; choose one of {', '.join(known)}: what is most like the GPU that you mean")
    return known[wanted]


def _stages(
    worker: Stage, tensors: list[torch.Tensor], batches: list[LazyBatch], images: int, device: str
) -> Iterator[Stage]:
    """Yields the stages, with the cost of one image: the amounts of the batch, divided by its images."""
    sources = [source for batch in batches for source in batch.program.packed.sources()]
    files = {source.path: len(source.data) for source in sources if isinstance(source, EncodedSource)}
    made = sum(leaf.nbytes for leaf in tensors if type(leaf) is not LazyBatch)
    results = made + sum(math.prod(batch.shape) * batch.dtype.itemsize for batch in batches)
    packed = made + sum(batch.program.packed.blob.nbytes for batch in batches)
    read = sum(files.values()) / images if files else None
    yield worker._replace(bytes_in=read, bytes_out=(results if device == CPU else packed) / images)
    if device == CPU:
        return

    def stage(name: str, place: str, bytes_in: float, bytes_out: float, seconds: float) -> Stage:
        return Stage(name, place, bytes_in / images, bytes_out / images, seconds / images)

    def seconds_of(launch: Counter[str]) -> float:
        return machine.microseconds(machine.modeled(launch), gpu) / 1e6

    gpu, host = DEVICES[device], costs()["host"]
    at_host = (host["image"] * images + host["launch"] * sum(launches_of(batch).total() for batch in batches)) / 1e6
    by_pillow, seconds_decoding, others = sum(map(_seconds_of_pillow, batches)), 0.0, 0.0
    decoding: Counter[str] = Counter()
    for decoder, *launches in map(features_of_batch, batches):
        decoding += decoder
        seconds_decoding += seconds_of(decoder)
        others += sum(map(seconds_of, launches))
    pixels = 3 * decoding["decoded pixel"]
    held = sum(source.tensor.nbytes for source in sources if isinstance(source, FinishedSource))
    held += sum(len(source.image.tobytes()) for source in sources if isinstance(source, PixelSource))
    yield stage("host", f"training process; CPU assumed: {host['cpu']}", packed, packed, at_host + by_pillow)
    yield stage("copy", f"PCIe, {gpu.bus:g} GB/s", packed, packed, packed / (gpu.bus * 1e9))
    yield stage("decode", device, decoding["encoded byte"], pixels, seconds_decoding)
    yield stage("kernels", device, pixels + made + held, results, others)


def _seconds_of_pillow(batch: LazyBatch) -> float:
    """CPU seconds of the training process for files of a batch that Pillow decodes, measured here."""
    by_kernels = set(batch.program.array("files").flat) if batch.program.launches else set()
    sources = enumerate(batch.program.packed.sources())
    files = [source for at, source in sources if at not in by_kernels and isinstance(source, EncodedSource)]
    started = time.process_time()
    for source in files[:_MOST_DECODED]:
        source.decode()
    return (time.process_time() - started) * len(files) / max(1, len(files[:_MOST_DECODED]))


def report_of(found: Explained) -> Report:
    """Make a readable report of the answer."""
    assumed = ", one for each core: the loader has none" * found.assumes_workers
    shapes = [f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}" for batch in found.batches]
    where = "the CPU, in the workers" if found.device == CPU else f"an {found.device} (modeled)"
    names = {EncodedSource: "JPEG files", PixelSource: "images decoded by the worker"}
    kinds = Counter(type(source) for batch in found.batches for source in batch.program.packed.sources())
    listed = ", ".join(f"{count} {names[kind]}" for kind, count in kinds.items() if kind in names)
    about = [
        f"a batch of {found.images} samples{': ' if listed else ''}{listed}",
        f"made on {where}; {found.workers} data worker{'s' * (found.workers > 1)}{assumed}",
        f"-> {', '.join(_some(shapes)) or 'nothing that is recorded'}",
        *([found.kept] if found.kept else []),
    ]
    parts = [lines_of("Files", said_of_files(found.files))] if found.files is not None else []
    parts += [_recorded_part(found), _launches_part(found), _fallbacks_part(found), _stages_part(found)]
    parts.append(bars("Images a second that each stage allows at most", "images/s", found.rates, limit=found.limit))
    return Report(f"Pipeline {found.name}", about, _verdict(found), parts)


def _some(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    return lines if len(lines) <= _MOST_SHOWN else [*lines[:_MOST_SHOWN], f"and {len(lines) - _MOST_SHOWN} more"]


def _recorded_part(found: Explained) -> Table:
    counts: Counter[str] = Counter()
    for batch in found.batches:
        counts.update(op.name for ops in batch.program.packed.calls() for op in ops)
        counts.update({op.name: len(batch) for op in batch.program.mixes})
    rows = [(name, f"{count}") for name, count in counts.most_common()]
    return Table("Recorded operations", ("operation", " images"), rows or [("none", "0")])


def _launches_part(found: Explained) -> Table:
    counts = sum(map(launches_of, found.batches), Counter[str]())
    if found.device == CPU or not counts:
        instead = ". --device h200 shows what a GPU would do." if found.batches else "."
        return lines_of("Launches of a batch: 0", [f"none: workers make the pixels, in stock code{instead}"])
    lines = _some([line for batch in found.batches for line in str(batch.plan).splitlines()[1:]])
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return lines_of(f"Launches of a batch: {counts.total()} ({listed})", lines)


def _fallbacks_part(found: Explained) -> Table:
    said = [] if found.origins else ["none: every transform can run on the GPU"]
    lines = [*remedies(found.fallbacks), *found.origins] or said
    part = lines_of("Falls back to stock code, in the workers", lines)
    return part._replace(note=said_of(found.cost)) if _are_costly(found.fallbacks) else part


def _are_costly(fallbacks: Counter[tuple[str, ...]]) -> bool:
    """Whether a fallback has a remedy."""
    return any(not remedy_for(reason).startswith(_NOTHING) for _, reason in fallbacks)


def remedies(fallbacks: Counter[tuple[str, ...]]) -> list[str]:
    """The fallbacks with their counts and remedies, as lines."""
    lines = []
    for (operation, reason), count in fallbacks.most_common():
        lines += [f"{count} x {operation}: {reason}", f"    -> {remedy_for(reason)}"]
    return lines


def lines_of(title: str, lines: list[str]) -> Table:
    """A table of lines of text under a title."""
    return Table(title, (), [(line,) for line in lines])


def remedy_for(reason: str) -> str:
    """The remedy for a reason in the fallback report."""
    return next((remedy for part, remedy in REMEDIES.items() if part in reason), "see the page on troubleshooting")


def _stages_part(found: Explained) -> Table:
    host, rows = costs()["host"], []
    for stage in found.stages:
        amounts = ["?" if each is None else f"{each:,.0f}" for each in (stage.bytes_in, stage.bytes_out)]
        how = "measured" if stage.name == WORKER else "modeled"
        rows.append((stage.name, stage.place, *amounts, f"{1e6 * stage.seconds:,.2f}", how))
    note = "measured: CPU time of a data worker for the dataset, the batch, and handing it over."
    if found.device != CPU:
        more = " and ".join(f"{least:g} to {most:g} times for {name}" for name, (least, most) in ESTIMATED.items())
        note += " modeled: a lower bound from counted instructions and from bandwidth, without waits for memory or for "
        note += f"the longest lane; we expect a GPU to take {more}. The host is as measured on {host['cpu']}, "
        note += f"{host['date']}."
    return Table("For an image", ("stage", "place", " bytes in", " bytes out", " us", "how"), rows, note)


def _verdict(found: Explained) -> str:
    """Sentences that say which stage limits, what helps, and whether the image backend pays."""
    name, others = found.limit, found.rates
    limit = f"The limit: {name}, at most {others.pop(name):,.0f} images a second."
    if not (found.batches or found.fallbacks):
        return f"{limit} {said_of_none(found.origins)}"
    advice = ADVICE[name]
    if name == WORKER and _are_costly(found.fallbacks):
        advice = "Fix the fallbacks first: they, and everything before them, run on the CPU."
    elif name == WORKER and others:
        second = min(others, key=others.__getitem__)
        needed = math.ceil(others[second] * found.stages[0].seconds)
        advice = f"{needed} workers reach what the next stage, {second}, allows: at most {others[second]:,.0f}."
    return f"{limit} {advice} {found.beside_stock}"


def said_of_none(origins: Sequence[str]) -> str:
    """The verdict on a pipeline of which nothing is recorded."""
    why = [line for line in origins[1:] if line[0] not in " -"]
    how = f" Images have to come from Pillow or torchvision.io: {OPEN}." if len(why) < len(origins) - 1 else ""
    said = "".join(f" {line}." for line in why)
    return f"Nothing of this pipeline is recorded, so torch_sink cannot speed it up.{said}{how}"
