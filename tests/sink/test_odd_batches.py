"""Batches that are more, or less, than dense tensors; sources that write to their memory again."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torchvision import tv_tensors

from sink.ring.test_ring_protocol import FORMS, Simulation
from torch_sink.sink import SinkLoader

pytestmark = [pytest.mark.halved, pytest.mark.usefixtures("place")]


class Moved:
    """A class of batches that knows how it is moved."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.moves: list[torch.device] = []

    def to(self, device: torch.device) -> Moved:
        self.moves.append(device)
        return self


def rows(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore")  # prototypes of torch
@pytest.mark.parametrize(
    "make",
    [
        lambda: rows(torch.strided),
        lambda: rows(torch.jagged),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
        lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
        lambda: tv_tensors.BoundingBoxes(torch.ones(2, 4), format="XYXY", canvas_size=(8, 8)),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(1).expand(4, 3),
        lambda: torch.ones(4, 6)[:, ::2],
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0),
        lambda: None,
        lambda: "text",
        lambda: {1, 2},
    ],
)
@pytest.mark.sampled(16)
def test_leaves_of_every_kind(make: Callable[[], Any]) -> None:
    batch = make()
    first = [torch.ones(2), {"leaf": torch.zeros(3)}]  # the plan has a dense buffer in that place
    loader = SinkLoader([first, [torch.ones(2), {"leaf": batch}]] * 3)
    for number, (ones, inner) in enumerate(loader):
        assert ones.tolist() == [1, 1]
        if number % 2:
            assert type(inner["leaf"]) is type(batch)
            assert loader.stats().bytes_held > 0
            if isinstance(batch, PackedSequence):
                torch.testing.assert_close(inner["leaf"].data, batch.data)
            elif isinstance(batch, torch.Tensor) and not batch.is_nested:
                torch.testing.assert_close(inner["leaf"], batch, rtol=0, atol=0)
    assert number == 5


def test_boxes_keep_what_they_are() -> None:
    boxes = tv_tensors.BoundingBoxes(torch.ones(2, 4), format="XYXY", canvas_size=(8, 8))
    for batch in SinkLoader([boxes] * 4):
        assert batch.canvas_size == (8, 8)


def test_objects_that_can_be_moved_are(place: str) -> None:
    batches = [(torch.zeros(1), Moved(torch.ones(1))) for _ in range(4)]
    loader = SinkLoader(batches)
    for _, moved in loader:
        assert moved.moves == ([torch.device("cpu")] if place == "ring" else [])
        assert loader.slot_index is None  # its tensors have no fixed place


def test_a_read_only_mapping_becomes_a_dict(place: str) -> None:
    for batch in SinkLoader([types.MappingProxyType({"x": torch.ones(2)})] * 4):
        assert batch["x"].tolist() == [1, 1]
        assert isinstance(batch, dict) == (place == "ring")


class ReusedMemory(Simulation):
    """The source makes each batch on the training stream, on the device, in the memory of the one before."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, 3, FORMS[0])
        self.memory = torch.zeros(2, 1, 2, 2)
        self.ring._is_on_device = lambda leaf: True  # type: ignore[method-assign]

    def produce(self) -> None:
        slot, number = self.free.popleft(), self.produced
        self.ops.compute_stream.issue(lambda: self.memory.fill_(number))
        batch, *_ = self.ring.fill(slot, self.memory)
        self.ready.append((slot, batch))
        self.produced += 1


def is_right(seed: int) -> bool:
    simulation = ReusedMemory(random.Random(seed))
    simulation.run()
    return simulation.is_right()


def test_a_source_may_write_to_its_device_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(is_right(seed) for seed in range(40))
    monkeypatch.setattr("torch_sink.sink.device.SlotProtocol.give_back", lambda *_: None)
    assert not all(is_right(seed) for seed in range(40))


def test_a_source_may_write_to_its_pinned_memory_again(place: str) -> None:
    """Only what a DataLoader's own thread has pinned is read in place."""
    memory = torch.zeros(3)
    memory.is_pinned = lambda: True  # type: ignore[method-assign]
    loader = SinkLoader([memory] * 4)
    for _ in loader:
        if place == "ring":
            assert not loader._slots.reads_pinned
            assert all(slot.kept == [] for slot in loader._slots.slots)
