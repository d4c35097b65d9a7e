"""The fixture, for the tests of the fake itself."""

from __future__ import annotations

from .fixtures import fake_cuda

__all__ = ["fake_cuda"]
