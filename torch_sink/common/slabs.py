"""Slabs: memory that data workers and the training process map once and keep; what is written there nobody copies.

A batch that crosses in a fresh shared mapping costs a page fault for every 4 KiB, on both sides, and a file descriptor
for every tensor. A slab is mapped already, and can be page-locked. Each worker has slabs of its own:

    worker                                             training process
    takes a slab that nobody uses, collates into it
    sends where the tensors lie, `sent` += 1  ──────►  tensors over the same memory, which keep the slab;
    the slab is free again when `sent` equals          when the last of them dies, `released` += 1
    `released` and no tensor of it lives here

Both counts lie in front of the slabs, and each has one writer. How large a batch is shows when it is collated: the
first ones, and later ones that do not fit or find no slab free, take torch's ordinary shared memory. The memory has no
name (a memfd), so nothing is left of it when the last process and the last tensor are gone, however they went.
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

log = logging.getLogger("torch_sink")

FIRST_BATCHES = 2  # that have to miss a slab of their size before there is one
MISSES_OF = 8  # slabs grow when one batch in so many is larger than they are
EDITIONS = 4  # times that slabs are made, each at least twice as large as before
PART_OF_MEMORY = 4  # they may take one part in so many of the memory that is available

# A row of the table: of the worker itself, then of each slab.
WANTED, MISSED = 0, 1
OFFSET, BYTES, SENT, RELEASED = 0, 1, 2, 3

_numbers = itertools.count()
_slabs: weakref.WeakValueDictionary[int, Slabs] = weakref.WeakValueDictionary()
_COPIED = -1  # stands for the number of a slab where a tensor was sent by value
_message = threading.local()  # in the training process: the memory that the message being read refers to


class Lease:
    """The use of a slab by the tensors of one batch; they keep it."""

    is_withdrawn = False


class Memory(numpy.ndarray[Any, Any]):
    """Part of a slab. A tensor made of it keeps this object, which keeps the lease."""

    lease: Lease


def tensor_over(region: numpy.ndarray[Any, Any], begin: int, size: int, lease: Lease) -> torch.Tensor:
    """uint8 [size] over a part of a slab, which keeps the lease as long as anything shares its storage."""
    part = region[begin : begin + size].view(Memory)
    part.lease = lease
    return torch.frombuffer(part, dtype=torch.uint8)


def map_shared(fd: int, size: int, offset: int = 0) -> numpy.ndarray[Any, Any]:
    """uint8 [size] of a file's memory, mapped until nobody refers to it."""
    return numpy.frombuffer(mmap.mmap(fd, size, offset=offset), numpy.uint8)


def _pages(size: int) -> int:
    """Bytes of whole pages."""
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class Offer:
    """What a worker needs to use slabs; the training process's `Slabs`, with that number, arrive there as this."""

    def __init__(self, fd: int, number: int, generation: int, shape: tuple[int, int, int]) -> None:
        self.fd, self.number, self.generation, self.shape = fd, number, generation, shape
        self.table_bytes = _pages(math.prod(shape) * 8)  # where the slabs begin

    def map_table(self) -> numpy.ndarray[Any, Any]:
        """int64 [workers, 1 + slabs, 4], shared."""
        values = map_shared(self.fd, self.table_bytes).view(numpy.int64)
        return values[: math.prod(self.shape)].reshape(self.shape)

    def __reduce__(self) -> Any:
        # While a process is started, this gives it the file; nobody else is sent an offer.
        duplicate = reduction.DupFd(self.fd)  # type: ignore[attr-defined]
        return _arrived, (duplicate, self.number, self.generation, self.shape)


def _arrived(duplicate: Any, *rest: Any) -> Offer:
    return Offer(duplicate.detach(), *rest)


class Slabs(Offer):
    """The slabs of a loader's workers, in the training process.

    Each of as many workers at a time has so many slabs.

    Raises:
        OSError: this system offers no such memory.
    """

    def __init__(self, workers: int, per_worker: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("there is no memory without a name")
        fd = os.memfd_create("torch_sink")
        weakref.finalize(self, os.close, fd)
        super().__init__(fd, next(_numbers), 0, (workers, 1 + per_worker * EDITIONS, 4))
        self.workers = workers
        self.regions: list[numpy.ndarray[Any, Any]] = []  # in which slabs lie, one more each time they grow
        self._per_worker = per_worker
        self._begins: list[int] = []
        self._end = self.table_bytes
        os.ftruncate(fd, self._end)
        self._table = self.map_table()
        self._numbers = self._table.data  # the same, one by one: an array takes several times as long for that
        self._received = [[0] * self.shape[1] for _ in range(workers)]
        self._rows, self._bytes_each, self._is_full = 1, 0, False
        self._seen = self._missed = 0
        self._dead: deque[tuple[int, int]] = deque()
        self._settling = threading.Lock()
        self._pid = os.getpid()
        _slabs[self.number] = self

    @property
    def batches_before(self) -> int:
        """Batches that may come before the first one in a slab: those that show its size, and what was under way."""
        return FIRST_BATCHES + self.workers * self._per_worker

    @property
    def batches_received(self) -> int:
        """Batches that came in slabs."""
        return sum(map(sum, self._received))

    def adapt(self) -> None:
        """Makes slabs, or larger ones, when too many batches found none of their size. Called at every batch."""
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
            log.warning(
                "%s bytes of shared memory for batches of %s bytes are not to be had (%s): such batches go through "
                "shared memory that is mapped anew for each of them, which costs CPU time",
                f"{size:,}", f"{bytes_each:,}", str(error),
            )  # fmt: skip
            return
        log.info("SinkLoader slabs: %s of %s bytes for each worker", self._per_worker, f"{bytes_each:,}")
        self._begins.append(self._end)
        first, self._rows = self._rows, self._rows + self._per_worker
        # A slab that has a size has an offset: that comes first.
        offsets = self._end + bytes_each * numpy.arange(workers * self._per_worker).reshape(workers, -1)
        self._table[:, first : self._rows, OFFSET] = offsets
        self._table[:, first : self._rows, BYTES] = bytes_each
        self._end += size
        self._bytes_each, self._is_full = bytes_each, self._rows + self._per_worker > rows

    def begin_generation(self, workers_before: list[Any]) -> None:
        """New workers are about to start: what those before have not delivered, nobody will read."""
        self.generation += 1
        if any(worker.is_alive() for worker in workers_before):
            self._table[:, 1 : self._rows, BYTES] = 0  # one could still write: its slabs are not used again
            self._bytes_each = 0
        self._table[:, 1:, SENT] = numpy.array(self._received)[:, 1:]

    def receive(self, generation: int, worker: int, rows: tuple[int, ...], data: bytes) -> Any:
        """A batch out of its message."""
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
        """The last tensor of a batch has died, in whatever thread, perhaps in the middle of this very function."""
        if os.getpid() != self._pid:
            return  # a forked process lets go of what is not its own
        self._dead.append((worker, row))
        while self._dead and self._settling.acquire(blocking=False):
            try:
                while self._dead:
                    worker, row = self._dead.popleft()
                    self._numbers[worker, row, RELEASED] += 1
            finally:
                self._settling.release()


def _available_bytes() -> int:
    """Memory that programs can have without swapping, and no more than a container's bound."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # there is none
        available.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(available)


def receive(number: int, *message: Any) -> Any:
    """What a worker sent, to the `Slabs` with that number."""
    return _slabs[number].receive(*message)


def tensor_at(part: int, begin: int, size: int, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor of the message that is being read; those that shared memory share it again."""
    storages = _message.storages
    if (part, begin) not in storages:
        region, start, lease = _message.parts[part]
        whole = tensor_over(region, start + begin, size, lease)
        storages[part, begin] = whole.untyped_storage()
        if (dtype, offset, shape, stride) == (whole.dtype, 0, (size,), (1,)):
            return whole
    return torch.empty(0, dtype=dtype, device="cpu").set_(storages[part, begin], offset, shape, stride)


def tensor_of(number: int, data: bytes, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> Any:
    """A tensor of the message that is being read, sent by value; those with the same number share memory again."""
    storages = _message.storages
    if (_COPIED, number) not in storages:
        copied = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
        storages[_COPIED, number] = copied.untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storages[_COPIED, number], offset, shape, stride)
