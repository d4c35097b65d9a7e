"""What a producer hands over, and the one that makes each batch when it is asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch_sink.common.containers import tensor_bytes
from torch_sink.damage.report import NO_LOSS, Loss
from torch_sink.errors import SinkError
from torch_sink.sink.queue.slots import Slots
from torch_sink.sink.queue.stats import StatsRecorder
from torch_sink.sink.sources.base import NO_MARK, Mark, Pass
from torch_sink.sink.sources.guard import PassCancelled
from torch_sink.sink.sources.position import PassStart


@dataclass(slots=True)
class Item:
    """One thing that the producer hands over: a batch, the end of a pass, or an exception, in the source's order."""

    start: PassStart
    batch: Any = None
    slot: int = -1
    mark: Mark = NO_MARK
    loss: Loss = NO_LOSS
    error: BaseException | None = None
    is_end: bool = False
    is_lost: bool = False
    is_pending: bool = False


def receive(current: Pass) -> tuple[Any, Mark] | Item:
    """The next batch of a pass with its mark; its end, or what it raises, as an item."""
    try:
        with current.active():
            batch, mark = current.next()
        return batch, current.with_losses(mark)
    except StopIteration:
        with current.active():
            last = current.last_mark()
        return Item(current.start, is_end=True, mark=current.with_losses(last))
    except PassCancelled:
        raise
    except BaseException as error:
        return Item(current.start, error=error, is_lost=current.is_lost, is_pending=current.is_pending)


def fill(slots: Slots, slot: int, start: PassStart, batch: Any, mark: Mark) -> Item:
    """Puts a batch into a slot; what goes wrong becomes an item in its place."""
    try:
        batch, loss = slots.fill(slot, batch)
    except BaseException as error:
        return Item(start, error=error, mark=mark)
    return Item(start, batch, slot, mark, loss)


class Producer:
    """Makes each batch in the calling thread when it is asked for: draws come in the plain loop's order."""

    def __init__(self, slots: Slots, stats: StatsRecorder) -> None:
        self.slots = slots
        self.stats = stats
        self.current: Pass | None = None  # whose batches come next; None when its end was seen
        self.held: Item | None = None
        self._upcoming_slot = 0
        self._left_at = time.monotonic()

    def park(self) -> None:
        """Before workers are started: nothing may run beside the calling thread, which would be forked with it."""

    def submit(self, current: Pass) -> None:
        """Gives the pass whose batches come next."""
        self.current = current

    def batches_ready(self) -> int:
        """Batches that wait for the consumer."""
        return 0

    def take(self, timeout_seconds: float) -> Item:
        """The next item, in order; the batch taken before is not used any more.

        `timeout_seconds` has no meaning where the caller makes it: nobody else could interrupt the source.
        """
        if self.held is not None:
            self.release()
        current = self.current
        if current is None:
            raise SinkError("no pass is active")
        asked = time.monotonic()
        slot = self._upcoming_slot
        received = receive(current)
        if self.current is not current:
            raise SinkError("the SinkLoader was closed while a batch was made")
        item = received if isinstance(received, Item) else fill(self.slots, slot, current.start, *received)
        now = time.monotonic()
        if item.is_end:
            self.current = None
        elif item.error is None:
            self._upcoming_slot = (slot + 1) % self.slots.count
            self.stats.made_on_demand(now - asked, asked - self._left_at)
            self.held = item
        self._left_at = now
        return item

    def release(self) -> None:
        """The batch taken last is not used any more: its slot may be filled again."""
        held, self.held = self.held, None
        if held is not None:
            self.slots.free(held.slot)

    def drop(self) -> None:
        """Leaves the source and forgets what is ready."""
        self.current = None

    def is_running_here(self) -> bool:
        """Whether the calling thread makes the batches in the background."""
        return False

    def bytes_held(self) -> int:
        """Bytes of the batches that wait here or are in use."""
        return 0 if self.held is None else tensor_bytes(self.held.batch)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is pinned, allocated or queried for a batch."""
        yield

    def close(self) -> None:
        """Stops the active pass. Idempotent."""
        self.held, current = None, self.current
        self.drop()
        if current is not None:
            current.stop()
