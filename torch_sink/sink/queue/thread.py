"""Makes batches ready in a thread, ahead of the consumer."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

from torch_sink.common.containers import tensor_bytes
from torch_sink.errors import SinkError, SinkTimeout
from torch_sink.sink.queue.producer import Item, Producer, fill, receive
from torch_sink.sink.queue.slots import Slots
from torch_sink.sink.queue.stats import StatsRecorder
from torch_sink.sink.sources.base import Pass
from torch_sink.sink.sources.guard import PassCancelled

WATCH_SECONDS = 0.25  # how often a waiting consumer looks after the workers
DEAD_WORKER_SECONDS = 3.0  # torch itself notices a death within 0.5 s, unless its reader is stuck
FREE_READER_SECONDS = 3.0
JOIN_SECONDS = 1.5


class ThreadProducer(Producer):
    """Makes batches in one thread a pass, ahead of the consumer or only while it waits.

    Invariant: every slot is in exactly one place: `free_slots`, being filled by the thread, in an item of `ready`, or
    held by the consumer. The thread takes a slot before it asks the source, so at most `slots.count` batches exist.
    All shared fields but `held`, which the consumer alone writes, are guarded by `changed`; the source and the device
    are used outside of it. Without `runs_ahead` a batch is made only when the consumer waits for it.
    """

    def __init__(self, slots: Slots, stats: StatsRecorder, runs_ahead: bool = True) -> None:
        super().__init__(slots, stats)
        self.runs_ahead = runs_ahead
        self.is_asked = False
        self.changed = threading.Condition()
        self.ready: deque[Item] = deque()
        self.free_slots = deque(range(slots.count))
        # A function that the consumer's thread is to call, and what becomes of it.
        self.request: tuple[Callable[[], Any], Future[Any]] | None = None
        self.outside_source = threading.Event()
        self.outside_source.set()
        self._owes_slots = False
        self.is_reading = False  # the thread asks the source, and does not make the batch of what it got
        self.gate = threading.RLock()
        self.thread: threading.Thread | None = None

    def park(self) -> None:
        if self.thread is None or self.current is not None:
            return
        self.thread.join(JOIN_SECONDS)
        while self.thread.is_alive() and not self.is_reading:
            self.thread.join(WATCH_SECONDS)  # it makes a batch, for which a kernel may have to be compiled
        if self.thread.is_alive():
            raise SinkError(
                "the source has not returned from making the batch that was dropped, so it cannot be asked for another "
                "one; end what blocks it, or make a new SinkLoader"
            )
        if self._owes_slots:
            self._free_slots()

    def submit(self, current: Pass) -> None:
        """Gives the pass whose batches come next, to a thread that lives until its end or its first error."""
        self.park()
        self.current = current
        current.in_consumer = self._in_consumer
        self.thread = threading.Thread(target=self._run, args=(current,), name="torch_sink-producer", daemon=True)
        self.thread.start()

    def batches_ready(self) -> int:
        with self.changed:
            return sum(item.slot >= 0 for item in self.ready)

    def take(self, timeout_seconds: float) -> Item:
        """The next item, in order; the batch taken before is not used any more.

        Raises:
            SinkTimeout: nothing came within `timeout_seconds`.
        """
        asked = time.monotonic()
        free_slot = self._free_held()
        with self.changed:
            if free_slot is not None:
                self.free_slots.append(free_slot)
            size = len(self.ready)
            if size:
                item = self.ready.popleft()
            else:
                self.is_asked = True
            self.changed.notify_all()
        if not size:
            item = self._wait(asked, timeout_seconds)
        if item.error is None and not item.is_end:
            waited = time.monotonic() - asked
            if self.runs_ahead:
                self.stats.fetched(size, waited, empty=size == 0, full=size >= self.slots.count - 1)
            else:
                self.stats.made_on_demand(waited, asked - self._left_at)
            self.held = item
        self._left_at = time.monotonic()
        return item

    def _wait(self, asked: float, timeout_seconds: float) -> Item:
        dead_since: float | None = None
        was_freed = False
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.ready or self.request, WATCH_SECONDS)
                if self.ready:
                    return self.ready.popleft()
                request, self.request = self.request, None
                current = self.current
                is_idle = current is None or self.thread is None or not self.thread.is_alive()
            if request is not None:
                _answer(*request)
                continue
            now = time.monotonic()
            if is_idle:
                raise SinkError("the producer's thread is gone; restart() or make a new SinkLoader")
            if now - asked > timeout_seconds:
                raise SinkTimeout(
                    f"no batch within timeout_seconds={timeout_seconds:g}; {self.stats.recent(0, now - asked)}. "
                    "Look at the dataset for what blocks, use more workers, or raise timeout_seconds."
                )
            if current is None or not current.has_dead_worker():
                dead_since = None
            elif dead_since is None:
                dead_since = now
            elif now - dead_since > DEAD_WORKER_SECONDS:
                if was_freed:
                    raise SinkError("a data worker died, and the wait for its batch could not be ended otherwise")
                self._free_stuck_reader(current)
                dead_since, was_freed = None, True

    def _in_consumer(self, function: Callable[[], Any]) -> Any:
        """Calls a function in the thread that waits, or will wait, for a batch."""
        if not self.is_running_here():
            return function()
        answer: Future[Any] = Future()
        with self.changed:
            if self.current is None:
                raise PassCancelled
            self.request = function, answer
            self.changed.notify_all()
        try:
            return answer.result()
        except CancelledError:
            raise PassCancelled from None

    def _free_stuck_reader(self, current: Pass) -> None:
        current.free_reader(self.outside_source, FREE_READER_SECONDS)
        if not self.outside_source.wait(0.5):
            raise SinkError("a data worker died in the middle of a message and its reader could not be freed")

    def release(self) -> None:
        free_slot = self._free_held()
        if free_slot is not None:
            with self.changed:
                self.free_slots.append(free_slot)
                self.changed.notify_all()

    def _free_held(self) -> int | None:
        held, self.held = self.held, None
        if held is None:
            return None
        self.slots.free(held.slot)
        return held.slot

    def drop(self) -> None:
        with self.changed:
            current, self.current = self.current, None
            request, self.request = self.request, None
            self.changed.notify_all()
        if request is not None:
            request[1].cancel()
        if current is not None:
            current.cancel()
        # Also when an interrupted call has cancelled the pass already.
        if not self.outside_source.wait(JOIN_SECONDS) and current is not None and self.is_reading:
            current.free_reader(self.outside_source, FREE_READER_SECONDS)
        with self.changed:
            self.ready.clear()
            self.is_asked = False
            self._owes_slots = not self.outside_source.is_set()  # the thread has one still: `park` waits for it
        if not self._owes_slots:
            self._free_slots()

    def _free_slots(self) -> None:
        """Frees all that are not free, so that a slot which an interrupt of the consumer lost comes back as well."""
        self._owes_slots = False
        with self.changed:
            dropped = set(range(self.slots.count)).difference(self.free_slots)
        for slot in dropped:
            self.slots.free(slot)
        with self.changed:
            self.free_slots.extend(dropped)

    def is_running_here(self) -> bool:
        return threading.current_thread() is self.thread

    def bytes_held(self) -> int:
        with self.changed:
            items = [*self.ready, self.held]
        return sum(tensor_bytes(item.batch) for item in items if item is not None)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Parks the thread between batches: inside, it pins, allocates and queries nothing."""
        with self.gate:
            yield

    def close(self) -> None:
        """Stops the thread and the active pass, within seconds."""
        thread = self.thread
        super().close()
        if thread is not None:
            thread.join(JOIN_SECONDS)

    def _run(self, current: Pass) -> None:
        while (slot := self._next_slot(current)) is not None:
            item = self._make(current, slot)
            with self.changed:
                self._forget_unplanned_slots()
                if item is None or item.slot < 0 or current is not self.current:
                    self.free_slots.appendleft(slot)
                if item is not None and current is self.current:
                    self.ready.append(item)
                    self.is_asked = False
                    if item.slot < 0:
                        self.current = None  # an end or an error: the consumer decides how it goes on
                self.outside_source.set()
                self.changed.notify_all()
            del item

    def _forget_unplanned_slots(self) -> None:
        """The first batch tells how many slots fit into `max_bytes`."""
        if self.free_slots and max(self.free_slots) >= self.slots.count:
            self.free_slots = deque(slot for slot in self.free_slots if slot < self.slots.count)

    def _next_slot(self, current: Pass) -> int | None:
        """Waits for a slot and a reason to fill it; None when the pass is not wanted any more."""
        asked = time.monotonic()
        with self.changed:
            self.changed.wait_for(lambda: current is not self.current or self._may_produce(current))
            if current is not self.current:
                return None
            self.stats.producer_waits.append(time.monotonic() - asked)
            self.outside_source.clear()
            return self.free_slots.popleft()

    def _may_produce(self, current: Pass) -> bool:
        ahead = self.runs_ahead and not current.begins_when_asked
        return bool(self.free_slots) and (ahead or self.is_asked)

    def _make(self, current: Pass, slot: int) -> Item | None:
        self.is_reading = True
        try:
            received = receive(current)
        except PassCancelled:
            return None
        finally:
            self.is_reading = False
        if isinstance(received, Item):
            if received.error is not None:
                # torch re-raises a worker's exception from a frame that refers to it: a cycle through the traceback.
                traceback.clear_frames(received.error.__traceback__)
            return received
        while not self.gate.acquire(timeout=WATCH_SECONDS):
            if current is not self.current:
                return None
        try:
            return fill(self.slots, slot, current.start, *received)
        finally:
            self.gate.release()


def _answer(function: Callable[[], Any], answer: Future[Any]) -> None:
    """Calls the function; an exception is for the thread that asked, an interrupt for this one."""
    try:
        answer.set_result(function())
    except Exception as error:
        answer.set_exception(error)
    except BaseException:
        answer.cancel()
        raise
