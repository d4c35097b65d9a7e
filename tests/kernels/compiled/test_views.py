"""Several views of an image by compiled kernels: side by side, and on several streams of the fake device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from image.check import assert_same_bits
from simulators.executor.on_fake_cuda import compiled_on_fake_cuda
from simulators.executor.project import Executor, compiled_on_cpu
from simulators.fake_cuda import FakeCuda, fake_cuda
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from torch_sink.cli.photos import make_photo
from torch_sink.image.run import batch
from torch_sink.image.run.batch import LazyBatch

__all__ = ["fake_cuda"]

pytestmark = pytest.mark.once

VIEWS = [
    v1.Compose([v1.RandomResizedCrop(9), v1.RandomHorizontalFlip(), v1.ToTensor()]),
    v1.Compose([v1.RandomResizedCrop((5, 70)), v1.RandomAutocontrast(1.0), v1.PILToTensor()]),
    v1.Compose([v1.RandomResizedCrop(11), v1.ColorJitter(0.4, 0.4), v1.ToTensor()]),
    v1.Compose([v1.CenterCrop(9), v1.ToTensor()]),
]
SEEDS = range(2)


def collate(seeds: list[int]) -> Any:
    images = [make_photo(31, 22, seed) for seed in seeds]
    return default_collate([[view(image) for view in VIEWS] for image in images])


def loaded() -> Any:
    torch.manual_seed(1)
    return next(iter(DataLoader(SEEDS, len(SEEDS), collate_fn=collate)))


def test_views_side_by_side() -> None:
    expected = loaded()
    with compiled_on_cpu() as executor, torch_sink.image_backend("device"):
        views = loaded()
        how = [{"memory_format": torch.channels_last} if at == 2 else {} for at in range(len(VIEWS))]
        made = LazyBatch.__torch_sink_execute_all__(views, "cpu", how)
    for (one, _), stock in zip(made, expected, strict=True):
        assert_same_bits(one.contiguous(), stock)
    assert not executor.faults
    assert executor.launches["prologue_kernel"] == 1
    # Those of floats, and those of bytes.
    assert executor.launches["stage_kernel"] <= 2 * max(len(view.images.batch.launches) for view in views)


@pytest.fixture
def device(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setattr(batch, "kernels_make", lambda *_: True)
    with compiled_on_fake_cuda(fake_cuda) as executor, torch_sink.image_backend("device", device="cuda"):
        yield executor
    assert not executor.faults


@pytest.fixture
def expected() -> Any:
    return loaded()


@pytest.mark.parametrize("fake_cuda", [{"seed": seed} for seed in range(3)], indirect=True)
@pytest.mark.sampled(1)
def test_a_stream_waits_for_what_another_has_decoded(expected: Any, device: Executor) -> None:
    views, streams = loaded(), [torch.cuda.Stream() for _ in VIEWS]
    made = []
    for at, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            made.append(views[at].to("cuda"))
    # Memory that was free too early is written to here.
    for stream in (torch.cuda.current_stream(), *streams):
        with torch.cuda.stream(stream):
            for size in (1 << 8, 1 << 12, 1 << 16):
                torch.full((size,), 7, dtype=torch.uint8, device="cuda")
    for one, stream, stock in zip(made, streams, expected, strict=True):
        stream.synchronize()
        assert_same_bits(one.cpu(), stock)


@pytest.mark.parametrize("fake_cuda", [{"seed": seed} for seed in range(3)], indirect=True)
@pytest.mark.sampled(1)
def test_a_stream_waits_for_the_batch_that_its_own_was_mixed_of(fake_cuda: FakeCuda, device: Executor) -> None:
    """A program of one batch has two that are made of it."""

    def made(move: Callable[[Any, int], Any]) -> list[Any]:
        torch.manual_seed(2)
        plain = next(iter(DataLoader(SEEDS, len(SEEDS), collate_fn=collate_one)))
        mixed, _ = v2.MixUp(num_classes=2)(plain, torch.tensor([0, 1]))
        return [move(plain, 0), move(mixed, 1)]

    with torch_sink.image_backend("PIL"):
        stock = made(lambda images, at: images)
    streams = [torch.cuda.Stream() for _ in stock]

    def on_stream(images: Any, at: int) -> Any:
        with torch.cuda.stream(streams[at]):
            return images.to("cuda")

    ours = made(on_stream)
    for stream in (torch.cuda.current_stream(), *streams):
        with torch.cuda.stream(stream):
            torch.full((1 << 12,), 7, dtype=torch.uint8, device="cuda")
    for one, stream, wanted in zip(ours, streams, stock, strict=True):
        stream.synchronize()
        torch.testing.assert_close(one.cpu(), wanted)


def collate_one(seeds: list[int]) -> Any:
    return default_collate([VIEWS[2](make_photo(31, 22, seed)) for seed in seeds])


def test_threads_make_views_at_once(expected: Any, device: Executor) -> None:
    views, made = loaded(), dict[int, torch.Tensor]()

    def make(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            made[at] = views[at].to("cuda").cpu()

    threads = [threading.Thread(target=make, args=(at,)) for at in range(len(VIEWS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, stock in enumerate(expected):
        assert_same_bits(made[at], stock)


def test_slots_count_all_views(expected: Any, device: Executor) -> None:
    loader = DataLoader(SEEDS, len(SEEDS), collate_fn=collate)
    making = loaded()[0].program.device_bytes
    torch.manual_seed(1)
    with torch_sink.SinkLoader(loader, slots=2) as batches:
        for views in batches:
            for one, stock in zip(views, expected, strict=True):
                assert_same_bits(one.cpu(), stock)
            slots = 2 * sum(one.numel() * one.element_size() for one in views)
            assert batches.stats().bytes_held == slots + making
            assert f"{making:,} bytes while a batch is made" in repr(batches)
    assert device.launches["prologue_kernel"] == 1


@pytest.mark.parametrize("rounds", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_memory_of_a_loop_is_flat(device: Executor, rounds: int) -> None:
    seen = []
    for number in range(rounds):
        views = loaded()
        made = [view.to("cuda") for view in views[number % 2 :]]
        del views
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
        del made
    assert seen[2:] == seen[:-2]


@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
def test_views_on_two_devices_and_the_cpu(expected: Any, device: Executor) -> None:
    views = loaded()
    places = ["cuda:1", "cuda:0", "cpu", "cuda:1"]
    made = [view.to(place) for view, place in zip(views, places, strict=True)]
    assert [str(one.device) for one in made] == places
    for one, stock in zip(made, expected, strict=True):
        assert_same_bits(one.cpu(), stock)
    del made, one
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert [torch.cuda.memory_allocated(each) for each in range(2)] == [0, 0]
