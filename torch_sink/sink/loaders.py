"""DataLoaders as sources: what is watched of all of them, and how a plain one is resumed."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torch_sink.common.random_state import (
    RandomState,
    find_generators,
    find_private_generators,
    generator_states,
    global_random_state,
    is_seeded,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.common.slab_writer import SlabCollate
from torch_sink.common.slabs import Slabs
from torch_sink.damage.loaders import give_partial_batches
from torch_sink.damage.report import or_current, policy_of_thread
from torch_sink.errors import add_hints
from torch_sink.sink.position import PassStart, ResumePoint
from torch_sink.sink.recording import RecordingCollate, ReportingContext, ResumableSampler, WorkerInit
from torch_sink.sink.source import Pass, Source, make_again
from torch_sink.sink.workers import WorkerGuard

_CONTEXT = "_DataLoader__multiprocessing_context"
_OF_THE_COPY = ("_iterator", "_get_iterator", "batch_sampler")


def said_by(loader: DataLoader[Any]) -> dict[str, Any]:
    """The attributes by which a DataLoader makes its iterators, and the generators that it draws from."""
    said = {name: value for name, value in vars(loader).items() if not name.startswith("_") or name == _CONTEXT}
    return said | {f"generator {number}": one for number, one in enumerate(find_generators(loader))}


# Workers of two loaders are not started at the same time: libraries that watch forks (filelock) refuse to fork while
# another thread does.
_starting = threading.RLock()


class WatchedSource(Source):
    """A loader whose iterators come from DataLoader itself: its workers are guarded, and write to slabs.

    What is put around the user's functions sits on a shallow copy; the user's own loader is not touched.
    """

    can_reenter = True
    makes_own_iterators = False
    sends_states = False  # workers send their state beside each batch

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._said = said_by(loader)
        self.has_workers = self.runs_in_thread = loader.num_workers > 0
        self.keeps_workers = self.has_workers and loader.persistent_workers
        self.pins_batches = self.has_workers and loader.pin_memory
        self.is_map_style = not isinstance(loader.dataset, IterableDataset)
        self.slabs: Slabs | None = None  # written to by the workers of one iterator at a time
        self.slab_writers: list[Any] = []
        self._writing: Callable[[], Any] = lambda: None  # the iterator that these belong to
        self.records = False  # workers add their generator states to their batches
        self.states: dict[int, RandomState] = {}  # of workers that go on where others were
        self.placeholders = 0  # workers whose first batch is an empty one
        self.copy: Any = copy.copy(loader)
        # Not through attribute assignment, which a DataLoader refuses after it was made.
        vars(self.copy).update(_iterator=None, _get_iterator=functools.partial(_make, weakref.ref(self)))

    def renew(self) -> None:
        news = {name: value for name, value in vars(self.loader).items() if name not in _OF_THE_COPY}
        vars(self.copy).update(news)

    def is_as_it_was(self) -> bool:
        now = {} if self.loader is None else said_by(self.loader)
        return now.keys() == self._said.keys() and all(now[name] is self._said[name] for name in now)

    def make_slabs(self, batches: int) -> Slabs | None:
        """Slabs for what each worker makes ahead, and for its part of the batches that are in use."""
        workers, ahead = self.loader.num_workers, self.loader.prefetch_factor or 1
        with contextlib.suppress(OSError):
            self.slabs = Slabs(workers, ahead + -(-batches // workers)) if workers else None
        return self.slabs

    def described(self) -> dict[str, Any]:
        loader, samples = self.loader, None
        if loader.batch_size is not None and self.is_map_style:
            with contextlib.suppress(TypeError, NotImplementedError):
                samples = len(loader.sampler)
        cut = {"samples": samples, "batch_size": None if samples is None else loader.batch_size}
        return {"num_workers": loader.num_workers, **cut, "not_covered": self.not_covered()}

    def make_iterator(self) -> Any:
        """A new iterator of the copy, whose workers write to slabs and report what they cannot send."""
        loader, made_with, policy = self.loader, vars(self.copy), or_current(self.policy)
        slabs = self._free_slabs()
        if self.has_workers:
            collate = loader.collate_fn if slabs is None else SlabCollate(loader.collate_fn, slabs)
            made_with["collate_fn"] = RecordingCollate(collate, self.placeholders) if self.records else collate
            made_with["worker_init_fn"] = WorkerInit(loader.worker_init_fn, self.states, policy)
            context = vars(loader)[_CONTEXT]  # its setter takes torch's only
            made_with[_CONTEXT] = ReportingContext(context, sends_states=self.sends_states)
        with policy_of_thread(policy):
            iterator = type(self.copy)._get_iterator(self.copy)
        give_partial_batches(iterator, policy)
        if self.has_workers:
            self.guard = WorkerGuard(iterator)
        if slabs is not None:
            self.slab_writers, self._writing = getattr(iterator, "_workers", []), weakref.ref(iterator)
        return iterator

    def _free_slabs(self) -> Slabs | None:
        """The slabs, when the workers of no iterator write to them, for as many workers as they are made for."""
        slabs, writing = self.slabs, self._writing()
        if slabs is None or self.copy.num_workers > slabs.workers:
            return None
        if writing is not None and not getattr(writing, "_shutdown", True):
            return None
        slabs.begin_generation(self.slab_writers)
        return slabs

    def iterate(self) -> Iterator[Any]:
        """The iterator of a pass."""
        if self.is_broken:
            self.forget_workers()
        if self.guard is not None:
            self.guard.is_cancelled = False
        try:
            with _starting:
                return iter(self.copy)
        except Exception as error:
            add_hints(error)
            raise

    def end_pass(self, batches: Iterator[Any]) -> None:
        """Stops the workers that the loader does not keep for its next pass; all of them after a death."""
        guard = self.guard
        if guard is None or guard.iterator is not batches:
            return  # those of the next pass run already
        if guard.is_broken:
            self.forget_workers()
        elif not self.keeps_workers:
            guard.stop()

    def forget_workers(self) -> None:
        if self.guard is not None:
            self.guard.stop()
        self.guard, self.copy._iterator = None, None

    def close(self) -> None:
        self.forget_workers()


def _make(source_of: weakref.ref[WatchedSource]) -> Any:
    """Stands in for the copy's `_get_iterator`, which holds its source weakly, or the cycle would keep the workers."""
    source: Any = source_of()
    return source.make_iterator()


class DataLoaderSource(WatchedSource):
    """A plain DataLoader.

    To resume after batch k of a pass, the generators are put back to where they were when the pass began, the
    sampler's first k index lists are skipped without being loaded, and each worker starts from the state that it had
    after its last batch that was consumed.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.is_seeded = is_seeded(loader)
        self.crosses_passes = self.has_workers and self.is_seeded
        self.records = self.is_map_style and loader.batch_sampler is not None
        self.worker_generators: list[bytes] = []
        self.sampler = ResumableSampler(loader.batch_sampler, self.generators) if self.records else None
        if self.sampler is not None:
            vars(self.copy)["batch_sampler"] = self.sampler

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is not None:
            return self._begin_at(resume)
        start = replace(self.next_start(number), random_state=global_random_state())
        self.worker_generators = start.worker_generators
        return self._begin(start)

    def next_start(self, number: int) -> PassStart:
        generators = generator_states(self.generators)
        kept = self.keeps_workers and self.guard is not None and not self.is_broken
        return PassStart(number, generators, self.worker_generators if kept else generators, kept_workers=kept)

    def _begin_at(self, resume: ResumePoint) -> Pass:
        self.forget_workers()
        start, before = resume.start, global_random_state()
        self.worker_generators = start.worker_generators
        set_generator_states(self.generators, start.worker_generators)
        if start.random_state:
            set_global_random_state(start.random_state)
        drop = skip = resume.skip
        random_state = b"" if self.has_workers else resume.random_state
        if self.sampler is not None:
            # Out of order, a batch could overtake a placeholder and be dropped in its place.
            in_order = self.has_workers and getattr(self.loader, "in_order", True)
            drop = skip % self.loader.num_workers if in_order else 0
            after_skip = (lambda: set_global_random_state(random_state)) if random_state else None
            self.sampler.arm(skip, drop, self._at_last_iter(start), after_skip)
        opened = self._begin(start, drop, resume.worker_states)
        # The global generators are left as the checkpoint (batches made here) or the caller (workers) had them.
        if self.has_workers:
            if start.random_state:
                set_global_random_state(before)
            return opened
        make_again(opened.batches, drop)
        if random_state and not (self.records and skip):
            set_global_random_state(random_state)
        return opened

    def _at_last_iter(self, start: PassStart) -> Callable[[], None] | None:
        """Takes back the seed that starting workers drew, where in that pass those of the one before went on."""
        if not start.kept_workers and start.generators == start.worker_generators:
            return None
        before = global_random_state()

        def take_back() -> None:
            set_generator_states(self.generators, start.generators)
            set_global_random_state(before)

        return take_back

    def _begin(self, start: PassStart, drop: int = 0, states: dict[int, RandomState] | None = None) -> Pass:
        self.states, self.placeholders = states or {}, drop
        try:
            iterator = self.iterate()
        finally:
            if self.sampler is not None:
                self.sampler.arm()
        lists = None if self.sampler is None else self.sampler.lists
        return Pass(self, start, iterator, drop if self.has_workers else 0, lists)

    def leave(self, left: Pass, consumed: int) -> None:
        """Takes back what the sampler of a pass drew for batches that a plain loader would not have asked for yet."""
        if self.has_workers and left.lists is not None:
            left.lists.take_back(consumed + self.loader.num_workers * (self.loader.prefetch_factor or 0))

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
        elif not self.records:
            notes.append("batch_size=None: batches that were consumed are loaded again and dropped")
        if self.keeps_workers and not self.records:
            notes.append("persistent workers of such a loader start a resumed pass with fresh random generators")
        return notes
