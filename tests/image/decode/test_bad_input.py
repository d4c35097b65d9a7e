"""Broken files: stock's exception, at stock's place, with the path in the message; good images are not affected."""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded
from image.check import assert_same_bits, device_in_use, lazy_batch
from image.worker_data import train_transform
from torch_sink.image.decode.encoded import read_file
from torch_sink.image.run.batch import LazyBatch

pytestmark = pytest.mark.halved

WHOLE = encoded(64, 48, 3, quality=90)
PNG = encoded(64, 48, 3, "RGB", "PNG")
SMALL = encoded(28, 24, 3)  # kernels decode it, too


def huge() -> bytes:
    """A well-formed JPEG whose header promises more pixels than Pillow accepts."""
    at = WHOLE.index(b"\xff\xc0") + 5
    return WHOLE[:at] + (65000).to_bytes(2, "big") * 2 + WHOLE[at + 4 :]


def broken_table() -> bytes:
    """A complete file whose Huffman table cannot be: libjpeg raises when it is decoded."""
    at = WHOLE.index(b"\xff\xc4") + 5
    return WHOLE[:at] + bytes([255]) * 16 + WHOLE[at + 16 :]


BROKEN = {
    "text": b"This is no image, whatever its name says.\n" * 20,
    "empty": b"",
    "half": WHOLE[: len(WHOLE) // 2],
    "without its last 2 bytes": WHOLE[:-2],
    "huge": huge(),
    "only a start": WHOLE[:4],
    "broken table": broken_table(),
    "half a PNG": PNG[: len(PNG) // 2],
    "a quarter of a header": WHOLE[:150],
}


def outcome(function: Any, *args: Any) -> tuple[type, str]:
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error)
    return type(None), ""


@pytest.mark.parametrize("name", BROKEN)
def test_loading_raises_what_stock_raises(name: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(BROKEN[name])
    stock_type, _ = outcome(default_loader, str(path))
    assert stock_type is not type(None)
    with torch_sink.image_backend("device", device="meta"):
        kind, message = outcome(default_loader, str(path))
        assert kind is stock_type
        assert str(path) in message
        assert outcome(default_loader, os.fsencode(path))[0] is stock_type
        assert outcome(open_and_convert, path)[0] is stock_type
        assert outcome(open_and_convert, io.BytesIO(BROKEN[name]))[0] is stock_type


def open_and_convert(file: Any) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")


MODES = [
    *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    *(("WEBP", mode) for mode in ("RGB", "RGBA")),
]


@pytest.mark.parametrize(("kind", "mode"), MODES)
def test_other_formats_are_opened_and_refused_by_pillow(kind: str, mode: str, tmp_path: Path) -> None:
    """Whole files of each mode; and files that end early, or have other bytes in the header: stock's own words."""
    file, path = io.BytesIO(), tmp_path / "image"
    gray = Image.radial_gradient("L").resize((40, 30))
    (gray.convert("I").convert(mode) if mode == "I;16" else gray.convert(mode)).save(file, kind)
    whole = file.getvalue()
    cut = [whole[:end] for end in (3, 9, 20, 33, 60, len(whole) // 2, len(whole) - 1)]
    changed = [whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :] for at in (0, 1, 9, 13, 19, 24, 25, 30, 40)]
    for data in (whole, *cut, *changed):
        path.write_bytes(data)
        stock = outcome(lambda: default_loader(str(path)).tobytes())
        with torch_sink.image_backend("device", device="meta"):
            kind_raised, said = outcome(lambda: default_loader(str(path)).tobytes())
        assert (kind_raised, said.removesuffix(f" (in {path})")) == stock
    path.write_bytes(whole)
    expected = default_loader(str(path)).tobytes()
    with torch_sink.image_backend("device", device="meta"):
        assert default_loader(str(path)).tobytes() == expected


@pytest.mark.parametrize(("kind", "calls"), [("JPEG", 5), ("PNG", 4)])
def test_a_file_is_opened_in_few_calls(kind: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system: open, size, first bytes, all bytes, close; Pillow opens what begins as no JPEG file itself."""
    (tmp_path / "image").write_bytes(encoded(64, 48, 3, "RGB", kind))
    made: list[str] = []
    for name in ("open", "fstat", "stat", "lseek", "pread", "read", "readv", "close"):
        counted = functools.partial(lambda call, name, *args, **kwargs: (made.append(name), call(*args, **kwargs))[1])
        monkeypatch.setattr(os, name, functools.partial(counted, getattr(os, name), name))
    with torch_sink.image_backend("device", device="meta"):
        del made[:]
        default_loader(str(tmp_path / "image"))
        assert len(made) == calls, made


@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
def test_files_of_no_known_size_are_read_to_their_end(size: int, tmp_path: Path) -> None:
    data, pipe = os.urandom(size), tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(pipe.write_bytes, data)
        assert read_file(pipe, b"ab") == data
        assert written.result() == size
    (tmp_path / "file").write_bytes(data)
    assert read_file(tmp_path / "file") == data


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images_of_a_pipe(kind: str, tmp_path: Path) -> None:
    """A pipe gives its bytes once, and whoever opens it again waits for ever."""
    image, pipe = Image.effect_noise((40, 30), 50), tmp_path / "pipe"
    image.save(tmp_path / "file", kind)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool, torch_sink.image_backend("device", device="meta"):
        written = pool.submit(pipe.write_bytes, (tmp_path / "file").read_bytes())
        found = default_loader(str(pipe))
        written.result()
    assert found.tobytes() == default_loader(str(tmp_path / "file")).tobytes()


@pytest.mark.parametrize("data", [b"", b"PNG", b"\xff\xd8\xff", b"no image"])
def test_a_pipe_without_an_image(data: bytes, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool, torch_sink.image_backend("device", device="meta"):
        written = pool.submit(pipe.write_bytes, data)
        with pytest.raises(UnidentifiedImageError, match=f"cannot identify image file .*{pipe}"):
            default_loader(str(pipe))
        written.result()


def test_a_missing_file(tmp_path: Path) -> None:
    with torch_sink.image_backend("device", device="meta"):
        for load in (default_loader, Image.open):
            with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg"):
                load(str(tmp_path / "nowhere.jpg"))
        with pytest.raises(FileNotFoundError):
            ImageFolder(str(tmp_path / "nowhere"))
        with pytest.raises(FileNotFoundError):
            ImageFolder(str(tmp_path))


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    stock = outcome(default_loader, str(tmp_path))
    assert stock[0] is IsADirectoryError
    with torch_sink.image_backend("device", device="meta"):
        assert outcome(default_loader, str(tmp_path)) == stock


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_names_that_are_bytes_and_open_files(kind: str, tmp_path: Path) -> None:
    """What `open` takes for a file."""
    path = tmp_path / f"image.{kind}"
    image = Image.radial_gradient("L").resize((40, 30)).convert("RGB")
    image.save(path)

    def loaded() -> list[bytes]:
        forms: list[Any] = [os.fsencode(path), path, os.open(path, os.O_RDONLY)]
        return [default_loader(form).tobytes() for form in forms]

    expected = loaded()
    with torch_sink.image_backend("device", device="cpu"):
        assert loaded() == expected


def test_a_large_image_warns_as_stock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.jpg"
    path.write_bytes(WHOLE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 48 - 1)
    with (
        torch_sink.image_backend("device", device="meta"),
        pytest.warns(Image.DecompressionBombWarning),
    ):
        default_loader(str(path))


CROPS: dict[str, Callable[[Image.Image], Any]] = {
    "a method": lambda image: image.crop((-10, -10, 70, 60)),
    "a functional": lambda image: F.crop(image, 0, 0, 46, 60),
    "all of the image": lambda image: image.crop((0, 0, *image.size)),
    "a resized crop": lambda image: F.resized_crop(image, 0, 0, 46, 62, [8, 8]),
    "a crop in a container": transforms.Compose([transforms.RandomCrop((47, 60)), transforms.RandomHorizontalFlip()]),
    "a resized crop in a container": v2.Compose([v2.RandomResizedCrop(8, scale=(0.9, 1)), v2.ToImage()]),
}


@pytest.mark.parametrize("name", CROPS)
@pytest.mark.parametrize("limit", [64 * 48 * 2, 2600, 1300])
def test_a_large_crop_warns_and_raises_as_stock_does(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.open(io.BytesIO(WHOLE)).convert("RGB")

    def cropped(*, is_read: bool) -> Any:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                made = CROPS[name](F.hflip(image))
                values = np.asarray(made).tolist() if is_read else None  # stock code is called again for the values
            except Image.DecompressionBombError as error:
                values = str(error)
        return values, [str(warning.message) for warning in said]

    expected = [cropped(is_read=is_read) for is_read in (False, True)]
    with torch_sink.image_backend("device", device="cpu"):
        assert [cropped(is_read=is_read) for is_read in (False, True)] == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_stock_code_that_skips_broken_files_still_does(tmp_path: Path, workers: int) -> None:
    (tmp_path / "class").mkdir()
    files = [WHOLE, BROKEN["half"], PNG, BROKEN["text"], BROKEN["empty"], WHOLE]
    for number, data in enumerate(files):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(data)
    dataset = SkipsBroken(str(tmp_path))
    loader = {"batch_size": 3, "num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    torch.manual_seed(1)
    expected = list(DataLoader(dataset, **loader))
    with torch_sink.image_backend("device", device=device_in_use()):
        torch.manual_seed(1)
        made = list(DataLoader(dataset, **loader))
    for batch, stock_batch in zip(made, expected, strict=True):
        assert_same_bits(batch.to(device_in_use()).cpu(), stock_batch)


class SkipsBroken(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Gives zeros for what cannot be opened, as many scripts do."""

    def __init__(self, folder: str) -> None:
        self.images = ImageFolder(folder, train_transform())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            return self.images[index][0]
        except OSError:
            return torch.zeros(3, 20, 20)


# --- damage inside the scan of a complete file

TRANSFORM = transforms.Compose([transforms.Resize((12, 10)), transforms.ToTensor()])


def some_files(folder: Path) -> list[Path]:
    """Five files; the second and the last are damaged inside."""
    data = [SMALL, corrupt(), encoded(30, 20, 5), encoded(20, 30, 6), corrupt()]
    paths = [folder / f"{number}.jpg" for number in range(len(data))]
    for path, content in zip(paths, data, strict=True):
        path.write_bytes(content)
    return paths


def corrupt() -> bytes:
    """Passes the walk over the markers and opens; libjpeg refuses its Huffman table when the scan is decoded."""
    at = SMALL.index(b"\xff\xc4") + 5
    codes = sum(SMALL[at : at + 16])
    return SMALL[:at] + bytes([codes]) + bytes(15) + SMALL[at + 16 :]


@pytest.fixture
def handles(tmp_path: Path) -> Iterator[list[Any]]:
    with torch_sink.image_backend("device", device=device_in_use()):
        yield [TRANSFORM(default_loader(str(path))) for path in some_files(tmp_path)]


def good_images(folder: Path) -> dict[int, torch.Tensor]:
    with torch_sink.image_backend("PIL"):
        return {row: TRANSFORM(default_loader(str(folder / f"{row}.jpg"))) for row in (0, 2, 3)}


def test_stock_raises_where_the_image_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="broken data stream"):
        default_loader(str(some_files(tmp_path)[1]))


def test_damage_inside_surfaces_from_the_batch(handles: list[Any], tmp_path: Path) -> None:
    batch = default_collate(handles)
    assert type(batch) is LazyBatch
    for use in (
        lambda: batch.to(device_in_use()),
        lambda: batch + 1,
        lambda: batch.__torch_sink_execute__(device_in_use()),
    ):
        with pytest.raises(OSError, match="broken data stream") as caught:
            use()
        assert isinstance(caught.value, torch_sink.DecodeError)
        assert (caught.value.path, caught.value.index_in_batch) == (str(tmp_path / "1.jpg"), 1)
        assert "broken data stream" in caught.value.reason
        assert str(tmp_path / "1.jpg") in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_damage_in_images_that_outlive_the_backend(device: str, tmp_path: Path) -> None:
    with torch_sink.image_backend("device", device=device):
        recorded = [TRANSFORM(default_loader(str(path))) for path in some_files(tmp_path)]
    with pytest.raises(torch_sink.DecodeError, match="broken data stream") as caught:
        torch.stack(recorded) + 1
    assert (caught.value.path, caught.value.index_in_batch) == (str(tmp_path / "1.jpg"), 1)


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_damaged_images_are_skipped_or_replaced(handles: list[Any], tmp_path: Path, policy: str) -> None:
    rows = {"skip": [0, 2, 3], "replace": [0, 2, 2, 3, 0]}[policy]
    made, shown = lazy_batch(handles).__torch_sink_execute__(device_in_use(), on_decode_error=policy)
    assert shown == rows
    good = good_images(tmp_path)
    assert_same_bits(made.cpu(), torch.stack([good[row] for row in rows]))


def test_damaged_images_in_a_given_tensor(handles: list[Any], tmp_path: Path) -> None:
    out = torch.full((5, 3, 12, 10), -7.0, device=device_in_use())
    made, shown = lazy_batch(handles).__torch_sink_execute__(device_in_use(), out=out, on_decode_error="skip")
    assert (made.shape, made.data_ptr(), shown) == ((3, 3, 12, 10), out.data_ptr(), [0, 2, 3])
    assert (out[3:] == -7).all()


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_a_batch_of_damaged_images_alone(handles: list[Any], tmp_path: Path, policy: str) -> None:
    with pytest.raises(torch_sink.DecodeError, match=r"4\.jpg.*image 0 of its batch"):
        lazy_batch([handles[4], handles[1]]).__torch_sink_execute__(device_in_use(), on_decode_error=policy)


def test_a_batch_without_damage_says_that_nothing_moved(handles: list[Any], tmp_path: Path) -> None:
    batch = lazy_batch([handles[0], handles[2]])
    for policy in ("raise", "skip", "replace"):
        assert batch.__torch_sink_execute__(device_in_use(), on_decode_error=policy)[1] is None
    with pytest.raises(ValueError, match=r"'raise', 'skip', 'replace'.*'ignore'"):
        batch.__torch_sink_execute__(device_in_use(), on_decode_error="ignore")


def test_good_images_of_the_same_batch_are_not_affected_by_the_order(handles: list[Any], tmp_path: Path) -> None:
    good = good_images(tmp_path)
    for order in ([1, 0], [0, 1], [1, 4, 3]):
        made, shown = lazy_batch([handles[row] for row in order]).__torch_sink_execute__(
            device_in_use(), on_decode_error="skip"
        )
        assert [order[row] for row in shown] == [row for row in order if row in good]
        assert_same_bits(made.cpu(), torch.stack([good[row] for row in order if row in good]))


def test_pixels_of_a_damaged_file_read_by_other_code(handles: list[Any], tmp_path: Path) -> None:
    image = default_loader(str(tmp_path / "1.jpg"))
    with pytest.raises(OSError, match=r"1\.jpg.*broken data stream"):
        image.getpixel((0, 0))
    with pytest.raises(OSError, match=r"1\.jpg.*broken data stream"):
        handles[1].sum()


class ReadsPixels(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset whose own code looks at the pixels of a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return default_loader(self.path).getpixel((0, 0))[0]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_damage_found_in_a_worker_is_still_an_error_of_the_file(tmp_path: Path) -> None:
    path = some_files(tmp_path)[1]
    with torch_sink.image_backend("device", device=device_in_use()):
        loader = DataLoader(ReadsPixels(path), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(OSError, match=r"1\.jpg"):
            next(iter(loader))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plain_loader_names_the_argument_that_leaves_broken_files_out(tmp_path: Path, workers: int) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "broken.jpg").write_bytes(b"no image")
    loader = DataLoader(ImageFolder(str(tmp_path), train_transform()), num_workers=workers)
    with torch_sink.image_backend("device", device="cpu"), pytest.raises(UnidentifiedImageError) as caught:
        next(iter(loader))
    said = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert said.count("on_decode_error='skip'") == 1
