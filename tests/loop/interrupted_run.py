"""A training script that the tests kill and start again: `python interrupted_run.py DIRECTORY [steps per second]`.

It trains with dropout, BatchNorm, a schedule, accumulation, an average and shuffled, randomly augmented data, saves
every 5 steps, resumes if it can, and writes a digest of everything to DIRECTORY/result.txt at the end.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loop.reference import make_model  # noqa: I001 - found through the line above

from torch_sink.loop import CheckpointConfig, LambdaCallback, ModelCheckpoint, StepLoop

STEPS = 39


class Augmented(Dataset):
    """Draws from the global generator for every sample."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 8, 8), index / 50) + 0.1 * torch.randn(3, 8, 8), index % 5


def main(directory: Path, seconds_per_sink: float) -> None:
    model = make_model()
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    loop = StepLoop(model, functional.cross_entropy, optimizer, sink_size=4, scheduler=scheduler, accumulate=2, ema=0.9)
    started = loop.resume(directory, loader)
    print(f"resumed at {started}", flush=True)
    losses: dict[int, float] = {}

    def note(context: object) -> None:
        arguments = context.original_args()
        first = arguments.cur_step_num - len(arguments.losses) + 1
        losses.update({step: loss for step, loss in enumerate(arguments.losses.tolist(), first)})
        print(f"step {arguments.cur_step_num}", flush=True)
        time.sleep(seconds_per_sink)

    config = CheckpointConfig(save_checkpoint_steps=5, keep_checkpoint_max=2)
    callbacks = [ModelCheckpoint("CKP", directory, config), LambdaCallback(on_train_step_end=note)]
    history = loop.run(loader, epochs=3, callbacks=callbacks)
    print(f"stopped by {history.stopped_by} at {loop.step_count}", flush=True)
    if loop.step_count < STEPS:
        return
    digest = hashlib.sha256()
    states = [model.state_dict(), loop.ema_model().state_dict(), *optimizer.state_dict()["state"].values()]
    for state in states:
        for value in state.values():
            digest.update(value.detach().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    digest.update(str(scheduler.state_dict()["last_epoch"]).encode())
    last_losses = [losses[step] for step in range(36, STEPS + 1)]
    (directory / "result.txt").write_text(f"{digest.hexdigest()} {last_losses} {loop.step_count}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
