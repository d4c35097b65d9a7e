"""One traversal ("pass") of a wrapped loader, the items that it gives in order, and where the consumer stands in it."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_sink.common.epochs import epochs_in
from torch_sink.common.integrations import without_length_warning
from torch_sink.common.random_state import (
    RandomState,
    as_bytes,
    as_tensor,
    generator_states,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.common.ranks import group_rank
from torch_sink.damage.report import DecodeReport, name_file, policy_of_thread
from torch_sink.sink.openers import Opener, stop_workers_under
from torch_sink.sink.workers import PassCancelled, Snapshots
from torch_sink.worker.batch import WorkerBatch
from torch_sink.worker.queue import snapshot_in

Action = Callable[[], None]
Context = Callable[[], contextlib.AbstractContextManager[None]]

# Samplers draw at the beginning and at the end of a traversal; of those that draw for each list, the latest are kept.
_DRAWS_KEPT = 64
FORMAT_VERSION = 1
COUNTS = ("epoch", "batch_in_epoch", "batches", "pass_number", "batch_in_pass")


@dataclass(frozen=True)
class PassStart:
    """What a pass needs to begin once more with the same draws."""

    number: int
    generators: list[bytes] = field(default_factory=list)  # of the loader and its samplers, before the pass
    # Their states when the workers of this pass were started; persistent workers were started for an earlier pass.
    worker_generators: list[bytes] = field(default_factory=list)
    # Of the global generators before the pass; empty where batches draw nothing from them.
    random_state: RandomState = b""
    kept_workers: bool = False  # those of the last pass went on, so no seed was drawn for new ones
    epochs: dict[str, int] = field(default_factory=dict)  # of what has `set_epoch`, by its place in the loader


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
    samples: int | None = None  # in the batch, as the sampler has counted; None where it has not
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
        self.lengths: deque[int | None] = deque()  # of the lists whose batches have not come yet; None if not known
        self._asked = 0  # lists, or the end
        self._states = deque([(0, generator_states(generators))], maxlen=_DRAWS_KEPT)  # after so many lists

    def read(self, lists: Iterator[Any], skip: int, after_skip: Action | None, begins_in: Context) -> Iterator[Any]:
        """The lists behind the first `skip`; `after_skip` is called when the last of these was dropped.

        The first list of all is asked for in the context `begins_in`: a sampler may look at its epoch then.
        """
        try:
            with begins_in():
                first = [*itertools.islice(lists, 1)]
            for number, indices in enumerate(itertools.chain(first, lists)):
                self._note()
                if number >= skip:
                    self.lengths.append(len(indices) if hasattr(indices, "__len__") else None)
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


class WithSnapshot:
    """The first index list for a worker that is kept, whose generators go back to a snapshot when the list arrives."""

    def __init__(self, indices: Any, snapshot: RandomState) -> None:
        self.indices, self.snapshot = indices, snapshot

    def __reduce__(self) -> Any:
        return _with_generators_at, (self.snapshot, self.indices)


def _with_generators_at(snapshot: RandomState, indices: Any) -> Any:
    """Run in the worker."""
    set_global_random_state(snapshot)
    return indices


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
        self,
        skip: int = 0,
        placeholders: int = 0,
        at_last_iter: Action | None = None,
        after_skip: Action | None = None,
        begins_in: Context = contextlib.nullcontext,
        snapshots: Callable[[], dict[int, RandomState]] | None = None,
    ) -> None:
        """Prepares the next traversal. A new DataLoader iterator calls `iter` twice and uses the second one."""
        self.skip = skip  # index lists to draw and drop
        self.placeholders = placeholders  # empty index lists to give first: batch k goes to worker k mod W again
        self.at_last_iter = at_last_iter  # called before the traversal that will be used begins
        self.after_skip = after_skip  # called when the last index list was dropped
        self.begins_in = begins_in  # around the sampler's first moves
        self.snapshots = snapshots  # called before the first list; workers that get one go back to theirs, taken out
        self._iters = 0

    def __iter__(self) -> Iterator[Any]:
        self._iters += 1
        if self.at_last_iter is not None and self._iters == 2:
            self.at_last_iter()
        with self.begins_in():
            lists = iter(self.sampler)  # as often as the plain loader does: a sampler may draw here
        self.lists = IndexLists(self.generators)
        read = self.lists.read(lists, self.skip, self.after_skip, self.begins_in)
        if self.snapshots is not None:
            return _with_snapshots(read, self.snapshots)
        return itertools.chain([[]] * self.placeholders, read)


def _with_snapshots(lists: Iterator[Any], find: Callable[[], dict[int, RandomState]]) -> Iterator[Any]:
    """List k goes to worker k, until each has one."""
    for worker, indices in enumerate(lists):
        if worker == 0:
            snapshots = find()
        yield WithSnapshot(indices, snapshots.pop(worker)) if worker in snapshots else indices
        if not snapshots:
            break
    yield from lists


@dataclass(eq=False)
class Pass:
    """One traversal of a loader. Its opener holds no reference to it, or the cycle would keep the workers."""

    opener: Opener
    start: PassStart
    batches: Iterator[Any]  # the loader's iterator
    drop: int = 0  # results to drop first: placeholders of `ResumableSampler`, or batches that were consumed already
    lists: IndexLists | None = None  # of its sampler; None for a loader without them
    snapshots: Snapshots | None = None  # of its workers, if they are kept
    before: int = 0  # batches of it that its workers were not asked for, because it was entered behind them
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
            self._length()
            if isinstance(error, Exception):
                name_file(error)
            worker, snapshot = snapshot_in(error)
            if worker >= 0 and self.lists is not None:  # else a position counts no batches, or they are made again
                item.worker_states = {**(item.worker_states or {}), worker: snapshot}
        return item

    def _drop_consumed(self) -> None:
        while self.drop:
            self.drop -= 1
            try:
                with without_length_warning(self.batches):
                    next(self.batches)
            except StopIteration:
                self.drop = 0
            except Exception as error:
                # What a dropped batch raises was raised before the checkpoint; a dead worker is another matter.
                if self.opener.is_broken or isinstance(error, PassCancelled):
                    raise

    def _next(self, item: Item) -> None:
        while True:
            batch = next(self.batches)
            item.samples = self._length()
            if type(batch) is not WorkerBatch:
                item.batch = batch
                return
            if batch.loss is not None:
                item.loss = batch.loss if item.loss is None else item.loss + batch.loss
                if item.samples is not None:
                    item.samples -= batch.loss.skipped
            if batch.snapshot:
                item.worker_states = {**(item.worker_states or {}), batch.worker: batch.snapshot}
            if not batch.is_empty:
                item.batch = batch.batch
                return
            item.left_out += 1

    def _length(self) -> int | None:
        """The length of the index list of the result that has come; None if it is not known."""
        if self.lists is None or not self.lists.lengths:
            return None
        length = self.lists.lengths.popleft()
        return length if getattr(self.opener.copy, "in_order", True) else None

    def _check_end(self, stop: StopIteration) -> None:
        """Raises what ended a pass before its end: the sampler's exception, or the dataset's own StopIteration."""
        is_open = self.lists is not None and not self.lists.is_exhausted
        if stop.args if self.opener.has_workers else is_open:  # an exception of a worker has a message
            raise RuntimeError(
                "the dataset or collate_fn raised StopIteration, which a DataLoader takes for the end of the pass; "
                f"raise another exception. It said: {stop}"
            ) from stop
        if self.lists is not None and self.lists.failure is not None:
            failure, self.lists.failure = self.lists.failure, None
            raise failure

    def stop(self) -> None:
        """Gives back what the pass holds. Idempotent."""
        close = None if self._reads_users_iterator else getattr(self.batches, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # it is executing: the SinkLoader is closed from inside of it
                close()  # a generator: its `finally` blocks run now, not at some garbage collection
        self.opener.end_pass(self.batches)

    def close(self) -> None:
        """Stops the pass when no other follows: also the workers of DataLoader iterators that it reads."""
        if not self._reads_users_iterator:
            stop_workers_under(self.batches)
        self.stop()

    @property
    def _reads_users_iterator(self) -> bool:
        """Whether the loader is an iterator itself, such as a generator object, which the program may go on reading."""
        return self.batches is self.opener.loader


@dataclass
class Position:
    """Counts of consumed batches, and the pass that they come from."""

    epoch: int = 0  # epochs completed
    batch_in_epoch: int = 0  # batches consumed of the epoch that is under way
    batches: int = 0  # batches consumed in all
    pass_number: int = 0  # the loader's pass that the next batch comes from
    batch_in_pass: int = 0  # batches consumed of it
    start: PassStart | None = None  # how that pass began; None before it did
    # Snapshot of each worker after its last consumed batch. Replaced, never changed, for old items refer to it.
    worker_states: dict[int, RandomState] = field(default_factory=dict)
    loader_state: Any = None  # of a loader that keeps its own, after the last consumed batch
    resume: PassStart | None = None  # of a state that was loaded, until its pass is entered behind `batch_in_pass`
    random_state: RandomState = b""  # of the global generators at that checkpoint (batches made in this process)
    loaded_state: dict[str, Any] = field(default_factory=dict)  # the state that `resume` comes from

    def next_pass(self, keeps_workers: bool) -> None:
        """Moves to the beginning of the next pass; snapshots of workers are kept where the workers are."""
        self.pass_number += 1
        self.batch_in_pass = 0
        self.start = None
        if not keeps_workers:
            self.worker_states = {}

    def next_epoch(self) -> None:
        """Moves to the beginning of the next epoch."""
        self.epoch += 1
        self.batch_in_epoch = 0

    def saved(self, start: PassStart, random_state: RandomState) -> dict[str, Any]:
        """Numbers, strings and uint8 tensors, which `torch.load(weights_only=True)` reads; see `read_state`.

        `start` is that of the next pass where none is under way; `random_state` is empty where batches draw nothing.
        """
        return {
            "version": FORMAT_VERSION,
            **{name: getattr(self, name) for name in COUNTS},
            "worker_states": {worker: as_tensor(snapshot) for worker, snapshot in self.worker_states.items()},
            "pass_has_begun": self.start is not None,
            "generators": [*map(as_tensor, start.generators)],
            "worker_generators": [*map(as_tensor, start.worker_generators)],
            "pass_random_state": as_tensor(start.random_state),
            "kept_workers": start.kept_workers,
            "epochs": start.epochs,
            "random_state": as_tensor(random_state),
            "loader_state": self.loader_state,
        }


def read_state(state: dict[str, Any]) -> Position:
    """The position that `Position.saved` has written, at which the next pass is entered; ValueError for other dicts."""
    if not isinstance(state, dict) or state.get("version") != FORMAT_VERSION:
        given = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"not a state of a SinkLoader of format version {FORMAT_VERSION}: got {given}. "
            "Pass what SinkLoader.state_dict() returned."
        )
    has_begun, random_state = state["pass_has_begun"], as_bytes(state["random_state"])
    worker_states = {int(worker): as_bytes(one) for worker, one in state["worker_states"].items()}
    position = Position(worker_states=worker_states, loader_state=state["loader_state"], loaded_state=dict(state))
    for name in COUNTS:
        setattr(position, name, int(state[name]))
    position.resume = PassStart(
        position.pass_number,
        [as_bytes(one) for one in state["generators"]],
        [as_bytes(one) for one in state["worker_generators"]],
        as_bytes(state["pass_random_state"]) if has_begun else random_state,
        bool(state.get("kept_workers", False)),
        epochs_in(state),
    )
    if has_begun:  # else the pass draws from the random state on, so it is not set a second time
        position.start, position.random_state = position.resume, random_state
    return position


def check_resumed(state: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ValueError if the loader cuts a pass into other batches than then; warns of another number of workers."""
    then, here = ({name: one[name] for name in ("samples", "batch_size")} for one in (state, now))
    if state["batch_in_pass"] and then != here and None not in (*then.values(), *here.values()):
        raise ValueError(
            f"the state is that of a pass over {then['samples']} samples in batches of {then['batch_size']}, after "
            f"batch {state['batch_in_pass']}; this loader has {here['samples']} samples in batches of "
            f"{here['batch_size']}, so samples would be lost or come twice. Use the dataset and the batch size of that "
            "run, or a state that was taken at the end of a pass."
        )
    if state["num_workers"] != now["num_workers"] and group_rank() == 0:
        warnings.warn(
            f"the state was taken with num_workers={state['num_workers']}, this loader has {now['num_workers']}: "
            "samples of a map-style dataset come in the same order, but the workers' random draws differ. Use the same "
            "number of workers for an exact resume.",
            stacklevel=4,
        )
