"""Where batches come from: one traversal ("pass") of a wrapped loader after the other, each of them resumable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_sink.common.random_state import (
    RandomState,
    generator_states,
    global_random_state,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.common.slabs import Slabs
from torch_sink.damage.loaders import LoaderGuard
from torch_sink.damage.report import DecodeReport
from torch_sink.sink.position import PassStart, ResumePoint
from torch_sink.sink.recording import IndexLists, RecordedBatch, draws_of
from torch_sink.sink.workers import PassCancelled, WorkerGuard, WorkerTimeout


@dataclass(slots=True)
class Item:
    """One thing that a pass gives, in order: a batch, its end, or an exception.

    What it says about the source, at the moment after it was made, is applied when it is consumed.
    """

    start: PassStart
    batch: Any = None
    slot: int = -1
    worker: int = -1  # that made it; -1 where that is not known
    random_state: RandomState = b""  # of that worker's generators
    loader_state: Any = None  # `state_dict()` of a loader that keeps its own
    loss: DecodeReport | None = None  # samples with broken files, of this batch and of those left out before it
    left_out: int = 0  # batches without samples that were left out before it, where a position counts them
    left_out_states: dict[int, RandomState] | None = None  # of the workers that made them
    error: BaseException | None = None
    is_end: bool = False
    is_lost: bool = False  # the pass cannot go on after the error
    is_pending: bool = False  # the batch in whose place the error comes may still come itself


def in_this_thread(function: Callable[[], Any]) -> Any:
    """Calls `function`: the `in_consumer` of a pass that the consumer's thread runs itself."""
    return function()


class Pass:
    """One traversal of a source. A source does not know its passes, or a cycle would keep their workers.

    Args:
        start: how to begin this pass once more.
        batches: the loader's iterator.
        drop: results to drop before the first batch: placeholders, or batches that were consumed already.
        lists: of indices, as the sampler gives them; None when that cannot be seen.
        begins_when_asked: the first batch may be made only while the consumer waits for it.
    """

    def __init__(
        self,
        source: Source,
        start: PassStart,
        batches: Iterator[Any],
        drop: int = 0,
        lists: IndexLists | None = None,
        *,
        begins_when_asked: bool = False,
    ) -> None:
        self.source = source
        self.start = start
        self.batches = batches
        self.drop = drop
        self.lists = lists
        self.begins_when_asked = begins_when_asked
        self.lost = DecodeReport()  # samples of the batches that were consumed
        self.left_out = 0  # batches without samples among these

    def receive(self, in_consumer: Callable[[Callable[[], Any]], Any] = in_this_thread) -> Item:
        """The next batch, or the end; what the source raises, as an item. One thread at a time may call this.

        Args:
            in_consumer: calls a function in the consumer's thread, which starts the workers.
        """
        item = Item(self.start)
        self.begins_when_asked = False
        try:
            with self.source.active(in_consumer):
                try:
                    self._next(item)
                except StopIteration as stop:
                    self._check_end(stop)
                    item.is_end = True
                item.loader_state = self.source.state_after(item)
            if self.source.damage.loss:
                item.loss, left_out = self.source.damage.take()
                item.left_out = 0 if self.lists is None else len(left_out)
                item.left_out_states = {one.worker: one.random_state for one in left_out if one is not None}
        except PassCancelled:
            raise
        except BaseException as error:
            item.error, draws = error, draws_of(error)
            if self.lists is not None:  # else a position counts no batches, or they are made again
                item.worker, item.random_state = draws
            item.is_lost, item.is_pending = self.source.is_broken, isinstance(error, WorkerTimeout)
        return item

    def _next(self, item: Item) -> None:
        while self.drop:
            self.drop -= 1
            try:
                next(self.batches)
            except StopIteration:
                self.drop = 0
            except PassCancelled:
                raise
            except Exception:
                # What a dropped batch raises was raised before the checkpoint; a dead worker is another matter.
                if self.source.is_broken:
                    raise
            self.source.damage.take()
        item.batch = next(self.batches)
        if isinstance(item.batch, RecordedBatch):
            item.batch, item.worker, item.random_state = item.batch

    def _check_end(self, stop: StopIteration) -> None:
        """Raises what ended a pass before its end: the sampler's exception, or the dataset's own StopIteration."""
        if self.lists is not None and not self.source.has_workers:
            came_early = not self.lists.is_exhausted
        else:
            came_early = self.source.has_workers and bool(stop.args)  # an exception of a worker has a message
        if came_early:
            raise RuntimeError(
                "the dataset or collate_fn raised StopIteration, which a DataLoader takes for the end of the pass; "
                f"raise another exception. It said: {stop}"
            ) from stop
        if self.lists is not None:
            self.lists.raise_failure()

    def stop(self) -> None:
        """Gives back what the pass holds. Idempotent."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # it is executing: stuck in a thread that was given up
                close()  # a generator: its `finally` blocks run now, not at some garbage collection
        self.source.end_pass(self.batches)


class Source:
    """A wrapped loader: any iterable, traversed in the calling thread, so its draws keep the plain loop's order."""

    has_workers = False  # worker processes that are watched make the batches, so a thread may ask for them ahead
    runs_in_thread = False  # a thread makes the batches
    crosses_passes = False  # and those of the next pass before the consumer has seen the end of this one
    keeps_workers = False  # workers, and their generators, go on to the next pass
    pins_batches = False  # batches come in page-locked memory that nobody writes to again
    can_reenter = False  # a pass that was begun can be entered once more where the consumer stands
    is_guarding = False  # workers are watched
    hands_over = False  # what the workers made goes into the slots, and nobody else moves it

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.damage = LoaderGuard()  # what becomes of samples with broken files
        self.layout = torch.contiguous_format  # of image batches in the slots
        self.guards: list[WorkerGuard] = []  # of each iterator with workers
        self.is_cancelled = False
        self.generators: list[torch.Generator] = []  # of the loader and its samplers

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader; 0 when it has or knows none."""
        return int(getattr(self.loader, "num_workers", 0) or 0)

    @property
    def is_broken(self) -> bool:
        """Whether the pass cannot go on: a worker died, or a result is lost."""
        return any(one.is_broken for one in self.guards)

    def renew(self) -> None:
        """After an attribute of the loader was set: the next pass goes by it."""

    def active(self, in_consumer: Callable[..., Any] = in_this_thread) -> contextlib.AbstractContextManager[None]:
        """Around all that opens or runs a pass, in the thread that does so."""
        return contextlib.nullcontext()

    def make_slabs(self, batches: int) -> Slabs | None:
        """Before the first pass: memory that workers write to, for `batches` beside those that they make ahead.

        Returns:
            What may be page-locked, because nobody but the ring copies from it.
        """
        return None

    def sampling(self) -> dict[str, int | None]:
        """How a pass is cut into batches, where that is known: a position in it means nothing under another one."""
        return {"samples": None, "batch_size": None}

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        """Begins pass `number`, or enters it, in the calling thread: workers are started and seeded here."""
        self.set_epoch(number)
        if resume is None:
            return self._open(self.new_start(number))
        if resume.start.random_state:
            set_global_random_state(resume.start.random_state)
        opened = self._open(resume.start)
        for _ in range(resume.skip):
            next(opened.batches, None)
        if resume.random_state:
            set_global_random_state(resume.random_state)
        return opened

    def _open(self, start: PassStart) -> Pass:
        return Pass(self, start, iter(self.loader))

    def set_epoch(self, number: int) -> None:
        """Tells the samplers the number of the pass, where they want to know."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        owners = (getattr(self.loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        for owner in {id(owner): owner for owner in owners}.values():
            tell = getattr(owner, "set_epoch", None)
            if callable(tell):
                tell(number)

    def new_start(self, number: int) -> PassStart:
        """How pass `number`, which begins now, began."""
        return replace(self.next_start(number), random_state=b"" if self.has_workers else global_random_state())

    def next_start(self, number: int) -> PassStart:
        """How pass `number` would begin if it began now."""
        return PassStart(number, generator_states(self.generators))

    def state_after(self, item: Item) -> Any:
        """The state of a loader that keeps its own, after a batch or the end."""
        return None

    def rewind(self, start: PassStart) -> None:
        """Takes back what a pass drew that was begun ahead and of which nothing was consumed."""
        set_generator_states(self.generators, start.generators)

    def leave(self, left: Pass, consumed: int) -> None:
        """Takes back what a pass drew ahead of the batches that were consumed of it."""

    def cancel(self) -> None:
        """Asks a thread that waits in `Pass.receive` to leave it, within half a second where it waits for workers."""
        self.is_cancelled = True
        for one in self.guards:
            one.is_cancelled = True

    def has_dead_worker(self) -> bool:
        """Whether a worker that still has work to do is gone."""
        return any(one.has_dead_worker() for one in self.guards)

    def free_reader(self, is_free: Callable[[], bool], seconds: float) -> None:
        """Frees a thread that is stuck in `Pass.receive` after a worker died."""
        for one in self.guards:
            if one.is_polling or one.has_dead_worker():
                one.free_reader(is_free, seconds)

    def end_pass(self, batches: Iterator[Any]) -> None:
        """Stops the workers of a pass that do not go on to the next one, or cannot."""

    def forget_workers(self) -> None:
        """Stops those that the loader keeps, or that are left of a lost pass: the next pass starts new ones."""

    def not_covered(self) -> list[str]:
        """What a resumed run could draw differently, in words."""
        return [
            f"{type(self.loader).__name__} is not a DataLoader: batches that were consumed are made again and dropped, "
            "and its own random generators are not recorded"
        ]

    def close(self) -> None:
        """Gives back what outlives a pass."""


class FactorySource(Source):
    """A function that returns an iterator of batches, called once a pass.

    It runs in the producer's thread, so that a wait for it can end with a timeout, but each batch is begun only when
    it is asked for: what the function draws from global generators comes in the plain loop's order.
    """

    runs_in_thread = True

    def _open(self, start: PassStart) -> Pass:
        return Pass(self, start, iter(self.loader()))
