"""What other processes report: data workers with their batches, pools of every kind themselves, and never an error."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import joblib
import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import torch_sink
from image.cases import encoded, opener
from torch_sink import SinkLoader, fallback_report
from torch_sink.image.core import fallback

TASKS = 10

# From Python 3.12 on, a fork warns when the process has threads.
pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")]


def darkness(index: int) -> int:
    """What a user's own statistic does: it reads the pixels of a handle, which falls back once."""
    image = opener(encoded(30, 31, index))().convert("RGB")
    return image.histogram()[0]


def reported() -> int:
    return sum(fallback_report().counts.values())


def map_in_pool(tasks: range) -> list[int]:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        return pool.map(darkness, tasks, chunksize=1)


def unordered_in_pool(tasks: range) -> list[int]:
    """Ends in order, so that every child leaves by itself."""
    pool = multiprocessing.get_context("fork").Pool(3)
    results = list(pool.imap_unordered(darkness, tasks))
    pool.close()
    pool.join()
    return results


def one_child_a_task(tasks: range) -> list[int]:
    with multiprocessing.get_context("fork").Pool(3, maxtasksperchild=1) as pool:
        return pool.map(darkness, tasks, chunksize=1)


def executor(tasks: range) -> list[int]:
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(darkness, tasks))


def joblib_processes(tasks: range) -> list[int]:
    forks = multiprocessing.get_context("fork")  # the default up to Python 3.13
    return joblib.Parallel(n_jobs=3, backend=forks)(joblib.delayed(darkness)(task) for task in tasks)


def children_of_children(tasks: range) -> list[int]:
    """`ProcessPoolExecutor` workers may have children of their own."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        return [result for half in pool.map(map_in_pool, (tasks[::2], tasks[1::2])) for result in half]


def bare_forks(tasks: range) -> list[int]:
    """Without multiprocessing, as web servers and `multiprocess`, which Hugging Face's datasets use, do it."""
    for task in tasks:
        in_child(lambda task=task: darkness(task))
    return list(map(expected_of, tasks))


def in_child(work: Callable[[], object]) -> None:
    """Runs `work` in a forked child, which is killed right behind it: nothing is written at the end."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            work()
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the child raised"


def expected_of(index: int) -> int:
    with torch_sink.image_backend("PIL"):
        return darkness(index)


KINDS = [map_in_pool, unordered_in_pool, one_child_a_task, executor, joblib_processes, children_of_children, bare_forks]


@pytest.mark.parametrize("run", KINDS)
@pytest.mark.sampled(4)
def test_a_child_changes_nothing_and_counts_for_itself(run: Callable[[range], list[int]]) -> None:
    expected = sorted(map(expected_of, range(TASKS)))
    with torch_sink.image_backend("device", device="cpu"):
        darkness(0)
        assert sorted(run(range(TASKS))) == expected
        assert reported() == 1


def test_a_child_has_a_report_of_its_own() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        darkness(0)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            assert pool.submit(reported).result() == 0
            pool.submit(darkness, 1).result()
            assert pool.submit(reported).result() == 1
        assert reported() == 1


def test_a_child_that_sets_the_backend_itself_reports_itself() -> None:
    def in_its_own_backend() -> int:
        with torch_sink.image_backend("device", device="cpu"):
            darkness(1)
            return reported()

    with torch_sink.image_backend("device", device="cpu"):
        in_child(lambda: in_its_own_backend() == 1 or os._exit(1))
        darkness(0)
        assert reported() == 1


def test_a_fork_while_another_thread_counts() -> None:
    with torch_sink.image_backend("device", device="cpu"), fallback.ledger._lock:
        in_child(lambda: darkness(0))
    with torch_sink.image_backend("device", device="cpu"):
        counted = threading.Thread(target=darkness, args=(0,))
        counted.start()
        counted.join()
        assert reported() == 1


# --- data workers


class Dark(Dataset[int]):
    """Each sample falls back once; sample `killed` kills its worker."""

    def __init__(self, killed: int = -1) -> None:
        self.killed = killed

    def __len__(self) -> int:
        return TASKS

    def __getitem__(self, index: int) -> int:
        if index == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return darkness(index)


class DarkStream(IterableDataset[int]):
    """The same in a stream."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        return map(darkness, range(worker.id, TASKS, worker.num_workers))


STARTS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


@pytest.mark.parametrize("start", STARTS)
def test_what_a_worker_counts_comes_with_its_batches(start: str) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        darkness(0)
        seen = []
        for _ in DataLoader(Dark(), 2, num_workers=1, prefetch_factor=1, multiprocessing_context=start):
            seen.append(reported())
        assert seen == [3, 5, 7, 9, 11]
        assert len(fallback_report()) == 1, str(fallback_report())


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": Dark(), "batch_size": None},
        {"dataset": Dark(), "batch_size": 3, "persistent_workers": True},
        {"dataset": Dark(), "batch_size": 3, "collate_fn": tuple},
        {"dataset": DarkStream(), "batch_size": 3},
        {"dataset": DarkStream(), "batch_size": None},
    ],
    ids=["samples", "persistent", "collated", "stream", "streamed samples"],
)
@pytest.mark.parametrize("kind", [list, SinkLoader])
@pytest.mark.sampled(6)
def test_every_sample_of_every_epoch_counts_once(settings: dict[str, Any], kind: Any) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        loader = DataLoader(**settings, num_workers=2, multiprocessing_context="fork")
        epochs = SinkLoader(loader) if kind is SinkLoader else loader
        for epoch in range(1, 4):
            assert len(list(epochs)) > 0
            assert reported() == epoch * TASKS
        if kind is SinkLoader:
            epochs.close()


def test_a_killed_worker_loses_what_has_not_arrived() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        arrived = list[Any]()
        with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
            arrived.extend(DataLoader(Dark(killed=7), 2, num_workers=1, multiprocessing_context="fork"))
        assert 2 * len(arrived) <= reported() <= 6


def test_batches_count_for_the_report_that_their_workers_were_started_for() -> None:
    loader = DataLoader(Dark(), 2, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
    with torch_sink.image_backend("device", device="cpu"):
        batches = iter(loader)
        next(batches)
        with torch_sink.image_backend("device", device="cpu"):
            next(batches)
            assert reported() == 0
        assert reported() == 4
    with torch_sink.image_backend("device", device="cpu"):
        assert len(list(batches)) == 3
        assert reported() == 0


def test_pixels_of_handles_from_a_pool() -> None:
    """A pool may return handles: they cross as recipes and mean the same on the other side."""
    with torch_sink.image_backend("device", device="cpu"):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            images = pool.map(opened, range(3))
        made = [image.tobytes() for image in images]
    assert made == [opened(index).tobytes() for index in range(3)]


def opened(index: int) -> Image.Image:
    return opener(encoded(30, 31, index))().convert("RGB")
