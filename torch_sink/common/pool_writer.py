"""The worker's side of a pool: batches are written to shared memory, and messages say where in it their tensors lie."""

from __future__ import annotations

import contextlib
import copyreg
import io
import mmap
import os
import pickle
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.multiprocessing import reductions

from torch_sink.common import after_fork_in_child
from torch_sink.common.containers import flatten, is_plain, is_transparent
from torch_sink.common.pool import (
    BYTES,
    MOST_SLABS,
    OFFSET,
    RELEASED,
    SENT,
    Lease,
    Offer,
    map_shared,
    note_full,
    pages,
    receive,
    receive_alone,
    tensor_at,
    tensor_of,
    tensor_over,
)

ALIGNMENT_BYTES = 64
MOST_BYTES_IN_MESSAGE = 1 << 16  # what is smaller costs less in the message itself
ROOM = 9 / 8  # capacity of a slab, in sizes of the largest batch so far
IDLE_BATCHES = 64  # a slab that was not needed for so many batches is given back
PART_OF_MEMORY = 4  # all slabs take at most one part in so many of the available memory
# What `sys.getrefcount` says of a tensor that only a view of it keeps.
_a_view = torch.empty(1, device="cpu").view(-1)
_REFERENCES_OF_A_VIEW = sys.getrefcount(_a_view._base)


class _Slab:
    """A slab that a worker uses: where it lies in the worker's part of the file, and who uses it here."""

    def __init__(self, row: int, begin: int, capacity: int) -> None:
        self.row, self.begin, self.capacity = row, begin, capacity
        self.allocated = 0  # bytes that have memory
        self.turn = 0
        self.lease: Callable[[], Lease | None] = lambda: None  # of its batch, while that lives in the worker
        self.children: list[Any] = []  # processes that the worker has forked meanwhile, and that may read the batch

    def use(self, lease: Lease, turn: int) -> None:
        """Notes the lease of a batch that is written."""
        self.lease, self.children, self.turn = weakref.ref(lease), lease.children, turn


class _Reducers(dict[type, Callable[[Any], Any]]):
    """How objects of each class are pickled; of the others, as `ForkingPickler` does."""

    def __missing__(self, kind: type) -> Any:
        found = reduction.ForkingPickler._extra_reducers.get(kind)  # type: ignore[attr-defined]
        return copyreg.dispatch_table[kind] if found is None else found


class Writer:
    """A worker's view of its slabs. One thread of the worker collates, others may too, another one sends.

    Args:
        pool: of the process that started the worker; None if there is none, and only messages are made.
        worker: its number.

    Attributes:
        takes_all: all tensors of a batch may lie in slabs, and small ones that share memory travel by value too; else
            what asks for `allocate`.
    """

    def __init__(self, pool: Offer | None, worker: int) -> None:
        self.worker, self.takes_all = worker, False
        self._reducers = _Reducers({torch.Tensor: self._reduce})
        self._rows: dict[int, Lease] = {}  # of the slabs in the message that is being pickled
        self._copies: dict[int, tuple[int, bytes]] = {}  # tensors in it, by address: number and values
        self._lock = threading.Lock()
        self._slabs: dict[int, _Slab] = {}  # by row
        self._address = 0  # of this worker's part of the file
        self._lease: Lease | None = None  # while a batch is collated
        self._slab: _Slab | None = None  # the one that it is written to
        self._used = self._asked = self._expected = self._largest = self._turn = 0
        self._lacks = ""  # what the training process is to be told, once
        self.pool: Offer | None = None
        if pool is not None and worker < pool.workers:
            with contextlib.suppress(OSError):  # there are no addresses for it
                self._map(pool)
                self.pool = pool

    def _map(self, pool: Offer) -> None:
        """Maps the table and this worker's part of the file, and takes over the slabs of an earlier worker."""
        begin = pool.table_bytes + self.worker * pool.span
        self._begin = begin
        self._mapped = map_shared(pool.fd, pool.span, begin)
        self._memory = numpy.frombuffer(self._mapped, numpy.uint8)
        self._address = self._memory.ctypes.data
        table = pool.table_in(numpy.frombuffer(map_shared(pool.fd, pool.table_bytes), numpy.uint8))[self.worker]
        self._numbers = table.data
        for row, (offset, capacity, *_) in enumerate(table.tolist()):
            if capacity:
                self._slabs[row] = _Slab(row, offset - begin, capacity)

    # --- memory

    def allocate(self, size: int) -> torch.Tensor | None:
        """Memory for a part of a batch that is cheap to send, uint8 [size]; None if there is none."""
        if size == 0 or self.pool is None:
            return None
        lease = self._lease or Lease()
        with self._lock:
            try:
                slab, begin = (self._free_slab(size), 0) if self._lease is None else self._next_place(size)
                if slab is None:
                    return None
                slab.use(lease, self._turn)
                self._grow(slab, begin + size)
            except OSError as error:
                self._lacks = self._lacks or str(error)
                return None
        return tensor_over(self._memory, slab.begin + begin, size, lease)

    def _next_place(self, size: int) -> tuple[_Slab | None, int]:
        """A slab for a part of the batch that is being collated, and where in it: behind the parts before."""
        padded = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        slab, begin = self._slab, self._used
        if slab is None or begin + padded > slab.capacity:
            slab, begin = self._free_slab(max(padded, self._expected - self._asked)), 0
        self._asked += padded
        self._slab, self._used = slab, begin + padded
        return slab, begin

    def _grow(self, slab: _Slab, end: int) -> None:
        """Allocates memory in one call, instead of with a page fault for every page."""
        if end > slab.allocated:
            assert self.pool is not None
            size = end - slab.allocated
            os.posix_fallocate(self.pool.fd, self._begin + slab.begin + slab.allocated, size)
            slab.allocated = end

    def _free_slab(self, size: int) -> _Slab | None:
        """A free slab of at least `size` bytes, made if there is none; those that are too small or idle are given back.

        None if all are in use.
        """
        self._turn, found = self._turn + 1, None
        self._largest = max(self._largest, size)
        for row, slab in list(self._slabs.items()):
            # First the lease, then the counts: the sender counts a batch before it drops its lease.
            if slab.lease() is not None or self._numbers[row, SENT] != self._numbers[row, RELEASED]:
                continue
            if slab.children and any(child.lives() for child in slab.children):
                continue
            if slab.capacity < size or self._turn - slab.turn > IDLE_BATCHES:
                self._give_back(slab)
            elif found is None:
                found = slab
        return found or self._new_slab(pages(self._largest * ROOM))

    def _give_back(self, slab: _Slab) -> None:
        self._numbers[slab.row, BYTES] = 0
        del self._slabs[slab.row]
        with contextlib.suppress(OSError):
            self._mapped.madvise(mmap.MADV_REMOVE, slab.begin, slab.capacity)

    def _new_slab(self, capacity: int) -> _Slab | None:
        """Makes a slab in the first gap of this worker's part of the file; None if there are enough.

        Raises:
            OSError: there is no memory for it.
        """
        row = next((row for row in range(MOST_SLABS) if row not in self._slabs), None)
        if row is None or self._lacks:
            return None
        assert self.pool is not None
        begin, taken = 0, sum(slab.capacity for slab in self._slabs.values())
        for slab in sorted(self._slabs.values(), key=lambda slab: slab.begin):
            if begin + capacity <= slab.begin:
                break
            begin = slab.begin + slab.capacity
        workers, available = self.pool.workers, _available_bytes()
        if (taken + capacity) * workers > (available + taken * workers) // PART_OF_MEMORY:
            raise OSError(f"batches of {capacity:,} bytes, {available:,} bytes are available")
        if begin + capacity > self.pool.span:
            raise OSError(f"batches of {capacity:,} bytes are too large for the pool")
        self._slabs[row] = slab = _Slab(row, begin, capacity)
        # A later worker takes over a slab with a size, so its offset is written first.
        self._numbers[row, OFFSET] = self._begin + begin
        self._numbers[row, BYTES] = capacity
        return slab

    # --- batches

    def take_over(self) -> None:
        """From now on all tensors of this data worker's batches may lie in slabs."""
        self.takes_all = True
        stock = torch.UntypedStorage._new_shared

        def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
            """Stand-in for the function by which collate functions allocate shared memory."""
            is_for_batch = _writer is self and self._lease is not None and torch.device(device).type == "cpu"
            made = self.allocate(size) if is_for_batch else None
            return stock(size, device=device) if made is None else made.untyped_storage()

        torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment, method-assign]

    def written(self, make: Callable[[], Any]) -> Any:
        """The batch that `make` returns, in a slab if all of it may lie in one."""
        if not self.takes_all:
            return make()
        lease = self._lease = Lease()
        self._slab, self._used, self._asked = None, 0, 0
        try:
            batch = make()
            if is_transparent(batch):
                return self.moved_in(batch)
            # Code that gets an object of another class may start a copy from its tensors and drop them before the
            # copy is done; a slab would then be written to again too early.
            lease.is_withdrawn = True
            return batch
        finally:
            self._lease, self._slab, self._expected = None, None, self._asked

    def moved_in(self, batch: Any) -> Any:
        """The batch, with tensors that were allocated elsewhere, such as by NumPy, copied into the slab.

        Sending them would copy them too, to newly mapped memory. Tensors that share memory with others stay in place.
        """
        flat = flatten(batch)
        users = Counter(leaf.untyped_storage().data_ptr() for leaf in flat.leaves if _is_on_host(leaf))

        def move(leaf: Any) -> Any:
            if not _is_on_host(leaf) or leaf.nbytes <= MOST_BYTES_IN_MESSAGE or leaf.requires_grad or leaf.is_shared():
                return leaf
            storage = leaf.untyped_storage()
            address, is_whole = storage.data_ptr(), leaf.is_contiguous() and storage.nbytes() == leaf.nbytes
            if not is_whole or users[address] > 1 or self._find(address) is not None:
                return leaf
            place = self.allocate(leaf.nbytes)
            return leaf if place is None else place.view(leaf.dtype).view(leaf.shape).copy_(leaf)

        return flat._replace(leaves=[move(leaf) for leaf in flat.leaves]).batch()

    # --- messages

    def message(self, batch: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles the batch, as a function and its arguments; called by the thread that sends.

        A tensor in a slab is sent as its place there, another small one, such as labels, by value.
        """
        written = io.BytesIO()
        pickler: Any = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = self._reducers
        try:
            pickler.dump(batch)
            rows = tuple(self._rows)
            for row in rows:
                self._numbers[row, SENT] += 1
        finally:
            self._rows, self._copies = {}, {}
        if self.pool is None:
            return receive_alone, (written.getvalue(),)
        return receive, (self.pool.number, self.pool.generation, self.worker, rows, written.getvalue())

    def sends_by_value(self, *kinds: type) -> None:
        """From now on, tensors of these classes travel in the message if they are small."""
        self._reducers.update(dict.fromkeys(kinds, self._reduce))

    def _reduce(self, tensor: torch.Tensor) -> Any:
        kind: Any = type(tensor)
        if kind is torch.Tensor:
            return self._sent(tensor) or reductions.reduce_tensor(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            sent = self._sent(tensor)
        if sent is None:
            return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
        return torch._tensor._rebuild_from_type_v2, (sent[0], kind, sent[1], state)

    def _sent(self, tensor: torch.Tensor) -> Any:
        """The function and its arguments that make the tensor; None for one that is sent in torch's way."""
        is_ordinary = tensor.device.type == "cpu" and tensor.layout is torch.strided
        is_ordinary = is_ordinary and not (tensor.is_nested or tensor.is_quantized)
        if not is_ordinary or tensor.requires_grad or tensor.is_neg() or tensor.is_conj():
            return None
        storage = tensor.untyped_storage()
        address, layout = storage.data_ptr(), (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        slab = self._find(address)
        lease = None if slab is None else slab.lease()
        # Another thread may be sending the batch elsewhere, which moves it: its lease is held until it is counted.
        if slab is not None and lease is not None and storage.data_ptr() == address:
            self._rows.setdefault(slab.row, lease)
            begin = address - self._address - slab.begin
            return tensor_at, (list(self._rows).index(slab.row), begin, storage.nbytes(), *layout, tensor.dtype)
        if not 0 < storage.nbytes() <= MOST_BYTES_IN_MESSAGE or storage.is_shared():
            return None
        if not (self.takes_all or _is_alone(tensor, storage)):
            return None
        if address not in self._copies:
            values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload]
            self._copies[address] = len(self._copies), values.numpy().tobytes()
        return tensor_of, (*self._copies[address], *layout, tensor.dtype)

    def _find(self, address: int) -> _Slab | None:
        """The slab that holds an address, if its batch is to travel in it."""
        at = address - self._address
        for slab in list(self._slabs.values()):
            if slab.begin <= at < slab.begin + slab.capacity:
                lease = slab.lease()
                return None if lease is None or lease.is_withdrawn else slab
        return None

    def tell(self) -> tuple[Callable[[Any], object], Any] | None:
        """What the training process is to be told of memory that is lacking; None if nothing, or if it was told."""
        if self.pool is None or self._lacks in ("", _TOLD):
            return None
        lacks, self._lacks = self._lacks, _TOLD
        return note_full, (self.pool.number, lacks)


_TOLD = "told"
_writer: Writer | None = None  # of this process, if it is a data worker


def become_writer(pool: Offer | None, worker: int) -> Writer:
    """Makes the writer of this data worker."""
    global _writer
    _writer = Writer(pool, worker)
    return _writer


def _leave_to_parent() -> None:
    global _writer
    _writer = None


after_fork_in_child(_leave_to_parent)


def allocate(size: int) -> torch.Tensor | None:
    """Memory for a part of a batch of this data worker that is cheap to send, uint8 [size]; None if there is none."""
    if _writer is None:
        return None
    if size <= MOST_BYTES_IN_MESSAGE and not _writer.takes_all:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    return _writer.allocate(size)


def _is_on_host(leaf: Any) -> bool:
    """Whether `leaf` is an ordinary tensor in this machine's memory."""
    return is_plain(leaf) and leaf.device.type == "cpu"


def _is_alone(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether no other tensor shares the memory of this one."""
    # A tensor of a subclass is a view, which keeps the tensor that it is a view of.
    is_view = tensor._base is not None
    if is_view and sys.getrefcount(tensor._base) != _REFERENCES_OF_A_VIEW:
        return False
    return torch._C._storage_Use_Count(storage._cdata) == 2 + is_view  # type: ignore[attr-defined,no-any-return]


def _available_bytes() -> int:
    """Bytes of memory that programs can get without swapping, at most a container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):  # there is no limit
        available.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(available)
