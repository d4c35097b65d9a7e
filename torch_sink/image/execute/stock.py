"""One image of a batch in stock code on the CPU: the definition of what a handle stands for."""

from __future__ import annotations

import functools

import torch

from torch_sink.image.core.fallback import executing
from torch_sink.image.core.ops import Op, replay
from torch_sink.image.sources.source import Source


def run_image_on_cpu(source: Source, ops: tuple[Op, ...], target: torch.Tensor) -> None:
    """Makes one image of a batch.

    Args:
        source: where its pixels come from.
        ops: calls recorded on it.
        target: [C, H, W], written to.

    Raises:
        DecodeError: the file is damaged.
    """
    with executing():
        ends_as_usual = len(ops) >= 2 and ops[-1].name == "v1.normalize" and ops[-2].name == "to_tensor"
        if ends_as_usual and target.dtype == torch.float32:
            # Same arithmetic on the same values as the stock calls, without their three temporary tensors.
            pixels = replay(replay(source.decode(), ops[:-2]), (Op("pil_to_tensor"),))
            torch.div(pixels, 255, out=target)
            mean, std = _statistics(*ops[-1].args)
            target.sub_(mean).div_(std)
            return
        target.copy_(replay(source.decode(), ops))


@functools.lru_cache(maxsize=64)
def _statistics(mean: tuple[float, ...], std: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1) for values in (mean, std))  # type: ignore[return-value]
