"""The measurements behind the published figures, with loaders and models of known speed: the known ratio comes out."""

from __future__ import annotations

import itertools
import json
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda, fake_cuda  # noqa: F401 a fixture
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import contenders  # noqa: E402
import harness  # noqa: E402
import peaks  # noqa: E402
import report_tables  # noqa: E402
import scale  # noqa: E402
import torch_sink  # noqa: E402
import train  # noqa: E402

# By its path: `loop` is a folder of tests.
_spec = spec_from_file_location("loop_benchmark", BENCHMARKS / "loop.py")
loop: Any = module_from_spec(_spec)
sys.modules[_spec.name] = loop
_spec.loader.exec_module(loop)

# Workers that sleep need no core.
pytestmark = [pytest.mark.once_on_oldest, pytest.mark.filterwarnings("ignore:This DataLoader will create")]

WORKERS = 4
CPU = torch.device("cpu")


class Clock:
    """A time in which nothing takes any, but what sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    thread_time = process_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Samples(Dataset[Any]):
    """Each takes its time in a worker."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds)
        return torch.ones(3, 2, 2), index % 2


class Workers:
    """A DataLoader whose workers sleep in the time of a clock: two batches are under way for each, as there."""

    prefetch_factor = 2

    def __init__(self, clock: Clock, seconds: float, workers: int) -> None:
        self.clock, self.seconds, self.num_workers, self.passes = clock, seconds, workers, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.passes += 1
        free_at = [self.clock.now] * self.num_workers

        def ask(number: int) -> float:
            worker = number % self.num_workers
            free_at[worker] = max(free_at[worker], self.clock.now) + self.seconds
            return free_at[worker]

        ahead = self.prefetch_factor * self.num_workers
        ready_at = deque(map(ask, range(ahead)))
        for number in itertools.count(ahead):
            self.clock.now = max(self.clock.now, ready_at.popleft())
            ready_at.append(ask(number))
            yield torch.ones(1, 3, 2, 2), torch.ones(1, dtype=torch.int64)


class Pictures(Samples):
    """Of 40 kB."""

    def __init__(self) -> None:
        super().__init__(0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 60, 60), float(index)), index


class Slow(nn.Module):
    """A model whose steps take a known time, and the first one longer, as where it is compiled."""

    def __init__(self, seconds: float, sleep: Callable[[float], None], first: float = 0.7) -> None:
        super().__init__()
        self.seconds, self.sleep, self.first = seconds, sleep, first
        self.head = nn.Linear(12, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.sleep(self.seconds + self.first)
        self.first = 0
        return self.head(images.flatten(1))


class Paced(contenders.Contender):
    def __init__(self, sleep: Callable[[float], None], *, sample_seconds: float, step_seconds: float) -> None:
        self.device, self.model, self.samples = CPU, Slow(step_seconds, sleep), Samples(sample_seconds)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loop = torch_sink.StepLoop(
            self.model, cross_entropy, self.optimizer, steps_per_sync=contenders.STEPS_PER_SYNC
        )

    def dataset(self, folder: Path) -> Dataset[Any]:
        return self.samples


class PacedStock(Paced, contenders.Stock):
    """A plain loop."""


class PacedSink(Paced, contenders.TorchSink):
    """SinkLoader and StepLoop."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the measurements see."""
    clock = Clock()
    for module in (harness, loop, train):
        monkeypatch.setattr(module, "time", clock)
    return clock


def speeds_of_training(sleep: Callable[[float], None]) -> list[float]:
    """Batches a second of a plain loop that waits for its workers; of torch_sink, relative to that, likewise, and twice
    as fast where it waits for nothing."""

    def batches_per_second(contender: Paced) -> float:
        options = Namespace(batch_size=1, steps=None, rounds=1, seconds=60.0, warmup=2)
        return float(train.measure(contender, Path(), WORKERS, options)["images_per_second"]["p50"])

    bound_by_workers = {"sample_seconds": 0.16, "step_seconds": 0.01}
    stock = batches_per_second(PacedStock(sleep, **bound_by_workers))
    same = batches_per_second(PacedSink(sleep, **bound_by_workers))
    bound_by_steps = batches_per_second(PacedSink(sleep, sample_seconds=0.02, step_seconds=0.02))
    return [stock, same / stock, bound_by_steps / stock]


EXPECTED = [WORKERS / 0.16, 1, 2]


def test_training_is_as_fast_as_workers_or_steps_allow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long first step all workers are ahead, and what they made meanwhile is no figure of anybody's speed."""

    made: list[Workers] = []

    def make_loader(dataset: Samples, batch_size: int, workers: int) -> Workers:
        made.append(Workers(clock, dataset.seconds, workers))
        return made[-1]

    monkeypatch.setattr(train, "make_loader", make_loader)
    assert speeds_of_training(clock.sleep) == pytest.approx(EXPECTED, rel=0.07)
    assert [loader.passes for loader in made] == [1, 1, 1]


@pytest.mark.slow
def test_training_with_workers_that_really_sleep() -> None:
    """A machine that is busy with other things gets three attempts."""
    found: list[list[float]] = []
    expected = pytest.approx(EXPECTED, rel=0.1)
    while len(found) < 3 and expected not in found:
        found.append(speeds_of_training(time.sleep))
    assert found[-1] == expected, found


def at_half_the_time(setup: Any) -> Callable[[int], int]:
    """StepLoop over a model that is twice as fast."""
    setup.model.seconds /= 2
    return loop.sink("eager", 10)(setup)


@pytest.fixture
def known_loops(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the loops and models of the script."""
    loops = {"plain": loop.plain(False, None), "StepLoop": loop.sink("eager", 10), "StepLoop, fast": at_half_the_time}
    monkeypatch.setattr(loop, "loops", lambda cuda: loops)
    monkeypatch.setattr(loop, "base_of", lambda name: "plain")
    case = loop.Case(lambda: Slow(0.02, clock.sleep), (2, 3, 2, 2), 20)
    monkeypatch.setattr(loop, "cases", lambda cuda: {"slow": case})


def test_loops_are_as_fast_as_their_models(known_loops: None) -> None:
    *_, last = loop.measure(loop.cases(False)["slow"], CPU, None, rounds=3, seconds=0)
    plain, same, fast = (result["steps_per_second"]["p50"] for result in last["loops"].values())
    assert last["rounds"] == 3
    assert [plain, same / plain, fast / plain] == pytest.approx([50, 1, 2])
    assert last["loops"]["StepLoop, fast"]["extra_microseconds"]["p50"] == pytest.approx(-10_000)


def test_a_measured_loop_is_not_lost_where_the_next_one_is_cut_short(
    known_loops: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "loop.json"
    monkeypatch.setattr(sys, "argv", ["loop.py", "--rounds", "1", "--output", str(output)])
    monkeypatch.setitem(loop.loops(False), "StepLoop, fast", lambda setup: sys.exit("out of time"))
    with pytest.raises(SystemExit, match="out of time"):
        loop.main()
    report = json.loads(output.read_text())
    assert report["unfinished"]
    assert [*report["models"]["slow"]["loops"]] == ["plain", "StepLoop"]
    assert "| StepLoop |" in report_tables.loop(report)


def test_rounds_of_a_loop_capture_nothing(fake_cuda: FakeCuda) -> None:  # noqa: F811
    case = loop.Case(loop.make_mlp, (4, 64), 30)
    measurement = loop.Measurement(loop.sink("graph", 10), lambda: loop.Setup(case, torch.device("cuda")), renews=False)
    captured = fake_cuda.graphs_begun
    assert captured > 0
    for _ in range(3):
        measurement.round()
    assert fake_cuda.graphs_begun == captured
    assert measurement.result()["syncs_per_step"] == 0.1
    measurement.close()


def test_rounds_of_sinks_of_any_size_capture_nothing(fake_cuda: FakeCuda) -> None:  # noqa: F811
    device = torch.device("cuda")
    begun = []
    for rounds in (1, 3):
        before = fake_cuda.graphs_begun
        scale.by_steps_per_sync([5, 10], rounds, device)
        begun.append(fake_cuda.graphs_begun - before)
    assert begun == [2 * train.SLOTS] * 2


def test_peaks_are_those_of_one_contender(fake_cuda: FakeCuda) -> None:  # noqa: F811
    def tensor(mebibytes: int, **options: Any) -> torch.Tensor:
        return torch.empty(mebibytes << 20, dtype=torch.uint8, **options)

    earlier = [tensor(8, device="cuda"), tensor(4, pin_memory=True)]
    peak = peaks.Peaks()
    tensor(64, device="cuda")  # as the gate does, before anything is measured
    peak.begin()
    kept = [tensor(16, device="cuda"), tensor(2, pin_memory=True)]
    tensor(4, device="cuda")
    assert peak.result([]) == {"allocated": 20 << 20, "reserved": 20 << 20, "page_locked": 2 << 20}
    del earlier, kept


def test_slabs_count_as_page_locked(fake_cuda: FakeCuda) -> None:  # noqa: F811
    peak = peaks.Peaks()
    with torch_sink.SinkLoader(DataLoader(Pictures(), 4, num_workers=1)) as loader:
        assert len([*loader]) == 16
        staging = peak.result([])["page_locked"]
        registered = sum(fake_cuda.registered.values())
        assert registered > 0
        assert peak.result(loader)["page_locked"] == staging + registered


def test_a_contender_that_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(contenders.PrefetcherAndCompile):
        def train(self, batches: Any, steps: int) -> None:
            raise RuntimeError("no compiler")

    output, small = tmp_path / "train.json", ("--batch-size", "2", "--workers", "1", "--steps", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--images", "4", *small, "--output", str(output)])
    monkeypatch.setitem(train.CONTENDERS, "prefetcher + compile", Broken)
    with pytest.raises(SystemExit, match="1"):
        train.main()
    report = json.loads(output.read_text())
    assert "unfinished" not in report
    (results,) = report["models"].values()
    assert results["failed"] == {"prefetcher + compile": "RuntimeError: no compiler"}
    measured = {name: bool(counts) for name, counts in results["contenders"].items()}
    assert measured == {"stock": True, "prefetcher + compile": False, "torch_sink": True, "synthetic": True}
    assert "| torch_sink | 1 |" in report_tables.train(report)
