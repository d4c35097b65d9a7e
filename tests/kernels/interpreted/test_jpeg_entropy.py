"""The entropy decoding of JPEG files by the kernels, against a plain one: the same coefficients, or a status."""

from __future__ import annotations

from pathlib import Path
from typing import Any
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
    new_decoder,
    noise,
    open_clean_files,
    open_file,
    pack_files,
    photo,
    results,
    stripes,
)
from kernels.jpeg_golden import Damaged
from torch_sink.image.decode.jpeg_block import JpegFile
from torch_sink.triton_kernels.jpeg import entropy
from torch_sink.triton_kernels.jpeg.passes import count_kernel
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LaneShape

BENCHMARKS = Path(__file__).resolve().parents[3] / "examples" / "benchmarks"
CLEAN = open_clean_files()
DAMAGED = damaged_files(90, seed=0)
LATE_SEGMENTS = count_kernel.arg_names.index("late")


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


@pytest.mark.parametrize("parts", [1, 3])
def test_several_programs_of_a_component(parts: int) -> None:
    """Of 144 blocks of luma, 128 at a time: one program takes two steps, or two take one and the third has nothing."""
    files = [CLEAN["4:2:0, 1 x 1"], open_file(encode(noise(96, 96), quality=30)), CLEAN["gray, restart every row"]]
    several = mock.patch.object(entropy, "parts_of_component", return_value=parts)
    with several, mock.patch.object(entropy, "DC_BLOCKS", 128):
        found = decode_files(files)
    assert not any(check(*pair) for pair in zip(files, found, strict=True))


def test_as_many_programs_of_a_component_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Photographs, files of 12 megapixels, and files with a restart marker after each row of MCUs."""
    monkeypatch.setattr(entropy, "are_interpreted", lambda: False)
    of_batches = (256, 256 * 4600), (24, 24 * 281_000), (256 * 47, 256 * 8600)
    assert [entropy.parts_of_component(*counts) for counts in of_batches] == [5, 32, 1]


# Files whose lanes agree one after the other: full blocks, and blocks that all look alike.
LATE = {
    "noise": encode(noise(16, 8), quality=100, subsampling="4:4:4"),
    "noise, 4:2:0": encode(noise(16, 16), quality=100),
    "stripes, 4:2:0": encode(stripes(96, 96), quality=90, subsampling="4:2:0"),
}


@pytest.mark.once
def test_lanes_that_agree_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs 40 rounds and more; after a few for all files it goes on until its lanes agree."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from jpeg_rounds import count_rounds

    late = [open_file(data) for data in LATE.values()]
    shape = LaneShape(64, 64, 3)
    counted = count_rounds(late, shape)
    assert ((counted > 0).sum(axis=0) >= 40).all()
    # Several segments of a file, of which some go on; and a file that has agreed.
    restarted = open_file(encode(noise(16, 24), quality=100, restart_marker_blocks=2))
    easy = open_file(encode(photo(17, 9), quality=5))
    for files in (late, [restarted, easy]):
        batch, inputs = pack_files(files, shape.bits)
        decoder = new_decoder(batch, inputs, shape)
        decoder.decode_coefficients()
        assert not any(check(*pair) for pair in zip(files, results(decoder, batch), strict=True))
        if files is late:
            in_rounds = decoder._entropy.counts[:, 0].tolist()
            assert in_rounds == counted[: shape.rounds + 1].sum(axis=1).tolist()


def test_lanes_that_do_not_agree_are_noticed() -> None:
    hard = open_file(encode(noise(24, 24), quality=90))
    easy = open_file(encode(photo(17, 9), quality=5))
    count = entropy._count

    def overlook(grid: Any, tensors: Any, *arguments: Any, **constants: Any) -> None:
        count(grid, tensors, *arguments, **constants)
        tensors[LATE_SEGMENTS].zero_()

    with mock.patch.object(entropy, "_count", overlook):
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
