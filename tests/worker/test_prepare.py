"""How a data worker is prepared, and how it ends."""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data._utils.worker import _worker_loop

from torch_sink.worker import prepare
from torch_sink.worker.prepare import Worker, wait_for_senders


class Noted:
    """A feature of a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, collate: Any, arguments: dict[str, Any]) -> None:
        collate.reporters.append(lambda: None)


def test_a_worker_takes_over_the_features_below_it_and_finds_its_loop_in_its_module() -> None:
    worker = Worker(Worker(_worker_loop, Noted("below")), Noted("above"))
    for one in (worker, pickle.loads(pickle.dumps(worker))):
        assert [feature.name for feature in one.features] == ["below", "above"]
        assert one.place == ("torch.utils.data._utils.worker", "_worker_loop")
    assert worker.loop is _worker_loop


def test_nobody_waits_for_batches_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that send them stand still in a full pipe, one of them for the other, as they share its lock."""
    queues = [multiprocessing.Queue() for _ in range(3)]
    queues[1]._wlock = queues[0]._wlock  # type: ignore[attr-defined]
    for queue in queues:
        queue.cancel_join_thread()
        queue.put(bytes(1 << 21))
    looks = itertools.count()  # each a moment of 10 ms, on a clock that a busy machine does not slow down
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: 0.01 * next(looks)))
    wait_for_senders()
    waited = 0.01 * next(looks)
    with ThreadPoolExecutor(len(queues)) as pool:  # the threads take the lock in any order
        for got in [pool.submit(queue.get, timeout=60) for queue in queues]:
            got.result()
    for queue in queues:
        queue.close()
        queue._thread.join()  # type: ignore[attr-defined]
    assert waited < 0.9
