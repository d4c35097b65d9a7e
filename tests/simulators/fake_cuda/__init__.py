"""A CUDA device that is none, for tests: `README.md` says what it proves and what each file stands for."""

from .device import FakeCuda
from .fixtures import fake_cuda, has_device, rehearse

__all__ = ["FakeCuda", "fake_cuda", "has_device", "rehearse"]
