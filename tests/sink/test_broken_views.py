"""A broken file among images with several views: all of them lose or replace the same sample, in any loader."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image.broken_files import QUIET, as_list
from image.cases import write_classes
from image.views import ALL, assert_equals, recorded
from PIL import Image
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.datasets import ImageFolder

import torch_sink
from torch_sink import SinkLoader
from torch_sink.errors import DecodeError
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.run import batch as batch_module

pytestmark = [pytest.mark.halved, QUIET, pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")]
COUNT, SIZE = 8, 4


class Named(Dataset[Any]):
    """Each image in four views, with its number and the name of its file."""

    def __init__(self, folder: Path) -> None:
        self.images = ImageFolder(str(folder))
        self.paths = [path for path, _ in self.images.imgs]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        image, _ = self.images[index]
        first, *others = (view(image) for view in ALL)
        return {"global": (first, others[0]), "local": others[1:], "index": index}, self.paths[index]


# Files that stock code cannot open; and one of which the device finds that it is damaged, though its bytes are sound.
KINDS: dict[str, Callable[[bytes], bytes]] = {
    "no image": lambda data: b"no image",
    "truncated": lambda data: data[:-60],
    "in its scan": lambda data: data,
}


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Pixels are made by workers, or in stock code behind the loader, for a device."""
    if request.param == "cuda":
        request.getfixturevalue("fake_cuda")
        monkeypatch.setattr(batch_module, "kernels_make", lambda *_: False)
    return str(request.param)


class Broken:
    """A folder with one broken file.

    Attributes:
        at: number of its sample.
    """

    def __init__(self, folder: Path, kind: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dataset, self.at = Named(write_classes(folder, COUNT)), at
        self.path = self.dataset.paths[at]
        Path(self.path).write_bytes(KINDS[kind](Path(self.path).read_bytes()))
        stock, broken = EncodedSource.decode, self.path

        def decode(source: EncodedSource) -> Image.Image:
            if source.path == broken:
                raise DecodeError(source.path, -1, "broken data stream")
            return stock(source)

        if kind == "in its scan":
            monkeypatch.setattr(EncodedSource, "decode", decode)

    def samples(self, **options: Any) -> list[list[Any]]:
        """The samples of stock code, batch by batch; None for that of the file."""
        batches = seeded(lambda: list(DataLoader(Caught(self.dataset, self.at), SIZE, collate_fn=as_list, **options)))
        return batches  # type: ignore[no-any-return]


class Caught(Dataset[Any]):
    """Stock code around a dataset, which may draw for a broken file, but gives no sample of it."""

    def __init__(self, dataset: Named, at: int) -> None:
        self.dataset, self.at = dataset, at

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        try:
            sample = self.dataset[index]
        except OSError:
            return None
        return None if index == self.at else sample


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(4)
    random.seed(4)
    return make()


def left(samples: list[Any], policy: str) -> Any:
    """The batch of stock code with what a policy leaves of it."""
    good = [sample for sample in samples if sample is not None]
    if policy == "skip":
        return default_collate(good)
    after = [[sample for sample in samples[begin:] if sample is not None] or good for begin in range(len(samples))]
    return default_collate([found[0] for found in after])


def loaded(broken: Broken, sinks: bool, device: str, policy: str, **options: Any) -> list[Any]:
    """The batches, with copies of their tensors."""
    with torch_sink.image_backend("device", device=device, on_decode_error=policy):  # type: ignore[arg-type]
        loader: Any = DataLoader(broken.dataset, SIZE, **options)
        if not sinks:
            return seeded(lambda: [on_host(batch, device) for batch in loader])  # type: ignore[no-any-return]
        with SinkLoader(loader, device=device) as batches:
            return seeded(lambda: [on_host(batch, "cpu") for batch in batches])  # type: ignore[no-any-return]


def on_host(batch: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda one: one.to(device).cpu().clone(), batch)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize(("kind", "at"), [("no image", 2), ("truncated", 7), ("in its scan", 2)])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sink"])
@pytest.mark.sampled(16)
def test_all_views_lose_the_same_sample(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    sinks: bool,
    kind: str,
    policy: str,
    at: int,
    workers: int,
) -> None:
    broken = Broken(tmp_path, kind, at, monkeypatch)
    if kind == "in its scan" and not sinks:
        with pytest.raises(DecodeError, match="broken data stream"):
            loaded(broken, sinks, device, policy, num_workers=workers)
        return
    expected = [left(samples, policy) for samples in broken.samples(num_workers=workers)]
    made = loaded(broken, sinks, device, policy, num_workers=workers)
    assert len(made) == len(expected) == COUNT // SIZE
    for batch, stock in zip(made, expected, strict=True):
        assert_equals(batch, stock)
    report = torch_sink.decode_report()
    assert (report.skipped, report.replaced) == ((1, 0) if policy == "skip" else (0, 1))
    assert list(report.files) == [broken.path]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["truncated", "in its scan"])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sink"])
@pytest.mark.sampled(8)
def test_raising_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, sinks: bool, kind: str, workers: int
) -> None:
    broken = Broken(tmp_path, kind, 2, monkeypatch)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - stock code's, of several kinds
        loaded(broken, sinks, device, "raise", num_workers=workers)
    assert broken.path in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert not torch_sink.decode_report()


def test_each_view_raises_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_cuda: Any) -> None:
    monkeypatch.setattr(batch_module, "kernels_make", lambda *_: False)
    broken = Broken(tmp_path, "in its scan", 2, monkeypatch)
    with torch_sink.image_backend("device", device="cuda"):
        first, second = seeded(lambda: list(DataLoader(broken.dataset, SIZE)))
    assert len(recorded(first)) == len(ALL)
    for one in (*recorded(first), recorded(first)[0]):
        with pytest.raises(DecodeError) as caught:
            one.to("cuda")
        assert (caught.value.path, caught.value.index_in_batch) == (broken.path, 2)
    assert_equals(second, left(broken.samples()[1], "skip"), "cuda")


# --- batches of different sizes


def collate_uneven(samples: list[Any]) -> Any:
    """Two batches, each with its labels: the first of all samples, and the second of all but the first and another."""
    views, paths = zip(*samples, strict=True)
    several = views, views[2:]
    return [
        (torch.stack([view["global"][0] for view in chosen]), torch.tensor([view["index"] for view in chosen]))
        for chosen in several
    ], [*paths]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("policy", ["skip", "replace"])
@pytest.mark.parametrize("at", [1, 3])
def test_batches_of_different_sizes_lose_their_own_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_cuda: Any, at: int, policy: str, first: int
) -> None:
    """Each is in step with its labels; one without the file is whole."""
    monkeypatch.setattr(batch_module, "kernels_make", lambda *_: False)
    broken = Broken(tmp_path, "in its scan", at, monkeypatch)

    def collate(samples: list[Any]) -> Any:
        pairs, paths = collate_uneven(samples)
        return pairs[first:] + pairs[:first], paths

    indices = [range(SIZE), range(2, SIZE)]
    all_images = default_collate([view["global"][0] for view, _ in (broken.dataset[number] for number in range(SIZE))])
    with torch_sink.image_backend("device", device="cuda", on_decode_error=policy):  # type: ignore[arg-type]
        loader = DataLoader(broken.dataset, SIZE, collate_fn=collate)
        with SinkLoader(loader, device="cuda") as batches:
            pairs, _ = seeded(lambda: on_host(next(iter(batches)), "cpu"))
        report = torch_sink.decode_report()
    for (images, labels), given in zip(pairs, indices[first:] + indices[:first], strict=True):
        left_over = [index for index in given if index != at]
        if policy == "replace":
            left_over = [next((good for good in left_over if good >= index), left_over[0]) for index in given]
        assert labels.tolist() == left_over
        assert torch.equal(images, all_images[left_over])
    assert list(report.files) == [broken.path]
