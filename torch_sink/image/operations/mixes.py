"""AugMix, MixUp and CutMix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torchvision.transforms import v2

from torch_sink.image.core.atoms import Lowering
from torch_sink.image.core.examples import MANY_DRAWS, Arguments, Example, sample
from torch_sink.image.core.ops import LOWER, Op, Operation, Promise, replay


def _augmix(image: torch.Tensor, terms: tuple[tuple[float, tuple[Op, ...]], ...], dtype: torch.dtype) -> torch.Tensor:
    """The sum of weights times results of chains, in float32 and in this order; the first chain is empty."""
    batch = image.reshape(1, *image.shape)
    weights = torch.tensor([weight for weight, _ in terms], dtype=torch.float32, device="cpu").view(-1, 1, 1, 1, 1)
    mix = weights[0] * batch
    for weight, (_, chain) in zip(weights[1:], terms[1:], strict=True):
        mix.add_(weight * replay(batch, chain))
    return mix.reshape(image.shape).to(dtype)


def _lower_augmix(state: Lowering, terms: tuple[tuple[float, tuple[Op, ...]], ...], dtype: torch.dtype) -> None:
    branches = []
    for weight, chain in terms[1:]:
        branch = Lowering(state.height, state.width, state.channels)
        for op in chain:
            LOWER[op.name](branch, *op.args)
        branches.append((weight, branch))
    state.add_mix(terms[0][0], branches)


def _examples(a: Arguments) -> Iterator[Example]:
    augmix, seed = a.transforms.AugMix(10, fill=a.fill()), a.chance.randrange(1 << 30)
    if a.scale == 1 or a.transforms is v2:  # on floats v1 refuses some of what it draws
        yield Example("augmix", run=lambda image: _seeded(augmix, image, seed))


def _seeded(transform: Any, image: Any, seed: int) -> Any:
    """What a transform gives that draws from a generator with that seed; the generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transform(image)


Operation(
    "AugMix",
    stock={"augmix": _augmix},
    lower=_lower_augmix,
    # It may put a threshold behind a warp.
    promise=Promise(math.inf, 0.99, is_rounded=True),
    examples=_examples,
    transforms={"AugMix": [sample(draws=MANY_DRAWS)]},
)

# --- whole batches


def _mix_up(batch: torch.Tensor, lam: float) -> torch.Tensor:
    """`v2.MixUp`: each image with the one before it, in the proportion lam : 1 - lam."""
    return batch.roll(1, 0).mul_(1.0 - lam).add_(batch.mul(lam))


def _cut_mix(batch: torch.Tensor, box: tuple[int, int, int, int]) -> torch.Tensor:
    """`v2.CutMix`: a box (left, top, right, bottom) of each image comes from the one before it."""
    left, top, right, bottom = box
    mixed = batch.clone()
    mixed[..., top:bottom, left:right] = batch.roll(1, 0)[..., top:bottom, left:right]
    return mixed


def _mix_up_batch(batch: Any, params: dict[str, Any]) -> Any:
    return batch.record_mix(Op("batch.mix_up", (params["lam"],))) if batch.dtype.is_floating_point else NotImplemented


def _cut_mix_batch(batch: Any, params: dict[str, Any]) -> Any:
    return batch.record_mix(Op("batch.cut_mix", (params["box"],)))


Operation(
    "MixUp",
    stock={"batch.mix_up": _mix_up},
    record={"MixUp.transform": _mix_up_batch},
    transforms={"MixUp": [sample(num_classes=4, form="batch")]},
)
Operation(
    "CutMix",
    stock={"batch.cut_mix": _cut_mix},
    record={"CutMix.transform": _cut_mix_batch},
    transforms={"CutMix": [sample(num_classes=4, form="batch")]},
)
