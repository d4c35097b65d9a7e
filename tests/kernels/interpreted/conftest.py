"""What Triton's interpreter itself does is no concern of the tests that use it."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter of Triton 3.6 turns arrays of one element into numbers, which NumPy 2 warns about.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim:DeprecationWarning")
