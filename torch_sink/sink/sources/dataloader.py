"""A `torch.utils.data.DataLoader` as a source: guarded workers, passes that can be entered in the middle."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torch_sink.common.hints import add_hints
from torch_sink.common.random_state import RandomState, global_random_state, set_global_random_state
from torch_sink.common.slab_writer import SlabCollate
from torch_sink.common.slabs import Slabs
from torch_sink.sink.sources.base import NO_MARK, Mark, Pass, PassStart, ResumePoint, Sampling, Source, sampling_of
from torch_sink.sink.sources.recording import (
    Draws,
    RecordedBatch,
    RecordingCollate,
    ResumableSampler,
    WorkerInit,
    find_generators,
    find_private_generators,
    generator_states,
    is_seeded,
    set_generator_states,
)
from torch_sink.sink.sources.watch import LoaderWatch
from torch_sink.sink.workers.guard import WorkerGuard, WorkerTimeout, guard
from torch_sink.sink.workers.result_queue import ReportingContext


class SampledPass(Pass):
    """A pass whose batches are made in the calling thread from a sampler's indices."""

    def __init__(self, start: PassStart, batches: Iterator[Any], sampler: ResumableSampler | None) -> None:
        super().__init__(start, batches)
        self.sampler = sampler
        self.counts_left_out = sampler is not None

    def next(self) -> tuple[Any, Mark]:
        try:
            return next(self.batches), NO_MARK
        except StopIteration as stop:
            check_end(stop, self.sampler, came_early=self.sampler is not None and not self.sampler.is_exhausted)
            raise


class WorkerPass(Pass):
    """A pass whose batches are made by worker processes.

    Args:
        start: how to begin this pass once more.
        batches: the loader's iterator.
        watch: guards its workers; None when they cannot be seen.
        drop: results to drop before the first batch: placeholders, or batches that were consumed already.
        keeps_workers: whether the workers go on to the next pass.
        sampler: gives the indices; None when it cannot be seen.
        draws: what it has drawn in this pass.
    """

    def __init__(
        self,
        start: PassStart,
        batches: Iterator[Any],
        watch: WorkerGuard | LoaderWatch | None,
        drop: int,
        keeps_workers: bool,
        sampler: ResumableSampler | None = None,
        draws: Draws | None = None,
    ) -> None:
        super().__init__(start, batches)
        self.sampler = sampler
        self.counts_left_out = sampler is not None
        self.draws = draws
        self.watch = watch
        self.drop = drop
        self.keeps_workers = keeps_workers

    def next(self) -> tuple[Any, Mark]:
        while self.drop:
            self.drop -= 1
            self._drop_one()
            self.losses.take()
        try:
            batch = next(self.batches)
        except StopIteration as stop:
            check_end(stop, self.sampler, came_early=bool(stop.args))  # an exception of a worker has a message
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

    def _is_broken(self) -> bool:
        return self.watch is not None and self.watch.broken

    def cancel(self) -> None:
        """Makes a wait for the workers end within half a second."""
        if self.watch is not None:
            self.watch.cancel()

    def has_dead_worker(self) -> bool:
        return self.watch is not None and self.watch.dead()

    def free_reader(self, is_free: threading.Event, seconds: float) -> None:
        if self.watch is not None:
            self.watch.free_reader(is_free, seconds)

    def stop(self) -> None:
        if self.watch is None:
            super().stop()
        elif not self.keeps_workers or self._is_broken():
            self.watch.stop()


def check_end(stop: StopIteration, sampler: ResumableSampler | None, *, came_early: bool) -> None:
    """Raises what ended a pass before its end: the sampler's exception, or the dataset's own StopIteration."""
    if came_early:
        raise RuntimeError(
            "the dataset or collate_fn raised StopIteration, which a DataLoader takes for the end of the pass; "
            f"raise another exception. It said: {stop}"
        ) from stop
    if sampler is not None:
        sampler.raise_failure()


class DataLoaderSource(Source):
    """A plain DataLoader. The wrappers that record sit on a shallow copy; the user's own loader is not touched."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.has_workers = loader.num_workers > 0
        self.runs_ahead = self.runs_in_thread = self.has_workers
        self.is_seeded = is_seeded(loader)
        self.crosses_passes = self.has_workers and self.is_seeded
        self.keeps_random_state = not self.has_workers
        self.keeps_workers = self.has_workers and loader.persistent_workers
        self.pins_batches = self.has_workers and loader.pin_memory
        self.is_map_style = not isinstance(loader.dataset, IterableDataset)
        self.can_skip = self.is_map_style and loader.batch_sampler is not None
        self.can_reenter = True
        self.generators = find_generators(loader)
        self.watch: WorkerGuard | None = None
        self.worker_generators: list[bytes] = []
        self.sampler = ResumableSampler(loader.batch_sampler, self.generators) if self.can_skip else None
        self.collate: Callable[[Any], Any] = loader.collate_fn
        self.slabs: Slabs | None = None
        self.slab_writers: list[Any] = []
        self.copy = self._wrapped_copy(loader)

    def _wrapped_copy(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        wrapped = copy.copy(loader)
        vars(wrapped)["_iterator"] = None
        if self.sampler is not None:
            # Not through attribute assignment, which a DataLoader refuses after it was made.
            vars(wrapped)["batch_sampler"] = self.sampler
        if self.has_workers:
            wrapped.collate_fn = self.collate if self.sampler is None else RecordingCollate(self.collate)
            wrapped.worker_init_fn = WorkerInit(loader.worker_init_fn)
            vars(wrapped)["_DataLoader__multiprocessing_context"] = ReportingContext(loader.multiprocessing_context)
        return wrapped

    def renew(self) -> None:
        self.collate = self.loader.collate_fn
        if self.slabs is not None:
            self.collate = SlabCollate(self.collate, self.slabs)
        iterator = vars(self.copy)["_iterator"]  # of persistent workers
        self.copy = self._wrapped_copy(self.loader)
        vars(self.copy)["_iterator"] = iterator

    def make_slabs(self, batches: int) -> Slabs | None:
        """Slabs for what each worker makes ahead, and for its part of the batches that are in use."""
        if self.has_workers:
            workers = self.loader.num_workers
            with contextlib.suppress(OSError):
                self.slabs = Slabs(workers, (self.loader.prefetch_factor or 1) + -(-batches // workers))
                self.renew()
        return self.slabs

    def sampling(self) -> Sampling:
        """What a position in a pass refers to, where that is known."""
        return sampling_of(self.loader)

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        return self._begin_new(number) if resume is None else self._begin_at(resume)

    def next_start(self, number: int) -> PassStart:
        """How pass `number` would begin if it began now."""
        generators = generator_states(self.generators)
        kept = self._has_kept_workers()
        return PassStart(number, generators, self.worker_generators if kept else generators, kept_workers=kept)

    def _has_kept_workers(self) -> bool:
        return self.keeps_workers and self.watch is not None and not self.watch.broken

    def _begin_new(self, number: int) -> Pass:
        start = replace(self.next_start(number), random_state=global_random_state())
        self.worker_generators = start.worker_generators
        return self._open(start, drop=0)

    def _begin_at(self, resume: ResumePoint) -> Pass:
        start = resume.start
        self._stop_kept_workers()
        before = global_random_state()
        self.worker_generators = start.worker_generators
        set_generator_states(self.generators, start.worker_generators)
        if start.random_state:
            set_global_random_state(start.random_state)
        drop = resume.skip
        if self.sampler is not None:
            # Out of order, a batch could overtake a placeholder and be dropped in its place.
            in_order = self.has_workers and getattr(self.loader, "in_order", True)
            drop = resume.skip % self.loader.num_workers if in_order else 0
            self.sampler.arm(
                resume.skip,
                placeholders=drop,
                at_last_iter=self._at_last_iter(start),
                after_skip=self._after_skip(resume),
            )
        collate, init = self.copy.collate_fn, self.copy.worker_init_fn
        if self.has_workers:
            self.copy.worker_init_fn = WorkerInit(self.loader.worker_init_fn, resume.worker_states)
            if self.sampler is not None:
                self.copy.collate_fn = RecordingCollate(self.collate, placeholders=drop)
        try:
            opened = self._open(start, drop)
        finally:
            self.copy.collate_fn, self.copy.worker_init_fn = collate, init
        return self._settle(opened, resume, before, drop)

    def _at_last_iter(self, start: PassStart) -> Callable[[], None] | None:
        """Takes back the seed that starting workers drew, where in that pass those of the one before went on."""
        if not start.kept_workers and start.generators == start.worker_generators:
            return None
        before = global_random_state()

        def take_back() -> None:
            set_generator_states(self.generators, start.generators)
            set_global_random_state(before)

        return take_back

    def _after_skip(self, resume: ResumePoint) -> Callable[[], None] | None:
        if self.has_workers or not resume.random_state:
            return None
        return lambda: set_global_random_state(resume.random_state)

    def _settle(self, opened: Pass, resume: ResumePoint, before: RandomState, drop: int) -> Pass:
        """Leaves the global generators as the checkpoint (batches made here) or the caller (workers) had them."""
        if self.has_workers:
            if resume.start.random_state:
                set_global_random_state(before)
            return opened
        for _ in range(drop):
            next(opened.batches, None)
        if resume.random_state and not (self.can_skip and resume.skip):
            set_global_random_state(resume.random_state)
        return opened

    def _open(self, start: PassStart, drop: int) -> Pass:
        if self.watch is not None and self.watch.broken:
            self._stop_kept_workers()
        if self.watch is not None:
            self.watch.allow()
        if self.slabs is not None and not self._has_kept_workers():
            self.slabs.begin_generation(self.slab_writers)
        try:
            with self.guard.making_iterator(self.copy):
                iterator = iter(self.copy)
        except Exception as error:
            add_hints(error)
            raise
        finally:
            if self.sampler is not None:
                self.sampler.disarm()
        self.guard.add(iterator)
        if not self.has_workers:
            return SampledPass(start, iterator, self.sampler)
        self.slab_writers = getattr(iterator, "_workers", [])
        if self.watch is None or self.watch.iterator is not iterator:
            self.watch = guard(iterator)
        draws = self.sampler.draws if self.sampler is not None else None
        return WorkerPass(start, iterator, self.watch, drop, self.keeps_workers, self.sampler, draws)

    def rewind(self, start: PassStart) -> None:
        """Takes back what a pass drew that was begun ahead and of which nothing was consumed."""
        set_generator_states(self.generators, start.generators)

    def leave(self, left: Pass, consumed: int) -> None:
        """Takes back what the sampler of a pass drew for batches that a plain loader would not have asked for yet."""
        if isinstance(left, WorkerPass) and left.draws is not None:
            left.draws.take_back(consumed + self.loader.num_workers * (self.loader.prefetch_factor or 0))

    def forget_workers(self) -> None:
        """After a worker died: the next pass starts new ones, also when they are persistent."""
        vars(self.copy)["_iterator"] = None
        self.watch = None

    def _stop_kept_workers(self) -> None:
        if self.watch is not None:
            self.watch.stop()
        self.forget_workers()

    def not_covered(self) -> list[str]:
        notes = []
        if not self.is_seeded:
            notes.append("unseeded generator: later passes are shuffled and seeded by torch's global generator")
        if not getattr(self.loader, "in_order", True):
            notes.append("in_order=False: batches are counted, but which ones came is not known")
        private = find_private_generators(self.loader.dataset)
        if private:
            notes.append(f"generators inside the dataset are not recorded: {', '.join(private)}")
        if not self.is_map_style:
            notes.append("IterableDataset: batches that were consumed are loaded again and dropped")
        elif not self.can_skip:
            notes.append("batch_size=None: batches that were consumed are loaded again and dropped")
        if self.keeps_workers and not self.can_skip:
            notes.append("persistent workers of such a loader start a resumed pass with fresh random generators")
        return notes

    def close(self) -> None:
        if self.watch is not None:
            self.watch.stop()
