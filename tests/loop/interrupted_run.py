"""A training script that the tests kill and start again.

It trains with dropout, BatchNorm, a schedule, accumulation, an average and shuffled, randomly augmented data, saves
every few steps, resumes if it can, and writes a digest of everything to DIRECTORY/result.txt at the end.

Each life is a process of its own. Since importing torch takes longer than the training, the script imports once, then
forks a life for every line `[directory, seconds per sink, file to print to, options]` of its input; it answers with the
life's process id, and with its exit code when it has ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # the first step of an optimizer imports it, which takes longer than all steps
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loop.reference import make_model  # noqa: I001 - found through the line above

from torch_sink.loop import CheckpointConfig, LambdaCallback, ModelCheckpoint, StepLoop


class Augmented(Dataset):
    """Draws from the global generator for every sample."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 8, 8), index / 50) + 0.1 * torch.randn(3, 8, 8), index % 5


def main(directory: Path, seconds_per_sink: float, batch_size: int = 4, accumulate: int = 2, every: int = 5) -> None:
    model = make_model()
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)
    loader = DataLoader(Augmented(), batch_size, shuffle=True)
    loop = StepLoop(
        model,
        functional.cross_entropy,
        optimizer,
        steps_per_sync=4,
        scheduler=scheduler,
        schedule="step",
        accumulate=accumulate,
        ema=0.9,
    )
    started = loop.resume(directory, loader) if any(directory.glob("CKP-*")) else 0
    print(f"resumed at {started}", flush=True)
    losses: dict[int, float] = {}

    def note(context: object) -> None:
        arguments = context.original_args()
        first = arguments.cur_step_num - len(arguments.losses) + 1
        losses.update({step: loss for step, loss in enumerate(arguments.losses.tolist(), first)})
        print(f"step {arguments.cur_step_num}", flush=True)
        time.sleep(seconds_per_sink)  # what a sink takes: a signal is to come before the run has ended

    config = CheckpointConfig(save_checkpoint_steps=every, keep_checkpoint_max=2)
    callbacks = [ModelCheckpoint("CKP", directory, config), LambdaCallback(on_train_step_end=note)]
    try:
        loop.run(loader, epochs=3, callbacks=callbacks)
    except KeyboardInterrupt:
        print(f"interrupted at {loop.step_count}, {len(loop.history.losses)} losses", flush=True)
    steps = 3 * len(loader)
    if loop.step_count < steps:
        return
    digest = hashlib.sha256()
    states = [model.state_dict(), loop.ema_model().state_dict(), *optimizer.state_dict()["state"].values()]
    for state in states:
        for value in state.values():
            digest.update(value.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(str(scheduler.state_dict()["last_epoch"]).encode())
    (directory / "result.txt").write_text(f"{digest.hexdigest()} {losses[steps]} {loop.step_count}")


def live(directory: str, seconds_per_sink: float, printed: str, options: dict[str, int]) -> NoReturn:
    """One life, in a process that was forked for it."""
    code = 1
    try:
        output = os.open(printed, os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        main(Path(directory), seconds_per_sink, **options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        life = os.fork()
        if life == 0:
            live(*json.loads(line))
        print(life, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)
