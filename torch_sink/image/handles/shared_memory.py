"""Handles whose tensors share memory in stock code: an image, and views of it."""

from __future__ import annotations

import weakref
from typing import Any

from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import replay


class SharedMemory:
    """An image and what was recorded on it by calls that return views: crops, the same values as another type.

    All of them become real together, as views of one tensor; what then changes one of them in place changes the others
    where they overlap. They are held weakly: nobody sees what becomes of a handle that nobody holds.
    """

    def __init__(self, whole: Any) -> None:
        self._source, self._ops = whole.sink_source, whole.sink_ops
        self._members: list[weakref.ref[Any]] = []
        self.add(whole)

    def add(self, handle: Any) -> None:
        """Adds a view of the image."""
        self._members = [reference for reference in self._members if reference() is not None]
        self._members.append(weakref.ref(handle))
        handle.__dict__["sink_memory"] = self

    def members(self) -> list[Any]:
        """Those that are still held by somebody."""
        handles = (reference() for reference in self._members)
        return [handle for handle in handles if handle is not None and handle.__dict__.get("sink_memory") is self]

    def make_real(self) -> None:
        """Makes the tensors of all members."""
        with executing():
            self.follow(replay(self._source.decode(), self._ops, in_place=True))

    def follow(self, tensor: Any) -> None:
        """Makes the tensors of all members, as views of the image's."""
        for member in self.members():
            if member.is_recording:
                member.__dict__["sink_real"] = member._stock_type(replay(tensor, member.sink_ops[len(self._ops) :]))


def share_memory(whole: Any, view: Any) -> Any:
    """Makes a handle stand for a view of another one, on which it was recorded, and returns it."""
    fields = whole.__dict__
    memory = fields["sink_memory"] if "sink_memory" in fields else SharedMemory(whole)
    memory.add(view)
    return view


def aliases(handle: Any) -> list[Any] | None:
    """The handles for the very values of this one, itself among them; None where others stand for parts of them."""
    memory = handle.__dict__.get("sink_memory")
    members = memory.members() if memory is not None else [handle]
    return members if all(member.sink_ops == handle.sink_ops for member in members) else None


def record_in_place(handles: list[Any], op: Any) -> None:
    """Records a call that changes what all of these aliases stand for."""
    ops = (*handles[0].sink_ops, op)
    for handle in handles:
        handle.__dict__.pop("sink_memory", None)
        handle.__dict__["sink_ops"] = ops
    for alias in handles[1:]:
        share_memory(handles[0], alias)
