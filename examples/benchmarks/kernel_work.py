"""What the stages of usual pipelines move and compute for a pixel, estimated from their plans on one photograph."""

from __future__ import annotations

from typing import Any

import torch
from torchvision import transforms as v1

import torch_sink
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import CROP, build_pipeline
from torch_sink.image.core.atoms import Atom, Kind
from torch_sink.image.execute.planned import programs_of
from torch_sink.image.plan.build import build_plan
from torch_sink.image.plan.stages import Stage, stages_of
from torch_sink.image.sources.source import Box

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


def taps(head: Atom | None) -> int:
    """How many pixels of its input one output pixel is made of."""
    if head is None or head.kind == Kind.AFFINE:
        return 1
    if head.kind in (Kind.RESAMPLE_X, Kind.RESAMPLE_Y, Kind.FILTER_X, Kind.FILTER_Y):
        return head.values[2]
    if head.kind == Kind.WARP:
        return {0: 1, 2: 4, 3: 16}[head.values[2]]
    return {Kind.SHARPNESS: 9}[head.kind]


def stage_work(stage: Stage, input_size: tuple[int, int], is_last: bool) -> dict[str, Any]:
    """Bytes and arithmetic per output pixel of one stage.

    Args:
        stage: of one image.
        input_size: (height, width) of the part of its input that it reads; each byte is counted once.
        is_last: it writes float32, and looks the values up in tables.
    """
    pixels = stage.size[0] * stage.size[1]
    holds_floats = is_last or stage.form.leaves_floats
    head = stage.atoms[stage.form.head] if stage.form.head >= 0 else None
    tail = [stage.atoms[at] for at in stage.form.tail]
    arithmetic = PER_TAP * taps(head) + sum(ARITHMETIC[atom.kind] for atom in tail)
    return {
        "stage": " + ".join(atom.kind.name.lower() for atom in [head, *tail] if atom is not None) or "copy",
        "taps": taps(head),
        "bytes_read": CHANNELS * input_size[0] * input_size[1] / pixels,
        "bytes_written": CHANNELS * (FLOAT_BYTES if holds_floats else 1),
        "arithmetic": arithmetic,
    }


def work_of(pipeline: Any) -> list[dict[str, Any]]:
    """The stages of one pipeline on one photograph; the draws are those of a fixed seed."""
    with torch_sink.image_backend("device", device="meta"):
        torch.manual_seed(3)
        handle = pipeline(make_photo(*PHOTO, seed=0))
        (program,) = programs_of([handle.sink_source], [handle.sink_ops])
    shape = PHOTO[1], PHOTO[0]
    stages = stages_of(*shape, program.atoms)
    # Where the first stage looks through a view, it reads what the view shows.
    box = Box(*build_plan([shape], [program], [0], [0]).boxes[0].tolist())
    size = box.height, box.width
    rows = []
    for number, stage in enumerate(stages):
        rows.append(stage_work(stage, size, number == len(stages) - 1))
        size = stage.size
    return rows


def estimate_work() -> dict[str, list[dict[str, Any]]]:
    """The work of every pipeline of `pipelines`."""
    return {name: work_of(pipeline) for name, pipeline in pipelines().items()}
