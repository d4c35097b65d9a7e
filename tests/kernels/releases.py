"""Which releases run these tests: each of them takes long, and CI runs them on the newest and on the oldest."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def is_oldest_torch() -> bool:
    """True on the release that the package's requirements begin with."""
    project = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    oldest = re.findall(r'"torch>=([\d.]+)"', project)[0]
    return torch.__version__.startswith(f"{oldest}.")


def everyday() -> str:
    """What runs on this release every day, for pytest's `-m`."""
    return f"not slow and not {elsewhere()}"


def elsewhere() -> str:
    """The marker of tests that are left to the other release."""
    return "once" if is_oldest_torch() else "once_on_oldest"
