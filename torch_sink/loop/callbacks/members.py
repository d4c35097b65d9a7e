"""A batch's members: as the arguments of a function, and as the two columns that a loss function takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_sink.loop.callbacks.base import Callback, RunContext


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """A tuple's or list's members are positional arguments, a dict's are named ones; anything else is one argument."""
    if isinstance(batch, dict):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)


class TwoColumns(Callback):
    """Raises, before the first step of a sink, unless the dataset yields data and labels for a loss function.

    Raises:
        ValueError: the batch is no tuple or list of two.
    """

    def on_train_step_begin(self, run_context: RunContext) -> None:
        batch = run_context.original_args().train_dataset_element
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
            raise ValueError(
                f"the dataset yields a {type(batch).__name__}{size}, and loss_fn takes two columns, data and labels; "
                "for anything else make the Model of a network that returns the loss, without loss_fn"
            )
