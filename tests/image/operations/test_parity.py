"""The calls of the parity table on the CPU path, at the sizes of photographs: equal bits."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
import torchvision
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import RESIZES_BYTES_IN_INTEGERS
from image.parity import EXACT, ImageKind, Measured, Parity, converted, measure
from torch_sink.cli.photos import make_photo
from torch_sink.image.core.examples import REFERENCES
from torch_sink.image.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[3]
# torch's own arithmetic on a finished batch.
NOT_IN_KERNELS = {"batch.mix_up", "batch.cut_mix"}


@functools.cache
def measured(reference: str) -> Parity:
    images = [ImageKind("RGB", 375, 500), ImageKind("L", 120, 90), ImageKind("RGB", 1, 40), ImageKind("L", 13, 1)]
    return measure(images, references=[reference], seed=2)


@pytest.mark.parametrize("reference", REFERENCES)
def test_stock_code_gives_equal_bits(reference: str) -> None:
    rows = measured(reference).rows
    assert len(rows) >= 30
    assert [row for row in rows if row.equal != row.values] == []


def test_every_recorded_operation_is_compared() -> None:
    recorded = set().union(*(measured(reference).recorded for reference in REFERENCES))
    assert set(OPERATIONS) - recorded == NOT_IN_KERNELS, "these need an example that is recorded"


@pytest.mark.skipif(not RESIZES_BYTES_IN_INTEGERS, reason="docs/parity.md was measured on a processor with AVX2")
def test_the_committed_page_has_every_operation() -> None:
    page = (ROOT / "docs" / "parity.md").read_text()
    page = page[page.index("## Measured") : page.index("## Other processors")]
    if f"torchvision {'.'.join(torchvision.__version__.split('.')[:2])}," not in page:
        pytest.skip(f"docs/parity.md is about another release than torchvision {torchvision.__version__}")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    promises = {(row.operation, row.reference): row.promise for each in REFERENCES for row in measured(each).rows}
    assert {(operation, reference) for operation, reference, *_ in lines} == set(promises), (
        "run python docs/made_by/update_parity.py"
    )
    for operation, reference, text, largest, equal, _ in lines:
        promise, share = promises[operation, reference], round(float(equal.split()[0]) * 1000)
        row = Measured(operation, reference, promise, float(largest), share, 100_000)
        assert row.keeps_its_promise, (operation, reference)
        assert (text == "equal bits") == (promise == EXACT)


@pytest.mark.parametrize("reference", REFERENCES)
def test_boxes_beyond_the_image(reference: str) -> None:
    """What stock code makes of boxes that do not touch the image is not always of the box's size."""
    functional = F2 if reference.startswith("v2") else F1
    image = make_photo(4, 3, 1)
    for top, left, side in itertools.product((-9, -4, -3, -1, 0, 2, 3, 9), (-9, -4, -1, 0, 4, 5), (1, 3, 12)):
        results = []
        for backend, settings in (("PIL", {}), ("device", {"device": "cpu"})):
            with torch_sink.image_backend(backend, **settings):
                crop = functional.crop(converted(functional.hflip(image), reference), top, left, side, 4)
                results.append(functional.pil_to_tensor(crop) if reference == "Pillow" else crop)
        stock, ours = results
        assert ours.shape == stock.shape
        assert torch.equal(ours * 1, stock)
