"""What `torch-sink explain` says: what of a pipeline is recorded, what is launched, what falls back, what limits.

Counted is what one recorded batch holds. The worker is measured in this process. The other stages are modeled: the copy
by the bandwidth of the bus, kernels by `machine`, the host by what it was measured to spend on an image and a launch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves

import torch_sink
from torch_sink.cli.bench import one_thread, seed_everything, worker_seconds
from torch_sink.cli.machine import (
    DEVICES,
    costs,
    cpu_name,
    features_of_batch,
    gpu_name,
    launches_of,
    microseconds,
    modeled,
)
from torch_sink.cli.pipelines import Pipeline
from torch_sink.cli.report import Bars, Report, Table, Text
from torch_sink.common.platforms import usable_cores
from torch_sink.image.execute.batch import LazyBatch
from torch_sink.image.execute.collate import collate_handles
from torch_sink.image.handles.tensor import HANDLES
from torch_sink.image.sources.source import EncodedSource, PixelSource

CPU = "cpu"
MEASURED_IMAGES = 256
_MOST_DECODED = 8  # files, to measure what Pillow takes for one
# A part of a reason in the fallback report -> what to do.
REMEDIES = {
    "read by other code": "use torchvision's transform of the same effect (python -m torch_sink support lists "
    "them), or leave it if it is cheap: only this call runs on the CPU",
    "with these arguments": "another interpolation, fill, size or type, or do it earlier, on the Pillow image: "
    "python -m torch_sink support lists the limits",
    "no kernel for mode": 'convert the image first: image.convert("RGB"), as ImageFolder does',
    "x height x width": "read the file with mode=ImageReadMode.RGB",
    "no kernel for": "do it on the Pillow image, before the conversion to a tensor",
    "is a class of its own": "use a Pillow image, where you can choose",
    "turned by its EXIF data": "nothing, or store such files upright",
    "one image is moved by itself": "move batches, or image[None]",
    "used on the CPU before": "move the batch to the device first, then compute",
    "a mask is made from its image": "nothing: masks are small",
}


class Stage(NamedTuple):
    """One of the stages that a batch goes through, all at the same time.

    Attributes:
        name: of the stage.
        place: where it runs.
        bytes_in: of an image.
        bytes_out: of an image.
        seconds: for an image.
        at_once: how many images are in it at a time.
        source: "measured" or "modeled".
    """

    name: str
    place: str
    bytes_in: float
    bytes_out: float
    seconds: float
    at_once: int
    source: str

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.at_once / self.seconds if self.seconds else math.inf


class Explained(NamedTuple):
    """What was found.

    Attributes:
        pipeline: what was looked at.
        images: of the batch.
        device: "cpu", or a name in `DEVICES`.
        workers: data workers.
        batches: the recorded ones; a batch of several crops has several.
        fallbacks: {(operation, reason): how often}.
        stages: in order.
    """

    pipeline: Pipeline
    images: int
    device: str
    workers: int
    batches: list[LazyBatch]
    fallbacks: Counter[tuple[str, ...]]
    stages: list[Stage]


def explain(pipeline: Pipeline, device: str | None = None, workers: int | None = None) -> Explained:
    """Look at one batch of a pipeline, and at what each stage spends on an image.

    Args:
        pipeline: what makes the batches.
        device: "cpu", or a GPU in `DEVICES`, in any case; None for what is at hand.
        workers: data workers; None for those of the pipeline, else one for each core.

    Raises:
        ValueError: the device or the number of workers cannot be used, or the pipeline raises.
    """
    chosen = _device(device)
    count = next(given for given in (workers, pipeline.workers or None, usable_cores()) if given is not None)
    if count < 1:
        raise ValueError(f"--workers {count} make no batches; give 1 or more")
    with torch_sink.image_backend("device", device="meta"):
        seed_everything(0)
        images, batch = next(pipeline.batches())
        fallbacks = torch_sink.fallback_report().counts
        batches = [*_lazy_batches(batch)]
    with one_thread(), torch_sink.image_backend("device", device=CPU if chosen == CPU else "meta"):
        worker_seconds(pipeline, images, seed=0)  # fills caches
        seconds = worker_seconds(pipeline, max(images, MEASURED_IMAGES), seed=1)
    stages = [*_stages(batches, images, chosen, count, seconds)]
    return Explained(pipeline, images, chosen, count, batches, fallbacks, stages)


def _device(name: str | None) -> str:
    """The key of a device."""
    known = {each.lower(): each for each in (CPU, *DEVICES)}
    if name is not None and name.lower() in known:
        return known[name.lower()]
    here = gpu_name() or CPU
    if name is not None:
        raise ValueError(f"--device {name} is not known; choose one of {', '.join(known)}, or leave it out for {here}")
    found = [each for each in known if each in here.lower().replace(" ", "")]
    if not found:
        raise ValueError(
            f"there are no figures for {here}; name the GPU that is most like it: --device {', '.join(known)}"
        )
    return known[found[0]]


def _lazy_batches(batch: Any) -> Iterator[LazyBatch]:
    """What is recorded of a batch; images that no batch holds make one each."""
    for leaf in tree_leaves(batch):
        made = collate_handles([leaf]) if isinstance(leaf, HANDLES) else leaf
        if isinstance(made, LazyBatch):
            yield made


def _stages(batches: list[LazyBatch], images: int, device: str, workers: int, seconds: float) -> Iterator[Stage]:
    """What each stage has to do for an image; `seconds` is what a worker was measured to spend on one."""
    packed = [batch.recorded.packed for batch in batches]
    sources = [source for each in packed for source in each.sources()]
    files = sum(len(source.data) for source in sources if isinstance(source, EncodedSource)) / images
    pixels = sum(math.prod(source.size) * 3 for source in sources if isinstance(source, PixelSource)) / images
    results = sum(math.prod(batch.shape) * batch.dtype.itemsize for batch in batches) / images
    here = f"this machine, {cpu_name()}"
    if device == CPU or not batches:
        yield Stage("worker", here, files + pixels, results, seconds, min(workers, usable_cores()), "measured")
        return
    gpu, host = DEVICES[device], costs()["host"]
    handed_over = sum(each.blob.nbytes for each in packed) / images
    tables = sum(_table_bytes(batch) for batch in batches) / images
    features = [features_of_batch(batch) for batch in batches]
    encoded, decoded = (sum(each[0][name] for each in features) / images for name in ("encoded byte", "decoded pixel"))
    on_host = sum(_seconds_of_pillow(batch) for batch in batches) / images
    launches = sum(launches_of(batch).total() for batch in batches)
    on_gpu = [[microseconds(modeled(launch), gpu) / 1e6 / images for launch in each] for each in features]
    at_host = (host["image"] + host["launch"] * launches / images) / 1e6
    yield Stage("worker", here, files + pixels, handed_over, seconds, workers, "measured")
    yield Stage("host", f"a host as {host['cpu']}", tables, tables, at_host + on_host, 1, "modeled")
    yield Stage("copy", f"PCIe, {gpu.bus:g} GB/s", handed_over + tables, handed_over + tables,
                (handed_over + tables) / (gpu.bus * 1e9), 1, "modeled")  # fmt: skip
    yield Stage("decode", device, encoded, 3 * decoded, sum(each[0] for each in on_gpu), 1, "modeled")
    yield Stage("kernels", device, 3 * decoded + pixels, results, sum(sum(each[1:]) for each in on_gpu), 1, "modeled")


def _table_bytes(batch: LazyBatch) -> int:
    """Of the rows that tell the kernels what to do."""
    plans = [run.plan for run in batch.recorded.plan().runs]
    arrays = [
        (plan.jobs.astype("int64"), plan.operations, plan.tables, plan.resizes, plan.statistics) for plan in plans
    ]
    return sum(array.nbytes for each in arrays for array in each)


def _seconds_of_pillow(batch: LazyBatch) -> float:
    """CPU seconds of the process that trains for the files of a batch that no kernel decodes, as measured here."""
    packed = batch.recorded.packed
    by_kernels = set(packed.jpegs.sources.tolist())
    others = [source for at, source in enumerate(packed.sources()) if at not in by_kernels]
    files = [source for source in others if isinstance(source, EncodedSource)]
    started = time.process_time()
    for source in files[:_MOST_DECODED]:
        source.decode()
    return (time.process_time() - started) * len(files) / max(1, min(len(files), _MOST_DECODED))


def limit_of(found: Explained) -> tuple[str, float]:
    """The stage that limits, and its images a second. Decoding and the other kernels share the GPU."""
    return min(rates_of(found), key=lambda stage: stage[1])


def rates_of(found: Explained) -> list[tuple[str, float]]:
    """Images a second of each stage, if nothing else were in the way."""
    on_gpu = sum(stage.seconds for stage in found.stages if stage.place == found.device)
    rates = [(stage.name, stage.rate) for stage in found.stages if stage.place != found.device]
    return [*rates, *([("decode + kernels", 1 / on_gpu)] if on_gpu else [])]


def report_of(found: Explained) -> Report:
    """What was found, for readers."""
    shapes = ", ".join(f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}" for batch in found.batches)
    where = "the CPU, in the workers" if found.device == CPU else f"an {found.device} (modeled)"
    about = [
        f"a batch of {found.images} samples: {_kinds(found)}",
        f"made on {where}; {found.workers} data workers",
        f"-> {shapes or 'nothing that is recorded'}",
    ]
    parts: list[Table | Bars | Text] = [_recorded_part(found), _launches_part(found), _fallbacks_part(found)]
    parts += [_stages_part(found), Bars("Images a second that each stage allows", rates_of(found), limit_of(found)[0])]
    return Report(f"Pipeline {found.pipeline.name}", about, _verdict(found), parts)


def _kinds(found: Explained) -> str:
    sources = [source for batch in found.batches for source in batch.recorded.packed.sources()]
    kinds = Counter("JPEG files" if isinstance(source, EncodedSource) else "images in memory" for source in sources)
    sizes = [source.size for source in sources if isinstance(source, (EncodedSource, PixelSource))]
    largest = max(sizes, key=math.prod, default=(0, 0))
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "which none is recorded"
    return f"{listed}; the largest has {largest[0]} x {largest[1]} pixels" if sizes else listed


def _recorded_part(found: Explained) -> Table:
    counts: Counter[str] = Counter()
    for batch in found.batches:
        counts.update(op.name for ops in batch.recorded.packed.calls() for op in ops)
        counts.update({op.name: len(batch) for op in batch.recorded.mixes})
    rows = [(name, f"{count}") for name, count in counts.most_common()]
    return Table("Recorded operations", ("operation", " images"), rows or [("none", "0")])


def _launches_part(found: Explained) -> Text:
    if found.device == CPU:
        lines = ["none: workers make the pixels, in stock code. --device h200 shows what a GPU would do."]
        return Text("Launches of a batch: 0", lines)
    counts: Counter[str] = Counter()
    for batch in found.batches:
        counts.update(launches_of(batch))
    listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    lines = [line for batch in found.batches[:2] for line in _plan_lines(batch)]
    return Text(f"Launches of a batch: {counts.total()} ({listed})" if listed else "Launches of a batch: 0", lines)


def _plan_lines(batch: LazyBatch) -> list[str]:
    return str(batch.plan).splitlines()[1:]


def _fallbacks_part(found: Explained) -> Text:
    title = "Falls back to stock code, in the workers"
    if not found.fallbacks:
        said = "nothing: all that was asked for is recorded" if found.batches else "everything: nothing was recorded"
        return Text(title, [said])
    lines = []
    for (operation, reason), count in found.fallbacks.most_common():
        lines += [f"{count} x {operation}: {reason}", f"    -> {remedy_for(reason)}"]
    return Text(title, lines)


def remedy_for(reason: str) -> str:
    """What to do about a reason in the fallback report."""
    return next((remedy for part, remedy in REMEDIES.items() if part in reason), "see the page on troubleshooting")


def _stages_part(found: Explained) -> Table:
    rows = [
        (stage.name, stage.place, f"{stage.bytes_in:,.0f}", f"{stage.bytes_out:,.0f}", f"{1e6 * stage.seconds:,.2f}",
         stage.source)
        for stage in found.stages
    ]  # fmt: skip
    host = costs()["host"]
    note = (
        "measured: CPU time of this process for the dataset and its batch. modeled: a lower bound from counted "
        f"instructions and from bandwidth; the host as measured on {host['cpu']}, {host['date']}."
    )
    head = ("stage", "place", " bytes in", " bytes out", " us", "how")
    return Table("For an image", head, rows, note if found.device != CPU else "measured: CPU time of this process.")


def _verdict(found: Explained) -> str:
    """Which stage limits, and what helps."""
    name, rate = limit_of(found)
    said = f"The limit: {name}, at {rate:,.0f} images a second."
    others = [other for other in rates_of(found) if other[0] != name]
    if found.fallbacks:
        return f"{said} First mend what falls back: it runs in the workers."
    if name == "worker" and others:
        second, allowed = min(others, key=lambda stage: stage[1])
        needed = math.ceil(allowed * found.stages[0].seconds)
        return f"{said} {needed} workers reach what the next stage, {second}, allows: {allowed:,.0f}."
    advice = {
        "worker": "More cores for workers help; so does a GPU, which takes this work from them: --device h200.",
        "host": "Larger batches help: they need as many launches as small ones.",
        "copy": "Smaller files help: the bus carries them as they are.",
        "decode + kernels": "The GPU is what limits: smaller files or fewer operations help.",
    }
    return f"{said} {advice[name]}"
