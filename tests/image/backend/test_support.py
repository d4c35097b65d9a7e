"""The support table: complete, true, and without side effects."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

import torch_sink
from image.cases import RESIZES_BYTES_IN_INTEGERS
from torch_sink.image import support
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import ledger
from torch_sink.image.support import FALLBACK, NOT_TRIED, PASSES, RECORDED, REFUSED, SupportRow, Trial

pytestmark = pytest.mark.halved

ROOT = Path(__file__).resolve().parents[3]
WAYS = {RECORDED, FALLBACK, PASSES, REFUSED}


@pytest.fixture(scope="module")
def table() -> dict[str, SupportRow]:
    return {row.name: row for row in torch_sink.support_table()}


@pytest.fixture
def few_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table tries a few entries of every kind: enough where its content does not matter."""
    few = ("ColorJitter", "Lambda", "Normalize", "RandAugment", "RandomNovelty", "hflip", "jpeg", "to_pil_image")
    for which in ("transform_names", "functional_names"):
        stock = getattr(support, which)
        monkeypatch.setattr(support, which, lambda module, stock=stock: [name for name in stock(module) if name in few])


def test_every_transform_and_functional_is_tried(table: dict[str, SupportRow]) -> None:
    unknown = [row.name for row in table.values() if NOT_TRIED in row]
    assert not unknown, f"an operation or torch_sink/image/support.py needs a call of {unknown}"
    assert all({row.on_pillow, row.on_tensor} <= WAYS for row in table.values())
    for label, module in (("v1", transforms), ("v2", v2)):
        assert {f"{label}.{name}" for name in support.transform_names(module)} <= set(table)
        classes = {name for name, kind in vars(module).items() if isinstance(kind, type) and callable(kind)}
        assert classes - {row.removeprefix(f"{label}.") for row in table} <= {
            "AutoAugmentPolicy", "InterpolationMode", "Transform",
        }  # fmt: skip


def test_the_table_is_complete_without_the_kernels_behind_the_functionals() -> None:
    names = support.functional_names(v2)
    assert {"resize", "to_image", "to_pil_image", "clamp_bounding_boxes", "get_size", "hflip"} <= set(names)
    assert not {"resize_image", "pad_mask", "crop_bounding_boxes", "flip_video", "register_kernel"} & set(names)


@pytest.mark.usefixtures("few_entries")
def test_an_entry_that_nobody_knows_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v2, "RandomNovelty", type("RandomNovelty", (v2.Transform,), {}), raising=False)
    assert SupportRow("v2.RandomNovelty", NOT_TRIED, NOT_TRIED) in torch_sink.support_table()


@pytest.mark.parametrize(
    ("name", "on_pillow", "on_tensor"),
    [
        ("v1.RandomResizedCrop", RECORDED, None),
        ("v1.RandAugment", RECORDED, None),
        ("v2.ColorJitter", RECORDED, None),
        ("v1.ToTensor", RECORDED, REFUSED),
        ("v1.Normalize", REFUSED, RECORDED),
        ("v2.ToDtype", PASSES, RECORDED),
        ("v2.Identity", PASSES, PASSES),
        ("v1.Lambda", FALLBACK, FALLBACK),
        ("v2.LinearTransformation", REFUSED, FALLBACK),
        ("v1.functional.hflip", RECORDED, RECORDED),
        ("v1.functional.normalize", REFUSED, RECORDED),
        ("v2.functional.get_size", PASSES, PASSES),
        ("v2.functional.jpeg", FALLBACK, FALLBACK),
        ("v2.functional.get_num_frames", REFUSED, REFUSED),
    ],
)
def test_known_entries(table: dict[str, SupportRow], name: str, on_pillow: str, on_tensor: str | None) -> None:
    assert table[name].on_pillow == on_pillow
    assert on_tensor is None or table[name].on_tensor == on_tensor


def test_arguments_that_run_differently_are_limits(table: dict[str, SupportRow]) -> None:
    assert "float64: exact fallback on tensors" in table["v2.ToDtype"].limits
    assert "to one column: exact fallback on tensors" in table["v1.Resize"].limits
    assert "a function that only calls functionals from this table: kernel on all images" in table["v2.Lambda"].limits
    assert table["v1.RandomHorizontalFlip"].limits == ""
    # In place, the handle itself changes: that is a recorded call.
    assert "inplace" not in table["v2.Normalize"].limits


def _refused_by_stock(trial: Trial, family: str, number: int) -> bool:
    image, (example, calls) = support.sample_image(family, number), trial
    torch.default_generator.manual_seed(0)
    random.seed(0)
    try:
        for _ in range(example.draws):
            calls[number](*support.arranged(image, example.form))
    except Exception:
        return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["v1", "v2"])
def test_only_what_stock_refuses_is_refused(family: str) -> None:
    """An error of a recorded call must not look like an input that torchvision does not take."""
    module = {"v1": transforms, "v2": v2}[family]
    found = {**support.transform_trials(family, module), **support.functional_trials(family, module)}
    assert {*support.transform_names(module), *support.functional_names(module)} <= set(found)
    wrong = []
    for name, trials in found.items():
        for trial in trials:
            stock = [_refused_by_stock(trial, family, number) for number in range(3)]
            with support._undisturbed(), torch_sink.image_backend("device", device="meta"):
                ours = [way == REFUSED for way in support.try_it(family, *trial)]
            if stock != ours:
                wrong.append((name, trial[0].label, stock, ours))
    assert not wrong


@pytest.mark.parametrize("active", [None, "cpu"])
def test_the_table_disturbs_nothing(
    active: str | None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if active is None:
        request.getfixturevalue("few_entries")
    seeded_devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded_devices.append)
    image = Image.new("RGB", (8, 8))
    before = transforms.functional.to_tensor
    with torch_sink.image_backend("PIL") if active is None else torch_sink.image_backend("device", device=active):
        counted = Counter(torch_sink.fallback_report().counts)
        if active:
            v2.functional.jpeg(image, 90)
            counted = Counter(torch_sink.fallback_report().counts)
            assert counted
        draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
        name = torch_sink.get_image_backend()
        torch_sink.support_table()
        assert torch_sink.get_image_backend() == name
        assert torch_sink.fallback_report().counts == counted
        assert not seeded_devices
        assert torch.equal(torch.get_rng_state(), draws[0])
        assert random.getstate() == draws[1]
        assert np.random.get_state()[1].tolist() == draws[2]  # type: ignore[union-attr, index]
        if active:
            batch = torch.utils.data.default_collate([transforms.functional.to_tensor(image)])
            assert type(batch) is torch.Tensor, "the device of the active backend was not restored"
    assert transforms.functional.to_tensor is before


@pytest.mark.usefixtures("few_entries")
def test_the_table_works_where_fallbacks_are_forbidden() -> None:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        rows = torch_sink.support_table()
        assert any(row.on_pillow == FALLBACK for row in rows)
        with pytest.raises(torch_sink.UnsupportedOperation):
            v2.functional.jpeg(Image.new("RGB", (8, 8)), 90)


@pytest.mark.skipif(not RESIZES_BYTES_IN_INTEGERS, reason="docs/support.md is about processors with AVX2")
def test_the_committed_page_is_current(monkeypatch: pytest.MonkeyPatch, table: dict[str, SupportRow]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "made_by"))
    import update_support

    monkeypatch.setattr(update_support, "support_table", lambda: [*table.values()])
    page = update_support.SUPPORT.read_text()
    if f"torchvision {update_support.release()}," not in page:
        pytest.skip(f"docs/support.md is about another release than torchvision {torchvision.__version__}")
    assert page == update_support.support_page(), "run python docs/made_by/update_support.py"
    monkeypatch.setattr(sys, "argv", ["update_support.py", "--check"])
    assert update_support.main() == 0


@pytest.mark.usefixtures("few_entries")
def test_the_table_keeps_what_workers_counted() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        before = settings.active
        assert before is not None
        ledger.arrive((before.report, (Counter({("blur", "no kernel"): 2}), True, 0, [])))
        counts = torch_sink.fallback_report().counts
        assert counts["blur", "no kernel"] == 2
        torch_sink.support_table()
        assert torch_sink.fallback_report().counts == counts
        assert settings.active == before
