"""Slabs: memory that data workers and the training process map once, so that batches cross without a copy.

A batch that crosses in a fresh shared mapping costs a page fault for every 4 KiB, on both sides, and a file descriptor
for every tensor. A slab stays mapped, and can be page-locked. Each worker has several slabs:

    worker                                             training process
    takes a free slab, collates into it
    sends where the tensors lie, `sent` += 1  ──────►  tensors over the same memory, which keep the slab;
    the slab is free again when `sent` equals          when the last of them dies, `released` += 1
    `released` and no tensor of it lives here

Both counts lie in front of the slabs, and each has one writer. The size of batches is known once some are collated:
the first ones, and later ones that do not fit or find no free slab, take torch's ordinary shared memory. The memory has
no name (a memfd), so the system frees it with the last process and the last tensor, even after a crash.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
import threading
import weakref
from collections import deque
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy
import torch

from torch_sink.common.ranks import warn_of_rank

log = logging.getLogger("torch_sink")

FIRST_BATCHES = 2  # batches without a slab of their size before slabs are made
MISSES_OF = 8  # slabs grow if one batch in so many is larger than they are
EDITIONS = 4  # how often slabs are made, each time at least twice as large as before
PART_OF_MEMORY = 4  # all slabs take at most one part in so many of the available memory

# The columns of the table, in row 0, which is about the worker, and in the row of each slab.
WANTED, MISSED = 0, 1
OFFSET, BYTES, SENT, RELEASED = 0, 1, 2, 3

_numbers = itertools.count()
_slabs: weakref.WeakValueDictionary[int, Slabs] = weakref.WeakValueDictionary()
_COPIED = -1  # takes the place of a slab's number for a tensor that was sent by value
_message = threading.local()  # in the training process: the memory that the message being read refers to


class Lease:
    """The use of a slab by one batch, whose tensors keep this object; the slab is free once it is collected."""

    is_withdrawn = False


class Memory(numpy.ndarray[Any, Any]):
    """A part of a slab. A tensor over it keeps this object alive, which keeps the lease alive."""

    lease: Lease


def tensor_over(region: numpy.ndarray[Any, Any], begin: int, size: int, lease: Lease) -> torch.Tensor:
    """Makes a tensor over a part of a slab, uint8 [size]; the lease lives as long as its storage."""
    part = region[begin : begin + size].view(Memory)
    part.lease = lease
    return torch.frombuffer(part, dtype=torch.uint8)


def map_shared(fd: int, size: int, offset: int = 0) -> numpy.ndarray[Any, Any]:
    """Maps a part of a file's memory, uint8 [size]; it is unmapped with the last reference."""
    return numpy.frombuffer(mmap.mmap(fd, size, offset=offset), numpy.uint8)


def _pages(size: int) -> int:
    """`size` rounded up to whole pages, in bytes."""
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class Offer:
    """What a worker needs to use slabs: `Slabs` of the training process are unpickled in a worker as an `Offer`."""

    def __init__(self, fd: int, number: int, generation: int, shape: tuple[int, int, int]) -> None:
        self.fd, self.number, self.generation, self.shape = fd, number, generation, shape
        self.table_bytes = _pages(math.prod(shape) * 8)  # where the slabs begin

    def map_table(self) -> numpy.ndarray[Any, Any]:
        """Maps the shared table of counts: int64 [workers, 1 + slabs, 4]."""
        values = map_shared(self.fd, self.table_bytes).view(numpy.int64)
        return values[: math.prod(self.shape)].reshape(self.shape)

    def __reduce__(self) -> Any:
        # Offers are pickled only to a process that is being started, which can inherit the file.
        duplicate = reduction.DupFd(self.fd)  # type: ignore[attr-defined]
        return _arrived, (duplicate, self.number, self.generation, self.shape)


def _arrived(duplicate: Any, *rest: Any) -> Offer:
    return Offer(duplicate.detach(), *rest)


class Slabs(Offer):
    """The slabs of a loader's workers, in the training process.

    Args:
        workers: number of data workers at a time.
        per_worker: slabs of each of them.

    Raises:
        OSError: the system has no memory files (`memfd_create`).
    """

    def __init__(self, workers: int, per_worker: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("there is no memory without a name")
        fd = os.memfd_create("torch_sink")
        weakref.finalize(self, os.close, fd)
        super().__init__(fd, next(_numbers), 0, (workers, 1 + per_worker * EDITIONS, 4))
        self.workers = workers
        self.regions: list[numpy.ndarray[Any, Any]] = []  # the memory of all slabs, one more region each time they grow
        self._per_worker = per_worker
        self._begins: list[int] = []
        self._end = self.table_bytes
        os.ftruncate(fd, self._end)
        self._table = self.map_table()
        self._numbers = self._table.data  # reading single values from an array takes several times as long
        self._received = [[0] * self.shape[1] for _ in range(workers)]
        self._rows, self._bytes_each, self._is_full = 1, 0, False
        self._seen = self._missed = 0
        self._dead: deque[tuple[int, int]] = deque()
        self._settling = threading.Lock()
        self._pid = os.getpid()
        _slabs[self.number] = self

    @property
    def batches_before(self) -> int:
        """How many batches may arrive before the first one in a slab: those that show the size, and those under way."""
        return FIRST_BATCHES + self.workers * self._per_worker

    @property
    def batches_received(self) -> int:
        """How many batches arrived in slabs."""
        return sum(map(sum, self._received))

    def adapt(self) -> None:
        """Makes slabs, or larger ones, once too many batches found none of their size. Called for every batch."""
        self._seen += 1
        missed = sum([self._numbers[worker, 0, MISSED] for worker in range(self.workers)])
        if self._is_full or missed - self._missed < max(FIRST_BATCHES, self._seen // MISSES_OF):
            return
        self._seen, self._missed = 0, missed
        wanted = int(self._table[:, 0, WANTED].max())
        if wanted > self._bytes_each:
            self._grow(_pages(max(wanted + wanted // 8, 2 * self._bytes_each)))

    def _grow(self, bytes_each: int) -> None:
        workers, rows, _ = self.shape
        size = workers * self._per_worker * bytes_each
        try:
            if size > _available_bytes() // PART_OF_MEMORY:
                raise OSError(f"{_available_bytes():,} bytes are available")
            os.posix_fallocate(self.fd, self._end, size)
            self.regions.append(map_shared(self.fd, size, self._end))
        except OSError as error:
            self._is_full = True
            warn_of_rank(
                "%s bytes of shared memory for batches of %s bytes are not to be had (%s): such batches go through "
                "shared memory that is mapped anew for each of them, which costs CPU time",
                f"{size:,}", f"{bytes_each:,}", str(error),
            )  # fmt: skip
            return
        log.info("SinkLoader slabs: %s of %s bytes for each worker", self._per_worker, f"{bytes_each:,}")
        self._begins.append(self._end)
        first, self._rows = self._rows, self._rows + self._per_worker
        # Workers take a slab with a size to be ready, so its offset is written first.
        offsets = self._end + bytes_each * numpy.arange(workers * self._per_worker).reshape(workers, -1)
        self._table[:, first : self._rows, OFFSET] = offsets
        self._table[:, first : self._rows, BYTES] = bytes_each
        self._end += size
        self._bytes_each, self._is_full = bytes_each, self._rows + self._per_worker > rows

    def begin_generation(self, workers_before: list[Any]) -> None:
        """Prepares the table for new workers: batches that earlier workers have not delivered will never be read."""
        self.generation += 1
        if any(worker.is_alive() for worker in workers_before):
            # A worker that still runs may write to its slabs, so they are not used again.
            self._table[:, 1 : self._rows, BYTES] = 0
            self._bytes_each = 0
        self._table[:, 1:, SENT] = numpy.array(self._received)[:, 1:]

    def receive(self, generation: int, worker: int, rows: tuple[int, ...], data: bytes) -> Any:
        """Unpickles a batch from a worker's message."""
        if generation != self.generation:
            raise RuntimeError("this batch comes from a worker that was given up")
        self.adapt()
        parts = []
        for row in rows:
            offset, lease = self._numbers[worker, row, OFFSET], Lease()
            self._received[worker][row] += 1
            weakref.finalize(lease, self._release, worker, row).atexit = False
            edition = max(i for i, begin in enumerate(self._begins) if begin <= offset)
            parts.append((self.regions[edition], offset - self._begins[edition], lease))
        _message.parts, _message.storages = parts, {}
        try:
            return reduction.ForkingPickler.loads(data)
        finally:
            del _message.parts, _message.storages

    def _release(self, worker: int, row: int) -> None:
        """Frees a slab after the last tensor of its batch; runs in any thread, and may interrupt itself."""
        if os.getpid() != self._pid:
            return  # a forked process drops tensors of its parent
        self._dead.append((worker, row))
        while self._dead and self._settling.acquire(blocking=False):
            try:
                while self._dead:
                    worker, row = self._dead.popleft()
                    self._numbers[worker, row, RELEASED] += 1
            finally:
                self._settling.release()


def _available_bytes() -> int:
    """Bytes of memory that programs can get without swapping, at most a container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # there is no limit
        available.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(available)


def receive(number: int, *message: Any) -> Any:
    """Unpickles the message of a worker, by the `Slabs` with this number."""
    return _slabs[number].receive(*message)


def tensor_at(part: int, begin: int, size: int, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor in a slab, from the message that is being read; tensors that shared memory share it again."""
    storages = _message.storages
    if (part, begin) not in storages:
        region, start, lease = _message.parts[part]
        whole = tensor_over(region, start + begin, size, lease)
        storages[part, begin] = whole.untyped_storage()
        if (dtype, offset, shape, stride) == (whole.dtype, 0, (size,), (1,)):
            return whole
    return torch.empty(0, dtype=dtype, device="cpu").set_(storages[part, begin], offset, shape, stride)


def tensor_of(number: int, data: bytes, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor sent by value, from the message that is being read; those with the same number share memory."""
    storages = _message.storages
    if (_COPIED, number) not in storages:
        storages[_COPIED, number] = _storage_of(data)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storages[_COPIED, number], offset, shape, stride)


def tensor_alone(data: bytes, shape: Any, dtype: torch.dtype) -> Any:
    """A tensor, sent by value, that shares memory with no other one."""
    return torch.empty(0, dtype=dtype, device="cpu").set_(_storage_of(data), 0, shape)  # type: ignore[call-overload]


def _storage_of(data: bytes) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().untyped_storage()
