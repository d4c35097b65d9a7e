"""From images to tensors and back, and types of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms import functional as F
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import is_scaled_bytes
from torch_sink.image.core.examples import Arguments, Example, sample
from torch_sink.image.core.ops import NUMERIC, Op, Operation, Recorder, Stock

# --- from images to tensors and back


def _to_tensor(image: Any) -> Any:
    return _converted(image, "to_tensor", torch.get_default_dtype())


def _pil_to_tensor(image: Any) -> Any:
    return _converted(image, "pil_to_tensor", torch.uint8)


def _to_image(image: Any) -> Any:
    if isinstance(image, torch.Tensor):
        return image.as_tv_image()  # type: ignore[attr-defined]
    return _converted(image, "to_image", torch.uint8, as_tv_image=True)


def _converted(image: Any, name: str, dtype: torch.dtype, as_tv_image: bool = False) -> Any:
    if not isinstance(image, Image.Image) or dtype not in (torch.uint8, torch.float32):
        return NotImplemented
    return image.as_tensor(Op(name), dtype, as_tv_image=as_tv_image)  # type: ignore[attr-defined]


def _to_pil_image(handle: Any, mode: str | None = None) -> Any:
    image = NotImplemented if isinstance(handle, Image.Image) else handle.as_image()
    return image if image is not NotImplemented and mode in (None, image.mode) else NotImplemented


def _conversion(name: str, stock: Stock, record: Recorder, *transforms: str, **fields: Any) -> None:
    """The record of a conversion of Pillow images."""
    Operation(
        name,
        stock={name: stock},
        record={f"functional.{name}": record},
        is_value=True,
        examples=lambda a: iter([Example(name)] if a.is_pillow else []),
        transforms={transform: [sample()] for transform in transforms},
        takes_palettes=True,
        **fields,
    )


_conversion("to_tensor", F.to_tensor, _to_tensor, "ToTensor", result=lambda op: torch.float32)
_conversion("pil_to_tensor", F.pil_to_tensor, _pil_to_tensor, "PILToTensor", "ToPureTensor")
_conversion("to_image", F_v2.to_image, _to_image, "ToImage")
Operation(
    "to Pillow image",
    stock={"to_pil_image": F.to_pil_image},
    record={"functional.to_pil_image": _to_pil_image},
    examples=lambda a: iter([] if a.is_pillow else [Example("to_pil_image")]),
    transforms={"ToPILImage": [sample()]},
    result=lambda op: torch.uint8,
)

# --- types


def convert_dtype(family: str, handle: Any, dtype: torch.dtype = torch.float32) -> Any:
    return _to_type(handle, dtype, Op("v1.convert_image_dtype", (dtype,)))


def to_dtype(family: str, handle: Any, dtype: torch.dtype = torch.float32, scale: bool = False) -> Any:
    return _to_type(handle, dtype, Op("v2.to_dtype", (dtype, scale)))


def _to_type(handle: Any, dtype: torch.dtype, op: Op) -> Any:
    if handle.sink_dtype == dtype:
        return handle
    makes_floats = handle.sink_dtype in NUMERIC and dtype in (torch.float32, torch.float16, torch.bfloat16)
    makes_bytes = dtype == torch.uint8 and not op.operation.leaves_range(op) and is_scaled_bytes(handle)
    return handle.record(op, dtype=dtype) if makes_floats or makes_bytes else NotImplemented


def _type_examples(a: Arguments) -> Iterator[Example]:
    for dtype in (torch.float32, torch.float16, torch.uint8, torch.float64):
        label = "" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
        yield Example("to_dtype", (dtype,), {"scale": True}, label)
        yield Example("to_dtype", (dtype,), {}, f"{label or 'float32'}, unscaled")
        yield Example("convert_image_dtype", (dtype,), label=label)


_TYPE_SAMPLES = [sample(dtype, label=str(dtype).removeprefix("torch.")) for dtype in (torch.float16, torch.float64)]

Operation(
    "to dtype",
    stock={"v1.convert_image_dtype": F_tensor.convert_image_dtype, "v2.to_dtype": F_v2.to_dtype_image},
    record={"v1.convert_image_dtype": convert_dtype, "v2.to_dtype": to_dtype},
    is_value=True,
    examples=_type_examples,
    transforms={
        "ConvertImageDtype": [sample(torch.float32), *_TYPE_SAMPLES],
        "ToDtype": [
            sample(torch.float32, scale=True), sample(torch.float32, label="scale=False"), *_TYPE_SAMPLES,
        ],
    },
    leaves_range=lambda op: op.name == "v2.to_dtype" and not op.args[1],
    result=lambda op: op.args[0],
)  # fmt: skip
