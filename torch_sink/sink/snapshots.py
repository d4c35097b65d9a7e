"""What a DataLoader's workers are given: snapshots of their random generators for exact resume, errors that arrive.

Nothing here draws a random number or changes a batch. A worker adds the states of its global generators to each batch
it makes, and sends an error in the place of what cannot be sent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

from torch_sink.common.patches import wait_for_senders_at_exit
from torch_sink.common.queues import ReportingQueue, StatefulReportingQueue
from torch_sink.common.random_state import RandomState, global_random_state, set_global_random_state
from torch_sink.common.slab_writer import SlabBatch
from torch_sink.damage.loaders import guard_worker
from torch_sink.damage.report import Policy
from torch_sink.damage.samples import PartialBatch
from torch_sink.errors import SinkError

_SNAPSHOT = "_torch_sink_snapshot"


class SnapshotBatch(NamedTuple):
    """A batch with the number of the worker that made it and a snapshot of that worker's generators afterwards."""

    batch: Any
    worker: int
    snapshot: RandomState


class SnapshotFailure(ExceptionWrapper):
    """An error in the place of a batch, with the snapshot that a `SnapshotBatch` has: what failed had made draws."""

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


class SnapshotCollate:
    """The user's `collate_fn`, plus a snapshot of the worker's generators.

    The first batch of as many workers as there are `placeholders` is an empty one of `ResumableSampler`.
    """

    def __init__(self, collate: Callable[[Any], Any], placeholders: int = 0) -> None:
        self.collate = collate
        self.placeholders = placeholders

    def of_no_samples(self) -> Any:
        """In the place of a batch that is left out, because the files of all its samples are broken."""
        worker: Any = get_worker_info()
        return SnapshotBatch(None, worker.id, global_random_state())

    def __call__(self, samples: Any) -> Any:
        worker: Any = get_worker_info()
        is_placeholder, self.placeholders = worker.id < self.placeholders, 0
        if is_placeholder and not samples:
            return None
        return SnapshotBatch(self.collate(samples), worker.id, global_random_state())


class WorkerInit:
    """The user's `worker_init_fn`, then the snapshot from which this worker's generators go on, if there is one.

    It also tells the worker what becomes of samples with broken files.
    """

    def __init__(self, init: Callable[[int], None] | None, snapshots: dict[int, RandomState], policy: Policy) -> None:
        self.init, self.snapshots, self.policy = init, snapshots, policy

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_leave_with_parent, name="torch_sink-parent", daemon=True).start()
        wait_for_senders_at_exit()
        guard_worker(self.policy)
        if self.init is not None:
            self.init(worker)
        if worker in self.snapshots:
            set_global_random_state(self.snapshots[worker])


def _leave_with_parent() -> None:
    """Run beside a worker: ends it at once when the training process is killed, whatever it is doing.

    torch's own watch looks between two batches, only at whether the parent's number changes. It misses a death before
    the worker was ready, and under "forkserver" every death, because the server lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Snapshots(ReportingQueue):
    """Adds the worker's snapshot to errors: to those of the dataset, and to those of batches that cannot be sent."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Called by the worker right after it made the item."""
        worker: Any = get_worker_info()
        if worker is not None and isinstance(item, tuple) and isinstance(item[-1], ExceptionWrapper):
            with contextlib.suppress(SinkError):  # another bit generator of numpy's
                item = *item[:-1], SnapshotFailure(item[-1], worker.id, global_random_state())
        super().put(item, block, timeout)

    def failure(self, error: Exception, content: Any, what: str = "") -> Any:
        made = content.batch if isinstance(content, PartialBatch) else content
        inside = made.batch if isinstance(made, SnapshotBatch) else made
        wrapper = super().failure(error, inside.batch if isinstance(inside, SlabBatch) else inside, what)
        known = isinstance(made, (SnapshotBatch, SnapshotFailure))
        return SnapshotFailure(wrapper, made.worker, made.snapshot) if known else wrapper


class _SnapshotsOfStateful(StatefulReportingQueue, _Snapshots):
    pass


class ReportingContext:
    """A multiprocessing context, None for the default one, whose queues report what they cannot send."""

    def __init__(self, context: Any, *, sends_states: bool = False) -> None:
        self._context: Any = torch.multiprocessing if context is None else context
        self._queue = _SnapshotsOfStateful if sends_states else _Snapshots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self) -> _Snapshots:
        """The queue that a DataLoader's iterator asks for."""
        return self._queue(ctx=self._context.get_context())
