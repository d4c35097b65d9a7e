"""CPU time that a sample costs a data worker: stock torchvision beside torch_sink.

Measured is what users pay: a worker process of a plain `DataLoader`, on one thread as always, with all that it does for
a batch: it reads files, runs the transforms, collates, makes shared memory and sends the batch. Whoever receives the
batch lets go of it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

import torch_sink
from torch_sink.cli.pipelines import Pipeline, seed_everything
from torch_sink.cli.report import Table

# The first batches of a worker do not count, since caches are empty then: so many, or those with so many samples.
WARM_UP_BATCHES, WARM_UP_SAMPLES = 3, 96
_NOTE = (
    "CPU time of a worker process of a plain DataLoader: median of the rounds (least to most). recording: where a GPU "
    "makes the pixels; on the CPU: where the worker makes them, without a GPU."
)


class Side(NamedTuple):
    """Who makes the samples: a setting of the image backend, and the number of workers; 0 for this process."""

    backend: str
    device: str | None = None
    workers: int = 1


# "meta": as a worker records where the device is another process's business.
SIDES = {"stock": Side("PIL"), "torch_sink": Side("device", "meta"), "on_cpu": Side("device", "cpu")}


def measure_worker_cost(pipeline: Pipeline, *, rounds: int = 7, images: int = 96) -> dict[str, Any]:
    """Measure what a sample costs a data worker, stock and with torch_sink, from equal seeds and in turns.

    Returns:
        `batch_size`; `stock_ms`, `torch_sink_ms` (it records, a device elsewhere makes the pixels) and `on_cpu_ms` (the
        worker makes them), in CPU milliseconds a sample; `ratio` and `on_cpu_ratio` (stock divided by each, round by
        round), all as `percentiles`; and `fallbacks` (what ran in stock code while `images` were recorded, and how
        often).
    """
    fallbacks = fallbacks_of(pipeline, images)
    sides = {name: partial(milliseconds, pipeline, side, images) for name, side in SIDES.items()}
    times = in_turns(sides, rounds)
    return {"batch_size": batch_size_of(pipeline), **summary(times), "fallbacks": fallbacks}


def summary(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """`percentiles` of the milliseconds of each side, and of stock's divided by those of each other one."""
    found = {f"{name}_ms": percentiles(values) for name, values in times.items()}
    for name, values in times.items():
        if name != "stock":
            ratios = [stock / value for stock, value in zip(times["stock"], values, strict=True)]
            found["ratio" if name == "torch_sink" else f"{name}_ratio"] = percentiles(ratios)
    return found


def in_turns(sides: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """What each side gives for the seeds 1 to `rounds`; in every second round they go in the opposite order."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(1, rounds + 1):
        for name in list(sides)[:: 1 if seed % 2 else -1]:
            values[name].append(sides[name](seed))
    return values


def milliseconds(pipeline: Pipeline, side: Side, images: int, seed: int) -> float:
    """CPU milliseconds that a sample costs one side."""
    with torch_sink.image_backend(side.backend, device=side.device):
        return 1000 * worker_seconds(pipeline, images, seed, workers=side.workers)


def worker_seconds(pipeline: Pipeline, images: int, seed: int, *, workers: int = 1) -> float:
    """CPU seconds that a sample costs a data worker; with `workers=0`, this process where it makes its own batches.

    The image backend is as it is. At least `images` samples count, in whole batches, after some for the warm-up.
    """
    seed_everything(seed)
    gc.collect()
    with nullcontext() if workers else one_thread(), closing(pipeline.batches(workers)) as batches:
        return seconds_a_sample(batches, images)


def seconds_a_sample(batches: Iterator[tuple[int, float, Any]], images: int) -> float:
    """CPU seconds a sample of whoever makes `batches`: (samples, CPU seconds of its process so far, batch).

    The process reads its clock when a batch is collated. What it does for that batch afterwards counts for the next
    one: between two readings lies all that a batch costs.
    """
    made = 0
    for count, begun, _ in islice(batches, WARM_UP_BATCHES):  # noqa: B007 the last one is used
        made += count
        if made >= WARM_UP_SAMPLES:
            break
    made = 0
    while made < images:
        count, now, _ = next(batches)
        made += count
    return (now - begun) / made


def fallbacks_of(pipeline: Pipeline, images: int) -> dict[str, int]:
    """What of a pipeline runs in stock code while so many images are recorded, in this process, and how often."""
    seed_everything(0)
    with one_thread(), torch_sink.image_backend("device", device="meta"), closing(pipeline.batches()) as batches:
        made = 0
        while made < images:
            made += next(batches)[0]
        counts = torch_sink.fallback_report().counts
    return {f"{operation}: {reason}": count for (operation, reason), count in counts.items()}


def batch_size_of(pipeline: Pipeline) -> int:
    """The samples of its first batch."""
    with torch_sink.image_backend("device", device="meta"), closing(pipeline.batches()) as batches:
        return next(batches)[0]


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread, as in a data worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile of some measurements, the least and the most."""
    cuts = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return {"least": min(values), "p20": cuts[1], "p50": cuts[4], "p80": cuts[7], "most": max(values)}


def worker_cost_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """CPU milliseconds a sample, and stock divided by torch_sink."""
    rows: list[tuple[str, ...]] = []
    for name, result in results.items():
        stock, recording, on_cpu = (f"{result[key]['p50']:.3f}" for key in ("stock_ms", "torch_sink_ms", "on_cpu_ms"))
        ratios = spread(result["ratio"]), spread(result["on_cpu_ratio"], 2)
        rows.append((name, f"{result['batch_size']}", stock, recording, ratios[0], on_cpu, ratios[1]))
        rows += [(f"  stock code: {what} ({count})", *[""] * 6) for what, count in result["fallbacks"].items()]
    heads = ("pipeline", " batch", " stock", " recording", " stock / recording", " on the CPU", " stock / on the CPU")
    return Table("A data worker: CPU milliseconds for a sample", heads, rows, _NOTE)


def spread(values: Mapping[str, float], digits: int = 1) -> str:
    """For readers: the median, and the least and the most of the rounds."""
    median, least, most = (f"{values[key]:.{digits}f}" for key in ("p50", "least", "most"))
    return f"{median} ({least} to {most})"
