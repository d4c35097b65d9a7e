"""The workers of a DataLoader's iterator, and the end of a SinkLoader: nothing outlives it.

Workers are guarded: death in order, no stuck reader, a bounded stop. Garbage collection and interpreter exit close what
the user did not.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait as wait_for_sentinels
from typing import Any

import torch
from torch.utils.data import _utils

from torch_sink.common import after_fork_in_child
from torch_sink.common.random_state import RandomState
from torch_sink.worker.batch import WorkerBatch
from torch_sink.worker.queue import SnapshotFailure

POLL_SECONDS = 0.5  # torch's own interval is 5 s: too long to close, or to report a death, in time
GRACE_SECONDS = 1.5  # what workers get to leave by themselves
KILL_SECONDS = 1.0
DEATH_SHOWS_SECONDS = 1.0
FEEDER_SECONDS = 0.1

_guards: weakref.WeakSet[WorkerGuard] = weakref.WeakSet()
_lives: weakref.WeakSet[Life] = weakref.WeakSet()
_left: list[Callable[[], object]] = []  # close at exit: no thread can be started for them any more


class PassCancelled(Exception):
    """The producer was asked to leave the loader's `next`."""


class Snapshots:
    """Of the generators of workers, after the latest batches of a pass, as they arrived.

    With them, workers that are kept go back to an earlier batch: the queue has asked them for more than a plain loader
    would have. `batches` of them are held.
    """

    def __init__(self, batches: int) -> None:
        self._latest: deque[tuple[int, int, RandomState]] = deque(maxlen=batches)

    def note(self, number: Any, content: Any) -> None:
        """Takes the snapshot out of what a worker has sent: the number of the batch in the pass, and what it is."""
        if isinstance(content, (WorkerBatch, SnapshotFailure)) and content.snapshot:
            self._latest.append((number, content.worker, content.snapshot))

    def after(self, batches: int) -> dict[int, RandomState]:
        """That of each worker after the last batch that it made of the first `batches` of the pass."""
        return {worker: snapshot for number, worker, snapshot in sorted(self._latest) if number < batches}


class WorkerGuard:
    """Watches the workers of one multi-process DataLoader iterator.

    Three things that torch does are changed, on this one iterator only:

    * its workers are taken out of the process-wide SIGCHLD check, which raises in the main thread, at any bytecode,
      before the batches that are already there were used;
    * the wait for a result wakes twice a second, to see a dead worker or a cancelled pass;
    * after a death the workers are not asked to leave (a worker killed inside a lock would block the one who asks)
      but killed.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.is_cancelled = False  # a wait for the workers ends within half a second
        self.snapshots: Snapshots | None = None  # gets those of the batches that arrive, if somebody wants them
        self._is_broken = False
        self._first_dead: list[Any] = []
        self._unreadable: list[Exception] = []
        if getattr(iterator, "_worker_pids_set", False):
            torch._C._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        # Weak, because the cycle would keep the workers until the garbage collector runs.
        iterator._try_get_data = functools.partial(_poll, weakref.ref(self))
        _guards.add(self)
        run_first_at_exit()

    @property
    def is_broken(self) -> bool:
        """Whether the pass cannot go on: a worker died, a result is lost, or the thread that pins memory has ended."""
        return self._is_broken or self._has_lost_pin_thread()

    @property
    def is_stopped(self) -> bool:
        """Whether the workers were stopped, by the iterator itself or from here."""
        return bool(getattr(self.iterator, "_shutdown", True))

    def has_dead_worker(self) -> bool:
        """Whether a worker that still has work to do is gone. Does not reap it, so torch sees the exit as well."""
        sentinels = [] if self.is_stopped else [worker.sentinel for worker in self._busy()]
        return bool(sentinels) and bool(wait_for_sentinels(sentinels, timeout=0))

    def _busy(self) -> list[Any]:
        """Workers that did not come to the end of an iterable dataset."""
        iterator = self.iterator
        return [worker for worker, busy in zip(iterator._workers, iterator._workers_status, strict=True) if busy]

    def free_reader(self, is_free: Callable[[], bool], seconds: float) -> None:
        """Frees a thread that waits for the rest of a message whose writer is dead.

        Kills all workers, then fills the pipe with zeros until the message is complete: unpickling it fails, torch
        finds the dead worker and raises in order. Closing the write end alone is not enough, because workers of
        other loaders that were forked later hold copies of it.
        """
        self._note_death(self._busy(), 0.0)
        self._kill()
        _complete_message(self.iterator, is_free, seconds)

    def stop(self) -> None:
        """Stops all workers, within about 3 s, whatever state they are in."""
        iterator = self.iterator
        if self.is_stopped:
            return
        is_broken = self.is_broken or self.has_dead_worker()
        iterator._shutdown = True  # torch's own shutdown would wait 5 s for each worker
        deadline = time.monotonic() + GRACE_SECONDS
        if not is_broken:
            _ask_to_leave(iterator, GRACE_SECONDS)
            for worker in iterator._workers:
                worker.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        pinning = getattr(iterator, "_pin_memory_thread", None)
        if pinning is not None:
            iterator._pin_memory_thread_done_event.set()
            if not is_broken:
                with contextlib.suppress(OSError):  # closed
                    os.set_blocking(iterator._worker_result_queue._writer.fileno(), False)  # if full, it does not wait
                _put(iterator._worker_result_queue, (None, None))
            pinning.join(GRACE_SECONDS if is_broken else KILL_SECONDS)
            _complete_message(iterator, lambda: not pinning.is_alive(), KILL_SECONDS)  # it may have read half of one
        for one in [*iterator._index_queues, iterator._worker_result_queue]:
            feeder = getattr(one, "_thread", None)
            one.cancel_join_thread()
            one.close()
            if feeder is not None:
                feeder.join(FEEDER_SECONDS)

    def _note_death(self, busy: list[Any], seconds: float) -> bool:
        """Remembers which workers died by themselves, before the others are killed; waits `seconds` for one."""
        if busy and not self._first_dead:
            still_busy = self._busy()
            self._first_dead = [worker for worker in busy if worker not in still_busy]  # torch found them dead
            if not self._first_dead:
                closed = wait_for_sentinels([worker.sentinel for worker in busy], timeout=seconds)
                self._first_dead = [worker for worker in busy if worker.sentinel in closed]
            for worker in self._first_dead:
                worker.join(KILL_SECONDS)  # its sentinel closes a moment before it can be reaped
            self._is_broken = self._is_broken or bool(self._first_dead)
        return bool(self._first_dead)

    def _explain(self, busy: list[Any], error: Exception) -> None:
        """Raises a RuntimeError that names the dead workers; returns when none is dead.

        A worker that dies while its message is read shows first as a broken connection, a moment before it is gone.
        """
        if not self._note_death(busy, DEATH_SHOWS_SECONDS):
            return
        pids, how = ", ".join(str(worker.pid) for worker in self._first_dead), []
        for code in (worker.exitcode for worker in self._first_dead):
            name = None if code is None or code >= 0 else signal.Signals(-code).name
            often = " (often the out-of-memory killer)" if name == "SIGKILL" else ""
            how.append(f"exit code {code}" if name is None else f"killed by {name}{often}")
        death = RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly: {', '.join(how)}")
        # Batches that the dead workers had to make, counted from the awaited one; [] if they come in any order.
        iterator = self.iterator
        dead = [number for number, worker in enumerate(iterator._workers) if worker in self._first_dead]
        tasks = sorted(iterator._task_info.items()) if getattr(iterator, "_in_order", True) else []
        batches = [number - iterator._rcvd_idx for number, (worker, *made) in tasks if worker in dead and not made]
        vars(death)["sink_batches"] = batches
        raise death from error

    def poll(self, timeout: float) -> tuple[bool, Any]:
        """What the iterator's `_try_get_data` does, in slices of half a second.

        A result that cannot be read (an object that does not unpickle, no file descriptor left) is lost, and torch
        would wait for it for ever. Which one it was is not known, so its error comes when all others are there.
        """
        iterator = self.iterator
        deadline = time.monotonic() + timeout
        while True:
            if self._unreadable and iterator._tasks_outstanding <= len(self._unreadable):
                raise self._unreadable[0]
            left = min(POLL_SECONDS, max(0.0, deadline - time.monotonic()))
            busy = self._busy()
            try:
                got, data = type(iterator)._try_get_data(iterator, left)
            except Exception as error:
                self._explain(busy, error)
                self._unreadable.append(error)
                self._is_broken = True
                continue
            if got:
                if self.snapshots is not None:
                    self.snapshots.note(*data)
                return True, data
            if self.is_cancelled:
                raise PassCancelled
            if self._has_lost_pin_thread():
                raise RuntimeError("the thread that pins memory has ended, as after a batch that cannot be unpickled")
            if time.monotonic() >= deadline:
                if iterator._timeout > 0:
                    self._is_broken = True  # the batch may still come, in the place of the next one
                    raise RuntimeError(f"DataLoader timed out after {iterator._timeout} seconds")
                return False, None

    def _has_lost_pin_thread(self) -> bool:
        thread = getattr(self.iterator, "_pin_memory_thread", None)
        return thread is not None and not self.is_stopped and not thread.is_alive()

    def _kill(self) -> None:
        workers = self.iterator._workers
        for worker in workers:
            if worker.is_alive():
                worker.kill()
        deadline = time.monotonic() + KILL_SECONDS
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))


def _poll(guard_of: weakref.ref[WorkerGuard], timeout: float = _utils.MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
    """Stands in for the iterator's `_try_get_data` as long as its guard lives."""
    guard = guard_of()
    if guard is None:
        raise PassCancelled
    return guard.poll(timeout)


def _ask_to_leave(iterator: Any, seconds: float) -> None:
    """Sets the event and ends the queues that the workers look at, without a thread.

    `Event.set` would wait for ever for the lock of a worker that died holding it.
    """
    done = iterator._workers_done_event
    if not done._cond.acquire(timeout=seconds):
        return
    done._flag.acquire(False)
    done._flag.release()
    done._cond.release()
    for one in iterator._index_queues:
        _put(one, None)


def _put(queue: Any, message: Any) -> None:
    """`queue.put`, which starts a thread at its first message: from Python 3.12 on none starts at interpreter exit."""
    with contextlib.suppress(ValueError, OSError):  # closed
        if queue._thread is None:
            queue._sem.acquire(block=False)  # which who gets the message releases
            queue._writer.send(message)
        else:
            queue.put(message)


def _complete_message(iterator: Any, is_done: Callable[[], bool], seconds: float) -> None:
    writer = getattr(getattr(iterator, "_worker_result_queue", None), "_writer", None)
    if writer is None:
        return
    deadline = time.monotonic() + seconds
    filler = bytes(1 << 16)
    with contextlib.suppress(OSError):  # closed meanwhile: the reader is free
        os.set_blocking(writer.fileno(), False)
        while not is_done() and time.monotonic() < deadline:
            try:
                os.write(writer.fileno(), filler)
            except BlockingIOError:
                time.sleep(0.002)


class Life:
    """The life of a SinkLoader: whether it can still be used, and what closes it.

    `close` runs once: called by the user, by garbage collection or at exit. `ended` is the error message once the
    loader cannot be used; checking it is cheaper than asking for the process id at each fetch.
    """

    def __init__(self, loader: Any, producer: Any, opener: Any, slots: Any) -> None:
        self.ended: str | None = None
        self.is_foreign = False  # in a child of the process that the SinkLoader belongs to
        self.close = weakref.finalize(loader, self._end, producer, opener, slots)
        self.close.atexit = False  # weakref's own exit hook may run after torch's
        _lives.add(self)
        run_first_at_exit()

    def _end(self, producer: Any, opener: Any, slots: Any) -> None:
        """Closes producer, workers and memory, in this order; not in a forked child, which owns none of them."""
        if self.is_foreign:
            return
        self.ended = "this SinkLoader is closed; make a new one"
        closing = [producer.close, opener.close, slots.close]
        if threading.current_thread() is producer.thread:
            # Garbage was collected in the thread that is to be stopped, which waits for nobody.
            try:
                threading.Thread(target=_call_all, args=(closing,), name="torch_sink-close").start()
            except RuntimeError:  # from Python 3.12 on, once the interpreter ends
                _left.extend(closing)
        else:
            _call_all(closing)


def _leave_to_parent() -> None:
    """In a forked child: loaders and workers are the parent's; dropping an iterator, or leaving, would stop workers."""
    for life in list(_lives):
        life.is_foreign = True
        life.ended = (
            "this SinkLoader was made before os.fork(); its thread and workers belong to the parent process. "
            "Make a new SinkLoader in the child."
        )
    for guard in list(_guards):
        guard.iterator._shutdown = True
        multiprocessing.process._children.difference_update(guard.iterator._workers)  # type: ignore[attr-defined]


after_fork_in_child(_leave_to_parent)


def run_first_at_exit() -> None:
    """Makes our exit hook the latest, which runs first: before torch forbids the shutdown of workers.

    Called again when workers were started: torch may have registered a hook that waits 5 s for each of them.
    """
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
    _call_all([*(life.close for life in list(_lives)), *_left])


def _call_all(closing: Iterable[Callable[[], object]]) -> None:
    """Calls all in order, even if one raises, as the cleanup of a user's generator may."""
    with contextlib.ExitStack() as stack:
        for close in reversed(list(closing)):
            stack.callback(close)
