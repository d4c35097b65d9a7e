"""Makes each batch in the calling thread, when it is asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch_sink.common.containers import tensor_bytes
from torch_sink.errors import SinkError
from torch_sink.sink.producers.items import Item, Slots, fill, receive
from torch_sink.sink.producers.stats import StatsRecorder
from torch_sink.sink.sources.base import Pass


class OnDemandProducer:
    """Makes each batch in the calling thread when it is asked for: draws come in the plain loop's order."""

    def __init__(self, slots: Slots, stats: StatsRecorder) -> None:
        self.slots = slots
        self.stats = stats
        self.current: Pass | None = None
        self.held: Item | None = None
        self._next_slot = 0
        self._left_at = time.monotonic()

    def park(self) -> None:
        """Nothing runs beside the calling thread."""

    def submit(self, current: Pass) -> None:
        """Gives the pass whose batches come next."""
        self.current = current

    def wants_pass(self) -> bool:
        """Whether a next pass could be begun ahead."""
        return False

    def batches_ready(self) -> int:
        """Batches that wait for the consumer: none does."""
        return 0

    def take(self, timeout_seconds: float) -> Item:
        """Makes the next item; the batch taken before is not used any more.

        `timeout_seconds` has no meaning here: nobody else could interrupt the source.
        """
        if self.held is not None:
            self.release()
        current = self.current
        if current is None:
            raise SinkError("no pass is active")
        asked = time.monotonic()
        slot = self._next_slot
        received = receive(current)
        if self.current is not current:
            raise SinkError("the SinkLoader was closed while a batch was made")
        item = received if isinstance(received, Item) else fill(self.slots, slot, current.start, *received)
        now = time.monotonic()
        if item.is_end:
            self.current = None
        elif item.error is None:
            self._next_slot = (slot + 1) % self.slots.count
            self.stats.made_on_demand(now - asked, asked - self._left_at)
            self.held = item
        self._left_at = now
        return item

    def release(self) -> None:
        """The batch taken last is not used any more: its slot may be filled again."""
        held, self.held = self.held, None
        if held is not None:
            self.slots.free(held.slot)

    def drop(self) -> list[Pass]:
        """Forgets the active pass; returns it, for the caller to stop."""
        dropped = [self.current] if self.current is not None else []
        self.current = None
        return dropped

    def is_running_here(self) -> bool:
        """Whether the calling thread makes the batches in the background: none does."""
        return False

    def bytes_held(self) -> int:
        """Bytes of the batches that wait here or are in use."""
        held = self.held
        return tensor_bytes(held.batch) if held is not None else 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing runs beside the calling thread, so there is nothing to pause."""
        yield

    def close(self) -> None:
        """Drops the active pass. Idempotent."""
        self.held = None
        for dropped in self.drop():
            dropped.stop()
