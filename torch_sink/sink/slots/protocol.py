"""Who may touch a slot when: two parties, two streams, three events per slot."""

from __future__ import annotations

from typing import Any

from torch_sink.sink.slots.device import DeviceOps


class SlotProtocol:
    """Order between the filling of a slot and its use, kept on the device.

    Each slot has a staging area on the host and a buffer on the device, and three events:

    * `staged`: the copy from the staging area is done, so the host may write there again. The producer's host waits.
    * `filled`: the buffer is complete. The consumer's stream waits.
    * `free`: the consumer's last use of the buffer is done. The copy stream waits.

    A slot goes producer -> consumer -> producer through a lock-protected queue on the host, so an event is always
    recorded before the other side is told to wait for it. Without the wait for `free` a batch is overwritten while it
    is read; without the wait for `staged` a batch is replaced, on its way, by a later one; without the wait for
    `filled` it is read before it is there.

    Args:
        count: number of slots.
        ops: the device.
    """

    def __init__(self, count: int, ops: DeviceOps) -> None:
        self.ops = ops
        self.staged = [ops.new_event(host_waits=True) for _ in range(count)]
        self.filled = [ops.new_event(host_waits=False) for _ in range(count)]
        self.free = [ops.new_event(host_waits=False) for _ in range(count)]
        self.was_staged = [False] * count
        self.was_used = [False] * count

    def begin_staging(self, slot: int) -> None:
        """Before the host writes to the staging area of `slot`."""
        if self.was_staged[slot]:
            self.staged[slot].synchronize()  # host sync: the producer's thread, for a copy of `count` batches ago

    def begin_filling(self, slot: int) -> None:
        """Before work that writes to the buffer of `slot` is issued to the copy stream."""
        if self.was_used[slot]:
            self.ops.copy_stream.wait_event(self.free[slot])

    def end_staging(self, slot: int) -> None:
        """All copies from the staging area of `slot` were issued."""
        self.staged[slot].record(self.ops.copy_stream)
        self.was_staged[slot] = True

    def give_back(self, slot: int, source_stream: Any) -> None:
        """What the source made on its own stream was copied; it may write to the same memory again."""
        source_stream.wait_event(self.staged[slot])

    def end_filling(self, slot: int) -> None:
        """All work that writes to the buffer of `slot` was issued."""
        self.filled[slot].record(self.ops.copy_stream)

    def begin_use(self, slot: int) -> None:
        """The consumer's current stream will read the buffer of `slot`."""
        self.ops.current_stream().wait_event(self.filled[slot])

    def end_use(self, slot: int) -> None:
        """The consumer issued its last read of `slot` to its current stream."""
        self.free[slot].record(self.ops.current_stream())
        self.was_used[slot] = True
