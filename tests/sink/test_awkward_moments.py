"""Closing, forking, collecting garbage and interrupting when it suits least."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from sink.test_faults import hang
from sink.test_worker_faults import Faulty
from torch_sink.errors import SinkError
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

ALL = [list(range(i, i + 4)) for i in range(0, 40, 4)]


def workers_of(loader: SinkLoader) -> list[int]:
    return [worker.pid for worker in loader._traversal.passes[0].batches._workers]


def wait_until_gone(pids: list[int]) -> None:
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(there, timeout=60)[1]


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_a_forked_child_that_drops_the_loader_and_leaves_stops_nobody(persistent: bool) -> None:
    source = DataLoader(Faulty(pause=0.01), batch_size=4, num_workers=2, persistent_workers=persistent)
    loader = SinkLoader(source, timeout_seconds=60)
    batches = iter(loader)
    seen = [next(batches).tolist()]
    child = os.fork()
    if child == 0:
        del loader, batches
        gc.collect()
        atexit._run_exitfuncs()  # with multiprocessing's, which ends the children that it knows
        os._exit(0)
    os.waitpid(child, 0)
    seen.extend(batch.tolist() for batch in batches)
    loader.close()
    assert seen == ALL


def train_for_ever(pids: Any) -> None:
    loader = SinkLoader(DataLoader(Faulty(fault=hang), batch_size=4, num_workers=2))
    for _ in loader:
        pids.send(workers_of(loader))


def test_workers_leave_with_a_killed_training_process() -> None:
    """In the middle of a sample too, where torch does not look."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    training = multiprocessing.get_context("fork").Process(target=train_for_ever, args=(writer,))
    training.start()
    pids = reader.recv()
    training.kill()
    training.join()
    wait_until_gone(pids)


@pytest.mark.parametrize("place", ["producer", "traversal"])
def test_a_second_interrupt_while_the_first_one_is_cleaned_up(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the producer has dropped its batches, or when the passes were left as well."""
    source = DataLoader(Faulty(), batch_size=4, num_workers=2, shuffle=True, generator=torch.Generator())
    with SinkLoader(source) as loader:
        seen = next(iter(loader)).tolist()
        loader._traversal.was_interrupted = True
        owner, name = {"producer": (loader._producer, "drop"), "traversal": (loader._traversal, "_drop_passes")}[place]
        original = getattr(owner, name)

        def interrupted() -> None:
            original()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                loader.rest()
        for batch in loader.rest():
            seen.extend(batch.tolist())
        assert sorted(seen) == list(range(40))
        loader.restart()
        assert sorted(loader._producer.free_slots()) == [0, 1, 2]


@pytest.mark.parametrize("goes_on", [False, True], ids=["iter", "rest"])
def test_an_interrupt_of_a_new_epoch_before_its_first_batch(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with SinkLoader(DataLoader(Faulty(), batch_size=4, num_workers=2)) as loader:
        iter(loader)
        drop = loader._producer.drop

        def interrupted() -> None:
            drop()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(loader._producer, "drop", interrupted)
            with pytest.raises(KeyboardInterrupt):
                iter(loader)
        assert [batch.tolist() for batch in (loader.rest() if goes_on else loader)] == ALL


class Collects:
    """Collects garbage where it is unpickled, once everything else that refers to the loader is gone."""

    is_dropped = threading.Event()

    def __init__(self, number: int) -> None:
        self.number = number

    def __setstate__(self, state: dict[str, int]) -> None:
        vars(self).update(state)
        if self.number == 8:
            self.is_dropped.wait(60)
            gc.collect()


def collecting(samples: list[torch.Tensor]) -> Collects:
    return Collects(int(samples[0]))


def test_garbage_collection_in_the_producer_s_thread() -> None:
    loader = SinkLoader(DataLoader(Faulty(), batch_size=4, num_workers=2, collate_fn=collecting))
    batches = iter(loader)
    next(batches)
    pids, thread = workers_of(loader), loader._producer.thread
    cycle: list[object] = [loader, batches]
    cycle.append(cycle)
    gc.disable()
    try:
        del loader, batches, cycle
        Collects.is_dropped.set()
        thread.join(60)
    finally:
        gc.enable()
    assert not thread.is_alive()
    wait_until_gone(pids)


def test_a_generator_s_cleanup_that_raises_does_not_keep_the_rest_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate() -> Iterator[torch.Tensor]:
        try:
            yield from torch.zeros(10, 1)
        finally:
            raise LookupError("in the cleanup")

    loader = SinkLoader(generate)
    next(iter(loader))
    closed: list[str] = []
    monkeypatch.setattr(loader._opener, "close", lambda: closed.append("source"))
    monkeypatch.setattr(loader._slots, "close", lambda: closed.append("slots"))
    with pytest.raises(LookupError, match="in the cleanup"):
        loader.close()
    assert closed == ["source", "slots"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_closing_from_another_thread_ends_a_wait(num_workers: int) -> None:
    waits, is_closed = multiprocessing.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        hang() if num_workers else is_closed.wait(60)

    def close() -> None:
        assert waits.wait(60)
        loader.close()
        is_closed.set()

    loader = SinkLoader(DataLoader(Faulty(wait), batch_size=4, num_workers=num_workers))
    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(SinkError):
        list(loader)
    closing.join()


def test_after_the_loader_s_own_timeout_a_new_pass_begins(tmp_path: Path) -> None:
    goes_on = tmp_path / "goes on"

    def wait() -> None:
        if not goes_on.exists():
            hang()

    with SinkLoader(DataLoader(Faulty(wait), batch_size=4, num_workers=1, timeout=6)) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == ALL[:2]
        with pytest.raises(RuntimeError, match="timed out after 6 seconds"):
            next(batches)
        goes_on.touch()
        assert [batch.tolist() for batch in loader.rest()] == ALL


def test_without_the_thread_that_pins_memory_the_pass_is_lost() -> None:
    with SinkLoader(DataLoader(Faulty(hang), batch_size=4, num_workers=2)) as loader:
        batches = iter(loader)
        next(batches)
        ended = threading.Thread(target=int)
        ended.start()
        ended.join()
        iterator = loader._traversal.passes[0].batches
        iterator._pin_memory_thread, iterator._pin_memory_thread_done_event = ended, threading.Event()
        with pytest.raises(RuntimeError, match="pins memory has ended"):
            list(batches)
        assert loader._traversal.passes == []


def test_the_thread_that_pins_memory_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a message, for which no thread is started; torch's own looks up every 5 seconds."""
    with SinkLoader(DataLoader(Faulty(), batch_size=4, num_workers=2, persistent_workers=True)) as loader:
        list(loader)
        iterator = loader._opener.guard.iterator
        got: list[Any] = []
        pinning = threading.Thread(target=lambda: got.append(iterator._worker_result_queue.get()))
        pinning.start()
        iterator._pin_memory_thread, iterator._pin_memory_thread_done_event = pinning, threading.Event()
        monkeypatch.setattr(threading.Thread, "start", None)
        loader.close()
        assert got == [(None, None)]
