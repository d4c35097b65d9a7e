"""A training process is killed and resumed from its last state: no sample is lost, none comes twice, losses are equal."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torch_sink.sink import SinkLoader

SAMPLES, BATCH_SIZE, BATCHES_PER_PASS = 23, 4, 6
STEPS = 2 * BATCHES_PER_PASS


class Augmented(Dataset):
    """Sample i is i, and noise of a data-dependent number of draws; it takes a moment, so that kills hit the middle."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.005)
        noise = sum(random.random() for _ in range(int(torch.randint(1, 5, ()))))
        return torch.tensor([index / SAMPLES, noise, 1.0]), index


def train(folder: Path, options: dict[str, Any], at_step: Callable[[int], None] = lambda step: None) -> None:
    """Trains from the last state in `folder` on; each step leaves a record, every second one a state."""
    torch.manual_seed(0)
    random.seed(0)
    generator = torch.Generator().manual_seed(3)
    loader = SinkLoader(DataLoader(Augmented(), BATCH_SIZE, shuffle=True, generator=generator, **options))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step, parts = 0, {"loader": loader, "model": model, "optimizer": optimizer}
    if (folder / "state").exists():
        state = torch.load(folder / "state", weights_only=True)
        step = state.pop("step")
        for name, part in parts.items():
            part.load_state_dict(state[name])
    while step < STEPS:
        for inputs, indices in itertools.islice(loader, STEPS - step):
            loss = (model(inputs).squeeze(1) - indices / SAMPLES).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            with (folder / f"step-{step:02d}").open("a") as file:
                file.write(f"{loss.item().hex()} {indices.tolist()}\n")
            if step % 2 == 0:
                torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, folder / "new")
                os.replace(folder / "new", folder / "state")
            at_step(step)
    loader.close()


def kill_after(last: int, step: int) -> None:
    if step == last:
        os.kill(os.getpid(), signal.SIGKILL)


def start(*arguments: Any) -> BaseProcess:
    """No fork of this process: torch refuses backward passes where a step was compiled before."""
    process = multiprocessing.get_context("forkserver").Process(target=train, args=arguments)
    process.start()
    return process


def steps_made(folder: Path) -> int:
    """Records of steps, repeated ones included."""
    return sum(path.read_text().count("\n") for path in folder.glob("step-*"))


def records(folder: Path) -> list[str]:
    """One line per step; a step that was made twice, before and after a kill, must have been the same."""
    lines = [path.read_text().splitlines() for path in sorted(folder.glob("step-*"))]
    assert all(len(set(one)) == 1 for one in lines)
    return [one[0] for one in lines]


def check(folder: Path, expected: list[str]) -> None:
    found = records(folder)
    assert len(found) == STEPS
    assert found == expected
    indices = [[int(i) for i in line.partition("[")[2].rstrip("]").split(",")] for line in found]
    for first in range(0, STEPS, BATCHES_PER_PASS):
        assert sorted(itertools.chain(*indices[first : first + BATCHES_PER_PASS])) == list(range(SAMPLES))
    assert indices[:BATCHES_PER_PASS] != indices[BATCHES_PER_PASS:]


def uninterrupted(folder: Path, options: dict[str, Any]) -> list[str]:
    folder.mkdir()
    train(folder, options)
    return records(folder)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.sampled(1)
def test_killed_and_resumed(tmp_path: Path, num_workers: int) -> None:
    """Killed after a state, then one step after one, in another pass."""
    options = {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}
    expected = uninterrupted(tmp_path / "whole", options)
    for last in (2, 9):
        process = start(tmp_path, options, functools.partial(kill_after, last))
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
    train(tmp_path, options)
    check(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("persistent", [False, True], ids=["fresh", "persistent"])
@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_killed_at_random_moments(tmp_path: Path, context: str, num_workers: int, persistent: bool) -> None:
    """At any moment, the start of the workers included; none of them outlives the process."""
    moments = random.Random(f"{context} {num_workers} {persistent}")
    options = {"num_workers": num_workers, "persistent_workers": persistent, "multiprocessing_context": context}
    expected = uninterrupted(tmp_path / "whole", options)
    for awaited in (0, 1, 1, 1):  # steps, before the moment: the start of the workers takes most of the time
        before = steps_made(tmp_path)
        process = start(tmp_path, options)
        while process.is_alive() and steps_made(tmp_path) < before + awaited:
            time.sleep(0.005)
        process.join(moments.uniform(0, 0.1))
        workers = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
        process.kill()
        process.join()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
    train(tmp_path, options)
    check(tmp_path, expected)
