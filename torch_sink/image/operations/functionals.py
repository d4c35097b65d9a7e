"""Operations of functionals that have one name on Pillow images and on the tensors of both families."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torchvision.transforms import _functional_pil as F_pil
from torchvision.transforms import _functional_tensor as F_tensor
from torchvision.transforms.v2 import functional as F_v2

from torch_sink.image.core.arguments import is_computed_in_float32, is_factor, is_number, is_scaled_bytes
from torch_sink.image.core.ops import NUMERIC, Lower, Op, Operation, Recorder, Stock
from torch_sink.image.core.recording import Recording


def stock_of(functional: str) -> dict[str, Stock]:
    """The stock functions of one name, as far as they exist: on Pillow images, in `transforms` and `transforms.v2`."""
    owners = {"pil": (F_pil, functional), "v1": (F_tensor, functional), "v2": (F_v2, f"{functional}_image")}
    return {
        f"{family}.{functional}": getattr(module, name)
        for family, (module, name) in owners.items()
        if hasattr(module, name)
    }


def functional(
    name: str,
    record: Recorder,
    lower: Lower | dict[str, Lower],
    **fields: Any,
) -> None:
    """Makes the operation of one functional known.

    Args:
        name: of the functional.
        record: its recorder for all families, whose first argument is "pil", "v1" or "v2".
        lower: as in `Operation`.
        fields: the others of `Operation`.
    """
    stock = stock_of(name)
    recorders = {call: functools.partial(record, "pil") if call.startswith("pil.") else record for call in stock}
    Operation(name, record=recorders, lower=lower, **{"stock": stock, **fields})


def adjusted(name: str, image: Recording, factor: Any) -> Any:
    """Records a call with a factor, which on tensors may not be negative."""
    family = name.partition(".")[0]
    takes = is_number if family == "pil" else is_factor
    if image.dtype not in NUMERIC or not takes(factor) or not is_computed_in_float32(family, image):
        return NotImplemented
    return image.record(Op(name, (factor,)))


def as_image(image: Recording) -> Any:
    """Records the Pillow image that `to_pil_image` makes of a tensor, unless its values are no bytes."""
    is_bytes = image.dtype == torch.uint8 or is_scaled_bytes(image)
    return image.as_image(Op("to_pil_image")) if is_bytes and image.calls else NotImplemented


_PIL_TO_TENSOR = Op("pil_to_tensor")


def through_tensor(recorder: Recorder) -> Recorder:
    """The recorder of a functional that turns Pillow images into tensors and back, from its recorder on tensors."""

    def record(image: Recording, *args: Any, **kwargs: Any) -> Any:
        if image.mode is None:
            return NotImplemented
        made = recorder(image.as_tensor(_PIL_TO_TENSOR, torch.uint8), *args, **kwargs)
        return made if made is NotImplemented else as_image(made)

    return record
