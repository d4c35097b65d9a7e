"""What workers, samplers and signals can do wrong beyond a plain exception; each arrives in order as an error."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch.utils.data import DataLoader, Dataset, Sampler

from sink.test_faults import read_until_error, wait_until_received
from torch_sink.errors import SinkError, SinkTimeout
from torch_sink.sink import SinkLoader, workers
from torch_sink.sink import producer as thread_producer
from torch_sink.sink.openers import Opener
from torch_sink.sink.passes import Item, Pass, PassStart
from torch_sink.sink.producer import Producer
from torch_sink.sink.slots import ImageFormat, Slots

pytestmark = pytest.mark.halved


class Faulty(Dataset):
    """Sample i is i; at sample 9 something happens. `pause` is what user code takes, in seconds."""

    def __init__(self, fault: Callable[[], None] | None = None, pause: float = 0.0) -> None:
        self.fault, self.pause = fault, pause

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.pause)
        if index == 9 and self.fault is not None:
            self.fault()
        return torch.tensor(index)


class NeedsArguments(Exception):
    def __init__(self, first: int, *, second: int) -> None:
        super().__init__(f"{first} and {second}")


def raise_needs_arguments() -> None:
    raise NeedsArguments(1, second=2)


def raise_unpicklable() -> None:
    class Local(Exception):
        pass

    raise Local("of a class that cannot be pickled")


def raise_stop() -> None:
    raise StopIteration("from the dataset")


def raise_interrupt() -> None:
    wait_until_received()
    raise KeyboardInterrupt


def leave() -> None:
    wait_until_received()
    os._exit(3)


def freeze() -> None:
    wait_until_received()
    os.kill(os.getpid(), signal.SIGSTOP)


FIRST_BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7]]
LATER_BATCHES = [list(range(i, i + 4)) for i in range(12, 40, 4)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (raise_needs_arguments, "1 and 2"),
        (raise_unpicklable, "of a class that cannot be pickled"),
        (raise_stop, "raised StopIteration, which a DataLoader takes for the end.*from the dataset"),
    ],
)
@pytest.mark.sampled(2)
def test_exceptions_that_are_hard_to_pass_on(fault: Callable[[], None], message: str, num_workers: int) -> None:
    with SinkLoader(DataLoader(Faulty(fault), batch_size=4, num_workers=num_workers)) as loader:
        batches, error = read_until_error(loader)
        assert batches == FIRST_BATCHES
        with pytest.raises(Exception, match=f"(?s){message}"):
            raise error
        assert read_until_error(loader) == (LATER_BATCHES, None)


@pytest.mark.parametrize(("fault", "reason"), [(raise_interrupt, "exit code 0"), (leave, "exit code 3")])
def test_a_worker_that_leaves(fault: Callable[[], None], reason: str) -> None:
    with SinkLoader(DataLoader(Faulty(fault), batch_size=4, num_workers=2)) as loader:
        batches, error = read_until_error(loader)
    assert batches == FIRST_BATCHES
    assert reason in str(error)


def test_a_stopped_worker_is_a_timeout_and_closing_is_bounded() -> None:
    loader = SinkLoader(DataLoader(Faulty(freeze), batch_size=4, num_workers=2))
    batches, error = read_until_error(loader, timeout_seconds=0.5)
    assert batches == FIRST_BATCHES
    assert isinstance(error, SinkTimeout)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 5


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> object:
        return int, ("not a number",)


def collate(samples: list[torch.Tensor]) -> object:
    if int(samples[0]) != 8:
        return torch.stack(samples)
    wait_until_received()
    return collate.third()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("third", "message", "goes_on"),
    [(threading.Lock, "cannot be sent to the training process", True), (Unreadable, "invalid literal for int", False)],
)
def test_a_batch_that_cannot_travel(third: Callable[[], object], message: str, goes_on: bool) -> None:
    collate.third = third  # type: ignore[attr-defined]
    with SinkLoader(DataLoader(Faulty(), batch_size=4, num_workers=2, collate_fn=collate)) as loader:
        batches, error = read_until_error(loader)
        assert batches == FIRST_BATCHES
        assert message in str(error)
        rest, _ = read_until_error(loader)
    # Which result was unreadable is not known, so its pass cannot go on.
    assert rest == (LATER_BATCHES if goes_on else FIRST_BATCHES)


@pytest.mark.filterwarnings("ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning")
def test_after_the_thread_that_pins_memory_ended_persistent_workers_are_new_ones(fake_cuda: FakeCuda) -> None:
    collate.third = Unreadable  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(3)
    options = {"num_workers": 2, "persistent_workers": True, "pin_memory": True, "generator": generator}
    with SinkLoader(DataLoader(Faulty(), batch_size=4, collate_fn=collate, **options)) as loader:
        error = read_until_error(loader)[1]
        assert re.search("Pin memory thread exited|the thread that pins memory has ended", str(error))
        start = loader._resuming.next_start(1)
        assert not start.kept_workers
        assert start.worker_generators == start.generators


def nothing(samples: list[torch.Tensor]) -> None:
    return None


@pytest.mark.parametrize("num_workers", [0, 2])
def test_collate_may_return_nothing(num_workers: int) -> None:
    with SinkLoader(DataLoader(Faulty(), batch_size=4, num_workers=num_workers, collate_fn=nothing)) as loader:
        assert list(loader) == [None] * 10


class FailingSampler(Sampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from FIRST_BATCHES
        yield []
        raise LookupError("no more indices")


def count(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([int(sample) for sample in samples])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_raises_and_an_empty_index_list(num_workers: int) -> None:
    source = DataLoader(Faulty(), batch_sampler=FailingSampler(), num_workers=num_workers, collate_fn=count)
    with SinkLoader(source) as loader:
        for _ in range(2):
            batches, error = read_until_error(loader)
            assert batches == [*FIRST_BATCHES, []]
            assert isinstance(error, LookupError)
            loader.restart()


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interrupting(error: type[BaseException], seconds: float) -> Iterator[None]:
    """Raises `error` in the main thread, at any bytecode, after `seconds`."""

    def raise_it(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("num_workers", "error"), [(0, KeyboardInterrupt), (2, KeyboardInterrupt), (2, Interrupted)])
def test_an_interrupt_while_waiting_loses_no_batch(num_workers: int, error: type[BaseException]) -> None:
    with SinkLoader(DataLoader(Faulty(pause=0.04), batch_size=4, num_workers=num_workers)) as loader:
        seen = [next(iter(loader)).tolist()]
        with interrupting(error, 0.1), pytest.raises(error):
            seen.extend(batch.tolist() for batch in loader.rest())
        assert loader.batch_in_epoch == len(seen)
        seen.extend(batch.tolist() for batch in loader.rest())
    assert seen == [list(range(i, i + 4)) for i in range(0, 40, 4)]


def test_a_death_that_shows_late_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a worker's connection may break well before its process is gone."""
    monkeypatch.setattr(workers, "DEATH_SHOWS_SECONDS", 0.05)
    iterator = iter(DataLoader(Faulty(pause=1.0), num_workers=1))
    watch, victim, calls = workers.WorkerGuard(iterator), iterator._workers[0], []

    def broken_connection(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            victim.kill()
            victim.join()
        raise ConnectionResetError

    monkeypatch.setattr(type(iterator), "_try_get_data", broken_connection)
    with pytest.raises(RuntimeError, match=f"{victim.pid}.*killed by SIGKILL"):
        watch.poll(30)
    assert len(calls) == 2
    watch.stop()


class GuardOfTheDead:
    """Of workers that nothing brings to an end."""

    def has_dead_worker(self) -> bool:
        return True

    def free_reader(self, is_free: Callable[[], bool], seconds: float) -> None:
        pass


def test_a_death_that_never_shows_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the producer's thread waits for: here, a slot that nobody gives back."""
    monkeypatch.setattr(thread_producer, "DEAD_WORKER_SECONDS", 0.2)
    producer = Producer(Slots(1, ImageFormat(torch.device("cpu"))))
    monkeypatch.setattr(producer, "free_slots", list)
    opener = Opener(lambda: [])
    opener.has_workers = True
    opener.guard = GuardOfTheDead()  # type: ignore[assignment]
    producer.submit(Pass(opener, PassStart(0), iter([])))
    with pytest.raises(SinkError, match="a data worker died"):
        producer.take(timeout_seconds=60)
    producer.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_in_threads_over_one_dataset(num_workers: int) -> None:
    dataset, results = Faulty(), {}

    def run(number: int) -> None:
        with SinkLoader(DataLoader(dataset, batch_size=4, num_workers=num_workers)) as loader:
            results[number] = [batch.tolist() for batch in loader]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[number] for number in range(2)] == [[list(range(i, i + 4)) for i in range(0, 40, 4)]] * 2


def test_a_sink_loader_over_a_sink_loader() -> None:
    with SinkLoader(DataLoader(Faulty(), batch_size=4, num_workers=1)) as inner, SinkLoader(inner) as outer:
        for _ in range(2):
            assert [batch.tolist()[0] for batch in outer] == list(range(0, 40, 4))


def test_closing_hands_out_no_slot_whose_batch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may look for a slot until it is told to leave."""
    with SinkLoader(DataLoader(range(9), num_workers=1), slots=2) as loader:
        next(iter(loader))
        producer, free = loader._producer, []
        in_use, drop = producer.held.slot, producer.drop
        monkeypatch.setattr(producer, "drop", lambda: (free.extend(producer.free_slots()), drop()))
    assert in_use not in free
    assert producer.held is None


def test_the_consumer_lets_go_of_its_batch_while_the_thread_looks_for_a_slot() -> None:
    class LetsGo(Producer):
        @property
        def held(self) -> Item | None:
            found, self.kept = self.kept, None
            return found

        @held.setter
        def held(self, item: Item | None) -> None:
            self.kept = item

    producer = LetsGo(Slots(2, ImageFormat(torch.device("cpu"))))
    producer.held = Item(PassStart(0), slot=0)
    assert producer.free_slots() == [1]
    assert producer.free_slots() == [0, 1]


def test_a_pass_that_is_given_up_drops_nothing_more() -> None:
    def cancelled() -> None:
        raise workers.PassCancelled

    given_up = Pass(Opener([]), PassStart(0), iter(cancelled, 0), drop=9)
    with pytest.raises(workers.PassCancelled):
        given_up.receive()
    assert given_up.drop == 8
