"""What the two demo scripts are compared by: wall time, CPU time of the data workers, waits for the device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import default_collate, get_worker_info

LAUNCH_CALLS = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")


class Meter:
    """Measures the code inside `with meter:` and, in the workers, everything up to each finished batch.

    Args:
        workers: number of data workers.
        count_launches: also count the calls that launch kernels (a graph counts as one). The profiler slows the
            run, so timings of such a run mean nothing.
    """

    def __init__(self, workers: int, count_launches: bool = False) -> None:
        self.seconds = 0.0
        self.item_calls = 0
        self.launches: int | None = None
        self._worker_seconds = torch.zeros(max(workers, 1), dtype=torch.float64).share_memory_()
        self._worker_last: float | None = None
        self._count_launches = count_launches and torch.cuda.is_available()

    @property
    def worker_seconds(self) -> float:
        """CPU seconds that all workers together have spent, each counted from its first image on."""
        return float(self._worker_seconds.sum())

    def start_worker(self, worker: int) -> None:
        """Give this to the DataLoader as `worker_init_fn`: what a worker spends on its own start is not counted."""
        self._worker_last = time.process_time()

    def collate(self, samples: list[Any]) -> Any:
        """`default_collate` that books the CPU time of this worker since its last batch."""
        batch = default_collate(samples)
        worker = get_worker_info()
        if worker is not None and self._worker_last is not None:
            now = time.process_time()
            self._worker_seconds[worker.id] += now - self._worker_last
            self._worker_last = now
        return batch

    def __enter__(self) -> Meter:
        self._stock_item = torch.Tensor.item
        torch.Tensor.item = self._counting_item()  # type: ignore[method-assign]
        if self._count_launches:
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profiler.__enter__()
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._started
        torch.Tensor.item = self._stock_item  # type: ignore[method-assign]
        if self._count_launches:
            self._profiler.__exit__(kind, error, at)
            events = self._profiler.key_averages()
            # None where the profiler saw no call at all, as without permission to trace: nothing was measured then.
            self.launches = sum(event.count for event in events if event.key.startswith(LAUNCH_CALLS)) or None

    def write(self, path: Path, *, losses: list[float], accuracy: float, images: int, host_syncs: int) -> None:
        """Write the run as JSON.

        Args:
            path: file to write.
            losses: the loss of every training step.
            accuracy: share of the test images that were recognized, in [0, 1].
            images: number of images trained on, over all epochs.
            host_syncs: how often the host waited for the device while training.
        """
        run = {
            "losses": losses,
            "accuracy": accuracy,
            "images": images,
            "steps": len(losses),
            "seconds": self.seconds,
            "worker_seconds": self.worker_seconds,
            "host_syncs": host_syncs,
            "launches": self.launches,
        }
        path.write_text(json.dumps(run))

    def _counting_item(self) -> Any:
        stock_item = self._stock_item

        def item(tensor: torch.Tensor) -> Any:
            # A DataLoader draws an integer seed on the CPU when it starts: that is no wait for the device.
            self.item_calls += tensor.is_floating_point()
            return stock_item(tensor)

        return item
