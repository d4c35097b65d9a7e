"""Palette images through the kernels: what they number is moved, and looked up where it becomes colors."""

from image.handles.test_palettes import test_tensors  # noqa: F401
