"""The command `bench`: stock torchvision beside torch_sink, in CPU time of a data worker and images per second."""

from __future__ import annotations

import statistics
import time
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_sink
from torch_sink.cli.explain import lines_of, said_of_none, said_of_origins
from torch_sink.cli.image_files import said_of_files
from torch_sink.cli.machine import describe_machine
from torch_sink.cli.pipelines import Pipeline, find_images, open_pipeline, seed_everything
from torch_sink.cli.progress import step
from torch_sink.cli.report import Report, Table, bars
from torch_sink.cli.worker_cost import measure_worker_cost, said_beside_stock, spread, worker_cost_table
from torch_sink.image.backend import Backend
from torch_sink.image.core.origins import NO_IMAGES, NOTHING_RECORDED

TITLE = "torch_sink beside stock torchvision"
_NO_GPU = "Without a GPU both make the same pixels on the CPU, and either may be faster."
_EQUAL = {
    True: "yes, every value",
    False: "no",
    None: "cannot be said: stock code differs from itself, with equal seeds of torch, numpy and random",
}


def run(
    folder: Path | None, name: str, *, workers: int | None, quick: bool = False, given: bool = True
) -> dict[str, Any]:
    """Measure a pipeline's worker cost, throughput and equality of pixels; returns a JSON-ready report.

    Args:
        folder: images for a transform, or None.
        name: of the pipeline; see `open_pipeline`.
        workers: data workers of the loaders; None for the number of the pipeline's loader, else 2.
        quick: take fewer images and rounds.
        given: whether the images are the user's, and not generated ones.
    """
    if workers is not None and workers < 0:
        raise ValueError(f"--workers {workers} cannot be; give 1 or more, or 0 to make batches in this process")
    rounds, turns, batch_size, images = (2, 1, 32, 32) if quick else (7, 3, 32, 96)
    pipeline = open_pipeline(name, folder, batch_size)
    report = {**describe_run("torch-sink bench", folder), "given": given}
    report["files"] = said_of_files(pipeline.files) if given and pipeline.files is not None else []
    with step("Recording a batch"):
        report["not_recorded"] = not_recorded(pipeline)
    with step("Comparing a batch with stock torchvision's"):
        report["equal"] = {name: is_equal(pipeline)}
    report["worker_cost"] = {name: measure_worker_cost(pipeline, rounds=rounds, images=images, step=step)}
    workers = next(count for count in (workers, pipeline.workers, 2) if count is not None)
    speeds = measure_loader(pipeline, workers=workers, turns=turns, seconds=1 if quick else 5)
    report["loader"] = {"pipeline": name, "workers": workers, **speeds}
    return report


def describe_run(command: str, folder: str | Path | None) -> dict[str, Any]:
    """The first fields of every report: the command, the machine and the photographs."""
    sizes = [path.stat().st_size for path in find_images(folder)] if folder is not None else []
    photographs = {"count": len(sizes), "mean_bytes": round(statistics.mean(sizes))} if sizes else None
    return {"command": command, "machine": describe_machine(), "photographs": photographs}


def measure_loader(pipeline: Pipeline, *, workers: int, turns: int, seconds: float) -> dict[str, dict[str, float]]:
    """Measure the `images_per_second` that reach the device, from a "stock" DataLoader and through "torch_sink".

    The two take turns of `seconds` each, counted from their second batch; the result is the median of the turns.
    """
    options: dict[str, Any] = {"persistent_workers": workers > 0, "pin_memory": torch.cuda.is_available()}
    stock, sink = [], []
    for turn in range(turns):
        with step(f"Measuring images a second, turn {turn + 1} of {turns}"):
            with torch_sink.image_backend("PIL"):
                stock.append(_images_per_second(pipeline.loader(workers, **options), seconds))
            loader = pipeline.loader(workers, **options)
            with torch_sink.image_backend("device"), torch_sink.SinkLoader(loader) as sink_loader:
                sink.append(_images_per_second(sink_loader, seconds))
    medians = {"stock": statistics.median(stock), "torch_sink": statistics.median(sink)}
    return {name: {"images_per_second": speed} for name, speed in medians.items()}


def not_recorded(pipeline: Pipeline) -> list[str]:
    """What made the samples of a batch that is not recorded, and what to do, as lines."""
    with torch_sink.image_backend("device", device="meta"):
        seed_everything(0)
        *_, batch = next(pipeline.batches())
        return said_of_origins(pipeline, torch_sink.fallback_report(), batch)


def is_equal(pipeline: Pipeline) -> bool | None:
    """Whether a batch of torch_sink on this machine equals one of stock torchvision with equal seeds, in every value.

    None if two batches of stock torchvision with equal seeds differ.
    """

    def values(backend: Backend) -> list[torch.Tensor]:
        with torch_sink.image_backend(backend):
            seed_everything(0)
            *_, batch = next(pipeline.batches())
            leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
            return [leaf.to(_device()).cpu().as_subclass(torch.Tensor) for leaf in leaves]

    stock, again, ours = values("PIL"), values("PIL"), values("device")
    return _same(stock, ours) if _same(stock, again) else None


def _same(stock: list[torch.Tensor], ours: list[torch.Tensor]) -> bool:
    pairs = zip(stock, ours, strict=False)
    return len(stock) == len(ours) and all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _images_per_second(loader: Any, seconds: float) -> float:
    batches, device = chain.from_iterable(repeat(loader)), _device()

    def move_batch() -> int:
        count, _, batch = next(batches)
        tree_map_only(torch.Tensor, lambda leaf: leaf.to(device, non_blocking=True), batch)
        return int(count)

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()  # host sync
        return time.perf_counter()

    move_batch()
    images, started = 0, now()
    while not images or time.perf_counter() - started < seconds:
        images += move_batch()
    return images / (now() - started)


def report_of(found: dict[str, Any]) -> Report:
    """Make a readable report of the results of `run`."""
    loader, photographs = found["loader"], found["photographs"]
    about = [_machine(found)]
    if photographs:
        kind = "images" if found["given"] else "generated images, as no folder was given"
        about.append(f"{photographs['count']} {kind}, {photographs['mean_bytes'] / 1e3:.0f} kB on average")
    (in_a_worker, costs), (end_to_end, speeds) = _charts(found).items()
    cost = found["worker_cost"][loader["pipeline"]]
    conclusion = _conclusion(found, cost)
    equal = [(pipeline, _EQUAL[is_same]) for pipeline, is_same in found["equal"].items()]
    parts = [
        bars(in_a_worker, "ms", costs, digits=3),
        bars(end_to_end, "images/s", speeds, note="" if found["machine"]["gpu"] else _NO_GPU),
        worker_cost_table(found["worker_cost"]),
        Table("Equal pixels, from equal seeds", ("pipeline", "equal"), equal),
    ]
    if found["files"]:
        parts.append(lines_of("Files", found["files"]))
    if found["not_recorded"]:
        parts.insert(0, lines_of("Not recorded", found["not_recorded"]))
    return Report(TITLE, about, conclusion, parts)


def _conclusion(found: dict[str, Any], cost: dict[str, Any]) -> str:
    if found["not_recorded"][:1] in ([NOTHING_RECORDED], [NO_IMAGES]):
        return said_of_none(found["not_recorded"])
    loader, gpu, ratio = found["loader"], found["machine"]["gpu"], cost["ratio"]
    said = []
    if gpu:
        faster = loader["torch_sink"]["images_per_second"] / loader["stock"]["images_per_second"]
        said.append(f"Here {faster:.2f}x the images a second, end to end with {loader['workers']} workers.")
    less = f"{ratio['p50']:.1f} times less CPU time for a sample"
    if ratio["least"] <= 1:
        less = f"no less CPU time for a sample (stock / recorded: {spread(ratio, 2)})"
    said.append(f"Where a GPU makes the pixels, a data worker takes {less}, at batch {cost['batch_size']}.")
    return " ".join([*said, said_beside_stock(cost, on_cpu=not gpu)])


def _machine(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return f"{machine['cpu']}, {machine['cpu_cores']} cores; {machine['gpu'] or 'no GPU: workers make the pixels'}"


def _charts(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The figures that are shown as bars: {title: {side: figure}}."""
    loader = found["loader"]
    name, cost = loader["pipeline"], found["worker_cost"][loader["pipeline"]]
    in_a_worker = f"{name}: CPU milliseconds of a data worker for a sample, where a GPU makes the pixels"
    end_to_end = f"{name}: images a second end to end on this machine, {loader['workers']} workers"
    return {
        in_a_worker: {"stock": cost["stock_ms"]["p50"], "recorded": cost["torch_sink_ms"]["p50"]},
        end_to_end: {side: loader[side]["images_per_second"] for side in ("stock", "torch_sink")},
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the results of `run` into a PNG file. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    charts = _charts(found)
    figure, axes = pyplot.subplots(len(charts), figsize=(9, 1 + 1.7 * len(charts)), layout="constrained")
    for axis, (title, values) in zip(axes, charts.items(), strict=True):
        drawn = axis.barh([*values], [*values.values()], color=("#8c959f", "#0969da"))
        axis.bar_label(drawn, [f"{value:,.{0 if value > 100 else 3}f}" for value in values.values()], padding=4)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(title, loc="left", fontsize=10)
    figure.suptitle(TITLE, x=0.01, ha="left", fontsize=12, weight="bold")
    releases = found["machine"]["releases"].items()
    installed = ", ".join(f"{name} {release}" for name, release in releases if release is not None)
    taken_on = f"{found['machine']['date']}; {installed}\n{_machine(found)}"
    figure.supxlabel(taken_on, x=0.01, ha="left", fontsize=8, color="#59636e")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
