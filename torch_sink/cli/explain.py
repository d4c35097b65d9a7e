"""The command `explain`: recorded operations, launches and fallbacks of a pipeline, and what a data worker costs here.

Operations, launches and bytes are counted in one recorded batch, and the data worker is measured. Nothing is said about
the time of a GPU, which nobody has seen here: `bench` measures images a second end to end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

import torch_sink
from torch_sink.cli.image_files import ImageFiles, look_at, said_of_files
from torch_sink.cli.kept_images import said_of_images_in
from torch_sink.cli.machine import cpu_name
from torch_sink.cli.pipelines import FolderImages, Pipeline, seed_everything
from torch_sink.cli.progress import step
from torch_sink.cli.report import Report, Table
from torch_sink.cli.worker_cost import Cost, cost_of_fallbacks, measured_beside_stock, said_of
from torch_sink.common import usable_cores
from torch_sink.damage.report import decode_errors
from torch_sink.image.core.fallback import FallbackReport
from torch_sink.image.core.first_batch import origins_of
from torch_sink.image.core.origins import OPEN, said_of_nothing_recorded
from torch_sink.image.decode import jpeg_decoder
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.source import PixelSource
from torch_sink.image.handles.tensor import Handle
from torch_sink.image.program.program import Program
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.collate import collate_handles

CPU, GPU = "cpu", "cuda"
_GPUS = (GPU, "a100", "h100", "h200", "b200", "rtx4090")  # what is said of one holds for each
MEASURED_IMAGES = 64  # in each round
_MOST_SHOWN = 8  # lines of a plan, and shapes
_ON_A_GPU = 'explain for "cuda" shows'  # `--device cuda`, or `torch_sink.explain("cuda")`
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


class WorkerCost(NamedTuple):
    """What an image costs a data worker of this machine."""

    seconds: float  # of CPU time, for the dataset, the batch, and handing it over
    bytes_read: float | None  # of its file; None if unknown
    bytes_handed_over: float  # to the training process: its file and tables where a GPU makes the pixels, else pixels


class Explained(NamedTuple):
    """The answer about one pipeline."""

    name: str  # of the pipeline
    images: int  # in the batch
    device: str  # "cpu" or "cuda"
    workers: int
    batches: list[LazyBatch]  # in the batch: several if its samples have several crops
    fallbacks: Counter[tuple[str, ...]]  # (operation, reason) -> count
    worker: WorkerCost
    beside_stock: str = ""  # whether the image backend pays in the data worker
    cost: Cost | None = None  # of the fallbacks, if it can be measured
    origins: Sequence[str] = ()  # what made samples that were not recorded, and what to do, as lines
    kept: str = ""  # a remark on images that the dataset keeps
    files: ImageFiles | None = None  # those of the folder, or of the batch
    assumes_workers: bool = False  # whether the loader has no workers

    @property
    def programs(self) -> list[Program]:
        """Those of the batches, which share one if they were made together."""
        return programs_of(self.batches)

    @property
    def at_once(self) -> int:
        """How many of the workers have a core of this machine."""
        return min(self.workers, usable_cores())

    @property
    def images_per_second(self) -> float:
        """What the workers of this machine make at most."""
        return self.at_once / self.worker.seconds


def explain(pipeline: Pipeline, device: str | None = None, workers: int | None = None) -> Explained:
    """Examine one batch of a pipeline, and what an image costs a data worker.

    Args:
        device: where the pixels would be made, "cuda" or "cpu"; None for what this machine has.
        workers: number of data workers; None for that of the pipeline's loader, else one for each core.

    Raises:
        ValueError: the device or the number of workers cannot be used, or the pipeline raises.
    """
    chosen, cores = known_device(device), usable_cores()
    count = next(given for given in (workers, pipeline.workers or None, cores) if given is not None)
    if count < 1:
        raise ValueError(f"--workers {count} make no batches; give 1 or more")
    policy = pipeline.policy or decode_errors.policy  # that of the process, inside `with torch_sink.explain():`
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
    worker = WorkerCost(seconds, *_bytes_of(tensors, batches, images, chosen))
    cost = None
    if _are_costly(fallbacks):
        with step("Measuring a data worker without the fallbacks"):
            cost = cost_of_fallbacks(pipeline, measured)
    kept, files = said_of_images_in(pipeline.dataset), pipeline.files or _files_of(batches)
    assumed = workers is None and pipeline.workers == 0
    return Explained(
        pipeline.name, images, chosen, count, batches, fallbacks, worker, beside_stock, cost, origins,
        kept, files, assumed,
    )  # fmt: skip


def said_of_origins(pipeline: Pipeline, report: FallbackReport, batch: Any) -> list[str]:
    """What made the samples of a batch that was not recorded, and what to do, as lines."""
    lines = report.said_of_origins
    is_recorded = any(type(leaf) is LazyBatch or isinstance(leaf, Handle) for leaf in tree_leaves(batch))
    if not (is_recorded or report or lines):  # images were opened, but the batch holds none of them
        lines = said_of_nothing_recorded(origins_of(pipeline.dataset, batch))
    return [line.replace(f"{FolderImages.__module__}.{FolderImages.__qualname__}", pipeline.name) for line in lines]


def programs_of(batches: Sequence[LazyBatch]) -> list[Program]:
    """The programs of batches, each once."""
    return [*{id(batch.program): batch.program for batch in batches}.values()]


def _files_of(batches: Sequence[LazyBatch]) -> ImageFiles | None:
    """The files that a batch was made of; None where it says none."""
    named = {source.path: None for program in programs_of(batches) for source in program.packed.sources()}
    paths = [path for path in map(Path, named) if path.is_file()]
    return look_at(paths) if paths else None


def known_device(name: str | None) -> str:
    """A device's kind, "cpu" or "cuda", by its name, None for what this machine has; raises ValueError for another."""
    if name is None:
        return GPU if torch.cuda.is_available() else CPU
    if name.lower() in (CPU, *_GPUS):
        return CPU if name.lower() == CPU else GPU
    raise ValueError(
        f'device {name!r} is not known; "cuda" says what happens where a GPU makes the pixels, "cpu" where data '
        "workers do"
    )


def _bytes_of(
    tensors: list[torch.Tensor], batches: list[LazyBatch], images: int, device: str
) -> tuple[float | None, float]:
    """The bytes of an image's file, None if no file is known, and those that a worker hands over."""
    sources = [source for program in programs_of(batches) for source in program.packed.sources()]
    files = {source.path: len(source.data) for source in sources if isinstance(source, EncodedSource)}
    made = sum(leaf.nbytes for leaf in tensors if type(leaf) is not LazyBatch)
    if device == CPU:
        made += sum(math.prod(batch.shape) * batch.dtype.itemsize for batch in batches)
    else:
        made += sum(program.packed.blob.nbytes for program in programs_of(batches))
    return (sum(files.values()) / images if files else None), made / images


def launches_of(program: Program) -> Counter[str]:
    """The number of launches of each kernel for a program; "decoder" counts all kernels of the decoder."""
    launches = program.launches
    return Counter(
        decoder=0 if program.jpegs is None else jpeg_decoder.launches_of(program.jpegs),
        prologue=int(bool(launches)),
        statistics=sum(launch.statistics_end > launch.statistics_begin for launch in launches),
        stage=len(launches),
    )


def report_of(found: Explained) -> Report:
    """Make a readable report of the answer."""
    assumed = ", one for each core: the loader has none" * found.assumes_workers
    shapes = [f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}" for batch in found.batches]
    where = "the CPU, in the workers" if found.device == CPU else "a GPU"
    names = {EncodedSource: "JPEG files", PixelSource: "images decoded by the worker"}
    kinds = Counter(type(source) for program in found.programs for source in program.packed.sources())
    listed = ", ".join(f"{count} {names[kind]}" for kind, count in kinds.items() if kind in names)
    about = [
        f"a batch of {found.images} samples{': ' if listed else ''}{listed}",
        f"made on {where}; {found.workers} data worker{'s' * (found.workers > 1)}{assumed}",
        f"-> {', '.join(_some(shapes)) or 'nothing that is recorded'}",
        *([found.kept] if found.kept else []),
    ]
    parts = [lines_of("Files", said_of_files(found.files))] if found.files is not None else []
    parts += [_recorded_part(found), _launches_part(found), _fallbacks_part(found), _worker_part(found)]
    return Report(f"Pipeline {found.name}", about, _conclusion(found), parts)


def _some(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    return lines if len(lines) <= _MOST_SHOWN else [*lines[:_MOST_SHOWN], f"and {len(lines) - _MOST_SHOWN} more"]


def _recorded_part(found: Explained) -> Table:
    counts: Counter[str] = Counter()
    for program in found.programs:
        counts.update(op.name for ops in program.packed.calls() for op in ops)
    for batch in found.batches:
        counts.update({op.name: len(batch) for op in batch.images.batch.mixes})
    rows = [(name, f"{count}") for name, count in counts.most_common()]
    return Table("Recorded operations", ("operation", " images"), rows or [("none", "0")])


def _launches_part(found: Explained) -> Table:
    counts = sum(map(launches_of, found.programs), Counter[str]())
    if found.device == CPU or not counts:
        instead = f". {_ON_A_GPU} what a GPU would run." if found.batches else "."
        return lines_of("Launches of a batch: 0", [f"none: workers make the pixels, in stock code{instead}"])
    lines: list[str] = []
    for number, batch in enumerate(found.batches, 1):
        lines += [f"image {number} of each sample:"] * (len(found.batches) > 1) + str(batch.plan).splitlines()[1:]
    lines = _some(lines)
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


def _worker_part(found: Explained) -> Table:
    seconds, bytes_read, bytes_handed_over = found.worker
    read = "" if bytes_read is None else f"reads {bytes_read:,.0f} bytes of its file and "
    together = f"{found.at_once} of them, each with a core, make" if found.at_once > 1 else "it makes"
    lines = [
        f"a sample costs it {1e3 * seconds:,.3f} ms of CPU time: the dataset, the batch, and handing it over",
        f"it {read}hands over {bytes_handed_over:,.0f} bytes a sample",
        f"{together} {found.images_per_second:,.0f} images a second at most",
    ]
    return lines_of(f"A data worker, measured here ({cpu_name()})", lines)


def _conclusion(found: Explained) -> str:
    """Sentences that say what the workers reach, what helps, and whether the image backend pays."""
    most = f"The workers make {found.images_per_second:,.0f} images a second at most."
    if not (found.batches or found.fallbacks):
        return f"{most} {said_of_none(found.origins)}"
    advice = "Whether your training waits for them, stats() of its SinkLoader says."
    if _are_costly(found.fallbacks):
        advice = "Fix the fallbacks first: they, and everything before them, run on the CPU."
    elif found.device == CPU:
        advice = f"A GPU takes this work from them: {_ON_A_GPU} what is left."
    return f"{most} {advice} {found.beside_stock}"


def said_of_none(origins: Sequence[str]) -> str:
    """The conclusion on a pipeline of which nothing is recorded."""
    why = [line for line in origins[1:] if line[0] not in " -"]
    how = f" Images have to come from Pillow or torchvision.io: {OPEN}." if len(why) < len(origins) - 1 else ""
    said = "".join(f" {line}." for line in why)
    return f"Nothing of this pipeline is recorded, so torch_sink cannot speed it up.{said}{how}"
