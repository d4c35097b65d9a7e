"""A loader that keeps its own state (`torchdata.StatefulDataLoader`)."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from torch_sink.common.random_state import set_global_random_state
from torch_sink.sink.sources.base import Mark, Pass, PassStart, ResumePoint
from torch_sink.sink.sources.own_iterator import OwnIteratorPass, OwnIteratorSource
from torch_sink.sink.sources.recording import RecordingCollate, WorkerInit, find_generators


class StatefulPass(OwnIteratorPass):
    """A pass whose every batch carries the state of its source."""

    source: StatefulSource

    def next(self) -> tuple[Any, Mark]:
        batch, mark = super().next()
        return batch, mark._replace(loader_state=self.source.state())

    def last_mark(self) -> Mark:
        """The source's state now; after the end it says that the next pass is a new one."""
        return Mark(loader_state=self.source.state())


class StatefulSource(OwnIteratorSource):
    """A loader with `state_dict` and `load_state_dict`.

    Without workers the loader's state lacks what its generators have drawn since, which the next pass depends on:
    their states are added. With workers it lacks those of the workers' global generators: they travel with the batches
    of a map-style dataset, as for a plain DataLoader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.generators = [] if self.runs_ahead else find_generators(loader)
        # A coarser snapshot is followed by batches that are made again, which draws.
        is_exact = getattr(loader, "snapshot_every_n_steps", 1) == 1
        self.is_recorded = self.runs_ahead and is_exact and not isinstance(loader.dataset, IterableDataset)

    def state(self) -> dict[str, Any]:
        """The loader's own state and that of its generators."""
        return {"loader": self.loader.state_dict(), "generators": [one.get_state() for one in self.generators]}

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is not None:
            self._stop_kept_workers()
            self._load(resume.loader_state)
        batches = self._open_recorded(resume) if self.is_recorded else self._open(anew=resume is not None)
        self.latest = opened = StatefulPass(PassStart(number), batches, self.watch, 0, self.keeps_workers)
        opened.source = self
        if resume is not None and self.keeps_random_state:
            # A state that was taken between passes has it in the pass's start.
            set_global_random_state(resume.random_state or resume.start.random_state)
        return opened

    def _open_recorded(self, resume: ResumePoint | None) -> Any:
        """Starts workers whose batches carry their generator states; the user's loader is left as it was."""
        loader = self.loader
        collate, init = loader.collate_fn, loader.worker_init_fn
        loader.collate_fn = RecordingCollate(collate)
        loader.worker_init_fn = WorkerInit(init, {} if resume is None else resume.worker_states)
        try:
            return self._open(anew=resume is not None)
        finally:
            loader.collate_fn, loader.worker_init_fn = collate, init

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
