"""A pool of memory that the training process makes for a loader's workers, so that batches cross without a copy.

A batch that crosses in a fresh shared mapping costs a page fault for every 4 KiB, on both sides, and a file descriptor
for every tensor. A *slab* is mapped once by each side, and can be page-locked:

    worker                                             training process
    takes a free slab, or makes one; writes a batch
    sends where the tensors lie, `sent` += 1  ──────►  tensors over the same memory, which keep a lease of the slab;
    the slab is free again when `sent` equals          when the last of them dies, `released` += 1
    `released` and no tensor of it lives here

All slabs lie in one file without a name (a memfd) that the workers inherit, behind a table that says where they lie and
holds both counts, of which each has one writer. Each worker makes slabs in a part of the file of its own. The file is
as large as the machine's memory, and takes as much of it as is written to. The system frees it with the last process
and the last tensor, even after a crash, and the size of `/dev/shm` does not bound it.

A process that was forked while a batch was alive may read it as long as it lives, so the slab is not free before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy
import torch

from torch_sink.common.ranks import warn_of_rank

MOST_SLABS = 16  # of a worker: fewer batches are under way, but a program may keep some

# The columns of the table, which has a row for each slab of each worker. A slab of 0 bytes is not there.
OFFSET, BYTES, SENT, RELEASED = 0, 1, 2, 3

_numbers = itertools.count()
_pools: weakref.WeakValueDictionary[int, Pool] = weakref.WeakValueDictionary()
_COPIED = -1  # takes the place of a slab's number for a tensor that was sent by value
_message = threading.local()  # in the training process: the memory that the message being read refers to


def pages(size: float) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return math.ceil(size / mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def map_shared(fd: int, size: int, offset: int = 0) -> mmap.mmap:
    """Maps a part of a file, which has far more addresses than memory: a core dump leaves it out."""
    mapped = mmap.mmap(fd, size, offset=offset)
    mapped.madvise(mmap.MADV_DONTDUMP)
    return mapped


class Offer:
    """What a worker needs to use a pool: a `Pool` of the training process is unpickled in a worker as an `Offer`."""

    def __init__(self, fd: int, number: int, generation: int, workers: int, span: int) -> None:
        self.fd, self.number, self.generation, self.workers = fd, number, generation, workers
        self.span = span  # bytes of each worker's part of the file
        self.table_bytes = pages(workers * MOST_SLABS * 4 * 8)  # where the first part begins

    def table_in(self, memory: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
        """The table in the mapped file or its beginning: int64 [workers, slabs, 4]."""
        shape = self.workers, MOST_SLABS, 4
        return memory[: math.prod(shape) * 8].view(numpy.int64).reshape(shape)

    def __reduce__(self) -> Any:
        # Offers are pickled only to a process that is being started, which can inherit the file.
        duplicate = reduction.DupFd(self.fd)  # type: ignore[attr-defined]
        return _offered, (duplicate, self.number, self.generation, self.workers, self.span)


def _offered(duplicate: Any, *rest: Any) -> Offer:
    return Offer(duplicate.detach(), *rest)


class Pool(Offer):
    """The slabs of a loader's workers, in the training process.

    Args:
        workers: number of data workers at a time.

    Raises:
        OSError: the system has no memory files (`memfd_create`), or no addresses for one.
    """

    def __init__(self, workers: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("there is no memory without a name")
        fd = os.memfd_create("torch_sink")
        span = pages(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers)
        super().__init__(fd, next(_numbers), 0, workers, span)
        try:
            os.ftruncate(fd, self.table_bytes + workers * span)
            self._map = map_shared(fd, self.table_bytes + workers * span)
        except BaseException:
            os.close(fd)
            raise
        self.memory = numpy.frombuffer(self._map, numpy.uint8)  # of the whole file
        self._table = self.table_in(self.memory)
        self._numbers = self._table.data  # reading single values from an array takes several times as long
        self._received = [[0] * MOST_SLABS for _ in range(workers)]
        self._released: deque[tuple[int, int, list[_Children]]] = deque()  # slabs that are to be counted as released
        self._settling = threading.Lock()
        self._places: dict[int, int] = {}  # bytes of the slabs in which batches came, by offset
        self.changes = 0  # of what `slabs` returns
        self.is_known_to_be_full = False
        self._pid = os.getpid()
        weakref.finalize(self, _close, fd, self._pid, self._map, self.table_bytes, self._released).atexit = False
        _pools[self.number] = self

    @property
    def batches_received(self) -> int:
        """How many batches came in slabs; one in two slabs counts twice."""
        return sum(map(sum, self._received))

    def slabs(self) -> list[tuple[int, int]]:
        """Address and bytes of each slab in which a batch came."""
        begin = self.memory.ctypes.data
        return [(begin + offset, size) for offset, size in self._places.items()]

    def begin_generation(self) -> None:
        """Prepares for new workers: batches that earlier workers have not delivered will never be read."""
        self.generation += 1
        self._table[:, :, SENT] = self._received

    def receive(self, generation: int, worker: int, rows: tuple[int, ...], data: bytes) -> Any:
        """Unpickles a batch from a worker's message."""
        if generation != self.generation:
            raise RuntimeError("this batch comes from a worker that was given up")
        if self._released:
            self._settle()
        parts = []
        for row in rows:
            offset, lease = self._numbers[worker, row, OFFSET], Lease(functools.partial(self._release, worker, row))
            self._received[worker][row] += 1
            if self._places.get(offset) != self._numbers[worker, row, BYTES]:
                self._note_place(offset, self._numbers[worker, row, BYTES])
            parts.append((self.memory, offset, lease))
        return _unpickled(data, parts)

    def _note_place(self, offset: int, size: int) -> None:
        """Notes where a slab lies now, in the place of those that lay there."""
        others = {at: known for at, known in self._places.items() if at + known <= offset or at >= offset + size}
        self._places, self.changes = {**others, offset: size}, self.changes + 1

    def _release(self, worker: int, row: int, children: list[_Children]) -> None:
        """Frees a slab after the last tensor of its batch; runs in any thread, and may interrupt itself."""
        if os.getpid() == self._pid:  # a forked process drops tensors of its parent
            self._released.append((worker, row, children))
            self._settle()

    def _settle(self) -> None:
        """Counts the slabs that nobody reads any more as released."""
        for _ in range(len(self._released)):
            if not self._settling.acquire(blocking=False):
                return
            try:
                worker, row, children = self._released.popleft()
                if children and any(child.lives() for child in children):
                    self._released.append((worker, row, children))
                else:
                    self._numbers[worker, row, RELEASED] += 1
            except IndexError:  # another thread was faster
                return
            finally:
                self._settling.release()


def note_full(told: tuple[int, str]) -> None:
    """Warns, once for a pool, that its worker found no memory."""
    number, what = told
    pool = _pools.get(number)
    if pool is not None and not pool.is_known_to_be_full:
        pool.is_known_to_be_full = True
        warn_of_rank(
            "there is no shared memory for batches (%s): they go through memory that is mapped anew for each of them, "
            "which costs CPU time",
            what,
        )


def _close(fd: int, pid: int, mapped: mmap.mmap, begin: int, released: deque[tuple[int, int, list[_Children]]]) -> None:
    """Frees the memory of a pool, of which no batch is left, even where another process has inherited the file."""
    os.close(fd)
    if os.getpid() == pid and not any(child.lives() for _, _, children in released for child in children):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_REMOVE, begin)


# --- leases


class Lease:
    """The use of a slab by one batch, whose tensors keep this object.

    Args:
        release: called with the children when the lease ends.

    Attributes:
        children: those that were forked while it lived, and may read the batch.
        is_withdrawn: the batch travels in another way.
    """

    def __init__(self, release: Callable[[list[_Children]], object] | None = None) -> None:
        self.children: list[_Children] = []
        self.is_withdrawn, self._release = False, release
        _leases[id(self)] = weakref.ref(self)

    def __del__(self) -> None:  # `weakref.finalize` takes several times as long
        _leases.pop(id(self), None)
        if self._release is not None:
            self._release(self.children)


class Memory(numpy.ndarray[Any, Any]):
    """A part of a slab. A tensor over it keeps this object alive, which keeps the lease alive."""

    lease: Lease


def tensor_over(memory: numpy.ndarray[Any, Any], begin: int, size: int, lease: Lease) -> torch.Tensor:
    """Makes a tensor over a part of a slab, uint8 [size]; the lease lives as long as its storage."""
    part = memory[begin : begin + size].view(Memory)
    part.lease = lease
    return torch.frombuffer(part, dtype=torch.uint8)


class _Children:
    """Tells whether a process lives that was forked, or one forked by that: they inherit an end of a pipe."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        weakref.finalize(self, os.close, self._reader).atexit = False

    def lives(self) -> bool:
        """Whether one may live; asked in the parent."""
        poll = select.poll()
        poll.register(self._reader, 0)  # hanging up is always reported
        return not poll.poll(0)

    def leave(self) -> None:
        """Called in the parent after the fork, which leaves the end to its child."""
        os.close(self._writer)


_leases: dict[int, weakref.ref[Lease]] = {}
_forked: _Children | None = None  # during a fork
_inherited: list[_Children] = []  # in a child: keeps the ends open


def _before_fork() -> None:
    global _forked
    leases = [lease for known in list(_leases.values()) if (lease := known()) is not None]
    _forked = _Children() if leases else None
    for lease in leases:
        lease.children.append(_forked)  # type: ignore[arg-type]


def _after_fork_in_parent() -> None:
    global _forked
    if _forked is not None:
        _forked.leave()
        _forked = None


def _after_fork_in_child() -> None:
    global _forked
    _leases.clear()
    if _forked is not None:
        _inherited.append(_forked)
        _forked = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# --- messages


def receive(number: int, *message: Any) -> Any:
    """Unpickles the message of a worker, by the `Pool` with this number."""
    return _pools[number].receive(*message)


def receive_alone(data: bytes) -> Any:
    """Unpickles the message of a worker that has no pool."""
    return _unpickled(data, [])


def _unpickled(data: bytes, parts: list[tuple[numpy.ndarray[Any, Any], int, Lease]]) -> Any:
    _message.parts, _message.storages = parts, {}
    try:
        return reduction.ForkingPickler.loads(data)
    finally:
        del _message.parts, _message.storages


def tensor_at(part: int, begin: int, size: int, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor in a slab, from the message that is being read; tensors that shared memory share it again."""
    storages = _message.storages
    if (part, begin) not in storages:
        memory, start, lease = _message.parts[part]
        whole = tensor_over(memory, start + begin, size, lease)
        storages[part, begin] = whole.untyped_storage()
        if (dtype, offset, shape, stride) == (whole.dtype, 0, (size,), (1,)):
            return whole
    return torch.empty(0, dtype=dtype, device="cpu").set_(storages[part, begin], offset, shape, stride)


def tensor_of(number: int, data: bytes, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor sent by value, from the message that is being read; those with the same number share memory."""
    storages = _message.storages
    if (_COPIED, number) not in storages:
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
        storages[_COPIED, number] = values.untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storages[_COPIED, number], offset, shape, stride)
