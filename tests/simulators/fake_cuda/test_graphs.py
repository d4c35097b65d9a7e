"""Graphs: what they hold, what a capture forbids, and what is left when one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .device import FakeCuda

pytestmark = pytest.mark.halved

ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "a read": lambda value: value[0].item(),
    "a copy to the host": lambda value: value.cpu(),
    "a copy from pageable memory": lambda value: value.copy_(torch.ones(2)),
    "a wait for the device": lambda value: torch.cuda.synchronize(),
    "a wait for the stream": lambda value: torch.cuda.current_stream().synchronize(),
    "page-locked memory": lambda value: torch.empty(1, pin_memory=True),
    "work on a stream that takes no part": lambda value: on_stream(torch.cuda.Stream(), lambda: value + 1),
}


RELEASES = [{"release": release} for release in ("2.11", "2.12", "2.15")]


def on_stream(stream: Any, function: Callable[[], Any]) -> Any:
    with torch.cuda.stream(stream):
        return function()


def record(function: Callable[[], Any], pool: Any = None, stream: Any = None) -> Any:
    """A graph of a function."""
    graph, stream = torch.cuda.CUDAGraph(), stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph


def test_a_capture_runs_nothing_and_each_replay_everything(fake_cuda: FakeCuda) -> None:
    value = torch.zeros(2, device="cuda")
    graph = record(lambda: value.add_(1).mul_(2))
    assert value.tolist() == [0, 0]
    graph.replay()
    assert value.tolist() == [2, 2]
    graph.replay()
    assert value.tolist() == [6, 6]
    assert fake_cuda.calls["aten::add_.Tensor"] == 1


def test_a_graph_holds_addresses_and_numbers(fake_cuda: FakeCuda) -> None:
    holder = {"value": torch.zeros(1, device="cuda"), "step": 1.0}
    kept = holder["value"]
    graph = record(lambda: holder["value"].add_(holder["step"]))
    holder["value"], holder["step"] = torch.full((1,), 10.0, device="cuda"), 5.0
    graph.replay()
    assert (kept.item(), holder["value"].item()) == (1, 10)


def test_a_graph_that_reads_freed_memory_reads_garbage(fake_cuda: FakeCuda) -> None:
    sources, target = [torch.ones(1, device="cuda")], torch.zeros(1, device="cuda")
    graph = record(lambda: target.copy_(sources[0]))
    graph.replay()
    assert target.item() == 1
    sources.clear()
    torch.empty(1, device="cuda")  # gets the memory
    graph.replay()
    assert target.isnan().item()


def test_what_is_made_in_a_capture_is_made_again_by_each_replay(fake_cuda: FakeCuda) -> None:
    made: list[Tensor] = []

    def body() -> None:
        if not made:
            made.append(torch.zeros(1, device="cuda"))
        made[0].add_(1)

    graph = record(body)
    for _ in range(3):
        graph.replay()
    assert made[0].item() == 1


def test_graphs_that_share_a_pool_overwrite_what_was_freed_in_it(fake_cuda: FakeCuda) -> None:
    pool, target = torch.cuda.graph_pool_handle(), torch.zeros(1, device="cuda")
    before: list[Tensor] = []

    def uses_a_leftover() -> None:
        if before:
            target.copy_(before[0])
        before[:] = [target + 1]

    graph = record(uses_a_leftover, pool)
    address = before[0].data_ptr()
    before.clear()
    graph.replay()
    torch.cuda.synchronize()
    assert address not in fake_cuda.allocator._blocks
    assert target.item() == 0


def test_draws_go_on_from_replay_to_replay_and_begin_with_the_seed(fake_cuda: FakeCuda) -> None:
    value = torch.zeros(8, device="cuda")
    graph = record(lambda: value.copy_(torch.rand(8, device="cuda")))

    def draws() -> list[list[float]]:
        torch.manual_seed(3)
        found = []
        for _ in range(3):
            graph.replay()
            found.append(value.tolist())
        return found

    first = draws()
    assert first == draws()
    assert len({tuple(row) for row in first}) == 3
    torch.manual_seed(3)
    assert torch.rand(8, device="cuda").tolist() == first[0]
    state = torch.cuda.get_rng_state()
    after = torch.rand(8, device="cuda").tolist()
    torch.cuda.set_rng_state(state)
    assert torch.rand(8, device="cuda").tolist() == after


def test_draws_can_be_repeated_inside_a_capture(fake_cuda: FakeCuda) -> None:
    """As torch 2.11 does, for activation checkpoints; other seeds are refused."""
    first, again = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")

    def body() -> None:
        state = torch.cuda.get_rng_state()
        first.copy_(torch.rand(8, device="cuda"))
        torch.cuda.set_rng_state(state)
        again.copy_(torch.rand(8, device="cuda"))

    graph, seen = record(body), []
    for _ in range(2):
        graph.replay()
        seen.append(first.tolist())
        assert again.tolist() == seen[-1]
    assert seen[0] != seen[1]
    with pytest.raises(RuntimeError, match="only if new seed is the same"):
        record(lambda: torch.cuda.set_rng_state(torch.tensor([7, 0]).view(torch.uint8)))


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_capture_forbids_is_an_error_and_the_capture_is_lost(fake_cuda: FakeCuda, name: str) -> None:
    value = torch.zeros(2, device="cuda")
    with pytest.raises(RuntimeError, match="previous error during capture") as lost:
        record(lambda: ERRORS[name](value))
    assert "CUDA error" in str(lost.value.__context__)
    assert fake_cuda.captures.current is None
    assert value.tolist() == [0, 0]


@pytest.mark.parametrize("fake_cuda", RELEASES, indirect=True)
def test_what_a_failed_capture_leaves_behind(fake_cuda: FakeCuda) -> None:
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        record(lambda: torch.zeros(1, device="cuda").item(), pool)
    if not fake_cuda.leaks_failed_captures:
        torch.cuda.empty_cache()
        torch.rand(1, device="cuda")
        record(lambda: None, pool)
        return
    with pytest.raises(RuntimeError, match="captures_underway"):
        torch.cuda.empty_cache()
    torch._C._cuda_endAllocateToPool(0, pool)
    torch._C._cuda_releasePool(0, pool)
    if fake_cuda.leaves_generators:
        with pytest.raises(RuntimeError, match="outside graph capture"):
            torch.rand(1, device="cuda")
        record(lambda: None)
    torch.rand(1, device="cuda")
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        record(lambda: None, pool)  # the allocator of page-locked memory still does


def test_the_pool_of_a_failed_capture_is_given_back_with_its_graph(fake_cuda: FakeCuda) -> None:
    pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    fake_cuda.leaks_failed_captures = False
    with (
        pytest.raises(RuntimeError, match="previous error"),
        torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
    ):
        torch.zeros(1, device="cuda").item()
    assert fake_cuda.allocator.pool(pool).uses == 1
    graph.reset()
    assert fake_cuda.allocator.pool(pool).uses == 0


def test_a_pool_that_no_graph_holds_cannot_be_captured_into_while_a_tensor_lies_in_it(fake_cuda: FakeCuda) -> None:
    pool, kept = torch.cuda.graph_pool_handle(), []
    graph = record(lambda: kept.append(torch.zeros(1, device="cuda")), pool)
    record(lambda: None, pool)
    graph.reset()
    with pytest.raises(RuntimeError, match="use_count > 0"):
        record(lambda: None, pool)
    kept.clear()
    record(lambda: None, pool)


def test_a_wait_for_the_device_in_another_thread_is_the_captures_end(fake_cuda: FakeCuda) -> None:
    failures = []

    def wait(function: Callable[[], Any]) -> None:
        try:
            function()
        except RuntimeError as error:
            failures.append(str(error))

    def body(function: Callable[[], Any]) -> None:
        thread = threading.Thread(target=wait, args=(function,))
        thread.start()
        thread.join()

    record(lambda: body(torch.cuda.Stream().synchronize))
    assert not failures
    with pytest.raises(RuntimeError, match="previous error during capture"):
        record(lambda: body(torch.cuda.synchronize))
    assert "cudaDeviceSynchronize" in failures[0]


@pytest.mark.parametrize("fake_cuda", [{"release": "2.15"}], indirect=True)
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("overrides", [False, True])
def test_gradients_remember_the_stream_on_which_they_were_first_accumulated(
    fake_cuda: FakeCuda, overrides: bool
) -> None:
    weight = torch.ones(2, device="cuda", requires_grad=True)
    alive = (weight * 2).sum()  # keeps the node of the default stream

    def body() -> None:
        (weight * 3).sum().backward()

    torch.autograd.graph.set_override_stale_capture_stream(overrides)
    if overrides:
        record(body).replay()
    else:
        with pytest.raises(RuntimeError, match="AccumulateGrad") as lost:
            record(body)
        del alive, lost  # the error holds the frames, and they the node
        weight.grad = None
        record(body).replay()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3]


def test_a_stream_joins_a_capture_by_an_event_and_has_to_be_waited_for(fake_cuda: FakeCuda) -> None:
    value, side = torch.zeros(1, device="cuda"), torch.cuda.Stream()

    def fork(joins: bool) -> None:
        origin = torch.cuda.current_stream()
        side.wait_stream(origin)
        on_stream(side, lambda: value.add_(1))
        if joins:
            origin.wait_stream(side)

    record(lambda: fork(True)).replay()
    assert value.item() == 1
    with pytest.raises(RuntimeError, match="unjoined work"):
        record(lambda: fork(False))
