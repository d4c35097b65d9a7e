"""Segments: memory for batches that a data worker makes once and writes again and again.

torch's shared memory is new for every batch: each page is made, zeroed and mapped in the worker, and mapped once more
in the reader. A segment is mapped once by each of them:

    worker                                             reader, for instance the training process
    takes a free segment, writes a batch,
    marks the segment as in use, sends where
    the batch lies                        ─────────►   makes a tensor over the same memory, which keeps it in use;
                                                       when the last tensor over it dies, the segment is free again

A message names the file of the segment, which any process of the same user can open while the worker lives. A segment
is sent once before it is free again, and its reader frees it. A segment that a forked process may still read is not
written again. The memory has no name (a memfd), so the system frees it with the last process and the last tensor, even
after a crash.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy
import torch

from torch_sink.common.slabs import Lease, tensor_over

MOST_SEGMENTS = 16  # of a worker: fewer batches are under way, but a program may keep some
IDLE_BATCHES = 64  # a segment that was not needed for so many batches is given up
# Capacity of a segment, in sizes of its first batch; the system allocates only the part that is used.
ROOM = 2
MOST_BYTES_IN_MESSAGE = 1 << 16  # what is smaller costs less in the message itself
HEADER_BYTES = mmap.PAGESIZE
IN_USE, GIVEN_UP, KEY = 0, 1, 2  # the words of a segment's header

_numbers = itertools.count()
_live: dict[int, numpy.ndarray[Any, Any]] = {}  # headers of the segments in which tensors of this process lie
_mapped: dict[int, numpy.ndarray[Any, Any]] = {}  # key -> memory, in a reader


class _Segment:
    """A segment of a data worker.

    Raises:
        OSError: the system cannot allocate the memory.
    """

    def __init__(self, size: int) -> None:
        self.capacity, self.allocated = HEADER_BYTES + ROOM * size, 0
        self.fd = os.memfd_create("torch_sink")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.capacity)
        self.allocate(size)
        self.memory = _map(self.fd, self.capacity)
        self.header = _header(self.memory)
        self.key = self.header[KEY] = int.from_bytes(os.urandom(7), "little")
        self.address = self.memory.ctypes.data + HEADER_BYTES
        self.lease: Callable[[], Lease | None] = lambda: None  # the lease of its batch, while that lives in the worker
        self.was_sent = False
        self.turn = 0

    def allocate(self, size: int) -> None:
        """Allocates the memory for a batch in one call, instead of with a page fault for every page."""
        end = HEADER_BYTES + size
        if end > self.allocated:
            os.posix_fallocate(self.fd, self.allocated, end - self.allocated)
            self.allocated = end


class _Pool:
    """The segments of a data worker, any thread of which may make a batch or send one."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._segments: list[_Segment] = []
        self._turn = 0
        self._lock = threading.Lock()
        # A reader opens a worker's files as the worker can open its parent's.
        can_be_opened = os.access(f"/proc/{os.getppid()}/fd", os.R_OK | os.X_OK)
        self.most = MOST_SEGMENTS if hasattr(os, "memfd_create") and can_be_opened else 0

    def allocate(self, size: int) -> torch.Tensor | None:
        """Memory in a free segment, or memory of its own if it is small, uint8 [size]; None if there is none."""
        if self.most and size <= MOST_BYTES_IN_MESSAGE:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        lease = Lease()
        with self._lock:
            self._turn += 1
            try:
                segment = self._free_segment(size)
                if segment is None:
                    return None
                segment.allocate(size)
            except OSError:
                return None
            segment.lease, segment.was_sent, segment.turn = weakref.ref(lease), False, self._turn
        _note(lease, segment.header)
        return tensor_over(segment.memory, HEADER_BYTES, size, lease)

    def _free_segment(self, size: int) -> _Segment | None:
        free = [one for one in self._segments if one.lease() is None and not one.header[IN_USE]]
        found = None
        for segment in free:
            fits = segment.capacity - HEADER_BYTES >= size and not segment.header[GIVEN_UP]
            if not fits or self._turn - segment.turn > IDLE_BATCHES:
                segment.header[GIVEN_UP] = 1
                self._segments.remove(segment)
            elif found is None:
                found = segment
        if found is None and len(self._segments) < self.most:
            self._segments.append(found := _Segment(size))
        return found

    def send(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """The arguments of `received` for a tensor of `allocate`; None if it lies elsewhere or was sent before."""
        address = tensor.data_ptr()
        with self._lock:
            for segment in self._segments:
                if segment.address == address and segment.lease() is not None and not segment.was_sent:
                    segment.was_sent, segment.header[IN_USE] = True, 1
                    if (message := getattr(_of_message, "segments", None)) is not None:
                        message.append(segment)
                    return self.pid, segment.fd, segment.key, segment.capacity, tensor.numel()
        return None


_pool: _Pool | None = None  # of this process, if it is a data worker


def _pool_here() -> _Pool:
    global _pool
    if _pool is None or _pool.pid != os.getpid():
        _pool = _Pool()
        if "dump" not in vars(reduction.ForkingPickler):  # a worker may have been forked by another one
            reduction.ForkingPickler.dump = _dump  # type: ignore[method-assign]
    return _pool


_of_message = threading.local()  # `segments`: those in the message that a thread is pickling; None between messages


def _dump(pickler: Any, message: Any) -> None:
    """For `ForkingPickler.dump`: where another part of a message cannot be pickled, nobody will read its segments."""
    sent: list[_Segment] = []
    outer, _of_message.segments = getattr(_of_message, "segments", None), sent
    try:
        pickle.Pickler.dump(pickler, message)
        if outer is not None:
            outer += sent
    except BaseException:
        for segment in sent:
            segment.was_sent, segment.header[IN_USE] = False, 0
        raise
    finally:
        _of_message.segments = outer


def allocate(size: int) -> torch.Tensor | None:
    """Memory for a batch of this data worker that is cheap to send, uint8 [size]; None if there is none."""
    return _pool_here().allocate(size)


def give_up() -> None:
    """Makes this worker use no segments, because its batches are written to slabs."""
    _pool_here().most = 0


def sent(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The arguments of `received` for a tensor in a segment; None for a tensor to send as usual."""
    return None if _pool is None or _pool.pid != os.getpid() else _pool.send(tensor)


def received(pid: int, fd: int, key: int, capacity: int, size: int) -> torch.Tensor:
    """Makes a tensor over a segment of a worker, uint8 [size].

    Raises:
        OSError: the worker has exited, and this process has not read the segment before.
    """
    memory, lease = _mapped.get(key), Lease()
    if memory is None:
        memory = _open(pid, fd, key, capacity)
    header = _header(memory)
    weakref.finalize(lease, header.__setitem__, IN_USE, 0).atexit = False
    _note(lease, header)
    return tensor_over(memory, HEADER_BYTES, size, lease)


def _open(pid: int, fd: int, key: int, capacity: int) -> numpy.ndarray[Any, Any]:
    for known, memory in list(_mapped.items()):
        if _header(memory)[GIVEN_UP]:
            _mapped.pop(known, None)
    workers = [worker for worker in multiprocessing.active_children() if worker.pid == pid]
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b", buffering=0) as file:
            fd = file.fileno()
            if os.fstat(fd).st_size != capacity or _header(memory := _map(fd, capacity))[KEY] != key:
                raise FileNotFoundError(f"/proc/{pid}/fd has another file in its place")
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        for worker in workers:
            worker.join(timeout=1)  # a killed process loses its files before it ends, which its loader looks for
        raise ProcessLookupError(f"the data worker {pid} is gone, and the memory of its batch with it") from error
    # The process that started the worker keeps the memory as long as the worker lives. Others cannot know how long.
    for worker in workers:
        _mapped[key] = memory
        weakref.finalize(worker, _mapped.pop, key, None).atexit = False
    return memory


def _map(fd: int, size: int) -> numpy.ndarray[Any, Any]:
    """Maps a file's memory, uint8 [size], until its last reference is gone; the file may be closed before."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8, device="cpu").numpy()


def _header(memory: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    return memory[:HEADER_BYTES].view(numpy.int64)


def _note(lease: Lease, header: numpy.ndarray[Any, Any]) -> None:
    number = next(_numbers)
    _live[number] = header
    weakref.finalize(lease, _live.pop, number, None).atexit = False


def _give_up_live() -> None:
    """Gives up the segments of this process's tensors before a fork, because the child reads them without notice."""
    for header in list(_live.values()):
        header[GIVEN_UP] = 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_give_up_live, after_in_child=_mapped.clear)
