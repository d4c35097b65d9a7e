"""A DataLoader subclass with an `__iter__` of its own as a source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torch_sink.common.random_state import global_random_state
from torch_sink.sink.sources.base import IterableSource, Mark, Pass, PassStart, ResumePoint, Sampling, sampling_of
from torch_sink.sink.sources.dataloader import WorkerPass
from torch_sink.sink.sources.recording import find_generators, generator_states, is_seeded, set_generator_states
from torch_sink.sink.sources.watch import LoaderWatch, runs_workers


class OwnIteratorPass(WorkerPass):
    """A pass of such a loader.

    Its code runs in the producer's thread where `__iter__` is a generator. It may draw from the global generators and
    start workers before it yields, so the thread enters it only when the consumer waits for the first batch, and the
    consumer starts the workers.
    """

    def __init__(
        self, start: PassStart, batches: Iterator[Any], watch: LoaderWatch, drop: int, keeps_workers: bool
    ) -> None:
        super().__init__(start, batches, watch, drop, keeps_workers)
        self.loader_watch = watch
        self.begins_when_asked = not runs_workers(batches)
        self.is_over = False

    def next(self) -> tuple[Any, Mark]:
        self.begins_when_asked = False
        self.loader_watch.in_consumer = self.in_consumer
        try:
            return super().next()
        except StopIteration:
            self.is_over = True
            raise

    def stop(self) -> None:
        Pass.stop(self)
        self.loader_watch.end_pass(keeps_workers=self.keeps_workers)


class OwnIteratorSource(IterableSource):
    """A DataLoader subclass with an `__iter__` of its own: traversed as it is, ahead when it has workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.runs_ahead = self.runs_in_thread = loader.num_workers > 0
        self.keeps_random_state = not self.runs_ahead
        self.keeps_workers = self.runs_ahead and loader.persistent_workers
        self.pins_batches = self.runs_ahead and loader.pin_memory
        self.can_reenter = True
        self.generators = find_generators(loader)
        self.watch = LoaderWatch(loader, self.guard)
        self.latest: OwnIteratorPass | None = None

    def sampling(self) -> Sampling:
        """What a position in a pass refers to, where that is known."""
        return sampling_of(self.loader)

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        if resume is not None:
            set_generator_states(self.generators, resume.start.generators)
        if not self.runs_ahead:
            return super().begin(number, resume)
        self.set_epoch(number)
        anew = resume is not None or (self.latest is not None and not self.latest.is_over)
        start, drop = (self._new_start(number), 0) if resume is None else (resume.start, resume.skip)
        self.latest = OwnIteratorPass(start, self._open(anew), self.watch, drop, self.keeps_workers)
        return self.latest

    def _new_start(self, number: int) -> PassStart:
        states = generator_states(self.generators)
        return PassStart(number, states, random_state=b"" if self.runs_ahead else global_random_state())

    def next_start(self, number: int) -> PassStart:
        """How pass `number` would begin if it began now."""
        return PassStart(number, generator_states(self.generators))

    def rewind(self, start: PassStart) -> None:
        """Takes back what a pass drew of which nothing was consumed."""
        set_generator_states(self.generators, start.generators)

    def _open(self, anew: bool) -> Iterator[Any]:
        if self.watch.broken:
            self._stop_kept_workers()
        self.watch.begin(anew=anew)
        iterator = iter(self.loader)
        self.watch.add(iterator)
        return iterator

    def _stop_kept_workers(self) -> None:
        self.watch.stop()
        self.forget_workers()

    def forget_workers(self) -> None:
        """After a worker died: the next pass starts new ones."""
        self.loader._iterator = None

    def not_covered(self) -> list[str]:
        notes = [
            f"{type(self.loader).__name__} has an __iter__ of its own: batches that were consumed are loaded again and "
            "dropped, and the workers' random draws differ"
        ]
        if not is_seeded(self.loader):
            notes.append("unseeded generator: later passes are shuffled and seeded by torch's global generator")
        if self.watch.kept() and not isinstance(self.loader.dataset, IterableDataset):
            notes.append("an iterator that is kept across passes shuffles ahead of the recorded generators")
        return notes

    def close(self) -> None:
        """Stops workers that outlive a pass."""
        self.watch.close()
