"""Makes batches ready: in a thread, ahead of the consumer, or each when it is asked for."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque

from torch_sink.common.containers import leaves, tensor_bytes
from torch_sink.errors import SinkError, SinkTimeout
from torch_sink.sink.passes import Item, Pass
from torch_sink.sink.slots import Slots
from torch_sink.sink.stats import StatsCollector
from torch_sink.sink.workers import PassCancelled

WATCH_SECONDS = 0.25  # how often a waiting consumer looks after the workers
DEAD_WORKER_SECONDS = 3.0  # torch itself notices a death within 0.5 s, unless its reader is stuck
FREE_READER_SECONDS = 3.0
JOIN_SECONDS = 1.5


def fill(slots: Slots, slot: int, item: Item) -> None:
    """Puts the batch of `item` into a slot; what goes wrong becomes an error in its place."""
    try:
        item.batch, item.leaves, loss = slots.fill(slot, item.batch)
        item.slot = slot
        if loss is not None:
            item.loss = loss if item.loss is None else item.loss + loss
            item.samples = None if item.samples is None else item.samples - loss.skipped
    except BaseException as error:
        item.batch, item.error = None, error


class Producer:
    """Makes batches ready: in one thread a pass, ahead of the consumer, or each in the consumer's when it is asked for.

    A pass of guarded workers has a thread, which receives their batches. Any other is read in the calling thread, so
    that draws come in the plain loop's order, and thread-local state is the program's.

    Invariant: a slot that is not free is being filled (`making`), in an item of `ready`, or `held` by the consumer.
    The thread takes a slot before it asks the loader, so at most `slots.count` batches exist. All shared fields are
    guarded by `changed`; the loader and the device are used outside of it.
    """

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.stats = StatsCollector()
        self.current: Pass | None = None  # the pass that is read; None behind its end
        self.held: Item | None = None  # the item whose batch the consumer uses
        self.ready: deque[Item] = deque()  # what waits for the consumer; copy() is one C call, beside the thread's
        self.thread: threading.Thread | None = None  # that makes the batches
        self.gate = threading.RLock()  # while it is held, the thread pins, allocates and queries nothing
        self.changed = threading.Condition()
        self.making: int | None = None  # the slot for which the thread asks the loader
        self.is_reading = False  # it does so, and does not make the batch of what it got
        self.left_at = time.monotonic()
        self._latest_slot = -1

    def park(self) -> None:
        """Ends the thread of the last pass before workers are started: a fork beside a running thread is unsafe."""
        if self.thread is None or self.current is not None:
            return
        self.thread.join(JOIN_SECONDS)
        while self.thread.is_alive() and not self.is_reading:
            self.thread.join(WATCH_SECONDS)  # it makes a batch, for which a kernel may have to be compiled
        if self.thread.is_alive():
            raise SinkError(
                "the loader has not returned from making the batch that was dropped, so it cannot be asked for another "
                "one; end what blocks it, or make a new SinkLoader"
            )
        self.thread = self.making = None

    def submit(self, current: Pass) -> None:
        """Begins to read a pass."""
        self.park()
        self.current, self.slots.reads_pinned = current, current.opener.pins_batches
        if current.opener.has_workers:
            self.thread = threading.Thread(target=self._run, args=(current,), name="torch_sink-producer", daemon=True)
            self.thread.start()

    def take(self, timeout_seconds: float) -> Item:
        """The next item, in order; the batch taken before is not used any more. Waits `timeout_seconds` for workers."""
        asked = time.monotonic()
        item, queued = (self._make_here(), -1) if self.thread is None else self._receive(asked, timeout_seconds)
        now = time.monotonic()
        # Without a queue, a fetch of over half of the consumer's step counts as empty.
        if item.slot >= 0 and queued < 0:
            self.stats.fetched(0, now - asked, empty=now - asked > 0.5 * (asked - self.left_at), full=False)
        elif item.slot >= 0:
            self.stats.fetched(queued, now - asked, empty=queued == 0, full=queued >= self.slots.count - 1)
        self.left_at = now
        return item

    def _make_here(self) -> Item:
        """The next item, made while the consumer waits."""
        if self.held is not None:
            self.slots.free(self.held.slot)
            self.held = None
        current = self.current
        if current is None:
            raise SinkError("no pass is active")
        item = current.receive()
        if self.current is not current:
            raise SinkError("the SinkLoader was closed while a batch was made")
        if item.is_end:
            self.current = None
        elif item.error is None:
            fill(self.slots, (self._latest_slot + 1) % self.slots.count, item)
        if item.slot >= 0:
            self.held, self._latest_slot = item, item.slot
        return item

    def _receive(self, asked: float, timeout_seconds: float) -> tuple[Item, int]:
        """The next item that the thread makes, and how many were waiting."""
        if self.held is not None:
            self.slots.free(self.held.slot)
        with self.changed:
            queued = len(self.ready)
            self.held = item = self.ready.popleft() if queued else None
            self.changed.notify_all()
        if item is None:
            item = self._wait(asked, timeout_seconds)
        if item.slot < 0:
            self.held = None
        return item, queued

    def _wait(self, asked: float, timeout_seconds: float) -> Item:
        dead_since: float | None = None
        was_freed = False
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.ready), WATCH_SECONDS)
                if self.ready:
                    self.held = item = self.ready.popleft()
                    return item
                current = self.current
                is_idle = current is None or self.thread is None or not self.thread.is_alive()
            now = time.monotonic()
            if is_idle:
                raise SinkError("the producer's thread is gone; restart() or make a new SinkLoader")
            if now - asked > timeout_seconds:
                raise SinkTimeout(
                    f"no batch within timeout_seconds={timeout_seconds:g}; {self.stats.recent(0, now - asked)}. "
                    "Look at the dataset for what blocks, use more workers, or raise timeout_seconds."
                )
            guard = None if current is None else current.opener.guard
            if guard is None or not guard.has_dead_worker():
                dead_since = None
            elif dead_since is None:
                dead_since = now
            elif now - dead_since > DEAD_WORKER_SECONDS:
                if was_freed:
                    raise SinkError("a data worker died, and the wait for its batch could not be ended otherwise")
                guard.free_reader(lambda: self.making is None, FREE_READER_SECONDS)
                if not self._leaves_loader(0.5):
                    raise SinkError("a data worker died in the middle of a message and its reader could not be freed")
                dead_since, was_freed = None, True

    def _leaves_loader(self, seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.making is None, seconds)

    def release(self) -> None:
        """Gives back the slot of the batch that was taken last, which is not used any more."""
        if self.held is not None:
            self.slots.free(self.held.slot)
            self.held = None
        if self.thread is not None:
            with self.changed:
                self.changed.notify_all()

    def drop(self) -> None:
        """Leaves the pass and forgets the batches that are ready."""
        with self.changed:
            current, self.current = self.current, None
            self.changed.notify_all()
        guard = None if current is None else current.opener.guard
        if guard is not None:
            guard.is_cancelled = True
        # Also when an interrupted call has cancelled the pass already.
        if not self._leaves_loader(JOIN_SECONDS) and guard is not None and self.is_reading:
            guard.free_reader(lambda: self.making is None, FREE_READER_SECONDS)
        with self.changed:
            self.ready.clear()

    def start_over(self) -> None:
        """Begins statistics and slots anew, after `drop`."""
        self.park()
        self.stats, self._latest_slot = StatsCollector(), -1

    def bytes_held(self) -> int:
        """Bytes of the batches that wait here or are in use."""
        return sum(tensor_bytes(leaves(item.batch)) for item in (*self.ready.copy(), self.held) if item is not None)

    def close(self) -> None:
        """Stops the active pass, within seconds. Idempotent."""
        current = self.current
        self.drop()
        self.held = None  # only now: a thread that still runs would fill the slot while its batch is read
        if current is not None:
            current.close()
        if self.thread is not None:
            self.thread.join(JOIN_SECONDS)

    def free_slots(self) -> list[int]:
        """Slots that hold no batch, the one that was filled longest ago first. Under `changed`."""
        count, held = self.slots.count, self.held  # read once: the consumer lets go of it without `changed`
        used = {self.making, *(item.slot for item in self.ready), None if held is None else held.slot}
        in_turn = ((self._latest_slot + 1 + later) % count for later in range(count))
        return [slot for slot in in_turn if slot not in used]

    def _run(self, current: Pass) -> None:
        while (slot := self._next_slot(current)) is not None:
            item = self._make(current, slot)
            with self.changed:
                if item is not None and current is self.current:
                    self.ready.append(item)
                    if item.slot < 0:
                        self.current = None  # an end or an error: the consumer decides how it goes on
                    else:
                        self._latest_slot = slot
                self.making = None
                self.changed.notify_all()
            del item

    def _next_slot(self, current: Pass) -> int | None:
        """Waits for a free slot; None when the pass is not wanted any more."""
        asked = time.monotonic()
        with self.changed:
            while current is self.current:
                if free := self.free_slots():
                    self.stats.producer_waits.append(time.monotonic() - asked)
                    self.making = free[0]
                    return self.making
                self.changed.wait()
            return None

    def _make(self, current: Pass, slot: int) -> Item | None:
        self.is_reading = True
        try:
            item = current.receive()
        except PassCancelled:
            return None
        finally:
            self.is_reading = False
        if item.error is not None:
            # torch re-raises a worker's exception from a frame that refers to it: a cycle through the traceback.
            traceback.clear_frames(item.error.__traceback__)
        if item.error is None and not item.is_end:
            while not self.gate.acquire(timeout=WATCH_SECONDS):
                if current is not self.current:
                    return None
            try:
                fill(self.slots, slot, item)
            finally:
                self.gate.release()
        return item
