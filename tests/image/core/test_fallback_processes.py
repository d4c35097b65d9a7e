"""What forked children report: each its own counts, all of them, in pools of every kind, and never an error."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import joblib
import pytest
from PIL import Image

import torch_sink
from image.cases import encoded, opener
from torch_sink import fallback_report
from torch_sink.image.core import fallback, settings

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
def test_every_child_is_counted_once(run: Callable[[range], list[int]]) -> None:
    expected = sorted(map(expected_of, range(TASKS)))
    with torch_sink.image_backend("device", device="cpu"):
        darkness(0)
        assert sorted(run(range(TASKS))) == expected
        assert reported() == 1 + TASKS
        assert len(fallback_report()) == 1, str(fallback_report())


def test_many_pools_one_after_the_other() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        for pools in range(1, 26):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                pool.map(darkness, range(4), chunksize=1)
            assert reported() == 4 * pools


def test_a_child_counts_for_itself() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        darkness(0)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            assert pool.submit(reported).result() == 0
            pool.submit(darkness, 1).result()
            assert pool.submit(reported).result() == 1
        assert reported() == 2


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


def no_folder(folder: Path) -> None:
    folder.rmdir()


def file_in_the_way(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("no folder")


@pytest.mark.parametrize("damage", [no_folder, file_in_the_way])
def test_bookkeeping_raises_nothing_into_user_code(damage: Callable[[Path], None]) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        assert settings.active is not None
        folder = Path(settings.active.fallback_folder)
        damage(folder)
        assert map_in_pool(range(4)) == list(map(expected_of, range(4)))
        darkness(0)
        assert reported() == 1
    folder.unlink(missing_ok=True)


def test_a_full_disk_costs_the_report_the_counts_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with torch_sink.image_backend("device", device="cpu"):
        monkeypatch.setattr(Path, "write_bytes", full)
        in_child(lambda: darkness(1))
        darkness(0)
        assert reported() == 1


def test_without_a_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_place(**options: Any) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(fallback.tempfile, "mkdtemp", no_place)
    with torch_sink.image_backend("device", device="cpu"):
        darkness(0)
        in_child(lambda: darkness(1))
        assert reported() == 1


def test_nothing_is_left_behind() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        assert settings.active is not None
        folder = Path(settings.active.fallback_folder)
        in_child(lambda: darkness(0))
        assert len(list(folder.iterdir())) == 1
        in_child(fallback.ledger.close)  # what runs at exit
        with torch_sink.image_backend("device", device="cpu"):
            assert folder.exists()
    torch_sink.set_image_backend("device", device="cpu")
    torch_sink.set_image_backend("PIL")
    assert not folder.exists()
    in_child(lambda: fallback.ledger.add("a child", "of before goes on"))
    assert not folder.exists()
    last = Path(fallback.ledger.folder)
    assert last.exists()
    fallback.ledger.close()  # what runs at exit
    assert not last.exists()


def set_backend(folder: str) -> None:
    fallback.tempfile.tempdir = folder
    torch_sink.set_image_backend("device", device="cpu")


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_children_that_set_the_backend_themselves_leave_nothing_behind(method: str, tmp_path: Path) -> None:
    """As the ranks of `torch.multiprocessing.spawn` do, and data workers by their `worker_init_fn`."""
    child = multiprocessing.get_context(method).Process(target=set_backend, args=(str(tmp_path),))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert not list(tmp_path.glob("torch_sink_fallback_*"))


def test_a_child_replaces_its_file_for_new_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that fall back again and again cost a data worker one small write each."""

    def count() -> None:
        for number in range(300):
            if number == 2:
                monkeypatch.delattr(Path, "replace")
            fallback.ledger.add("blur", f"reason {number % 2}")

    with torch_sink.image_backend("device", device="cpu"):
        in_child(count)
        assert fallback_report().counts == {("blur", "reason 0"): 150, ("blur", "reason 1"): 150}


def test_a_child_that_is_killed_while_it_writes_loses_what_it_was_writing_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def count_and_die() -> None:
        fallback.ledger.add("blur", "no kernel\nfor it")
        monkeypatch.setattr(Path, "replace", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        fallback.ledger.add("resize", "odd")

    with torch_sink.image_backend("device", device="cpu"):
        in_child(count_and_die)
        assert fallback_report().counts == {("blur", "no kernel\nfor it"): 1}


def test_pixels_of_handles_from_a_pool() -> None:
    """A pool may return handles: they cross as recipes and mean the same on the other side."""
    with torch_sink.image_backend("device", device="cpu"):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            images = pool.map(opened, range(3))
        made = [image.tobytes() for image in images]
    assert made == [opened(index).tobytes() for index in range(3)]


def opened(index: int) -> Image.Image:
    return opener(encoded(30, 31, index))().convert("RGB")


def _count_around_a_block() -> None:
    darkness(0)
    with torch_sink.image_backend("device", device="meta"):
        pass
    darkness(1)
    darkness(2)


def test_a_child_goes_on_counting_after_a_backend_of_its_own() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        child = multiprocessing.get_context("fork").Process(target=_count_around_a_block)
        child.start()
        child.join(60)
        assert (child.exitcode, reported()) == (0, 3)
