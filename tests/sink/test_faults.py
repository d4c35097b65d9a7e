"""Faults arrive in order, name their origin, and leave no process or thread behind."""

from __future__ import annotations

import gc
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from sink.conftest import wait_for
from torch_sink.errors import SinkError, SinkTimeout
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


class Flag:
    """An event for forked processes without a lock, in which one of them could die: a pipe that holds a byte, or none."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def set(self) -> None:
        if not self.wait(0):
            os.write(self.writer, b"!")

    def clear(self) -> None:
        if self.wait(0):
            os.read(self.reader, 1)

    def wait(self, seconds: float) -> bool:
        return bool(select.select([self.reader], [], [], seconds)[0])


received = Flag()


def wait_until_received() -> None:
    """A worker that is about to die has to wait: the files of earlier batches are shared by a live process."""
    received.wait(60)


def hang() -> None:
    """User code that does not come back while a test lasts."""
    time.sleep(60)


class Numbers(Dataset):
    """Sample i is the number i; some samples misbehave."""

    def __init__(self, size: int = 40, *, broken: int = -1, killed: int = -1, slow: int = -1) -> None:
        self.size, self.broken, self.killed, self.slow = size, broken, killed, slow

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise LookupError(f"sample {index} is broken")
        if index == self.killed:
            wait_until_received()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.slow:
            hang()
        return torch.tensor(index)


class Payload(Dataset):
    """30 MB that travel inside the pipe, so that a worker can die in the middle of a message."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> bytes:
        return b"x" * 30_000_000


def check_payloads(batches: Iterator[bytes]) -> None:
    for payload in batches:
        assert payload.count(b"x") == 30_000_000


def unchanged(sample: object) -> object:
    return sample


def read_until_error(
    loader: SinkLoader, count: int = 2, *, timeout_seconds: float = 300
) -> tuple[list[list[int]], BaseException | None]:
    """The batches and what ended them.

    After `count` batches `received` is set, and the timeout holds: workers have started then, which may take long.
    """
    batches = []
    received.clear()
    try:
        for batch in loader.rest():
            batches.append(batch.tolist())
            if len(batches) == count:
                received.set()
                loader._traversal.timeout_seconds = timeout_seconds
    except BaseException as error:
        return batches, error
    return batches, None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataset_exception_comes_in_order_and_the_rest_follows(num_workers: int) -> None:
    with SinkLoader(DataLoader(Numbers(broken=9), batch_size=4, num_workers=num_workers)) as loader:
        batches, error = read_until_error(loader)
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert isinstance(error, LookupError)
        assert "sample 9 is broken" in str(error)
        rest, error = read_until_error(loader)
    assert error is None
    assert [batch[0] for batch in rest] == list(range(12, 40, 4))


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_no_pass_is_begun_while_an_error_of_the_one_before_waits(persistent: bool) -> None:
    """The pass goes on after its error, in its order, however late the consumer comes."""
    generator = torch.Generator().manual_seed(1)
    source = DataLoader(Numbers(8, broken=3), num_workers=2, generator=generator, persistent_workers=persistent)
    with SinkLoader(source) as loader:
        for _ in range(2):
            batches, seen = iter(loader), []
            while len(seen) < 20:
                wait_for(loader._producer, lambda: len(loader._producer.ready) > 1 or not loader._producer.current)
                try:
                    seen.append(int(next(batches)))
                except LookupError:
                    seen.append(-1)
                except StopIteration:
                    break
            assert seen == [0, 1, 2, -1, 4, 5, 6, 7]


def broken_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    if int(samples[0]) == 8:
        raise ArithmeticError("cannot collate")
    return torch.stack(samples)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_exception_comes_in_order(num_workers: int) -> None:
    source = DataLoader(Numbers(), batch_size=4, num_workers=num_workers, collate_fn=broken_collate)
    with SinkLoader(source) as loader:
        batches, error = read_until_error(loader)
    assert len(batches) == 2
    assert isinstance(error, ArithmeticError)


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_killed_worker_is_an_error_in_order_and_the_loader_can_go_on(persistent: bool) -> None:
    source = DataLoader(Numbers(killed=21), batch_size=2, num_workers=2, persistent_workers=persistent)
    with SinkLoader(source) as loader:
        started = time.monotonic()
        batches, error = read_until_error(loader, 8)
        assert time.monotonic() - started < 10
        assert batches == [[i, i + 1] for i in range(0, 2 * len(batches), 2)]
        assert 8 <= len(batches) <= 10
        assert isinstance(error, RuntimeError)
        assert "killed by SIGKILL" in str(error)
        source.dataset.killed = -1
        loader.restart()
        batches, error = read_until_error(loader)
    assert error is None
    assert len(batches) == 20


@pytest.mark.parametrize("moment", [0.03, 0.08])
def test_worker_killed_in_the_middle_of_a_message(moment: float) -> None:
    """Beside a second DataLoader, whose forked workers hold copies of the pipe."""
    source = DataLoader(Payload(), batch_size=None, num_workers=2, collate_fn=unchanged)
    with SinkLoader(source) as loader:
        batches = iter(loader)
        assert len(next(batches)) == 30_000_000
        beside = iter(DataLoader(Numbers(), num_workers=1))
        next(beside)
        victim = loader._traversal.passes[0].batches._workers[0]
        threading.Timer(moment, victim.kill).start()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=f"{victim.pid}.*killed by SIGKILL"):
            check_payloads(batches)
        assert time.monotonic() - started < 10
        assert next(beside).item() == 1
        del beside


def test_timeout_names_queue_sizes_and_waits() -> None:
    source = DataLoader(Numbers(slow=4), batch_size=2, num_workers=1)
    with SinkLoader(source) as loader:
        batches, error = read_until_error(loader, timeout_seconds=1.0)
        assert batches == [[0, 1], [2, 3]]
        assert isinstance(error, SinkTimeout)
        assert "timeout_seconds=1" in str(error)
        waits = re.search(
            r"last queue sizes \[\d, \d, 0\], last waits in seconds \[[\d.]+, [\d.]+, ([\d.]+)", str(error)
        )
        assert float(waits[1]) >= 1
        started = time.monotonic()
    assert time.monotonic() - started < 5


def test_close_during_a_slow_sample_is_bounded_and_idempotent() -> None:
    loader = SinkLoader(DataLoader(Numbers(slow=4), batch_size=2, num_workers=2))
    next(iter(loader))
    started = time.monotonic()
    loader.close()
    loader.close()
    assert time.monotonic() - started < 5
    with pytest.raises(SinkError, match="closed"):
        iter(loader)


def test_consumer_that_stops_early_leaves_nothing() -> None:
    for batch in SinkLoader(DataLoader(Numbers(), batch_size=2, num_workers=2)):
        assert batch.tolist() == [0, 1]
        break


def test_garbage_collection_in_mid_epoch_closes() -> None:
    loader = SinkLoader(DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True))
    batches = iter(loader)
    next(batches)
    cycle: list[object] = [loader, batches]
    cycle.append(cycle)
    del loader, batches, cycle
    gc.collect()


def test_an_exception_does_not_keep_the_loader_alive() -> None:
    """Its traceback makes no cycle with what was raised, so the workers go without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        loader = SinkLoader(DataLoader(Numbers(broken=3), batch_size=2, num_workers=2))
        alive = weakref.ref(loader)
        _, error = read_until_error(loader)
        assert isinstance(error, LookupError)
        del loader, error
        assert alive() is None
    finally:
        gc.enable()


def test_forked_child_is_refused_and_harms_nobody() -> None:
    with SinkLoader(DataLoader(Numbers(), batch_size=4, num_workers=2)) as loader:
        batches = iter(loader)
        next(batches)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                next(batches)
                os.write(writer, b"no error")
            except SinkError as error:
                os.write(writer, str(error).encode())
            loader.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert b"os.fork()" in os.read(reader, 1000)
        os.close(reader)
        os.close(writer)
        assert len(list(batches)) == 9


class Shards(IterableDataset):
    """Each worker yields its own numbers; worker 0 has fewer."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info().id
        return iter(range(100 * worker, 100 * worker + 4 + 8 * worker))


def test_iterable_workers_that_end_early_are_not_taken_for_dead() -> None:
    with SinkLoader(DataLoader(Shards(), batch_size=4, num_workers=2)) as loader:
        batches, error = read_until_error(loader)
    assert error is None
    assert sorted(itertools.chain(*batches)) == [0, 1, 2, 3, *range(100, 112)]


SCRIPT = """
import os, signal, sys, threading, time
import psutil, torch
from torch.utils.data import DataLoader, Dataset
from torch_sink.sink import SinkLoader

loaders = []

class Numbers(Dataset):
    # User code that takes a moment: workers are at work when the process leaves.
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.tensor(index)

def main():
    for persistent in {persistent}:
        options = dict(num_workers=2, persistent_workers=persistent, multiprocessing_context="fork")
        loader = SinkLoader(DataLoader(Numbers(), batch_size=2, **options))
        batches = iter(loader)
        loaders.append(batches)
        next(batches)
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    {body}

if __name__ == "__main__":
    main()
"""


def run_script(body: str, *persistent: bool, group_signal: int | None = None) -> tuple[int, str, float]:
    """Runs a script with a loader for each of `persistent`; returns exit code, errors and how long it took to leave."""
    script = SCRIPT.format(body=textwrap.indent(textwrap.dedent(body), "    ").strip(), persistent=persistent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    )
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2 * len(persistent)
    started = time.monotonic()
    if group_signal is not None:
        assert process.stdout.readline() == "in the loop\n"
        os.killpg(process.pid, group_signal)
    _, errors = process.communicate(timeout=30)
    seconds = time.monotonic() - started
    assert not [pid for pid in workers if psutil.pid_exists(pid)]
    return process.returncode, errors, seconds


def test_interpreter_exit_without_close() -> None:
    """With fresh and with persistent workers."""
    code, errors, seconds = run_script("sys.exit(7)", False, True)
    assert (code, errors) == (7, "")
    assert seconds < 2 * 5


def test_terminal_interrupt_kills_workers_and_leaves_in_time() -> None:
    body = """
    try:
        for batch in batches:
            print("in the loop", flush=True)
    except KeyboardInterrupt:
        started = time.monotonic()
        loader.close()
        sys.exit(3 if time.monotonic() - started < 5 else 4)
    """
    code, errors, _ = run_script(body, False, group_signal=signal.SIGINT)
    assert (code, errors) == (3, "")


@pytest.mark.slow
def test_terminal_interrupt_without_close_ends_the_process() -> None:
    code, errors, seconds = run_script(
        "for batch in batches: print('in the loop', flush=True)", True, group_signal=signal.SIGINT
    )
    assert code != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert seconds < 8
