"""A run that is killed or interrupted at any moment goes on, and ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from loop.reference import make_batches, make_model
from torch_sink.loop import Callback, CheckpointConfig, LambdaCallback, ModelCheckpoint, OnRequestExit, StepLoop
from torch_sink.loop.checkpoints import list_checkpoints
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved

SCRIPT = Path(__file__).with_name("interrupted_run.py")
LIMIT = 300  # seconds; a run takes a few on a machine at rest


class Lives:
    """Starts lives of the script, one after the other; see there."""

    def __init__(self) -> None:
        self._script = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, directory: Path, pause: float = 0.0, **options: int) -> Life:
        printed = directory / "printed"
        if not printed.exists():
            os.mkfifo(printed)
        self.send(json.dumps([str(directory), pause, str(printed), options]))
        return Life(int(self.receive()), printed.open(), self)

    def send(self, line: str) -> None:
        assert self._script.stdin is not None
        print(line, file=self._script.stdin, flush=True)

    def receive(self) -> str:
        assert self._script.stdout is not None
        return self._script.stdout.readline()

    def close(self) -> None:
        self._script.communicate(timeout=LIMIT)


@dataclass
class Life:
    """A running process of the script."""

    process: int
    output: TextIO
    lives: Lives

    def end(self, number: int) -> int:
        """Send a signal and wait; returns the exit code."""
        os.kill(self.process, number)
        self.output.close()
        return int(self.lives.receive())

    def finish(self) -> tuple[str, int]:
        """Wait for the end; returns what was printed from now on, and the exit code."""
        with self.output:
            printed = self.output.read()
        return printed, int(self.lives.receive())


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    started = Lives()
    yield started
    started.close()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, lives: Lives) -> str:
    directory = tmp_path_factory.mktemp("uninterrupted")
    assert lives.start(directory).finish()[1] == 0
    return (directory / "result.txt").read_text()


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, lives: Lives, uninterrupted: str) -> None:
    """SIGKILL as soon as a step count is printed, so that it lands anywhere in what follows; and again, twice."""
    for kill_at in (6, 17, 26):
        life = lives.start(tmp_path, pause=0.02)
        for line in life.output:
            if line.startswith("step ") and int(line.split()[1]) >= kill_at:
                break
        assert life.end(signal.SIGKILL) == -signal.SIGKILL
    saved = int(list_checkpoints(tmp_path)[-1].name.removeprefix("CKP-"))
    assert saved >= 25
    assert f"resumed at {saved}\n" in lives.start(tmp_path).finish()[0]
    assert (tmp_path / "result.txt").read_text() == uninterrupted


@pytest.mark.slow
def test_a_run_that_is_killed_at_every_step_ends_with_the_same_bits(tmp_path: Path, lives: Lives) -> None:
    """Three epochs of ten batches, accumulated by three: a window of one step at each epoch's end."""
    options = {"batch_size": 5, "accumulate": 3, "every": 1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    assert lives.start(whole, **options).finish()[1] == 0
    for kill_at in range(1, 30):
        life = lives.start(killed, pause=0.05, **options)
        for line in life.output:
            if line.startswith("step ") and int(line.split()[1]) >= kill_at:
                break
        assert life.end(signal.SIGKILL) == -signal.SIGKILL
    assert lives.start(killed, **options).finish()[1] == 0
    assert (killed / "result.txt").read_text() == (whole / "result.txt").read_text()


def test_a_signal_saves_and_leaves_cleanly(tmp_path: Path, lives: Lives, uninterrupted: str) -> None:
    """SIGINT in the first life, SIGTERM in the second, each after the first sink."""
    stopped_at = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        life = lives.start(tmp_path, pause=1.0)
        assert life.output.readline() == f"resumed at {stopped_at}\n"
        assert life.output.readline().startswith("step ")
        os.kill(life.process, number)
        printed, code = life.finish()
        before, stopped_at = stopped_at, int(list_checkpoints(tmp_path)[-1].name.removeprefix("CKP-"))
        assert before < stopped_at < 39
        if number == signal.SIGINT:
            assert code == 0
            assert printed.endswith(f"interrupted at {stopped_at}, {stopped_at - before} losses\n")
        else:
            assert code == -number, "SIGTERM ends the process, after a checkpoint of the step it reached"
            steps = [line for line in printed.splitlines() if line.startswith("step ")]
            assert not steps or steps[-1] == f"step {stopped_at}"
    assert f"resumed at {stopped_at}\n" in lives.start(tmp_path).finish()[0]
    assert (tmp_path / "result.txt").read_text() == uninterrupted


def test_handlers_are_restored_and_a_second_interrupt_raises() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    model = make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_sync=3)

    def interrupt(context: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        loop.run(make_batches(8), callbacks=[LambdaCallback(on_train_step_begin=interrupt)])
    assert loop.history is not None
    assert loop.history.stopped_by == "SIGINT"
    assert loop.history.steps == len(loop.history.losses) == loop.step_count == 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

    def twice(context: Any) -> None:
        interrupt(context)
        interrupt(context)

    with pytest.raises(KeyboardInterrupt):
        loop.run(make_batches(8), callbacks=[LambdaCallback(on_train_step_begin=twice)])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_with_on_request_exit_a_signal_is_a_return(number: int) -> None:
    model = make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_sync=3)
    interrupt = LambdaCallback(on_train_step_begin=lambda context: os.kill(os.getpid(), number))
    history = loop.run(make_batches(8), callbacks=[interrupt, OnRequestExit(save_ckpt=False, sig=number)])
    assert (history.steps, history.stopped_by) == (1, signal.Signals(number).name)


def test_a_handler_of_the_users_is_called_once_the_run_has_stopped() -> None:
    loop = make_loop()
    seen: list[int] = []
    usual = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(loop.step_count))
    try:
        interrupt = LambdaCallback(on_train_step_begin=lambda context: os.kill(os.getpid(), signal.SIGTERM))
        history = loop.run(numbered_batches(), callbacks=[interrupt])
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert (history.steps, history.stopped_by, seen) == (1, "SIGTERM", [1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_in_a_run_that_fails(number: int) -> None:
    """A program that tries again after errors is to end all the same."""
    seen: list[int] = []

    def interrupt_and_fail(context: Any) -> None:
        os.kill(os.getpid(), number)
        raise RuntimeError("the callback failed")

    usual = signal.signal(number, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(RuntimeError, match="the callback failed"):
            make_loop().run(numbered_batches(), callbacks=[LambdaCallback(on_train_step_end=interrupt_and_fail)])
    finally:
        signal.signal(number, usual)
    assert seen == [number]


def test_an_ignored_signal_stays_ignored() -> None:
    """As Ctrl-C is in what a script starts in the background."""
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupt = LambdaCallback(on_train_step_begin=lambda context: os.kill(os.getpid(), signal.SIGINT))
        history = make_loop().run(numbered_batches(), callbacks=[interrupt])
    finally:
        signal.signal(signal.SIGINT, usual)
    assert (history.steps, history.stopped_by) == (4, None)


class FailsAt(Callback):
    """Raises before the step with the number given, once."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().loop.step_count + 1 == self.step:
            self.step = 0
            raise RuntimeError("the callback failed")


class Numbered(Dataset):
    """Numbers with a random draw each, as augmentation is."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3,), float(index)) + torch.rand(3), torch.tensor(index % 2)


def numbered_loader(workers: int, batches_per_epoch: int | None = None) -> SinkLoader:
    loader = DataLoader(Numbered(), 2, True, num_workers=workers, generator=torch.Generator().manual_seed(3))
    return SinkLoader(loader, batches_per_epoch=batches_per_epoch)


def make_loop() -> StepLoop:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), steps_per_sync=2)


@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_callback_that_fails_before_a_step_takes_no_batch_with_it(step: int, workers: int) -> None:
    loop = make_loop()
    with numbered_loader(workers, batches_per_epoch=7) as loader:
        expected = loop.run(loader, epochs=1).losses
    loop = make_loop()
    with numbered_loader(workers, batches_per_epoch=7) as loader:
        with pytest.raises(RuntimeError, match="the callback failed"):
            loop.run(loader, callbacks=[FailsAt(step)])
        assert loader.batch_in_epoch == loop.step_count == step - 1
        losses = loop.run(loader).losses
    assert torch.equal(losses, expected[step - 1 :])


def test_a_checkpoint_after_such_a_failure_lies_before_the_batch(tmp_path: Path) -> None:
    loop = make_loop()
    with numbered_loader(1) as loader:
        expected = loop.run(loader, epochs=2).losses
    loop = make_loop()
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    with numbered_loader(1) as loader, pytest.raises(RuntimeError, match="the callback failed"):
        loop.run(loader, epochs=2, callbacks=[ModelCheckpoint("A", tmp_path, config), FailsAt(10)])
    loop = make_loop()
    with numbered_loader(1) as loader:
        assert loop.resume(tmp_path, loader) == 9
        assert torch.equal(loop.run(loader, epochs=2).losses, expected[9:])


def test_a_callback_that_fails_at_an_epochs_end_takes_no_batch_of_the_next_with_it(tmp_path: Path) -> None:
    """The end of an epoch of unknown length is seen by the first batch of the next, when a run resumes there."""

    def source() -> Iterator[Any]:
        yield from numbered_batches()

    loop = make_loop()
    with SinkLoader(source) as loader:
        loop.run(loader, epochs=2, max_steps=4)
        loop.save(tmp_path, loader)
    loop = make_loop()
    with SinkLoader(source) as loader:
        loop.resume(tmp_path, loader)
        with pytest.raises(ZeroDivisionError):
            loop.run(loader, epochs=2, callbacks=[LambdaCallback(on_train_epoch_end=lambda context: 1 / 0)])
        assert loader.batch_in_epoch == 0
        assert [float(values.sum()) for values, _ in loader.rest()] == [0.0, 6.0, 12.0, 18.0]


def numbered_batches() -> list[Any]:
    return [(torch.full((2, 3), float(number)), torch.zeros(2, dtype=torch.long)) for number in range(4)]
