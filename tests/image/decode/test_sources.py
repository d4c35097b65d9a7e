"""Files of every kind, opened in every way, and the pipelines that open them themselves."""

from __future__ import annotations

import io
import mmap
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision import transforms
from torchvision.datasets.folder import default_loader
from torchvision.io import decode_image, read_image
from torchvision.transforms import v2

import torch_sink
from image.check import assert_same_bits, check_pipeline
from image.source_files import FILES, PIPELINE, assert_same_batches, turned

pytestmark = pytest.mark.halved


def opened(source: Any) -> Image.Image:
    with Image.open(source) as image:
        return image.convert("RGB")


def opened_by_user(path: Path) -> Image.Image:
    with path.open("rb") as file:
        return Image.open(file).convert("RGB")


def mapped(path: Path) -> Image.Image:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return Image.open(memory).convert("RGB")  # type: ignore[arg-type]


WAYS: dict[str, Callable[[Path], Image.Image]] = {
    "loader": lambda path: default_loader(str(path)),
    "path": opened,
    "name": lambda path: opened(str(path)),
    "file": opened_by_user,
    "bytes": lambda path: opened(io.BytesIO(path.read_bytes())),
    "memory-mapped": mapped,
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_in_every_way(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(FILES[name]())
    # Pillow seeks beyond the end of such files, which a mapping refuses.
    refused = ("memory-mapped",) if name.startswith(("WebP", "GIF")) else ()
    ways = [way for kind, way in WAYS.items() if kind not in refused]
    check_pipeline(PIPELINE, [lambda way=way: way(path) for way in ways], seed=3)


# --- tensors decoded by torchvision


def decoded_from_bytes(path: Path) -> torch.Tensor:
    return decode_image(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), mode="RGB")


def decoded_from_file(path: Path) -> torch.Tensor:
    return read_image(str(path), mode="RGB")


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
@pytest.mark.parametrize("decode", [decoded_from_bytes, decoded_from_file])
def test_tensors_decoded_by_torchvision_are_ordinary_ones(tmp_path: Path, decode: Any) -> None:
    """torchvision decodes into memory on the CPU; such tensors, and what follows, are stock code's."""
    path = tmp_path / "file.jpg"
    path.write_bytes(FILES["JPEG, baseline"]())
    pipeline = v2.Compose(
        [v2.RandomResizedCrop(16), v2.ColorJitter(0.4, 0.4, 0.4, 0.1), v2.ToDtype(torch.float32, scale=True)]
    )

    def batch() -> list[torch.Tensor]:
        torch.manual_seed(2)
        return list(DataLoader([pipeline(decode(path)) for _ in range(3)], batch_size=3))  # type: ignore[arg-type]

    expected = batch()
    with torch_sink.image_backend("device", device="cpu", strict=True):
        (made,) = batch()
    assert_same_bits(made, expected[0])


# --- pipelines that open Pillow images themselves


class Tar(IterableDataset[Any]):
    """Samples `number.jpg` and `number.cls` of an archive, decoded as WebDataset's `decode("pil")` does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        sample: dict[str, Any] = {}
        with tarfile.open(self.path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                sample[member.name.split(".")[1]] = file.read()
                if len(sample) == 2:
                    with io.BytesIO(sample["jpg"]) as stream:
                        image = Image.open(stream)
                        image.load()
                        image = image.convert("RGB")
                    yield PIPELINE(image), int(sample["cls"])
                    sample = {}


class Table(Dataset[Any]):
    """Rows of encoded images, decoded as the `Image` feature of Hugging Face's datasets does."""

    def __init__(self, rows: list[bytes]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(self.rows[index]))
        image.load()
        if image.getexif().get(ExifTags.Base.Orientation) is not None:
            image = ImageOps.exif_transpose(image)
        if image.mode != "RGB":
            image = image.convert("RGB")
        return PIPELINE(image), index


def test_archives_of_files(tmp_path: Path) -> None:
    names = [name for name in FILES if name.startswith("JPEG")]
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for number, name in enumerate(names):
            for kind, data in (("jpg", FILES[name]()), ("cls", str(number).encode())):
                member = tarfile.TarInfo(f"{number}.{kind}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    assert_same_batches(lambda: Tar(tmp_path / "shard.tar"))


def test_tables_of_encoded_images() -> None:
    rows = [FILES[name]() for name in FILES if name.startswith("JPEG") and "CMYK" not in name and "YCCK" not in name]
    assert_same_batches(lambda: Table(rows))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_tables_of_every_kind_of_image() -> None:
    """What has no kernel for its own mode may run in stock code before it is converted."""
    rows = [make() for make in FILES.values()]
    torch.manual_seed(9)
    expected = [Table(rows)[index][0] for index in range(len(rows))]
    with torch_sink.image_backend("device", device="cpu"):
        torch.manual_seed(9)
        for index, stock in enumerate(expected):
            assert_same_bits(Table(rows)[index][0].materialize(), stock)


def test_turning_upright_is_seen_by_later_calls(tmp_path: Path) -> None:
    """The orientation goes away with `exif_transpose`, also for what is made from its result."""
    path = tmp_path / "file.jpg"
    path.write_bytes(turned())

    def upright() -> list[Any]:
        image = ImageOps.exif_transpose(Image.open(path))
        small = image.convert("L").resize((9, 8))
        again = ImageOps.exif_transpose(small)
        return [dict(item.getexif()) for item in (image, small, again)] + [again.size, again.tobytes()]

    expected = upright()
    with torch_sink.image_backend("device", device="cpu"):
        image = ImageOps.exif_transpose(Image.open(path))
        assert not torch_sink.fallback_report()
        assert image.is_recording
        assert upright() == expected
        in_place = Image.open(path)
        ImageOps.exif_transpose(in_place, in_place=True)
        assert in_place.convert("L").resize((9, 8)).tobytes() == expected[-1]


def test_loading_the_pixels_of_a_file_waits_until_one_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file.jpg"
    path.write_bytes(FILES["JPEG, baseline"]())
    with torch_sink.image_backend("device", device="cpu"):
        image = Image.open(path)
        pixels, converted = image.load(), image.convert("RGB")
        same = converted.load()
        assert not torch_sink.fallback_report()
        assert converted.is_recording
        assert pixels[3, 4] == same[3, 4] == Image.open(path).getpixel((3, 4))
        same[3, 4] = (1, 2, 3)
        assert converted.getpixel((3, 4)) == (1, 2, 3)
        assert torch_sink.fallback_report()


def _damaged(data: bytes, draws: random.Random) -> bytes:
    """A file with a byte changed or bits flipped, a piece left out, or a marker written into it; its end stays."""
    begin = draws.randrange(2, len(data) - 2)
    left_out = draws.choice((0, 0, 1, 1, 30))
    added = draws.choice(
        (b"", draws.randbytes(1), b"\xff" + draws.choice((b"\xd8", b"\xc0", b"\xd3", b"\xda", b"\xc8")))
    )
    return data[:begin] + added + data[min(begin + left_out, len(data) - 2) :]


@pytest.mark.parametrize(
    "steps",
    [
        lambda image: image,
        lambda image: image.convert("RGB"),
        lambda image: image.convert("L").resize((9, 8)),
        lambda image: transforms.functional.hflip(image.convert("RGB")),
    ],
    ids=["file", "converted", "resized", "flipped"],
)
@pytest.mark.sampled(2)
def test_load_raises_for_a_damaged_file_as_in_stock_code(steps: Any) -> None:
    """A dataset that guards its files by `load()` meets their errors there, and never when its batch is made."""
    draws, files = random.Random(4), [FILES[name]() for name in FILES if name.startswith("JPEG")]

    def loaded(data: bytes) -> Any:
        try:
            image = steps(Image.open(io.BytesIO(data)))
            image.load()
        except Exception:
            return None
        return image

    raised = 0
    for _ in range(150):
        data = _damaged(draws.choice(files), draws)
        expected = loaded(data)
        with torch_sink.image_backend("device", device="cpu"):
            image = loaded(data)
            assert (image is None) == (expected is None)
            raised += image is None
            if image is not None:
                assert image.tobytes() == expected.tobytes()
    assert 20 < raised < 100
