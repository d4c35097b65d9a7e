"""Files that torchvision decodes to tensors: stock torchvision's pixels, strides and errors, recorded."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from PIL import ExifTags, Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image, decode_jpeg, decode_png, read_file, read_image
from torchvision.transforms import v2

import torch_sink
from image.cases import RESIZES_BYTES_IN_INTEGERS, encoded
from image.check import assert_same_bits, device_in_use
from image.decode.test_bad_input import BROKEN, outcome
from image.run.test_collate import assert_same_structure, stock_and_lazy
from image.source_files import FILES, PHOTO, saved
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.handles import file
from torch_sink.image.handles.tensor import Handle, LazyTensor

pytestmark = [
    pytest.mark.halved,
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Webp does not support grayscale:UserWarning"),
    pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning"),
]

MODES = (ImageReadMode.UNCHANGED, ImageReadMode.GRAY, ImageReadMode.RGB)
# Decoded on the device; all other files by torchvision, in the worker.
ON_DEVICE = ("baseline", "optimized", "gray", "4:4:4", "4:2:2", "4:2:0", "restart markers", "EXIF orientation")
STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def with_orientation(number: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = number
    return saved(PHOTO.crop((0, 0, 50, 41)), "JPEG", exif=exif, **options)


def both(decode: Callable[[], Any]) -> tuple[Any, Any]:
    """What stock torchvision gives, and what the backend gives; an exception as its type and text."""
    results = []
    for name, settings in (("PIL", {}), ("device", {"device": device_in_use()})):
        with torch_sink.image_backend(name, **settings):
            try:
                results.append(decode())
            except Exception as error:
                results.append((type(error), str(error)))
    return results[0], results[1]


def check_same(stock: Any, made: Any) -> bool:
    """Compares them; True where a file waits to be decoded."""
    if not isinstance(stock, torch.Tensor):
        assert made == stock
        return False
    assert made.shape == stock.shape
    waits = type(made) is LazyTensor and isinstance(made.lazy_recording.source, EncodedSource)
    assert_same_bits(made.materialize() if isinstance(made, Handle) else made, stock)
    return waits


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.sampled(30)
def test_every_kind_of_file(name: str, is_turned: bool) -> None:
    data = as_tensor(FILES[name]())
    for mode in MODES:
        waits = check_same(*both(lambda mode=mode: decode_image(data, mode, is_turned)))  # type: ignore[misc]
        is_gray = mode == ImageReadMode.GRAY and name != "JPEG, gray"
        if name != "JPEG, 4:4:0":  # decoded on the device where torchvision's libjpeg is as new as Pillow's
            assert waits == (name.startswith("JPEG") and name[6:] in ON_DEVICE and not is_gray)


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation(orientation: int) -> None:
    for options in ({}, {"progressive": True}):
        data = as_tensor(with_orientation(orientation, **options))
        for decode in (decode_image, decode_jpeg):
            for is_turned in (False, True):
                waits = check_same(*both(lambda: decode(data, "RGB", apply_exif_orientation=is_turned)))  # noqa: B023
                assert waits == (not options)


def test_turned_images_in_a_batch() -> None:
    files = [as_tensor(with_orientation(orientation)) for orientation in range(1, 9)]

    def batches() -> list[torch.Tensor]:
        images = [decode_image(file, apply_exif_orientation=True) for file in files]
        return [torch.utils.data.default_collate(images[begin : begin + 4]) for begin in (0, 4)]

    assert_same_structure(*reversed(stock_and_lazy(batches)))


def test_exif_data_that_says_nothing() -> None:
    for segment in (
        b"\xff\xe1\x00\x02",
        b"\xff\xe1\x00\x04ab",
        b"\xff\xe1\x00\x0cExif\0\0MM\0\0",
        b"\xff\xe1\x00\x0aExif\0\0II",
    ):
        plain = saved(PHOTO, "JPEG")
        data = as_tensor(plain[:2] + segment + plain[2:])
        check_same(*both(lambda: decode_image(data, apply_exif_orientation=True)))  # noqa: B023


@pytest.mark.parametrize("name", sorted(set(BROKEN) - {"huge"}))  # for which stock torchvision takes 13 GB
def test_broken_files_raise_what_they_raise(name: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(BROKEN[name])
    for decode in (read_image, decode_image, lambda path: decode_jpeg(read_file(path), "rgb")):
        stock, made = both(lambda: decode(str(path)))  # noqa: B023
        assert not isinstance(stock, torch.Tensor)
        check_same(stock, made)


WRONG: dict[str, Callable[[], Any]] = {
    "no such file": lambda: read_image("nowhere.jpg"),
    "a folder": lambda: decode_image("/"),
    "an unknown mode": lambda: decode_image(as_tensor(saved(PHOTO, "JPEG")), "CMYK"),
    "with alpha": lambda: decode_jpeg(as_tensor(saved(PHOTO, "JPEG")), "RGB_ALPHA"),
    "a PNG as JPEG": lambda: decode_jpeg(as_tensor(saved(PHOTO, "PNG"))),
    "a JPEG as PNG": lambda: decode_png(as_tensor(saved(PHOTO, "JPEG"))),
    "floats": lambda: decode_image(as_tensor(saved(PHOTO, "JPEG")).float()),
    "two dimensions": lambda: decode_jpeg(as_tensor(saved(PHOTO, "JPEG"))[None]),
    "no bytes": lambda: decode_jpeg(torch.zeros(0, dtype=torch.uint8)),
    "an empty list": lambda: decode_jpeg([]),
    "an image": lambda: decode_image(torch.zeros(3, 4, 4, dtype=torch.uint8)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_what_they_raise(name: str) -> None:
    stock, made = both(WRONG[name])
    assert isinstance(stock, tuple)
    assert made == stock


def test_the_ways_to_call_them(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(saved(PHOTO, "JPEG"))
    data = as_tensor(path.read_bytes())
    ways: list[Callable[[], Any]] = [
        lambda: read_image(str(path)),
        lambda: torchvision.io.read_image(str(path), ImageReadMode.RGB),
        lambda: decode_image(str(path), mode="RGB"),
        lambda: decode_image(path),
        lambda: decode_jpeg(read_file(path), mode="unchanged", device="cpu"),
        lambda: decode_jpeg([data, data])[1],
        lambda: decode_jpeg(data, device=torch.device("cpu")),
        lambda: torch.ops.image.decode_image(data, 0),
    ]
    for way in ways:
        assert check_same(*both(way))
    assert not check_same(*both(lambda: torch.jit.script(decode_image)(data)))
    assert not check_same(*both(lambda: torch.ops.image.decode_jpeg.default(data, 0)))


def test_bytes_that_change_after_decoding() -> None:
    data = as_tensor(saved(PHOTO, "JPEG"))
    stock = decode_jpeg(data)
    with torch_sink.image_backend("device", device=device_in_use()):
        made = decode_jpeg(data)
        data.zero_()
        assert_same_bits(made.materialize(), stock)


def test_a_libjpeg_of_torchvision_with_other_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_tensor(saved(PHOTO, "JPEG"))
    stock = decode_jpeg(data)
    operator = torch.ops.image.decode_jpeg
    monkeypatch.setattr(torch.ops.image, "decode_jpeg", lambda *args: operator(*args) ^ 1)
    others = file._samplings_of_their_own.__wrapped__()
    assert others == {(1, 1), (2, 1), (1, 2), (2, 2)}
    monkeypatch.undo()
    assert file._samplings_of_their_own.__wrapped__() <= {(1, 2)}
    monkeypatch.setattr(file, "_samplings_of_their_own", lambda: others)
    with torch_sink.image_backend("device", device=device_in_use()):
        assert not check_same(stock, decode_jpeg(data))


PIPELINES: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "v1, training": lambda: v1.Compose(
        [
            v1.RandomResizedCrop(20, antialias=True),
            v1.RandomHorizontalFlip(),
            v1.RandAugment(),
            v1.ConvertImageDtype(torch.float32),
            v1.Normalize(*STATISTICS),
            v1.RandomErasing(),
        ]
    ),
    "v1, evaluation": lambda: v1.Compose(
        [
            v1.Resize(24, antialias=True),
            v1.CenterCrop(20),
            v1.ConvertImageDtype(torch.float32),
            v1.Normalize(*STATISTICS),
        ]
    ),
    "v2, training": lambda: v2.Compose(
        [
            v2.RandomResizedCrop(20, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.TrivialAugmentWide(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(*STATISTICS),
            v2.ToPureTensor(),
        ]
    ),
    "v2, an image": lambda: v2.Compose(
        [tv_tensors.Image, v2.Resize((22, 24)), v2.RandomCrop(20), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    ),
    "to a Pillow image and back": lambda: v1.Compose([v1.ToPILImage(), v1.RandomResizedCrop(20), v1.ToTensor()]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder of JPEG files and a PNG file."""
    root = tmp_path_factory.mktemp("images")
    (root / "only").mkdir()
    for number in range(5):
        (root / "only" / f"{number}.jpg").write_bytes(encoded(40 + number, 30, number))
    (root / "only" / "5.png").write_bytes(encoded(40, 33, 5, "RGB", "PNG"))
    return root


def check_pipeline(folder: Path, name: str, workers: int) -> None:
    context = "fork" if workers else None

    def batches() -> list[Any]:
        loader = DataLoader(
            ImageFolder(str(folder), PIPELINES[name](), loader=read_image),
            batch_size=3,
            num_workers=workers,
            multiprocessing_context=context,
        )
        made = list(loader)
        if torch_sink.get_image_backend() != "PIL":
            fell_back = {operation for operation, _ in torch_sink.fallback_report().counts}
            assert fell_back <= (
                set() if RESIZES_BYTES_IN_INTEGERS else {"solarize", "autocontrast", "equalize", "posterize"}
            )
        return made

    expected, made = stock_and_lazy(batches)
    assert len(made) == 2
    assert_same_structure(made, expected)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.sampled(6)
def test_pipelines(folder: Path, name: str, workers: int) -> None:
    check_pipeline(folder, name, workers)


class Decoded(Dataset[tuple[torch.Tensor, int]]):
    """Files that torchvision decodes; some are broken."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return v1.functional.resize(decode_image(self.paths[index]), [8, 8], antialias=True), index


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_files_are_skipped(tmp_path: Path, workers: int) -> None:
    files = {f"{name}.jpg": BROKEN[name] for name in sorted(set(BROKEN) - {"huge"})}
    files |= {f"good {number}.jpg": encoded(40, 30, number) for number in range(3)}
    files["missing.jpg"] = b""
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "missing.jpg").unlink()
    dataset = Decoded([tmp_path / name for name in sorted(files)])
    expected = []
    for index in range(len(dataset)):
        with contextlib.suppress(RuntimeError):
            expected.append(dataset[index])
    with torch_sink.image_backend("device", device=device_in_use(), on_decode_error="skip"):
        context = "fork" if workers else None
        batches = DataLoader(dataset, batch_size=4, num_workers=workers, multiprocessing_context=context)
        made = [(images.to(device_in_use()).cpu(), indices) for images, indices in batches]
        assert len(torch_sink.decode_report().files) == len(files) - len(expected)
    assert torch.cat([indices for _, indices in made]).tolist() == [index for _, index in expected]
    assert_same_bits(torch.cat([images for images, _ in made]), torch.stack([image for image, _ in expected]))


@pytest.mark.filterwarnings("ignore")
def test_a_collection_of_odd_files() -> None:
    """TORCH_SINK_ODD_JPEGS names a folder of odd and broken JPEG files."""
    named = os.environ.get("TORCH_SINK_ODD_JPEGS")
    if not named:
        pytest.skip("TORCH_SINK_ODD_JPEGS names no folder of odd JPEG files")
    files = sorted(path for path in Path(named).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    outcomes = Counter(check_same(*both(lambda path=path: read_image(str(path)))) for path in files)  # type: ignore[misc]
    assert outcomes[True] > 0
    assert outcomes.total() == len(files)


def test_arguments_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`device="cuda"` is stock torchvision's nvJPEG."""
    asked = []
    monkeypatch.setattr(
        torch.ops.image, "decode_jpegs_cuda", lambda files, mode, device: asked.append(str(device)) or [torch.ones(1)]
    )
    with torch_sink.image_backend("device", device=device_in_use()):
        assert decode_jpeg(as_tensor(saved(PHOTO, "JPEG")), device="cuda").tolist() == [1]
    assert asked == ["cuda"]


def test_the_report_names_what_does_not_record() -> None:
    rows = []
    with torch_sink.image_backend("device", device="meta"):
        for name in ("PNG, alpha", "PNG, 16 bits", "JPEG, CMYK", "GIF, animated"):
            decode_image(as_tensor(FILES[name]()))
        decode_image(as_tensor(with_orientation(6, progressive=True)), apply_exif_orientation=True)
        rows = [f"{operation}: {reason}" for operation, reason in torch_sink.fallback_report().counts]
    assert rows == [
        "torchvision.io: no kernel for torch.uint8 tensors of shape 4 x height x width",
        "torchvision.io: no kernel for torch.uint16 tensors of shape 1 x height x width",
        "torchvision.io: no kernel for torch.uint8 tensors of shape 2x3 x height x width",
        "torchvision.io: turned by its EXIF data",
    ]
    with (
        torch_sink.image_backend("device", device="meta", strict=True),
        pytest.raises(torch_sink.UnsupportedOperation, match="4 x height"),
    ):
        decode_image(as_tensor(FILES["PNG, alpha"]()))


def test_outcome_of_the_stock_function_stays(tmp_path: Path) -> None:
    """After the backend the very operators are back."""
    before = {name: getattr(torch.ops.image, name) for name in ("decode_image", "decode_jpeg", "read_file")}
    with torch_sink.image_backend("device", device=device_in_use()):
        assert all(getattr(torch.ops.image, name) is not stock for name, stock in before.items())
    assert all(getattr(torch.ops.image, name) is stock for name, stock in before.items())
    assert outcome(read_image, str(tmp_path / "nowhere"))[0] is RuntimeError
