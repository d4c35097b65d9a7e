"""Files that torchvision decodes to tensors, through the kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from image.decode.test_tensor_files import check_pipeline, folder, test_turned_images_in_a_batch  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
]


# The others have calls whose results on uint8 tensors depend on the processor.
@pytest.mark.parametrize("name", ["v1, evaluation", "to a Pillow image and back"])
def test_pipelines(folder: Path, name: str) -> None:  # noqa: F811
    check_pipeline(folder, name, 1)
