"""What a data worker sends: a batch, and what the training process has to know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory

from torch_sink.common.pool_writer import Writer
from torch_sink.common.random_state import RandomState
from torch_sink.damage.report import DecodeReport

# A function of the training process, and what it is called with when a batch arrives there.
Note = tuple[Callable[[Any], object], Any]


@dataclass(slots=True)
class WorkerBatch:
    """A batch with what has to stay in the order of batches, and with notes, which are read as soon as it arrives.

    Unpickling it gives the batch itself if all that it had to say was in the notes.
    """

    batch: Any
    worker: int = -1  # that made it
    snapshot: RandomState = b""  # of that worker's random generators afterwards; empty if nobody resumes from it
    loss: DecodeReport | None = None  # samples with broken files
    is_empty: bool = False  # no sample is left, and `batch` is not a batch
    notes: list[Note] = field(default_factory=list)
    writer: Writer | None = None  # of the worker: knows which tensors lie in a slab

    def __reduce__(self) -> Any:
        sent = (_itself, (self.batch,)) if self.writer is None else self.writer.message(self.batch)
        return _arrived, (sent, self.worker, self.snapshot, self.loss, self.is_empty, self.notes)

    def pin_memory(self, device: Any = None) -> WorkerBatch:
        """Called by the thread of a DataLoader that pins memory."""
        self.batch = pin_memory(self.batch, device)
        return self


def _itself(batch: Any) -> Any:
    return batch


def _arrived(
    sent: tuple[Callable[..., Any], tuple[Any, ...]],
    worker: int,
    snapshot: RandomState,
    loss: DecodeReport | None,
    is_empty: bool,
    notes: list[Note],
) -> Any:
    receive, message = sent
    batch = receive(*message)
    for function, value in notes:
        function(value)
    return WorkerBatch(batch, worker, snapshot, loss, is_empty) if snapshot or loss else batch
