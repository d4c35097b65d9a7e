"""What programs do to images with tensors' own methods, through the kernels."""

from __future__ import annotations

import pytest
from image.operations.test_tensor_methods import BATCHES, RECORDED, check_batch


@pytest.mark.parametrize(("kind", "name"), [(RECORDED[name][0][0], name) for name in BATCHES])
def test_batches(kind: str, name: str) -> None:
    check_batch(kind, name)
