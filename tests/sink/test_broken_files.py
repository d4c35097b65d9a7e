"""Samples with broken files: skipped or replaced in the workers of any loader, counted, and resumed behind."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from image.broken_files import (
    JPEG,
    OTHERS,
    QUIET,
    V1,
    Files,
    Stream,
    checked,
    loaded,
    opened,
    said_of,
    stock_samples,
    without_broken,
    write_tree,
)
from image.check import assert_same_bits
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.datasets import folder
from torchvision.io import decode_image, read_image
from torchvision.transforms.functional import pil_to_tensor

import torch_sink
from torch_sink import SinkLoader
from torch_sink.damage.report import DecodeReport
from torch_sink.worker.batch import WorkerBatch

pytestmark = [pytest.mark.halved, QUIET]
COUNT = 40


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files, half of which are broken. Treat them as read-only."""
    return write_tree(tmp_path_factory.mktemp("files"), COUNT, seed=8, good_share=0.4)


class OwnIterator(DataLoader[Any]):
    """A loader whose `__iter__` is a generator."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


def whole(batches: Any) -> list[Any]:
    return [[part.clone() for part in batch] for batch in batches]


def assert_same(made: list[Any], expected: list[Any]) -> None:
    assert len(made) == len(expected) > 0
    for (images, labels), (stock_images, stock_labels) in zip(made, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(labels, stock_labels)


BACKENDS: dict[str, Callable[[], Any]] = {
    "off": contextlib.nullcontext,
    "on": lambda: torch_sink.image_backend("device", device="cpu"),
    "on, skips": lambda: torch_sink.image_backend("device", device="cpu", on_decode_error="skip"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.sampled(6)
def test_skipping(paths: list[Path], backend: str, kind: Any, workers: int) -> None:
    dataset, options = Files(paths, opened, V1), {"batch_size": 3, "num_workers": workers}
    stock = stock_samples(dataset, 1, **options)
    broken = sum(sample is None for batch in stock for sample in batch)
    assert any(all(sample is None for sample in batch) for batch in stock), "no batch is left out"
    torch_sink.damage.report.clear_report()
    with BACKENDS[backend]():
        torch.manual_seed(1)
        policy = None if backend == "on, skips" else "skip"
        with SinkLoader(kind(dataset, **options), device="cpu", on_decode_error=policy) as loader:
            made = whole(loader)
            stats = loader.stats()
    assert_same(made, without_broken(stock))
    assert (stats.batches, stats.skipped, stats.replaced) == (len(made), broken, 0)
    assert len(stats.broken_files) == broken
    assert {str(path) for path in paths} >= {path for path, _ in stats.broken_files}
    assert all(f"{path}: {reason}" in str(stats) for path, reason in stats.broken_files)
    report = torch_sink.decode_report()
    assert (report.skipped, set(report.files)) == (broken, {path for path, _ in stats.broken_files})


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("backend", "policy"), [("on, skips", None), ("on", "skip")])
@pytest.mark.sampled(2)
def test_loaders_that_make_their_own_iterators(
    paths: list[Path], backend: str, policy: str | None, workers: int
) -> None:
    dataset, options = Files(paths, opened, V1), {"batch_size": 3, "num_workers": workers}
    stock = stock_samples(dataset, 1, **options)
    with BACKENDS[backend]():
        torch.manual_seed(1)
        with SinkLoader(OwnIterator(dataset, **options), device="cpu", on_decode_error=policy) as loader:
            made = whole(loader)
        assert_same(made, without_broken(stock))
        assert torch_sink.decode_report().skipped == sum(sample is None for batch in stock for sample in batch)


def made_and_error(data: Any, workers: int, **options: Any) -> tuple[int, str]:
    """How many batches come before the error, and the error."""
    torch.manual_seed(1)
    made = 0
    with SinkLoader(data(batch_size=3, num_workers=workers), device="cpu", **options) as loader:
        try:
            for _ in loader:
                made += 1
        except Exception as error:
            return made, type(error).__name__
    return made, "none"


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader, OwnIterator])
@pytest.mark.parametrize("content", [b"no image", JPEG[0][: len(JPEG[0]) // 2]], ids=["text", "truncated"])
@pytest.mark.sampled(6)
def test_raise_raises_where_the_backend_skips(tmp_path: Path, content: bytes, kind: Any, workers: int) -> None:
    paths = [tmp_path / f"{number}.jpg" for number in range(6)]
    for path in paths:
        path.write_bytes(content if path is paths[4] else JPEG[0])
    data = partial(kind, Files(paths, opened, V1))
    with BACKENDS["on"]():
        expected = made_and_error(data, workers)
        assert expected[0] == 1
    with BACKENDS["on, skips"]():
        assert made_and_error(data, workers) == (2, "none")
        assert made_and_error(data, workers, on_decode_error="raise") == expected
        assert made_and_error(data, workers) == (2, "none"), "the policy of one loader is not that of the next"


@pytest.mark.parametrize("workers", [0, 2])
def test_replacing(paths: list[Path], workers: int) -> None:
    dataset, options = Files(paths, loaded, V1), {"batch_size": 8, "num_workers": workers}
    stock = stock_samples(dataset, 1, **options)
    torch.manual_seed(1)
    with SinkLoader(DataLoader(dataset, **options), device="cpu", on_decode_error="replace") as loader:
        made = whole(loader)
        stats = loader.stats()
    expected = []
    for samples in stock:
        good = [row for row, sample in enumerate(samples) if sample is not None]
        rows = [next((other for other in good if other >= row), good[0]) for row in range(len(samples))]
        expected.append(default_collate([samples[row] for row in rows]))
    assert_same(made, expected)
    assert stats.replaced == sum(sample is None for batch in stock for sample in batch)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
@pytest.mark.sampled(8)
def test_a_stream_raises_under_every_policy(paths: list[Path], policy: str, backend: str, workers: int) -> None:
    """And a generator that catches the error gives the samples of one that does so in stock code."""
    options = {"batch_size": None, "num_workers": workers}
    torch.manual_seed(1)
    expected = list(DataLoader(Stream(paths, checked, V1, goes_on=True), **options))
    with BACKENDS[backend]():
        with SinkLoader(DataLoader(Stream(paths, opened, V1), **options), on_decode_error=policy) as loader:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever stock code raises for a file
                list(loader)
            said = said_of(caught.value)
            assert said.count("ends the generator of an IterableDataset") == 1
            assert "leave out samples" not in said
            assert any(str(path) in said for path in paths)
        torch.manual_seed(1)
        loader = SinkLoader(DataLoader(Stream(paths, checked, V1, goes_on=True), **options), on_decode_error=policy)
        made = [(image.clone(), label) for image, label in loader]
        assert (loader.stats().skipped, loader.stats().replaced) == (0, 0)
        loader.close()
    assert [label for _, label in made] == [label for _, label in expected]
    assert all(torch.equal(image, stock) for (image, _), (stock, _) in zip(made, expected, strict=True))


@pytest.mark.parametrize(("kind", "workers"), [(DataLoader, 0), (DataLoader, 2), (StatefulDataLoader, 2)])
@pytest.mark.sampled(2)
def test_resuming_behind_batches_that_were_left_out(paths: list[Path], kind: Any, workers: int) -> None:
    """From every position: what comes is what would have come, draws included."""

    def make() -> SinkLoader:
        generator = torch.Generator().manual_seed(3)
        options = {"batch_size": 2, "num_workers": workers, "shuffle": True, "generator": generator}
        return SinkLoader(kind(Files(paths, loaded, V1), **options), device="cpu", on_decode_error="skip")

    torch.manual_seed(1)
    states, batches, ends = [], [], []
    with make() as loader:
        for _ in range(2):
            for batch in loader:
                batches.append([part.clone() for part in batch])
                states.append(loader.state_dict())
            ends.append(len(batches))
    assert 20 < len(batches) < COUNT
    for position in range(0, len(states), 1 if workers == 0 else 9):
        with make() as resumed:
            resumed.load_state_dict(states[position])
            rest = next((end for end in ends if end > position + 1), None)
            if rest is not None:  # behind the last batch of a pass, the next one
                assert_same(whole(resumed), batches[position + 1 : rest])


def test_a_batch_that_is_given_back_is_counted_once(paths: list[Path]) -> None:
    with SinkLoader(
        DataLoader(Files(paths, loaded, V1), batch_size=10), device="cpu", on_decode_error="skip"
    ) as loader:
        iterator = iter(loader)
        _, labels = next(iterator)
        skipped = loader.stats().skipped
        assert skipped == 10 - len(labels) > 0
        loader._traversal.give_back()
        assert torch.equal(next(iterator)[1], labels)
        assert loader.stats().skipped == skipped


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_without_one_good_sample_is_an_error(tmp_path: Path, workers: int) -> None:
    dataset = Files([tmp_path / f"{number}.jpg" for number in range(5)], loaded, V1)
    with SinkLoader(DataLoader(dataset, 2, num_workers=workers), device="cpu", on_decode_error="skip") as loader:
        for _ in range(2):
            with pytest.raises(torch_sink.DecodeError, match=r"0\.jpg.*not one sample of this pass could be made"):
                list(loader)


def test_the_losses_of_each_pass_are_told_at_its_end(paths: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with SinkLoader(DataLoader(Files(paths, loaded, V1), 8), device="cpu", on_decode_error="skip") as loader:
        for _ in range(2):
            list(loader)
    messages = [record.message.splitlines()[0] for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        messages
        == [f"{loader.stats().skipped // 2} samples skipped, 0 replaced; {loader.stats().skipped // 2} broken files"]
        * 2
    )


def test_without_a_policy_the_error_is_raised_and_the_user_s_loader_is_untouched(paths: list[Path]) -> None:
    plain = DataLoader(Files(paths, loaded, V1), batch_size=4, num_workers=1, worker_init_fn=print)
    before = dict(vars(plain))
    with SinkLoader(plain, device="cpu", on_decode_error="skip") as loader:
        assert len(whole(loader)) > 2
    assert vars(plain) == before
    with (
        SinkLoader(DataLoader(Files(paths, loaded, V1), batch_size=4), device="cpu") as loader,
        pytest.raises(OSError, match="image file is truncated"),
    ):
        list(loader)


@pytest.mark.parametrize("batches_per_epoch", [None, 3])
def test_training_steps_on_what_is_left(paths: list[Path], batches_per_epoch: int | None) -> None:
    """As many steps as there are batches left, on the plain loop's batches."""
    dataset = Files(paths, loaded, V1)
    batches = without_broken(stock_samples(dataset, 1, batch_size=2))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, COUNT))

    stock = model()
    optimizer = torch.optim.SGD(stock.parameters(), 0.01)
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(stock(images), labels).backward()
        optimizer.step()
    ours = model()
    loop = torch_sink.StepLoop(
        ours, nn.functional.cross_entropy, torch.optim.SGD(ours.parameters(), 0.01), mode="eager", steps_per_sync=2
    )
    torch.manual_seed(1)
    with SinkLoader(DataLoader(dataset, 2), device="cpu", on_decode_error="skip") as loader:
        history = loop.run(loader)
    assert len(history.losses) == len(batches) < len(dataset) / 2
    if batches_per_epoch is None:
        assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), stock.parameters(), strict=True))


def test_the_thread_that_pins_memory_reaches_the_batch_inside() -> None:
    class Batch:
        def pin_memory(self) -> str:
            return "pinned"

    lost = DecodeReport(1, 0, {"a.jpg": "broken"})
    assert pin_memory(WorkerBatch(Batch(), 1, b"state", lost)) == WorkerBatch("pinned", 1, b"state", lost)


# --- errors name their files


def in_memory(path: Path) -> Image.Image:
    file = io.BytesIO(path.read_bytes())
    file.name = str(path)
    return Image.open(file).convert("RGB")


def from_open_file(path: Path) -> Image.Image:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


# Ways to read a file in a dataset; those behind None only the image backend can follow to their files.
WAYS: list[Callable[[Path], Any] | None] = [
    lambda path: Image.open(path).convert("RGB"),
    lambda path: Image.open(str(path)).resize((8, 8)),
    lambda path: Image.open(os.fsencode(path)).load(),
    from_open_file,
    in_memory,
    lambda path: folder.default_loader(str(path)),
    lambda path: read_image(str(path)),
    None,
    lambda path: decode_image(str(path)),
]
CONTENTS = [b"no image", b"", JPEG[0][: len(JPEG[0]) // 2], OTHERS[0][: len(OTHERS[0]) // 2]]


class Reading(Dataset[Any]):
    """Each sample reads a file of its own, in a way of its own."""

    def __init__(self, folder: Path, ways: list[Any]) -> None:
        # torchvision's decoders crash on some PNG files.
        self.samples = [
            (folder / f"way_{number}_content_{content}.jpg", way, CONTENTS[content])
            for number, way in enumerate(ways)
            for content in range(len(CONTENTS) - (number > WAYS.index(None) - 2))
        ]
        for path, _, content in self.samples:
            path.write_bytes(content)
        self.samples.append((folder / "missing.jpg", ways[0], b""))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        path, way, _ = self.samples[index]
        return way(path)


def errors_of(batches: Iterator[Any], count: int) -> list[tuple[type[Exception], str]]:
    """The class and the lines of each error, notes included; errors themselves would keep the iterator."""
    found = []
    for _ in range(count):
        try:
            next(batches)
        except Exception as error:
            found.append((type(error), "\n".join([str(error), *getattr(error, "__notes__", ())])))
    return found


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning", "ignore:The image decoding and encoding")
@pytest.mark.parametrize(("backend", "wraps"), [("off", True), ("on", False), ("on", True)])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.sampled(4)
def test_an_error_names_its_file(tmp_path: Path, backend: str, wraps: bool, workers: int) -> None:
    known = WAYS if backend == "on" else WAYS[: WAYS.index(None)]
    dataset = Reading(tmp_path, [way for way in known if way])
    stock = errors_of(map(dataset.__getitem__, range(len(dataset))), len(dataset))
    assert len(stock) == len(dataset)
    with BACKENDS[backend](), contextlib.ExitStack() as stack:
        loader: Any = DataLoader(dataset, batch_size=1, num_workers=workers)
        loader = stack.enter_context(SinkLoader(loader, device="cpu")) if wraps else loader
        made = errors_of(iter(loader), len(dataset))
    for (path, _, _), (kind, text), (stock_kind, words) in zip(dataset.samples, made, stock, strict=True):
        assert kind is stock_kind
        assert words.partition(" object at 0x")[0].partition("\n")[0] in text
        assert str(path) in text
        assert "repair the file" in text


class FromBytes(Dataset[Any]):
    """Reads files as bytes, as from a database: Pillow never learns a name."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return pil_to_tensor(Image.open(io.BytesIO(JPEG[0] if index < 2 else b"no image")).convert("RGB"))


@pytest.mark.parametrize(("backend", "wraps"), [("off", True), ("on", False), ("on", True)])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.sampled(4)
def test_an_error_of_a_file_that_was_read_as_bytes_names_its_sample(backend: str, wraps: bool, workers: int) -> None:
    with BACKENDS[backend](), contextlib.ExitStack() as stack:
        loader: Any = DataLoader(FromBytes(), batch_size=1, num_workers=workers)
        loader = stack.enter_context(SinkLoader(loader, device="cpu")) if wraps else loader
        ((_, text),) = errors_of(iter(loader), 3)
    assert "file: that of sample 2 of FromBytes" in text
