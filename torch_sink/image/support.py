"""The support table: how each transform and functional of torchvision runs under the "device" backend."""

from __future__ import annotations

from typing import NamedTuple

RECORDED = "kernel"
FALLBACK = "exact fallback"
PASSES = "passes through"
REFUSED = "not applicable"
NOT_TRIED = "not tried"

INPUT_KINDS = ("Pillow images", "uint8 tensors", "float tensors")


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
    """One row for each transform and functional of torchvision, v1 and v2.

    What is "exact fallback" gives stock torchvision's result, made by stock torchvision, and is counted by
    `fallback_report()`. The backend, the random generators and the fallback counts are left as they were. An entry that
    a newer torchvision brought says "not tried".

    Examples:
        >>> {row.name: row.on_pillow for row in support_table()}["v1.RandomResizedCrop"]
        'kernel'
    """
    from torch_sink.image.support_trials import tried_rows

    return tried_rows()
