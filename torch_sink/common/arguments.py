"""Checks of a user's arguments; each message says what is allowed and what to do."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
# Names of arguments that belong to another call.
_OF_AN_EVALUATION = ("valid_loader", "val_loader", "test_loader", "eval_dataset", "val_dataset", "validation_data")
_OF_A_LOADER = ("batch_size", "num_workers", "shuffle", "collate_fn", "drop_last", "sampler", "pin_memory", "transform")
_OF_A_RUN = ("callbacks", "epochs", "max_steps", "timeline", "epoch", "loader", "train_loader", "train_dataset")
_GROUPS = {"of_an_evaluation": _OF_AN_EVALUATION, "of_a_loader": _OF_A_LOADER, "of_a_run": _OF_A_RUN}
# Argument of torch_sink -> its names in other libraries and in other functions of this one, as far as they are spelled
# too differently for `difflib` to find them.
_SAME = {
    "batches_per_epoch": ("sink_size",),
    "sink_size": ("size",),
    "slots": ("prefetch", "prefetch_factor", "queue_size", "buffer_size", "depth", "queue_depth"),
    "directory": ("dirpath", "path"),
    "prefix": ("filename", "name"),
    "per_print_times": ("every", "every_n_steps", "print_every", "log_every", "log_interval"),
    "collect_freq": ("every", "every_n_steps", "log_every", "log_interval"),
    "summary_dir": ("folder", "directory", "log_dir", "logdir", "path"),
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


def check_text(name: str, value: Any, allowed: str) -> None:
    """Raise TypeError unless `value` is a str; `allowed` says which, for the message."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass {allowed}")


def check_path(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is the path of a folder, as a str or a Path."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{name} is a {type(value).__name__}; pass the path of a folder")


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is an int or a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass a number")


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


class _Decorator(Protocol):
    """Keeps the type of what it decorates: of a class, it returns the class."""

    @overload
    def __call__(self, function: type[T], /) -> type[T]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


def explains_wrong_calls(**places: str) -> _Decorator:
    """Decorator of a function, a method or a dataclass: a call that does not fit its signature says what would.

    A TypeError for an unknown keyword argument names the right one, or where to pass it instead. So do those for
    arguments that are missing, that need a name, or that were given twice.

    Args:
        places: argument, or a key of `_GROUPS` -> the advice for one that belongs to another function; "{name}" in it
            is that argument.
    """
    advice_for = {name: text for place, text in places.items() for name in _GROUPS.get(place, (place,))}

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function
        parameters = inspect.signature(function).parameters.values()
        own = [one for one in parameters if one.name != "self"]
        by_place = [one.name for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]
        to_name = [one.name for one in own if one.kind is one.KEYWORD_ONLY]
        takes_any_number = any(one.kind is one.VAR_POSITIONAL for one in own)
        known = [*by_place, *to_name]
        needed = [one.name for one in own if one.name in known and one.default is one.empty]
        of_its_own = f"its arguments are {', '.join(known)}" if known else "it takes none with a name"
        selves = len(parameters) - len(own)
        owner = function.__qualname__.removesuffix(".__init__")
        meant = {other: name for name in known for other in _SAME.get(name, ()) if other not in known}

        def problem(places: int, names: dict[str, Any]) -> str | None:
            """What is wrong with a call of so many arguments by their places and these by their names."""
            for name in names:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                    advice = f"did you mean {close[0]}=?" if close else of_its_own
                    advice = f"pass {meant[name]}=" if name in meant else advice
                    return f"{owner} has no argument {name!r}; {advice_for.get(name, advice).replace('{name}', name)}"
            if places > len(by_place) and not takes_any_number:
                if to_name:
                    named = ", ".join(f"{name}=" for name in to_name)
                    return f"{owner} got an argument without a name that needs one: {named}"
                return f"{owner} got {places} arguments; {of_its_own}"
            placed = by_place[:places]
            if twice := [name for name in placed if name in names]:
                return f"{owner} got {twice[0]} twice, by its place and by its name; pass it once"
            if missing := [name for name in needed if name not in names and name not in placed]:
                return f"{owner} needs {', '.join(missing)}; call it as {owner}({', '.join(needed)})"
            return None

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if text := problem(len(args) - selves, kwargs):
                raise TypeError(text)
            return function(*args, **kwargs)

        return checked

    return decorate
