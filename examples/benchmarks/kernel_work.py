"""What the stages of usual pipelines move and compute for a pixel, estimated from their plans on one photograph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchvision import transforms as v1

import torch_sink
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import CROP, build_pipeline
from torch_sink.triton_kernels import rows
from torch_sink.triton_kernels.rows import Kind

PHOTO = (500, 375)  # width and height in pixels, the usual size of ImageNet
CHANNELS = 3
FLOAT_BYTES = 4
# Additions, multiplications, comparisons and conversions for one pixel of three channels, counted in the formulas.
ARITHMETIC = {
    Kind.SHIFT: 8,
    Kind.FLIP: 4,
    Kind.EDGE: 6,
    Kind.REFLECT: 8,
    Kind.SYMMETRIC: 8,
    Kind.REMAP: 4,
    Kind.BRIGHTNESS: 15,
    Kind.SATURATION: 30,
    Kind.INVERT: 3,
    Kind.POSTERIZE: 3,
    Kind.SOLARIZE: 6,
    Kind.GRAY: 6,
    Kind.HUE: 90,
    Kind.LOOKUP: 3,
    Kind.CONTRAST: 3,
    Kind.AUTOCONTRAST: 3,
    Kind.EQUALIZE: 3,
    Kind.VALUES: 3,
}
PER_TAP = 2 * CHANNELS  # a multiplication and an addition a channel


def pipelines() -> dict[str, Any]:
    """Pipelines whose work is estimated; each gives [3, 224, 224]."""
    crop = v1.RandomResizedCrop(CROP)
    return {
        "train": build_pipeline("v1 train"),
        "eval": build_pipeline("v1 eval"),
        "train + ColorJitter": build_pipeline("v1 train + ColorJitter"),
        "train + rotation, bilinear": v1.Compose(
            [crop, v1.RandomRotation((15, 15), v1.InterpolationMode.BILINEAR), v1.ToTensor()]
        ),
        "train + sharpness": v1.Compose([crop, v1.RandomAdjustSharpness(1.5, p=1), v1.ToTensor()]),
        "train + blur, 23 x 23": v1.Compose([crop, v1.GaussianBlur(23, (1.0, 1.0)), v1.ToTensor()]),
    }


def taps(head: Sequence[int]) -> int:
    """How many pixels of its input one output pixel is made of; `head` is a row of operations, 0 of none."""
    kind = head[0]
    if kind in (0, Kind.AFFINE):
        return 1
    if kind in (Kind.RESAMPLE_X, Kind.RESAMPLE_Y, Kind.FILTER_X, Kind.FILTER_Y):
        return head[3]
    if kind == Kind.WARP:
        return {0: 1, 2: 4, 3: 16}[head[3]]
    return {Kind.SHARPNESS: 9}[Kind(kind)]


def work_of(pipeline: Any) -> list[dict[str, Any]]:
    """Bytes and arithmetic per output pixel of each stage of one photograph; the draws are those of a fixed seed."""
    with torch_sink.image_backend("device", device="meta"):
        torch.manual_seed(3)
        plan = torch.stack([pipeline(make_photo(*PHOTO, seed=0))]).plan
    # Each byte of what a stage reads is counted once; the first one reads what its view shows.
    read = int(plan.array("boxes")[0, 2:].prod())
    operations, found = plan.array("operations"), []
    for launch in plan.launches:
        (job,) = plan.jobs_of(launch).tolist()
        head = operations[job[rows.HEAD]].tolist()
        tail = operations[job[rows.TAIL_BEGIN] : job[rows.TAIL_END], 0].tolist()
        pixels = job[rows.HEIGHT] * job[rows.WIDTH]
        holds_floats = job[rows.TARGET_KIND] != rows.BYTES
        ((stage, _),) = plan.stages_of(launch).items()
        found.append(
            {
                "stage": stage,
                "taps": taps(head),
                "bytes_read": CHANNELS * read / pixels,
                "bytes_written": CHANNELS * (FLOAT_BYTES if holds_floats else 1),
                "arithmetic": PER_TAP * taps(head) + sum(ARITHMETIC[Kind(kind)] for kind in tail),
            }
        )
        read = pixels
    return found


def estimate_work() -> dict[str, list[dict[str, Any]]]:
    """The work of every pipeline of `pipelines`."""
    return {name: work_of(pipeline) for name, pipeline in pipelines().items()}
