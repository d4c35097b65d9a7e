"""What the queue reports, and that it is right about who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sink.conftest import wait_for
from torch_sink.sink import QueueStats, SinkLoader, producer
from torch_sink.sink.producer import Producer
from torch_sink.sink.stats import StatsCollector

pytestmark = pytest.mark.halved


class Throttled(Dataset):
    """User code that is slow: how long it is waited for is what is measured."""

    def __init__(self, seconds: float, sleep: Callable[[float], None]) -> None:
        self.seconds, self.sleep = seconds, sleep

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.sleep(self.seconds)
        return torch.zeros(1000)


@pytest.fixture
def sleep(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sleeps, for real beside workers; where one thread does everything, on a clock that no other program slows down."""
    if num_workers:
        return time.sleep
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(producer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return lambda seconds: setattr(clock, "now", clock.now + seconds)


def has_filled_queue(producer: Producer) -> bool:
    return producer.current is None or len(producer.ready) >= producer.slots.count - 1


def measure(source: Any, step: Callable[[], None], *, fills_queue: bool = False) -> QueueStats:
    """What the queue of a loop reports.

    Args:
        source: to read.
        step: of the loop.
        fills_queue: begin each step when the producer has done what it can, however busy the machine.
    """
    with SinkLoader(source) as loader:
        for _ in loader:
            if fills_queue:
                wait_for(loader._producer, partial(has_filled_queue, loader._producer))
            step()
        return loader.stats()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_throttled_producer_is_input_bound(num_workers: int, sleep: Callable[[float], None]) -> None:
    stats = measure(DataLoader(Throttled(0.02, sleep), num_workers=num_workers), step=lambda: None)
    assert stats.verdict == "input-bound"
    assert stats.batches == 40
    assert stats.empty > 0.8 * 40
    assert 0.01 < stats.consumer_wait_p50_seconds <= stats.consumer_wait_p99_seconds
    assert "more workers" in stats.advice


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_throttled_consumer_is_compute_bound(num_workers: int, sleep: Callable[[float], None]) -> None:
    source = DataLoader(Throttled(0.0, sleep), num_workers=num_workers)
    stats = measure(source, step=lambda: sleep(0.02), fills_queue=num_workers > 0)
    assert stats.verdict == "compute-bound"
    assert stats.empty < 0.3 * 40
    assert stats.consumer_wait_p50_seconds < 0.01
    if num_workers:
        assert stats.full > 0.5 * 40
        assert stats.producer_wait_p50_seconds > 0.01


def test_a_throttled_generator_function_is_input_bound() -> None:
    def source() -> Iterator[torch.Tensor]:
        for _ in range(20):
            time.sleep(0.01)
            yield torch.zeros(1)

    assert measure(source, step=lambda: None).verdict == "input-bound"


def test_bytes_held_are_those_of_the_batches_that_exist() -> None:
    with SinkLoader(DataLoader(Throttled(0.0, time.sleep), num_workers=1, batch_size=2), slots=3) as loader:
        assert loader.stats().bytes_held == 0
        batches = iter(loader)
        next(batches)
        wait_for(loader._producer, lambda: loader._producer.bytes_held() >= 3 * 2 * 1000 * 4)
        assert loader.stats().bytes_held == 3 * 2 * 1000 * 4


def test_stats_before_the_first_batch_and_as_text() -> None:
    stats = SinkLoader([torch.zeros(1)]).stats()
    assert (stats.batches, stats.empty, stats.full, stats.verdict) == (0, 0, 0, "too few batches to tell")
    assert str(stats).splitlines()[1].startswith("too few batches to tell: ask again after 20 batches")


def collected(waits: list[float]) -> QueueStats:
    collector = StatsCollector()
    for seconds in waits:
        collector.fetched(0, seconds, empty=seconds > 0, full=False)
    return collector.collected(bytes_held=0)


def test_the_verdict_leaves_out_the_warm_up_and_names_its_percentiles() -> None:
    """The first fetch waits for workers to start; 3 batches of it say nothing about the other 997."""
    assert collected([5.0, 5.0, 5.0]).verdict == "too few batches to tell"
    assert collected([5.0] * 19).verdict == "too few batches to tell"
    assert collected([5.0] * 20).verdict == "input-bound"
    stats = collected([5.0] * 10 + [0.0] * 10)
    assert (stats.verdict, stats.empty, stats.judged, stats.judged_empty) == ("compute-bound", 10, 10, 0)
    mixed = collected([5.0] * 10 + [0.0] * 60 + [0.001 * number for number in range(1, 41)])
    assert mixed.verdict == "input-bound"
    assert "queue empty at 40 of 100 fetches, waits p50 0.00 ms, p90 31.00 ms, p99 40.00 ms" in str(mixed)
    assert "after the warm-up" not in str(collected([5.0] * 10)), "nothing came after it"
    assert collected([0.25] * 3).consumer_wait_p50_seconds == 0.25, "a short run has its figures too"


def test_host_cost_of_ready_tensors() -> None:
    """At most 100 µs a batch more than the plain loop; the median of several rounds, because the machine is shared."""
    batches = [(torch.zeros(8), torch.zeros(8)) for _ in range(500)]
    costs = []
    for _ in range(7):
        started = time.thread_time()
        for _ in batches:
            pass
        plain = time.thread_time() - started
        loader = SinkLoader(batches)
        started = time.thread_time()
        for _ in loader:
            pass
        costs.append((time.thread_time() - started - plain) / len(batches))
    assert sorted(costs)[3] < 100e-6
