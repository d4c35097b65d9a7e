"""Names under which other libraries know the arguments of StepLoop and Model, and what to write here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Argument here -> its names elsewhere; a class without the argument passes over the row.
_SAME = {
    "network": ("model", "net", "module"),
    "model": ("network", "net", "module"),
    "loss_fn": ("criterion", "loss", "loss_function", "loss_func", "compute_loss"),
    "optimizer": ("optim", "opt", "optimizers"),
    "scheduler": ("lr_scheduler", "lr_schedule", "learning_rate_scheduler", "schedulers"),
    "schedule": ("scheduler_interval", "lr_schedule_interval", "step_scheduler"),
    "clip_grad_norm": ("grad_clip", "clip_grad", "gradient_clip", "gradient_clip_val", "max_grad_norm", "clip_norm"),
    "accumulate": ("accumulation_steps", "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
    "ema": ("ema_decay", "model_ema", "model_ema_decay", "average"),
    "amp": ("amp_level", "precision", "mixed_precision", "use_amp", "level"),
    "amp_level": ("amp", "precision", "mixed_precision", "use_amp", "level", "keep_batchnorm_fp32"),
    "amp_dtype": ("dtype", "cast_model_type", "autocast_dtype"),
    "loss_scaler": ("scaler", "grad_scaler", "loss_scale_manager", "loss_scale"),
    "sink_size": ("steps_per_execution", "steps_per_sink", "loop_size"),
    "mode": ("compile", "use_graph", "cuda_graph", "backend"),
    "jit_config": ("compile_config", "jit"),
    "forward": ("train_step", "training_step", "step_fn", "forward_fn"),
    "metrics": ("metric", "metric_fns"),
    "epochs": ("epoch", "num_epochs", "n_epochs", "max_epochs"),
    "epoch": ("epochs", "num_epochs", "n_epochs", "max_epochs"),
    "callbacks": ("callback", "hooks"),
    "max_steps": ("steps", "num_steps", "total_steps", "max_iterations"),
    "loader": ("dataloader", "train_loader", "train_dataset", "data", "dataset"),
    "train_dataset": ("dataloader", "train_loader", "loader", "data", "dataset"),
    "valid_dataset": ("val_loader", "valid_loader", "eval_dataset", "val_dataset", "loader", "dataset"),
    "valid_frequency": ("validation_freq", "eval_every", "valid_freq"),
}
_FOR_A_RUN = ("loader", "dataloader", "train_loader", "train_dataset", "data")
_OF_A_RUN = ("callbacks", "epochs", "max_steps", "timeline", "epoch", *_FOR_A_RUN)


def explains_other_names(**places: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: an argument that the callable does not have is an error that names the right one, or the place.

    Args:
        places: argument -> where it belongs, for those that belong elsewhere.

    Raises:
        TypeError: in the call, for an unknown keyword argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]
        owner = function.__qualname__.removesuffix(".__init__")
        meant = {other: name for name in known for other in _SAME.get(name, ()) if other not in known}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise TypeError(f"{owner} has no argument {name!r}; {_advice(name, known, meant, places)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def run_places(text: str) -> dict[str, str]:
    """The arguments that belong to the call that trains, all with the same advice."""
    return dict.fromkeys(_OF_A_RUN, text)


def _advice(name: str, known: Iterable[str], meant: dict[str, str], places: dict[str, str]) -> str:
    if name in places:
        return places[name]
    if name in meant:
        return f"pass {meant[name]}="
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}=?" if close else f"its arguments are {', '.join(known)}"
