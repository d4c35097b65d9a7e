"""The number of samples in a batch: what the loader's sampler has counted, or else what the batch shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from loop.engines.test_on_fake_cuda import UNCOMPILED
from torch_sink.errors import DecodeError
from torch_sink.loop import LambdaCallback, StepLoop
from torch_sink.loop.core.sample_counter import SampleCounter
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


def images(count: int) -> list[Tensor]:
    return [torch.rand(3, 8 + number, 9) for number in range(count)]


def targets(count: int) -> list[dict[str, Tensor]]:
    return [{"boxes": torch.rand(number, 4), "labels": torch.zeros(number)} for number in range(1, count + 1)]


def labels(count: int) -> Tensor:
    return torch.arange(count) % 3


def stack(count: int, size: int = 8) -> Tensor:
    return torch.rand(count, 3, size, size)


@dataclass
class Columns:
    image: Tensor
    label: Tensor


# What a batch is, the number of its samples, and what is said of it.
BATCHES: dict[str, tuple[Callable[[], Any], int, str | None]] = {
    "images and labels": (lambda: (stack(8), labels(8)), 8, None),
    "a tensor": (lambda: stack(7), 7, None),
    "a list with one dict, as DALI's": (lambda: [{"data": stack(8), "label": torch.zeros(8, 1)}], 8, None),
    "a dataclass": (lambda: Columns(stack(4), labels(4)), 4, None),
    "a list of images, and labels": (lambda: (images(20), labels(20)), 20, None),
    "detection": (lambda: (tuple(images(5)), tuple(targets(5))), 5, None),
    "detection with names": (lambda: (images(5), targets(5), ["a.jpg"] * 5), 5, None),
    "detection of one image": (lambda: (images(1), targets(1)), 1, None),
    "a dict that begins with a scalar": (lambda: {"step": torch.tensor(1), "x": stack(5), "y": labels(5)}, 5, None),
    "a dict that begins with a text": (lambda: {"prompt": "a cat", "size": (480, 640), "x": stack(5)}, 5, None),
    "a dict of texts": (lambda: {"text": ["a", "b", "c"], "y": labels(3)}, 3, None),
    "two views, and labels": (lambda: ([stack(20), stack(20)], labels(20)), 20, None),
    "crops of two sizes, and labels": (lambda: ([stack(20)] * 2 + [stack(20, 4)] * 6, labels(20)), 20, None),
    "triplets": (lambda: (stack(6), stack(6), stack(6)), 6, None),
    "batches of two loaders": (lambda: ((stack(8), labels(8)), (stack(8), labels(8))), 8, None),
    "samples as they are": (lambda: [*zip(images(5), targets(5), strict=True)], 5, None),
    "a nested tensor": (
        lambda: (torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged), labels(2)),
        2,
        None,
    ),
    "a sparse tensor": (lambda: (torch.eye(6).to_sparse(), labels(6)), 6, None),
    "packed sequences": (lambda: (pack_sequence([torch.rand(4, 3), torch.rand(2, 3)]), labels(2)), 2, None),
    "nothing with a dimension": (lambda: {"value": torch.tensor(1.0)}, 1, None),
    "no sample": (lambda: (stack(0), labels(0)), 0, None),
    "a list of images": (lambda: images(20), 20, "3 (the first dimension of its tensors) or 20 (the length of the b"),
    "images in a dict": (
        lambda: {"images": images(20)},
        20,
        "3 (the first dimension of its tensors) or 20 (the length",
    ),
    "crops of two sizes": (lambda: [stack(20), stack(20, 4), stack(20, 2)], 20, "20 (the first dimension of its tens"),
    "a camera for all": (lambda: {"camera": torch.eye(4), "x": stack(8), "y": labels(8)}, 8, "tensors differ: 4, 8, 8"),
    "loaders that differ": (lambda: ((stack(8), labels(8)), (stack(6), labels(6))), 8, "tensors differ: 8, 8, 6, 6"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_a_batch_shows(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, expected, said = BATCHES[name]
    counter = SampleCounter([])
    assert [counter.count(make()) for _ in range(2)] == [expected] * 2
    if said is None:
        assert caplog.messages == []
    else:
        (message,) = caplog.messages
        assert said in message
        assert f"it counts as {expected}, in history.samples" in message


@pytest.mark.parametrize(("sizes", "batch_size"), [([5, 5, 2], 5), ([6, 3], 6), ([4, 4, 1], 4)])
@pytest.mark.parametrize("kind", ["images", "views"])
def test_a_loader_with_a_batch_size_settles_what_a_batch_does_not_tell(
    sizes: list[int], batch_size: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Loader(list[Any]):
        pass

    loader = Loader()
    loader.batch_size = batch_size  # type: ignore[attr-defined]
    counter = SampleCounter(loader)
    batches = [images(size) if kind == "images" else [stack(size), stack(size, 4), stack(size, 2)] for size in sizes]
    assert [counter.count(batch) for batch in batches] == sizes
    assert caplog.messages == []


def test_two_pairs_are_no_batch_of_two_tensors_where_the_batch_size_is_two(caplog: pytest.LogCaptureFixture) -> None:
    class Loader(list[Any]):
        batch_size = 2

    def pairs(number: int, height: int = 9) -> list[Any]:
        return [(torch.rand(3, height - one, 8), one) for one in range(number)]

    for first in (pairs(2), [(torch.rand(5), torch.rand(5))] * 2):
        counter = SampleCounter(Loader())
        assert [counter.count(first), counter.count(pairs(2)), counter.count(pairs(1))] == [2, 2, 1]
    counter = SampleCounter(Loader())
    assert [counter.count((stack(2), labels(2))), counter.count((stack(1), labels(1)))] == [2, 1]
    assert caplog.messages == []


class Pairs(Dataset[Any]):
    """Images of different sizes and numbers of boxes, for collate functions of all kinds."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((3, 4 + index % 3, 4), float(index)), torch.full((1 + index % 2,), float(index))


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Pairs().__getitem__, range(23))


def zipped(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def packed(samples: list[Any]) -> Any:
    """All rows of a batch behind each other, as graphs and point clouds are."""
    return {"rows": torch.cat([boxes for _, boxes in samples])}


UNEVEN = [[0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10]]
LOADERS: dict[str, tuple[Callable[[], Any], list[int]]] = {
    "lists": (lambda: DataLoader(Pairs(), 5, collate_fn=zipped), [5, 5, 5, 5, 3]),
    "packed rows": (lambda: DataLoader(Pairs(), 5, collate_fn=packed), [5, 5, 5, 5, 3]),
    "packed rows of workers": (lambda: DataLoader(Pairs(), 5, collate_fn=packed, num_workers=2), [5, 5, 5, 5, 3]),
    "drop_last": (lambda: DataLoader(Pairs(), 5, collate_fn=packed, drop_last=True), [5, 5, 5, 5]),
    "a batch sampler": (lambda: DataLoader(Pairs(), batch_sampler=UNEVEN, collate_fn=packed), [3, 1, 5, 2]),
    "a stream": (lambda: DataLoader(Streamed(), 5, collate_fn=zipped), [5, 5, 5, 5, 3]),
    "a stream of workers": (lambda: DataLoader(Streamed(), 5, collate_fn=zipped, num_workers=1), [5, 5, 5, 5, 3]),
    "batches of the dataset": (
        lambda: DataLoader([zipped([Pairs()[i] for i in lists]) for lists in UNEVEN], batch_size=None),
        [3, 1, 5, 2],
    ),
    "a list": (lambda: [zipped([Pairs()[i] for i in lists]) for lists in UNEVEN], [3, 1, 5, 2]),
}


def make_loop(device: str = "cpu", **options: Any) -> StepLoop:
    """The loss of a batch is the mean of its numbers, whatever the batch."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).to(device)

    def forward(model: nn.Module, batch: Any) -> Tensor:
        boxes = batch["rows"] if isinstance(batch, dict) else torch.stack([part[0] for part in batch[1]])
        return model(boxes[:, None]).mean() * 0 + boxes.mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return StepLoop(model, None, optimizer, forward=forward, **options)


@pytest.mark.parametrize("kind", LOADERS)
def test_history_and_evaluations_count_the_samples_of_every_loader(kind: str) -> None:
    make, sizes = LOADERS[kind]
    loop, seen = make_loop(accumulate=2, steps_per_sync=1), list[int]()
    note = LambdaCallback(on_train_step_end=lambda context: seen.append(context.original_args().history.samples))
    history = loop.run(make(), epochs=2, callbacks=[note])
    assert [after - before for before, after in zip([0, *seen], seen, strict=False)] == sizes * 2
    assert history.samples == 2 * sum(sizes)
    losses = history.losses[: len(sizes)]
    mean = (losses * torch.tensor(sizes)).sum() / sum(sizes)
    assert loop.evaluate(make())["loss"] == pytest.approx(float(mean), rel=1e-6)


def test_in_graph_mode_too(fake_cuda: FakeCuda) -> None:
    make, sizes = LOADERS["packed rows"]
    loop = make_loop("cuda", mode="graph", jit_config=UNCOMPILED)
    assert loop.run(make(), epochs=3).samples == 3 * sum(sizes)
    assert loop.explain().startswith("mode: graph")
    loop.close()


def test_a_sampler_counts_in_the_order_of_the_workers_only_where_they_keep_it() -> None:
    """With in_order=False nobody knows which list a batch is from: it is looked at."""
    loader = DataLoader(Pairs(), batch_sampler=UNEVEN, collate_fn=zipped, num_workers=2, in_order=False)
    assert make_loop().run(loader).samples == sum(map(len, UNEVEN))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_counts_its_own_samples(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Pairs(), batch_sampler=UNEVEN, collate_fn=packed, num_workers=workers)

    loop, loader = make_loop(), make()
    assert loop.run(loader, epochs=2, max_steps=3).samples == 9
    loop.save(tmp_path, loader)
    resumed, loader = make_loop(), make()
    resumed.resume(tmp_path, loader)
    assert resumed.run(loader, epochs=2).samples == 2 + 11


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_shifts_no_number(workers: int) -> None:
    class Failing(Pairs):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise KeyError(index)
            return super().__getitem__(index)

    plain = DataLoader(Failing(), batch_sampler=UNEVEN, collate_fn=packed, num_workers=workers)
    with SinkLoader(plain, batches_per_epoch=4) as loader:
        loop = make_loop(steps_per_sync=1)
        with pytest.raises(KeyError):
            loop.run(loader)
        assert loop.history.samples == 3
        assert loop.run(loader, max_steps=2).samples == 5 + 2


class Photos(Dataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.folder / f"{index}.png") as image:
            image.load()
            return torch.full((3, image.height, image.width), float(index)), index % 3


@pytest.mark.parametrize(("policy", "sizes"), [("skip", [2, 4, 1]), ("replace", [4, 4, 2])])
@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_samples_do_not_count(policy: Any, sizes: list[int], workers: int, tmp_path: Path) -> None:
    for number in range(10):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{number}.png")
    for number in (1, 2, 9):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    with pytest.raises((OSError, DecodeError)):
        Photos(tmp_path)[1]
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0), steps_per_sync=1)
    with SinkLoader(DataLoader(Photos(tmp_path), 4, num_workers=workers), on_decode_error=policy) as loader:
        history = loop.run(loader)
        assert history.samples == sum(sizes)
        mean = (history.losses * torch.tensor(sizes)).sum() / sum(sizes)
        assert loop.evaluate(loader)["loss"] == pytest.approx(float(mean), rel=1e-5)
