"""Batches whose JPEG files the kernels decode out of the block that they travel in."""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
import torch
from image.cases import encoded, opener
from image.check import assert_same_bits, check_pipeline, device_in_use, lazy_batch
from image.decode.test_bad_input import handles, test_damaged_images_are_skipped_or_replaced  # noqa: F401
from image.jpeg_files import SAMPLINGS, check_files, jpeg, stock, watched_pillow
from PIL import Image
from torchvision import transforms as v1

import torch_sink
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode import jpeg_block
from torch_sink.image.decode import jpeg_decoder as jpeg_decode
from torch_sink.image.decode.encoded import EncodedSource, encoded_source
from torch_sink.image.decode.jpeg_block import lay_out_jpegs
from torch_sink.image.decode.jpeg_decoder import block_on_device
from torch_sink.image.decode.source import Box
from torch_sink.image.run import device
from torch_sink.triton_kernels.shapes import LaneShape

PIPELINE = v1.Compose([v1.RandomCrop((9, 7)), v1.RandomHorizontalFlip(), v1.ToTensor()])
LIKE = {"quality": 20}
IN_KERNELS = [
    *(jpeg(21, 19, name, seed=seed, **LIKE) for seed, name in enumerate(SAMPLINGS)),
    jpeg(20, 12, "4:2:0", restart_blocks=1, **LIKE),
    jpeg(9, 17, "4:4:4", restart_blocks=2, **LIKE),
    jpeg(16, 12, **LIKE)[:2] + b"\xff\xfe\x00\x09comment" + jpeg(16, 12, **LIKE)[2:],
]
BY_PILLOW = [
    jpeg(40, 40, restart_blocks=1, **LIKE).replace(b"\xff\xd1", b"\xff\xd3", 1),
    encoded(20, 16, 5, progressive=True),
    # libjpeg reads over bytes after the last block; the kernels give the file back.
    jpeg(19, 20, **LIKE)[:-2] + bytes(5) + b"\xff\xd9",
]


@pytest.fixture(autouse=True)
def _decoded_by_kernels() -> Iterator[None]:
    torch_sink.set_decode_provider("triton")
    # Few rounds: a damaged table has lanes that never agree.
    with mock.patch.object(jpeg_block, "choose_lane_shape", return_value=LaneShape(256, 512, 6)):
        yield
    torch_sink.set_decode_provider(None)


def in_memory() -> Image.Image:
    return make_photo(40, 30, 4)


def test_files_of_all_kinds_among_pixels() -> None:
    """A PNG file, too, and images in memory: one of them twice."""
    files = [*IN_KERNELS, encoded(22, 20, 6, "RGB", "PNG"), *BY_PILLOW]
    with (
        watched_pillow() as seen,
        mock.patch.object(jpeg_decode, "launch_jpegs", wraps=jpeg_decode.launch_jpegs) as launches,
    ):
        check_pipeline(PIPELINE, [opener(files[0]), in_memory, *map(opener, files[1:]), in_memory], seed=5)
    (launch,) = launches.call_args_list
    assert launch.args[0].batches[0].image_rows == len(IN_KERNELS) + 1
    assert len([source for source in seen if isinstance(source, EncodedSource)]) == len(BY_PILLOW)


def test_a_file_twice_is_decoded_once(tmp_path: Path) -> None:
    path = tmp_path / "file.jpg"
    path.write_bytes(IN_KERNELS[5])
    torch.manual_seed(0)
    expected = [PIPELINE(Image.open(path).convert("RGB")) for _ in range(3)]
    torch.manual_seed(0)
    with torch_sink.image_backend("device", device=device_in_use()):
        recorded = [PIPELINE(Image.open(path).convert("RGB")) for _ in range(3)]
    batch = pickle.loads(pickle.dumps(lazy_batch(recorded)))
    with mock.patch.object(jpeg_decode, "launch_jpegs", wraps=jpeg_decode.launch_jpegs) as launches:
        made = batch.to(device_in_use())
    assert [launch.args[0].batches[0].image_rows for launch in launches.call_args_list] == [1]
    assert_same_bits(made.cpu(), torch.stack(expected))


@pytest.mark.parametrize("others", [[], [encoded(22, 20, 6, "RGB", "PNG")]], ids=["", "a PNG file"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_stages_share_memory_with_the_pixels(others: list[bytes], layout: torch.memory_format) -> None:
    """A batch of photographs has as many bytes between stages as it has pixels."""
    pipeline = v1.Compose([v1.Resize((9, 7)), v1.ToTensor()])
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = lazy_batch([pipeline(opener(data)()) for data in [*IN_KERNELS[:2], *others]])
    with (
        mock.patch.object(device, "Launches", wraps=device.Launches) as begun,
        mock.patch.object(jpeg_decode, "JpegDecoder", wraps=jpeg_decode.JpegDecoder) as decoders,
    ):
        batch.__torch_sink_execute__(device_in_use(), memory_format=layout)
    (launches,), (decoder,) = begun.call_args_list, decoders.call_args_list
    program, memory, _, places = launches.args
    pixels = decoder.kwargs["pixels"]
    assert memory.untyped_storage().nbytes() == program.workspace_bytes + program.jpegs.pixels_bytes
    assert pixels.untyped_storage().data_ptr() == memory.data_ptr()
    assert pixels.storage_offset() == program.workspace_bytes > 0
    assert (places is None) == (not others)


class Counted(jpeg_decode.JpegDecoder):
    """A decoder that notes how many there are at a time."""

    alive: ClassVar[weakref.WeakSet[Counted]] = weakref.WeakSet()
    most = 0

    def launch(self) -> None:
        Counted.alive.add(self)
        Counted.most = max(Counted.most, len(Counted.alive))
        super().launch()


def test_a_batch_too_large_for_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, and with places that say where each image lies; the memory of one part is free for the next but one."""
    files = IN_KERNELS[5:]
    sources = [encoded_source(data, "a file", "RGB") for data in files]
    laid_out = lay_out_jpegs([source for source in sources if source is not None])
    boxes = laid_out.whole_images()
    boxes[:, 0], boxes[:, 2], boxes[1] = 3, 5, 0
    monkeypatch.setattr(jpeg_block, "_MOST_BLOCKS", 10)
    monkeypatch.setattr(jpeg_decode, "JpegDecoder", Counted)
    plan, places = jpeg_block.plan_jpegs(laid_out, boxes, laid_out.chunks.add_array)
    pixels = torch.empty(plan.pixels_bytes, dtype=torch.uint8, device=device_in_use())
    status = jpeg_decode.launch_jpegs(plan, block_on_device(laid_out, pixels.device), pixels)
    assert len(plan.batches) == 3
    assert Counted.most <= 2
    assert not status.any()
    assert len(status) == len(boxes)
    for data, place, box in zip(files, places.tolist(), map(Box._make, boxes.tolist()), strict=True):
        expected = stock(data)[:, box.top : box.top + box.height, box.left : box.left + box.width]
        image = jpeg_decode._decoded(pixels, place, box, len(expected))
        assert torch.equal(image.pixels.cpu(), expected)
        if box.width:
            assert [place[0] + pixels.data_ptr() - image.pixels.data_ptr(), *place[1:]] == [*image.place]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_collection_of_odd_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCH_SINK_ODD_JPEGS names a folder of odd and broken JPEG files."""
    folder = os.environ.get("TORCH_SINK_ODD_JPEGS")
    if not folder:
        pytest.skip("TORCH_SINK_ODD_JPEGS names no folder of odd JPEG files")
    files = [path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
    small = [data for data in files if len(data) < 40_000]
    monkeypatch.setattr(Image, "DecompressionBombError", OSError)
    by_pillow = check_files(small, device_in_use())
    assert 0 < len(by_pillow) < len(small)
