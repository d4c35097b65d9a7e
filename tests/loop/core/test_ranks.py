"""Two and three ranks with unequal shards: the same metrics, the same decisions and the same weights on all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Decisions of callbacks and evaluations; what torch's releases do to distributed models is in `test_distributed.py`.
pytestmark = pytest.mark.once_on_oldest

ROOT = Path(__file__).parents[3]

Outcomes = dict[int, list[dict[str, Any]]]


def run(directory: Path, *cases: str) -> Outcomes:
    """By the number of ranks, what each of them returned: name of the case -> result."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "tests.loop.core.rank_cases", str(directory), *cases]
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-6000:]
    return {
        size: [json.loads((directory / f"{size}-{rank}.json").read_text()) for rank in range(size)] for size in (2, 3)
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest, outcomes: Outcomes) -> list[dict[str, Any]]:
    return outcomes[request.param]


@pytest.fixture
def first(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return ranks[0]


def test_all_ranks_end_every_case_alike(ranks: list[dict[str, Any]]) -> None:
    for name, result in ranks[0].items():
        assert all(other[name] == result for other in ranks), name


def test_metrics_are_those_of_one_process_over_all_shards(first: dict[str, Any]) -> None:
    assert first["evaluation"] == pytest.approx(first["alone"], rel=1e-6)


def test_evaluations_in_the_course_of_a_run(first: dict[str, Any]) -> None:
    one_step, whole_epoch = first["evaluation_beside_a_loop"]
    assert one_step == whole_epoch
    evaluations, (last, average) = one_step
    assert [step for step, _ in evaluations] == [2, 4, 6]
    assert evaluations[-1][1]["eval_loss"] == last["loss"]
    assert evaluations[-1][1]["accuracy"] == last["accuracy"]
    assert average["loss"] != last["loss"]


def test_a_sharded_model_is_evaluated_on_equal_shares(first: dict[str, Any]) -> None:
    message, results, alone = first["sharded"]
    assert "give all ranks as many batches" in message
    assert results == pytest.approx(alone, rel=1e-6)


def test_a_rank_may_have_nothing_to_evaluate(first: dict[str, Any]) -> None:
    assert first["empty_share"] > 0
    assert first["empty_share"] != first["evaluation"]["loss"]
    loss, largest = first["empty_share_of_named_values"]
    assert loss == first["empty_share"]
    assert largest > 0
    loss, accuracy, share_is_right = first["empty_share_of_an_own_metric"]
    assert loss == first["empty_share"]
    assert 0 < accuracy < 1
    assert share_is_right


def test_the_rate_falls_on_all_ranks_by_the_loss_of_all(first: dict[str, Any]) -> None:
    in_sinks, step_by_step = first["plateau"]["runs"]
    assert in_sinks == step_by_step
    results = [result["eval_loss"] for result in first["plateau"]["results"][:6]]
    best, rate = float("inf"), 0.5
    for loss in results:
        if loss < best - 0.05:
            best = loss
        else:
            rate /= 2
    assert in_sinks["rate"] == rate < 0.5


def test_early_stopping_restores_the_same_epoch_on_all_ranks(first: dict[str, Any]) -> None:
    outcome = first["early_stopping"]
    losses = [result["eval_loss"] for result in outcome["results"]]
    assert outcome["stopped_by"] == "request_stop"
    assert len(losses) == losses.index(min(losses)) + 2
    assert outcome["steps"] == 3 * len(losses)
    assert outcome["weights"] == outcome["best"]


def test_what_rank_0_alone_decides_holds_for_all(first: dict[str, Any]) -> None:
    assert first["own_results"]["steps"] == 12, "the best epoch is the second, patience 2"
    assert first["own_results"]["rate"] == pytest.approx(0.5 * 0.1**2)
    assert first["another_rate_on_one_rank"]["own"] == 0.125


def test_callbacks_that_wait_for_the_other_ranks_are_refused_on_one(first: dict[str, Any]) -> None:
    errors, outcome = first["callbacks_on_one_rank"]
    assert len(errors) == 6
    assert all("give them to all ranks" in error for error in errors)
    assert outcome["steps"] == 3


def test_a_request_to_leave_saves_on_all_ranks(first: dict[str, Any]) -> None:
    outcome = first["request_to_leave"]
    assert outcome["steps"] == 2
    assert outcome["saved"] == ["kept-00000002", "leave-00000002"]


def test_checkpoints_by_the_clock_are_written_together(first: dict[str, Any]) -> None:
    assert first["checkpoints_by_the_clock"]["saved"] == ["clock-00000003", "clock-00000006", "clock-00000009"]


def test_rank_0_speaks_and_writes_for_all(first: dict[str, Any]) -> None:
    said = first["speech"]["alone"]
    for kind in ("printed", "shown", "warned"):
        assert said[kind][0]
        assert not any(said[kind][1:]), kind
    begins = {" ".join(line.split()[:3]) for line in said["printed"][0]}
    assert {"epoch: 1 step:", "Eval result: epoch", "Train epoch time:", "early stopping after"} <= begins
    assert "6/" in said["shown"][0], "the progress bar"
    for text in (
        "there is no complete checkpoint",
        "Misnamed.on_epoch_end is no event",
        "the model is in eval mode",
        "top5 says nothing",
        "nothing evaluates monitor='accuracy'",
        "monitor 'eval_loss' had no value",
        "nothing was trained",
        "metrics of type KnowsNoRanks cannot be added up",
    ):
        assert any(text in line for line in said["warned"][0]), text
    summaries, pages = first["speech"]["files"]
    assert len(summaries) == 1
    assert pages == [".html", ".json", ".png"]


def test_every_rank_speaks_and_writes_where_it_is_asked(first: dict[str, Any], ranks: list[Any]) -> None:
    speech = first["speech"]
    assert all(speech["together"]["printed"])
    assert all(speech["together"]["shown"])
    assert [set(lines) for lines in speech["in front"]] == [{f"rank {rank}"} for rank in range(len(ranks))]
    summaries, pages = speech["files together"]
    assert (len(summaries), len(pages)) == (1 + len(ranks), 3 + 3 * len(ranks))


def test_a_loader_warns_on_rank_0_and_of_a_broken_file_on_the_rank_that_met_it(first: dict[str, Any]) -> None:
    on_first, on_second, *others = first["speech_of_loaders"]["warned"]
    assert sorted(line.split(":")[0] for line in on_first) == [
        "each of the 2 processes reads all samples",
        "the state was taken with num_workers=0, this loader has 1",
    ]
    (broken,) = on_second
    assert broken.startswith("rank 1: 1 samples skipped")
    assert not any(others)


def test_ranks_that_find_different_checkpoints_raise(first: dict[str, Any]) -> None:
    assert first["different_checkpoints"].startswith("rank 0 CKP-00000000, rank 1 none")


@pytest.mark.slow
def test_metrics_of_torchmetrics_reduce_themselves(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    for ranks in run(tmp_path, "metrics_of_torchmetrics").values():
        for rank in ranks:
            results, alone = rank["metrics_of_torchmetrics"]
            several, expected = results.pop("several"), alone.pop("several")
            assert results == pytest.approx(alone, rel=1e-6)
            assert several == pytest.approx(expected, rel=1e-6)
