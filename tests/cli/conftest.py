"""A fixture for tests of reports that do not look at what was measured."""

from __future__ import annotations

import pytest


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data worker is started to be measured: an image costs it a millisecond."""
    monkeypatch.setattr("torch_sink.cli.explain.measured_beside_stock", lambda *_: (0.001, "Not compared."))
