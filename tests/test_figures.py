"""The measurements behind the published figures, with loaders and models of known speed: the known ratio comes out."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, fake_cuda  # noqa: F401 a fixture
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

BENCHMARKS = Path(__file__).resolve().parents[1] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import contenders  # noqa: E402
import peaks  # noqa: E402
import report_tables  # noqa: E402
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


class Pace:
    """Returns every so many seconds, however busy the machine is with what its caller does in between."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.due = seconds, 0.0

    def wait(self) -> None:
        self.due = max(self.due + self.seconds, time.monotonic())
        time.sleep(max(self.due - time.monotonic(), 0))


class Samples(Dataset[Any]):
    """Each takes its time in a worker."""

    def __init__(self, seconds: float) -> None:
        self.pace = Pace(seconds)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.pace.wait()
        return torch.ones(3, 2, 2), index % 2


class Pictures(Samples):
    """Of 40 kB."""

    def __init__(self) -> None:
        super().__init__(0)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 60, 60), float(index)), index


class Slow(nn.Module):
    """A model whose steps take a known time, and the first one longer, as where it is compiled."""

    def __init__(self, step_seconds: float, first: float = 0.5) -> None:
        super().__init__()
        self.pace, self.first = Pace(step_seconds), first
        self.head = nn.Linear(12, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.pace.wait()
        time.sleep(self.first)
        self.first = 0
        return self.head(images.flatten(1))


class Paced(contenders.Contender):
    def __init__(self, *, sample_seconds: float, step_seconds: float) -> None:
        self.device, self.model, self.samples = CPU, Slow(step_seconds), Samples(sample_seconds)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loop = torch_sink.StepLoop(self.model, cross_entropy, self.optimizer, sink_size=contenders.SINK_SIZE)

    def dataset(self, folder: Path) -> Dataset[Any]:
        return self.samples


class PacedStock(Paced, contenders.Stock):
    """A plain loop."""


class PacedSink(Paced, contenders.TorchSink):
    """SinkLoader and StepLoop."""


@pytest.fixture
def options() -> Namespace:
    return Namespace(batch_size=1, steps=None, rounds=2, seconds=60.0, warmup=2)


def batches_per_second(contender: Paced, options: Namespace) -> float:
    return float(train.measure(contender, Path(), WORKERS, options)["images_per_second"]["p50"])


def test_training_is_as_fast_as_workers_or_steps_allow(options: Namespace) -> None:
    """After a long first step all workers are ahead, and what they made meanwhile is no figure of anybody's speed."""
    bound_by_workers = {"sample_seconds": 0.112, "step_seconds": 0.02}
    stock = batches_per_second(PacedStock(**bound_by_workers), options)
    assert stock == pytest.approx(WORKERS / 0.112, rel=0.1)
    same = batches_per_second(PacedSink(**bound_by_workers), options)
    assert same / stock == pytest.approx(1, rel=0.1)
    bound_by_steps = batches_per_second(PacedSink(sample_seconds=0.014, step_seconds=0.014), options)
    assert bound_by_steps / stock == pytest.approx(2, rel=0.1)


CASE = loop.Case(lambda: Slow(0.02, 0), (2, 3, 2, 2), 20)


def at_half_the_time(setup: loop.Setup) -> Callable[[int], int]:
    """StepLoop over a model that is twice as fast."""
    setup.model.pace.seconds /= 2
    return loop.sink("eager", 10)(setup)


@pytest.fixture
def known_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = {"plain": loop.plain(False, None), "StepLoop": loop.sink("eager", 10), "StepLoop, fast": at_half_the_time}
    monkeypatch.setattr(loop, "loops", lambda cuda: loops)
    monkeypatch.setattr(loop, "base_of", lambda name: "plain")


def test_loops_are_as_fast_as_their_models(known_loops: None) -> None:
    *_, last = loop.measure(CASE, CPU, None, rounds=3, seconds=0)
    results = last["loops"]
    plain, same, fast = (results[name]["steps_per_second"]["p50"] for name in results)
    assert last["rounds"] == 3
    assert plain == pytest.approx(50, rel=0.1)
    assert same / plain == pytest.approx(1, rel=0.1)
    assert fast / plain == pytest.approx(2, rel=0.1)
    assert results["StepLoop, fast"]["extra_microseconds"]["p50"] == pytest.approx(-10_000, rel=0.1)


def test_a_measured_loop_is_not_lost_where_the_next_one_is_cut_short(
    known_loops: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "loop.json"
    monkeypatch.setattr(loop, "cases", lambda cuda: {"slow": CASE})
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
