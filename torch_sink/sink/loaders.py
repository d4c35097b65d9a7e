"""DataLoaders as sources: plain ones, wrapped ones, those with an `__iter__` of their own, and those with a state."""

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
from torch_sink.common.slabs import Slabs
from torch_sink.errors import add_hints
from torch_sink.sink.position import PassStart, ResumePoint
from torch_sink.sink.recording import ResumableSampler
from torch_sink.sink.source import Item, Pass
from torch_sink.sink.watched import WatchedSource, runs_workers

_OF_THE_COPY = ("_iterator", "_get_iterator", "batch_sampler")
UNSEEDED = "unseeded generator: later passes are shuffled and seeded by torch's global generator"


class DataLoaderSource(WatchedSource):
    """A plain DataLoader. What records sits on a shallow copy; the user's own loader is not touched.

    To resume after batch k of a pass, the generators are put back to where they were when the pass began, the
    sampler's first k index lists are skipped without being loaded, and each worker starts from the state that it had
    after its last batch that was consumed.
    """

    can_reenter = hands_over = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.copy = copy.copy(loader)
        super().__init__(loader, watched=self.copy)
        self.is_seeded = is_seeded(loader)
        self.crosses_passes = self.has_workers and self.is_seeded
        self.is_map_style = not isinstance(loader.dataset, IterableDataset)
        self.records = self.is_map_style and loader.batch_sampler is not None
        self.worker_generators: list[bytes] = []
        self.sampler = ResumableSampler(loader.batch_sampler, self.generators) if self.records else None
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
        return self._begin(start)

    def next_start(self, number: int) -> PassStart:
        generators = generator_states(self.generators)
        kept = self.keeps_workers and bool(self.guards) and not self.is_broken
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
        for _ in range(drop):
            next(opened.batches, None)
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
        self.prepare(anew=False)
        self.states, self.placeholders = states or {}, drop
        try:
            iterator = iter(self.copy)
        except Exception as error:
            add_hints(error)
            raise
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
        notes = [] if self.is_seeded else [UNSEEDED]
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


class WrapperSource(WatchedSource):
    """An object around DataLoaders that is none itself (timm's `PrefetchLoader`): traversed in the calling thread."""

    is_guarding = False

    def make_slabs(self, batches: int) -> Slabs | None:
        """Not for page-locking: the loader's own code may copy from a batch and let go of it before that is done."""
        super().make_slabs(batches + 1)  # it may hold one itself
        return None


class OwnIteratorSource(WrapperSource):
    """A DataLoader subclass with an `__iter__` of its own: traversed as it is, ahead when it has workers.

    Where `__iter__` is a generator, the producer's thread runs it. It may draw from the global generators and start
    workers before it yields, so the thread enters it only when the consumer waits for the first batch.
    """

    is_guarding = can_reenter = True
    is_under_way = False

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        if resume is not None:
            set_generator_states(self.generators, resume.start.generators)
        if not self.has_workers:
            return super().begin(number, resume)
        self.set_epoch(number)
        if resume is None:
            return self._begin(self.new_start(number), anew=self.is_under_way)
        return self._begin(resume.start, resume.skip, anew=True)

    def _begin(self, start: PassStart, drop: int = 0, *, anew: bool) -> Pass:
        self.prepare(anew=anew)
        iterator = iter(self.loader)
        self.add(iterator)
        self.is_under_way = True
        return Pass(self, start, iterator, drop, begins_when_asked=not runs_workers(iterator))

    def state_after(self, item: Item) -> Any:
        self.is_under_way = not item.is_end
        return None

    def not_covered(self) -> list[str]:
        notes = [
            f"{type(self.loader).__name__} has an __iter__ of its own: batches that were consumed are loaded again and "
            "dropped, and the workers' random draws differ"
        ]
        if not is_seeded(self.loader):
            notes.append(UNSEEDED)
        if self.kept() and not isinstance(self.loader.dataset, IterableDataset):
            notes.append("an iterator that is kept across passes shuffles ahead of the recorded generators")
        return notes


class StatefulSource(OwnIteratorSource):
    """A loader with `state_dict` and `load_state_dict` (`torchdata.StatefulDataLoader`); each batch carries its state.

    Without workers the loader's state lacks what its generators have drawn since, which the next pass depends on:
    their states are added. With workers it lacks those of the workers' global generators: they travel with the batches
    of a map-style dataset, as for a plain DataLoader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.generators = [] if self.has_workers else self.generators
        self.hands_over = getattr(type(loader).__iter__, "__module__", "").startswith("torchdata.")
        # A coarser snapshot is followed by batches that are made again, which draws.
        is_exact = getattr(loader, "snapshot_every_n_steps", 1) == 1
        self.records = self.has_workers and is_exact and not isinstance(loader.dataset, IterableDataset)

    def make_slabs(self, batches: int) -> Slabs | None:
        """For page-locking where torchdata's own code hands the batches over, which keeps none and copies nothing.

        Not with persistent workers: a plain loop over the loader goes on with them.
        """
        super().make_slabs(batches)
        return self.slabs if self.hands_over and not self.keeps_workers else None

    def state_after(self, item: Item) -> dict[str, Any]:
        super().state_after(item)
        return {"loader": self.loader.state_dict(), "generators": [one.get_state() for one in self.generators]}

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is not None:
            self.forget_workers()
            self._load(resume.loader_state)
        self.states = resume.worker_states if resume is not None and self.records else {}
        opened = self._begin(PassStart(number), anew=resume is not None)
        if resume is not None and not self.has_workers:
            # A state that was taken between passes has it in the pass's start.
            set_global_random_state(resume.random_state or resume.start.random_state)
        return opened

    def _load(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self.loader.load_state_dict(state["loader"])
        if self.generators:
            self.loader.state_dict()  # makes the loader's iterator, which draws, before the generators are set
        for generator, generator_state in zip(self.generators, state["generators"], strict=True):
            generator.set_state(generator_state.cpu())

    def not_covered(self) -> list[str]:
        """What the loader's own state and the recorded generators do not hold."""
        if self.records or not self.has_workers:
            return ["the wrapped loader brings its own state; the resumed run is as exact as that state is"]
        return ["the wrapped loader brings its own state, which does not hold the random generators of its workers"]
