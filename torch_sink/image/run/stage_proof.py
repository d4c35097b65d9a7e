"""The proof of the stage kernels: both variants make a few small images, which are compared with stock code's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageFilter
from torchvision.transforms import InterpolationMode

from torch_sink.common.transfer import to_host
from torch_sink.image.core.fallback import executing, report_fallback
from torch_sink.image.core.ops import RECORDERS, Op, replay
from torch_sink.image.core.proof import Proof
from torch_sink.image.decode.jpeg_proof import picture
from torch_sink.image.decode.source import PixelSource, beginning
from torch_sink.image.program.launches import make_program
from torch_sink.image.program.program import Batch, Program, Wanted
from torch_sink.image.run.device import make_on_device

_SOURCE_SIZE = 97, 41  # pixels, width and height
_WIDTH, _HEIGHT = 70, 19  # of the results: some tiles are whole, and some are not

# Each call: the name of its recorder, which stands for a function of torchvision or a method of Pillow, and arguments.
_Calls = tuple[tuple[Any, ...], ...]
_Programs = dict[str, _Calls]  # {the image's name in messages: its calls}

_CROP = ("v1.crop", 8, 12, _HEIGHT, _WIDTH)
_TO_BYTES = (("functional.pil_to_tensor",),)
_TO_FLOATS = (("functional.to_image",), ("v2.to_dtype", torch.float32, True))
_NORMALIZE = (("v2.normalize", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),)
_AFFINE = (1.1, 0.3, -7.5, -0.2, 0.9, 12.25), Image.Resampling.NEAREST, 1, (9, 80, 200)
_PERSPECTIVE = (1.2, 0.1, 3.0, -0.1, 1.4, 6.0, 0.001, 0.002), Image.Resampling.BILINEAR, 1, (200, 9, 80)

# Programs in Pillow's arithmetic on bytes, which both variants have.
_OF_PILLOW: _Programs = {
    "resized crop and colors": (
        ("pil.resized_crop", 3, 5, 33, 81, (_HEIGHT, _WIDTH), InterpolationMode.BILINEAR),
        ("Image.transpose", Image.Transpose.FLIP_LEFT_RIGHT),
        ("pil.adjust_brightness", 1.3),
        ("pil.adjust_saturation", 0.4),
        ("pil.adjust_hue", 0.2),
    ),
    "bicubic resize and contrast": (
        ("Image.resize", (_WIDTH, _HEIGHT), Image.Resampling.BICUBIC),
        ("pil.adjust_contrast", 1.7),
        ("pil.posterize", 3),
        ("pil.solarize", 130),
    ),
    "affine and equalize": (
        ("Image.transform", (_WIDTH, _HEIGHT), Image.Transform.AFFINE, *_AFFINE),
        ("pil.equalize",),
    ),
    "sharpness, autocontrast and gray": (
        ("Image.crop", (11, 9, 11 + _WIDTH, 9 + _HEIGHT)),
        ("pil.adjust_sharpness", 2.3),
        ("pil.autocontrast",),
        ("pil.to_grayscale", 3),
    ),
    "pad, invert and gamma": (
        ("Image.crop", (2, 3, _WIDTH - 6, _HEIGHT - 2)),
        ("pil.pad", [5, 2, 3, 3], 0, "reflect"),
        ("pil.invert",),
        ("pil.adjust_gamma", 0.6),
    ),
}
# Programs with Pillow's float64 or its convolutions, which only the heavy variant has.
_OF_THE_HEAVY: _Programs = {
    "perspective": (("Image.transform", (_WIDTH, _HEIGHT), Image.Transform.PERSPECTIVE, *_PERSPECTIVE),),
    "blur by a kernel": (("Image.crop", (11, 9, 11 + _WIDTH, 9 + _HEIGHT)), ("Image.filter", ImageFilter.BLUR)),
}


def _programs(dtype: torch.dtype, is_heavy: bool) -> _Programs:
    """Programs of calls on images, and those of calls on tensors, which only the heavy variant has.

    Stock code runs none by a matrix product or a convolution, whose results depend on settings of torch.
    """
    on_images = {**_OF_PILLOW, **_OF_THE_HEAVY} if is_heavy else _OF_PILLOW
    end = _TO_BYTES if dtype == torch.uint8 else (*_TO_FLOATS, *_NORMALIZE)
    on_images = {name: (*calls, *end) for name, calls in on_images.items()}
    if not is_heavy:
        return on_images
    if dtype == torch.uint8:
        color = torch.tensor(7, device="cpu").view(1, 1, 1)
        blends = (("v1.adjust_brightness", 0.7), ("v2.adjust_saturation", 1.6))
        # These are recorded only where torch computes bytes in float32.
        on_bytes = blends if torch.get_default_dtype() == torch.float32 else ()
        erase = ("v1.posterize", 4), ("v1.erase", 3, 9, 12, 50, color)
        return {**on_images, "colors of uint8 tensors": (*_TO_BYTES, _CROP, *on_bytes, *erase)}
    resize = ("v2.resize", [_HEIGHT, _WIDTH]), ("v2.adjust_brightness", 1.2)
    colors = ("v1.adjust_saturation", 0.4), ("v1.adjust_contrast", 1.4), ("v2.adjust_hue", -0.1)
    waves = torch.linspace(-0.2, 0.2, _HEIGHT * _WIDTH * 2, device="cpu").view(1, _HEIGHT, _WIDTH, 2)
    return {
        **on_images,
        "resize of float32 tensors": (*_TO_FLOATS, *resize, *_NORMALIZE),
        "colors of float32 tensors": (*_TO_FLOATS, _CROP, *colors, *_NORMALIZE),
        "elastic of float32 tensors": (*_TO_FLOATS, _CROP, ("v2.elastic", waves)),
    }


def _recorded_calls(source: PixelSource, calls: _Calls) -> tuple[Op, ...]:
    """The operations that recorders make of calls on an image."""
    image: Any = beginning(source)
    for name, *arguments in calls:
        image = RECORDERS[name](image, *arguments)
    return image.calls  # type: ignore[no-any-return]


def _batch(source: PixelSource, calls: Sequence[tuple[Op, ...]], dtype: torch.dtype, is_heavy: bool) -> Program:
    """A batch whose launches are all of one variant."""
    made_as = torch.uint8 if dtype == torch.uint8 else torch.float32
    program = make_program([source] * len(calls), calls, [((len(calls), 3, _HEIGHT, _WIDTH), made_as)])
    (batch,) = program.batches
    launches = tuple(launch._replace(is_heavy=is_heavy) for launch in batch.launches)
    return program._replace(batches=(batch._replace(launches=launches),))


def _first_difference(dtype: torch.dtype, device: torch.device) -> str:
    """Describes the first image that differs from stock code's; "" where none does."""
    for is_heavy in (False, True):
        programs = _programs(dtype, is_heavy)
        with executing():
            image = picture(*_SOURCE_SIZE)
            # Another image for the second variant: reused memory may still hold results of the first.
            source = PixelSource(image.transpose(Image.Transpose.ROTATE_180) if is_heavy else image)
            calls = [_recorded_calls(source, program) for program in programs.values()]
            expected = [replay(source.decode(), ops).as_subclass(torch.Tensor).to(dtype) for ops in calls]
        made = to_host(make_on_device(_batch(source, calls, dtype, is_heavy), Wanted(device, dtype))[0])
        for name, ops, ours, theirs in zip(programs, calls, made, expected, strict=True):
            # `not <=` rather than `>`, so that NaN counts as a difference.
            if wrong := int((~((ours.double() - theirs.double()).abs() <= _allowed(ops, theirs))).sum()):
                variant = "heavy" if is_heavy else "light"
                return f"{wrong} of {ours.numel()} {_name(dtype)} values of '{name}' differ ({variant} kernel)"
    return ""


def _allowed(calls: Sequence[Op], expected: torch.Tensor) -> float:
    """The largest difference from stock code's values that the operations allow."""
    closeness = max(op.promise.floats for op in calls)
    if expected.dtype == torch.uint8 or not closeness:
        return 0.0
    last_bit = torch.finfo(expected.dtype).eps if expected.dtype.itemsize == 2 else 0.0
    return max(float(expected.max() - expected.min()), 1.0) * max(closeness, last_bit)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


STAGE_KERNELS = {
    dtype: Proof(
        f"stage_kernels_{_name(dtype)}",
        "Stock code makes batches on the CPU, not the kernels on the device",
        functools.partial(_first_difference, dtype),
        folders=[Path(__file__).parents[1] / name for name in ("core", "operations", "program", "run")],
        kernels="stages",
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
}


def kernels_make(batch: Batch, wanted: Wanted) -> bool:
    """Whether kernels may make a batch on a device; where stock code has to, reports it, or raises with `strict`."""
    if not batch.is_launched:
        return True
    found = STAGE_KERNELS[wanted.kernel_dtype(batch)].verdict(wanted.device)
    if not found.holds:
        report_fallback(
            "batch", f"the kernels did not prove themselves: {found.reason}; see python -m torch_sink doctor"
        )
    return found.holds
