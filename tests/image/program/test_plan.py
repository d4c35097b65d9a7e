"""Launches: as many as the longest image has stages, whatever the size and the mixture of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, opener
from torch_sink.image.program.plan import stages_of
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

pytestmark = pytest.mark.halved

BATCH_SIZES = (64, 256)


def train(*augmentations: Any) -> Callable[[Any], Any]:
    return v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), *augmentations, v1.ToTensor()])


def v2_train(*augmentations: Any) -> Callable[[Any], Any]:
    tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([v2.RandomResizedCrop(24), v2.RandomHorizontalFlip(), *augmentations, *tail])


def planned(transform: Callable[[Any], Any], size: int, distinct: int | None = None) -> Any:
    """The plan of a batch of `size` images; of `distinct` drawn programs where given, each as often as it takes."""
    openers = [
        opener(encoded(width, height, seed)) for seed, (width, height) in enumerate([(60, 40), (40, 61), (33, 33)])
    ]
    with torch_sink.image_backend("device", device="meta", strict=True):
        torch.manual_seed(9)
        items = [transform(openers[at % 3]()) for at in range(distinct or size)]
        return default_collate([items[at % len(items)] for at in range(size)]).plan


def jobs_of(plan: Any, launch: Any) -> np.ndarray:
    """The rows of the jobs of a launch."""
    return plan.jobs_of(launch)


EXACT: dict[str, tuple[Callable[[Any], Any], int]] = {
    "train": (train(), 2),
    "train, normalized": (v1.Compose([train(), v1.Normalize((0.5,), (0.5,))]), 2),
    "eval": (v1.Compose([v1.Resize(26), v1.CenterCrop(24), v1.ToTensor()]), 2),
    "v2 train": (v2_train(), 2),
    "v2 tensor first": (v2.Compose([v2.ToImage(), v2.RandomResizedCrop(24), v2.RandomHorizontalFlip()]), 2),
    "crop alone": (v1.Compose([v1.RandomCrop(20), v1.RandomHorizontalFlip(), v1.ToTensor()]), 1),
    "pad before resize": (v1.Compose([v1.Pad(3), v1.RandomHorizontalFlip(), v1.Resize((9, 8)), v1.ToTensor()]), 2),
    "jitter": (train(v1.ColorJitter(0.4, 0.4, 0.4, 0.1)), 3),
    "v2 jitter": (v2_train(v2.ColorJitter(0.4, 0.4, 0.4, 0.1)), 3),
    "resized floats": (v1.Compose([v1.ToTensor(), v1.RandomResizedCrop(24), v1.Normalize((0.5,), (0.5,))]), 2),
    "floats after bytes": (v2_train(v2.Resize((20, 9)), v2.RandomHorizontalFlip()), 4),
    "jitter on floats": (v1.Compose([train(), v1.ColorJitter(0.4, 0.4, 0.4, 0.1)]), 3),
    "bytes again": (v2.Compose([v2_train(v2.GaussianBlur(3)), v2.ToPILImage(), train(v1.RandomInvert(1.0))]), 6),
}


@pytest.mark.parametrize("size", BATCH_SIZES)
@pytest.mark.parametrize("name", EXACT)
def test_launches(name: str, size: int) -> None:
    transform, launches = EXACT[name]
    assert len(planned(transform, size).launches) == launches


@pytest.mark.parametrize("size", BATCH_SIZES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_launches_of_random_operations_are_bounded(number: int, size: int) -> None:
    assert len(planned(train(v1.RandAugment(number)), size).launches) <= 2 + number
    assert len(planned(v2_train(v2.RandAugment(number)), size).launches) <= 2 + number


@pytest.mark.parametrize("augmentation", [v1.RandAugment(3), v1.AutoAugment(), v1.TrivialAugmentWide()])
def test_the_same_programs_take_the_same_launches_at_any_size(augmentation: Any) -> None:
    small, large = (planned(train(augmentation), size, distinct=32) for size in BATCH_SIZES)
    assert len(small.launches) == len(large.launches) > 2
    for launch, other in zip(small.launches, large.launches, strict=True):
        measured = [each.statistics_end - each.statistics_begin for each in (launch, other)]
        assert (launch.is_heavy, 4 * measured[0]) == (other.is_heavy, measured[1])
        assert {text: 4 * count for text, count in small.stages_of(launch).items()} == dict(large.stages_of(other))


def test_images_that_need_no_floats_end_with_those_that_do() -> None:
    """Some images of the batch draw an operation on floats; all are written by the last launch."""
    plan = planned(v1.Compose([train(), v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.4)], p=0.3)]), 64)
    images = [len(jobs_of(plan, launch)) for launch in plan.launches]
    assert 0 < images[0] < images[1] <= images[2] == 64
    assert [launch.is_heavy for launch in plan.launches] == [False, True, True]


def test_every_image_ends_in_the_last_launch() -> None:
    plan = planned(train(v1.RandAugment(2)), 64)
    assert len(jobs_of(plan, plan.launches[-1])) == 64
    writes = [set(jobs_of(plan, launch)[:, rows.TARGET_KIND]) for launch in plan.launches]
    assert writes == [{rows.BYTES}] * (len(plan.launches) - 1) + [{rows.OUTPUT}]


def test_a_plan_can_be_read() -> None:
    text = str(planned(train(v1.ColorJitter(0.4, 0.4, 0.4, 0.1)), 8))
    assert text.count("launch ") == 3
    for word in ("resample_x", "resample_y", "after statistics", "contrast", "values", "[3, 24, 24]"):
        assert word in text


def test_a_plan_says_who_decodes() -> None:
    with torch_sink.image_backend("device", device="meta"):
        batch = default_collate([train()(opener(encoded(30, 20))()) for _ in range(3)])
        assert str(batch.plan).startswith("decode: 3 by ")


def test_a_stage_has_one_gather_at_its_head() -> None:
    kinds = (Kind.FLIP, Kind.RESAMPLE_X, Kind.RESAMPLE_Y, Kind.BRIGHTNESS, Kind.CONTRAST, Kind.FLIP, Kind.SHARPNESS)
    assert [stage[:4] for stage in stages_of(kinds, 1)] == [(-1, 1, 2, 2), (-1, 2, 3, 4), (-1, -1, 4, 6), (-1, 6, 7, 7)]


def test_the_first_stage_reads_bytes_as_floats() -> None:
    kinds = (Kind.SHIFT, Kind.VALUES, Kind.FILTER_X, Kind.FILTER_Y, Kind.PASTE, Kind.FLIP, Kind.PASTE)
    assert [stage[:4] for stage in stages_of(kinds, 1)] == [(1, 2, 3, 3), (-1, 3, 4, 6), (-1, -1, 6, 7)]
    assert [stage[:4] for stage in stages_of((Kind.VALUES, Kind.FLIP), 0)] == [(-1, -1, 0, 2)]
