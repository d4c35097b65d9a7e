"""Where batches come from: one traversal ("pass") of a wrapped loader after the other, each of them resumable."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import GeneratorType
from typing import Any

from torch.utils.data import DataLoader

from torch_sink.common.random_state import (
    RandomState,
    find_generators,
    generator_states,
    global_random_state,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.common.slabs import Slabs
from torch_sink.damage.report import DecodeReport, policy_of_thread
from torch_sink.damage.samples import PartialBatch
from torch_sink.sink.position import PassStart, ResumePoint
from torch_sink.sink.recording import IndexLists, RecordedBatch, draws_of
from torch_sink.sink.workers import PassCancelled, WorkerGuard


@dataclass(slots=True)
class Item:
    """One thing that a pass gives, in order: a batch, its end, or an exception.

    What it says about the source, at the moment after it was made, is applied when it is consumed.
    """

    start: PassStart
    batch: Any = None
    slot: int = -1
    worker_states: dict[int, RandomState] | None = None  # of those that made it and what was left out before it
    loader_state: Any = None  # `state_dict()` of a loader that keeps its own
    loss: DecodeReport | None = None  # samples with broken files, of this batch and of those left out before it
    left_out: int = 0  # batches without samples that were left out before it
    error: BaseException | None = None
    is_end: bool = False
    is_lost: bool = False  # the pass cannot go on after the error


class Pass:
    """One traversal of a source. A source does not know its passes, or a cycle would keep their workers.

    Args:
        start: how to begin this pass once more.
        batches: the loader's iterator.
        drop: results to drop before the first batch: placeholders, or batches that were consumed already.
        lists: of indices, as the sampler gives them; None when that cannot be seen.
    """

    def __init__(
        self,
        source: Source,
        start: PassStart,
        batches: Iterator[Any],
        drop: int = 0,
        lists: IndexLists | None = None,
    ) -> None:
        self.source = source
        self.start = start
        self.batches = batches
        self.drop = drop
        self.lists = lists
        self.lost = DecodeReport()  # samples of the batches that were consumed
        self.left_out = 0  # batches without samples among these

    def receive(self) -> Item:
        """The next batch, or the end; what the source raises, as an item. One thread at a time may call this."""
        item = Item(self.start)
        try:
            try:
                with policy_of_thread(self.source.policy if self.source.makes_own_iterators else None):
                    self._next(item)
            except StopIteration as stop:
                self._check_end(stop)
                item.is_end = True
            item.loader_state = self.source.state_after(item)
        except PassCancelled:
            raise
        except BaseException as error:
            item.error, item.is_lost = error, self.source.is_broken
            worker, state = draws_of(error)
            if worker >= 0 and self.lists is not None:  # else a position counts no batches, or they are made again
                item.worker_states = {**(item.worker_states or {}), worker: state}
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
        is_left_out = True
        while is_left_out:
            batch, is_left_out = next(self.batches), False
            if isinstance(batch, PartialBatch):
                item.loss = batch.loss if item.loss is None else item.loss + batch.loss
                batch, is_left_out = batch.batch, batch.is_empty
                item.left_out += is_left_out
            if isinstance(batch, RecordedBatch):
                batch, worker, state = batch
                item.worker_states = {**(item.worker_states or {}), worker: state}
        item.batch = batch

    def _check_end(self, stop: StopIteration) -> None:
        """Raises what ended a pass before its end: the sampler's exception, or the dataset's own StopIteration."""
        if self.source.has_workers:
            came_early = bool(stop.args)  # an exception of a worker has a message
        else:
            came_early = self.lists is not None and not self.lists.is_exhausted
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


def make_again(batches: Iterator[Any], count: int) -> None:
    """Makes and drops batches that were consumed; what they raise was raised before the checkpoint."""
    for _ in range(count):
        with contextlib.suppress(Exception):
            next(batches)


def iterators_in(batches: Any) -> list[Any]:
    """The DataLoader iterators with workers that a generator is reading, or generators inside of it."""
    if "_workers_status" in getattr(batches, "__dict__", {}):
        return [batches]
    if not isinstance(batches, GeneratorType) or batches.gi_running:
        return []
    # Its variables, and what its loops go over: Python 3.10 keeps these in the frame.
    return [one for held in gc.get_referents(batches, batches.gi_frame) for one in iterators_in(held)]


class Source:
    """A wrapped loader: any iterable, traversed in the calling thread, so its draws keep the plain loop's order."""

    has_workers = False  # worker processes that are watched make the batches, so a thread may ask for them ahead
    runs_in_thread = False  # a thread makes the batches
    crosses_passes = False  # and those of the next pass before the consumer has seen the end of this one
    keeps_workers = False  # workers, and their generators, go on to the next pass
    pins_batches = False  # batches come in page-locked memory that nobody writes to again
    can_reenter = False  # a pass that was begun can be entered once more where the consumer stands
    can_start_over = True  # with pass 0, as if it were made anew
    makes_own_iterators = True  # the loader does, which go by the policy on broken files that holds in their thread

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.can_start_over = not isinstance(loader, Iterator)
        self.policy: str | None = None  # on broken files; None leaves it to the image backend
        self.guard: WorkerGuard | None = None  # of the latest iterator with workers
        # Of the loader and its samplers.
        self.generators = find_generators(loader) if isinstance(loader, DataLoader) else []

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader; 0 when it has or knows none."""
        return int(getattr(self.loader, "num_workers", 0) or 0)

    @property
    def is_broken(self) -> bool:
        """Whether the pass cannot go on: a worker died, or a result is lost."""
        return self.guard is not None and self.guard.is_broken

    def renew(self) -> None:
        """After an attribute of the loader was set: the next pass goes by it."""

    def is_as_it_was(self) -> bool:
        """Whether the loader is there and says what it said when the source was made."""
        return self.loader is not None

    def make_slabs(self, batches: int) -> Slabs | None:
        """Before the first pass: memory that workers write to, for `batches` beside those that they make ahead.

        Returns:
            What may be page-locked, because nobody but the ring copies from it.
        """
        return None

    def described(self) -> dict[str, Any]:
        """What a state says of the loader: what may differ in a resumed run, and, where they are known, `num_workers`
        and how a pass is cut into batches, for a position in it means nothing under another one.
        """
        return {
            "num_workers": self.num_workers,
            "samples": None,
            "batch_size": None,
            "not_covered": self.not_covered(),
        }

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        """Begins pass `number`, or enters it, in the calling thread: workers are started and seeded here."""
        self.set_epoch(number)
        if resume is None:
            return self._open(self.new_start(number))
        set_generator_states(self.generators, resume.start.generators)
        if resume.start.random_state:
            set_global_random_state(resume.start.random_state)
        opened = self._open(resume.start)
        make_again(opened.batches, resume.skip)
        if resume.random_state:
            set_global_random_state(resume.random_state)
        return opened

    def _open(self, start: PassStart) -> Pass:
        with policy_of_thread(self.policy):
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
        if self.guard is not None:
            self.guard.is_cancelled = True

    def has_dead_worker(self) -> bool:
        """Whether a worker that still has work to do is gone."""
        return self.guard is not None and self.guard.has_dead_worker()

    def free_reader(self, is_free: Callable[[], bool], seconds: float) -> None:
        """Frees a thread that is stuck in `Pass.receive` after a worker died."""
        if self.guard is not None:
            self.guard.free_reader(is_free, seconds)

    def end_pass(self, batches: Iterator[Any]) -> None:
        """Stops the workers of a pass that do not go on to the next one, or cannot."""

    def forget_workers(self) -> None:
        """Stops those that the loader keeps, or that are left of a lost pass: the next pass starts new ones."""

    def not_covered(self) -> list[str]:
        """What a resumed run could draw differently, in words."""
        return [
            f"{type(self.loader).__name__} makes its batches itself: those that were consumed are made again and "
            "dropped, and its own random generators are not recorded"
        ]

    def stop_workers(self, batches: Iterator[Any]) -> None:
        """At the end of all passes: torch would wait 5 s for each worker of a generator that is dropped.

        Those that a DataLoader keeps may be somebody else's.
        """
        for iterator in iterators_in(batches):
            if not iterator._persistent_workers:
                WorkerGuard(iterator).stop()

    def close(self) -> None:
        """Stops the workers of iterators that a DataLoader, or one inside of the loader, keeps for its next pass."""
        for owner in (self.loader, *getattr(self.loader, "__dict__", {}).values()):
            attributes = vars(owner) if isinstance(owner, DataLoader) else {}
            for name, iterator in list(attributes.items()):
                if hasattr(iterator, "_workers_status"):
                    WorkerGuard(iterator).stop()
                    attributes[name] = None


class FactorySource(Source):
    """A function that returns an iterator of batches, called once a pass.

    It runs in the producer's thread, so that a wait for it can end with a timeout, but each batch is begun only when
    it is asked for: what the function draws from global generators comes in the plain loop's order.
    """

    runs_in_thread = True

    def _open(self, start: PassStart) -> Pass:
        return Pass(self, start, iter(self.loader()))
