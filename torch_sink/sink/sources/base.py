"""Where batches come from: one traversal ("pass") of a wrapped loader after the other, each of them resumable."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch_sink.common.random_state import RandomState, global_random_state, set_global_random_state
from torch_sink.common.slabs import Slabs
from torch_sink.damage.loaders import LoaderGuard, Losses
from torch_sink.damage.report import NO_LOSS, Loss
from torch_sink.sink.sources.guard import WorkerTimeout
from torch_sink.sink.sources.position import PassStart, ResumePoint, Sampling
from torch_sink.sink.sources.recording import RecordedBatch, ResumableSampler


class Mark(NamedTuple):
    """What a batch says about its source at the moment after it was made; applied when the batch is consumed."""

    worker: int = -1  # that made it
    random_state: RandomState = b""  # of that worker's generators
    loader_state: Any = None  # `state_dict()` of a loader that keeps its own
    loss: Loss = NO_LOSS  # samples with broken files, of this batch and of those that were left out before it
    left_out: int = 0  # batches without samples that were left out before it, where a position counts them
    left_out_states: tuple[tuple[int, RandomState], ...] = ()  # the workers that made them, with their generators


NO_MARK = Mark()


def in_this_thread(function: Callable[[], Any]) -> Any:
    """What `Pass.in_consumer` is where the consumer's thread makes the batches."""
    return function()


class Pass:
    """One traversal. `next` is called by one thread at a time; the rest may be called from another one.

    Args:
        start: how to begin this pass once more.
        batches: the loader's iterator.
        watch: guards its workers (a `WorkerGuard` or a `LoaderWatch`); None without any.
        drop: results to drop before the first batch: placeholders, or batches that were consumed already.
        keeps_workers: whether the workers go on to the next pass.
        sampler: gives the indices; None when it cannot be seen.
    """

    def __init__(
        self,
        start: PassStart,
        batches: Iterator[Any],
        watch: Any = None,
        *,
        drop: int = 0,
        keeps_workers: bool = False,
        sampler: ResumableSampler | None = None,
    ) -> None:
        self.start = start
        self.batches = batches
        self.watch = watch
        self.drop = drop
        self.keeps_workers = keeps_workers
        self.sampler = sampler
        self.draws = None if sampler is None else sampler.draws
        self.is_lost = False  # the pass cannot go on after what `next` raised
        self.is_pending = False  # the batch for which `next` raised may still come
        self.begins_when_asked = False  # the first batch may be made only while the consumer waits for it
        self.in_consumer: Callable[[Callable[[], Any]], Any] = in_this_thread
        self.active: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # while it runs
        self.losses = Losses()  # samples with broken files that it met since the last batch

    def next(self) -> tuple[Any, Mark]:
        """The next batch; raises StopIteration at the end, or what the source raises."""
        while self.drop:
            self.drop -= 1
            self._drop_one()
            self.losses.take()
        try:
            batch = next(self.batches)
        except StopIteration as stop:
            self._check_end(stop)
            raise
        except Exception as error:
            self.is_lost, self.is_pending = self._is_broken(), isinstance(error, WorkerTimeout)
            raise
        if isinstance(batch, RecordedBatch):
            return batch.batch, Mark(batch.worker, batch.random_state)
        return batch, NO_MARK

    def _drop_one(self) -> None:
        try:
            next(self.batches)
        except StopIteration:
            self.drop = 0
        except Exception:
            # What a dropped batch raises was raised before the checkpoint already; a dead worker is another matter.
            self.is_lost = self._is_broken()
            if self.is_lost:
                raise

    def _check_end(self, stop: StopIteration) -> None:
        """Raises what ended a pass before its end: the sampler's exception, or the dataset's own StopIteration."""
        if self.watch is not None:
            came_early = bool(stop.args)  # an exception of a worker has a message
        else:
            came_early = self.sampler is not None and not self.sampler.is_exhausted
        if came_early:
            raise RuntimeError(
                "the dataset or collate_fn raised StopIteration, which a DataLoader takes for the end of the pass; "
                f"raise another exception. It said: {stop}"
            ) from stop
        if self.sampler is not None:
            self.sampler.raise_failure()

    def _is_broken(self) -> bool:
        return self.watch is not None and self.watch.broken

    def last_mark(self) -> Mark:
        """What the source says after its end."""
        return NO_MARK

    def with_losses(self, mark: Mark) -> Mark:
        """The mark of a batch, or of the end, with what was lost on the way to it."""
        if not self.losses.loss:
            return mark
        loss, left_out = self.losses.take()
        states = tuple((one.worker, one.random_state) for one in left_out if one is not None)
        counted = 0 if self.sampler is None else len(left_out)
        return mark._replace(loss=loss, left_out=counted, left_out_states=states)

    def cancel(self) -> None:
        """Asks a thread that waits in `next` to leave it, within half a second where it waits for workers."""
        if self.watch is not None:
            self.watch.cancel()

    def has_dead_worker(self) -> bool:
        """Whether a worker that still has work to do is gone."""
        return self.watch is not None and self.watch.dead()

    def free_reader(self, is_free: threading.Event, seconds: float) -> None:
        """Frees a thread that is stuck in `next` after a worker died."""
        if self.watch is not None:
            self.watch.free_reader(is_free, seconds)

    def stop(self) -> None:
        """Gives back what the pass holds. Idempotent."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # it is executing: stuck in a thread that was given up
                close()  # a generator: its `finally` blocks run now, not at some garbage collection
        if self.watch is not None:
            self.watch.end_pass(keeps_workers=self.keeps_workers)


class Source:
    """A wrapped loader: any iterable, traversed in the calling thread, so its draws keep the plain loop's order."""

    runs_in_thread = False  # a thread makes the batches
    runs_ahead = False  # before they are asked for, which changes no global draws
    crosses_passes = False  # and those of the next pass
    keeps_random_state = True  # batches draw from the training process's global generators
    keeps_workers = False  # workers, and their generators, go on to the next pass
    pins_batches = False  # batches come in page-locked memory that nobody writes to again
    can_reenter = False  # a pass that was begun can be entered once more where the consumer stands

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.guard = LoaderGuard()  # what becomes of samples with broken files

    @property
    def num_workers(self) -> int:
        """Worker processes of the loader; 0 when it has or knows none."""
        return int(getattr(self.loader, "num_workers", 0) or 0)

    def renew(self) -> None:
        """After an attribute of the loader was set: the next pass goes by it."""

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Around all that opens or runs a pass, in the thread that does so."""
        return contextlib.nullcontext()

    def make_slabs(self, batches: int) -> Slabs | None:
        """Before the first pass: memory that workers write to, for `batches` beside those that they make ahead.

        Returns:
            What may be page-locked, because nobody but the ring copies from it.
        """
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
        return Pass(start, iter(self.loader))

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
        return PassStart(number, random_state=global_random_state())

    def next_start(self, number: int) -> PassStart:
        """How pass `number` would begin if it began now."""
        return PassStart(number)

    def rewind(self, start: PassStart) -> None:
        """Takes back what a pass drew that was begun ahead and of which nothing was consumed."""

    def leave(self, left: Pass, consumed: int) -> None:
        """Takes back what a pass drew ahead of the batches that were consumed of it."""

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
        return Pass(start, iter(self.loader()))
