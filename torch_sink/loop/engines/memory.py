"""The memory pool of CUDA graphs, and the places of the tensors that a captured step reads and writes."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from torch_sink.loop.step.step import TrainingStep
from torch_sink.thread_waits import capture_lock, host_sync_allowed


class GraphHolder(Protocol):
    """An object that holds graphs of a pool."""

    def forget(self) -> None: ...


class GraphMemory:
    """A pool of device memory that all graphs of a loop share, for training and for evaluation.

    Sharing is safe because replays follow one another on one stream, and the results of a replay are used before the
    next one. Uncaptured work, such as the step of a short last batch, allocates in the pool too. In the default pool it
    would need a second set of activations, and a model that fills more than half of the device would run out of memory.
    Tensors of uncaptured work must not outlive it, because a replay writes over them.
    """

    def __init__(self) -> None:
        self.graphs = 0  # in the pool
        self._device = -1
        self._handle: Any = None
        self._holders: weakref.WeakSet[GraphHolder] = weakref.WeakSet()
        self._live: set[int] = set()  # addresses of the blocks that belong to graphs
        self._needed = 0  # bytes of the pool after the latest capture
        self._is_lent = False

    def join(self, holder: GraphHolder) -> None:
        """Add a holder of graphs, whose `forget` is called when the memory is given up."""
        self._holders.add(holder)

    def handle(self, device: int) -> Any:
        """The handle of the pool to capture into."""
        if self.graphs == 0:
            # torch cannot capture into a pool without graphs in which a tensor is still alive, so it gets a new one.
            self._device, self._handle, self._live = device, torch.cuda.graph_pool_handle(), set()
        return self._handle

    def note(self) -> None:
        """Take note, after a capture, of the blocks that belong to graphs."""
        self._live, self._needed = self._blocks(), self.reserved

    @property
    def reserved(self) -> int:
        """Bytes of device memory that the graphs keep."""
        return sum(segment["total_size"] for segment in self._segments()) if self.graphs else 0

    def make_room(self) -> bool:
        """Empty the allocator's cache if the device has less free memory than the graphs need.

        Needed before uncaptured work: while a thread allocates in a pool, the allocator does not do that by itself.
        Returns whether it then has it.
        """
        if self._is_tight():
            with capture_lock:
                torch.cuda.empty_cache()  # host sync
        return not self._is_tight()

    def _is_tight(self) -> bool:
        return self.graphs > 0 and torch.cuda.mem_get_info(self._device)[0] < self._needed

    @contextmanager
    def lent(self) -> Iterator[bool]:
        """A context in which uncaptured work of this thread allocates in the pool; gives False if there is no pool."""
        if not self.graphs or not _has_pools():
            yield False
            return
        if not self._is_lent and not self._holds_only(self._live):
            self._live = self._blocks()
        self._is_lent, device, handle = True, self._device, self._handle
        # Only this thread allocates in the pool, so backward passes have to stay in it. Meanwhile no thread may empty
        # the allocator's cache.
        with capture_lock, torch.autograd.set_multithreading_enabled(False):
            torch._C._cuda_beginAllocateCurrentThreadToPool(device, handle)
            try:
                yield True
            finally:
                torch._C._cuda_endAllocateToPool(device, handle)
                torch._C._cuda_releasePool(device, handle)
                torch._C._cuda_clearCublasWorkspaces()  # a workspace of this thread may lie in the pool

    def take_back(self) -> bool:
        """Whether all memory that was lent is free again; if not, all graphs are destroyed, as a last resort.

        A tensor that lives on, such as a cache that a forward pass keeps, then lies in memory that no graph writes to.
        """
        was_lent, self._is_lent = self._is_lent, False
        if not was_lent or not self.graphs or self._holds_only(self._live) or not self._blocks() - self._live:
            return True
        gc.collect()
        if not self._blocks() - self._live:
            return True
        self.give_up()
        return False

    def give_up(self) -> None:
        """Destroy all graphs; tensors that live in the pool stay valid."""
        with host_sync_allowed():
            for holder in [*self._holders]:
                holder.forget()

    def _holds_only(self, addresses: set[int]) -> bool:
        return bool(torch._C._cuda_checkPoolLiveAllocations(self._device, self._handle, addresses))

    def _blocks(self) -> set[int]:
        found = set()
        for segment in self._segments():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    found.add(address)
                address += block["size"]
        return found

    def _segments(self) -> list[dict[str, Any]]:
        if not _has_pools():
            return []
        snapshot = torch.cuda.memory_snapshot
        # A snapshot of torch 2.8 is without the traces, which take time.
        options = {"include_traces": False} if "include_traces" in inspect.signature(snapshot).parameters else {}
        segments: list[dict[str, Any]] = snapshot(self._handle, **options)
        return [segment for segment in segments if tuple(segment["segment_pool_id"]) == self._handle]


def _has_pools() -> bool:
    """Whether torch's native allocator is in use; `cudaMallocAsync` tells nothing about its pools."""
    return bool(torch._C._cuda_getAllocatorBackend() == "native")


class Places:
    """The addresses of tensors that a step may write to, at this moment: optimizer state and the model's buffers."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._kind = model, type(optimizer).__name__
        self._state: Any = optimizer.state if optimizer is not None else {}
        self._before = {key: (value, address(value)) for key, value in self._tensors().items()}

    def problem(self) -> str | None:
        """A message if a step has replaced one of the tensors, whose old memory a replay would use; else None."""
        now, kind = self._tensors(), self._kind
        moved = [key for key, (_, place) in self._before.items() if key not in now or address(now[key]) != place]
        names = {f"the buffer {name}" if isinstance(owner, nn.Module) else f"{name} of {kind}" for owner, name in moved}
        if not names:
            return None
        return (
            f"the step puts new tensors in the place of {', '.join(sorted(names))}, and a graph would go on with the "
            "old ones; what is written in place can be captured"
        )

    def put_back(self) -> None:
        """Undo what the capture of a step, which computes nothing, has done to state and buffers."""
        for parameter, name in self.new_state():
            del self._state[parameter][name]
        for (owner, name), (value, _) in self._before.items():
            entries = owner._buffers if isinstance(owner, nn.Module) else self._state[owner]
            entries[name] = value

    def new_state(self) -> set[Any]:
        """The owners and names of optimizer state that was created since then."""
        return _tensors(self._state).keys() - self._before.keys()

    def _tensors(self) -> dict[tuple[Any, str], Tensor]:
        buffers = {module: module._buffers for module in self._model.modules()}
        return _tensors(self._state) | _tensors(buffers)


def _tensors(owners: Any) -> dict[tuple[Any, str], Tensor]:
    entries = ((owner, name, value) for owner, named in owners.items() for name, value in named.items())
    return {(owner, name): value for owner, name, value in entries if isinstance(value, Tensor)}


def fingerprint(model: nn.Module, step: TrainingStep, optimizer: torch.optim.Optimizer, tabled: set[str]) -> Any:
    """All values that a graph of `step` holds as constants; if they differ from before, it has to be captured again.

    `tabled` are names of optimizer options that a graph reads from the device instead.
    """
    numbers = [
        (name, value if not isinstance(value, Tensor) else address(value))
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in tabled
    ]
    owned = [[*map(id, group["params"])] for group in optimizer.param_groups]
    # With their sizes: a tensor of another size may have got the memory of the one before.
    parameters = [(address(p), p.shape, p.requires_grad) for p in step.update.parameters]
    gradients = [address(p.grad) if p.grad is not None else 0 for p in step.update.parameters if step.static_gradients]
    entries = (entry for of_parameter in optimizer.state.values() for entry in of_parameter.values())
    optimizer_state = [address(entry) for entry in entries if isinstance(entry, Tensor)]
    averages = step.update.average.addresses() if step.update.average is not None else None
    numbers.append(("reduces_always", step.reduces_always))
    return numbers, owned, _modules_of(model), parameters, gradients, optimizer_state, averages


def places_of(model: nn.Module) -> Any:
    """The layers of a model, and where its parameters and buffers are: what a graph of its forward pass holds."""
    return _modules_of(model), [(address(parameter), parameter.shape) for parameter in model.parameters()]


def _modules_of(model: nn.Module) -> Any:
    modules = [*model.modules()]
    states = [(one, one.training, one.p if isinstance(one, _DropoutNd) else None) for one in modules]
    # model.buffers() takes four times as long, and the device is idle meanwhile.
    held = [buffer for one in modules for buffer in one._buffers.values() if buffer is not None]
    return states, [(address(buffer), buffer.shape) for buffer in held]


def address(tensor: Tensor) -> int:
    """The address of a tensor's values; for a sharded tensor, of this rank's part."""
    if type(tensor) is Tensor or type(tensor) is nn.Parameter:
        return tensor.data_ptr()
    local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's own address is 0
    return int(local.data_ptr())
