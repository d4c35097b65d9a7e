"""Fixtures of the loop's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulators.fake_cuda as fake
from simulators.fake_cuda import fake_cuda, rehearse

from torch_sink.loop.core import host_sync

__all__ = ["fake_cuda", "rehearse"]


@pytest.fixture(autouse=True)
def rehearsed(rehearse: None) -> None:
    """CUDA tests run everywhere, on what there is."""


@pytest.fixture(autouse=True)
def the_fake_is_below_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the fake device is that of a user who waits: those of a real one are no Python at all."""
    files = [str(path) for path in Path(fake.__file__).parent.glob("*.py")]
    monkeypatch.setattr(host_sync, "_WATCHING_FILES", (*host_sync._WATCHING_FILES, *files))
