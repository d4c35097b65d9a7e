"""The worker's side of slabs: collates batches into shared memory, and sends where in it their tensors lie."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from typing import Any

import numpy
import torch
from torch.multiprocessing import reductions

from torch_sink.common import segments
from torch_sink.common.containers import flatten, is_plain, is_transparent
from torch_sink.common.slabs import (
    BYTES,
    MISSED,
    OFFSET,
    RELEASED,
    SENT,
    WANTED,
    Lease,
    Offer,
    map_shared,
    receive,
    tensor_alone,
    tensor_at,
    tensor_of,
    tensor_over,
)

ALIGNMENT_BYTES = 64
# Shared memory outside the slabs costs the receiver a connection to the worker.
MOST_COPIED_BYTES = 1 << 14
# What `sys.getrefcount` says of a tensor that only a view of it keeps.
_a_view = torch.empty(1, device="cpu").view(-1)
_REFERENCES_OF_A_VIEW = sys.getrefcount(_a_view._base)


def send_small_tensors_by_value(*kinds: Any) -> None:
    """From now on, small tensors such as labels, and of some subclasses, travel in the messages of this data worker."""
    for kind in (torch.Tensor, *kinds):
        reduction.ForkingPickler.register(kind, _reduce_alone)


def _reduce_alone(tensor: torch.Tensor) -> Any:
    """As torch, but by value where the tensor is small and shares memory with no other one."""
    kind: Any = type(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        is_small = _is_small_and_alone(tensor)
        values = (_bytes_of(tensor.untyped_storage()), tuple(tensor.shape), tensor.dtype) if is_small else ()
    if kind is torch.Tensor:
        return (tensor_alone, values) if is_small else reductions.reduce_tensor(tensor)
    if not is_small:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
    return torch._tensor._rebuild_from_type_v2, (tensor_alone, kind, values, state)


def _is_small_and_alone(tensor: torch.Tensor) -> bool:
    is_ordinary = tensor.device.type == "cpu" and tensor.layout is torch.strided
    is_ordinary = is_ordinary and not (tensor.is_nested or tensor.is_quantized)
    if not is_ordinary or not 0 < tensor.nbytes <= segments.MOST_BYTES_IN_MESSAGE or not tensor.is_contiguous():
        return False
    # A tensor of a subclass is a view, which keeps the tensor that it is a view of.
    is_view = tensor._base is not None
    if is_view and sys.getrefcount(tensor._base) != _REFERENCES_OF_A_VIEW:
        return False
    storage = tensor.untyped_storage()
    is_alone = torch._C._storage_Use_Count(storage._cdata) == 2 + is_view  # type: ignore[attr-defined]
    is_whole = storage.nbytes() == tensor.nbytes and not storage.is_shared()
    return is_alone and is_whole and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj())


def _bytes_of(storage: torch.UntypedStorage) -> bytes:
    values = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)  # type: ignore[call-overload]
    return values.numpy().tobytes()


def _is_on_host(leaf: Any) -> bool:
    """Whether `leaf` is an ordinary tensor in this machine's memory."""
    return is_plain(leaf) and leaf.device.type == "cpu"


class Writer:
    """A worker's view of its slabs. One thread of the worker collates, another one sends."""

    def __init__(self, slabs: Offer, worker: int) -> None:
        self.slabs, self.worker = slabs, worker
        self.table = slabs.map_table()[worker]
        self._regions: dict[int, tuple[int, numpy.ndarray[Any, Any]]] = {}  # row of the table -> address and memory
        self._leases: dict[int, weakref.ref[Lease]] = {}
        self._lease: Lease | None = None  # while a batch is collated
        self._row = self._used = self._asked = self._expected = 0

    def take_over(self) -> None:
        """From now on, what this data worker allocates for its batches lies in slabs if one fits."""
        segments.give_up()
        stock = torch.UntypedStorage._new_shared

        def new_shared(cls: Any, size: int, *, device: Any = "cpu") -> Any:
            """Stand-in for the function by which collate functions allocate shared memory."""
            made = self.allocate(size) if torch.device(device).type == "cpu" else None
            return stock(size, device=device) if made is None else made.untyped_storage()

        torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment, method-assign]

    def written(self, make: Callable[[], Any]) -> Any:
        """The batch that `make` returns, with its tensors in a slab if one fits."""
        with self.collating():
            batch = make()
            if is_transparent(batch):
                return self.moved_in(batch)
            # Code that gets an object of another class may start a copy from its tensors and drop them before the
            # copy is done; a slab would then be written to again too early.
            self.withdraw()
            return batch

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        """A context for one batch: all that `allocate` returns inside belongs to it."""
        self._lease, self._row, self._used, self._asked = Lease(), 0, 0, 0
        try:
            yield
        finally:
            self._lease, self._expected = None, self._asked
            if self._asked > self.table[1:, BYTES].max():
                self.table[0, WANTED] = max(self.table[0, WANTED], self._asked)
                self.table[0, MISSED] += 1

    def withdraw(self) -> None:
        """Sends the batch that is being collated through torch's ordinary shared memory."""
        if self._lease is not None:
            self._lease.is_withdrawn = True

    def allocate(self, size: int) -> torch.Tensor | None:
        """Memory for the batch that is being collated, uint8 [size]; None if no slab has room."""
        if self._lease is None or size == 0:
            return None
        padded = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._asked += padded
        if self._row == 0:
            self._row = self._free_row(max(padded, self._expected))
            self._leases[self._row] = weakref.ref(self._lease)
        begin, end = self._used, self._used + padded
        if self._row == 0 or end > self.table[self._row, BYTES]:
            return None
        self._used = end
        return tensor_over(self._region(self._row)[1], begin, size, self._lease)

    def moved_in(self, batch: Any) -> Any:
        """The batch, with tensors that were allocated elsewhere, such as by NumPy, copied into the slab.

        Sending them would copy them too, to newly mapped memory. Tensors that share memory with others stay in place.
        """
        flat = flatten(batch)
        users = Counter(leaf.untyped_storage().data_ptr() for leaf in flat.leaves if _is_on_host(leaf))

        def move(leaf: Any) -> Any:
            if not _is_on_host(leaf) or leaf.nbytes <= MOST_COPIED_BYTES or leaf.requires_grad or leaf.is_shared():
                return leaf
            storage = leaf.untyped_storage()
            address, is_whole = storage.data_ptr(), leaf.is_contiguous() and storage.nbytes() == leaf.nbytes
            if not is_whole or users[address] > 1 or self._find(address)[0]:
                return leaf
            place = self.allocate(leaf.nbytes)
            return leaf if place is None else place.view(leaf.dtype).view(leaf.shape).copy_(leaf)

        return flat._replace(leaves=[move(leaf) for leaf in flat.leaves]).batch()

    def _free_row(self, size: int) -> int:
        """The row of a free slab of at least `size` bytes; 0 if there is none."""
        for row in numpy.flatnonzero(self.table[1:, BYTES] >= size) + 1:
            lease = self._leases.get(int(row), lambda: None)()
            # First the lease, then the counts: the sender counts a batch before it drops its lease.
            if lease is None and self.table[row, OFFSET] and self.table[row, SENT] == self.table[row, RELEASED]:
                return int(row)
        return 0

    def _region(self, row: int) -> tuple[int, numpy.ndarray[Any, Any]]:
        if row not in self._regions:
            memory = map_shared(self.slabs.fd, int(self.table[row, BYTES]), int(self.table[row, OFFSET]))
            self._regions[row] = memory.ctypes.data, memory
        return self._regions[row]

    def message(self, batch: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles the batch, as a function and its arguments.

        A tensor in a slab is sent as its place there, another small one (labels) by value.
        """
        rows: list[int] = []
        copies: dict[int, tuple[int, bytes]] = {}
        written = io.BytesIO()
        pickler: Any = reduction.ForkingPickler(written)
        pickler.dispatch_table[torch.Tensor] = functools.partial(self._reduce_tensor, rows, copies)
        pickler.dump(batch)
        for row in rows:
            self.table[row, SENT] += 1
        slabs = self.slabs
        return receive, (slabs.number, slabs.generation, self.worker, tuple(rows), written.getvalue())

    def _reduce_tensor(self, rows: list[int], copies: dict[int, tuple[int, bytes]], tensor: torch.Tensor) -> Any:
        if not _is_on_host(tensor) or tensor.requires_grad or tensor.is_neg() or tensor.is_conj():
            return reductions.reduce_tensor(tensor)
        storage = tensor.untyped_storage()
        address, layout = storage.data_ptr(), (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        row, begin = self._find(address)
        if row:
            if row not in rows:
                rows.append(row)
            return tensor_at, (rows.index(row), begin, storage.nbytes(), *layout, tensor.dtype)
        if not 0 < storage.nbytes() <= MOST_COPIED_BYTES or storage.is_shared():
            return reductions.reduce_tensor(tensor)
        if address not in copies:
            copies[address] = len(copies), _bytes_of(storage)
        return tensor_of, (*copies[address], *layout, tensor.dtype)

    def _find(self, address: int) -> tuple[int, int]:
        """The row of the slab that holds an address, and the offset in it; row 0 if no slab does."""
        for row, (start, memory) in list(self._regions.items()):
            lease = self._leases[row]()
            if start <= address < start + memory.size and lease is not None and not lease.is_withdrawn:
                return row, address - start
        return 0, 0
