"""What every launch asks of the compiler."""

from __future__ import annotations

from typing import Any

import torch

WARPS = 4  # of a kernel that has no reason for another number


def compiler_options(warps: int = WARPS, registers: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch.

    Args:
        warps: of a program.
        registers: the most that a thread may use; only NVIDIA's compiler has such an option.
    """
    # Equal bits: a multiply and an add may not become one rounding, unless a kernel says so.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return options if registers is None or torch.version.cuda is None else {**options, "maxnreg": registers}
