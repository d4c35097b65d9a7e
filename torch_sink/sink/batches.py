"""The iterator over one epoch of a SinkLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch_sink.errors import SinkError
from torch_sink.sink.lifetime import Life
from torch_sink.sink.slots import Slots
from torch_sink.sink.traversal import Traversal
from torch_sink.thread_waits import here, host_sync_allowed


class Batches(Iterator[Any]):
    """Iterates over one epoch; keeps its SinkLoader alive until the end.

    After a training step the caches hold little of what a fetch runs, and every function on the way costs a
    microsecond. So this way is short, here and in `Traversal.next_item` and the producers.
    """

    def __init__(self, loader: Any, life: Life, traversal: Traversal, slots: Slots, iteration: int) -> None:
        self.loader: Any = loader
        self.iteration = iteration
        self._life, self._traversal, self._slots = life, traversal, slots

    def __next__(self) -> Any:
        if self.loader is None:
            raise StopIteration
        if self._life.ended is not None:
            raise SinkError(self._life.ended)
        if here.watches and not here.allowances:
            return self._next_unwatched()
        try:
            item = self._traversal.next_item(self.iteration)
        except StopIteration:
            self.loader = None
            raise
        return self._slots.open(item.slot, item.batch)

    @host_sync_allowed()
    def _next_unwatched(self) -> Any:
        """Making batches is not what `no_host_sync()` looks at."""
        return next(self)
