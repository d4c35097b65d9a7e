"""Calling a function with the members of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def call_with(function: Callable[..., Any], batch: Any) -> Any:
    """A tuple's or list's members are positional arguments, a dict's are named ones; anything else is one argument."""
    if isinstance(batch, dict):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)
