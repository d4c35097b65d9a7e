"""The examples in docstrings run, and show what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import torch_sink.loop

pytestmark = pytest.mark.once

MODULES = [f"torch_sink.loop.{module.name}" for module in pkgutil.iter_modules(torch_sink.loop.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_public_names_are_sorted_and_documented() -> None:
    names = torch_sink.loop.__all__
    assert names == sorted(names)
    assert all(getattr(torch_sink.loop, name).__doc__ for name in names)
