"""The rules that tests/conftest.py sets for the suite."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torch_sink.cli.photos import make_photo, write_photos

pytestmark = pytest.mark.once

pytest_plugins = ["pytester"]

CUDA_TEST = """
import pytest

@pytest.mark.cuda
def test_on_the_device():
    pass
"""


@pytest.mark.parametrize(("fails_without", "outcome"), [("0", "skipped"), ("1", "errors")])
def test_cuda_tests_skip_with_a_reason_and_fail_where_a_device_is_expected(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fails_without: str, outcome: str
) -> None:
    monkeypatch.setenv("FAIL_WITHOUT_CUDA", fails_without)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytester.makeconftest(Path(__file__).parents[1].joinpath("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = cuda: needs a device\n")
    pytester.makepyfile(CUDA_TEST)
    found = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    found.assert_outcomes(**{outcome: 1})
    assert ("needs a CUDA device" in found.stdout.str()) == (outcome == "skipped")


DRAWS: list[tuple[float, float, float]] = []


@pytest.mark.parametrize("turn", [0, 1])
def test_draws_do_not_reach_the_next_test(turn: int) -> None:
    DRAWS.append((torch.rand(()).item(), float(np.random.random()), random.random()))
    if turn == 1:
        assert DRAWS[0] == DRAWS[1]


def test_photos_are_images_of_many_kinds(photos: Path, generated_photos: Path) -> None:
    assert any(path.is_file() for path in photos.rglob("*"))
    seen = set()
    for path in generated_photos.rglob("*.*"):
        with Image.open(path) as image:
            image.load()
            seen.add((image.format, image.mode, bool(image.info.get("progressive")), len(image.getexif()) > 0))
    assert {("JPEG", "RGB", False, False), ("JPEG", "L", False, False), ("JPEG", "CMYK", False, False)} <= seen
    assert {("JPEG", "RGB", True, False), ("JPEG", "RGB", False, True), ("PNG", "P", False, False)} <= seen


def test_equal_seeds_give_equal_photos(tmp_path: Path) -> None:
    assert make_photo(61, 47, seed=3).tobytes() == make_photo(61, 47, seed=3).tobytes()
    assert make_photo(61, 47, seed=3).tobytes() != make_photo(61, 47, seed=4).tobytes()
    paths = write_photos(tmp_path, count=3, classes=2)
    assert [path.parent.name for path in paths] == ["class_0", "class_1", "class_0"]
    # A decoder's work depends on the encoded size: photographs of this size take about 110 kB.
    assert all(60_000 < path.stat().st_size < 160_000 for path in paths)
