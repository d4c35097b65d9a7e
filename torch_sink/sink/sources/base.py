"""Where batches come from: one traversal ("pass") of a wrapped loader after the other, each of them resumable."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from torch_sink.common.random_state import RandomState, global_random_state, set_global_random_state
from torch_sink.common.slabs import Slabs
from torch_sink.damage.loaders import LoaderGuard, Losses
from torch_sink.damage.report import NO_LOSS, Loss


class Mark(NamedTuple):
    """What a batch says about its source at the moment after it was made; applied when the batch is consumed.

    Attributes:
        worker: number of the worker that made the batch; -1 without one.
        random_state: that worker's generator states.
        loader_state: `state_dict()` of a loader that keeps its own.
        loss: samples with broken files, of this batch and of those that were left out before it.
        left_out: batches without samples that were left out before it, where a position counts them.
        left_out_states: the workers that made them, with their generator states.
    """

    worker: int = -1
    random_state: RandomState = b""
    loader_state: Any = None
    loss: Loss = NO_LOSS
    left_out: int = 0
    left_out_states: tuple[tuple[int, RandomState], ...] = ()


NO_MARK = Mark()


@dataclass(frozen=True)
class PassStart:
    """Everything needed to begin a pass once more.

    Attributes:
        number: which pass, from 0.
        generators: states of the loader's and samplers' own generators before the pass.
        worker_generators: the same when the workers of this pass were started (persistent workers: an earlier pass).
        random_state: states of the global generators before the pass; empty where they do not matter.
        kept_workers: whether the workers of the pass before went on, so that no seed was drawn for new ones.
    """

    number: int
    generators: list[bytes] = field(default_factory=list)
    worker_generators: list[bytes] = field(default_factory=list)
    random_state: RandomState = b""
    kept_workers: bool = False


@dataclass(frozen=True)
class ResumePoint:
    """Where to enter a pass.

    Attributes:
        start: the pass.
        skip: batches of it that were consumed already.
        worker_states: generator states of the workers after their last consumed batch.
        random_state: global generator states at the checkpoint (batches made in the training process).
        loader_state: state of a loader that keeps its own.
    """

    start: PassStart
    skip: int
    worker_states: dict[int, RandomState] = field(default_factory=dict)
    random_state: RandomState = b""
    loader_state: Any = None


class Sampling(NamedTuple):
    """How a pass is cut into batches; a position within it means nothing under another one.

    Attributes:
        samples: samples in a pass; None when that is not known.
        batch_size: samples in a batch; None when it varies.
    """

    samples: int | None = None
    batch_size: int | None = None


def sampling_of(loader: Any) -> Sampling:
    """The sampling of a DataLoader over a map-style dataset."""
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return Sampling()
    try:
        return Sampling(len(loader.sampler), loader.batch_size)
    except (TypeError, NotImplementedError):
        return Sampling()


# Calls a function in the consumer's thread.
InConsumer = Callable[[Callable[[], Any]], Any]


def _call(function: Callable[[], Any]) -> Any:
    return function()


class Pass:
    """One traversal. `next` is called by one thread at a time; the rest may be called from another one.

    Attributes:
        is_lost: whether the pass cannot go on after what `next` raised.
        is_pending: whether the batch for which `next` raised may still come.
        begins_when_asked: whether the first batch may be made only while the consumer waits for it.
        in_consumer: calls a function in the thread that asks for batches, and returns what it returns.
        losses: samples with broken files that it met since the last batch.
        counts_left_out: whether a position within it counts the batches that were left out.
    """

    counts_left_out = False

    def __init__(self, start: PassStart, batches: Iterator[Any]) -> None:
        self.start = start
        self.batches = batches
        self.is_lost = False
        self.is_pending = False
        self.begins_when_asked = False
        self.in_consumer: InConsumer = _call
        self.losses = Losses()

    def next(self) -> tuple[Any, Mark]:
        """The next batch; raises StopIteration at the end, or what the source raises."""
        return next(self.batches), NO_MARK

    def last_mark(self) -> Mark:
        """What the source says after its end."""
        return NO_MARK

    def with_losses(self, mark: Mark) -> Mark:
        """The mark of a batch, or of the end, with what was lost on the way to it."""
        if not self.losses.loss:
            return mark
        loss, left_out = self.losses.take()
        states = tuple((one.worker, one.random_state) for one in left_out if one is not None)
        return mark._replace(loss=loss, left_out=len(left_out) * self.counts_left_out, left_out_states=states)

    def cancel(self) -> None:
        """Asks a thread that waits in `next` to leave it soon."""

    def has_dead_worker(self) -> bool:
        """Whether a worker that still has work to do is gone."""
        return False

    def free_reader(self, is_free: threading.Event, seconds: float) -> None:
        """Frees a thread that is stuck in `next` after a worker died."""

    def stop(self) -> None:
        """Gives back what the pass holds. Idempotent."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # it is executing: stuck in a thread that was given up
                close()  # a generator: its `finally` blocks run now, not at some garbage collection


class Source:
    """A wrapped loader.

    Attributes:
        runs_ahead: whether a thread may make batches before they are asked for, without changing global draws.
        runs_in_thread: whether a thread makes the batches, ahead or not.
        crosses_passes: whether that holds for the next pass as well.
        keeps_random_state: whether batches draw from the training process's global generators.
        keeps_workers: whether workers, and their generators, go on to the next pass.
        pins_batches: whether batches come in page-locked memory that nobody writes to again.
        can_reenter: whether a pass that was begun can be entered once more where the consumer stands.
        guard: what becomes of samples with broken files.
    """

    runs_ahead = False
    runs_in_thread = False
    crosses_passes = False
    keeps_random_state = False
    keeps_workers = False
    pins_batches = False
    can_reenter = False

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.guard = LoaderGuard()

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader; 0 when it has or knows none."""
        return int(getattr(self.loader, "num_workers", 0) or 0)

    def renew(self) -> None:
        """After an attribute of the loader was set: the next pass goes by it."""

    def make_slabs(self, batches: int) -> Slabs | None:
        """Before the first pass: memory that workers write to, for `batches` beside those that they make ahead."""
        return None

    def length(self) -> int | None:
        """Batches in a pass, or None when the loader does not know."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def sampling(self) -> Sampling:
        """What a position in a pass refers to, where that is known."""
        return Sampling()

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        """Begins pass `number`, in the calling thread: workers are started and seeded here."""
        raise NotImplementedError

    def set_epoch(self, number: int) -> None:
        """Tells the samplers the number of the pass, where they want to know."""
        seen: list[Any] = []
        loader = self.loader
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
            tell = getattr(owner, "set_epoch", None)
            if callable(tell) and all(owner is not one for one in seen):
                seen.append(owner)
                tell(number)

    def next_start(self, number: int) -> PassStart:
        """How pass `number` would begin if it began now."""
        return PassStart(number)

    def rewind(self, start: PassStart) -> None:
        """Takes back what a pass drew that was begun ahead and of which nothing was consumed."""

    def leave(self, left: Pass, consumed: int) -> None:
        """Takes back what a pass drew ahead of the batches that were consumed of it."""

    def forget_workers(self) -> None:
        """After a worker died: the next pass starts new ones."""

    def not_covered(self) -> list[str]:
        """What a resumed run could draw differently, in words."""
        return []

    def describe_empty(self) -> str:
        """Why a pass may have had no batch."""
        return "Give a loader with at least one batch; with drop_last=True it needs at least batch_size samples."

    def close(self) -> None:
        """Gives back what outlives a pass."""


class IterableSource(Source):
    """Any iterable, traversed in the calling thread: what it draws comes in the plain loop's order."""

    keeps_random_state = True

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is None:
            return Pass(self._new_start(number), self._iterate())
        if resume.start.random_state:
            set_global_random_state(resume.start.random_state)
        batches = self._iterate()
        for _ in range(resume.skip):
            next(batches, None)
        if resume.random_state:
            set_global_random_state(resume.random_state)
        return Pass(resume.start, batches)

    def _new_start(self, number: int) -> PassStart:
        return PassStart(number, random_state=global_random_state())

    def _iterate(self) -> Iterator[Any]:
        return iter(self.loader)

    def not_covered(self) -> list[str]:
        return [
            f"{type(self.loader).__name__} is not a DataLoader: batches that were consumed are made again and dropped, "
            "and its own random generators are not recorded"
        ]

    def describe_empty(self) -> str:
        if isinstance(self.loader, Iterator):
            return "A generator object can be traversed once only: pass the generator function, or a list."
        return super().describe_empty()


class FactorySource(IterableSource):
    """A function that returns an iterator of batches, called once a pass.

    It runs in the producer's thread, so that a wait for it can end with a timeout, but each batch is begun only when
    it is asked for: what the function draws from global generators comes in the plain loop's order.
    """

    runs_in_thread = True

    def __init__(self, loader: Callable[[], Any]) -> None:
        super().__init__(loader)

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader; 0 when it has or knows none."""
        return int(getattr(self.loader, "num_workers", 0) or 0)

    def length(self) -> int | None:
        return None

    def _iterate(self) -> Iterator[Any]:
        return iter(self.loader())
