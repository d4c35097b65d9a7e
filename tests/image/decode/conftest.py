"""Fixtures of the tests of files that are decoded, or that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from image.broken_files import COUNT, write_tree


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files, some of which are broken. Treat them as read-only."""
    return write_tree(tmp_path_factory.mktemp("files"), COUNT, seed=3)
