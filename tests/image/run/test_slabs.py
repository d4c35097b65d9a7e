"""Recorded batches of a plain DataLoader come unharmed through memory that is written again and again."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torchvision import tv_tensors
from torchvision.transforms import functional as F

import torch_sink
from image.cases import encoded
from torch_sink.common import pool, pool_writer
from torch_sink.common.pool import MOST_SLABS, Pool
from torch_sink.image.run.batch import LazyBatch

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no such memory here"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.once_on_oldest,
]
SAMPLES, BATCH = 22, 4  # the last batch is smaller
STARTS = ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)]


@cache
def file(index: int) -> bytes:
    return encoded(40, 30, index)


@cache
def stock(index: int) -> torch.Tensor:
    with torch_sink.image_backend("PIL"):
        return F.to_tensor(Image.open(io.BytesIO(file(index))))


class Photos(Dataset):
    """Sample i is image i, and i; sample `killed` kills its worker."""

    def __init__(self, killed: int = -1, size: int = SAMPLES) -> None:
        self.killed, self.size = killed, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if index == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return F.to_tensor(Image.open(io.BytesIO(file(index)))), index


class Streamed(IterableDataset):
    """The same; its workers end as soon as they have sent their part."""

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        worker = get_worker_info()
        assert worker is not None
        return map(Photos().__getitem__, range(worker.id, SAMPLES, worker.num_workers))


@pytest.fixture(autouse=True)
def recording() -> Iterator[None]:
    """With the backend on, and nothing left behind."""
    gc.collect()
    before = set(os.listdir("/dev/shm"))
    with torch_sink.image_backend("device", device="meta"):
        yield
    gc.collect()
    assert not pool_maps()
    assert not pool._leases
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(f"torch_{os.getpid()}_")]


def pool_maps() -> list[str]:
    """What this process has of pools: mappings and open files."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return [line for line in (*maps, *links) if "memfd:torch_sink" in line]


def assert_right(batch: Any) -> None:
    """Every image is stock torchvision's."""
    images, numbers = batch
    assert type(images) is LazyBatch
    assert torch.equal(images.images.made_on_cpu(), torch.stack([stock(number) for number in numbers.tolist()]))


def assert_right_here(batch: Any) -> None:
    """The same in another process, whose exit code says it; what it has learned of a batch it forgets first."""
    batch[0].program.packed._contents = None
    assert_right(batch)


def refuse_to_connect(descriptor: Any) -> int:
    raise AssertionError("the training process asked the worker for shared memory")


def test_small_batches_and_labels_travel_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_sharer.DupFd, "detach", refuse_to_connect)
    for images in (True, False):
        for batch in DataLoader(Photos(), BATCH, num_workers=1, worker_init_fn=as_if_large if images else None):
            assert_right(batch)
            assert lies_in_slab(batch) == images
            assert not batch[1].is_shared()


class PickledApart:
    """Is pickled into bytes while a message is pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return ForkingPickler.loads, (bytes(ForkingPickler.dumps(self.value)),)


def collate_in_vain(samples: Any) -> Any:
    """Makes more batches than a worker has slabs, of which no message can be pickled, then the one that is sent."""
    for kind in (list, PickledApart) * MOST_SLABS:
        with pytest.raises((AttributeError, pickle.PicklingError)):
            ForkingPickler.dumps([kind(default_collate(samples)), lambda: None])
    return default_collate(samples)


def test_memory_of_a_message_that_cannot_be_pickled_is_used_again() -> None:
    for batch in loader_of(collate_fn=collate_in_vain):
        assert_right(batch)
        assert lies_in_slab(batch)


class Labels(Dataset):
    """Tensors that share memory with each other or with processes, that need gradients, and of all kinds of numbers."""

    shared = torch.zeros(3).share_memory_()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        whole = torch.arange(6.0)
        kinds = [whole.to(dtype)[1:5].clone() for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.complex64)]
        views = [whole, whole[1:3], whole.view(2, 3).T]
        odd = [torch.tensor(7), torch.empty(0, 3), torch.ones(2, requires_grad=True), torch.ones(3, 2).T]
        boxes = tv_tensors.BoundingBoxes(torch.arange(8.0).view(2, 4), format="XYWH", canvas_size=(5, 6))
        kept, mask = tv_tensors.wrap(boxes[torch.tensor([True, False])], like=boxes), tv_tensors.Mask(whole.view(2, 3))
        return views, kinds, [*odd, boxes, kept, tv_tensors.Mask(torch.ones(2, 3)), mask], self.shared


@pytest.mark.parametrize("start", STARTS)
def test_small_tensors_arrive_as_those_of_stock(start: str) -> None:
    def received() -> Any:
        loader = DataLoader(Labels(), batch_size=None, num_workers=1, multiprocessing_context=start)
        views, kinds, odd, shared = next(iter(loader))
        views[0][1] = 9
        assert shared.is_shared()
        assert odd[-1].data_ptr() == views[0].data_ptr()
        if torch_sink.get_image_backend() == "device":
            assert not any(each.is_shared() for each in odd[-4:-1])
        return [*views, *kinds, *odd]

    ours = received()
    with torch_sink.image_backend("PIL"):
        theirs = received()
    for one, other in zip(ours, theirs, strict=True):
        for name in ("shape", "dtype", "layout", "requires_grad"):
            assert getattr(one, name) == getattr(other, name)
        assert one.stride() == other.stride()
        assert type(one) is type(other)
        assert vars(one) == vars(other)
        assert torch.equal(one, other)


def memory_of_pools() -> int:
    """Bytes of memory of the pools that this process has made."""
    files = [os.stat(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_pool(name)]
    return sum({file.st_ino: 512 * file.st_blocks for file in files}.values())


def is_pool(descriptor: str) -> bool:
    with contextlib.suppress(OSError):
        return "memfd:torch_sink" in os.readlink(f"/proc/self/fd/{descriptor}")
    return False


def lies_in_slab(batch: Any) -> bool:
    address = batch[0].program.packed.blob.data_ptr()
    ranges = [line.split()[0].split("-") for line in pool_maps() if "-" in line.split()[0]]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def as_if_large(worker: int) -> None:
    """In a worker: what is small would travel in messages."""
    pool_writer.MOST_BYTES_IN_MESSAGE = 1 << 8  # labels


def loader_of(dataset: Any = None, **settings: Any) -> DataLoader:
    settings = {"batch_size": BATCH, "num_workers": 1, "worker_init_fn": as_if_large, **settings}
    return DataLoader(Photos() if dataset is None else dataset, **settings)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("start", STARTS)
def test_batches_are_right_and_memory_is_used_again(start: str, persistent: bool) -> None:
    loader = loader_of(num_workers=2, persistent_workers=persistent, multiprocessing_context=start)
    addresses = set()
    for _ in range(4 if start == "fork" else 2):
        for batch in loader:
            assert_right(batch)
            assert lies_in_slab(batch)
            addresses.add(batch[0].program.packed.blob.data_ptr())
    passes = 1 if persistent else 4 if start == "fork" else 2
    assert len(addresses) <= passes * 2 * 4, "of each worker one in use, and those that are made ahead"


def test_kept_batches_stay_as_they_are() -> None:
    """More of them than a worker has slabs, and views of the memory of others, which keep it."""
    loader = loader_of(Photos(size=100), batch_size=2, persistent_workers=True)
    kept = list(loader)
    assert sum(map(lies_in_slab, kept)) == MOST_SLABS
    views = [
        (batch[0].program.packed.blob[100:300].view(10, 20)[3:], batch[0].program.packed.blob.clone()) for batch in kept
    ]
    for batch in kept:
        assert_right(batch)
    del kept, batch
    for batch in loader:
        assert_right(batch)
    del batch
    assert all(torch.equal(view.flatten(), blob[160:300]) for view, blob in views)
    del views
    assert all([lies_in_slab(batch) for batch in loader])


def test_memory_that_lies_idle_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_writer, "IDLE_BATCHES", 8)
    loader = loader_of(Photos(size=40), batch_size=2, persistent_workers=True)
    kept = list(loader)
    before = memory_of_pools()
    del kept
    for _ in range(2):
        for batch in loader:
            assert_right(batch)
    assert 0 < memory_of_pools() <= before * 5 // MOST_SLABS
    del batch, loader


def in_forks(batch: Any, count: int = 1) -> list[tuple[int, int]]:
    """(process, pipe) of forked children, which look at a batch when something is written to the pipe."""
    children = []
    for _ in range(count):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                os.read(reading, 1)
                assert_right_here(batch)
                code = 0
            del batch
            gc.collect()
            os._exit(code)
        os.close(reading)
        children.append((child, writing))
    return children


def let_look(children: list[tuple[int, int]]) -> list[int]:
    """Their exit codes."""
    codes = []
    for child, pipe in children:
        os.write(pipe, b"x")
        os.close(pipe)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def test_a_forked_process_goes_on_seeing_its_batch_and_frees_nothing() -> None:
    loader = loader_of(persistent_workers=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    batch = next(batches)
    early, late = in_forks(batch, 2)
    assert let_look([early]) == [0]  # it lets go of the batch, which is still in use here
    for other in itertools.islice(batches, 10):
        assert_right(other)
    assert_right_here(batch)
    del batch
    for other in itertools.islice(batches, 10):
        assert_right(other)
        assert lies_in_slab(other)
    assert let_look([late]) == [0]


def forward(incoming: Any, outgoing: Any) -> None:
    while (batch := incoming.get()) is not None:
        assert_right_here(batch)
        outgoing.put(batch)
        del batch


@pytest.mark.parametrize("start", STARTS)
def test_batches_may_be_sent_on_and_copied(start: str) -> None:
    context = multiprocessing.get_context(start)
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=forward, args=(there, back))
    process.start()
    copies = []
    for batch in loader_of():
        there.put(batch)
        copies += [pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), [copy.copy(batch[0]), batch[1]]]
        assert_right(back.get(timeout=60))
        assert_right(batch)
    there.put(None)
    process.join(60)
    assert process.exitcode == 0
    for batch in copies:
        assert_right(batch)


class Twice:
    """A collate function that sends each batch again, some batches later, and to somebody else."""

    def __init__(self, queue: Any) -> None:
        self.queue, self.before = queue, list[Any]()

    def __call__(self, samples: Any) -> Any:
        batch = default_collate(samples)
        if self.queue is not None:
            self.queue.put(batch)
        self.before = [*self.before[-5:], batch]
        return [batch, self.before[0], copy.deepcopy(batch)]


@pytest.mark.parametrize("to_others", [False, True])
def test_a_batch_may_be_sent_more_than_once(to_others: bool) -> None:
    queue = multiprocessing.get_context("fork").Queue() if to_others else None
    loader = loader_of(collate_fn=Twice(queue), multiprocessing_context="fork", persistent_workers=True)
    kept, recent = [], deque[Any](maxlen=8)  # the first of two dies while the second lives
    for _ in range(3):
        for batches in loader:
            recent.append(batches[0])
            kept.append(batches[1])
            for batch in batches:
                assert_right(batch)
            if queue is not None:
                kept.append(queue.get(timeout=60))
    for batch in kept:
        assert_right(batch)


def test_a_killed_worker_takes_nothing_with_it() -> None:
    loader = loader_of(Photos(killed=SAMPLES - 1), num_workers=2)
    kept = []
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        kept.extend(loader)
    gc.collect()
    assert kept
    for batch in kept:
        assert_right(batch)


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_leave_no_files_and_no_memory(persistent: bool) -> None:
    loader = loader_of(persistent_workers=persistent)
    files = []
    for epoch in range(50 if persistent else 25):  # the latter start workers in each
        for batch in loader:
            if epoch % 10 == 0:
                assert_right(batch)
        del batch
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
        assert len(pool_maps()) <= (4 if persistent else 0), "of a worker that is gone, nothing"
    assert min(files[-10:]) <= max(files[:10])


def test_batches_outlive_their_workers() -> None:
    kept = list(loader_of(Streamed(), num_workers=2))
    assert len(kept) == 6
    for batch in kept:
        assert_right(batch)
        assert lies_in_slab(batch)


def test_threads_of_a_worker_never_write_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a `collate_fn` that collates several views at once do."""
    monkeypatch.setattr(pool_writer, "_writer", pool_writer.Writer(Pool(1), 0))
    interval, threads = sys.getswitchinterval(), 4
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as threads_of:
            for size in range(1, 200):
                made = list(
                    threads_of.map(
                        pool_writer.allocate, [100_000 + 1000 * (size + thread) for thread in range(threads)]
                    )
                )
                places = {batch.data_ptr() for batch in made if batch is not None}
                assert len(places) == sum(batch is not None for batch in made) > 0
                del made
    finally:
        sys.setswitchinterval(interval)


def test_loaders_in_threads_do_not_meet() -> None:
    failed = []
    starting = threading.Lock()  # libraries that watch forks (filelock) refuse to fork while another thread does
    for index in range(SAMPLES):
        stock(index)  # the image backend is one for all threads: not in them

    def read(loader: DataLoader) -> None:
        try:
            for _ in range(3):
                with starting:
                    batches = iter(loader)
                for batch in batches:
                    assert_right(batch)
        except BaseException as error:
            failed.append(error)

    loaders = [loader_of(num_workers=2, persistent_workers=number % 2 == 0) for number in range(3)]
    threads = [threading.Thread(target=read, args=(loader,)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize("settings", [{"pin_memory": True}, {"prefetch_factor": 6}, {"in_order": False}], ids=str)
def test_settings_of_the_loader(settings: dict[str, Any]) -> None:
    loader = loader_of(num_workers=2, persistent_workers=True, **settings)
    for batch in itertools.chain(*[loader] * 3):
        assert_right(batch)


def test_with_names_as_torchs_sharing_strategy() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        for batch in itertools.chain(*[loader_of(persistent_workers=True)] * 2):
            assert_right(batch)
            assert lies_in_slab(batch)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def refuse(*arguments: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["memfd_create", "posix_fallocate", "ftruncate"])
def test_without_such_memory_batches_take_the_ordinary_way(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, name, refuse)
    for batch in loader_of():
        assert_right(batch)
        assert not lies_in_slab(batch)


class Sizes(torch.utils.data.Sampler):
    """Batches of these sizes, one after the other."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(size)) for size in self.sizes])

    def __len__(self) -> int:
        return len(self.sizes)


def test_memory_follows_the_size_of_the_batches() -> None:
    sizes = [1, 2, 3, 5, 8, 13, 20, 1, 20, 2, 20]
    loader = loader_of(batch_sampler=Sizes(sizes), batch_size=1, persistent_workers=True)
    for _ in range(2):
        for batch in loader:
            assert_right(batch)
            assert lies_in_slab(batch)
    assert 0 < memory_of_pools() < 5 * 9 / 8 * 20 * sum(map(len, map(file, range(20))))
