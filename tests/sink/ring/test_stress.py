"""Each fault twenty times at random moments, and a soak with flat memory and threads."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from sink import test_faults, test_worker_faults
from sink.ring.test_lazy_batches import Images, collate, shown
from sink.test_faults import Numbers, Payload, check_payloads, unchanged
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.slow

ROUNDS = range(20)


class Paced(Dataset):
    """Samples that take a moment, as user code does, so that a fault can hit any stage."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.full((256,), index)


def first_batches(loader: SinkLoader, count: int) -> list[int]:
    return [int(batch[0][0]) for batch in itertools.islice(iter(loader), count)]


@pytest.mark.parametrize("turn", ROUNDS)
def test_worker_killed_at_a_random_moment(turn: int) -> None:
    moments = random.Random(turn)
    beside = DataLoader(Numbers(10_000), num_workers=1)
    with SinkLoader(DataLoader(Paced(), batch_size=4, num_workers=2)) as loader:
        batches, others = iter(loader), iter(beside)
        seen = [int(next(batches)[0, 0])]
        next(others)
        victim = loader._traversal.passes[0].batches._workers[moments.randrange(2)]
        threading.Timer(moments.uniform(0, 0.2), victim.kill).start()
        with pytest.raises(RuntimeError, match=f"{victim.pid}.*SIGKILL"):
            seen.extend(int(batch[0, 0]) for batch in batches)
        assert seen == list(range(0, 4 * len(seen), 4))
        next(others)
        del others


@pytest.mark.parametrize("turn", ROUNDS)
def test_worker_killed_in_a_large_message_at_a_random_moment(turn: int) -> None:
    moments = random.Random(turn)
    with SinkLoader(DataLoader(Payload(), batch_size=None, num_workers=2, collate_fn=unchanged)) as loader:
        batches = iter(loader)
        next(batches)
        victim = loader._traversal.passes[0].batches._workers[moments.randrange(2)]
        threading.Timer(moments.uniform(0, 0.2), victim.kill).start()
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=f"{victim.pid}.*SIGKILL"):
            check_payloads(batches)
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("turn", ROUNDS)
def test_closed_restarted_or_dropped_at_a_random_moment(turn: int) -> None:
    moments = random.Random(turn)
    options = {"num_workers": 2, "persistent_workers": turn % 2 == 0}
    loader = SinkLoader(DataLoader(Paced(), batch_size=4, **options), slots=moments.randrange(1, 5))
    for _ in range(3):
        count = moments.randrange(1, 12)
        assert first_batches(loader, count) == list(range(0, 4 * count, 4))
        time.sleep(moments.uniform(0, 0.05))
        loader.restart()
    batches = iter(loader)
    next(batches)
    time.sleep(moments.uniform(0, 0.05))
    started = time.monotonic()
    if turn % 4 < 2:
        loader.close()
    del loader, batches
    gc.collect()
    assert time.monotonic() - started < 5


def decode_errors(policy: str) -> None:
    """The device stage fails, or loses a sample, in the third of four batches."""
    source = DataLoader(Images(bad=9), batch_size=4, num_workers=2, collate_fn=collate)
    with SinkLoader(source, on_decode_error=policy) as loader:
        seen, errors = [], 0
        while len(seen) + errors < 4:
            try:
                seen.extend(shown(images) for images, _ in loader.rest())
            except OSError:
                errors += 1
    lost = {"raise": [], "skip": [[8, 10, 11]], "replace": [[8, 10, 10, 11]]}[policy]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], *lost, [12, 13, 14, 15]]
    assert errors == (policy == "raise")


FAULTS: dict[str, Callable[[], None]] = {
    "dataset exception": partial(test_faults.test_dataset_exception_comes_in_order_and_the_rest_follows, 2),
    "collate exception": partial(test_faults.test_collate_exception_comes_in_order, 2),
    "device stage failure": partial(decode_errors, "raise"),
    "corrupt image skipped": partial(decode_errors, "skip"),
    "corrupt image replaced": partial(decode_errors, "replace"),
    "worker killed": partial(test_faults.test_killed_worker_is_an_error_in_order_and_the_loader_can_go_on, False),
    "persistent worker killed": partial(
        test_faults.test_killed_worker_is_an_error_in_order_and_the_loader_can_go_on, True
    ),
    "consumer stops early": test_faults.test_consumer_that_stops_early_leaves_nothing,
    "fork after start": test_faults.test_forked_child_is_refused_and_harms_nobody,
    "garbage collected": test_faults.test_garbage_collection_in_mid_epoch_closes,
    "terminal interrupt": test_faults.test_terminal_interrupt_kills_workers_and_leaves_in_time,
    "interpreter exit": test_faults.test_interpreter_exit_without_close,
    "worker leaves": partial(test_worker_faults.test_a_worker_that_leaves, test_worker_faults.leave, "exit code 3"),
    "interrupt": partial(test_worker_faults.test_an_interrupt_while_waiting_loses_no_batch, 2, KeyboardInterrupt),
}


@pytest.mark.parametrize("turn", ROUNDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_again_and_again(fault: str, turn: int) -> None:
    FAULTS[fault]()


class Growth:
    """Resident memory, threads and file descriptors of this process, noted now and then."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.resident: list[int] = []
        self.threads: list[int] = []
        self.descriptors: list[int] = []

    def note(self) -> None:
        self.resident.append(self.process.memory_info().rss)
        self.threads.append(threading.active_count())
        self.descriptors.append(self.process.num_fds())

    def check(self) -> None:
        """The highest value of the last third is that of the second one; caches and arenas fill in the first."""
        third = len(self.resident) // 3
        grown = {
            name: max(values[2 * third :]) - max(values[third : 2 * third])
            for name, values in vars(self).items()
            if name != "process"
        }
        print(f"{len(self.resident)} notes, at last {self.resident[-1] / 2**20:.0f} MiB; growth {grown}")
        assert grown["resident"] < 2 << 20
        assert grown["threads"] <= 2  # those that send indices to the workers start and end with them
        assert grown["descriptors"] <= 16  # each batch in the queue or on its way holds one


SLOTS = 3


def soak(loader: SinkLoader, pass_length: int, count: int) -> None:
    """Takes `count` batches, numbered by pass, with a `break` now and then."""
    growth, delivered = Growth(), 0
    while delivered < count:
        for batch in loader.rest():
            assert int(batch[0, 0]) == delivered % pass_length
            delivered += 1
            if delivered % 1777 == 0:
                break
        growth.note()
    growth.check()


@pytest.mark.usefixtures("place")
def test_200_000_small_batches_with_flat_memory_threads_and_files() -> None:
    batches = [torch.full((2, 8), i) for i in range(2000)]
    with SinkLoader(batches, slots=SLOTS) as loader:
        soak(loader, len(batches), 200_000)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
def test_many_small_batches_of_workers_with_flat_memory_threads_and_files(persistent: bool) -> None:
    """40,000 batches in passes of 2,000 from persistent workers; 10,000 in passes of 500 from fresh ones."""
    pass_length = 2000 if persistent else 500
    data = [torch.full((8,), i // 2) for i in range(2 * pass_length - 1)]  # the last batch is short
    source = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        persistent_workers=persistent,
        prefetch_factor=8,
        generator=torch.Generator(),
    )
    with SinkLoader(source, slots=SLOTS) as loader:
        soak(loader, pass_length, 20 * pass_length)
