"""The support table: its data are what trials find, complete, and without side effects."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torchvision
from torchvision import transforms
from torchvision.transforms import v2

import torch_sink
from image.trials import support as trials
from image.trials.support import FALLBACK, PASSES, RECORDED, REFUSED, Trial
from torch_sink.image import support
from torch_sink.image.support import NOT_TRIED, SupportRow

pytestmark = pytest.mark.halved

ROOT = Path(__file__).resolve().parents[3]
WAYS = {RECORDED, FALLBACK, PASSES, REFUSED}


@pytest.fixture(scope="module")
def table() -> dict[str, SupportRow]:
    return {row.name: row for row in torch_sink.support_table()}


@pytest.fixture(scope="module")
def tried() -> list[SupportRow]:
    return trials.tried_rows()


PARTS = 3  # of the names of a family


@pytest.fixture
def update_support(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "made_by"))
    return importlib.import_module("update_support")


def test_the_rows_are_what_trials_find(table: dict[str, SupportRow], tried: list[SupportRow]) -> None:
    wrong = [(row, table[row.name]) for row in tried if row != table[row.name]]
    assert not wrong, f"run {sys.executable} docs/made_by/update_support.py"
    assert [row.name for row in tried] == [*table]


def test_the_data_and_the_page_are_written_anew(
    tried: list[SupportRow],
    update_support: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(update_support, "tried_rows", lambda: tried)
    monkeypatch.setattr(sys, "argv", ["update_support.py", "--check"])
    assert update_support.main() == 0, f"run {sys.executable} docs/made_by/update_support.py"
    data, page = update_support.DATA.read_text(), update_support.SUPPORT.read_text()
    wrong = data.replace("v1.CenterCrop\t0.23\tkernel", "v1.CenterCrop\t0.23\texact fallback")
    assert wrong != data
    monkeypatch.setattr(update_support, "DATA", tmp_path / "support.tsv")
    monkeypatch.setattr(update_support, "SUPPORT", tmp_path / "support.md")
    update_support.SUPPORT.write_text(page)
    update_support.DATA.write_text(wrong)
    assert update_support.main() == 1
    assert "the support table is out of date" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["update_support.py"])
    update_support.DATA.write_text("")
    update_support.SUPPORT.unlink()
    assert update_support.main() == 0
    since = update_support.release()
    expected = [[row.name, since, *filter(None, row[1:])] for row in tried]
    assert [line.split("\t") for line in update_support.DATA.read_text().splitlines()[1:]] == expected
    assert update_support.SUPPORT.exists() == update_support.is_newest()
    if update_support.is_newest():
        assert update_support.SUPPORT.read_text() == page


def test_rows_begin_with_the_release_that_changed_them(update_support: ModuleType) -> None:
    old, new = SupportRow("v1.Pad", RECORDED, RECORDED), SupportRow("v1.Pad", RECORDED, FALLBACK, "all: kernel")
    head, *lines = (made := update_support.data_with([old], "", "0.23")).splitlines()
    assert head.split("\t") == ["name", "since", *SupportRow._fields[1:]]
    assert lines == [f"v1.Pad\t0.23\t{RECORDED}\t{RECORDED}"]
    assert update_support.data_with([old], made, "0.29") == made
    both = update_support.data_with([new], made, "0.29")
    assert both == f"{made}v1.Pad\t0.29\t{RECORDED}\t{FALLBACK}\tall: kernel\n"
    assert update_support.data_with([old], both, "0.23") == both
    assert update_support.data_with([old], both, "0.28") == both
    assert update_support.data_with([new], both, "0.100") == both
    # What is so in the oldest release too, once that has run, is said once.
    assert update_support.data_with([new], both, "0.23") == both.replace("0.29", "0.23").replace(
        made[len(head) + 1 :], ""
    )


def test_the_installed_release_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def row_of(name: str, release: str) -> SupportRow | None:
        monkeypatch.setattr(torchvision, "__version__", release)
        return next((row for row in torch_sink.support_table() if row.name == name), None)

    rows = [row_of("v2.functional.resize", each) for each in ("0.23.0+cu128", "0.26.1", "0.27.0a0", "0.29.1", "1.0")]
    before, since = "BOX, HAMMING, LANCZOS: not applicable", "BOX, HAMMING: not applicable"
    assert [row is not None and row.limits.startswith(before) for row in rows] == [True, True, False, False, False]
    assert [row is not None and row.limits.startswith(since) for row in rows] == [False, False, True, True, True]
    monkeypatch.delattr(v2, "Resize")
    assert row_of("v2.Resize", "0.29.1") is None


def test_every_transform_and_functional_is_tried(tried: list[SupportRow]) -> None:
    unknown = [row.name for row in tried if NOT_TRIED in row]
    assert not unknown, f"a file of tests/image/trials needs a call of {unknown}"
    assert all({row.on_pillow, row.on_tensor} <= WAYS for row in tried)
    for label, module in (("v1", transforms), ("v2", v2)):
        names = {row.name.removeprefix(f"{label}.") for row in tried}
        assert set(support.transform_names(module)) <= names
        classes = {name for name, kind in vars(module).items() if isinstance(kind, type) and callable(kind)}
        assert classes - names <= {"AutoAugmentPolicy", "InterpolationMode", "Transform"}


def test_the_table_is_complete_without_the_kernels_behind_the_functionals() -> None:
    names = support.functional_names(v2)
    assert {"resize", "to_image", "to_pil_image", "clamp_bounding_boxes", "get_size", "hflip"} <= set(names)
    assert not {"resize_image", "pad_mask", "crop_bounding_boxes", "flip_video", "register_kernel"} & set(names)


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
    image, (example, calls) = trials.sample_image(family, number), trial
    torch.default_generator.manual_seed(0)
    random.seed(0)
    try:
        for _ in range(example.draws):
            calls[number](*trials.arranged(image, example.form))
    except Exception:
        return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["v1", "v2"])
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(2)
def test_only_what_stock_refuses_is_refused(part: int, family: str) -> None:
    """An error of a recorded call must not look like an input that torchvision does not take."""
    module = {"v1": transforms, "v2": v2}[family]
    found = {**trials.transform_trials(family, module), **trials.functional_trials(family, module)}
    assert {*support.transform_names(module), *support.functional_names(module)} <= set(found)
    wrong = []
    for name, each in [*found.items()][part::PARTS]:
        for trial in each:
            stock = [_refused_by_stock(trial, family, number) for number in range(3)]
            with trials._undisturbed(), torch_sink.image_backend("device", device="meta"):
                ours = [way == REFUSED for way in trials.try_it(family, *trial)]
            if stock != ours:
                wrong.append((name, trial[0].label, stock, ours))
    assert not wrong


def test_the_table_disturbs_nothing() -> None:
    """Nothing is tried where a program asks for the table, and falls back there."""
    with torch_sink.image_backend("device", device="cpu", strict=True):
        draws = torch.get_rng_state(), random.getstate()
        assert any(row.on_pillow == FALLBACK for row in torch_sink.support_table())
        assert not torch_sink.fallback_report().counts
        assert torch.equal(torch.get_rng_state(), draws[0])
        assert random.getstate() == draws[1]
