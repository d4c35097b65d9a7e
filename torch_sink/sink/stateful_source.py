"""A loader that keeps its own state (`torchdata.StatefulDataLoader`)."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from torch_sink.sink.own_iterator import OwnIteratorPass, OwnIteratorSource
from torch_sink.sink.random_state import set_global_random_state
from torch_sink.sink.recording import find_generators
from torch_sink.sink.source import Mark, Pass, PassStart, ResumePoint


class StatefulPass(OwnIteratorPass):
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
        batches = self._open(anew=resume is not None)
        self.latest = opened = StatefulPass(PassStart(number), batches, self.watch, 0, self.keeps_workers)
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
