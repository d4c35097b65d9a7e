"""CPU time of a data worker per sample: stock torchvision beside torch_sink, and with and without fallbacks.

The measured process is a worker of a plain `DataLoader`, on one thread, with everything that it does for a batch: it
reads files, runs the transforms, collates, allocates shared memory and sends the batch. The receiver drops the batch.
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
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from torch_sink.cli.pipelines import Pipeline, seed_everything
from torch_sink.cli.progress import Step, silent
from torch_sink.cli.report import Table
from torch_sink.common.patches import Patches
from torch_sink.damage.report import Policy
from torch_sink.errors import SinkError
from torch_sink.image.backend import Backend
from torch_sink.image.core.fallback import ledger, name_of

_NO_DIFFERENCE = 0.05  # in a few rounds, the CPU time of equal work differs by as much
WARM_UP_BATCHES = 4  # the first ones of a worker do not count: they fill caches, and make memory that is used again
_NOTE = (
    "CPU time of a data worker of a plain DataLoader: median of the rounds (least to most). stock: without torch_sink. "
    "recorded: with it, where a GPU makes the pixels, which were not made. on the CPU: with it, where the worker makes "
    "them."
)


class Side(NamedTuple):
    """A side of the comparison: the image backend with its options, and the number of workers, 0 for this process."""

    backend: Backend
    device: str | None = None
    workers: int = 1
    on_decode_error: Policy = "raise"


# With "meta", samples are recorded as on a machine with a GPU, but no pixels are made.
SIDES = {"stock": Side("PIL"), "torch_sink": Side("device", "meta"), "on_cpu": Side("device", "cpu")}


def measure_worker_cost(
    pipeline: Pipeline, *, rounds: int = 7, images: int = 96, step: Step = silent
) -> dict[str, Any]:
    """Measure the cost of a sample in a data worker, stock and with torch_sink, with equal seeds and in turns.

    Args:
        pipeline: what the worker makes samples of.
        rounds: how often each side is measured.
        images: samples that count in a round, at least.
        step: the context of each round, which is given a line about it.

    Returns:
        `batch_size`; `stock_ms`, `torch_sink_ms` (the worker records, a GPU would make the pixels) and `on_cpu_ms` (the
        worker makes the pixels), in CPU milliseconds per sample; `ratio` and `on_cpu_ratio` (stock divided by each,
        round by round), all as `percentiles`; and `fallbacks` (what ran in stock code while `images` samples were
        recorded -> count).
    """
    fallbacks = fallbacks_of(pipeline, images)
    sides = {name: partial(milliseconds, pipeline, side, images) for name, side in SIDES.items()}
    times = in_turns(sides, rounds, step)
    with torch_sink.image_backend("device", device="meta"), closing(pipeline.batches()) as batches:
        batch_size = next(batches)[0]
    return {"batch_size": batch_size, **summary(times), "fallbacks": fallbacks}


def summary(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """`percentiles` of each side's milliseconds, and of the ratios of stock's to those of each other side."""
    found = {f"{name}_ms": percentiles(values) for name, values in times.items()}
    for name, values in times.items():
        if name != "stock":
            ratios = [stock / value for stock, value in zip(times["stock"], values, strict=True)]
            found["ratio" if name == "torch_sink" else f"{name}_ratio"] = percentiles(ratios)
    return found


def in_turns(sides: Mapping[str, Callable[[int], float]], rounds: int, step: Step = silent) -> dict[str, list[float]]:
    """The values of each side for the seeds 1 to `rounds`; every second round measures in the opposite order."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for seed in range(1, rounds + 1):
        with step(f"Measuring a data worker, round {seed} of {rounds}"):
            for name in list(sides)[:: 1 if seed % 2 else -1]:
                values[name].append(sides[name](seed))
    return values


def milliseconds(pipeline: Pipeline, side: Side, images: int, seed: int) -> float:
    """CPU milliseconds per sample of one side."""
    with torch_sink.image_backend(side.backend, device=side.device, on_decode_error=side.on_decode_error):
        return 1000 * worker_seconds(pipeline, images, seed, workers=side.workers)


def worker_seconds(pipeline: Pipeline, images: int, seed: int, *, workers: int = 1) -> float:
    """CPU seconds per sample of a data worker, with the current image backend; `workers=0` measures this process.

    At least `images` samples count, in whole batches, after a warm-up.
    """
    seed_everything(seed)
    gc.collect()
    with nullcontext() if workers else one_thread(), closing(pipeline.batches(workers)) as batches:
        return seconds_a_sample(batches, images)


def seconds_a_sample(batches: Iterator[tuple[int, float, Any]], images: int) -> float:
    """CPU seconds per sample of the process that makes `batches`: (samples, its CPU seconds so far, batch).

    The process reads its clock when a batch is collated. Its later work for that batch counts for the next one, so the
    time between two readings is the whole cost of a batch.
    """
    *_, (_, begun, _) = islice(batches, WARM_UP_BATCHES)
    made = 0
    while made < images:
        count, now, _ = next(batches)
        made += count
    return (now - begun) / made


def fallbacks_of(pipeline: Pipeline, images: int) -> dict[str, int]:
    """What runs in stock code while this process records so many images of a pipeline -> count."""
    seed_everything(0)
    with one_thread(), torch_sink.image_backend("device", device="meta"), closing(pipeline.batches()) as batches:
        made = 0
        while made < images:
            made += next(batches)[0]
        counts = torch_sink.fallback_report().counts
    return {f"{operation}: {reason}": count for (operation, reason), count in counts.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    """A context in which torch computes on one thread, as in a data worker."""
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
    """A table of CPU milliseconds per sample, and of stock divided by torch_sink."""
    rows: list[tuple[str, ...]] = []
    for name, result in results.items():
        stock, recorded, on_cpu = (f"{result[key]['p50']:.3f}" for key in ("stock_ms", "torch_sink_ms", "on_cpu_ms"))
        ratios = spread(result["ratio"]), spread(result["on_cpu_ratio"], 2)
        rows.append((name, f"{result['batch_size']}", stock, recorded, ratios[0], on_cpu, ratios[1]))
        rows += [(f"  stock code: {what} ({count})", *[""] * 6) for what, count in result["fallbacks"].items()]
    heads = ("pipeline", " batch", " stock", " recorded", " stock / recorded", " on the CPU", " stock / on the CPU")
    return Table("A data worker: CPU milliseconds for a sample", heads, rows, _NOTE)


def said_beside_stock(cost: Mapping[str, Any], *, on_cpu: bool = False) -> str:
    """Whether the image backend pays in a data worker of this machine, from a result of `summary`.

    Args:
        on_cpu: judge the worker that makes the pixels; otherwise the one that records for a GPU.
    """
    ours, ratio = (cost["on_cpu_ms"], cost["on_cpu_ratio"]) if on_cpu else (cost["torch_sink_ms"], cost["ratio"])
    side, advice = ("on the CPU" if on_cpu else "recorded"), "no difference"
    if ratio["least"] > 1 + _NO_DIFFERENCE:
        advice = "the image backend pays"
    elif ratio["most"] < 1 - _NO_DIFFERENCE:
        advice = "leave the image backend at 'PIL' for this dataset"
    stock, milliseconds = (f"{values['p50']:.3f} ms" for values in (cost["stock_ms"], ours))
    said = f"A sample costs a data worker here {milliseconds} {side}, and {stock} in stock code"
    return f"{said} (stock / {side}, round by round: {spread(ratio, 2)}): {advice}."


def measured_beside_stock(
    pipeline: Pipeline, images: int, device: str, on_decode_error: Policy, step: Step = silent
) -> tuple[float, str]:
    """CPU seconds of a data worker for a sample, and whether the image backend pays there, in turns with stock code."""
    ours = "on_cpu" if device == "cpu" else "torch_sink"
    compared = {"stock": SIDES["stock"], ours: Side("device", device, on_decode_error=on_decode_error)}
    sides = {name: partial(milliseconds, pipeline, side, images) for name, side in compared.items()}
    try:
        found = summary(in_turns(sides, 3, step))
    except ValueError as error:  # for instance, stock code has no policy for broken files
        return sides[ours](1) / 1000, f"Stock code cannot be measured beside it: {error}."
    return found[f"{ours}_ms"]["p50"] / 1000, said_beside_stock(found, on_cpu=ours == "on_cpu")


def spread(values: Mapping[str, float], digits: int = 1) -> str:
    """The median, least and most of the rounds, as text."""
    median, least, most = (f"{values[key]:.{digits}f}" for key in ("p50", "least", "most"))
    return f"{median} ({least} to {most})"


# --- the cost of fallbacks


class Cost(NamedTuple):
    """CPU seconds per image in a worker with and without the transforms that fall back; pixels are not computed."""

    names: list[str]  # of the transforms that fall back
    with_them: float
    without: float


class _Chains:
    """Stand-ins for both `Compose` that note which of their transforms fall back, or leave these out."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.calls = 0  # number of calls that fell back
        self.leaves_out = False

    def over(self, _: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the stand-in for `Compose.__call__` and `Compose.forward`."""

        def call(compose: Any, *inputs: Any) -> Any:
            is_one = len(inputs) == 1
            for transform in compose.transforms:
                is_found = any(transform is each for each in self.found)
                if is_found and self.leaves_out:
                    continue
                fallbacks, calls = ledger.counts.total(), self.calls
                outputs = transform(*inputs)
                if ledger.counts.total() > fallbacks and self.calls == calls:  # not a chain around a noted transform
                    self.calls += 1
                    self.found += [] if is_found else [transform]
                inputs = (outputs,) if is_one else outputs
            return inputs[0] if is_one else inputs

        return call


def cost_of_fallbacks(pipeline: Pipeline, images: int) -> Cost | None:
    """Measures a pipeline on so many images, with and without the transforms that fall back.

    None if that cannot be measured: the fallbacks come from no transform of a `Compose`, or later code needs them.
    """
    seconds = partial(worker_seconds, workers=0)  # in this process, which has the stand-ins
    chains, patches = _Chains(), Patches()
    try:
        with torch_sink.image_backend("device", device="meta"):  # first: its stand-ins have to be below these
            patches.replace(v1.Compose, "__call__", chains.over)
            patches.replace(v2.Compose, "forward", chains.over)
            seconds(pipeline, images, seed=0)  # notes the transforms that fall back
            if not chains.found:
                return None
            with_them = seconds(pipeline, images, seed=1)
            chains.leaves_out = True
            without = seconds(pipeline, images, seed=1)
    except (ValueError, SinkError):
        return None
    finally:
        patches.undo()
    # The name of a function, of the function in a `Lambda`, or of a transform's class.
    return Cost([name_of(getattr(each, "lambd", each)) for each in chains.found], with_them, without)


def said_of(cost: Cost | None) -> str:
    """Describes the cost of the fallbacks."""
    if cost is None:
        return (
            "What they cost cannot be measured by itself: they are no transforms of a Compose, or later code needs "
            "them. The worker's time includes them."
        )
    names, *seconds = cost
    with_them, without = (f"{1e6 * each:,.0f} us" for each in seconds)
    return (
        f"Measured, where a GPU makes the pixels: an image costs {with_them} with {' and '.join(names)}, and {without} "
        "without. The difference is these calls, the decoding, and every transform before them. Handing the batch over "
        "is not counted."
    )
