"""What a ring allocates and where batches end up, on a simulated device without delay."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sink.ring.lazy_leaf import LazyNumbers
from torch_sink.common.containers import leaves
from torch_sink.errors import SinkError
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.usefixtures("on_a_ring")


def batches_of(count: int, rows: int = 2) -> list[tuple[torch.Tensor, torch.Tensor, str]]:
    return [(torch.full((rows, 3, 4, 4), float(i)), torch.full((rows,), i), f"batch {i}") for i in range(count)]


def test_values_pass_through_static_slots_in_turn() -> None:
    loader = SinkLoader(batches_of(7))
    slots, addresses = [], set()
    for i, (image, label, text) in enumerate(loader):
        assert (image == i).all()
        assert (label == i).all()
        assert text == f"batch {i}"
        slots.append(loader.slot_index)
        addresses.add((image.data_ptr(), label.data_ptr(), loader.slot_index))
    assert slots == [0, 1, 2, 0, 1, 2, 0]
    assert len(addresses) == 3


def test_nothing_is_allocated_after_the_first_batches() -> None:
    with SinkLoader(DataLoader(TensorDataset(torch.arange(1200)), batch_size=2, num_workers=1)) as loader:
        batches = iter(loader)
        assert sum(1 for _ in itertools.islice(batches, 20)) == 20
        allocated = loader._slots.allocations
        assert allocated == 2 * loader.ring_slots
        assert sum(1 for _ in batches) == 580
        assert loader._slots.allocations == allocated
        kept = [leaf for slot in loader._slots.slots for leaf in leaves(slot.kept)]
        assert all(leaf.device.type == "cpu" for leaf in kept)


def test_short_last_batch_uses_the_slot_but_is_not_static() -> None:
    loader = SinkLoader(DataLoader(TensorDataset(torch.arange(10)), batch_size=4))
    seen, static = [], []
    for (numbers,) in loader:
        seen.append(numbers.tolist())
        static.append(loader.slot_index)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert static == [0, 1, None]
    assert loader._slots.allocations == 6


def test_other_shapes_and_structures_get_memory_of_their_own() -> None:
    batches: list[Any] = [torch.zeros(2, 3), torch.ones(4, 3), {"x": torch.full((2, 5), 2.0)}, torch.full((2, 3), 3.0)]
    loader = SinkLoader(batches, batches_per_epoch=40)
    for _ in loader:
        assert all(len(slot.kept) <= 1 for slot in loader._slots.slots)
    static, seen = [], []
    loader.restart()
    for batch in itertools.islice(loader, 4):
        tensor = batch["x"] if isinstance(batch, dict) else batch
        seen.append((tuple(tensor.shape), float(tensor.mean())))
        static.append(loader.slot_index)
    assert seen == [((2, 3), 0.0), ((4, 3), 1.0), ((2, 5), 2.0), ((2, 3), 3.0)]
    assert [index is None for index in static] == [False, True, True, False]


def test_what_is_no_tensor_is_of_its_own_batch() -> None:
    """In the place of a tensor of the first batch, or behind all of them."""
    loader = SinkLoader([[torch.zeros(2), torch.ones(2)], [torch.zeros(2), 5], [torch.zeros(2), torch.ones(2), "end"]])
    batches = iter(loader)
    next(batches)
    for _ in range(2):
        batch = next(batches)
        for there in loader._static_batches(batch).values():
            assert [type(leaf) for leaf in there] == [type(leaf) for leaf in batch]
            assert there[2:] == batch[2:]


def test_images_are_converted_on_the_device() -> None:
    images = torch.rand(2, 3, 4, 4)
    loader = SinkLoader([(images, torch.arange(2))], dtype=torch.float16, memory_format=torch.channels_last)
    for image, label in loader:
        torch.testing.assert_close(image, images.to(torch.float16), rtol=0, atol=0)
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert label.dtype == torch.int64
    slot = 2 * 3 * 4 * 4 * 2 + 2 * 8
    assert loader.stats().bytes_held == 3 * slot + 2 * 3 * 4 * 4 * 4


def test_lazy_batches_go_straight_into_the_slot() -> None:
    loader = SinkLoader([LazyNumbers([i, i + 1]) for i in range(5)], dtype=torch.bfloat16)
    for i, images in enumerate(loader):
        assert images[:, 0, 0, 0].tolist() == [i, i + 1]
        assert loader.slot_index == i % 3
        assert images.data_ptr() == loader._slots.slots[i % 3].places[0].buffer.data_ptr()
    assert loader._slots.allocations == 3
    assert loader._slots.plan.pinned_bytes == 0


def test_replaced_samples_stay_in_the_slot_and_skipped_ones_leave_it() -> None:
    for policy, index in (("replace", 0), ("skip", None)):
        loader = SinkLoader([(LazyNumbers([1, -2, 3]), torch.arange(3))], on_decode_error=policy)
        batches = iter(loader)
        next(batches)
        assert loader.slot_index == index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_max_bytes_bounds_the_slots(num_workers: int) -> None:
    source = DataLoader(TensorDataset(torch.arange(40)), batch_size=4, num_workers=num_workers)
    with SinkLoader(source, slots=5, max_bytes=70) as loader:
        seen = [numbers.tolist() for (numbers,) in loader]
        assert seen == [list(range(i, i + 4)) for i in range(0, 40, 4)]
        assert loader.ring_slots == 2
        assert loader.stats().bytes_held == 64


def test_max_bytes_too_small_for_one_batch() -> None:
    with pytest.raises(SinkError, match=r"max_bytes=31 does not hold one batch of 32 bytes"):
        next(iter(SinkLoader([torch.arange(4)], max_bytes=31)))


def test_the_plan_is_printed_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loader = SinkLoader([torch.arange(4)] * 3, max_bytes=1000)
    assert "planned at the first batch" in repr(loader)
    with caplog.at_level(logging.INFO, logger="torch_sink"):
        list(loader)
    assert "slots=3 of 32 bytes = 96 bytes on the device" in repr(loader)
    assert len([record for record in caplog.records if "ring" in record.message]) == 1


def test_tensors_that_require_a_gradient_do_not_grow_a_graph() -> None:
    weight = torch.rand(2, 2, requires_grad=True)
    for batch in SinkLoader([weight * 2] * 6):
        assert not batch.requires_grad


def test_an_error_while_filling_gives_the_slot_back() -> None:
    batches: list[Any] = [LazyNumbers([-1, 2]) if i % 2 else LazyNumbers([i, i]) for i in range(12)]
    loader = SinkLoader(DataLoader(batches, batch_size=None, num_workers=1, collate_fn=lambda batch: batch))
    seen, errors = [], 0
    with loader:
        while len(seen) < 6:
            try:
                for images in loader.rest():
                    seen.append(int(images[0, 0, 0, 0]))
            except OSError:
                errors += 1
        loader.restart()
        assert sorted(loader._producer.free_slots()) == [0, 1, 2]
    assert (seen, errors) == ([0, 2, 4, 6, 8, 10], 6)
