"""timm: its transforms and its loader."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image.check import assert_same_bits

import torch_sink
from third_party.compare import Later, assert_same_as_stock, photographs

data = Later("timm.data")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # From Python 3.12 on, starting a worker by fork warns when the process has threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

RAND_AUGMENT: dict[str, Any] = {
    "color_jitter": 0.4, "auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, "re_mode": "pixel", "re_count": 2,
}  # fmt: skip
# Of magnitudes above 9 timm makes 0 bits for posterize, which Pillow 13 refuses.
NO_BITS = "bits must be between or equal to 1 and 8"
WEAKER = {**RAND_AUGMENT, "auto_augment": "rand-m5-mstd0.5-inc1"}
TRAIN: dict[str, dict[str, Any]] = {
    "defaults": {},
    "rand augment": RAND_AUGMENT,
    "rand augment, bilinear": {**RAND_AUGMENT, "interpolation": "bilinear", "re_mode": "const"},
    "3-augment": {"auto_augment": "3a", "color_jitter": 0.3, "interpolation": "bicubic"},
    "AugMix": {"auto_augment": "augmix-m5-w2-d2"},
    "contrastive": {
        "color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2,
        "gaussian_blur_prob": 0.5, "vflip": 0.5,
    },
    "keep ratio, center crop": {"train_crop_mode": "rkrc"},
    "keep ratio, random crop": {"train_crop_mode": "rkrr", "re_prob": 1.0, "re_mode": "rand"},
    "uint8 for the prefetcher": {"use_prefetcher": True},
    "no augmentation": {"no_aug": True},
}  # fmt: skip
EVAL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "bicubic": {"interpolation": "bicubic", "crop_pct": 0.95},
    "squash": {"crop_mode": "squash"},
    "border": {"crop_mode": "border", "crop_border_pixels": 3},
    "uint8 for the prefetcher": {"use_prefetcher": True},
}


@pytest.mark.parametrize("name", TRAIN)
def test_training(name: str) -> None:
    assert_same_as_stock(lambda: data.create_transform(32, is_training=True, **TRAIN[name]), seeds=4, refusal=NO_BITS)


@pytest.mark.parametrize("name", EVAL)
def test_evaluation(name: str) -> None:
    assert_same_as_stock(lambda: data.create_transform(32, **EVAL[name]))


def test_the_defaults_record_everything() -> None:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        for transform in (data.create_transform(32, is_training=True), data.create_transform(32)):
            for open_image in photographs():
                assert transform(open_image()).is_recording


@pytest.mark.parametrize("policy", ["rand-m5-mstd0.5-inc1", "original", "rand-m5-n3-mstd1.0", "v0r"])
def test_augmentation_and_erasing_record_everything(policy: str) -> None:
    options: dict[str, Any] = {"auto_augment": policy, "re_prob": 0.7, "re_mode": "pixel", "color_jitter": 0.4}
    transform = data.create_transform(32, is_training=True, **options)
    with torch_sink.image_backend("device", device="cpu", strict=True):
        for seed in range(6):
            torch.manual_seed(seed)
            random.seed(seed)
            for open_image in photographs():
                try:
                    assert transform(open_image()).is_recording
                except ValueError as error:
                    assert str(error) == NO_BITS  # noqa: PT017  drawn now and then


def batches(folder: Path, is_training: bool, **loader: Any) -> list[list[torch.Tensor]]:
    """Two epochs of timm's own dataset and loader."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    dataset = data.create_dataset("", root=str(folder))
    made = data.create_loader(
        dataset, (3, 24, 24), 4, is_training=is_training, device=torch.device("cpu"), persistent_workers=False, **loader
    )
    return [[images, target] for _ in range(2) for images, target in made]


@pytest.mark.parametrize(
    ("is_training", "loader"),
    [
        (True, {"num_workers": 0, "use_prefetcher": False, **WEAKER}),
        (True, {"num_workers": 2, "use_prefetcher": False, **WEAKER}),
        (True, {"num_workers": 0, "use_prefetcher": True, "re_prob": 0.5}),
        (False, {"num_workers": 0, "use_prefetcher": False}),
    ],
    ids=["here", "workers", "prefetcher", "evaluation"],
)
def test_loader(generated_photos: Path, is_training: bool, loader: dict[str, Any]) -> None:
    expected = batches(generated_photos, is_training, **loader)
    with torch_sink.image_backend("device", device="cpu"):
        made = batches(generated_photos, is_training, **loader)
    assert len(made) == len(expected) > 2
    for (images, target), (stock_images, stock_target) in zip(made, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(target, stock_target)


IMPORTED_LATE = """
import sys
import torch_sink
torch_sink.set_image_backend("device", device="cpu")
import timm.data
import torch
from torchvision.datasets import ImageFolder

if __name__ == "__main__":
    options = dict(is_training=True, auto_augment="rand-m5-mstd0.5-inc1", color_jitter=0.4)
    photos = ImageFolder(sys.argv[1], timm.data.create_transform(32, **options))
    for _ in torch.utils.data.DataLoader(photos, 4, num_workers=2, multiprocessing_context="fork"):
        pass
    print(torch_sink.fallback_report())
"""


def test_workers_find_what_was_imported_after_the_backend_was_set(generated_photos: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IMPORTED_LATE)
    command = [sys.executable, str(script), str(generated_photos)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "no fallbacks"


def test_the_report_names_timm_s_own_code() -> None:
    augment = data.auto_augment.augment_and_mix_transform("augmix-m5-w4-d2", {})
    with torch_sink.image_backend("device", device="cpu"):
        augment(photographs()[0]())
        (row,) = torch_sink.fallback_report().counts
    assert "timm.data.auto_augment.AugMixAugment" in row[1]
