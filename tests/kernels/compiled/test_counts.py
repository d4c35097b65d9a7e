"""The counts in the record of the kernels."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from torch_sink.cli.photos import photo_file
from torch_sink.image.decode.encoded import EncodedSource, read_jpeg_header
from torch_sink.image.decode.jpeg_block import jpeg_file
from torch_sink.triton_kernels.jpeg import jpeg_variants
from torch_sink.triton_kernels.shapes import LANE_SHAPES

pytestmark = pytest.mark.once

BENCHMARKS = Path(__file__).resolve().parents[3] / "examples" / "benchmarks"
COUNTS = json.loads((BENCHMARKS / "results" / "kernels.json").read_text())["counts"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import kernel_counts
    finally:
        sys.path.remove(str(BENCHMARKS))
    return kernel_counts


def test_the_record_holds_every_pipeline_and_every_kernel_of_the_decoder(script: ModuleType) -> None:
    assert [row["name"] for row in COUNTS["pipelines"]] == list(script.pipelines())
    kernels = {variant.kernel.__name__.removesuffix("_kernel").replace("_", " ") for variant in jpeg_variants(32)}
    assert len(COUNTS["decoder"]) == len(LANE_SHAPES)
    for decoder in COUNTS["decoder"]:
        assert {row["name"] for row in decoder} == kernels | {"all"}
        for key in ("instructions_a_pixel", "wavefronts_a_pixel"):
            assert sum(row[key] for row in decoder[:-1]) == pytest.approx(decoder[-1][key])
    shortest, *_, longest = COUNTS["decoder"]
    assert shortest[-1]["instructions_a_pixel"] > longest[-1]["instructions_a_pixel"], "short lanes decode more twice"


def test_generated_files_are_like_those_of_imagenet() -> None:
    """Of 1,000 of its photographs 784 have chroma of full size; 120 of them have 110 kB on average."""
    made = [photo_file(seed) for seed in range(16)]
    assert sum(map(len, made)) / len(made) == pytest.approx(110_000, rel=0.1)
    headers = [read_jpeg_header(data) for data in made]
    files = [
        jpeg_file(EncodedSource(data, "", header, header.mode)) for data, header in zip(made, headers, strict=True)
    ]
    assert sum(file.counts[1] == 3 for file in files) / len(files) == pytest.approx(0.784, abs=0.05)


def test_counts_of_small_images(script: ModuleType) -> None:
    """The same work twice is the same for a pixel; the jitter is more of it."""
    name, jittered = list(script.pipelines())[:2]
    one, two = (script.count_pipeline(name, script.pipelines()[name], images, (40, 30)) for images in (1, 2))
    more = script.count_pipeline(jittered, script.pipelines()[jittered], 1, (40, 30))
    assert one["instructions_a_pixel"] == pytest.approx(two["instructions_a_pixel"], rel=0.2)
    assert more["instructions_a_pixel"] > 1.5 * one["instructions_a_pixel"]
    assert 1 <= one["sectors_a_request"]["st.global"] <= 8


@pytest.mark.slow
def test_the_record_is_as_counted(script: ModuleType) -> None:
    folder = os.environ.get("TORCH_SINK_PHOTOS")
    if COUNTS["files"]["given"] and not folder:
        pytest.skip("the record is that of photographs, and TORCH_SINK_PHOTOS names none")
    made = script.count_all(COUNTS["images"], Path(folder) if COUNTS["files"]["given"] else None)
    tables = zip((made["pipelines"], *made["decoder"]), (COUNTS["pipelines"], *COUNTS["decoder"]), strict=True)
    for row, before in (pair for rows in tables for pair in zip(*rows, strict=True)):
        assert row["instructions_a_pixel"] == pytest.approx(before["instructions_a_pixel"], rel=0.1), row["name"]
