"""The cost of a data worker: a worker that burns a known CPU time comes out as that much, wherever it burns it."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from torch_sink.cli import worker_cost
from torch_sink.cli.pipelines import Counted, Pipeline
from torch_sink.cli.worker_cost import said_beside_stock

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import report_worker  # noqa: E402
import worker_cost as script  # noqa: E402
import worker_rows  # noqa: E402

pytestmark = pytest.mark.once

BATCH, BATCHES = 8, 10
BURNED = 0.004  # CPU seconds a sample
OVERHEAD = 0.0006  # of a sample that does nothing else, with its share of a batch; three times what was seen


def burn(seconds: float) -> None:
    """Uses the CPU for so long, and the same whether the machine is busy or not."""
    begun = time.thread_time()
    while time.thread_time() - begun < seconds:
        pass


class Burning(Dataset[torch.Tensor]):
    """Samples that take their time in `__getitem__`."""

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        burn(self.seconds)
        return torch.ones(3)


class Sent:
    """A batch that takes its time when it is pickled, by the thread that sends it, or when it is unpickled."""

    def __init__(self, here: float, there: float = 0) -> None:
        self.here, self.there = here, there

    def __reduce__(self) -> Any:
        burn(self.here)
        return burn, (self.there,)


def pipeline_of(dataset: Dataset[Any], collate: Any = default_collate) -> Pipeline:
    return Pipeline("known", dataset, {"batch_size": BATCH, "collate_fn": Counted(collate, is_batch=True)})


def seconds(dataset: Dataset[Any], collate: Any = default_collate, workers: int = 1) -> float:
    """Of a sample, as measured, in a round that is as long as the dataset."""
    counted = BATCH * (BATCHES - worker_cost.WARM_UP_BATCHES)
    return worker_cost.worker_seconds(pipeline_of(dataset, collate), counted, seed=0, workers=workers)


@pytest.mark.parametrize("workers", [1, 0])
@pytest.mark.sampled(1)
def test_what_a_dataset_burns_is_measured(workers: int) -> None:
    assert BURNED < seconds(Burning(BURNED), workers=workers) < BURNED + OVERHEAD


def test_what_a_worker_burns_to_send_a_batch_is_measured() -> None:
    def collate(samples: Any) -> Sent:
        return Sent(BATCH * BURNED)

    # A thread sends what is collated: at each of the two readings, up to two batches are prefetched and not sent yet.
    unsent = 2 * BURNED / (BATCHES - worker_cost.WARM_UP_BATCHES)
    assert BURNED - unsent < seconds(Burning(), collate) < BURNED + unsent + OVERHEAD


def test_what_the_receiver_burns_is_not_measured() -> None:
    def collate(samples: Any) -> Sent:
        return Sent(0, BATCH * BURNED)

    assert seconds(Burning(), collate) < OVERHEAD


def test_the_system_says_the_same_of_a_worker_that_has_ended() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    measured = seconds(Burning(BURNED))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    in_all = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # The start of a process and the batches of the warm-up are the system's, not the measurement's.
    assert measured * BATCH * BATCHES < in_all < measured * BATCH * BATCHES + 0.5


def test_sides_take_turns_with_equal_seeds() -> None:
    order: list[tuple[str, int]] = []

    def side(name: str) -> Any:
        return lambda seed: order.append((name, seed)) or float(seed)

    values = worker_cost.in_turns({"stock": side("stock"), "torch_sink": side("torch_sink")}, rounds=3)
    turns = [("stock", 1), ("torch_sink", 1), ("torch_sink", 2), ("stock", 2), ("stock", 3), ("torch_sink", 3)]
    assert order == turns
    assert values == {"stock": [1, 2, 3], "torch_sink": [1, 2, 3]}


def test_ratios_are_those_within_a_round() -> None:
    found = worker_cost.summary({"stock": [4.0, 9.0, 6.0], "torch_sink": [2.0, 3.0, 6.0], "on_cpu": [4.0, 9.0, 6.0]})
    assert {key: found["ratio"][key] for key in ("least", "p50", "most")} == {"least": 1, "p50": 2, "most": 3}
    assert worker_cost.spread(found["ratio"]) == "2.0 (1.0 to 3.0)"
    assert set(found["on_cpu_ratio"].values()) == {1}
    assert report_worker._ratio(found["ratio"]).endswith("(1.00 to 3.00), no difference")
    assert report_worker._ratio({"least": 1.1, "p50": 1.2, "most": 1.3}) == "1.20 (1.10 to 1.30)"


@pytest.mark.parametrize("name", worker_rows.ROWS)
@pytest.mark.sampled(10)
def test_a_row_s_pipeline_gives_stock_s_batches_and_is_as_long_as_a_round(name: str, generated_photos: Path) -> None:
    files = sorted(generated_photos.rglob("*.jpg"))
    row = worker_rows.ROWS[name]
    pipeline = row.pipeline(name, files * -(-worker_rows.MOST_FILES // len(files)))
    batches, left = divmod(len(pipeline.dataset), row.batch_size)  # type: ignore[arg-type]
    assert left == 0
    assert row.images < batches * row.batch_size <= worker_rows.MOST_FILES
    script.check_equal(name, pipeline)


@pytest.mark.slow
def test_rows_are_measured_written_and_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "result.json"

    def run(*options: str) -> Any:
        arguments = ["--images", "4", "--rounds", "1", "--output", str(output), *options]
        monkeypatch.setattr(sys, "argv", ["worker_cost.py", *arguments])
        script.main()
        return json.loads(output.read_text())

    monkeypatch.setattr(script, "LARGE", worker_rows.IN_MEMORY)
    first = run("--rows", "MNIST eval")
    in_slabs = first["worker_cost"]["MNIST eval"]
    assert in_slabs["slabs_ms"]["p50"] > 0
    assert first["photographs"]["name"] == "torch_sink.cli.photos.write_photos, seeds 0 to 3"
    monkeypatch.undo()
    both = run("--rows", "CIFAR eval", "--add")
    assert list(both["worker_cost"]) == ["CIFAR eval", "MNIST eval"]
    assert both["worker_cost"]["MNIST eval"] == in_slabs
    for values in (both["worker_cost"]["CIFAR eval"], both["worker_cost"]["CIFAR eval"]["one_process"]):
        assert all(values[f"{side}_ms"]["least"] > 0 for side in ("stock", "torch_sink", "on_cpu"))
    assert "| MNIST eval | 128 |" in report_worker.section(both)


@pytest.mark.parametrize(
    ("least", "most", "advice"),
    [
        (1.06, 1.3, "the image backend pays."),
        (1.04, 1.3, "no difference."),
        (0.8, 0.94, "leave the image backend at 'PIL' for this dataset."),
        (0.8, 0.96, "no difference."),
        (0.9, 1.1, "no difference."),
    ],
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_bench_says_where_the_image_backend_pays(least: float, most: float, advice: str, has_gpu: bool) -> None:
    ratio, other = {"least": least, "p50": (least + most) / 2, "most": most}, {"least": 9.0, "p50": 9.0, "most": 9.0}
    cost = {
        "stock_ms": {"p50": 0.080},
        "torch_sink_ms": {"p50": 0.020},
        "on_cpu_ms": {"p50": 0.109},
        "ratio": ratio if has_gpu else other,
        "on_cpu_ratio": other if has_gpu else ratio,
    }
    said = said_beside_stock(cost, on_cpu=not has_gpu)
    assert f"here {'0.020 ms recorded' if has_gpu else '0.109 ms on the CPU'}, and 0.080 ms in stock code" in said
    assert said.endswith(advice)
