"""Affine and perspective transforms, rotations and elastic deformation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torchvision.transforms import InterpolationMode as Mode
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2
from torchvision.transforms.v2.functional import _geometry as v2_geometry

from torch_sink.image.core.arguments import fits_range, is_number
from torch_sink.image.core.atoms import Lowering
from torch_sink.image.core.examples import Arguments, Example, interpolations, sample
from torch_sink.image.core.ops import MOVED, NEAREST, NUMERIC, Op, Operation, Promise
from torch_sink.image.core.tensor_argument import TensorArgument
from torch_sink.image.operations.flips import lower_transpose
from torch_sink.image.operations.grids import (
    affine_grid,
    displaced,
    grid_v1,
    grid_v2,
    lower_grid,
    perspective_grid,
    rotation_matrix,
    same_size,
)

_MODES = ("nearest", "bilinear")


def _fill_of(handle: Any, fill: Any) -> Any:
    """A fill as None or one number a channel; `NotImplemented` if unsupported."""
    channels = handle.sink_shape[0]
    if fill is None:
        return None
    values = tuple(fill) if isinstance(fill, (list, tuple)) else (fill,)
    if len(values) not in (1, channels) or not all(map(is_number, values)):
        return NotImplemented
    if handle.sink_dtype == torch.uint8 and not all(0 <= value <= 255 for value in values):
        return NotImplemented
    return tuple(map(float, values)) * (channels if len(values) == 1 else 1)


def _record(handle: Any, name: str, parameters: tuple[Any, ...], mode: Any, fill: Any, size: Any = None) -> Any:
    """Records `name(*parameters, mode, fill)`; `size` (height, width) where the call changes it."""
    channels, height, width = handle.sink_shape
    fills = _fill_of(handle, fill)
    height, width = (height, width) if size is None else size
    if handle.sink_dtype not in NUMERIC:
        return NotImplemented
    if fills is NotImplemented or mode not in _MODES or min(height, width) <= 0:
        return NotImplemented
    return handle.record(Op(name, (*parameters, mode, fills)), shape=(channels, height, width))


def _mode_v2(interpolation: Any) -> str:
    return Mode(v2_geometry._check_interpolation(interpolation)).value


def _promise(op: Op) -> Promise:
    return NEAREST if op.args[-2] == "nearest" else Promise(1, 0.99, MOVED, is_rounded=True)


def _fills_beyond_the_range(op: Op) -> bool:
    return not fits_range(op.args[-1] or ())


def _examples(name: str, arguments: Callable[[Arguments], tuple[Any, ...]]) -> Callable[[Arguments], Iterator[Example]]:
    """A call of a functional with each interpolation and a fill."""

    def examples(a: Arguments) -> Iterator[Example]:
        for mode in (Mode.NEAREST, Mode.BILINEAR, Mode.BICUBIC):
            yield Example(name, arguments(a), {"interpolation": mode, "fill": a.fill()}, mode.name)

    return examples


# --- to kernel work


def _lower_rotated_v1(
    state: Lowering, matrix: Sequence[float], size: tuple[int, int], mode: str, fill: tuple[float, ...] | None
) -> None:
    lower_grid("v1", state, affine_grid(matrix, state.height, state.width, *size), mode, fill, size)


def _lower_rotated_v2(
    state: Lowering, angle: float, expand: bool, center: tuple[float, float] | None, size: tuple[int, int] | None,
    mode: str, fill: tuple[float, ...] | None,
) -> None:  # fmt: skip
    matrix = rotation_matrix(state.height, state.width, angle, center)
    size = size or (state.height, state.width)
    lower_grid("v2", state, affine_grid(matrix, state.height, state.width, *size), mode, fill, size)


_TURNS = {1: Image.Transpose.ROTATE_90, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_270}


def _lower_turns(state: Lowering, turns: int) -> None:
    if turns:
        lower_transpose(state, _TURNS[turns])


# --- affine


def _affine_v1(family: str, handle: Any, matrix: Any, interpolation: str = "nearest", fill: Any = None) -> Any:
    return _record(handle, "v1.affine", (tuple(matrix),), interpolation, fill)


def _affine_v2(
    family: str, handle: Any, angle: Any, translate: Any, scale: Any, shear: Any, interpolation: Any = Mode.NEAREST,
    fill: Any = None, center: Any = None,
) -> Any:  # fmt: skip
    mode = v2_geometry._check_interpolation(interpolation)
    angle, translate, shear, center = v2_geometry._affine_parse_args(angle, translate, scale, shear, mode, center)
    parameters = angle, tuple(translate), scale, tuple(shear), None if center is None else tuple(center)
    return _record(handle, "v2.affine", parameters, _mode_v2(interpolation), fill)


def _affine_arguments(a: Arguments) -> tuple[Any, ...]:
    angle, shift = a.chance.uniform(-180, 180), [a.chance.randint(-3, 3), a.chance.randint(-3, 3)]
    return angle, shift, a.chance.uniform(0.6, 1.6), [a.chance.uniform(-20, 20), a.chance.uniform(-20, 20)]


Operation(
    "affine",
    stock={
        "v1.affine": lambda image, matrix, mode, fill: F_tensor.affine(image, list(matrix), mode, fill),
        "v2.affine": lambda image, angle, translate, scale, shear, center, mode, fill: F_v2.affine_image(
            image, angle, translate, scale, shear, Mode(mode), fill, center
        ),
    },
    record={"v1.affine": _affine_v1, "v2.affine": _affine_v2},
    lower={"v1.affine": same_size("v1", grid_v1), "v2.affine": same_size("v2", grid_v2)},
    promise=_promise,
    examples=_examples("affine", _affine_arguments),
    transforms={
        "RandomAffine": [
            *interpolations(10, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=5, usual="NEAREST"),
            sample(0, translate=(0.2, 0.2), label="translation alone"),
        ],
    },
    leaves_range=_fills_beyond_the_range,
)

# --- rotations


def _rotate_v1(
    family: str, handle: Any, matrix: Any, interpolation: str = "nearest", expand: bool = False, fill: Any = None
) -> Any:
    if not expand:
        return _record(handle, "v1.affine", (tuple(matrix),), interpolation, fill)
    _, height, width = handle.sink_shape
    new_width, new_height = F_tensor._compute_affine_output_size(matrix, width, height)
    size = new_height, new_width
    return _record(handle, "v1.rotate_expanded", (tuple(matrix), size), interpolation, fill, size)


def _rotate_v2(
    family: str, handle: Any, angle: Any, interpolation: Any = Mode.NEAREST, expand: bool = False, center: Any = None,
    fill: Any = None,
) -> Any:  # fmt: skip
    channels, height, width = handle.sink_shape
    if handle.sink_dtype not in NUMERIC:
        return NotImplemented
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


def _rotate_examples(a: Arguments) -> Iterator[Example]:
    yield from _examples("rotate", lambda a: (a.chance.uniform(-180, 180),))(a)
    yield Example("rotate", (a.chance.uniform(10, 80),), {"expand": True}, "NEAREST, expand=True")


def _turn_examples(a: Arguments) -> Iterator[Example]:
    yield Example("rotate", (90.0, Mode.BILINEAR), {"expand": True}, "BILINEAR, a quarter turn")


Operation(
    "rotate",
    stock={
        "v1.rotate_expanded": lambda image, matrix, size, mode, fill: F_tensor.rotate(
            image, list(matrix), mode, True, fill
        ),
        "v2.rotate": lambda image, angle, expand, center, size, mode, fill: F_v2.rotate_image(
            image, angle, Mode(mode), expand, center, fill
        ),
    },
    record={"v1.rotate": _rotate_v1, "v2.rotate": _rotate_v2},
    lower={"v1.rotate_expanded": _lower_rotated_v1, "v2.rotate": _lower_rotated_v2},
    promise=_promise,
    examples=_rotate_examples,
    transforms={
        "RandomRotation": [
            *interpolations((20, 30), usual="NEAREST"), sample((20, 30), expand=True, label="expand=True"),
        ],
    },
    leaves_range=_fills_beyond_the_range,
)  # fmt: skip
Operation(
    "quarter turns",
    stock={"v2.quarter_turns": lambda image, turns: image.rot90(turns, (-2, -1)) if turns else image.clone()},
    lower=_lower_turns,
    examples=_turn_examples,
)

# --- perspective


def _perspective_v1(
    family: str, handle: Any, perspective_coeffs: Any, interpolation: str = "bilinear", fill: Any = None
) -> Any:
    return _record(handle, "v1.perspective", (tuple(perspective_coeffs),), interpolation, fill)


def _perspective_v2(
    family: str, handle: Any, startpoints: Any, endpoints: Any, interpolation: Any = Mode.BILINEAR, fill: Any = None,
    coefficients: Any = None,
) -> Any:  # fmt: skip
    values = v2_geometry._perspective_coefficients(startpoints, endpoints, coefficients)
    return _record(handle, "v2.perspective", (tuple(values),), _mode_v2(interpolation), fill)


Operation(
    "perspective",
    stock={
        "v1.perspective": lambda image, values, mode, fill: F_tensor.perspective(image, list(values), mode, fill),
        "v2.perspective": lambda image, values, mode, fill: F_v2.perspective_image(
            image, None, None, Mode(mode), fill, list(values)
        ),
    },
    record={"v1.perspective": _perspective_v1, "v2.perspective": _perspective_v2},
    lower={f"{family}.perspective": same_size(family, perspective_grid) for family in ("v1", "v2")},
    promise=_promise,
    examples=_examples("perspective", lambda a: a.corners()),
    transforms={"RandomPerspective": [sample(p=1.0)]},
    leaves_range=_fills_beyond_the_range,
)

# --- elastic deformation


def _elastic_v1(family: str, handle: Any, displacement: Any, interpolation: str = "bilinear", fill: Any = None) -> Any:
    if displacement.dtype != torch.float32:
        return NotImplemented
    return _deform("v1.elastic_transform", handle, displacement, interpolation, fill)


def _elastic_v2(
    family: str, handle: Any, displacement: Any, interpolation: Any = Mode.BILINEAR, fill: Any = None
) -> Any:
    if not isinstance(displacement, torch.Tensor):
        return NotImplemented
    return _deform("v2.elastic", handle, displacement.to(torch.float32), _mode_v2(interpolation), fill)


def _deform(name: str, handle: Any, displacement: torch.Tensor, mode: str, fill: Any) -> Any:
    if displacement.shape != (1, *handle.sink_shape[1:], 2) or displacement.device.type != "cpu":
        return NotImplemented
    # The caller may go on to write to its own.
    return _record(handle, name, (TensorArgument(displacement.detach().clone()),), mode, fill)


Operation(
    "elastic",
    stock={
        "v1.elastic_transform": lambda image, field, mode, fill: F_tensor.elastic_transform(
            image, field.tensor, mode, fill
        ),
        "v2.elastic": lambda image, field, mode, fill: F_v2.elastic_image(image, field.tensor, Mode(mode), fill),
    },
    record={"v1.elastic_transform": _elastic_v1, "v2.elastic": _elastic_v2},
    lower={"v1.elastic_transform": same_size("v1", displaced), "v2.elastic": same_size("v2", displaced)},
    promise=_promise,
    examples=_examples("elastic_transform", lambda a: (a.displacement(),)),
    transforms={"ElasticTransform": interpolations(sigma=1.0, usual="BILINEAR")},
    leaves_range=_fills_beyond_the_range,
)
