"""The training whose checkpoint lies in `earlier_checkpoint/`, as an earlier version of the package wrote it at step 5.

python -m loop.earlier FOLDER      # in tests/: writes it anew, with the package as it is
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from torch_sink import StepLoop
from torch_sink.amp import DynamicLossScaler

STEPS_BEFORE, STEPS = 5, 14


def make_loop() -> StepLoop:
    """A loop with everything that a checkpoint can hold."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return StepLoop(
        model,
        functional.cross_entropy,
        optimizer,
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        schedule="step",
        accumulate=2,
        ema=0.9,
        loss_scaler=DynamicLossScaler(8.0, 2, 2),
        mode="eager",
    )


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Seven shuffled batches a pass."""
    samples = torch.randn(28, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(samples, torch.arange(28) % 3)
    return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))


if __name__ == "__main__":
    loop, loader = make_loop(), make_loader()
    loop.run(loader, epochs=2, max_steps=STEPS_BEFORE)
    loop.save(sys.argv[1], loader)
