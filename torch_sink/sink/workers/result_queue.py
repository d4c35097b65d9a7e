"""What a worker cannot send is reported in its place."""

from __future__ import annotations

import multiprocessing.queues
from typing import Any

import torch.multiprocessing
from torch._utils import ExceptionWrapper


class ReportingQueue(multiprocessing.queues.Queue):  # type: ignore[type-arg]
    """A queue of (number, batch or exception) that sends an error where an item cannot be pickled.

    Python's own queue prints the error in the worker and drops the item, and the training process waits for ever.
    """

    def _on_queue_feeder_error(self, error: Exception, item: Any) -> None:  # the hook that the base class offers
        number, content = item if isinstance(item, tuple) and len(item) == 2 else (None, None)
        if not isinstance(number, int):
            super()._on_queue_feeder_error(error, item)  # type: ignore[misc]
            return
        # Only the words of an exception can be sent: its class is what could not be pickled.
        what = content.exc_msg if isinstance(content, ExceptionWrapper) else f"a batch of type {type(content).__name__}"
        failure = RuntimeError(f"cannot be sent to the training process ({error}): {what}")
        origin = (RuntimeError, failure, error.__traceback__)
        self.put((number, ExceptionWrapper(origin, "in DataLoader worker process")))


class ReportingContext:
    """A multiprocessing context whose queues report what they cannot send; all else is the given context's.

    Args:
        context: the DataLoader's `multiprocessing_context`; None for the default start method.
    """

    def __init__(self, context: Any) -> None:
        self._context: Any = torch.multiprocessing if context is None else context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> ReportingQueue:
        """The queue that a DataLoader's iterator asks for."""
        return ReportingQueue(ctx=self._context.get_context())
