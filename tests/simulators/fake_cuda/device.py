"""The fake device in the place of `torch.cuda`."""

from __future__ import annotations

import inspect
import itertools
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import trace_rules
from torch.autograd import graph as autograd_graph

from .autograd import Contexts, EngineThread, backward_of
from .graphs import Captures, FakeGraph
from .guard import set_guard
from .host_memory import HostAllocator
from .kernels import Kernels
from .memory import Allocator
from .random_numbers import Generator, run_with
from .streams import CUDA, FakeAcceleratorEvent, FakeEvent, FakeStream, OnDevice, OnStream, Queues

SYNC_MODES = {0: 0, 1: 1, 2: 2, "default": 0, "warn": 1, "error": 2}


class FakeCuda:
    """CUDA devices in slow motion.

    Args:
        seed: of the order in which streams get on.
        devices: how many; at most 8.
        release: how captures fail: "2.11" leaves the allocators and the generator in the capture, "2.12" the allocators,
            "2.15" nothing. And whether autograd can take nodes of other streams into a capture: "2.15" can.
        memory: bytes on each device.

    Attributes:
        calls: how often each kernel was called from Python.
        host_waits_seen: what made the host wait, in order.
        waits: how often which thread waited, by its name, what it waited for, and whether it "sleeps" or "spins" there.
        graphs_begun: captures so far, failed ones too.
        leaks_failed_captures: a capture that fails leaves the allocators in it.
        leaves_generators: and the generator.
        registered: bytes of each piece of host memory that was page-locked where it lies, by address.
        refuses_to_register: there is no more memory that can be.
        overrides_stale_streams: as `torch.autograd.graph.set_override_stale_capture_stream` sets it.
        engine: the thread of backward passes.
    """

    def __init__(self, seed: int = 0, devices: int = 1, release: str | None = None, memory: int = 80 << 30) -> None:
        if release is None:
            overrides = hasattr(autograd_graph, "set_override_stale_capture_stream")
            release = "2.15" if overrides else "2.12" if torch.__version__ >= (2, 12) else "2.11"
        self.leaks_failed_captures, self.leaves_generators = release in ("2.11", "2.12"), release == "2.11"
        self.overrides_stale_streams = False
        self.engine = EngineThread(self)
        self.device_count = devices
        self.queues = Queues(seed)
        self.allocator, self.host_allocator = Allocator(self, memory), HostAllocator()
        self.captures = Captures(self)
        self.generators = [Generator() for _ in range(devices)]
        self.calls: Counter[str] = Counter()
        self.host_waits_seen: list[str] = []
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.graphs_begun = 0
        self._pool_ids = itertools.count(1)
        self._streams: dict[tuple[int, int], FakeStream] = {}
        self.registered: dict[int, int] = {}
        self.refuses_to_register = False
        self._sync_mode = 0
        self._process = os.getpid()

    # Devices and streams

    def index_of(self, device: Any = None) -> int:
        """The number of a device, given in any way that torch takes."""
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return torch._C._accelerator_getDeviceIndex() if index is None else index

    def device_of(self, device: Any = None) -> torch.device:
        """The same as a torch.device."""
        return torch.device("cuda", self.index_of(device))

    def stream_of(self, handle: Any) -> FakeStream:
        """The stream behind one of torch's own stream objects."""
        if isinstance(handle, FakeStream):
            return handle
        key = handle.device_index, handle.stream_id
        if key not in self._streams:
            self._streams[key] = FakeStream(key[0], stream_id=key[1])
        return self._streams[key]

    def current_stream(self, device: Any = None) -> FakeStream:
        """`torch.cuda.current_stream`."""
        return self.stream_of(torch._C._accelerator_getStream(self.index_of(device)))

    def default_stream(self, device: Any = None) -> FakeStream:
        """`torch.cuda.default_stream`."""
        index = self.index_of(device)
        return self.stream_of(torch.Stream(stream_id=0, device_index=index, device_type=CUDA))

    def set_stream(self, stream: FakeStream | None) -> None:
        """`torch.cuda.set_stream`."""
        if stream is not None:
            torch._C._accelerator_setDeviceIndex(stream.device.index)
            torch._C._accelerator_setStream(stream.handle)

    # Waiting

    def host_waits(
        self, what: str, *, stream: FakeStream | None = None, counts: bool = True, sleeps: bool = False
    ) -> None:
        """The host is about to wait: not inside a capture, and not where the sync debug mode forbids it."""
        with self.queues.lock:
            self.captures.forbid(what, stream.capture if stream is not None else self.captures.here())
        if not counts:
            return
        self.host_waits_seen.append(what)
        self.waits[threading.current_thread().name, what, "sleeps" if sleeps else "spins"] += 1
        if self._sync_mode and not what.endswith(".synchronize"):
            if self._sync_mode == 2:
                raise RuntimeError("called a synchronizing CUDA operation")
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=2)

    def drain_stream(self, stream: FakeStream) -> None:
        """Run all work of a stream, and what it waits for."""
        queue = self.queues.of(stream)
        self.queues.wait_for(lambda: not queue)

    def synchronize(self, device: Any = None) -> None:
        """`torch.cuda.synchronize`: forbidden while any stream of the device captures, in any thread."""
        with self.queues.lock:
            self.captures.forbid("cudaDeviceSynchronize", self.captures.current)
        self.host_waits_seen.append("torch.cuda.synchronize")
        self.queues.wait_for(lambda: self.queues.is_idle(self.index_of(device)))

    def set_sync_debug_mode(self, debug_mode: int | str) -> None:
        """`torch.cuda.set_sync_debug_mode`: one mode for the process."""
        warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        self._sync_mode = SYNC_MODES[debug_mode]

    # Kernels

    def count(self, name: str) -> None:
        """Note a call of a kernel."""
        self.calls[name] += 1

    def with_draws(self, stream: FakeStream, run: Callable[[], None]) -> Callable[[], None]:
        """A kernel that draws random numbers: its offset is decided now, inside a graph at each replay."""
        generator = self.generators[stream.device.index]
        capture = stream.capture
        if capture is not None:
            first, offset = capture.graph.draw()
            return lambda: run_with(generator.seed, first[0] + offset, run)
        seed, drawn = generator.seed, generator.draw()
        return lambda: run_with(seed, drawn, run)

    # Page-locked memory

    def is_pinned(self, tensor: Tensor) -> bool:
        """`Tensor.is_pinned`."""
        is_allocated = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self.host_allocator
        return is_allocated or self.is_registered(tensor)

    def is_registered(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in memory that was page-locked where it lies."""
        address = 0 if tensor.is_cuda else tensor.data_ptr()
        return any(begin <= address < begin + size for begin, size in self.registered.items())

    def pin(self, tensor: Tensor) -> Tensor:
        """Make a tensor's memory page-locked."""
        self.captures.forbid("cudaHostAlloc", self.captures.here())
        self.host_allocator.add(tensor)
        return tensor

    def host_register(self, address: int, size: int, flags: int) -> int:
        """`cudaHostRegister`: 0, or the number of an error."""
        self.captures.forbid("cudaHostRegister", self.captures.here())
        if self.refuses_to_register:
            return 2  # cudaErrorMemoryAllocation
        if address in self.registered:
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[address] = size
        return 0

    def host_unregister(self, address: int) -> int:
        """`cudaHostUnregister`."""
        assert not self.queues.run_some(), "memory is given back while work may still read it"
        return 0 if self.registered.pop(address, None) is not None else 713  # cudaErrorHostMemoryNotRegistered

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """`Tensor.pin_memory`."""
        return tensor if self.is_pinned(tensor) else self.pin(tensor.clone())

    def _pin_memory_of(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """In the place of the stock method; a lazy image does with it what it does with the stock one."""

        def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
            calls = getattr(type(tensor), "calls", {})
            return calls.get(stock, calls.get(pin_memory, self.pin_memory))(tensor)

        return pin_memory

    def clone_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """`UntypedStorage.clone`, by which tensors are copied deeply."""
        return _bytes_of(storage).clone().untyped_storage()

    def move_storage(self, storage: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        """`UntypedStorage.to`, by which `torch.load` brings to a device what it has read."""
        return _bytes_of(storage).to(device, non_blocking=non_blocking).untyped_storage()

    # Graphs and generators

    def new_pool_handle(self) -> Any:
        """`torch.cuda.graph_pool_handle`."""
        return (0, next(self._pool_ids))

    def manual_seed_all(self, seed: int) -> None:
        """`torch.cuda.manual_seed_all`."""
        for generator in self.generators:
            generator.seed, generator.offset = int(seed), 0

    def get_rng_state(self, device: Any = None) -> Tensor:
        """`torch.cuda.get_rng_state`; in a capture it holds the offset in the graph."""
        graph = self._capturing_graph(device)
        return self.generators[self.index_of(device)].get_state(None if graph is None else graph.draws)

    def set_rng_state(self, new_state: Tensor, device: Any = None) -> None:
        """`torch.cuda.set_rng_state`; in a capture it goes back, or on, in the graph, and keeps the seed."""
        graph, generator = self._capturing_graph(device), self.generators[self.index_of(device)]
        if graph is None:
            generator.set_state(new_state)
        else:
            graph.draws = generator.offset_in_graph(new_state)

    def _capturing_graph(self, device: Any) -> FakeGraph | None:
        capture = self.current_stream(device).capture
        return capture.graph if capture is not None else None

    # In the place of torch.cuda

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Take the place of `torch.cuda` until `patch` is undone."""
        # Dynamo makes its list of torch's functions once, when it first compiles: it must not hold those put here.
        trace_rules.get_torch_obj_rule_map()
        kernels, contexts = _replacements()
        kernels.cuda = self
        contexts.install()
        patch.setattr(FakeStream, "cuda", self, raising=False)
        patch.setattr(FakeEvent, "cuda", self, raising=False)
        patch.setattr(OnDevice, "cuda", self, raising=False)
        patch.setattr(FakeGraph, "cuda", self, raising=False)
        for name, value in self._names().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch, "Event", FakeAcceleratorEvent)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (*self.current_stream(index).key, CUDA))
        patch.setattr(torch._C, "_host_emptyCache", self.host_allocator.empty_cache)
        for name, function in self._functions_of_pools().items():
            patch.setattr(torch._C, name, function)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor, *_: self.is_pinned(tensor), raising=False)
        patch.setattr(torch.Tensor, "pin_memory", self._pin_memory_of(torch.Tensor.pin_memory), raising=False)
        patch.setattr(torch.Tensor, "record_stream", lambda t, stream: self.record_stream(t, stream), raising=False)
        clone = torch.UntypedStorage.clone
        patch.setattr(torch.UntypedStorage, "clone", lambda s: self.clone_storage(s) if s.is_cuda else clone(s))
        patch.setattr(torch.UntypedStorage, "to", lambda storage, **to: self.move_storage(storage, **to))
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, self._pinning(getattr(torch, name)))
        if self.leaks_failed_captures:
            patch.delattr(autograd_graph, "set_override_stale_capture_stream", raising=False)
        else:
            override = self._override_stale_streams
            patch.setattr(autograd_graph, "set_override_stale_capture_stream", override, raising=False)
            asked = lambda: self.overrides_stale_streams  # noqa: E731 - as torch has it
            patch.setattr(torch._C, "_override_stale_capture_stream", asked, raising=False)
        patch.setattr(torch.autograd, "_engine_run_backward", backward_of(self, torch.autograd._engine_run_backward))
        patch.setattr(torch.backends.cudnn, "enabled", False)

    def remove(self) -> None:
        """Finish what is queued, and let the driver answer again."""
        self.engine.end()
        self.queues.drain()
        for device in range(self.device_count):
            torch._C._accelerator_setStream(self.default_stream(device).handle)
        torch._C._accelerator_setDeviceIndex(0)
        kernels, contexts = _replacements()
        kernels.cuda = None
        contexts.remove()

    def _names(self) -> dict[str, Any]:
        return {
            "_lazy_init": lambda: None,
            "_initialized": True,
            "is_available": lambda: True,
            "is_initialized": lambda: os.getpid() == self._process,  # not in a fork of it
            "device_count": lambda: self.device_count,
            "current_device": lambda: self.index_of(),
            "set_device": lambda device: torch._C._accelerator_setDeviceIndex(self.index_of(device)),
            "device": OnDevice,
            "Stream": FakeStream,
            "Event": FakeEvent,
            "CUDAGraph": FakeGraph,
            "current_stream": self.current_stream,
            "default_stream": self.default_stream,
            "set_stream": self.set_stream,
            "stream": partial(OnStream, self),
            "synchronize": self.synchronize,
            "empty_cache": self.allocator.empty_cache,
            **self._names_of_memory(),
            "graph_pool_handle": self.new_pool_handle,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self.host_register, cudaHostUnregister=self.host_unregister
            ),
            "is_current_stream_capturing": lambda: self.current_stream().capture is not None,
            "get_sync_debug_mode": lambda: self._sync_mode,
            "set_sync_debug_mode": self.set_sync_debug_mode,
            "manual_seed_all": self.manual_seed_all,
            "get_rng_state_all": lambda: [self.get_rng_state(index) for index in range(self.device_count)],
            "get_rng_state": self.get_rng_state,
            "set_rng_state": self.set_rng_state,
            "get_device_name": lambda device=None: "fake CUDA device",
            "get_device_capability": lambda device=None: (9, 0),
            "is_bf16_supported": lambda including_emulation=True: True,
        }

    def _names_of_memory(self) -> dict[str, Any]:
        def stat(key: str) -> Callable[..., int]:
            return lambda device=None: self.allocator.memory_stats(self.index_of(device))[key]

        def free_and_all(device: Any = None) -> tuple[int, int]:
            return self.allocator.limit - self.allocator.reserved(self.index_of(device)), self.allocator.limit

        def reset_peak(device: Any = None) -> None:
            self.allocator.statistics(self.index_of(device)).reset_peak()

        taken = inspect.signature(torch.cuda.memory_snapshot)

        def snapshot(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
            return self.allocator.snapshot(taken.bind(*args, **kwargs).arguments.get("mempool_id"))

        snapshot.__signature__ = taken  # type: ignore[attr-defined]

        return {
            "memory_allocated": stat("allocated_bytes.all.current"),
            "memory_reserved": stat("reserved_bytes.all.current"),
            "max_memory_allocated": stat("allocated_bytes.all.peak"),
            "max_memory_reserved": stat("reserved_bytes.all.peak"),
            "memory_stats": lambda device=None: self.allocator.memory_stats(self.index_of(device)),
            "reset_peak_memory_stats": reset_peak,
            "mem_get_info": free_and_all,
            "memory_snapshot": snapshot,
            "host_memory_stats": self.host_allocator.stats,
            "reset_peak_host_memory_stats": self.host_allocator.statistics.reset_peak,
        }

    def _functions_of_pools(self) -> dict[str, Callable[..., Any]]:
        allocator = self.allocator
        return {
            "_cuda_beginAllocateCurrentThreadToPool": lambda _, pool: allocator.begin_allocate_thread_to_pool(pool),
            "_cuda_endAllocateToPool": lambda _, pool: allocator.end_allocate_to_pool(pool),
            "_cuda_releasePool": lambda _, pool: allocator.release_pool(pool),
            "_cuda_checkPoolLiveAllocations": lambda _, pool, live: allocator.has_live_blocks(pool, live),
            "_cuda_clearCublasWorkspaces": allocator.clear_workspaces,
        }

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        """`Tensor.record_stream`."""
        self.allocator.block_of(tensor).users.append(stream)

    def _pinning(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            made = factory(*args, **kwargs)
            return self.pin(made) if pin_memory else made

        return make

    def _override_stale_streams(self, enabled: bool) -> None:
        self.overrides_stale_streams = enabled


_installed: list[tuple[Kernels, Contexts]] = []
_lock = threading.Lock()


def _replacements() -> tuple[Kernels, Contexts]:
    """The replaced kernels, which stay: a machine without CUDA has no use for the others."""
    with _lock:
        if not _installed:
            torch.ones((), requires_grad=True).backward()  # before the guard: its devices would get threads
            set_guard()
            _installed.append((Kernels(), Contexts()))
        return _installed[0]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
