"""Slabs: batches come unharmed through memory that is used again and again, whoever keeps them and whoever dies."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import psutil
import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch.utils.data import DataLoader, Dataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from torch_sink.common import pool_writer
from torch_sink.common.pool import Pool
from torch_sink.common.pool_writer import Writer
from torch_sink.sink import SinkLoader
from torch_sink.sink.device import DeviceOps, SlotProtocol
from torch_sink.sink.openers import DataLoaderOpener

pytestmark = pytest.mark.once_on_oldest


class Vectors(Dataset):
    """Sample i is `width(i)` times the number i, and i."""

    def __init__(self, size: int = 96, width: Callable[[int], int] | None = None, killed: int = -1) -> None:
        self.size, self.width, self.killed = size, width, killed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((500 if self.width is None else self.width(index),), float(index)), index


def is_as_made(batch: Any, number: int, size: int = 4) -> bool:
    numbers = torch.arange(number * size, (number + 1) * size)
    return torch.equal(batch[1], numbers) and bool((batch[0] == numbers[:, None]).all())


def files_in_shared_memory(*pids: int) -> list[str]:
    """What torch has put there for these processes."""
    return [name for name in os.listdir("/dev/shm") if any(name.startswith(f"torch_{pid}_") for pid in pids)]


def slab_files() -> list[str]:
    """Files and mappings of this process that slabs lie in."""
    files = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in (*files, *maps) if "memfd:torch_sink" in line]


@pytest.fixture(autouse=True)
def no_slab_is_left(nothing_left_behind: None) -> Iterator[None]:
    yield
    gc.collect()
    assert slab_files() == []
    assert files_in_shared_memory(os.getpid()) == []


# --- the protocol, in one process


class Worker:
    """A worker and the pipe from it, without a process."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.writer, self.pipe = Writer(pool, number), list[bytes]()
        self.writer.takes_all = True
        self.kept: deque[dict[str, Any]] = deque(maxlen=2)

    def send(self, value: int, size: int) -> bool:
        """Whether there was a slab for it."""

        def make() -> None:
            tensor = self.writer.allocate(size)
            if tensor is not None:
                tensor.fill_(value)
                self.kept.append({"whole": tensor, "views": [tensor[1:3], tensor[2:]], "value": value})
                self.send_again(-1)

        sent = len(self.pipe)
        self.writer.written(make)
        return len(self.pipe) > sent

    def send_again(self, which: int) -> None:
        """What was sent lives on in a worker until it has made something else, or in a cache of the dataset."""
        self.pipe.append(pickle.dumps(self.writer.message(self.kept[which])))

    def receive(self) -> Any:
        function, arguments = pickle.loads(self.pipe.pop(0))
        return function(*arguments)


@pytest.mark.parametrize("seed", range(6))
def test_no_batch_is_overwritten_while_anybody_holds_a_part_of_it(seed: int) -> None:
    rng, values = random.Random(seed), itertools.count()
    pool, held = Pool(workers=2), list[tuple[int, torch.Tensor]]()
    workers = [Worker(pool, number) for number in range(2)]
    for step in range(400):
        worker = rng.choice(workers)
        if rng.random() < 0.5:
            worker.send(next(values) % 251, rng.choice([10, 300, 300 + 100 * step]))
        elif worker.kept and rng.random() < 0.2:
            worker.send_again(0)
        if worker.pipe and rng.random() < 0.6:
            batch = worker.receive()
            parts = [batch["whole"], *batch["views"], batch["whole"].numpy()[1:]]
            held.append((batch["value"], rng.choice(parts)))
        if held and rng.random() < 0.55:
            held.pop(rng.randrange(len(held)))
        if rng.random() < 0.01:
            # The workers of this pass are gone, and with them what they had sent; what was received stays.
            pool.begin_generation()
            workers = [Worker(pool, number) for number in range(2)]
        assert all((part == value).all() for value, part in held)
    assert pool.batches_received > 60


def test_views_of_one_batch_share_memory_as_they_did() -> None:
    worker = Worker(Pool(1), 0)
    assert worker.send(2, 100)
    batch = worker.receive()
    batch["whole"].fill_(77)
    assert batch["views"][0].tolist() == [77, 77]
    assert len({one.untyped_storage()._cdata for one in (batch["whole"], *batch["views"])}) == 1


def test_a_forked_process_gives_nothing_back() -> None:
    """It begins with the batches that its parent holds, and lets go of them when it likes."""
    worker = Worker(Pool(1), 0)
    assert worker.send(2, 100)
    batch = worker.receive()
    address = worker.kept.pop()["whole"].data_ptr()
    child = os.fork()
    if not child:
        del batch
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert worker.send(4, 100)
    assert worker.kept.pop()["whole"].data_ptr() != address
    del batch
    assert worker.send(5, 100)
    assert worker.kept.pop()["whole"].data_ptr() == address


def test_a_slab_is_not_free_while_a_forked_process_may_read_it() -> None:
    worker = Worker(Pool(1), 0)
    assert worker.send(2, 100)
    batch = worker.receive()
    address = worker.kept.pop()["whole"].data_ptr()
    looks, says = os.pipe()
    child = os.fork()
    if not child:
        os.read(looks, 1)
        os._exit(0 if (batch["whole"] == 2).all() else 1)
    del batch
    for value in range(3, 40):
        assert worker.send(value, 100)
        assert worker.kept[-1]["whole"].data_ptr() != address
        assert (worker.receive()["whole"] == value).all()
    os.write(says, b"x")
    assert os.waitpid(child, 0)[1] == 0
    worker.kept.clear()
    assert worker.send(40, 100)
    worker.receive()  # which finds that the child is gone
    worker.kept.clear()
    assert worker.send(41, 100)
    assert worker.kept[-1]["whole"].data_ptr() == address
    os.close(looks)
    os.close(says)


def test_memory_is_given_back_with_the_pool_even_where_it_was_inherited() -> None:
    pool = Pool(1)
    fd = os.dup(pool.fd)
    worker = Worker(pool, 0)
    assert worker.send(2, 1 << 20)
    batch = worker.receive()
    worker.kept.clear()
    del pool, worker
    gc.collect()
    assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    assert (batch["whole"] == 2).all()
    del batch
    gc.collect()
    assert os.fstat(fd).st_blocks * 512 <= 1 << 14
    os.close(fd)


def test_a_batch_of_workers_that_were_given_up_is_refused() -> None:
    worker = Worker(pool := Pool(1), 0)
    assert worker.send(2, 100)
    pool.begin_generation()
    with pytest.raises(RuntimeError, match="given up"):
        worker.receive()


# --- real workers


@pytest.mark.parametrize("start", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_batches_that_are_kept_stay_as_they_are(start: str) -> None:
    opener = DataLoaderOpener(DataLoader(Vectors(), 4, num_workers=1, multiprocessing_context=start), None)
    pool = opener.make_pool()
    assert pool is not None
    kept = []
    for number, batch in enumerate(opener.open()):
        assert is_as_made(batch, number)
        if number % 5 == 0:
            kept.append((number, batch if number % 2 else [batch[0][1:], batch[1][1:]]))
        del batch
    assert pool.batches_received > 8
    stock = list(DataLoader(Vectors(), 4))
    for number, batch in kept:
        assert all(torch.equal(ours, theirs[-len(ours) :]) for ours, theirs in zip(batch, stock[number], strict=True))
    for number, batch in pickle.loads(pickle.dumps(kept)):
        assert torch.equal(batch[1], stock[number][1][-len(batch[1]) :])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_sink_loader_gives_what_the_loader_gives(on_a_ring: None, persistent: bool) -> None:
    source = DataLoader(Vectors(), 4, num_workers=2, persistent_workers=persistent)
    with SinkLoader(source) as loader:
        for _ in range(3):
            assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])
        received = loader._slots.pool.batches_received
    assert received == 3 * 24


def growing(index: int) -> int:
    return 10 if index < 20 else 20_000


def shrinking(index: int) -> int:
    return 10 if index >= 48 else 20_000


@pytest.mark.parametrize("width", [growing, shrinking])
def test_slabs_follow_the_size_of_the_batches(on_a_ring: None, width: Callable[[int], int]) -> None:
    with SinkLoader(DataLoader(Vectors(width=width), 4, num_workers=1)) as loader:
        assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])
        assert loader._slots.pool.batches_received == 24


def test_without_memory_batches_take_the_ordinary_way(
    on_a_ring: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_writer, "_available_bytes", lambda: 4096)
    with caplog.at_level(logging.WARNING), SinkLoader(DataLoader(Vectors(), 4, num_workers=2)) as loader:
        for _ in range(2):
            assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])
        assert loader._slots.pool.batches_received == 0
    assert len(caplog.records) == 1
    assert "4,096 bytes are available" in caplog.text


def test_without_such_memory_at_all(on_a_ring: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with SinkLoader(DataLoader(Vectors(), 4, num_workers=1)) as loader:
        assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])


def test_a_killed_worker_takes_nothing_with_it(on_a_ring: None) -> None:
    dataset = Vectors(killed=61)
    with SinkLoader(DataLoader(dataset, 4, num_workers=2, persistent_workers=True)) as loader:
        good = (is_as_made(batch, number) for number, batch in enumerate(loader))
        with pytest.raises(RuntimeError, match="killed by SIGKILL"):
            assert all(good)
        dataset.killed = -1
        for _ in range(2):
            loader.restart()
            assert all([is_as_made(batch, number) for number, batch in enumerate(loader)])
        received = loader._slots.pool.batches_received
    assert received > 24


def test_resume_goes_on_in_slabs(on_a_ring: None) -> None:
    def make() -> SinkLoader:
        source = DataLoader(Vectors(), 4, shuffle=True, generator=torch.Generator().manual_seed(1), num_workers=2)
        return SinkLoader(source)

    with make() as whole, make() as first, make() as second:
        expected = [batch[1].tolist() for _ in range(2) for batch in whole]
        seen = [batch[1].tolist() for batch in itertools.islice(first, 13)]
        second.load_state_dict(first.state_dict())
        seen += [batch[1].tolist() for _ in range(2) for batch in second]
        assert second._slots.pool.batches_received > 0
    assert seen == expected


def collate_in_a_buffer_of_its_own(samples: Any) -> Any:
    numbers = torch.from_numpy(numpy.array([number for _, number in samples]))
    vectors = torch.from_numpy(numpy.stack([vector.numpy() for vector, _ in samples]))
    return vectors, numbers


def collate_views(samples: Any) -> Any:
    vectors, numbers = collate_in_a_buffer_of_its_own(samples)
    return vectors, numbers, vectors[:2]


@pytest.mark.parametrize(("collate", "in_slabs"), [(collate_in_a_buffer_of_its_own, True), (collate_views, False)])
def test_what_is_collated_by_other_means_is_sent_in_a_slab(on_a_ring: None, collate: Any, in_slabs: bool) -> None:
    """Large enough: small tensors are sent by value. Views of one another still share memory, as they did."""
    with SinkLoader(DataLoader(Vectors(width=lambda _: 5000), 4, num_workers=1, collate_fn=collate)) as loader:
        for number, batch in enumerate(loader):
            assert is_as_made(batch, number)
        assert (loader._slots.pool.batches_received > 12) == in_slabs


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_a_plain_loop_beside_a_sink_loader_meets_no_page_locked_slab(fake_cuda: FakeCuda, persistent: bool) -> None:
    source = StatefulDataLoader(Vectors(), 4, num_workers=1, persistent_workers=persistent)
    with SinkLoader(source) as loader:
        seen = [[leaf.cpu() for leaf in batch] for batch in loader]
        assert all([is_as_made(batch, number) for number, batch in enumerate(seen)])
        assert fake_cuda.registered
        assert loader._slots.pool.batches_received > 12
        assert not any(leaf.is_pinned() for batch in source for leaf in batch)
        assert loader._slots.pool.batches_received <= 24
    source._iterator = None  # its workers


class Opaque:
    """An object that nobody can look into."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers


def collate_opaque(samples: Any) -> Opaque:
    return Opaque(*collate_named(samples))


class Named(NamedTuple):
    numbers: torch.Tensor


def collate_named(samples: Any) -> Named:
    return Named(default_collate([torch.tensor(index) for _, index in samples]))


@pytest.mark.parametrize(("collate", "in_slabs"), [(collate_opaque, False), (collate_named, True)])
def test_what_goes_to_the_user_unseen_does_not_lie_in_a_slab(
    on_a_ring: None, collate: Callable[[Any], Any], in_slabs: bool
) -> None:
    with SinkLoader(DataLoader(Vectors(), 4, num_workers=1, collate_fn=collate)) as loader:
        kept = [batch.numbers.clone() if in_slabs else batch.numbers for batch in loader]
        assert (loader._slots.pool.batches_received > 0) == in_slabs
    assert torch.cat(kept).tolist() == list(range(96))


def test_a_loader_that_is_forgotten_leaves_nothing(on_a_ring: None) -> None:
    batches = iter(SinkLoader(DataLoader(Vectors(), 4, num_workers=2)))
    assert is_as_made(list(itertools.islice(batches, 14))[-1], 13)
    assert len(slab_files()) == 3, "the file of the pool and its map, for the fixture to look for afterwards"


ENDINGS = {
    "exit": "sys.exit()",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}
SCRIPT = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from torch_sink.sink import loader as loader_module
from sink.simulated_device import ImmediateOps
from torch_sink.sink.ring import DeviceRing

for ending in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    loader_module.make_slots = lambda form, *_: DeviceRing(3, form, ImmediateOps())
    loader = loader_module.SinkLoader(DataLoader(TensorDataset(torch.arange(400)), 4, num_workers=2))
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    workers = [worker.pid for worker in loader._opener.writers]
    print(loader._slots.pool.batches_received, os.getpid(), *workers, flush=True)
    exec(ending)
"""


def test_nothing_outlives_the_process() -> None:
    command = [sys.executable, "-c", SCRIPT, *ENDINGS.values()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    runs = [[int(word) for word in line.split()] for line in finished.stdout.splitlines()]
    assert len(runs) == len(ENDINGS), finished.stderr
    for received, *pids in runs:
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(timeout=20)
        assert received > 0
        assert files_in_shared_memory(*pids) == []


# --- on a device


def test_slabs_are_page_locked_once_and_given_back(fake_cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    seen = set()
    with SinkLoader(DataLoader(Vectors(), 4, num_workers=2)) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert is_as_made([leaf.cpu() for leaf in batch], number)
                seen |= set(fake_cuda.registered.items())
        assert seen == set(loader._slots.pool.slabs())
        assert len(seen) < 2 * 6
    assert fake_cuda.registered == {}
    assert not caplog.records


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_read_in_slabs_is_staged_nowhere(fake_cuda: FakeCuda, workers: int) -> None:
    """Nor what came before there were slabs; labels travel in messages, and are."""
    with SinkLoader(DataLoader(Vectors(), 4, num_workers=workers)) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert is_as_made([leaf.cpu() for leaf in batch], number)
        places = [slot.places for slot in loader._slots.slots]
        assert [vectors.staging == [] for vectors, _ in places] == [workers > 0] * 3
        assert [labels.staging == [] for _, labels in places] == [False] * 3


def test_memory_that_cannot_be_page_locked_is_used_all_the_same(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(DeviceOps, "page_unlock", lambda ops, address: given_back.append(address))
    fake_cuda.refuses_to_register = True
    with SinkLoader(DataLoader(Vectors(), 4, num_workers=2)) as loader:
        for _ in range(2):
            assert all([is_as_made([leaf.cpu() for leaf in batch], number) for number, batch in enumerate(loader)])
        assert loader._slots.pool.batches_received > 24
    assert caplog.text.count("cannot be page-locked") == 1
    assert given_back == [], "an error of the device, which the next launch would report"


class LazyVectors(torch.Tensor):
    """A batch that is made on its device, of values that are copied there as page-locked memory allows."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Any:
        leaf = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)
        leaf.values = values
        return leaf

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran on a lazy leaf")

    def __reduce_ex__(self, protocol: int) -> Any:
        return LazyVectors, (self.values,)

    def __torch_sink_execute__(self, device: torch.device, *, out: torch.Tensor, **_: Any) -> Any:
        return out.copy_(self.values.to(device, non_blocking=True)), None


def collate_lazy(samples: Any) -> Any:
    vectors, numbers = default_collate(samples)
    return LazyVectors(vectors), numbers


def is_right(seed: int, monkeypatch: pytest.MonkeyPatch, collate: Any) -> bool:
    """Whether a slow device sees every batch as it is, although workers write to the same memory again."""
    cuda = FakeCuda(seed=seed)
    with monkeypatch.context() as patch:
        cuda.install(patch)
        with SinkLoader(DataLoader(Vectors(), 4, num_workers=1, collate_fn=collate), slots=2) as loader:
            seen = [[leaf * 1 for leaf in batch] for batch in loader]
            assert loader._slots.pool.batches_received > 12
        seen = [[leaf.cpu() for leaf in batch] for batch in seen]
        cuda.remove()
    return all([is_as_made(batch, number) for number, batch in enumerate(seen)])


@pytest.mark.parametrize("collate", [default_collate, collate_lazy])
@pytest.mark.parametrize("waits", [True, False])
def test_a_slab_is_written_again_only_after_the_copy_from_it(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, waits: bool, collate: Any
) -> None:
    if not waits:
        monkeypatch.setattr(SlotProtocol, "begin_staging", lambda protocol, slot: None)
    assert all([is_right(seed, monkeypatch, collate) for seed in range(3)]) == waits


def labels_and_some_of_them(samples: Any) -> Any:
    labels = torch.tensor([label for _, label in samples])
    return labels, labels[1:3]


def test_labels_come_without_a_connection_to_the_worker_and_share_memory_as_they_did(monkeypatch):
    def refuse(descriptor: Any) -> int:
        raise AssertionError("the training process asked the worker for shared memory")

    monkeypatch.setattr(resource_sharer.DupFd, "detach", refuse)
    opener = DataLoaderOpener(DataLoader(Vectors(), 4, num_workers=1, collate_fn=labels_and_some_of_them), None)
    assert opener.make_pool()
    *_, (labels, some) = opener.open()
    assert labels.tolist() == [92, 93, 94, 95]
    some.zero_()
    assert labels.tolist() == [92, 0, 0, 95]
