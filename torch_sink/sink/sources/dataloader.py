"""A `torch.utils.data.DataLoader` as a source: guarded workers, passes that can be entered in the middle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torch_sink.common.random_state import (
    RandomState,
    find_private_generators,
    generator_states,
    global_random_state,
    is_seeded,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.errors import add_hints
from torch_sink.sink.sources.base import Pass
from torch_sink.sink.sources.position import PassStart, ResumePoint
from torch_sink.sink.sources.recording import ResumableSampler
from torch_sink.sink.sources.watch import WatchedSource

_OF_THE_COPY = ("_iterator", "_get_iterator", "batch_sampler")
UNSEEDED = "unseeded generator: later passes are shuffled and seeded by torch's global generator"


class DataLoaderSource(WatchedSource):
    """A plain DataLoader. What records sits on a shallow copy; the user's own loader is not touched."""

    can_reenter = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.copy = copy.copy(loader)
        super().__init__(loader, watched=self.copy)
        self.is_seeded = is_seeded(loader)
        self.crosses_passes = self.has_workers and self.is_seeded
        self.is_map_style = not isinstance(loader.dataset, IterableDataset)
        self.can_skip = self.is_map_style and loader.batch_sampler is not None
        self.worker_generators: list[bytes] = []
        self.sampler = ResumableSampler(loader.batch_sampler, self.generators) if self.can_skip else None
        self.watch.records = self.can_skip
        # Not through attribute assignment, which a DataLoader refuses after it was made.
        vars(self.copy)["_iterator"] = None
        if self.sampler is not None:
            vars(self.copy)["batch_sampler"] = self.sampler

    def renew(self) -> None:
        news = {name: value for name, value in vars(self.loader).items() if name not in _OF_THE_COPY}
        vars(self.copy).update(news)

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is not None:
            return self._begin_at(resume)
        start = replace(self.next_start(number), random_state=global_random_state())
        self.worker_generators = start.worker_generators
        return self._open(start)

    def next_start(self, number: int) -> PassStart:
        generators = generator_states(self.generators)
        kept = self._has_kept_workers()
        return PassStart(number, generators, self.worker_generators if kept else generators, kept_workers=kept)

    def _has_kept_workers(self) -> bool:
        return self.keeps_workers and bool(self.watch.guards) and not self.watch.broken

    def _begin_at(self, resume: ResumePoint) -> Pass:
        start = resume.start
        self.forget_workers()
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
        opened = self._open(start, drop, resume.worker_states)
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

    def _open(self, start: PassStart, drop: int = 0, worker_states: dict[int, RandomState] | None = None) -> Pass:
        if self.watch.broken:
            self.forget_workers()
        self.watch.begin(anew=False)
        self.watch.states, self.watch.placeholders = worker_states or {}, drop
        try:
            iterator = iter(self.copy)
        except Exception as error:
            add_hints(error)
            raise
        finally:
            if self.sampler is not None:
                self.sampler.disarm()
        guard, drop = self.watch.guard_of(iterator), drop if self.has_workers else 0
        return Pass(start, iterator, guard, drop=drop, keeps_workers=self.keeps_workers, sampler=self.sampler)

    def leave(self, left: Pass, consumed: int) -> None:
        """Takes back what the sampler of a pass drew for batches that a plain loader would not have asked for yet."""
        if self.has_workers and left.draws is not None:
            left.draws.take_back(consumed + self.loader.num_workers * (self.loader.prefetch_factor or 0))

    def not_covered(self) -> list[str]:
        notes = [] if self.is_seeded else [UNSEEDED]
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
