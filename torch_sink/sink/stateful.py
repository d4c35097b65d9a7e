"""torchdata's DataLoaders as sources: they keep a state of their own."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from torch_sink.common.random_state import set_generator_states, set_global_random_state
from torch_sink.sink.loaders import WatchedSource
from torch_sink.sink.position import ResumePoint
from torch_sink.sink.source import Item, Pass


class StatefulSource(WatchedSource):
    """A `torchdata.StatefulDataLoader`: each batch carries the loader's state.

    Without workers the loader's state lacks what its generators have drawn since, which the next pass depends on:
    their states are added. With workers it lacks those of the workers' global generators: they travel with the batches
    of a map-style dataset, as for a plain DataLoader.
    """

    sends_states = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.can_start_over = False  # its loader goes on where it stands
        self.generators = [] if self.has_workers else self.generators
        # A coarser snapshot is followed by batches that are made again, which draws.
        is_exact = getattr(loader, "snapshot_every_n_steps", 1) == 1
        self.records = self.has_workers and is_exact and self.is_map_style

    def state_after(self, item: Item) -> dict[str, Any]:
        return {"loader": self.copy.state_dict(), "generators": [one.get_state() for one in self.generators]}

    def begin(self, number: int, resume: ResumePoint | None = None) -> Pass:
        self.set_epoch(number)
        if resume is None:
            self.states = {}
            return Pass(self, self.new_start(number), self.iterate())
        self.forget_workers()
        self.states = resume.worker_states if self.records else {}
        start = resume.start
        # What the sampler drew when the pass began, it draws again; then the global generators go on where the state
        # was taken, or where the pass begins if it was taken between two.
        draws_again = len(start.generators) == len(self.generators)
        set_generator_states(self.generators, start.generators)
        if start.random_state and not self.has_workers:
            set_global_random_state(start.random_state)
        if resume.loader_state is not None:
            self._load(resume.loader_state, draws_again)
        if start.random_state and not resume.random_state:
            set_global_random_state(start.random_state)
        opened = Pass(self, start, self.iterate())
        if resume.random_state and not self.has_workers:
            set_global_random_state(resume.random_state)
        return opened

    def _load(self, state: dict[str, Any], draws_again: bool) -> None:
        self.copy.load_state_dict(state["loader"])
        if self.has_workers:
            return
        self.copy.state_dict()  # makes the loader's iterator
        iterator: Any = self.copy._iterator
        indices = iterator._sampler_iter
        if isinstance(indices, islice):  # of a plain sampler, which would draw at the first batch
            iterator._sampler_iter = chain(list(islice(indices, 1)), indices)
        if hasattr(getattr(indices, "sampler_iter", indices), "load_state_dict") or not draws_again:
            # torchdata's own samplers draw less when they are loaded than they had drawn when they were saved.
            for generator, generator_state in zip(self.generators, state["generators"], strict=True):
                generator.set_state(generator_state.cpu())

    def not_covered(self) -> list[str]:
        """What the loader's own state and the recorded generators do not hold."""
        if self.records or not self.has_workers:
            return ["the wrapped loader brings its own state; the resumed run is as exact as that state is"]
        return ["the wrapped loader brings its own state, which does not hold the random generators of its workers"]
