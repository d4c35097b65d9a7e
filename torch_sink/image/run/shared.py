"""What the batches that one `collate` made share: their program and, on a device, what was decoded for it."""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from torch_sink.common.transfer import pins
from torch_sink.image.program.program import Batch, Made, Program, Wanted
from torch_sink.image.run.device import ProgramOnDevice


class Maker(Protocol):
    """A batch of a program, as `SharedProgram` sees it.

    Attributes:
        on_devices: what it keeps until it is made: the last batch to let go of it frees the memory.
    """

    on_devices: list[ProgramOnDevice]

    @property
    def batch(self) -> Batch:
        """Which batch of the program it is."""


class SharedProgram:
    """A program that several batches hold, in one process.

    The first batch that is made on a device decodes the files of all. Those that wait to be made keep the pixels, and
    nobody else does: they are freed when the last one was made, or is gone. A batch that is made later decodes anew.

    Args:
        program: what they are made by.
        waiting: those that wait to be made.
    """

    def __init__(self, program: Program, waiting: Iterable[Maker] = ()) -> None:
        self.program = program
        self._lock = threading.Lock()
        self._waiting = weakref.WeakSet(waiting)
        self._on_device: weakref.WeakValueDictionary[torch.device, ProgramOnDevice] = weakref.WeakValueDictionary()
        self._pinned: weakref.ref[SharedProgram] | None = None

    def __reduce__(self) -> Any:
        return SharedProgram, (self.program,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedProgram:
        return SharedProgram(pickle.loads(pickle.dumps(self.program)))

    def enter(self, batch: Maker) -> None:
        """Notes a batch that waits to be made."""
        with self._lock:
            self._waiting.add(batch)

    def leave(self, batch: Maker) -> None:
        """Notes that a batch was made elsewhere."""
        with self._lock:
            self._forget(batch)

    def _forget(self, batch: Maker) -> None:
        self._waiting.discard(batch)
        batch.on_devices.clear()

    def make(self, wanted: Sequence[tuple[Maker, Wanted]]) -> list[Made]:
        """Makes batches on one device, side by side, on its current stream.

        Raises:
            DecodeError: under the conditions of `survivors`.
        """
        device = _numbered(wanted[0][1].device)
        with self._lock:
            found = self._on_device.get(device)
            if found is None:
                found = self._on_device[device] = ProgramOnDevice(self.program, device)
                for waiting in self._waiting:
                    waiting.on_devices.append(found)
            made = found.make([(maker.batch, how) for maker, how in wanted])
            for maker, _ in wanted:
                self._forget(maker)
        return made

    def pinned(self) -> SharedProgram:
        """The program with its block in pinned memory, one for all batches that ask while one of them holds it."""
        with self._lock:
            found = None if self._pinned is None else self._pinned()
            if found is None:
                packed = self.program.packed
                found = SharedProgram(self.program._replace(packed=packed.in_block(packed.blob.pin_memory())))
                self._pinned = weakref.ref(found)
            return found


def _numbered(device: torch.device) -> torch.device:
    """The device with its number."""
    if device.index is not None or not pins(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
