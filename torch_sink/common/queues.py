"""The queue through which data workers send batches: what cannot be sent arrives as an error.

A queue of Python's pickles in a thread of its own. Where that fails, it prints the error in the worker and drops the
item, and the training process waits for ever.
"""

from __future__ import annotations

import dataclasses
import multiprocessing.queues
from typing import Any

from torch._utils import ExceptionWrapper


class ReportingQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """A queue of (number, batch or exception) that sends an error where an item cannot be pickled."""

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:  # the hook that the base class offers
        if isinstance(item, tuple) and len(item) == 2:
            number, content = item
            multiprocessing.queues.Queue.put(self, (number, self.failure(error, content)))
        else:
            super()._on_queue_feeder_error(error, item)  # type: ignore[misc]

    def failure(self, error: Exception, content: Any, what: str = "") -> Any:
        """What is sent in the place of `content`, which the message calls `what`."""
        what = what or f"a batch of type {type(content).__name__}"
        if isinstance(content, ExceptionWrapper):  # only its words can be sent: its class could not be pickled
            what = content.exc_msg
        failure = RuntimeError(f"cannot be sent to the training process ({error}): {what}")
        return ExceptionWrapper((RuntimeError, failure, error.__traceback__), "in DataLoader worker process")


class StatefulReportingQueue(ReportingQueue):
    """The queue of torchdata's workers, whose items are (number, (batch or exception, worker, worker's state)).

    Before its first batch a worker sends an object with its first state.
    """

    def failure(self, error: Exception, content: Any, what: str = "") -> Any:
        if not isinstance(content, tuple):
            state = super().failure(error, content.initial_state, "the state of its dataset")
            return dataclasses.replace(content, initial_state=state)
        batch, worker, _ = content
        return super().failure(error, batch, "a batch, or the state of its dataset"), worker, None


def report_failures(queue: Any, *, sends_states: bool) -> None:
    """Makes the queue of a data worker, before its first item, one that sends errors; one of another class stays."""
    if type(queue) is multiprocessing.queues.Queue:
        queue.__class__ = StatefulReportingQueue if sends_states else ReportingQueue
