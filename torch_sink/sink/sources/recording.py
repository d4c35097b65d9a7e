"""Exact resume of a DataLoader: what its workers and its sampler would have drawn next is recorded on the way.

The wrappers sit on a shallow copy of the user's loader; they draw no random number and change no batch. A worker adds
the state of its global generators to each batch it makes. To resume after batch k of a pass, the generators are put
back to where they were when the pass began, the sampler's first k index lists are skipped without being loaded, and
each worker starts from the state that it had after its last batch that was consumed.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import _utils, get_worker_info

from torch_sink.common.random_state import (
    RandomState,
    generator_states,
    global_random_state,
    set_generator_states,
    set_global_random_state,
)

Action = Callable[[], None]

# Samplers draw at the beginning and at the end of a traversal; of those that draw for each list, the latest are kept.
_DRAWS_KEPT = 64


class RecordedBatch(NamedTuple):
    """A batch with the number of the worker that made it and that worker's generator states afterwards."""

    batch: Any
    worker: int
    random_state: RandomState

    def pin_memory(self, device: str | None = None) -> RecordedBatch:
        """Called by the DataLoader's pinning thread."""
        return self._replace(batch=_utils.pin_memory.pin_memory(self.batch, device))  # type: ignore[no-untyped-call]


class RecordingCollate:
    """The user's `collate_fn`, plus the worker's generator states.

    The first batch of as many workers as there are `placeholders` is an empty one of `ResumableSampler`.
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


def leave_with_parent() -> None:
    """Called in a worker: ends it at once when the training process is killed, whatever it is doing.

    torch's own watch looks between two batches, only at whether the parent's number changes. It misses a death before
    the worker was ready, and under "forkserver" every death, because the server lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent,), name="torch_sink-parent", daemon=True).start()


def _leave_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


class Draws:
    """What a traversal of a sampler has drawn from the generators: their states after so many index lists.

    A DataLoader asks for index lists ahead, and the queue lets it run ahead further; who leaves a pass in the middle
    takes back what a plain DataLoader would not have drawn yet.
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
    """

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self.sampler = sampler
        self.generators = generators
        self.draws = Draws(generators)  # of this traversal
        self.failure: Exception | None = None  # what the sampler raised in it
        self.is_exhausted = False
        self._iters = 0
        self.disarm()

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)  # while it is being unpickled
        return getattr(self.sampler, name)

    def arm(self, skip: int, placeholders: int, at_last_iter: Action | None, after_skip: Action | None) -> None:
        """Prepares the next traversal. A new DataLoader iterator calls `iter` twice and uses the second one.

        Args:
            skip: index lists to draw and drop.
            placeholders: empty index lists to give first, so that batch k goes to worker k mod W again.
            at_last_iter: called before the traversal that will be used begins.
            after_skip: called when the last index list was dropped.
        """
        self.skip, self.placeholders = skip, placeholders
        self.at_last_iter, self.after_skip, self._iters = at_last_iter, after_skip, 0

    def disarm(self) -> None:
        """The next traversals are plain ones."""
        self.arm(0, 0, None, None)

    def __iter__(self) -> Iterator[Any]:
        self._iters += 1
        if self.at_last_iter is not None and self._iters == 2:
            self.at_last_iter()
        self.failure, self.is_exhausted = None, False
        # As often as the plain loader does: a sampler may draw here.
        indices, self.draws = iter(self.sampler), Draws(self.generators)
        return self._indices(indices, self.draws, self.skip, self.placeholders, self.after_skip)

    def _indices(
        self, indices: Iterator[Any], draws: Draws, skip: int, placeholders: int, after_skip: Action | None
    ) -> Iterator[Any]:
        yield from ([] for _ in range(placeholders))
        try:
            for number, asked in enumerate(indices):
                draws.note()
                if number >= skip:
                    yield asked
                elif number == skip - 1 and after_skip is not None:
                    after_skip()
            draws.note()
        except Exception as error:
            self.failure = error
        self.is_exhausted = True

    def raise_failure(self) -> None:
        """Raises, once, what the sampler raised."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
