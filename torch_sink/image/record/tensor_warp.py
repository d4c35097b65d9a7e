"""Recording on tensors: affine and perspective transforms, elastic deformation.

How a recorder works is said in `tensor.py`. These record on tensors of any type that kernels know.
"""

from __future__ import annotations

from typing import Any

import torch
from torchvision.transforms import InterpolationMode, _functional_tensor
from torchvision.transforms.v2.functional import _geometry as v2_geometry

from torch_sink.image.core.arguments import is_number
from torch_sink.image.core.ops import Op
from torch_sink.image.core.tensor_argument import TensorArgument
from torch_sink.image.lower.warp import rotation_matrix

_MODES = ("nearest", "bilinear")


def _fill_of(handle: Any, fill: Any) -> Any:
    """A fill as None or one number a channel; `NotImplemented` where stock code should look at it."""
    channels = handle.sink_shape[0]
    if fill is None:
        return None
    values = tuple(fill) if isinstance(fill, (list, tuple)) else (fill,)
    if len(values) not in (1, channels) or not all(map(is_number, values)):
        return NotImplemented
    if handle.sink_dtype == torch.uint8 and not all(0 <= value <= 255 for value in values):
        return NotImplemented
    return tuple(map(float, values)) * (channels if len(values) == 1 else 1)


def _record(handle: Any, name: str, parameters: tuple[Any, ...], mode: str, fill: Any, size: Any = None) -> Any:
    """Records `name(*parameters, mode, fill)`; `size` (height, width) where the call changes it."""
    channels, height, width = handle.sink_shape
    fills = _fill_of(handle, fill)
    height, width = (height, width) if size is None else size
    if fills is NotImplemented or mode not in _MODES or min(height, width) <= 0:
        return NotImplemented
    return handle.record(Op(name, (*parameters, mode, fills)), shape=(channels, height, width))


# --- kernels of transforms


def affine_v1(handle: Any, matrix: Any, interpolation: str = "nearest", fill: Any = None) -> Any:
    return _record(handle, "v1.affine", (tuple(matrix),), interpolation, fill)


def rotate_v1(handle: Any, matrix: Any, interpolation: str = "nearest", expand: bool = False, fill: Any = None) -> Any:
    if not expand:
        return _record(handle, "v1.affine", (tuple(matrix),), interpolation, fill)
    _, height, width = handle.sink_shape
    new_width, new_height = _functional_tensor._compute_affine_output_size(matrix, width, height)
    size = new_height, new_width
    return _record(handle, "v1.rotate_expanded", (tuple(matrix), size), interpolation, fill, size)


def perspective_v1(handle: Any, perspective_coeffs: Any, interpolation: str = "bilinear", fill: Any = None) -> Any:
    return _record(handle, "v1.perspective", (tuple(perspective_coeffs),), interpolation, fill)


def elastic_v1(handle: Any, displacement: Any, interpolation: str = "bilinear", fill: Any = None) -> Any:
    if displacement.dtype != torch.float32:
        return NotImplemented
    return _elastic("v1.elastic_transform", handle, displacement, interpolation, fill)


# --- kernels of transforms.v2


def _mode_v2(interpolation: Any) -> str:
    return InterpolationMode(v2_geometry._check_interpolation(interpolation)).value


def affine_v2(
    handle: Any, angle: Any, translate: Any, scale: Any, shear: Any,
    interpolation: Any = InterpolationMode.NEAREST, fill: Any = None, center: Any = None,
) -> Any:  # fmt: skip
    mode = v2_geometry._check_interpolation(interpolation)
    angle, translate, shear, center = v2_geometry._affine_parse_args(angle, translate, scale, shear, mode, center)
    parameters = angle, tuple(translate), scale, tuple(shear), None if center is None else tuple(center)
    return _record(handle, "v2.affine", parameters, _mode_v2(interpolation), fill)


def rotate_v2(
    handle: Any, angle: Any, interpolation: Any = InterpolationMode.NEAREST, expand: bool = False, center: Any = None,
    fill: Any = None,
) -> Any:  # fmt: skip
    channels, height, width = handle.sink_shape
    angle = angle % 360
    turned = angle in (90, 270) and (expand or height == width)
    if center is None and (angle in (0, 180) or turned):
        turned_size = (width, height) if turned else (height, width)
        return handle.record(Op("v2.quarter_turns", (int(angle) // 90,)), shape=(channels, *turned_size))
    parameters = angle, expand, None if center is None else tuple(center)
    size = None
    if expand:
        new_width, new_height = v2_geometry._compute_affine_output_size(
            rotation_matrix(height, width, angle, center), width, height
        )
        size = new_height, new_width
    return _record(handle, "v2.rotate", (*parameters, size), _mode_v2(interpolation), fill, size)


def perspective_v2(
    handle: Any, startpoints: Any, endpoints: Any, interpolation: Any = InterpolationMode.BILINEAR, fill: Any = None,
    coefficients: Any = None,
) -> Any:  # fmt: skip
    values = v2_geometry._perspective_coefficients(startpoints, endpoints, coefficients)
    return _record(handle, "v2.perspective", (tuple(values),), _mode_v2(interpolation), fill)


def elastic_v2(
    handle: Any, displacement: Any, interpolation: Any = InterpolationMode.BILINEAR, fill: Any = None
) -> Any:
    if not isinstance(displacement, torch.Tensor):
        return NotImplemented
    return _elastic("v2.elastic", handle, displacement.to(torch.float32), _mode_v2(interpolation), fill)


def _elastic(name: str, handle: Any, displacement: torch.Tensor, mode: str, fill: Any) -> Any:
    if displacement.shape != (1, *handle.sink_shape[1:], 2) or displacement.device.type != "cpu":
        return NotImplemented
    # The caller may go on to write to its own.
    return _record(handle, name, (TensorArgument(displacement.detach().clone()),), mode, fill)
