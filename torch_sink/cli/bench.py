"""Stock torchvision against torch_sink on this machine: what a data worker spends, what a loader delivers."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder

import torch_sink
from torch_sink.cli.pipelines import build_pipeline

# Recording is an order of magnitude cheaper than stock: more passes a round keep both above the clock's noise.
RECORDING_PASSES = 6


def measure_worker_cost(
    folder: str | Path, pipelines: Sequence[str], *, rounds: int = 7, batch_size: int = 40, images: int = 120
) -> dict[str, dict[str, Any]]:
    """Measure the CPU time that dataset and `default_collate` take in a data worker, stock and recording.

    All run in this process on one thread, on files in the page cache, in turns and with equal seeds: stock; torch_sink
    recording for the device "meta", as a worker does when the device executes elsewhere; torch_sink making the pixels
    on the CPU, as a worker does where there is no device.

    Args:
        folder: an `ImageFolder` tree.
        pipelines: names out of `torch_sink.cli.pipelines.PIPELINES`.
        rounds: how often stock and torch_sink take turns.
        batch_size: images a batch.
        images: how many images of the folder are used at most.

    Returns:
        For each pipeline: `stock_ms`, `torch_sink_ms` (recording) and `on_cpu_ms` (making the pixels), each p20, p50
        and p80 over the rounds, in CPU milliseconds a sample; `ratio` and `on_cpu_ratio` (median over the rounds of
        stock divided by each) and `fallbacks` (what ran in stock code while recording one pass, and how often).
    """
    with _one_thread():
        return {name: _worker_cost(Path(folder), name, rounds, batch_size, images) for name in pipelines}


def measure_loader(
    folder: str | Path, pipeline: str = "v1 train", *, workers: int = 2, batch_size: int = 64, seconds: float = 15.0
) -> dict[str, dict[str, float]]:
    """Measure how many images per second reach the device, from a stock DataLoader and through torch_sink.

    Args:
        folder: an `ImageFolder` tree.
        pipeline: name out of `torch_sink.cli.pipelines.PIPELINES`.
        workers: data workers of both loaders.
        batch_size: images a batch.
        seconds: how long each of the two is measured, after its first batch.

    Returns:
        `images_per_second` of "stock" and of "torch_sink".
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stock = _images_per_second(_make_loader(folder, pipeline, workers, batch_size), device, seconds)
    with torch_sink.image_backend("device"):
        loader = _make_loader(folder, pipeline, workers, batch_size)
        with torch_sink.SinkLoader(loader) as sink_loader:
            sink = _images_per_second(sink_loader, device, seconds)
    return {"stock": {"images_per_second": stock}, "torch_sink": {"images_per_second": sink}}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th and 80th percentile of some measurements."""
    if len(values) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), values[0])
    cuts = statistics.quantiles(values, n=10, method="inclusive")
    return {"p20": cuts[1], "p50": cuts[4], "p80": cuts[7]}


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _worker_cost(folder: Path, name: str, rounds: int, batch_size: int, images: int) -> dict[str, Any]:
    def cost(seed: int, passes: int) -> float:
        dataset = ImageFolder(str(folder), build_pipeline(name))
        return _cpu_ms_per_sample(dataset, min(images, len(dataset)), batch_size, seed, passes)

    def cost_on(device: str, seed: int, passes: int) -> float:
        with torch_sink.image_backend("device", device=device):
            return cost(seed, passes)

    cost(0, 1)
    cost_on("meta", 0, 1)
    fallbacks = torch_sink.fallback_report().counts
    # A seed for each round: no result of an earlier round can be found in a cache.
    turns = [
        (cost(seed, 1), cost_on("meta", seed, RECORDING_PASSES), cost_on("cpu", seed, 1))
        for seed in range(1, rounds + 1)
    ]
    return {
        "stock_ms": percentiles([stock for stock, _, _ in turns]),
        "torch_sink_ms": percentiles([recording for _, recording, _ in turns]),
        "on_cpu_ms": percentiles([on_cpu for _, _, on_cpu in turns]),
        "ratio": statistics.median(stock / recording for stock, recording, _ in turns),
        "on_cpu_ratio": statistics.median(stock / on_cpu for stock, _, on_cpu in turns),
        "fallbacks": {f"{operation}: {reason}": count for (operation, reason), count in fallbacks.items()},
    }


def _cpu_ms_per_sample(dataset: Dataset[Any], images: int, batch_size: int, seed: int, passes: int) -> float:
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed)).tolist()
    batches = [order[start : start + batch_size] for start in range(0, images, batch_size)]
    gc.collect()
    torch.manual_seed(seed)
    started = time.process_time()
    for _ in range(passes):
        for batch in batches:
            default_collate([dataset[index] for index in batch])
    return 1000 * (time.process_time() - started) / (passes * images)


def _make_loader(folder: str | Path, pipeline: str, workers: int, batch_size: int) -> DataLoader[Any]:
    dataset = ImageFolder(str(folder), build_pipeline(pipeline))
    return DataLoader(
        dataset,
        batch_size=min(batch_size, len(dataset)),
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),
    )


def _images_per_second(loader: Any, device: torch.device, seconds: float) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    images, started = 0, None
    while True:
        for batch, _ in loader:
            batch.to(device, non_blocking=True)
            if started is None:
                wait()  # host sync
                started = time.perf_counter()
                continue
            images += len(batch)
            if time.perf_counter() - started >= seconds:
                wait()  # host sync
                return images / (time.perf_counter() - started)
