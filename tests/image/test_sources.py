"""Files of every kind, opened in every way, and the datasets that hand them out."""

from __future__ import annotations

import gzip
import io
import mmap
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchvision import datasets, transforms
from torchvision.datasets import cifar
from torchvision.datasets.folder import default_loader
from torchvision.io import decode_image, read_image
from torchvision.transforms import v2

import torch_sink
from image.check import assert_same_bits, check_pipeline
from torch_sink.cli.photos import make_photo

PHOTO = make_photo(64, 64, 5)
GRAY, ALPHA = PHOTO.convert("L"), PHOTO.copy()
ALPHA.putalpha(GRAY)
PIPELINE = transforms.Compose(
    [transforms.RandomResizedCrop(16), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def ycck() -> bytes:
    """A CMYK file that says that its colours are YCCK."""
    data = saved(PHOTO.convert("CMYK"), "JPEG")
    transform = data.index(b"Adobe") + 11
    return data[:transform] + b"\x02" + data[transform + 1 :]


def chroma_halved_vertically() -> bytes:
    """4:4:0: the units of a 4:2:2 file, read as columns; a square image has as many of either."""
    data = saved(PHOTO, "JPEG", subsampling="4:2:2")
    factors = data.index(b"\xff\xc0") + 11
    assert data[factors] == 0x21
    return data[:factors] + b"\x12" + data[factors + 1 :]


def turned() -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return saved(PHOTO.crop((0, 0, 64, 40)), "JPEG", exif=exif)


FILES: dict[str, Callable[[], bytes]] = {
    "JPEG, baseline": lambda: saved(PHOTO, "JPEG", quality=90),
    "JPEG, progressive": lambda: saved(PHOTO, "JPEG", progressive=True),
    "JPEG, optimised": lambda: saved(PHOTO, "JPEG", optimize=True),
    "JPEG, gray": lambda: saved(GRAY, "JPEG"),
    "JPEG, CMYK": lambda: saved(PHOTO.convert("CMYK"), "JPEG"),
    "JPEG, YCCK": ycck,
    "JPEG, stored as RGB": lambda: saved(PHOTO, "JPEG", keep_rgb=True),
    "JPEG, 4:4:4": lambda: saved(PHOTO, "JPEG", subsampling="4:4:4"),
    "JPEG, 4:2:2": lambda: saved(PHOTO, "JPEG", subsampling="4:2:2"),
    "JPEG, 4:2:0": lambda: saved(PHOTO, "JPEG", subsampling="4:2:0"),
    "JPEG, 4:4:0": chroma_halved_vertically,
    "JPEG, restart markers": lambda: saved(PHOTO, "JPEG", restart_marker_blocks=2),
    "JPEG, EXIF orientation": turned,
    "PNG": lambda: saved(PHOTO, "PNG"),
    "PNG, alpha": lambda: saved(ALPHA, "PNG"),
    "PNG, gray and alpha": lambda: saved(ALPHA.convert("LA"), "PNG"),
    "PNG, palette": lambda: saved(PHOTO.quantize(32), "PNG"),
    "PNG, transparent palette": lambda: saved(PHOTO.quantize(32), "PNG", transparency=3),
    "PNG, 1 bit": lambda: saved(PHOTO.convert("1"), "PNG"),
    "PNG, 16 bits": lambda: saved(Image.fromarray(np.asarray(GRAY).astype(np.uint16) * 257), "PNG"),
    "WebP": lambda: saved(PHOTO, "WEBP"),
    "WebP, lossless, alpha": lambda: saved(ALPHA, "WEBP", lossless=True),
    "GIF": lambda: saved(PHOTO, "GIF"),
    "GIF, animated": lambda: saved(PHOTO, "GIF", save_all=True, append_images=[ImageOps.mirror(PHOTO)]),
    "TIFF": lambda: saved(PHOTO, "TIFF"),
    "TIFF, LZW, CMYK": lambda: saved(PHOTO.convert("CMYK"), "TIFF", compression="tiff_lzw"),
    "TIFF, float": lambda: saved(GRAY.convert("F"), "TIFF"),
    "BMP": lambda: saved(PHOTO, "BMP"),
    "BMP, palette": lambda: saved(PHOTO.quantize(16), "BMP"),
}


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


# --- datasets of torchvision


def assert_same_batches(make: Callable[[], Any], *, batch_size: int | None = 4, collate_fn: Any = None) -> None:
    """The batches of a loader in stock code and with the backend, where fallbacks are forbidden."""

    def batches() -> list[list[torch.Tensor]]:
        torch.manual_seed(9)
        return list(DataLoader(make(), batch_size=batch_size, collate_fn=collate_fn))

    expected = batches()
    with torch_sink.image_backend("device", device="cpu", strict=True):
        made = batches()
    assert len(made) == len(expected) > 0
    for (images, target), (stock_images, stock_target) in zip(made, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(target, stock_target)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of file, in two folders."""
    root = tmp_path_factory.mktemp("classes")
    for number, (name, make) in enumerate(FILES.items()):
        folder = root / str(number % 2)
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02}.{name.split(',')[0].lower()}").write_bytes(make())
    return root


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_image_folder(classes: Path) -> None:
    assert_same_batches(lambda: datasets.ImageFolder(str(classes), PIPELINE))


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_dataset_folder_with_a_loader_of_its_own(classes: Path) -> None:
    assert_same_batches(lambda: datasets.DatasetFolder(str(classes), opened, ("jpeg", "png", "webp"), PIPELINE))


@pytest.mark.parametrize("kind", [datasets.CIFAR10, datasets.CIFAR100])
def test_cifar(tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "check_integrity", lambda *args: True)  # the files are our own
    label = "labels" if kind is datasets.CIFAR10 else "fine_labels"
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    pixels = np.stack([np.asarray(make_photo(32, 32, seed)).transpose(2, 0, 1).ravel() for seed in range(3)])
    for name, _ in kind.train_list:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, label: [3, 1, 2]}))
    (folder / kind.meta["filename"]).write_bytes(pickle.dumps({kind.meta["key"]: list("abcdef")}))
    transform = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )
    assert_same_batches(lambda: kind(str(tmp_path), transform=transform))


@pytest.mark.parametrize("kind", [datasets.MNIST, datasets.FashionMNIST])
def test_mnist(tmp_path: Path, kind: Any) -> None:
    raw = tmp_path / kind.__name__ / "raw"
    raw.mkdir(parents=True)
    pixels = np.stack([np.asarray(make_photo(28, 28, seed).convert("L")) for seed in range(5)])
    for part in ("train", "t10k"):
        files = {
            f"{part}-images-idx3-ubyte": bytes([0, 0, 8, 3, *np.array([5, 28, 28], ">u4").tobytes()])
            + pixels.tobytes(),
            f"{part}-labels-idx1-ubyte": bytes([0, 0, 8, 1, *np.array([5], ">u4").tobytes(), 1, 2, 3, 4, 5]),
        }
        for name, data in files.items():
            (raw / name).write_bytes(data)
            (raw / f"{name}.gz").write_bytes(gzip.compress(data))
    transform = transforms.Compose(
        [transforms.RandomRotation(10), transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    assert_same_batches(lambda: kind(str(tmp_path), transform=transform))


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
            assert_same_bits(Table(rows)[index][0].materialise(), stock)


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
