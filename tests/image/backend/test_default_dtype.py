"""Scripts may set a default dtype, in which torch then multiplies and compares bytes; kernels compute in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.check import assert_same_bits
from torch_sink.cli.photos import make_photo
from torch_sink.image.handles.tensor import LazyTensor

# Of bytes these depend on the default dtype; the others do not.
DEPENDENT = {
    "adjust_brightness": (0.7,),
    "adjust_contrast": (1.7,),
    "adjust_saturation": (0.7,),
    "adjust_sharpness": (1.6,),
    "rgb_to_grayscale": (3,),
    "solarize": (128.3,),
}


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("functional", [F1, F2], ids=["v1", "v2"])
@pytest.mark.parametrize("name", DEPENDENT)
def test_bytes_are_computed_in_the_default_dtype(name: str, functional: Any, dtype: torch.dtype) -> None:
    image, function = make_photo(40, 30, 0), getattr(functional, name)
    expected = function(functional.pil_to_tensor(image), *DEPENDENT[name])
    with torch_sink.image_backend("device", device="cpu"):
        made = function(functional.pil_to_tensor(image), *DEPENDENT[name])
    assert type(made) is torch.Tensor, "the kernels would give other values"
    assert_same_bits(made, expected)


def test_what_does_not_depend_on_it_is_recorded(dtype: torch.dtype) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        image = F1.adjust_brightness(make_photo(40, 30, 0), 0.7)
        for made in (F1.pil_to_tensor(image), F1.adjust_brightness(F1.pil_to_tensor(image).float() / 255, 0.7)):
            assert type(made) is LazyTensor


def test_bytes_are_recorded_where_nothing_is_set() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        for name, arguments in DEPENDENT.items():
            assert isinstance(getattr(F2, name)(F2.pil_to_tensor(make_photo(40, 30, 0)), *arguments), LazyTensor)
