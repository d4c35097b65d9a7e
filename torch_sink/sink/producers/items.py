"""What a producer hands over, and where it waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch_sink.common.slabs import Slabs
from torch_sink.damage.report import NO_LOSS, Loss
from torch_sink.sink.sources.base import NO_MARK, Mark, Pass, PassStart
from torch_sink.sink.workers.guard import PassCancelled


class Slots(Protocol):
    """Where ready batches wait. `fill` is called by the producer, `open` and `free` by the consumer."""

    count: int

    def share(self, make_slabs: Callable[[int], Slabs | None]) -> None:
        """Before the first pass: asks for memory that workers write to, when batches are copied from there."""

    def fill(self, slot: int, batch: Any) -> tuple[Any, Loss]:
        """Puts a batch of the source into a slot; returns what the consumer will get."""

    def open(self, slot: int, batch: Any) -> Any:
        """Makes the batch readable on the current stream."""

    def free(self, slot: int) -> None:
        """The consumer issued its last use of the slot."""

    def static_index(self, slot: int) -> int | None:
        """The slot whose fixed memory holds the batch, None when it is elsewhere."""

    def static_batches(self, batch: Any) -> dict[int, Any]:
        """By slot, what a batch like `batch`, which lies in fixed memory, would be in each of them."""

    def describe(self) -> str:
        """The plan, for `repr`."""

    def bytes_planned(self) -> int | None:
        """Bytes of all slots when they are preallocated, else None."""

    def close(self) -> None:
        """Waits until nothing is in flight and gives the memory back."""


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
        batch, mark = current.next()
        return batch, current.with_losses(mark)
    except StopIteration:
        return Item(current.start, is_end=True, mark=current.with_losses(current.last_mark()))
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
