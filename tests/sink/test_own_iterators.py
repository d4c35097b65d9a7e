"""DataLoader subclasses that make or keep their iterators in their own way: they are iterated as the plain loop does."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
import warm
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from sink.test_matches_plain_loop import Augmented, train
from torch_sink.loop import StepLoop
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


class Generated(DataLoader):
    """`__iter__` is a generator, which starts the workers at its first `next`."""

    def __iter__(self) -> Iterator[object]:
        yield from super().__iter__()


class Repeated:
    """A sampler without an end."""

    def __init__(self, sampler: object) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[object]:
        while True:
            yield from iter(self.sampler)


class Kept(DataLoader):
    """Keeps one iterator, and its workers, for all passes, like timm's MultiEpochsDataLoader."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        vars(self)["batch_sampler"] = Repeated(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[object]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Wrapping(DataLoader):
    """Holds another DataLoader and is one batch behind it, like accelerate's DataLoaderShard."""

    def __init__(self, *args: object, **options: object) -> None:
        self.inner = DataLoader(*args, **options)

    def __getattr__(self, name: str) -> object:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[object]:
        batches = iter(self.inner)
        current = next(batches)
        for following in batches:
            yield current
            current = following
        yield current


class Transforming(DataLoader):
    """Wraps the iterator that it makes, as the loaders of PyTorch Geometric do."""

    def _get_iterator(self) -> Transformed:
        return Transformed(super()._get_iterator())


class Transformed:
    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Transformed:
        return self

    def _reset(self, loader: object, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def __next__(self) -> list[int]:
        return [sample + 100 for sample in next(self.iterator)]


KINDS = [Generated, Kept, Wrapping, Transforming]
# Workers are children of this process, which those of a fork server, the default from Python 3.14 on, are not.
FORKED = {"multiprocessing_context": "fork"}


class Bad(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 17:
            raise ValueError("sample 17 is bad")
        return index


def unchanged(samples: list[int]) -> list[int]:
    return samples


def make(kind: type, dataset: object, **options: object) -> SinkLoader:
    return SinkLoader(kind(dataset, batch_size=4, num_workers=2, **FORKED, **options))


@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(6)
def test_passes_and_a_restart(kind: type, persistent: bool) -> None:
    first = 100 if kind is Transforming else 0
    expected = [list(range(i, i + 4)) for i in range(first, first + 40, 4)]
    with make(kind, range(40), collate_fn=unchanged, persistent_workers=persistent) as loader:
        assert [list(loader), list(loader)] == [expected, expected]
        next(iter(loader))
        loader.restart()
        if kind is not Kept:  # which goes on behind the batch that was given
            assert list(loader) == expected
            assert loader.stats().batches == 31
            assert list(loader.loader) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_closing_leaves_no_process(kind: type) -> None:
    others = {child.pid for child in psutil.Process().children()}
    source = kind(range(40), batch_size=4, num_workers=2, collate_fn=unchanged, persistent_workers=True, **FORKED)
    loader = SinkLoader(source)
    for _ in range(2):
        next(iter(loader))
    new = [child for child in psutil.Process().children() if child.pid not in others]
    workers = [child for child in new if "multiprocessing" not in " ".join(child.cmdline())]
    assert workers
    started = time.monotonic()
    loader.close()
    assert not psutil.wait_procs(workers, timeout=0)[1]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("kind", [Generated, Wrapping])
def test_an_error_of_the_dataset_comes_where_the_plain_loop_has_it(kind: type) -> None:
    seen, plain = [], []
    for batches, source in ((plain, kind(Bad(), 4)), (seen, SinkLoader(kind(Bad(), 4)))):
        with pytest.raises(ValueError, match="sample 17 is bad"):
            batches.extend(batch.tolist() for batch in source)
    assert seen == plain
    assert len(seen) > 2


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
def test_a_generator_draws_in_the_plain_loops_order(seeded: bool) -> None:
    def fresh() -> Generated:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(3) if seeded else None
        return Generated(Augmented(), batch_size=4, shuffle=True, num_workers=2, generator=generator)

    expected = train(fresh())
    with SinkLoader(fresh()) as loader:
        actual = train(loader)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("position", [3, 13])
@pytest.mark.sampled(2)
def test_resume_gives_the_samples_that_would_have_come(position: int, num_workers: int) -> None:
    def fresh() -> SinkLoader:
        generator = torch.Generator().manual_seed(3)
        source = Generated(
            range(40), batch_size=4, shuffle=True, num_workers=num_workers, generator=generator, collate_fn=unchanged
        )
        return SinkLoader(source, batches_per_epoch=20)

    def consume(loader: SinkLoader, count: int) -> list[object]:
        batches = iter(loader)
        return [next(batches) for _ in range(count)]

    with fresh() as loader:
        consume(loader, position)
        state = loader.state_dict()
        expected = consume(loader, 20 - position)
    assert any("Generated makes its batches itself" in note for note in state["not_covered"])
    with fresh() as loader:
        loader.load_state_dict(state)
        assert consume(loader, 20 - position) == expected


@pytest.mark.parametrize("kind", [Generated, Wrapping])
def test_workers_are_started_in_the_consumer_s_thread(kind: type) -> None:
    """A process forked in another thread destroys what this one keeps to itself."""
    threads: list[threading.Thread] = []

    class Starting(kind):  # type: ignore[misc, valid-type]
        def __iter__(self) -> Iterator[object]:
            threads.append(threading.current_thread())
            yield from super().__iter__()

    source = Starting(range(8), batch_size=4, num_workers=1, multiprocessing_context="fork", collate_fn=unchanged)
    with SinkLoader(source) as loader:
        assert [list(loader), list(loader)] == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    assert threads == [threading.current_thread()] * 2


SCRIPT = """
import os, signal, sys, threading
from sink import test_own_iterators
from torch_sink import SinkLoader

class Slow:
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        threading.Event().wait(0.002)
        return os.getpid()

kind = getattr(test_own_iterators, sys.argv[1])
options = {"multiprocessing_context": "fork", "collate_fn": test_own_iterators.unchanged}
with SinkLoader(kind(Slow(), batch_size=4, num_workers=2, **options)) as loader:
    try:
        for number, pids in enumerate(loader):
            if number == 5:
                killed = pids[0]
                os.kill(killed, signal.SIGKILL)
    except RuntimeError as error:
        print(str(killed) in str(error), number < 100)
"""


@pytest.mark.parametrize("kind", ["Generated", "Wrapping"])
def test_a_killed_worker_is_an_error(kind: str) -> None:
    """In a process of its own: torch raises in the main thread, at any moment."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = warm.run("-c", SCRIPT, kind, timeout=60, env=environment)
    assert finished.stdout.split()[:2] == ["True", "True"], finished.stderr


class Stuck(Dataset):
    """Samples that take for ever, behind the first two."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index > 1:
            time.sleep(100)
        return index


def looped(loader: DataLoader) -> Iterator[object]:
    for batch in loader:  # noqa: UP028 - as timm's PrefetchLoader
        yield batch


@pytest.mark.parametrize("make", [Generated, lambda *args, **options: lambda: looped(DataLoader(*args, **options))])
def test_close_does_not_wait_for_each_worker(make: Callable[..., object]) -> None:
    before = set(psutil.Process().children())
    loader = SinkLoader(make(Stuck(), batch_size=None, num_workers=2), device="cpu")
    assert next(iter(loader)) == 0
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 4
    assert not [one for one in set(psutil.Process().children()) - before if one.name() == psutil.Process().name()]


def test_close_leaves_workers_alone_that_the_user_s_loader_keeps() -> None:
    plain = DataLoader(range(4), batch_size=None, num_workers=1, persistent_workers=True)
    with SinkLoader(lambda: looped(plain), device="cpu") as loader:
        assert next(iter(loader)) == 0
    assert list(plain) == [0, 1, 2, 3]


def test_an_iterator_of_the_program_is_left_to_it() -> None:
    """Its workers go on too: what a plain loop left of it, another one reads."""
    plain = DataLoader(range(8), batch_size=None, num_workers=1)
    batches = looped(plain)
    with SinkLoader(batches, device="cpu") as loader:
        assert next(iter(loader)) == 0
        assert next(loader.rest()) == 1
    assert list(batches) == [*range(2, 8)]


def test_a_run_leaves_the_rest_of_a_generator() -> None:
    batches = ((torch.ones(1, 3), torch.ones(1, 1)) for _ in range(6))
    model = nn.Linear(3, 1)
    StepLoop(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)).run(batches, max_steps=2)
    assert len([*batches]) == 4
