"""The calls of the parity table on the CPU path, at the sizes of photographs: equal bits."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torchvision.transforms import functional as F1
from torchvision.transforms.v2 import functional as F2

import torch_sink
from image.cases import RESIZES_BYTES_IN_INTEGERS
from image.examples import REFERENCES
from image.parity import EXACT, ImageKind, Measured, Parity, converted, measure
from torch_sink.cli.photos import make_photo
from torch_sink.image.operations import OPERATIONS

pytestmark = pytest.mark.halved

ROOT = Path(__file__).resolve().parents[3]
# torch's own arithmetic on a finished batch.
NOT_IN_KERNELS = {"batch.mix_up", "batch.cut_mix"}


@functools.cache
def measured(reference: str) -> Parity:
    images = [ImageKind("RGB", 375, 500), ImageKind("L", 120, 90), ImageKind("RGB", 1, 40), ImageKind("L", 13, 1)]
    return measure(images, references=[reference], seed=2)


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.sampled(4)
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


def test_the_page_measures_what_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows that stay keep what they say, and where other rows were measured on another machine the page says so."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "made_by"))
    import update_parity

    parts = [measured(reference) for reference in REFERENCES]
    planned = {row: plan for part in parts for row, plan in part.planned.items()}
    chosen: set[tuple[str, str]] = set()

    def measure_all(device: str, images: object, setting: object = None, rows: frozenset[Any] | None = None) -> Parity:
        rows = frozenset(planned) if rows is None else rows
        chosen.update(rows)
        found = [row for part in parts for row in part.rows if (row.operation, row.reference) in rows]
        return Parity(found, [], set(), planned)

    monkeypatch.setattr(update_parity, "measure_all", measure_all)
    monkeypatch.setattr(update_parity, "SETTINGS", ())
    monkeypatch.setattr(update_parity, "PAGE", tmp_path / "parity.md")

    def written(*names: str, everything: bool = False) -> str:
        chosen.clear()
        text, count, broken = update_parity.parity_page("cpu", names, everything)
        assert (count, broken) == (len(chosen), [])
        update_parity.PAGE.write_text(text)
        return text

    update_parity.PAGE.write_text("## Other processors")
    whole = written()
    assert chosen == set(planned)
    assert written() == whole  # and nothing is measured
    assert not chosen
    lines = {line for line in whole.splitlines() if line.startswith("| ")}
    lost = next(line for line in lines if line.startswith("| hflip | Pillow |"))
    other = next(line for line in lines if line.startswith("| normalize | v1 float32 |"))
    older = whole.replace(f"{lost}\n", "| gone | Pillow | equal bits | 0 | 100 % | 9 |\n")
    older = older.replace(other, other.replace("equal bits", "at most 3")).replace(": torch ", ": torch 1.")
    update_parity.PAGE.write_text(older)
    text = written("invert")
    assert chosen == {("hflip", "Pillow"), ("normalize", "v1 float32"), *(row for row in planned if row[0] == "invert")}
    assert {line for line in text.splitlines() if line.startswith("| ")} == lines
    assert text.count(": torch 1.") == 1
    (elsewhere,) = (line for line in text.splitlines() if line.startswith("hflip (Pillow); "))
    assert elsewhere.count("; ") == len(chosen) - 1
    assert written() == text
    assert not chosen
    assert written(everything=True) == whole
    with pytest.raises(ValueError, match="no operation of the page is named"):
        written("invrt")


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.sampled(2)
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
