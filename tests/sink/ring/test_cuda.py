"""The ring on a CUDA device: right values under load, fixed memory, static addresses, capture beside the producer.

Where there is no device, a fake one takes its place, so that these tests themselves are tested.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from simulators.fake_cuda import has_device
from torch.utils.data import DataLoader, Dataset, TensorDataset

from sink.ring.lazy_leaf import LazyNumbers
from torch_sink.sink import SinkLoader

pytestmark = [pytest.mark.halved, pytest.mark.cuda(rehearsed=True)]
# What keeps a device busy: the matrices, batches beside them, rows of large batches, multiplications.
SIDE, BATCHES, ROW, LOAD = (2048, 100, 50_000, 20) if has_device() else (4, 12, 50, 2)


class Filled(Dataset):
    """Sample i is filled with i, and large enough that a copy takes a while."""

    def __init__(self, size: int, side: int = 64) -> None:
        self.size, self.side = size, side

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, self.side, self.side), float(index)), index


def busy(matrix: torch.Tensor) -> None:
    """Keeps the current stream busy, so that the host runs far ahead of it."""
    for _ in range(LOAD):
        matrix.copy_((matrix @ matrix).clamp_(-1, 1))


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_step_reads_its_own_batch_under_load(num_workers: int, pin_memory: bool) -> None:
    source = DataLoader(Filled(8 * BATCHES), batch_size=8, num_workers=num_workers, pin_memory=pin_memory)
    matrix = torch.rand(SIDE, SIDE, device="cuda")
    seen = []
    with SinkLoader(source) as loader:
        for image, label in loader:
            busy(matrix)
            spread = image.amax(dim=(1, 2, 3)) - image.amin(dim=(1, 2, 3))
            seen.append((image[:, 0, 0, 0].clone(), label.clone(), spread))
    for step, (values, labels, spread) in enumerate(seen):
        expected = torch.arange(8 * step, 8 * step + 8)
        assert values.cpu().long().tolist() == expected.tolist() == labels.cpu().tolist()
        assert float(spread.max()) == 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_training_thread_does_not_wait_for_the_device() -> None:
    source = DataLoader(Filled(160), batch_size=8, num_workers=1)
    with SinkLoader(source) as loader:
        batches = iter(loader)
        next(batches)
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for image, _ in batches:
                image.mul_(2)
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def test_memory_is_constant_over_many_batches() -> None:
    source = DataLoader(Filled(200, side=16), batch_size=4, num_workers=2, persistent_workers=True)
    with SinkLoader(
        source, batches_per_epoch=20 * BATCHES, dtype=torch.bfloat16, memory_format=torch.channels_last
    ) as loader:
        reserved = set()
        for step, (image, _) in enumerate(loader):
            image.add_(1)
            if step >= 10:
                reserved.add(torch.cuda.memory_reserved())
        assert len(reserved) == 1
        assert loader._slots.allocations == loader.ring_slots * 3 + 1, "labels alone are staged: they are in no slab"


def test_slots_have_static_addresses() -> None:
    addresses: dict[int, set[tuple[int, int]]] = {}
    slots = []
    with SinkLoader(DataLoader(Filled(100), batch_size=8, num_workers=1), slots=4) as loader:
        for image, label in loader:
            slots.append(loader.slot_index)
            if loader.slot_index is not None:
                addresses.setdefault(loader.slot_index, set()).add((image.data_ptr(), label.data_ptr()))
    assert [slot is None for slot in slots] == [False] * 12 + [True]  # the last batch is short
    assert sorted(addresses) == [0, 1, 2, 3]
    assert all(len(found) == 1 for found in addresses.values())


def test_images_are_converted_on_the_device() -> None:
    images = torch.rand(4, 3, 17, 11)
    with SinkLoader([images] * 5, dtype=torch.bfloat16, memory_format=torch.channels_last) as loader:
        for image in loader:
            assert image.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(image.cpu(), images.bfloat16(), rtol=0, atol=0, check_stride=False)


def test_lazy_batches_are_executed_into_the_slot() -> None:
    batches = [(LazyNumbers([i, -1, i + 2]), torch.arange(3)) for i in range(6)]
    with SinkLoader(batches, on_decode_error="skip") as loader:
        for i, (images, labels) in enumerate(loader):
            assert images.device.type == "cuda"
            assert images[:, 0, 0, 0].tolist() == [i, i + 2]
            assert labels.tolist() == [0, 2]


def test_odd_shapes_are_right_and_their_memory_is_reused() -> None:
    batches = [torch.full((2 + step % 3, 1 + step % 2, ROW), float(step)) for step in range(60)]
    matrix = torch.rand(SIDE, SIDE, device="cuda")
    with SinkLoader(batches, batches_per_epoch=240) as loader:
        results, reserved = [], []
        for step, batch in enumerate(loader):
            busy(matrix)
            results.append((step % 60, batch.shape, batch.amin(), batch.amax()))
            reserved.append(torch.cuda.memory_reserved())
    for step, shape, low, high in results:
        assert shape == batches[step].shape
        assert float(low) == float(high) == step
    assert max(reserved[120:]) == max(reserved[60:120])


def test_a_graph_can_be_captured_beside_the_producer_and_reads_slots_in_place() -> None:
    with SinkLoader(DataLoader(Filled(400), batch_size=8, num_workers=2, pin_memory=False)) as loader:
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        total = torch.zeros((), dtype=torch.float64, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for image, _ in loader:
                slot = loader.slot_index
                if slot not in graphs:
                    image[:, 0, 0, 0].double().sum()  # loads the kernels, which must not happen inside the capture
                    with loader._paused():
                        graphs[slot] = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graphs[slot], stream=stream, capture_error_mode="thread_local"):
                            total.add_(image[:, 0, 0, 0].double().sum())
                graphs[slot].replay()
        stream.synchronize()
        assert int(total) == sum(range(400))
        assert sorted(graphs) == [0, 1, 2]


def test_max_bytes_and_memory_is_given_back() -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    batch = torch.zeros(1 << 20)
    loader = SinkLoader([batch] * 4, slots=8, max_bytes=10 << 20)
    for out in loader:
        assert out.shape == batch.shape
    del out
    assert loader.ring_slots == 2
    assert loader.stats().bytes_held == 8 << 20
    loader.close()
    assert torch.cuda.memory_allocated() == before


def test_device_tensors_of_the_source_are_copied_in_order() -> None:
    class OnDevice:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for step in range(40):
                busy(matrix)
                yield torch.full((1000,), float(step), device="cuda")

    with torch.cuda.stream(torch.cuda.Stream()), SinkLoader(OnDevice()) as loader:
        matrix = torch.rand(SIDE, SIDE, device="cuda")
        seen = [(batch.amin(), batch.amax()) for batch in loader]
        torch.cuda.synchronize()
    assert [(int(low), int(high)) for low, high in seen] == [(step, step) for step in range(40)]


def test_an_error_on_the_device_side_comes_in_order() -> None:
    batches = [LazyNumbers([step, -1 if step == 3 else step]) for step in range(5)]
    with SinkLoader(DataLoader(batches, batch_size=None, num_workers=1, collate_fn=lambda batch: batch)) as loader:
        images = iter(loader)
        assert [int(next(images)[0, 0, 0, 0]) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="cannot decode"):
            next(images)
        assert [int(batch[0, 0, 0, 0]) for batch in images] == [4]


def test_epochs_give_what_the_plain_loop_gives() -> None:
    def make() -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.rand(50, 3, generator=torch.Generator().manual_seed(1)))
        return DataLoader(data, batch_size=8, shuffle=True, num_workers=2, generator=generator)

    plain, ours = make(), make()
    expected = [batch[0] for _ in range(3) for batch in plain]
    with SinkLoader(ours) as loader:
        actual = [batch[0].cpu() for _ in range(3) for batch in loader]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
