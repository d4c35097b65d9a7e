"""The ring's protocol under random interleavings of two host threads and two streams; seeded faults are found."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sink.simulated_device import SimulatedOps
from torch_sink.sink import ring as ring_module
from torch_sink.sink.device import SlotProtocol
from torch_sink.sink.ring import DeviceRing
from torch_sink.sink.slots import ImageFormat

BATCHES = 14
CPU = torch.device("cpu")


class Simulation:
    """A producer and a consumer around a real `DeviceRing` on a simulated device."""

    def __init__(self, rng: random.Random, slots: int, form: ImageFormat) -> None:
        self.rng = rng
        self.ops = SimulatedOps(rng)
        self.ring = DeviceRing(slots, form, self.ops)
        self.free = deque(range(slots))
        self.ready: deque[tuple[int, torch.Tensor]] = deque()
        self.held: int | None = None
        self.produced = 0
        self.consumed = 0
        self.read: list[tuple[int, list[float]]] = []

    def produce(self) -> None:
        slot = self.free.popleft()
        batch = torch.full((2, 1, 2, 2), float(self.produced))
        batch, *_ = self.ring.fill(slot, batch)
        self.ready.append((slot, batch))
        self.produced += 1

    def consume(self) -> None:
        """Asks for the next batch, which frees the one before, and issues a step that reads it in two kernels."""
        if self.held is not None:
            self.ring.free(self.held)
            self.free.append(self.held)
        self.held, batch = self.ready.popleft()
        self.ring.open(self.held)
        number, half = self.consumed, len(batch) // 2
        stream = self.ops.compute_stream
        stream.issue(lambda: self.read.append((number, batch[:half].flatten().tolist())))
        stream.issue(lambda: self.read.append((number, batch[half:].flatten().tolist())))
        self.consumed += 1

    def run(self) -> None:
        while self.consumed < BATCHES:
            choices = [self.ops.run_some_work]
            if self.free and self.produced < BATCHES:
                choices.append(self.produce)
            if self.ready:
                choices.append(self.consume)
            self.rng.choice(choices)()
        self.ops.finish()

    def is_right(self) -> bool:
        """Every kernel saw its own batch, whole, and every batch was seen once and in order."""
        numbers = [number for number, _ in self.read]
        in_order = numbers == [number for number in range(BATCHES) for _ in range(2)]
        return in_order and all(value == number for number, values in self.read for value in values)


FORMS = [ImageFormat(CPU), ImageFormat(CPU, torch.bfloat16, torch.channels_last)]


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_no_interleaving_reads_a_wrong_batch(count: int) -> None:
    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(rng=st.randoms(use_true_random=False), slots=st.integers(1, 4), form=st.sampled_from(FORMS))
    def check(rng: random.Random, slots: int, form: ImageFormat) -> None:
        simulation = Simulation(rng, slots, form)
        simulation.run()
        assert simulation.is_right()

    check()


class NoStagedWait(SlotProtocol):
    def begin_staging(self, slot: int) -> None:
        pass


class NoFreeWait(SlotProtocol):
    def begin_filling(self, slot: int) -> None:
        pass


class NoFilledWait(SlotProtocol):
    def begin_use(self, slot: int) -> None:
        pass


class FreedTooEarly(SlotProtocol):
    def begin_use(self, slot: int) -> None:
        super().begin_use(slot)
        self.end_use_now(slot)

    def end_use_now(self, slot: int) -> None:
        super().end_use(slot)

    def end_use(self, slot: int) -> None:
        pass


@pytest.mark.parametrize("fault", [NoStagedWait, NoFreeWait, NoFilledWait, FreedTooEarly])
def test_a_missing_wait_is_found(fault: type[SlotProtocol], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "SlotProtocol", fault)

    def is_found(seed: int) -> bool:
        simulation = Simulation(random.Random(seed), 3, FORMS[0])
        simulation.run()
        return not simulation.is_right()

    assert any(is_found(seed) for seed in range(200))
