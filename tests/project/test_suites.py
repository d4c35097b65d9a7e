"""The comparison of other projects' tests, on a suite of three tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from suites import compare
from suites.compare import Accepted, Difference
from suites.runs import Outcome, Run, run
from suites.sources import SUITES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "made_by"))

import update_suites as page  # noqa: E402

pytestmark = pytest.mark.once

SUITE = """
import time

import PIL.Image
import pytest
import torchvision
from torchvision.transforms.functional import crop


def is_on():
    return torchvision.get_image_backend() == "device"


def test_hangs_with_the_backend():
    while is_on():
        time.sleep(1)


def test_is_the_same():
    image = crop(PIL.Image.new("RGB", (4, 4)), 0, 0, 2, 2)
    assert type(image) is PIL.Image.Image
    assert isinstance(3, type) is False
    assert isinstance(int, type)


@pytest.mark.parametrize("size", [3, 4])
def test_differs(size):
    assert size == 3 or not is_on()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_three.py").write_text(SUITE)
    return {mode: run(Run(folder, ["test_three.py"], mode, folder / mode, seconds=2)) for mode in ("stock", "backend")}


@pytest.mark.slow
def test_a_difference_is_found_and_a_test_that_hangs_is_one(runs: dict[str, dict[str, Outcome]]) -> None:
    assert [one.outcome for one in runs["stock"].values()] == ["passed"] * 4
    found = compare.differences("three", "backend", runs["stock"], runs["backend"])
    assert [(one.test, one.stock, one.ours) for one in found] == [
        ("test_three.py::test_hangs_with_the_backend", "passed", "timed out"),
        ("test_three.py::test_differs[4]", "passed", "failed"),
    ]
    assert "assert" in found[1].said


@pytest.mark.slow
def test_the_backend_took_part(runs: dict[str, dict[str, Outcome]]) -> None:
    same = runs["backend"]["test_three.py::test_is_the_same"]
    assert (same.outcome, same.recorded, same.asked) == ("passed", True, True)
    assert not any(one.recorded or one.asked for one in runs["stock"].values())


def test_a_test_that_one_run_lacks_differs() -> None:
    found = compare.differences("three", "sink", {"a": Outcome("passed")}, {"b": Outcome("passed")})
    assert [(one.test, one.stock, one.ours) for one in found] == [
        ("a", "passed", "missing"),
        ("b", "missing", "passed"),
    ]


FOUND = [Difference("three", "backend", f"t.py::test_one[{number}]", "passed", "failed", "") for number in range(2)]


@pytest.mark.parametrize(
    ("entry", "known", "stale"),
    [
        (Accepted("three", ("backend",), ("t.py::test_one[*]",), "why"), 2, []),
        (Accepted("three", ("backend",), ("t.py::test_one[0]",), "why"), 1, []),
        (Accepted("three", ("backend", "handles"), ("t.py::test_one[0]",), "why"), 1, [("handles", "t.py::test_one[0]")]),
        (Accepted("three", ("backend",), ("t.py::test_*", "t.py::other"), "why"), 2, [("backend", "t.py::other")]),
        (Accepted("other", ("backend",), ("*",), "why"), 0, []),
    ],
)  # fmt: skip
def test_an_entry_that_no_difference_needs_is_stale(entry: Accepted, known: int, stale: list[tuple[str, str]]) -> None:
    assert len(compare.reasons(FOUND, [entry])) == known
    ran = [("three", "backend"), ("three", "handles")]
    assert compare.stale(FOUND, [entry], ran) == [("three", mode, pattern) for mode, pattern in stale]


def test_accepted_differences_have_a_reason_and_a_place() -> None:
    modes = {suite.name: suite.files for suite in SUITES}
    for entry in compare.read_accepted():
        assert set(entry.modes) <= set(modes[entry.suite])
        assert entry.tests
        assert len(entry.reason) > 30


def test_the_page_says_what_the_run_gave() -> None:
    assert page.PAGE.read_text() == page.page(page.read_results()), "run docs/made_by/update_suites.py"
