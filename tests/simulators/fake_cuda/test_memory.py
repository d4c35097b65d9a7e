"""Memory ends: what the allocators have asked for, for whom, and what they give back before they give up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from .device import FakeCuda
from .test_graphs import record

MIB = 1 << 20
small = pytest.mark.parametrize("fake_cuda", [{"memory": 16 * MIB}], indirect=True)


def mebibytes(number: float) -> Tensor:
    return torch.empty(int(number * MIB), dtype=torch.uint8, device="cuda")


def reserved_by(graph: Any) -> int:
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(graph.pool()))


@contextmanager
def allocating_in(pool: Any, stream: Any) -> Iterator[None]:
    torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch._C._cuda_endAllocateToPool(0, pool)
        torch._C._cuda_releasePool(0, pool)


def test_what_is_allocated_and_reserved_now_and_at_most(fake_cuda: FakeCuda) -> None:
    first, second = mebibytes(3), mebibytes(2)
    assert torch.cuda.memory_allocated() == 5 * MIB
    assert torch.cuda.memory_reserved() == 6 * MIB
    del first
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (2 * MIB, 5 * MIB)
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()) == (2 * MIB, 6 * MIB)
    torch.cuda.reset_peak_memory_stats()
    assert (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) == (2 * MIB, 2 * MIB)
    free, total = torch.cuda.mem_get_info()
    assert total - free == 2 * MIB
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == second.nbytes
    assert stats["reserved_bytes.all.peak"] == 2 * MIB


@small
def test_memory_runs_out_when_all_that_is_cached_was_given_back(fake_cuda: FakeCuda) -> None:
    kept = [mebibytes(6)]
    passing = mebibytes(8)
    del passing
    with torch.cuda.stream(torch.cuda.Stream()):
        kept.append(mebibytes(8))  # of another stream, so what is cached for the first has to go
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        mebibytes(4)
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    kept.clear()
    mebibytes(16)


@small
def test_what_a_graph_freed_stays_its_own_until_it_is_gone(fake_cuda: FakeCuda) -> None:
    stream = torch.cuda.Stream()
    graph = record(lambda: mebibytes(10), stream=stream)
    assert torch.cuda.memory_allocated() == 0
    with pytest.raises(torch.OutOfMemoryError):
        mebibytes(8)
    with allocating_in(graph.pool(), stream):
        assert mebibytes(8).is_cuda
    assert reserved_by(graph) == 10 * MIB
    graph.reset()
    assert mebibytes(8).is_cuda


@small
def test_a_second_graph_of_a_pool_uses_what_the_first_freed(fake_cuda: FakeCuda) -> None:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs = [record(lambda: mebibytes(10), pool, stream) for _ in range(3)]
    assert torch.cuda.memory_reserved() == reserved_by(graphs[0]) == 10 * MIB


@small
def test_nothing_is_given_back_while_a_thread_allocates_in_a_pool(fake_cuda: FakeCuda) -> None:
    stream = torch.cuda.Stream()
    graph = record(lambda: mebibytes(4), stream=stream)
    passing = mebibytes(10)
    del passing
    with allocating_in(graph.pool(), stream), pytest.raises(torch.OutOfMemoryError):
        mebibytes(8)
    torch.cuda.empty_cache()
    with allocating_in(graph.pool(), stream):
        mebibytes(8)
        with pytest.raises(RuntimeError, match="captures_underway"):
            torch.cuda.empty_cache()


def test_a_replay_writes_over_what_was_put_into_its_pool_since(fake_cuda: FakeCuda) -> None:
    kept: list[Tensor] = []
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graph = record(lambda: kept.append(torch.zeros(2, device="cuda")), pool, stream)
    with allocating_in(pool, stream):
        guest = torch.ones(2, device="cuda")
    assert not torch._C._cuda_checkPoolLiveAllocations(0, pool, {kept[0].data_ptr()})
    assert torch._C._cuda_checkPoolLiveAllocations(0, pool, {kept[0].data_ptr(), guest.data_ptr()})
    with torch.cuda.stream(stream):
        graph.replay()
    stream.synchronize()
    assert kept[0].tolist() == [0, 0]
    assert guest.isnan().all()


@pytest.mark.parametrize("threads", [True, False])
def test_a_backward_pass_in_threads_of_the_engine_allocates_elsewhere(fake_cuda: FakeCuda, threads: bool) -> None:
    pool, weight = torch.cuda.graph_pool_handle(), torch.ones(2, device="cuda", requires_grad=True)
    graph = record(lambda: None, pool)
    with allocating_in(pool, torch.cuda.current_stream()), torch.autograd.set_multithreading_enabled(threads):
        (weight * 2).sum().backward()
    assert weight.grad is not None
    inside = [segment["address"] for segment in torch.cuda.memory_snapshot(graph.pool())]
    assert (weight.grad.data_ptr() in inside) != threads


def test_page_locked_memory_comes_in_powers_of_two_and_is_used_again(fake_cuda: FakeCuda) -> None:
    first = torch.empty(5 * MIB, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 8 * MIB
    del first
    assert torch.empty(7 * MIB, dtype=torch.uint8).pin_memory().is_pinned()
    stats = torch.cuda.host_memory_stats()
    assert (stats["allocated_bytes.peak"], stats["active_bytes.current"]) == (8 * MIB, 0)
    torch._C._host_emptyCache()
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0
    torch.cuda.reset_peak_host_memory_stats()
    assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] == 0
