"""How a data worker is prepared: by the main loop that it runs, around the loader's `collate_fn` and its queue.

Features take part: the image backend, a timeline, and a `SinkLoader`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import inspect
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.multiprocessing

from torch_sink.common.patches import stock_function
from torch_sink.common.pool import Offer, Pool
from torch_sink.common.pool_writer import Writer, become_writer
from torch_sink.common.random_state import RandomState, global_random_state, set_global_random_state
from torch_sink.damage.report import Policy
from torch_sink.worker.batch import Note, WorkerBatch
from torch_sink.worker.fetchers import guard_worker
from torch_sink.worker.queue import report_failures

# Modules that start data workers.
WORKER_LOOPS = ("torch.utils.data._utils.worker", "torchdata.stateful_dataloader.stateful_dataloader")


class Feature(Protocol):
    """What a feature of this package does in a data worker before its loop runs; pickled to spawned workers."""

    def __call__(self, collate: WorkerCollate, arguments: dict[str, Any]) -> None:
        """Prepares the worker; may change the `arguments` of the loop."""


class Worker:
    """Stand-in for `_worker_loop` of torch or torchdata: prepares a data worker, then runs the loop.

    The stock loop is not pickled: a spawned worker looks it up in its module.

    Args:
        below: the stock loop, or another stand-in, whose features are taken over.
        feature: called after those.
    """

    def __init__(self, below: Callable[..., None], feature: Feature) -> None:
        self.loop: Callable[..., None] | None
        self.place: tuple[str, str]
        self.features: tuple[Feature, ...]
        if isinstance(below, Worker):
            self.loop, self.place, self.features = below.loop, below.place, (*below.features, feature)
        else:
            self.loop, self.place, self.features = below, (below.__module__, below.__name__), (feature,)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "loop": None}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Runs in the worker."""
        loop = self.loop or stock_function(*self.place)
        bound = inspect.signature(loop).bind(*args, **kwargs)
        arguments = bound.arguments
        collate = arguments["collate_fn"]
        if not isinstance(collate, WorkerCollate):
            collate = arguments["collate_fn"] = WorkerCollate(collate)
        collate.begin(arguments["worker_id"])
        report_failures(arguments["data_queue"])
        wait_for_senders_at_exit()
        for feature in self.features:
            feature(collate, arguments)
        # A full collection would go through all that torch and its libraries have made, and copy their pages: 0.2 s.
        gc.freeze()
        try:
            loop(*bound.args, **bound.kwargs)
        finally:
            gc.unfreeze()  # at the exit of a spawned process, libraries report objects that nobody has collected


class WorkerCollate:
    """The wrapper around the `collate_fn` of a loader, in a data worker.

    The training process may put it there, with a pool for the workers of one iterator.

    Attributes:
        worker: number of the worker.
        finish: what is done to each batch before it is sent; None for nothing.
        reporters: what they return travels with the batch as a note; None if there is nothing to tell.
        sends_snapshots: whether a snapshot of the worker's random generators does.
        placeholder: whether the first batch is an empty one of `ResumableSampler`.
        writer: puts the tensors of batches into slabs.
    """

    is_running = False  # in this process: what is collated now is sent to another one

    def __init__(self, collate: Callable[[Any], Any], pool: Offer | None = None) -> None:
        self.collate, self.pool, self.worker = collate, pool, -1
        self.finish: Callable[[Any], Any] | None = None
        self.reporters: list[Callable[[], Note | None]] = []
        self.sends_snapshots = self.placeholder = False
        self.writer: Writer | None = None

    def begin(self, worker: int) -> None:
        """Called in the worker, before the features."""
        self.worker = worker
        if self.pool is not None:
            self.begin_writing()

    def begin_writing(self) -> Writer:
        """Makes the worker's writer, unless there is one: small tensors travel in the message."""
        if self.writer is None:
            self.writer = become_writer(self.pool, self.worker)
            self.reporters.append(self.writer.tell)
        return self.writer

    def __call__(self, samples: Any) -> WorkerBatch:
        is_placeholder, self.placeholder = self.placeholder and not samples, False
        if is_placeholder:
            return WorkerBatch(None)
        WorkerCollate.is_running = True
        try:
            if self.writer is None:
                return self._sent(self._finished(samples))
            return self._sent(self.writer.written(functools.partial(self._finished, samples)))
        finally:
            WorkerCollate.is_running = False

    def _finished(self, samples: Any) -> Any:
        batch = self.collate(samples)
        return batch if self.finish is None else self.finish(batch)

    def of_no_samples(self) -> WorkerBatch:
        """In the place of a batch that is left out, because the files of all its samples are broken."""
        return self._sent(None)

    def _sent(self, batch: Any) -> WorkerBatch:
        snapshot = global_random_state() if self.sends_snapshots else b""
        notes = [note for tell in self.reporters if (note := tell()) is not None]
        return WorkerBatch(batch, self.worker, snapshot, notes=notes, writer=self.writer)


def give_pool(iterator: Any) -> None:
    """Gives the workers that an iterator of a DataLoader is about to start a pool, unless they have one."""
    if iterator._num_workers > 0 and not isinstance(iterator._collate_fn, WorkerCollate):
        with contextlib.suppress(OSError):  # their batches take torch's way
            iterator._collate_fn = WorkerCollate(iterator._collate_fn, Pool(iterator._num_workers))


# --- the workers of a SinkLoader


class SinkWorker:
    """What a `SinkLoader` does in a worker: it leaves with its parent, resumes its generators, and writes to slabs.

    Nothing here draws a random number or changes a batch.

    Args:
        policy: what becomes of samples with broken files.
        fills_slabs: whether all tensors of its batches may lie in slabs.
        snapshots: of the generators with which workers go on after the user's `worker_init_fn`; None sends none back.
        placeholders: the first batch of so many workers is an empty one.
    """

    def __init__(
        self, policy: Policy, fills_slabs: bool, snapshots: dict[int, RandomState] | None, placeholders: int
    ) -> None:
        self.policy, self.fills_slabs, self.snapshots, self.placeholders = policy, fills_slabs, snapshots, placeholders

    def __call__(self, collate: WorkerCollate, arguments: dict[str, Any]) -> None:
        threading.Thread(target=_leave_with_parent, name="torch_sink-parent", daemon=True).start()
        guard_worker(self.policy)
        if self.fills_slabs:
            collate.begin_writing().take_over()
        if self.snapshots is not None:
            collate.sends_snapshots, collate.placeholder = True, collate.worker < self.placeholders
            arguments["data_queue"].worker = collate.worker
            arguments["init_fn"] = _Resumed(arguments["init_fn"], self.snapshots.get(collate.worker))


class _Resumed:
    """A `worker_init_fn` after which the worker's generators go on from a snapshot, if there is one."""

    def __init__(self, init: Callable[[int], None] | None, snapshot: RandomState | None) -> None:
        self.init, self.snapshot = init, snapshot

    def __call__(self, worker: int) -> None:
        if self.init is not None:
            self.init(worker)
        if self.snapshot is not None:
            set_global_random_state(self.snapshot)


class WorkerContext:
    """A multiprocessing context, None for the default one, whose data workers have one more feature."""

    def __init__(self, context: Any, feature: Feature) -> None:
        self._context: Any = torch.multiprocessing if context is None else context
        self._feature = feature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Process(self, *, target: Callable[..., None], **settings: Any) -> Any:
        """The process that a DataLoader's iterator asks for."""
        return self._context.Process(target=Worker(target, self._feature), **settings)


def _leave_with_parent() -> None:
    """Run beside a worker: ends it at once when the training process is killed, whatever it is doing.

    torch's own watch looks between two batches, only at whether the parent's number changes. It misses a death before
    the worker was ready, and under "forkserver" every death, because the server lives as long as its children.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# --- the end of a worker


def wait_for_senders_at_exit() -> None:
    """Makes a data worker call `wait_for_senders` when it ends."""
    atexit.unregister(wait_for_senders)
    atexit.register(wait_for_senders)


def wait_for_senders() -> None:
    """Waits, for a second at most in all, until no thread that sends a spawned data worker's batches is pickling.

    torch tells a worker that has to end early not to wait for these threads. One that is inside of torch when the
    interpreter has ended would abort the process: "terminate called without an active exception". One that waits for a
    reader is left there. Forked workers exit without an end of the interpreter.
    """
    deadline = time.monotonic() + 1
    for thread in threading.enumerate():
        place, seen = None, 0
        while thread.name == "QueueFeederThread" and thread.is_alive() and time.monotonic() < deadline:
            frame = sys._current_frames().get(thread.ident or 0)
            now = (frame.f_code, frame.f_lasti) if frame and frame.f_globals["__name__"] in _SENDING else None
            place, seen = now, seen + 1 if now == place else 0
            if now is not None and seen == _STANDS_STILL:
                break
            thread.join(0.01)


# Modules whose functions are the innermost of a thread that writes to a pipe, or waits for the lock of the pipe.
_SENDING = ("multiprocessing.connection", "multiprocessing.queues")
# A thread that is seen so often at one place, every 10 ms, is not on its way from there to the next batch.
_STANDS_STILL = 5
