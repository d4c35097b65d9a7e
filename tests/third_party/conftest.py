"""What other libraries need in order to be imported quietly."""

from __future__ import annotations

import os

import pytest

# Albumentations asks the network for its newest release when it is imported.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("once_on_oldest")
