"""The queue through which a data worker sends batches: what cannot be sent arrives as an error.

A queue of Python's pickles in a thread of its own. Where that fails, it prints the error in the worker and drops the
item, and the training process waits for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing.queues
from typing import Any

from torch._utils import ExceptionWrapper

from torch_sink.common.random_state import RandomState, global_random_state
from torch_sink.errors import SinkError
from torch_sink.worker.batch import WorkerBatch

_SNAPSHOT = "_torch_sink_snapshot"


class SnapshotFailure(ExceptionWrapper):
    """An error in the place of a batch, with the snapshot that a `WorkerBatch` has: what failed had made draws."""

    def __init__(self, failure: ExceptionWrapper, worker: int, snapshot: RandomState) -> None:
        vars(self).update(vars(failure))
        self.worker, self.snapshot = worker, snapshot

    def reraise(self) -> None:
        """Raises the error, which `snapshot_in` asks for the rest."""
        try:
            super().reraise()
        except Exception as error:
            vars(error)[_SNAPSHOT] = self.worker, self.snapshot
            raise


def snapshot_in(error: BaseException | None) -> tuple[int, RandomState]:
    """The worker that an error of a `SnapshotFailure` comes from, and its snapshot; -1 for any other error."""
    while error is not None:
        if _SNAPSHOT in vars(error):
            found: tuple[int, RandomState] = vars(error).pop(_SNAPSHOT)
            return found
        error = error.__cause__
    return -1, b""


class WorkerQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """A queue that sends an error where an item cannot be pickled.

    Items are (number, content). torch's content is a `WorkerBatch` or an exception; torchdata's (one of these, worker,
    the worker's state), and before the first batch an object with the first state.

    Attributes:
        worker: the worker whose snapshots are added to exceptions; -1 if nobody resumes from them.
    """

    worker = -1

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Called by the worker right after it made the item."""
        if self.worker >= 0 and isinstance(item, tuple) and isinstance(item[-1], ExceptionWrapper):
            with contextlib.suppress(SinkError):  # another bit generator of numpy's
                item = *item[:-1], SnapshotFailure(item[-1], self.worker, global_random_state())
        super().put(item, block, timeout)

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:  # the hook that the base class offers
        if isinstance(item, tuple) and len(item) == 2:
            number, content = item
            multiprocessing.queues.Queue.put(self, (number, _failure(error, content)))
        else:
            super()._on_queue_feeder_error(error, item)  # type: ignore[misc]


def _failure(error: Exception, content: Any) -> Any:
    """What is sent in the place of `content`."""
    if type(content) is WorkerBatch:
        failure = _wrapped(error, f"a batch of type {type(content.batch).__name__}")
        return SnapshotFailure(failure, content.worker, content.snapshot) if content.snapshot else failure
    if isinstance(content, ExceptionWrapper):  # only its words can be sent: its class could not be pickled
        failure = _wrapped(error, content.exc_msg)
        if isinstance(content, SnapshotFailure):
            return SnapshotFailure(failure, content.worker, content.snapshot)
        return failure
    if isinstance(content, tuple):
        _, worker, _ = content
        return _wrapped(error, "a batch, or the state of its dataset"), worker, None
    if hasattr(content, "initial_state"):
        return dataclasses.replace(content, initial_state=_wrapped(error, "the state of its dataset"))
    return _wrapped(error, type(content).__name__)


def _wrapped(error: Exception, what: str) -> ExceptionWrapper:
    failure = RuntimeError(f"cannot be sent to the training process ({error}): {what}")
    return ExceptionWrapper((RuntimeError, failure, error.__traceback__), "in DataLoader worker process")


def report_failures(queue: Any) -> None:
    """Makes the queue of a data worker, before its first item, one that sends errors; one of another class stays."""
    if type(queue) is multiprocessing.queues.Queue:
        queue.__class__ = WorkerQueue
