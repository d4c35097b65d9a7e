"""The support table: how each transform and functional of torchvision runs under the "device" backend.

It is data, `support.tsv`, which trials among the tests have made: `docs/made_by/update_support.py` writes it.
"""

from __future__ import annotations

import inspect
from importlib.resources import files
from types import ModuleType
from typing import NamedTuple

import torchvision
from torchvision import transforms as v1
from torchvision.transforms import v2

from torch_sink.releases import numbers_of

NOT_TRIED = "not tried"

_NO_TRANSFORMS = ("AutoAugmentPolicy", "InterpolationMode", "Transform")  # two enums and a base class
_KERNEL_SUFFIXES = ("_image", "_video", "_mask", "_bounding_boxes", "_keypoints")


class SupportRow(NamedTuple):
    """One line of the table.

    Attributes:
        name: of the transform or functional, e.g. "v2.RandomResizedCrop" or "v1.functional.resize".
        on_pillow: how it runs on Pillow images with the usual arguments: "kernel", "exact fallback" (stock code, on
            the CPU), "passes through" (nothing to compute) or "not applicable" (torchvision refuses such input).
        on_tensor: the same on the tensors that follow `ToTensor`, `PILToTensor` and `ToImage`; uint8 where both can be.
        limits: kinds of tensor and arguments for which it runs differently; empty when there are none.
    """

    name: str
    on_pillow: str
    on_tensor: str
    limits: str = ""


def support_table() -> list[SupportRow]:
    """One row for each transform and functional of torchvision, v1 and v2, as the installed release has them.

    What is "exact fallback" gives stock torchvision's result, made by stock torchvision, and is counted by
    `fallback_report()`. The rows ship with the package and nothing is tried here: the project's tests try every entry
    and compare, on the oldest and on the newest release of torchvision that is tested. Where a release in between
    changed a row, the installed one decides; where the processor does, `limits` say so. An entry that a newer
    torchvision brought says "not tried".

    Examples:
        >>> {row.name: row.on_pillow for row in support_table()}["v1.RandomResizedCrop"]
        'kernel'
    """
    installed = numbers_of(torchvision.__version__)
    rows: dict[str, SupportRow] = {}
    for line in files("torch_sink.image").joinpath("support.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        name, since, *cells = line.split("\t")
        if numbers_of(since) <= installed:
            rows[name] = SupportRow(name, *cells)
    return [rows.get(name, SupportRow(name, NOT_TRIED, NOT_TRIED)) for name in row_names()]


def row_names() -> list[str]:
    """The names of all rows, in the order of the table."""
    return [
        f"{family}.{prefix}{name}"
        for prefix, names_of in (("", transform_names), ("functional.", functional_names))
        for family, module in (("v1", v1), ("v2", v2))
        for name in names_of(module)
    ]


def transform_names(module: ModuleType) -> list[str]:
    """Names of the transform classes of `torchvision.transforms` or `torchvision.transforms.v2`."""
    classes = (name for name, kind in vars(module).items() if inspect.isclass(kind) and name[0] != "_")
    return sorted(name for name in classes if name not in _NO_TRANSFORMS)


def functional_names(module: ModuleType) -> list[str]:
    """Names of a module's public functionals, without their kernels and the decorator that registers those."""
    everything = vars(module.functional).items()
    functions = {name for name, function in everything if inspect.isfunction(function) and name[0] != "_"}
    kernels = {name + suffix for name in functions for suffix in _KERNEL_SUFFIXES}
    return sorted(functions - kernels - {"register_kernel"})
