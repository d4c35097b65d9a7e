"""Several views of an image, through the kernels: equal those of stock torchvision, whichever are made, when, and where."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from image.check import EXACT, Promise, assert_keeps, assert_same_bits, device_in_use, promise_of_calls, runs_kernels
from image.jpeg_files import damaged, jpeg
from image.random_transforms import random_pipeline
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

import torch_sink
from torch_sink.errors import DecodeError
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.device import DecodedImages

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

COUNT = 3
LAST = torch.channels_last


def view(size: int, *more: Any) -> v1.Compose:
    return v1.Compose([v1.RandomResizedCrop(size), v1.RandomHorizontalFlip(), *more, v1.ToTensor()])


VIEWS: list[Callable[[Any], Any]] = [
    view(9, v1.ColorJitter(0.4, 0.4, 0.2, 0.1), v1.GaussianBlur(3)),
    view(6),
    v1.Compose([v1.Resize((5, 7)), v1.PILToTensor()]),
    view(6, v1.RandomAutocontrast(1.0)),
]


def views_of(image: Any) -> Any:
    return [one(image) for one in VIEWS]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "all").mkdir()
    for seed in range(COUNT):
        (tmp_path / "all" / f"{seed}.jpg").write_bytes(jpeg(13 - seed, 12 + seed, seed=seed, quality=30))
    torch_sink.set_decode_provider("triton")
    yield tmp_path
    torch_sink.set_decode_provider(None)


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    begin = DecodedImages.__init__
    monkeypatch.setattr(
        DecodedImages, "__init__", lambda images, *given: (found.append(given), begin(images, *given))[1]
    )
    return found


def loaded(folder: Path, **options: Any) -> Any:
    torch.manual_seed(3)
    return next(iter(DataLoader(ImageFolder(str(folder), views_of), COUNT, **options)))[0]


def stock_and_lazy(folder: Path, **options: Any) -> tuple[Any, Any]:
    with torch_sink.image_backend("PIL"):
        expected = loaded(folder, **options)
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        return expected, loaded(folder, **options)


def assert_equal(made: Any, expected: Any) -> None:
    for one, stock in zip(made, expected, strict=True):
        assert_same_bits(one.cpu().contiguous(), stock)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "multiprocessing_context": "spawn"}], ids=["here", "spawn"])
def test_views_in_any_order(folder: Path, decodings: list[Any], options: dict[str, Any]) -> None:
    expected, batch = stock_and_lazy(folder, **options)
    order = [2, 0, 3, 1]
    made = {at: batch[at].to(device_in_use()) for at in order}
    assert_equal([made[at] for at in sorted(order)], expected)
    assert len(decodings) == 1
    assert_same_bits(batch[0].to(device_in_use(), memory_format=LAST).cpu().contiguous(), expected[0])
    assert len(decodings) == 2, "the pixels were freed with the last view"


def test_views_twice_in_other_formats_and_never(folder: Path, decodings: list[Any]) -> None:
    expected, batch = stock_and_lazy(folder)
    for memory_format, dtype in ((LAST, torch.float16), (torch.contiguous_format, torch.float32)):
        for at in (0, 0, 1):
            made = batch[at].to(device_in_use(), dtype, memory_format=memory_format)
            assert made.is_contiguous(memory_format=memory_format)
            assert_same_bits(made.cpu().contiguous(), expected[at].to(dtype))
    assert len(decodings) == 1


def test_copies(folder: Path) -> None:
    expected, batch = stock_and_lazy(folder)
    for copied in (
        pickle.loads(pickle.dumps(batch[1:])),
        copy.deepcopy(batch[1:]),
        [one.pin_memory() for one in batch[1:]],
    ):
        assert_equal([one.to(device_in_use()) for one in reversed(copied)], expected[:0:-1])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST])
def test_slots(folder: Path, decodings: list[Any], memory_format: torch.memory_format) -> None:
    expected, _ = stock_and_lazy(folder)
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        torch.manual_seed(3)
        loader = DataLoader(ImageFolder(str(folder), views_of), COUNT)
        with torch_sink.SinkLoader(loader, device=device_in_use(), memory_format=memory_format) as batches:
            for views, _ in batches:
                assert_equal(views, expected)
    assert len(decodings) == 1


def _with_what_is_made_of_it(samples: Any) -> dict[str, Any]:
    images, crops = default_collate(samples)
    labels = torch.arange(len(images))
    mixed, cut = (mix(num_classes=COUNT)(images, labels)[0] for mix in (v2.MixUp, v2.CutMix))
    made = {"images": images, "mixed": mixed, "cut": cut, "crops": crops}
    return {**made, "flat": crops.flatten(0, 1), "view": crops.view(-1, *crops.shape[2:])}


@pytest.mark.parametrize("in_slots", [False, True])
def test_a_batch_beside_what_is_made_of_it(folder: Path, decodings: list[Any], in_slots: bool) -> None:
    """One that is mixed, and one in two shapes, are the same images of a program, and other tensors."""
    crops = v1.Compose([v1.Resize(9), v1.FiveCrop(5), v1.Lambda(lambda made: torch.stack([*map(v1.ToTensor(), made)]))])
    samples = [view(9), crops]
    names = sorted(str(path) for path in folder.rglob("*.jpg"))

    def made() -> Any:
        torch.manual_seed(3)
        dataset = [[one(default_loader(name)) for one in samples] for name in names]
        loader = DataLoader(dataset, COUNT, collate_fn=_with_what_is_made_of_it)
        return next(iter(torch_sink.SinkLoader(loader, device=device_in_use()) if in_slots else loader))

    with torch_sink.image_backend("PIL"):
        expected = {name: images.cpu() for name, images in made().items()}
    decodings.clear()
    with torch_sink.image_backend("device", device=device_in_use(), strict=True):
        found = {name: images.to(device_in_use()).cpu() for name, images in made().items()}
    for name, stock in expected.items():
        torch.testing.assert_close(found[name], stock, msg=name)
    # What is mixed is in a program already; the crops and their views are moved one after the other.
    assert len(decodings) == (2 if in_slots else 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.halved
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_pipelines(tmp_path: Path, first: int) -> None:
    """The views of a file, each by a pipeline of its own: moved side by side, or one by one, some twice, some never."""
    assert sum(_compare_views(random.Random(seed), tmp_path, seed) for seed in range(first, first + 10)) >= 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_random_pipelines(tmp_path: Path) -> None:
    assert sum(_compare_views(random.Random(seed), tmp_path, seed) for seed in range(1000, 1200)) >= 200


def _compare_views(chance: random.Random, folder: Path, seed: int) -> int:
    """Compares what is moved with stock code's values; returns how many views are recorded."""
    version = chance.choice(("v1", "v2"))
    pipelines = [
        v1.Compose([random_pipeline(chance, version), Fitted(chance.randint(1, 12))])
        for _ in range(chance.randint(2, 5))
    ]
    files = [folder / f"{seed}_{number}.jpg" for number in range(chance.randint(1, 4))]
    for number, file in enumerate(files):
        file.write_bytes(jpeg(chance.choice(_SIDES), chance.choice(_SIDES), seed=seed + number, quality=60))

    def made() -> list[list[Any]]:
        torch.manual_seed(seed)
        random.seed(seed)
        return [[one(default_loader(str(file))) for one in pipelines] for file in files]

    try:
        expected = [default_collate(list(each)) for each in zip(*made(), strict=True)]
    except Exception:
        return 0  # of stock code, for which other tests are
    with torch_sink.image_backend("device", device=device_in_use()):
        (batch,) = DataLoader(made(), len(files), collate_fn=default_collate)
        lazy = [at for at, one in enumerate(batch) if type(one) is LazyBatch]
        moved = [chance.choice(lazy) for _ in [*lazy, *lazy[:1]]]
        if chance.random() < 0.3:
            moved = lazy
            together = LazyBatch.__torch_sink_execute_all__(
                [batch[at] for at in lazy], device_in_use(), [{}] * len(lazy)
            )
            values = [tensor for tensor, _ in together]
        else:
            values = [batch[at].to(device_in_use()) for at in moved]
    for at, one in enumerate(batch):
        if at not in lazy:
            torch.testing.assert_close(one, expected[at], atol=1e-4, rtol=1e-4, equal_nan=True)
    for at, one in zip(moved, values, strict=True):
        assert_keeps(_promise(batch[at], expected[at]), one.cpu(), expected[at])
    return len(lazy)


_SIDES = (1, 2, 9, 16, 17, 31, 40)


def _promise(batch: LazyBatch, expected: torch.Tensor) -> Promise:
    images = batch.images.batch
    calls = batch.program.packed.calls(slice(images.first, images.end))
    return promise_of_calls(calls, expected) if runs_kernels() else EXACT


class Fitted:
    """Makes an image or a tensor a tensor of one size."""

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(self, made: Any) -> Any:
        tensor = made if isinstance(made, torch.Tensor) else v1.functional.pil_to_tensor(made)
        return v1.functional.center_crop(tensor, [self.side, self.side])


# --- damage


@pytest.fixture
def broken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the kernels find damaged, and Pillow as well; another that Pillow decodes."""
    (folder / "all" / "0.jpg").write_bytes(damaged(jpeg(24, 20, "4:4:4", seed=1), "zeroed", 0))
    (folder / "all" / "1.jpg").write_bytes(damaged(jpeg(24, 20, seed=3), "doubled", 1))
    stock = EncodedSource.decode

    def decode(source: EncodedSource) -> Any:
        if source.path.endswith("1.jpg"):
            raise DecodeError(source.path, -1, "broken data stream")
        return stock(source)

    monkeypatch.setattr(EncodedSource, "decode", decode)
    return folder


def test_each_view_of_a_damaged_file_raises(broken: Path, decodings: list[Any]) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = loaded(broken)
    for one in (*batch, batch[0]):
        with pytest.raises(DecodeError, match="broken data stream") as caught:
            one.to(device_in_use())
        assert (caught.value.path, caught.value.index_in_batch) == (str(broken / "all" / "1.jpg"), 1)
    assert len(decodings) == 1


@pytest.mark.parametrize(("policy", "rows"), [("skip", [0, 2]), ("replace", [0, 2, 2])])
def test_all_views_lose_the_same_samples(broken: Path, policy: Any, rows: list[int]) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = loaded(broken)
    alone = [one.__torch_sink_execute__(device_in_use(), on_decode_error=policy) for one in batch]
    assert [shown for _, shown in alone] == [rows] * len(VIEWS)
    with torch_sink.image_backend("device", device=device_in_use()):
        torch.manual_seed(3)
        loader = DataLoader(ImageFolder(str(broken), views_of), COUNT)
        with torch_sink.SinkLoader(loader, device=device_in_use(), on_decode_error=policy) as batches:
            made = [[one.cpu() for one in views] for views, _ in batches]
        report = torch_sink.decode_report()
    assert_equal(made[0], [one.cpu().contiguous() for one, _ in alone])
    lost = (1, 0) if policy == "skip" else (0, 1)
    assert (report.skipped, report.replaced) == lost
    assert list(report.files) == [str(broken / "all" / "1.jpg")]


def test_what_pillow_decodes_is_made_anew_in_all_views(broken: Path) -> None:
    (broken / "all" / "1.jpg").unlink()
    with torch_sink.image_backend("PIL"):
        torch.manual_seed(3)
        expected = next(iter(DataLoader(ImageFolder(str(broken), views_of), 2)))[0]
    with torch_sink.image_backend("device", device=device_in_use()):
        torch.manual_seed(3)
        batch = next(iter(DataLoader(ImageFolder(str(broken), views_of), 2)))[0]
    assert_equal([one.to(device_in_use()) for one in batch], expected)
