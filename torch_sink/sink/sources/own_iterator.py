"""Loaders with an `__iter__` of their own: DataLoader subclasses, and objects that wrap DataLoaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torch_sink.common.random_state import (
    generator_states,
    global_random_state,
    is_seeded,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.common.slabs import Slabs
from torch_sink.sink.sources.base import Mark, Pass
from torch_sink.sink.sources.dataloader import UNSEEDED
from torch_sink.sink.sources.position import PassStart, ResumePoint
from torch_sink.sink.sources.watch import WatchedSource, runs_workers


class WrapperSource(WatchedSource):
    """An object around DataLoaders that is none itself (timm's `PrefetchLoader`): traversed in the calling thread."""

    is_guarding = False

    def make_slabs(self, batches: int) -> Slabs | None:
        """Not for page-locking: the loader's own code may copy from a batch and let go of it before that is done."""
        super().make_slabs(batches + 1)  # it may hold one itself
        return None


class OwnIteratorPass(Pass):
    """A pass of such a loader.

    Its code runs in the producer's thread where `__iter__` is a generator. It may draw from the global generators and
    start workers before it yields, so the thread enters it only when the consumer waits for the first batch, and the
    consumer starts the workers.
    """

    def __init__(self, start: PassStart, batches: Iterator[Any], source: OwnIteratorSource, drop: int) -> None:
        super().__init__(start, batches, source.watch, drop=drop, keeps_workers=source.keeps_workers)
        self.source = source
        self.begins_when_asked = not runs_workers(batches)

    def next(self) -> tuple[Any, Mark]:
        self.begins_when_asked = False
        self.watch.in_consumer = self.in_consumer
        try:
            batch, mark = super().next()
        except StopIteration:
            self.source.is_under_way = False
            raise
        return batch, self._with_state(mark)

    def last_mark(self) -> Mark:
        """The loader's state after the end says that the next pass is a new one."""
        return self._with_state(super().last_mark())

    def _with_state(self, mark: Mark) -> Mark:
        state = self.source.state()
        return mark if state is None else mark._replace(loader_state=state)


class OwnIteratorSource(WrapperSource):
    """A DataLoader subclass with an `__iter__` of its own: traversed as it is, ahead when it has workers."""

    is_guarding = can_reenter = True

    # A pass knows its source, not the other way round: in a cycle the workers' queues would be freed before their
    # iterator, which then waits in vain for each worker to leave.
    is_under_way = False

    def state(self) -> dict[str, Any] | None:
        """That of a loader that keeps its own."""
        return None

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        if resume is not None:
            set_generator_states(self.generators, resume.start.generators)
        if not self.runs_ahead:
            return super().begin(number, resume)
        self.set_epoch(number)
        anew = resume is not None or self.is_under_way
        start, drop = (self.new_start(number), 0) if resume is None else (resume.start, resume.skip)
        return self._begin(start, drop, anew)

    def _begin(self, start: PassStart, drop: int, anew: bool) -> OwnIteratorPass:
        if self.watch.broken:
            self.forget_workers()
        self.watch.begin(anew=anew)
        iterator = iter(self.loader)
        self.watch.add(iterator)
        self.is_under_way = True
        return OwnIteratorPass(start, iterator, self, drop)

    def new_start(self, number: int) -> PassStart:
        states = generator_states(self.generators)
        return PassStart(number, states, random_state=b"" if self.runs_ahead else global_random_state())

    def next_start(self, number: int) -> PassStart:
        return PassStart(number, generator_states(self.generators))

    def not_covered(self) -> list[str]:
        notes = [
            f"{type(self.loader).__name__} has an __iter__ of its own: batches that were consumed are loaded again and "
            "dropped, and the workers' random draws differ"
        ]
        if not is_seeded(self.loader):
            notes.append(UNSEEDED)
        if self.watch.kept() and not isinstance(self.loader.dataset, IterableDataset):
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
        self.generators = [] if self.runs_ahead else self.generators
        # A coarser snapshot is followed by batches that are made again, which draws.
        is_exact = getattr(loader, "snapshot_every_n_steps", 1) == 1
        self.is_recorded = self.runs_ahead and is_exact and not isinstance(loader.dataset, IterableDataset)
        self.watch.records = self.is_recorded

    def make_slabs(self, batches: int) -> Slabs | None:
        """For page-locking where torchdata's own code hands the batches over, which keeps none and copies nothing.

        Not with persistent workers: a plain loop over the loader goes on with them.
        """
        super().make_slabs(batches)
        is_torchdatas = getattr(type(self.loader).__iter__, "__module__", "").startswith("torchdata.")
        return self.watch.slabs if is_torchdatas and not self.keeps_workers else None

    def state(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "generators": [one.get_state() for one in self.generators]}

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is not None:
            self.forget_workers()
            self._load(resume.loader_state)
        self.watch.states = {} if resume is None or not self.is_recorded else resume.worker_states
        opened = self._begin(PassStart(number), 0, anew=resume is not None)
        if resume is not None and self.keeps_random_state:
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
        if self.is_recorded or not self.runs_ahead:
            return ["the wrapped loader brings its own state; the resumed run is as exact as that state is"]
        return ["the wrapped loader brings its own state, which does not hold the random generators of its workers"]
