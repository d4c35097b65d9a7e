"""Exact resume of a DataLoader: what its workers and its sampler would have drawn next is recorded on the way.

The wrappers sit on a shallow copy of the user's loader; they draw no random number and change no batch. A worker adds
the state of its global generators to each batch it makes. To resume after batch k of a pass, the generators are put
back to where they were when the pass began, the sampler's first k index lists are skipped without being loaded, and
each worker starts from the state that it had after its last batch that was consumed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import get_worker_info

from torch_sink.common.random_state import RandomState, global_random_state, set_global_random_state
from torch_sink.sink.workers.guard import leave_with_parent, pin_memory

# Samplers draw at the beginning and at the end of a traversal; of those that draw for each list, the latest are kept.
_DRAWS_KEPT = 64


class RecordedBatch(NamedTuple):
    """A batch with the number of the worker that made it and that worker's generator states afterwards."""

    batch: Any
    worker: int
    random_state: RandomState

    def pin_memory(self, device: str | None = None) -> RecordedBatch:
        """Called by the DataLoader's pinning thread."""
        return RecordedBatch(pin_memory(self.batch, device), self.worker, self.random_state)


class RecordingCollate:
    """The user's `collate_fn`, plus the worker's generator states.

    Args:
        collate: the user's function.
        placeholders: workers whose first batch is an empty one of `ResumableSampler`.
    """

    def __init__(self, collate: Callable[[Any], Any], placeholders: int = 0) -> None:
        self.collate = collate
        self.placeholders = placeholders

    def of_no_samples(self) -> Any:
        """In the place of a batch that is left out, because the files of all its samples are broken."""
        worker: Any = get_worker_info()
        return RecordedBatch(None, worker.id, global_random_state())

    def __call__(self, samples: Any) -> Any:
        worker: Any = get_worker_info()
        is_placeholder, self.placeholders = worker.id < self.placeholders, 0
        if is_placeholder and not samples:
            return None
        return RecordedBatch(self.collate(samples), worker.id, global_random_state())


class WorkerInit:
    """The user's `worker_init_fn`, then the generator states from which this worker goes on, if there are any."""

    def __init__(self, init: Callable[[int], None] | None, states: dict[int, RandomState] | None = None) -> None:
        self.init = init
        self.states = states or {}

    def __call__(self, worker: int) -> None:
        leave_with_parent()
        if self.init is not None:
            self.init(worker)
        if worker in self.states:
            set_global_random_state(self.states[worker])


class Draws:
    """What a traversal of a sampler has drawn from the generators: their states after so many index lists.

    A DataLoader asks for index lists ahead, and the queue lets it run ahead further; who leaves a pass in the middle
    takes back what a plain DataLoader would not have drawn yet.

    Args:
        generators: those of the DataLoader and its samplers.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators
        self.lists = 0
        self.states = deque([(0, generator_states(generators))], maxlen=_DRAWS_KEPT)

    def note(self) -> None:
        """One more index list, or the end, was asked for."""
        self.lists += 1
        states = generator_states(self.generators)
        if states != self.states[-1][1]:
            self.states.append((self.lists, states))

    def take_back(self, lists: int) -> None:
        """Sets the generators to where they were after so many index lists."""
        earlier = [states for asked, states in self.states if asked <= lists]
        if earlier:
            set_generator_states(self.generators, earlier[-1])


class ResumableSampler:
    """The user's (batch) sampler; can skip the first index lists of its next traversal.

    An exception of the sampler ends the traversal and is kept: the DataLoader asks for indices ahead, and the batches
    before it come first.

    Attributes:
        draws: what this traversal has drawn.
        failure: what the sampler raised in this traversal.
        is_exhausted: whether this traversal is over.
        skip: index lists to draw and drop.
        placeholders: empty index lists to give first, so that batch k goes to worker k mod W again.
        at_last_iter: called before the traversal that will be used begins.
        after_skip: called when the last index list was dropped.
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self.sampler = sampler
        self.generators = generators
        self.draws = Draws(generators)
        self.skip = 0
        self.placeholders = 0
        self.at_last_iter: Callable[[], None] | None = None
        self.after_skip: Callable[[], None] | None = None
        self.failure: Exception | None = None
        self.is_exhausted = False
        self._iters = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)  # while it is being unpickled
        return getattr(self.sampler, name)

    def arm(
        self,
        skip: int,
        placeholders: int,
        at_last_iter: Callable[[], None] | None,
        after_skip: Callable[[], None] | None,
    ) -> None:
        """Prepares the next traversal. A new DataLoader iterator calls `iter` twice and uses the second one."""
        self.skip, self.placeholders = skip, placeholders
        self.at_last_iter, self.after_skip, self._iters = at_last_iter, after_skip, 0

    def disarm(self) -> None:
        """The next traversals are plain ones."""
        self.skip, self.placeholders, self.at_last_iter, self.after_skip = 0, 0, None, None

    def __iter__(self) -> Iterator[Any]:
        self._iters += 1
        if self.at_last_iter is not None and self._iters == 2:
            self.at_last_iter()
        self.failure, self.is_exhausted = None, False
        # As often as the plain loader does: a sampler may draw here.
        indices = _noting(iter(self.sampler), draws := Draws(self.generators))
        self.draws = draws
        if self.skip:
            indices = _skipping(indices, self.skip, self.placeholders, self.after_skip)
        return self._watched(indices)

    def _watched(self, indices: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from indices
        except Exception as error:
            self.failure = error
        self.is_exhausted = True

    def raise_failure(self) -> None:
        """Raises, once, what the sampler raised."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


def _noting(indices: Iterator[Any], draws: Draws) -> Iterator[Any]:
    for asked in indices:
        draws.note()
        yield asked
    draws.note()


def _skipping(
    indices: Iterator[Any], skip: int, placeholders: int, after_skip: Callable[[], None] | None
) -> Iterator[Any]:
    for _ in range(placeholders):
        yield []
    for _ in range(skip):
        next(indices, None)
    if after_skip is not None:
        after_skip()
    yield from indices


def _drawing_parts(loader: Any) -> tuple[Any, ...]:
    return loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)


def is_seeded(loader: Any) -> bool:
    """Whether neither a DataLoader nor its samplers draw from torch's global generator."""
    parts = [part for part in _drawing_parts(loader) if part is not None]
    return all(getattr(part, "generator", "draws nothing") is not None for part in parts)


def find_generators(loader: Any) -> list[torch.Generator]:
    """The torch generators that a DataLoader and its samplers draw from, each once, in a fixed order."""
    found: list[torch.Generator] = []
    for part in _drawing_parts(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not one for one in found):
            found.append(generator)
    return found


def generator_states(generators: list[torch.Generator]) -> list[bytes]:
    """The states of `generators`."""
    return [generator.get_state().numpy().tobytes() for generator in generators]


def set_generator_states(generators: list[torch.Generator], states: list[bytes]) -> None:
    """The inverse of `generator_states`; without states, as in a checkpoint of another kind of loader, does nothing."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def find_private_generators(dataset: Any, depth: int = 3) -> list[str]:
    """Names of the generator objects that a dataset (or its transforms) keeps: their states are not recorded."""
    kinds = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
    found: list[str] = []
    todo = [("dataset", dataset, depth)]
    while todo:
        path, owner, left = todo.pop(0)
        for name, value in _parts(owner):
            here = f"{path}{name}"
            if isinstance(value, kinds):
                found.append(here)
            elif left > 1 and not isinstance(value, (torch.Tensor, numpy.ndarray, str, bytes, int, float, type)):
                todo.append((here, value, left - 1))
    return found


def _parts(owner: Any) -> list[tuple[str, Any]]:
    if isinstance(owner, (list, tuple)):
        return [(f"[{i}]", value) for i, value in enumerate(owner[:32])]
    attributes = getattr(owner, "__dict__", {})
    return [(f".{name}", value) for name, value in list(attributes.items())[:64]]
