"""The entropy decoding of JPEG files by the kernels, against a plain one: the same coefficients, or a status."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from image.check import INTERPRETED, kernels_on

from kernels.jpeg_cases import (
    COLUMN,
    Decoded,
    damaged_files,
    decode_files,
    encode,
    golden_coefficients,
    noise,
    open_clean_files,
    open_file,
    photo,
)
from kernels.jpeg_golden import Damaged
from torch_sink.image.decode.jpeg_block import JpegFile
from torch_sink.triton_kernels.jpeg import entropy
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LaneShape

CLEAN = open_clean_files()
DAMAGED = damaged_files(90, seed=0)


@pytest.fixture(scope="module")
def decoded() -> list[Decoded]:
    """The clean files, then the damaged ones, in one batch; made before the fixtures that choose a test's device."""
    with kernels_on("cpu" if INTERPRETED else "cuda"):
        return decode_files([*CLEAN.values(), *DAMAGED])


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_file(name: str, decoded: list[Decoded]) -> None:
    found = decoded[list(CLEAN).index(name)]
    assert found.status == 0
    np.testing.assert_array_equal(found.coefficients, golden_coefficients(CLEAN[name]))


def check(file: JpegFile, found: Decoded) -> bool:
    """Fails where the status is wrong, or is 0 and a coefficient is wrong; True where the file is damaged."""
    try:
        expected = golden_coefficients(file)
    except Damaged:
        expected = None
    assert (found.status == 0) == (expected is not None)
    if expected is not None:
        np.testing.assert_array_equal(found.coefficients, expected)
    return expected is None


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_a_damaged_file(number: int, decoded: list[Decoded]) -> None:
    check(DAMAGED[number], decoded[len(CLEAN) + number])


def test_every_kind_of_damage_occurs(decoded: list[Decoded]) -> None:
    statuses = [found.status for found in decoded[len(CLEAN) :]]
    assert 0 in statuses, "some damage leaves a valid file"
    for name in ("FOREIGN_MARKER", "UNUSED_CODE", "RUN_TOO_LONG", "DATA_MISSING", "DATA_LEFT"):
        assert any(status & COLUMN[name] for status in statuses), name


def test_several_programs() -> None:
    files = [CLEAN[name] for name in ("gray, restart every row", "4:2:0, 1 x 1", "4:4:4, 17 x 9")]
    with mock.patch.object(entropy, "INTERPRETED_LANES", 32):
        found = decode_files(files, LaneShape(128, 128, 8))
    assert not any(check(*pair) for pair in zip(files, found, strict=True))


def test_lanes_that_do_not_agree_are_noticed() -> None:
    hard = open_file(encode(noise(24, 24), quality=90))
    easy = open_file(encode(photo(17, 9), quality=5))
    found = decode_files([hard, easy], LaneShape(128, 128, 1))
    assert found[0].status & COLUMN["NOT_CONVERGED"]
    assert not check(easy, found[1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", LANE_SHAPES, ids=str)
def test_shapes_of_a_device(shape: LaneShape) -> None:
    files = [*CLEAN.values(), *(open_file(encode(noise(40, 32), quality=quality)) for quality in (60, 90, 100))]
    for file, found in zip(files, decode_files(files, shape), strict=True):
        assert not check(file, found)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_damaged_files(seed: int) -> None:
    files = damaged_files(500, seed)
    found = decode_files(files)
    assert sum(check(*pair) for pair in zip(files, found, strict=True)) > 100
