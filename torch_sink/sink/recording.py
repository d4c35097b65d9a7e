"""What a DataLoader's workers and its sampler are wrapped in: for exact resume, and for errors that arrive.

The wrappers draw no random number and change no batch. A worker adds the state of its global generators to each batch
it makes, and sends an error in the place of what cannot be sent.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.queues
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils, get_worker_info

from torch_sink.common.random_state import (
    RandomState,
    generator_states,
    global_random_state,
    set_generator_states,
    set_global_random_state,
)
from torch_sink.damage.loaders import guard_worker
from torch_sink.errors import SinkError

Action = Callable[[], None]

# Samplers draw at the beginning and at the end of a traversal; of those that draw for each list, the latest are kept.
_DRAWS_KEPT = 64
_DRAWS = "_torch_sink_draws"


class RecordedBatch(NamedTuple):
    """A batch with the number of the worker that made it and that worker's generator states afterwards."""

    batch: Any
    worker: int
    random_state: RandomState

    def pin_memory(self, device: str | None = None) -> RecordedBatch:
        """Called by the DataLoader's pinning thread."""
        return self._replace(batch=_utils.pin_memory.pin_memory(self.batch, device))  # type: ignore[no-untyped-call]


class RecordedFailure(ExceptionWrapper):
    """An error in the place of a batch, with what a `RecordedBatch` has: what failed had made draws."""

    def __init__(self, failure: ExceptionWrapper, worker: int, random_state: RandomState) -> None:
        vars(self).update(vars(failure))
        self.worker, self.random_state = worker, random_state

    def reraise(self) -> None:
        """Raises the error, which `draws_of` asks for the rest."""
        try:
            super().reraise()
        except Exception as error:
            vars(error)[_DRAWS] = self.worker, self.random_state
            raise


def draws_of(error: BaseException | None) -> tuple[int, RandomState]:
    """The worker that an error of a `RecordedFailure` comes from, and its generator states; -1 of any other one."""
    while error is not None:
        if _DRAWS in vars(error):
            found: tuple[int, RandomState] = vars(error).pop(_DRAWS)
            return found
        error = error.__cause__
    return -1, b""


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
    """The user's `worker_init_fn`, then the generator states from which this worker goes on, if there are any.

    It also tells the worker what becomes of samples with broken files.
    """

    def __init__(self, init: Callable[[int], None] | None, states: dict[int, RandomState], policy: str) -> None:
        self.init, self.states, self.policy = init, states, policy

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_leave_with_parent, name="torch_sink-parent", daemon=True).start()
        guard_worker(self.policy)
        if self.init is not None:
            self.init(worker)
        if worker in self.states:
            set_global_random_state(self.states[worker])


def _leave_with_parent() -> None:
    """Run beside a worker: ends it at once when the training process is killed, whatever it is doing.

    torch's own watch looks between two batches, only at whether the parent's number changes. It misses a death before
    the worker was ready, and under "forkserver" every death, because the server lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class IndexLists:
    """What one traversal of a sampler gave so far.

    A DataLoader asks for index lists ahead, and the queue lets it run ahead further. So an exception of the sampler is
    kept until the batches before it have come, and who leaves a pass in the middle takes back what a plain DataLoader
    would not have drawn yet.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self.generators = generators
        self.failure: Exception | None = None
        self.is_exhausted = False
        self._asked = 0  # lists, or the end
        self._states = deque([(0, generator_states(generators))], maxlen=_DRAWS_KEPT)  # after so many lists

    def read(self, lists: Iterator[Any], skip: int, after_skip: Action | None) -> Iterator[Any]:
        """The lists behind the first `skip`."""
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

    def raise_failure(self) -> None:
        """Raises, once, what the sampler raised."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


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


class ReportingQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """A queue of (number, batch or exception) that sends an error where an item cannot be pickled.

    Python's own queue prints the error in the worker and drops the item, and the training process waits for ever.
    A worker's exceptions become `RecordedFailure`s.
    """

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Called by the worker right after it made the item."""
        worker: Any = get_worker_info()
        if worker is not None and isinstance(item, tuple) and isinstance(item[-1], ExceptionWrapper):
            with contextlib.suppress(SinkError):  # another bit generator of numpy's
                item = *item[:-1], RecordedFailure(item[-1], worker.id, global_random_state())
        super().put(item, block, timeout)

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:  # the hook that the base class offers
        number, content = item if isinstance(item, tuple) and len(item) == 2 else (None, None)
        if not isinstance(number, int):
            super()._on_queue_feeder_error(error, item)  # type: ignore[misc]
            return
        super().put((number, self.failure(error, content)))

    def failure(self, error: Exception, content: Any) -> Any:
        """What is sent in the place of `content`."""
        # Only the words of an exception can be sent: its class is what could not be pickled.
        what = content.exc_msg if isinstance(content, ExceptionWrapper) else f"a batch of type {type(content).__name__}"
        failure = RuntimeError(f"cannot be sent to the training process ({error}): {what}")
        wrapper = ExceptionWrapper((RuntimeError, failure, error.__traceback__), "in DataLoader worker process")
        known = (RecordedBatch, RecordedFailure)
        made = content if isinstance(content, known) else getattr(content, "batch", None)  # one with broken files
        return RecordedFailure(wrapper, made.worker, made.random_state) if isinstance(made, known) else wrapper


class StatefulReportingQueue(ReportingQueue):
    """That of torchdata's workers, which send (number, (batch or exception, worker, state of the worker))."""

    def failure(self, error: Exception, content: Any) -> Any:
        batch, worker, _ = content  # the state may be what cannot be pickled
        return super().failure(error, batch), worker, None


class ReportingContext:
    """A multiprocessing context, None for the default one, whose queues report what they cannot send."""

    def __init__(self, context: Any, *, sends_states: bool = False) -> None:
        self._context: Any = torch.multiprocessing if context is None else context
        self._queue = StatefulReportingQueue if sends_states else ReportingQueue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> ReportingQueue:
        """The queue that a DataLoader's iterator asks for."""
        return self._queue(ctx=self._context.get_context())
