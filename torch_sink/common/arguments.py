"""Checks of a user's arguments; each message says what is allowed and what to do."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
# Names of arguments that belong to another call.
_OF_AN_EVALUATION = ("valid_loader", "val_loader", "test_loader", "eval_dataset", "val_dataset", "validation_data")
_OF_A_LOADER = ("batch_size", "num_workers", "shuffle", "collate_fn", "drop_last", "sampler", "pin_memory", "transform")
_OF_A_RUN = ("callbacks", "epochs", "max_steps", "timeline", "epoch", "loader", "train_loader", "train_dataset")
_GROUPS = {"of_an_evaluation": _OF_AN_EVALUATION, "of_a_loader": _OF_A_LOADER, "of_a_run": _OF_A_RUN}
# Argument of torch_sink -> its names in other libraries and in other functions of this one, as far as they are spelled
# too differently for `difflib` to find them.
_SAME = {
    "batches_per_epoch": ("sink_size",),
    "slots": ("prefetch", "queue_size", "buffer_size"),
    "directory": ("dirpath", "path"),
    "prefix": ("filename", "name"),
    "keep": ("save_top_k", "keep_checkpoint_max"),
    "save_checkpoint_steps": ("every_n_train_steps", "every_steps", "steps"),
    "keep_checkpoint_max": ("save_top_k", "keep"),
    "every_epochs": ("every_n_epochs", "valid_frequency", "check_val_every_n_epoch"),
    "every_steps": ("every_n_steps", "val_check_interval"),
    "steps_per_sync": ("sink_size", "steps_per_execution"),
    "loss_fn": ("criterion", "loss"),
    "network": ("model", "net"),
    "scheduler": ("lr_scheduler",),
    "clip_grad_norm": ("grad_clip", "gradient_clip_val", "max_grad_norm"),
    "accumulate": ("accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches"),
    "ema": ("ema_decay", "model_ema"),
    "amp": ("amp_level", "precision", "mixed_precision"),
    "amp_level": ("amp", "precision", "mixed_precision", "keep_batchnorm_fp32"),
    "loss_scaler": ("loss_scale_manager", "grad_scaler", "scaler"),
    "mode": ("compile",),
    "epochs": ("epoch", "num_epochs", "max_epochs"),
    "epoch": ("epochs", "num_epochs", "max_epochs"),
    "max_steps": ("steps",),
    "valid_dataset": _OF_AN_EVALUATION,
}


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(repr(choice) for choice in allowed)}")


def check_bool(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: pass True or False")


def check_count(name: str, value: Any, *, minimum: int, special: int | None = None, meaning: str = "") -> None:
    """Raise unless `value` is an int of at least `minimum`; with a `meaning`, which messages name, `special` passes."""
    if meaning and type(value) is type(special) and value == special:
        return
    allowed = f"an int of at least {minimum}" + (f", or {special} for {meaning}" if meaning else "")
    if isinstance(value, bool) or not isinstance(value, int):
        given = name if isinstance(value, (list, tuple, dict, torch.Tensor)) else f"{name}={value!r}"
        raise TypeError(f"{given} is a {type(value).__name__}; pass {allowed}")
    if value < minimum:
        raise ValueError(f"{name}={value}; pass {allowed}")


def check_above_zero(name: str, value: Any, default: str) -> None:
    """Raise unless `value` is a number above 0; `default` is what to do without one, for the message."""
    allowed = f"pass a number above 0, or {default}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; {allowed}")
    if not value > 0:
        raise ValueError(f"{name}={value}; {allowed}")


def named_device(device: torch.device | str) -> torch.device:
    """The device with a name; raises ValueError if torch knows none with it."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device, such as 'cuda' or 'cpu': {error}") from error


def check_takes(name: str, function: Any, *arguments: str) -> None:
    """Raise TypeError if a function cannot take these positional arguments; one without a signature passes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} is called with ({', '.join(arguments)}), which it does not take: {error}") from error


def explains_other_names(**places: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: a TypeError for an unknown keyword argument names the right one, or where to pass it instead.

    A keyword-only argument given by position is a TypeError that names the keywords.

    Args:
        places: argument, or a key of `_GROUPS` -> the advice for one that belongs to another function.
    """
    advice_for = {name: text for place, text in places.items() for name in _GROUPS.get(place, (place,))}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        known = [name for name in parameters if name != "self"]
        to_name = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
        owner = function.__qualname__.removesuffix(".__init__")
        meant = {other: name for name in known for other in _SAME.get(name, ()) if other not in known}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1)
                    advice = f"did you mean {close[0]}=?" if close else f"its arguments are {', '.join(known)}"
                    advice = f"pass {meant[name]}=" if name in meant else advice
                    raise TypeError(f"{owner} has no argument {name!r}; {advice_for.get(name, advice)}")
            if to_name and len(args) > len(parameters) - len(to_name):
                names = ", ".join(f"{name}=" for name in to_name)
                raise TypeError(f"{owner} got an argument without a name that needs one: {names}")
            return function(*args, **kwargs)

        return checked

    return decorate


def takes_options_of(owner: Callable[..., Any], **names: str | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: shows the keyword-only arguments of `owner` in place of `**options` in the function's signature.

    Args:
        owner: function or class that the options are passed on to.
        names: option of `owner` -> its name here, or None for one that cannot be passed.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        own = list(inspect.signature(function).parameters.values())[:-1]
        options = inspect.signature(owner).parameters.values()
        keywords = [
            one.replace(name=name)
            for one in options
            if one.kind is one.KEYWORD_ONLY and (name := names.get(one.name, one.name)) is not None
        ]
        first = [one for one in own if one.kind is not one.KEYWORD_ONLY]
        last = [one for one in own if one.kind is one.KEYWORD_ONLY]
        function.__signature__ = inspect.Signature([*first, *keywords, *last])  # type: ignore[attr-defined]
        return function

    return decorate
