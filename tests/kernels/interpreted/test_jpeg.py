"""JPEG files through the kernels, from bytes to pixels: Pillow's, bit for bit, and Pillow's errors.

An interpreted batch costs about the same with few images and with many, so there are few batches.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from image.cases import encoded, opener
from image.check import INTERPRETED, check_pipeline, device_in_use
from image.jpeg_files import (
    COLUMN,
    CONTENTS,
    DAMAGES,
    SAMPLINGS,
    check_files,
    damaged,
    jpeg,
    stock,
    watched_pillow,
    with_quantization,
)
from PIL import Image
from torchvision import transforms as v1

import torch_sink
from torch_sink import decode_images, decode_providers
from torch_sink.image.core.proof import Verdict
from torch_sink.image.decode import jpeg_block
from torch_sink.image.decode import jpeg_decoder as jpeg_decode
from torch_sink.image.decode.encoded import EncodedSource, encoded_source
from torch_sink.image.decode.jpeg_decoder import JpegDecoder
from torch_sink.image.decode.jpeg_proof import JPEG_KERNELS
from torch_sink.image.decode.providers import decode_sources
from torch_sink.image.decode.source import Box
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LaneShape

BENCHMARKS = Path(__file__).resolve().parents[3] / "examples" / "benchmarks"
LONG, SHORT = LANE_SHAPES[-1], LaneShape(64, 64, 1)
SIZES = [(1, 1), (3, 17), (8, 8), (5, 33), (33, 31)]


def source(data: bytes, mode: str = "RGB") -> EncodedSource:
    found = encoded_source(data, "a file", mode)
    assert found is not None
    return found


def test_every_sampling_in_sizes_around_a_unit() -> None:
    chosen = zip(SIZES * len(SAMPLINGS), sorted(SAMPLINGS * len(SIZES)), range(100), strict=False)
    files = [jpeg(*size, sampling, seed=seed, quality=(30, 75, 95)[seed % 3]) for size, sampling, seed in chosen]
    assert check_files(files, device_in_use()) == []


def test_contents_tables_and_restart_markers() -> None:
    files = []
    for seed, content in enumerate(CONTENTS):
        restart = 0 if seed % 2 else 5
        files.append(jpeg(40, 24, SAMPLINGS[seed % 4], content=content, seed=seed, quality=1, optimize=True))
        files.append(
            jpeg(24, 33, SAMPLINGS[(seed + 2) % 5], content=content, seed=seed, quality=75, restart_blocks=restart)
        )
    assert check_files(files, device_in_use()) == []


def test_modes_and_files_that_the_kernels_do_not_cover() -> None:
    covered = [jpeg(19, 21, "4:2:0"), jpeg(21, 19, "gray"), jpeg(20, 20, "4:4:4", quality=50)]
    others = [
        encoded(20, 20, 4, "CMYK"),
        encoded(20, 20, 5, progressive=True),
        encoded(20, 20, 6, "RGB", "PNG"),
        # A restart marker out of order.
        jpeg(20, 20, restart_blocks=1).replace(b"\xff\xd1", b"\xff\xd3", 1),
    ]
    assert check_files([*covered, *others], device_in_use(), "L") == [3, 4, 5, 6]


def test_coefficients_beyond_sixteen_bits() -> None:
    files = []
    for seed in range(6):
        chance = random.Random(seed)
        values = [chance.choice([1, 255, 1000, 5000, 32767, 65535, 0]) for _ in range(64)]
        data = jpeg(24, 16, SAMPLINGS[seed % 4], content="noise", seed=seed, quality=50)
        files.append(with_quantization(data, values))
    assert len(check_files(files, device_in_use())) < len(files)


def damaged_files(count: int, seed: int) -> list[bytes]:
    """Small files of every sampling with damage of every kind."""
    files = []
    for number in range(seed, seed + count):
        chance = random.Random(number)
        sampling = chance.choice(SAMPLINGS)
        restart = chance.choice((0, 0, 2))
        data = jpeg(
            chance.randrange(1, 40), chance.randrange(1, 40), sampling, seed=number % 7, restart_blocks=restart,
            quality=chance.choice((20, 75, 95)), content=chance.choice(CONTENTS[:2]),
        )  # fmt: skip
        files.append(damaged(data, DAMAGES[number % len(DAMAGES)], number))
    return files


def test_damaged_files() -> None:
    check_files(damaged_files(15, 0), device_in_use())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_five_hundred_damaged_files(part: int) -> None:
    check_files(damaged_files(50, 1000 + 50 * part), device_in_use())


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_quality(sampling: str) -> None:
    files = [jpeg(29, 27, sampling, seed=quality % 9, quality=quality) for quality in range(1, 101)]
    assert len(check_files(files, device_in_use())) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_larger_sizes(sampling: str) -> None:
    chance = random.Random(sampling)
    sizes = [(chance.randrange(1, 129), chance.randrange(1, 129)) for _ in range(12)]
    files = [
        jpeg(*size, sampling, seed=seed, optimize=bool(seed % 2), restart_blocks=seed % 4, quality=80)
        for seed, size in enumerate(sizes)
    ]
    assert check_files(files, device_in_use()) == []


@pytest.mark.slow
def test_whole_photographs(photos: Path) -> None:
    by_sampling: dict[tuple[str, tuple[int, int]], bytes] = {}
    for path in sorted(photos.rglob("*.[jJ][pP]*[gG]")):
        header = source(path.read_bytes()).header
        if header.scan is not None:
            by_sampling.setdefault((header.mode, header.scan.sampling), path.read_bytes())
    assert by_sampling
    with mock.patch.object(jpeg_block, "choose_lane_shape", return_value=LANE_SHAPES[-1]):
        assert check_files(list(by_sampling.values()), device_in_use()) == []


def check_late(data: bytes, shape: LaneShape) -> None:
    with mock.patch.object(jpeg_block, "choose_lane_shape", return_value=shape._replace(rounds=1)):
        assert check_files([data], device_in_use()) == []


def test_a_file_whose_lanes_agree_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not go to Pillow for that."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from jpeg_rounds import count_rounds, opened

    made = jpeg(16, 8, "4:4:4", content="noise", quality=100)
    assert len(count_rounds([opened(made)], SHORT)) >= 40
    check_late(made, SHORT)


@pytest.mark.slow
def test_a_late_file_in_every_batch() -> None:
    """One of 256 goes on alone, each time at another place: none goes to Pillow, and no other pixel changes."""
    late = jpeg(16, 8, "4:4:4", content="noise", quality=100)
    easy = [jpeg(16, 16, SAMPLINGS[seed % len(SAMPLINGS)], seed=seed, quality=30) for seed in range(255)]
    chance = random.Random(0)
    with mock.patch.object(jpeg_block, "choose_lane_shape", return_value=SHORT._replace(rounds=2)):
        for _ in range(5):
            chance.shuffle(easy)
            at = chance.randrange(256)
            assert check_files([*easy[:at], late, *easy[at:]], device_in_use()) == []


@pytest.mark.slow
def test_the_photograph_whose_lanes_agree_last(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from jpeg_rounds import count_rounds, opened

    contents = (path.read_bytes() for path in sorted(photos.rglob("*.[jJ][pP]*[gG]")))
    late = max((file for data in contents if (file := opened(data))), key=lambda file: len(count_rounds([file], LONG)))
    check_late(late.source.data, LONG)


def test_boxes() -> None:
    sources, boxes = [], []
    for seed, sampling in enumerate(SAMPLINGS):
        width, height = 50 + seed, 47
        sources.append(source(jpeg(width, height, sampling, seed=seed)))
        chance = random.Random(seed)
        left, top = chance.randrange(width), chance.randrange(height)
        boxes.append(Box(left, top, chance.randrange(1, width - left + 1), chance.randrange(1, height - top + 1)))
    with watched_pillow() as seen:
        found = decode_sources(sources, torch.device(device_in_use()), "triton", boxes)
    assert not seen
    for image, part, item in zip(found, boxes, sources, strict=True):
        expected = stock(item.data)
        assert expected is not None
        assert image.box == part
        rows, columns = slice(part.top, part.top + part.height), slice(part.left, part.left + part.width)
        assert torch.equal(image.pixels.cpu(), expected[:, rows, columns])


@pytest.fixture
def _decoded_by_kernels() -> Iterator[None]:
    torch_sink.set_decode_provider("triton")
    yield
    torch_sink.set_decode_provider(None)


@pytest.mark.usefixtures("_decoded_by_kernels")
def test_batches_decode_what_their_crops_read() -> None:
    crop = v1.RandomResizedCrop((13, 19), scale=(0.1, 0.4))
    pipeline = v1.Compose([crop, v1.RandomHorizontalFlip(), v1.ToTensor()])
    openers = [
        opener(jpeg(61, 47, "4:2:0")),
        opener(jpeg(40, 53, "4:4:4")),
        opener(encoded(40, 56, 5, progressive=True)),
    ]
    with mock.patch.object(jpeg_decode, "launch_jpegs", wraps=jpeg_decode.launch_jpegs) as calls:
        check_pipeline(pipeline, openers, seed=3)
    ((plan, block, _),) = [call.args for call in calls.call_args_list]
    windows = jpeg_decode.Inputs.of_block(block, plan.batches[0]).windows.cpu()
    sizes = windows[:, [COLUMN["BOX_WIDTH"], COLUMN["BOX_HEIGHT"]]].numpy()
    assert len(sizes) == 2
    assert sizes.prod(axis=1).sum() < 0.5 * (61 * 47 + 40 * 53)


@pytest.mark.usefixtures("_decoded_by_kernels")
def test_the_plan_and_the_list_of_providers_name_the_kernels() -> None:
    assert decode_providers()[0] == "triton"
    assert decode_providers()[-1] == "pillow"
    with torch_sink.image_backend("device", device=device_in_use()):
        handles = [
            v1.Compose([v1.Resize((4, 4)), v1.ToTensor()])(Image.open(io.BytesIO(data)))
            for data in (jpeg(20, 20), encoded(20, 20, 5, progressive=True))
        ]
        batch = torch.utils.data.default_collate(handles)
        assert str(batch.plan).startswith("decode: 1 by triton, 1 by pillow")


@pytest.mark.skipif(not INTERPRETED, reason="a device decodes with them unasked")
def test_the_interpreter_does_not_decode_unasked() -> None:
    with mock.patch.object(jpeg_decode, "decode_jpegs", side_effect=AssertionError):
        decode_images([jpeg(8, 8)], device=device_in_use())


def test_the_kernels_prove_themselves() -> None:
    assert JPEG_KERNELS.prove(torch.device(device_in_use())) == Verdict(True)


def test_a_fault_of_one_sampling_is_found() -> None:
    make_pixels = JpegDecoder.make_pixels

    def without_one_bit(decoder: JpegDecoder) -> None:
        make_pixels(decoder)
        decoder.pixels[-20] ^= 1  # of the cropped file, the last

    with mock.patch.object(JpegDecoder, "make_pixels", without_one_bit):
        found = JPEG_KERNELS.prove(torch.device(device_in_use()))
    assert not found.holds
    assert "1 of 1980 values of a 4:2:0, cropped file differ" in found.reason
