"""A loader that keeps its own state (`torchdata.StatefulDataLoader`), and other DataLoaders with their own iterator."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from torch_sink.sink.dataloader_source import WorkerPass
from torch_sink.sink.random_state import set_global_random_state
from torch_sink.sink.recording import find_generators
from torch_sink.sink.source import IterableSource, Mark, Pass, PassStart, ResumePoint
from torch_sink.sink.workers import WorkerGuard, guard


class OwnIteratorSource(IterableSource):
    """A DataLoader subclass with an `__iter__` of its own: traversed as it is, ahead when it has workers."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.runs_ahead = self.runs_in_thread = loader.num_workers > 0
        self.keeps_random_state = not self.runs_ahead
        self.keeps_workers = self.runs_ahead and loader.persistent_workers
        self.watch: WorkerGuard | None = None

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        if not self.runs_ahead:
            return super().begin(number, resume)
        self.set_epoch(number)
        start = self._new_start(number) if resume is None else resume.start
        return WorkerPass(start, *self._open(), 0 if resume is None else resume.skip, self.keeps_workers)

    def _open(self) -> tuple[Any, WorkerGuard | None]:
        if self.watch is not None and self.watch.broken:
            self._stop_kept_workers()
        if self.watch is not None:
            self.watch.cancelled.clear()
        iterator = iter(self.loader)
        if self.watch is None or self.watch.iterator is not iterator:
            self.watch = guard(iterator)
        return iterator, self.watch

    def _stop_kept_workers(self) -> None:
        if self.watch is not None:
            self.watch.stop()
        self.forget_workers()

    def forget_workers(self) -> None:
        """After a worker died: the next pass starts new ones."""
        self.loader._iterator = None
        self.watch = None

    def close(self) -> None:
        """Stops workers that outlive a pass."""
        if self.watch is not None:
            self.watch.stop()


class StatefulPass(WorkerPass):
    """A pass whose every batch carries the state of its source."""

    source: StatefulSource

    def next(self) -> tuple[Any, Mark]:
        batch, _ = super().next()
        return batch, self.last_mark()

    def last_mark(self) -> Mark:
        """The source's state now; after the end it says that the next pass is a new one."""
        return Mark(loader_state=self.source.state())


class StatefulSource(OwnIteratorSource):
    """A loader with `state_dict` and `load_state_dict`.

    Without workers the loader's state lacks what its generators have drawn since, which the next pass depends on:
    their states are added.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.generators = [] if self.runs_ahead else find_generators(loader)

    def state(self) -> dict[str, Any]:
        """The loader's own state and that of its generators."""
        return {"loader": self.loader.state_dict(), "generators": [one.get_state() for one in self.generators]}

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is not None:
            self._stop_kept_workers()
            self._load(resume.loader_state)
        opened = StatefulPass(PassStart(number), *self._open(), 0, self.keeps_workers)
        opened.source = self
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
        """What the loader's own state does not hold."""
        return ["the wrapped loader brings its own state; random draws of its workers are as exact as that state is"]


