"""Images that a dataset keeps in memory are decoded once, as in stock code, and their files are let go."""

from __future__ import annotations

import functools
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFile
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.transforms import functional as F

import torch_sink
from image.cases import encoded
from image.check import assert_same_bits
from image.decode.test_bad_input import corrupt
from torch_sink.cli.explain import explain, report_of
from torch_sink.cli.kept_images import images_in, is_file
from torch_sink.cli.pipelines import pipeline_of
from torch_sink.image.core import uses
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.decode.source import PixelSource
from torch_sink.image.run.batch import LazyBatch

IMAGES, EPOCHS = 9, 3

pytestmark = [
    pytest.mark.halved,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # From Python 3.12 on, starting a worker by fork warns when the process has threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

TRANSFORM = transforms.Compose(
    [
        transforms.RandomCrop(16),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.4, 0.4, 0.4), (0.2, 0.2, 0.2)),
    ]
)


def opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def loaded(path: Path) -> Image.Image:
    image = Image.open(path)
    image.load()
    return image


def thumbnail(path: Path) -> Image.Image:
    image = opened(path)
    image.thumbnail((24, 24))
    return image


# What a dataset keeps of a file.
FORMS: dict[str, Callable[[Path], Any]] = {
    "images": opened,
    "resized": lambda path: opened(path).resize((20, 20)),
    "thumbnails": thumbnail,
    "files": loaded,
    "tensors": lambda path: F.to_tensor(opened(path).resize((20, 20))),
}


class Kept(Dataset[Any]):
    """A list that is filled at once, or one that fills up while it is read."""

    def __init__(self, paths: Sequence[Path], form: str, transform: Any = TRANSFORM, at_once: bool = True) -> None:
        self.paths, self.form = paths, form
        self.transform = transforms.RandomCrop(16) if form == "tensors" else transform
        self.images = [FORMS[form](path) for path in paths] if at_once else [None] * len(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        if self.images[index] is None:
            self.images[index] = FORMS[self.form](self.paths[index])
        return self.transform(self.images[index]), index


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Files much larger than 20 x 20 pixels, and smaller than all of their own."""
    found = [tmp_path / f"{seed}.jpg" for seed in range(IMAGES)]
    for seed, path in enumerate(found):
        path.write_bytes(encoded(120 + seed, 90, seed, quality=85))
    return found


def count_decodes(log: Path, worker: int = -1) -> None:
    """From now on this process, and those that it forks, write a byte for each file that they decode."""
    stock = ImageFile.ImageFile.load

    def load(image: Any) -> Any:
        if image.tile:
            with open(log, "ab", buffering=0) as file:
                file.write(b".")
        return stock(image)

    ImageFile.ImageFile.load = load  # type: ignore[method-assign]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As many bytes as files were decoded, here and in forks."""
    monkeypatch.setattr(ImageFile.ImageFile, "load", ImageFile.ImageFile.load)
    log = tmp_path / "decodes"
    log.write_bytes(b"")
    count_decodes(log)
    return log


def decodes(log: Path) -> int:
    count = log.stat().st_size
    log.write_bytes(b"")
    return count


def epochs_of(dataset: Any, **options: Any) -> list[Any]:
    torch.manual_seed(5)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, **options)
    return [batch for _ in range(EPOCHS) for batch in loader]


def assert_same_batches(made: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(made) == len(expected) > 0
    for (images, indices), (stock_images, stock_indices) in zip(made, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(indices, stock_indices)


def files_in(dataset: Any) -> int:
    """Whole files that are still held."""
    return sum(is_file(image) for image in images_in(dataset))


MODES: dict[str, dict[str, Any]] = {
    "no workers": {},
    "forks": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent forks": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    "spawned": {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) if m == "spawned" else m for m in MODES])
@pytest.mark.sampled(8)
def test_a_list_is_decoded_once(paths: list[Path], log: Path, mode: str, form: str) -> None:
    # Draws depend on the number of workers, not on how they are started.
    options = MODES[mode]
    expected = epochs_of(Kept(paths, form), **(options | {"multiprocessing_context": "fork"} if options else {}))
    decodes(log)
    if mode == "spawned":
        options = options | {"worker_init_fn": functools.partial(count_decodes, log)}
    with torch_sink.image_backend("device", device="cpu"):
        dataset = Kept(paths, form)
        made = epochs_of(dataset, **options)
        report = torch_sink.fallback_report()
    assert_same_batches(made, expected)
    assert decodes(log) == IMAGES
    assert files_in(dataset) == 0
    if form in ("images", "files"):  # of the others, the pixels are made when the dataset is
        assert report.kept == IMAGES
        assert f"decoded once: {IMAGES} images" in str(report)
        assert not report, str(report)


@pytest.mark.parametrize(("mode", "most"), [("no workers", 2), ("persistent forks", 4), ("forks", EPOCHS)])
@pytest.mark.parametrize("form", ["images", "resized", "files", "tensors"])
@pytest.mark.sampled(6)
def test_a_list_that_fills_up(paths: list[Path], log: Path, mode: str, most: int, form: str) -> None:
    """An image is decoded for its first sample, and when it is used again; a process that ends takes its own along."""
    expected = epochs_of(Kept(paths, form, at_once=False), **MODES[mode])
    decodes(log)
    with torch_sink.image_backend("device", device="cpu"):
        made = epochs_of(Kept(paths, form, at_once=False), **MODES[mode])
    assert_same_batches(made, expected)
    assert decodes(log) <= most * IMAGES


def test_repeated_samples_of_one_pass(paths: list[Path], log: Path) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        dataset = Kept(paths, "images", at_once=False)
        many = Subset(dataset, [*range(IMAGES)] * 5)
        list(DataLoader(many, batch_size=IMAGES))
    assert decodes(log) == IMAGES


def test_loops_without_a_loader(paths: list[Path], log: Path) -> None:
    sums = []
    for backend in (torch_sink.image_backend("PIL"), torch_sink.image_backend("device", device="cpu")):
        with backend:
            images = [opened(path) for path in paths]
            torch.manual_seed(0)
            sums.append([TRANSFORM(image).sum().item() for _ in range(EPOCHS) for image in images])
            counted = decodes(log)
    assert sums[0] == sums[1]
    assert counted <= 2 * IMAGES


# --- one sample


class Views(Dataset[Any]):
    """Two views of each image, as they are compared in contrastive learning."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = opened(self.paths[index])
        return TRANSFORM(image), TRANSFORM(image)


def test_views_of_one_sample_are_no_second_use(paths: list[Path], log: Path) -> None:
    with torch_sink.image_backend("device", device="meta"):
        for views in epochs_of(Views(paths)):
            assert all(type(view) is LazyBatch for view in views)
        assert torch_sink.fallback_report().kept == 0
    assert decodes(log) == 0


def test_what_nobody_keeps_is_left_alone(paths: list[Path]) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        for _ in range(EPOCHS):
            list(DataLoader(Views(paths)))
        assert torch_sink.fallback_report().kept == 0


# --- where a device makes the pixels


def sources_of(batches: Sequence[Any]) -> set[type]:
    return {type(source) for images, _ in batches for source in images.program.packed.sources()}


@pytest.mark.parametrize(("form", "count", "kind"), [("images", 0, EncodedSource), ("files", 0, EncodedSource),
                                                     ("resized", IMAGES, PixelSource), ("tensors", IMAGES, PixelSource)])  # fmt: skip
def test_for_a_device_the_smaller_is_kept(paths: list[Path], log: Path, form: str, count: int, kind: type) -> None:
    """A whole image has more bytes as pixels than as a file, which the device decodes; a thumbnail has fewer."""
    with torch_sink.image_backend("device", device="meta"):
        dataset = Kept(paths, form)
        assert sources_of(epochs_of(dataset)) == {kind}
        assert torch_sink.fallback_report().kept == count
    assert decodes(log) == count


# --- what stock code does with an image afterwards


def edit(image: Image.Image) -> None:
    image.putpixel((0, 0), (1, 2, 3))
    ImageDraw.Draw(image).line((0, 0, 19, 19), fill=(200, 0, 0))


@pytest.mark.parametrize("form", ["images", "resized", "thumbnails", "files"])
def test_edits_of_kept_images(paths: list[Path], form: str) -> None:
    """They reach what is made of the image later, and not what was made of it before."""
    results = []
    for backend in (torch_sink.image_backend("PIL"), torch_sink.image_backend("device", device="cpu")):
        with backend:
            dataset = Kept(paths, form)
            first = epochs_of(dataset)
            before = [F.hflip(image) for image in dataset.images]
            for image in dataset.images:
                edit(image)
            batches = [*first, *epochs_of(dataset)]
            kept = [np.asarray(image).tolist() for image in (*before, *dataset.images)]
            results.append((batches, kept, [image.info for image in dataset.images]))
    (stock, *stock_rest), (made, *rest) = results
    assert_same_batches(made, stock)
    assert rest == stock_rest


def test_kept_files_can_be_drafted(paths: list[Path]) -> None:
    def draft(image: Any) -> torch.Tensor:
        image.draft("RGB", (30, 30))
        return F.to_tensor(image)

    batches = []
    for backend in (torch_sink.image_backend("PIL"), torch_sink.image_backend("device", device="cpu")):
        with backend:
            dataset = Kept(paths[:4], "images", draft)
            dataset.images = [Image.open(io.BytesIO(path.read_bytes())) for path in [paths[0]] * 4]
            batches.append(epochs_of(dataset))
    assert_same_batches(batches[1], batches[0])


def test_turned_images_with_info(tmp_path: Path) -> None:
    path, exif = tmp_path / "turned.jpg", Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(encoded(60, 40))).save(path, exif=exif, comment=b"kept")
    infos = []
    for backend in (torch_sink.image_backend("PIL"), torch_sink.image_backend("device", device="cpu")):
        with backend:
            dataset = Kept([path] * 4, "images")
            epochs_of(dataset)
            infos.append([(image.info, dict(image.getexif())) for image in dataset.images])
    assert infos[0] == infos[1]
    assert infos[0][0][1] == {0x0112: 6}


@pytest.mark.parametrize("form", ["images", "resized", "tensors"])
def test_a_damaged_file_raises_where_it_is_used(paths: list[Path], form: str) -> None:
    paths[5].write_bytes(corrupt())
    with torch_sink.image_backend("device", device="cpu"):
        dataset = Kept(paths, form)
        batches = iter(DataLoader(dataset, batch_size=3))
        next(batches)
        with pytest.raises(torch_sink.DecodeError, match=r"5\.jpg"):
            next(batches)[0].sum()
        assert torch_sink.fallback_report().kept == (IMAGES - 1 if form == "images" else 0)


def test_a_pass_begins_while_a_thread_makes_images() -> None:
    switch_interval, ended = sys.getswitchinterval(), threading.Event()

    def make() -> None:
        while not ended.is_set():
            made = [_Held() for _ in range(50)]
            uses.of_files.update({id(one): one for one in made})

    kept = [_Held() for _ in range(500)]
    uses.of_files.update({id(one): one for one in kept})
    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(300):
            assert {*map(id, kept)} <= {*map(id, uses.held())}
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(switch_interval)


class _Held:
    """What a weak reference may point to."""


def test_threads_share_a_kept_image(paths: list[Path]) -> None:
    """Whichever of them finds that it is used again."""
    wrong: list[Any] = []

    def use(image: Any, expected: bytes) -> None:
        for _ in range(20):
            made = image.crop((3, 2, 90, 80)).resize((30, 30))
            uses.batches += 1
            if made.tobytes() != expected:
                wrong.append(made)

    for path in paths:
        expected = opened(path).rotate(0).crop((2, 1, 110, 88)).crop((3, 2, 90, 80)).resize((30, 30)).tobytes()
        with torch_sink.image_backend("device", device="cpu"):
            image = opened(path).crop((2, 1, 110, 88))
            threads = [threading.Thread(target=use, args=(image, expected)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert isinstance(image.lazy_recording.source, PixelSource)
    assert not wrong


# --- what is found, and what is said


def in_a_closure(image: Any) -> Callable[[], Any]:
    return lambda: image


def in_a_cache(image: Any) -> Callable[[], Any]:
    cached = functools.lru_cache(lambda: image)
    cached()
    return cached


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda image: {"deep": [(image, 3)]},
    "object": lambda image: type("Holder", (), {"__init__": lambda self: setattr(self, "held", image)})(),
    "slots": lambda image: functools.partial(print, image),
    "closure": in_a_closure,
    "cache": in_a_cache,
    "itself": lambda image: [loop := [image], loop.append(loop)],
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_images_are_found(paths: list[Path], holder: str) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        image = opened(paths[0])
        dataset = [HOLDERS[holder](image)]  # of a dataset that is a function, the module would be searched, too
        assert [found is image for found in images_in(dataset)] == [True]


everywhere: list[Any] = []  # of this module, which a dataset reaches by each of its functions


def test_a_dataset_is_searched_and_not_the_process(paths: list[Path]) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        everywhere.append(opened(paths[0]))
        try:
            dataset = Kept(paths, "images")
            dataset.transform = in_a_closure(os)
            assert len(images_in(dataset)) == IMAGES
        finally:
            everywhere.clear()


class Unhashable(DataLoader):
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return False


def test_a_loader_that_cannot_be_hashed() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        assert [batch.tolist() for batch in Unhashable([1, 2, 3], batch_size=2)] == [[1, 2], [3]]


def nothing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.fixture
def strict() -> Iterator[None]:
    with torch_sink.image_backend("device", device="cpu", strict=True):
        yield


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("form", ["images", "resized", "files", "tensors"])
def test_keeping_is_no_fallback(paths: list[Path], form: str) -> None:
    dataset = Kept(paths, form)
    if form == "tensors":  # whose values exist from the first pass on
        dataset.transform = nothing
    epochs_of(dataset)


@pytest.mark.parametrize(("device", "said"), [("cpu", "decoded once"), ("cuda", f"{IMAGES} of them as files")])
def test_explain_says_it(paths: list[Path], device: str, said: str) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        loader = DataLoader(Kept(paths, "images"), batch_size=4)
        if device == "cpu":
            list(loader)
        text = report_of(explain(pipeline_of("kept", loader), device)).as_text()
    assert f"{IMAGES} images are kept in memory by the dataset: decoded once" in text
    assert said in text
