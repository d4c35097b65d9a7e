"""Each fault twenty times at random moments, and a soak with flat memory and threads."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_sink.sink import SinkLoader
from torch_sink.sink import loader as loader_module
from torch_sink.sink.ring import DeviceRing

from .conftest import worker_processes
from .simulated_device import ImmediateOps
from .test_faults import Numbers, Payload, check_payloads, unchanged

pytestmark = pytest.mark.slow

ROUNDS = range(20)


class Paced(Dataset):
    """Samples that take a moment, so that a fault can hit any stage."""

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
        victim = loader._traversal.passes[0].watch.iterator._workers[moments.randrange(2)]
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
        victim = loader._traversal.passes[0].watch.iterator._workers[moments.randrange(2)]
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


@pytest.mark.parametrize("ring", [False, True], ids=["host", "ring"])
def test_many_small_batches_with_flat_memory_and_threads(ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 2,000 batches from persistent workers, with a break and an odd batch now and then."""
    if ring:
        monkeypatch.setattr(
            loader_module,
            "make_slots",
            lambda options: DeviceRing(options.slot_count, options.image_format, ImmediateOps(), options.max_bytes),
        )
    process = psutil.Process()
    data = [torch.full((8,), i) for i in range(3999)]
    source = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=8,
        generator=torch.Generator(),
    )
    sizes, threads, delivered = [], [], 0
    with SinkLoader(source) as loader:
        while delivered < 40_000:
            for batch in loader:
                expected = 2 * (delivered % 2000)
                assert int(batch[0, 0]) == expected
                delivered += 1
                if delivered % 1777 == 0:
                    break
            sizes.append(process.memory_info().rss)
            threads.append(threading.active_count())
        assert len(worker_processes()) == 2
    settled = sizes[len(sizes) // 3 :]
    assert max(settled) - min(settled) < 8 << 20
    assert max(threads) - min(threads) <= 1
