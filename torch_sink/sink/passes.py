"""One traversal ("pass") of a wrapped loader, and the items that it gives in order."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_sink.common.random_state import RandomState, generator_states, set_generator_states
from torch_sink.damage.report import DecodeReport, policy_of_thread
from torch_sink.damage.samples import PartialBatch
from torch_sink.sink.openers import Opener
from torch_sink.sink.position import PassStart
from torch_sink.sink.snapshots import SnapshotBatch, snapshot_in
from torch_sink.sink.workers import PassCancelled

Action = Callable[[], None]

# Samplers draw at the beginning and at the end of a traversal; of those that draw for each list, the latest are kept.
_DRAWS_KEPT = 64


@dataclass(slots=True)
class Item:
    """One thing that a pass gives, in order: a batch, its end, or an exception.

    Snapshots and states are those right after it was made; they become part of the position when it is consumed.
    """

    start: PassStart
    batch: Any = None
    leaves: list[Any] | None = None  # of the batch, from when it is in a slot until the consumer has it
    slot: int = -1
    worker_states: dict[int, RandomState] | None = None  # snapshots of those that made it and the batches left out
    loader_state: Any = None  # `state_dict()` of a loader that keeps its own
    loss: DecodeReport | None = None  # samples with broken files, of this batch and of those left out before it
    left_out: int = 0  # batches without samples that were left out before it
    error: BaseException | None = None
    is_end: bool = False
    is_lost: bool = False  # the pass cannot go on after the error


class IndexLists:
    """The lists of indices that a sampler gave so far in one pass.

    A DataLoader asks for index lists ahead, and the queue lets it run ahead further. So an exception of the sampler is
    kept until the batches before it have come, and a pass that is left in the middle takes back what a plain DataLoader
    would not have drawn yet.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators
        self.failure: Exception | None = None
        self.is_exhausted = False
        self._asked = 0  # lists, or the end
        self._states = deque([(0, generator_states(generators))], maxlen=_DRAWS_KEPT)  # after so many lists

    def read(self, lists: Iterator[Any], skip: int, after_skip: Action | None) -> Iterator[Any]:
        """The lists behind the first `skip`; `after_skip` is called when the last of these was dropped."""
        try:
            for number, indices in enumerate(lists):
                self._note()
                if number >= skip:
                    yield indices
                elif number == skip - 1 and after_skip is not None:
                    after_skip()
            self._note()
        except Exception as error:
            self.failure = error
        self.is_exhausted = True

    def _note(self) -> None:
        self._asked += 1
        states = generator_states(self.generators)
        if states != self._states[-1][1]:
            self._states.append((self._asked, states))

    def take_back(self, lists: int) -> None:
        """Sets the generators to where they were after so many lists."""
        earlier = [states for asked, states in self._states if asked <= lists]
        if earlier:
            set_generator_states(self.generators, earlier[-1])


class ResumableSampler:
    """The user's (batch) sampler; can skip the first index lists of its next traversal."""

    def __init__(self, sampler: Any, generators: list[torch.Generator]) -> None:
        self.sampler = sampler
        self.generators = generators
        self.lists = IndexLists(generators)  # of the latest traversal
        self.arm()

    def __len__(self) -> int:
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":
            raise AttributeError(name)  # while it is being unpickled
        return getattr(self.sampler, name)

    def arm(
        self, skip: int = 0, placeholders: int = 0, at_last_iter: Action | None = None, after_skip: Action | None = None
    ) -> None:
        """Prepares the next traversal. A new DataLoader iterator calls `iter` twice and uses the second one.

        Args:
            skip: index lists to draw and drop.
            placeholders: empty index lists to give first, so that batch k goes to worker k mod W again.
            at_last_iter: called before the traversal that will be used begins.
            after_skip: called when the last index list was dropped.
        """
        self.skip, self.placeholders = skip, placeholders
        self.at_last_iter, self.after_skip, self._iters = at_last_iter, after_skip, 0

    def __iter__(self) -> Iterator[Any]:
        self._iters += 1
        if self.at_last_iter is not None and self._iters == 2:
            self.at_last_iter()
        lists = iter(self.sampler)  # as often as the plain loader does: a sampler may draw here
        self.lists = IndexLists(self.generators)
        return itertools.chain([[]] * self.placeholders, self.lists.read(lists, self.skip, self.after_skip))


@dataclass(eq=False)
class Pass:
    """One traversal of a loader. Its opener holds no reference to it, or the cycle would keep the workers."""

    opener: Opener
    start: PassStart
    batches: Iterator[Any]  # the loader's iterator
    drop: int = 0  # results to drop first: placeholders of `ResumableSampler`, or batches that were consumed already
    lists: IndexLists | None = None  # of its sampler; None for a loader without them
    loader_state: Callable[[], Any] = lambda: None  # gives the state, after the latest batch, of one that keeps its own
    lost: DecodeReport = field(default_factory=DecodeReport)  # samples of the batches that were consumed
    left_out: int = 0  # batches without samples among these

    def receive(self) -> Item:
        """The next batch, or the end; what the loader raises, as an item. One thread at a time may call this."""
        item = Item(self.start)
        try:
            try:
                with policy_of_thread(self.opener.policy_of_iterators):
                    self._drop_consumed()
                    self._next(item)
            except StopIteration as stop:
                self._check_end(stop)
                item.is_end = True
            item.loader_state = self.loader_state()
        except PassCancelled:
            raise
        except BaseException as error:
            item.error, item.is_lost = error, self.opener.is_broken
            worker, snapshot = snapshot_in(error)
            if worker >= 0 and self.lists is not None:  # else a position counts no batches, or they are made again
                item.worker_states = {**(item.worker_states or {}), worker: snapshot}
        return item

    def _drop_consumed(self) -> None:
        while self.drop:
            self.drop -= 1
            try:
                next(self.batches)
            except StopIteration:
                self.drop = 0
            except PassCancelled:
                raise
            except Exception:
                # What a dropped batch raises was raised before the checkpoint; a dead worker is another matter.
                if self.opener.is_broken:
                    raise

    def _next(self, item: Item) -> None:
        is_left_out = True
        while is_left_out:
            batch, is_left_out = next(self.batches), False
            if isinstance(batch, PartialBatch):
                item.loss = batch.loss if item.loss is None else item.loss + batch.loss
                batch, is_left_out = batch.batch, batch.is_empty
                item.left_out += is_left_out
            if isinstance(batch, SnapshotBatch):
                batch, worker, snapshot = batch
                item.worker_states = {**(item.worker_states or {}), worker: snapshot}
        item.batch = batch

    def _check_end(self, stop: StopIteration) -> None:
        """Raises what ended a pass before its end: the sampler's exception, or the dataset's own StopIteration."""
        if self.opener.has_workers:
            came_early = bool(stop.args)  # an exception of a worker has a message
        else:
            came_early = self.lists is not None and not self.lists.is_exhausted
        if came_early:
            raise RuntimeError(
                "the dataset or collate_fn raised StopIteration, which a DataLoader takes for the end of the pass; "
                f"raise another exception. It said: {stop}"
            ) from stop
        if self.lists is not None and self.lists.failure is not None:
            failure, self.lists.failure = self.lists.failure, None
            raise failure

    def stop(self) -> None:
        """Gives back what the pass holds. Idempotent."""
        close = getattr(self.batches, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # it is executing: stuck in a thread that was given up
                close()  # a generator: its `finally` blocks run now, not at some garbage collection
        self.opener.end_pass(self.batches)
