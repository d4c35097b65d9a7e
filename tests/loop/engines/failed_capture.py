"""A capture that fails for what no trial sees, in a process of its own: on a device it might poison the tests after it.

Prints how the steps ran, and how a model ran after it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_sink.loop import JitConfig, StepLoop


class Waiting(nn.Module):
    """Waits for its stream, where torch's sync debug mode does not look."""

    def __init__(self, waits: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        self.waits = waits

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        if self.waits:
            torch.cuda.current_stream().synchronize()
        return outputs


def main() -> None:
    """Train twice."""
    batches = [(torch.randn(8, 8), torch.arange(8) % 4) for _ in range(12)]
    for waits in (True, False):
        model = Waiting(waits).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        config = JitConfig(jit_level="O0", exc_mode="sink")
        loop = StepLoop(model, functional.cross_entropy, optimizer, steps_per_sync=4, jit_config=config)
        history = loop.run(batches)
        print(loop.explain(), f"finite: {bool(history.losses.isfinite().all())}", sep="\n")
        torch.cuda.empty_cache()
        torch.rand(4, device="cuda").cpu()
        loop.close()


if __name__ == "__main__":
    main()
