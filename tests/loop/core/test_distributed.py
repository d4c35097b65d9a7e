"""Two processes on the CPU: equal to a plain distributed loop, agreed on overflows and stops, resumable."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import warm

from torch_sink.cli.photos import write_photos

SCRIPT = Path(__file__).with_name("distributed_run.py")
EXAMPLE = Path(__file__).parents[3] / "examples" / "train_distributed.py"


def torchrun(*arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run on two processes. The limit is for a machine ten times slower than usual; a hang ends there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def life(directory: Path, number: int) -> list[subprocess.CompletedProcess[str]]:
    """What torchrun starts for one life of a job, in processes that have loaded torch already."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"TORCHELASTIC_RESTART_COUNT": str(number), "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return warm.run(SCRIPT, directory, timeout=300, env=environment)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


Job = tuple[list[list[subprocess.CompletedProcess[str]]], Path]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The processes of a job's two lives, and the folder that it wrote to."""
    directory = tmp_path_factory.mktemp("cases")
    return [life(directory, number) for number in range(2)], directory


@pytest.fixture(scope="module")
def results(job: Job) -> dict[str, Any]:
    (ranks, _), directory = job
    assert (directory / "rank-0.json").is_file(), [rank.stderr[:6000] for rank in ranks]
    return results_in(directory)


def results_in(directory: Path) -> dict[str, Any]:
    first, second = (json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert {name: case for name, case in first.items() if name != "signal"} == {
        name: case for name, case in second.items() if name != "signal"
    }, "both ranks see the same history and the same model"
    first["signal"] = [first["signal"], second["signal"]]
    return first


@pytest.mark.parametrize("case", ["ddp 1", "ddp 2", "ddp 3", "fsdp 1", "fsdp 2", "fsdp 3", "fsdp parts 2"])
def test_equals_a_plain_distributed_loop(results: dict[str, Any], case: str) -> None:
    assert results[case]["parameters"] == 0
    assert results[case]["losses"] < 1e-6
    if "fsdp" not in case or results["fsdp averages"]:
        assert results[case]["single"] < 1e-4
    assert results[case]["syncs"] == 3


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_stream_ends_its_last_window_on_all_ranks(results: dict[str, Any], kind: str) -> None:
    """Gradients are exchanged after each batch, which rounds in another order than after the last one."""
    case = results[f"{kind} 3 stream"]
    assert case["parameters"] < 1e-5
    if kind != "fsdp" or results["fsdp averages"]:
        assert case["single"] < 1e-4
    assert case["losses"] < 1e-6


def test_a_window_whose_gradients_were_not_exchanged_is_no_update(results: dict[str, Any]) -> None:
    assert (
        "an epoch of 10 batches, as len() of the loader says, ended after 8, inside an accumulation of 3"
        in (results["shorter"])
    )


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_is_skipped_by_all(results: dict[str, Any], kind: str) -> None:
    assert results[f"{kind} overflow"] == {"overflows": [0, 4], "finite": True, "equal": True, "scale": 4.0}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_resume_is_bit_identical(results: dict[str, Any], kind: str) -> None:
    expected = {"step": 6, "name": "CKP-00000006", "losses": True, "parameters": True, "buffers": True}
    assert results[f"{kind} resume"] == expected


def test_the_end_of_a_run_is_saved_where_it_can_be_and_nothing_of_another_training_is_lost(
    results: dict[str, Any],
) -> None:
    """A sharded model keeps the gradients of an unfinished accumulation to itself."""
    both = [[f"cut {kind}-{step:08d}" for step in steps] for kind, steps in (("ddp", (2, 3)), ("fsdp", (2,)))]
    assert results["ddp cut"] == [name + end for name in both[0] for end in ("", ".older1")]
    assert results["fsdp cut"] == [name + end for name in both[1] for end in ("", ".older1")]


def test_epochs_of_different_lengths_are_refused(results: dict[str, Any]) -> None:
    assert "an epoch has 3 steps on one rank and 4 on another" in results["uneven"]


def test_what_needs_whole_parameters_is_refused_for_a_sharded_model(results: dict[str, Any]) -> None:
    assert "pass ema=None" in results["refusal"]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_sharded_models_train_in_low_precision(results: dict[str, Any], level: str) -> None:
    case = results[level]
    if not results["fsdp averages"]:
        pytest.skip("this torch adds up the gradients of sharded models over gloo, so they train in another way")
    assert case["losses"] < 1e-5
    assert case["parameters"] < 1e-5
    assert 1e-4 < case["rounding"] < 0.05, "it is low precision"


def test_a_signal_to_one_rank_stops_all_after_the_same_sink(results: dict[str, Any]) -> None:
    assert results["signal"] == [
        {"steps": 4, "raised": "a signal to another rank ended the run after step 4 on all of them"},
        {"steps": 4, "handled": [signal.SIGTERM]},
    ]


def test_a_rank_that_dies_ends_the_life_of_a_job_and_the_next_resumes(job: Job) -> None:
    (first_life, second_life), directory = job
    assert [rank.returncode for rank in first_life] == [1, 1]
    assert "rank 1 was told to die" in first_life[1].stderr
    assert [rank.returncode for rank in second_life] == [0, 0], [rank.stderr[:6000] for rank in second_life]
    assert_resumed(directory)


@pytest.mark.slow
def test_torchrun_restarts_the_job(tmp_path: Path, results: dict[str, Any]) -> None:
    finished = torchrun(str(SCRIPT), str(tmp_path), restarts=2)
    assert finished.returncode == 0, finished.stderr[:6000]
    assert "rank 1 was told to die" in finished.stderr
    assert_resumed(tmp_path)
    assert results_in(tmp_path) == results


def assert_resumed(directory: Path) -> None:
    first, second = (json.loads((directory / "crash" / f"crash-{rank}.json").read_text()) for rank in (0, 1))
    assert first["resumed"] == 4
    assert first["steps"] == 8
    assert first["parameters"] == second["parameters"]


@pytest.mark.once_on_oldest
def test_the_example_trains_on_images_and_resumes(tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", count=24)
    options = ["--wrap", "fsdp", "--accumulate", "2", "--batch-size", "4", "--workers", "0"]
    options += ["--directory", str(tmp_path / "checkpoints"), "--checkpoint-steps", "6"]
    finished = torchrun(str(EXAMPLE), str(tmp_path / "photos"), "--steps", "12", *options)
    assert finished.returncode == 0, finished.stderr[:6000]
    assert "12 steps on 2 processes" in finished.stdout
    finished = torchrun(str(EXAMPLE), str(tmp_path / "photos"), "--steps", "15", *options)
    assert finished.returncode == 0, finished.stderr[:6000]
    assert "resumed at step 12" in finished.stdout
