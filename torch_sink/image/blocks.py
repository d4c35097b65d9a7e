"""The `with image_backend(...)` blocks that a process is inside of, and what each puts back."""

from __future__ import annotations

import os
import threading
from typing import Generic, TypeVar

from torch_sink.errors import SinkError

Outside = TypeVar("Outside")


class Block(Generic[Outside]):
    """One `with` block.

    Attributes:
        outside: what is active again when it is left.
        thread: that entered it.
        process: that entered it; a forked child is inside of the blocks of its parent, and may do as it likes.
    """

    def __init__(self, outside: Outside) -> None:
        self.outside = outside
        self.thread = threading.current_thread()
        self.process = os.getpid()

    @property
    def belongs_elsewhere(self) -> bool:
        """True where another thread of this process is inside."""
        is_here = self.thread is threading.current_thread() or self.process != os.getpid()
        return not is_here and self.thread.is_alive()


class Blocks(Generic[Outside]):
    """Blocks from the outermost to the innermost, whose settings are those of the process.

    Blocks may be left in any order. The innermost one puts back what is outside of it. Another one changes nothing yet:
    the block inside of it takes over what it would have put back.
    """

    def __init__(self) -> None:
        self._inside: list[Block[Outside]] = []

    @property
    def are_open(self) -> bool:
        """Whether the process is inside of a block."""
        return bool(self._inside)

    def enter(self, outside: Outside) -> Block[Outside]:
        """Goes into a block; `outside` is what leaving it puts back."""
        self._inside.append(Block(outside))
        return self._inside[-1]

    def leave(self, block: Block[Outside]) -> tuple[Outside, bool]:
        """Goes out of a block.

        Returns:
            Settings, and whether they are to be put back now; else nobody needs them any more.
        """
        place = self._inside.index(block)
        del self._inside[place]
        if place == len(self._inside):
            return block.outside, True
        inner = self._inside[place]
        unneeded, inner.outside = inner.outside, block.outside
        return unneeded, False

    def check_thread(self) -> None:
        """Refuses to change what another thread relies on.

        Raises:
            SinkError: another thread is inside of a block.
        """
        for block in self._inside:
            if block.belongs_elsewhere:
                raise SinkError(
                    f"thread {block.thread.name!r} is inside of `with image_backend(...)`, and the image backend is "
                    "one for the whole process; switch it before the threads start, or in one thread at a time"
                )
