"""Fixtures of the loop's tests."""

from __future__ import annotations

from fake_cuda import fake_cuda

__all__ = ["fake_cuda"]
