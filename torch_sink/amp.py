"""Automatic mixed precision: converted models, lists of module types, and loss scalers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torch_sink.common.arguments import check_bool, check_choice, explains_wrong_calls
from torch_sink.loop.step.precision import LEVELS, FullPrecision, Level, Precision, PrecisionForward, make_precision
from torch_sink.loop.step.scaler import DynamicLossScaler, StaticLossScaler, all_finite, grads_finite

__all__ = [
    "DynamicLossScaler",
    "StaticLossScaler",
    "all_finite",
    "auto_mixed_precision",
    "custom_mixed_precision",
    "get_black_list",
    "get_white_list",
    "grads_finite",
]

_WHITE_LIST: list[type[nn.Module]] = [
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.Linear, nn.Bilinear, nn.LSTMCell, nn.RNNCell, nn.GRUCell, nn.PReLU),
]
_BLACK_LIST: list[type[nn.Module]] = [
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d),
]


def get_white_list() -> list[type[nn.Module]]:
    """Returns a copy of the list of module types that gain from low precision."""
    return list(_WHITE_LIST)


def get_black_list() -> list[type[nn.Module]]:
    """Returns a copy of the list of module types that O2 keeps in float32."""
    return list(_BLACK_LIST)


@explains_wrong_calls()
def auto_mixed_precision(
    model: nn.Module,
    amp_level: Level = "O0",
    dtype: torch.dtype = torch.bfloat16,
    *,
    keep_batchnorm_fp32: bool | None = None,
) -> nn.Module:
    """Make a model compute at an AMP level whenever it is called; its parameters stay float32.

    Args:
        model: changed in place.
        amp_level: "O0" changes nothing; "O1" and "auto" use torch.autocast; "O2" also passes low precision from layer
            to layer, with normalization in float32; "O3" is "O2" with normalization in low precision.
        dtype: torch.float16 or torch.bfloat16.
        keep_batchnorm_fp32: at O2 and O3, whether normalization runs in float32; None for the level's default.

    Returns:
        The model. Its outputs are float32.

    Raises:
        TypeError: not a module.
        ValueError: unknown level or dtype, or the model was converted before.
    """
    _check(model, dtype)
    check_choice("amp_level", amp_level, LEVELS)
    if keep_batchnorm_fp32 is not None:
        check_bool("keep_batchnorm_fp32", keep_batchnorm_fp32)
    if amp_level == "O0":
        return model
    level = "O1" if amp_level == "auto" else amp_level
    precision = make_precision(level, dtype, "cpu", model, float_norms=keep_batchnorm_fp32)
    model.forward = PrecisionForward(model, precision)
    return model


@explains_wrong_calls()
def custom_mixed_precision(
    model: nn.Module,
    *,
    white_list: Sequence[type[nn.Module]] | None = None,
    black_list: Sequence[type[nn.Module]] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Module:
    """Make a model compute in low precision by a list of module types; its parameters stay float32.

    Args:
        model: changed in place.
        white_list: only modules of these types run in low precision; their outputs are float32.
        black_list: all modules but those of these types run in low precision.
        dtype: torch.float16 or torch.bfloat16.

    Returns:
        The model. Its outputs are float32.

    Raises:
        TypeError: not a module, or a list that holds anything but module types.
        ValueError: both lists or neither, unknown dtype, or the model was converted before.
    """
    _check(model, dtype)
    if (white_list is None) == (black_list is None):
        raise ValueError("custom_mixed_precision takes either white_list or black_list; pass exactly one of them")
    members = tuple(white_list if white_list is not None else black_list or ())
    for member in members:
        if not (isinstance(member, type) and issubclass(member, nn.Module)):
            raise TypeError(f"the list holds {member!r}; it may hold torch.nn.Module types only")
    of_members = Precision("O1", dtype)
    of_model = Precision("O0", dtype)
    if black_list is not None:
        of_members, of_model = FullPrecision("O0", dtype), of_members
    for module in model.modules():
        if isinstance(module, members):
            module.forward = PrecisionForward(module, of_members)
    model.forward = PrecisionForward(model, of_model)
    return model


def _check(model: nn.Module, dtype: torch.dtype) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; pass a torch.nn.Module")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype!r}: pass torch.float16 or torch.bfloat16")
    if isinstance(model.__dict__.get("forward"), PrecisionForward):
        raise ValueError("the model went through mixed precision already; converting it twice would cast twice")
