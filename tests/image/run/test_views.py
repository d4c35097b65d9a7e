"""Batches that one `collate` makes: what they share, how it travels, and how many launches and decodings they take."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from simulators.fake_cuda import FakeCuda, fake_cuda
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import encoded, write_classes
from image.check import assert_same_bits
from image.views import META, assert_shared, in_slots, launched, made_there, programs_of, recorded
from torch_sink.image.program.program import Wanted
from torch_sink.image.run.device import ProgramOnDevice
from torch_sink.sink.openers import DataLoaderOpener

__all__ = ["fake_cuda", "launched"]

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

COUNT = 6


def view(size: int) -> v1.Compose:
    """One of DINO's, smaller."""
    return v1.Compose(
        [
            v1.RandomResizedCrop(size),
            v1.RandomHorizontalFlip(),
            v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
            v1.RandomGrayscale(0.2),
            v1.RandomApply([v1.GaussianBlur(3)], p=0.5),
            v1.ToTensor(),
            v1.Normalize((0.4,), (0.2,)),
        ]
    )


DINO = [view(24)] * 2 + [view(10)] * 8


def views_of(image: Any, container: Callable[[list[Any]], Any] = list) -> Any:
    return container([one(image) for one in DINO])


def named(views: list[Any]) -> dict[str, Any]:
    return {str(number): one for number, one in enumerate(views)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classes(tmp_path_factory.mktemp("images"), COUNT)


def loaded(dataset: Any, **options: Any) -> Any:
    with torch_sink.image_backend("device", device="meta", strict=True):
        (batch,) = DataLoader(dataset, COUNT, **options)
    return batch


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}], ids=["here", "worker"])
@pytest.mark.parametrize("container", [list, tuple, named])
@pytest.mark.sampled(3)
def test_a_file_is_in_the_block_once(folder: Path, container: Any, workers: dict[str, Any]) -> None:
    one = loaded(ImageFolder(str(folder), DINO[0]), **workers)
    batch = loaded(ImageFolder(str(folder), functools.partial(views_of, container=container)), **workers)
    assert_shared(batch, len(DINO), COUNT)
    files = sum(path.stat().st_size for path in folder.rglob("*.jpg"))
    of_files = [sum(len(source.data) for source in programs_of(each)[0].packed.sources()) for each in (batch, one)]
    assert of_files == [files, files]


@pytest.mark.slow
def test_spawned_workers_and_slabs(folder: Path) -> None:
    dataset = ImageFolder(str(folder), views_of)
    batch = loaded(dataset, num_workers=1, multiprocessing_context="spawn")
    assert_shared(batch, len(DINO), COUNT)
    with torch_sink.image_backend("device", device="meta"):
        opener = DataLoaderOpener(DataLoader(dataset, COUNT, num_workers=1), None)
        assert opener.make_pool() is not None
        batches = list(opener.open())
        opener.close()
    assert_shared(batches[0], len(DINO), COUNT)


class OfArrays(Dataset[Any]):
    """Images that are no files."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        data = encoded(30, 20, index, kind="PNG" if self.kind == "PNG" else "JPEG")
        image = Image.open(io.BytesIO(data)).convert("RGB")
        if self.kind == "array":
            image = Image.fromarray(torch.full((20, 30, 3), index, dtype=torch.uint8).numpy())
        return views_of(image)


@pytest.mark.parametrize("kind", ["PNG", "array", "JPEG without a name"])
def test_images_without_a_name(kind: str) -> None:
    (program,) = programs_of(loaded(OfArrays(kind)))
    assert len(program.packed.contents.entries) == COUNT


class Pairs(Dataset[Any]):
    """An image with its five crops and a mask."""

    def __init__(self, folder: Path) -> None:
        self.images = ImageFolder(str(folder))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.images[index]
        mask = F.resize(image.convert("L"), [16, 16], F.InterpolationMode.NEAREST)
        whole = F.to_tensor(F.resize(image, [20, 20]))
        crops = [F.to_tensor(crop) for crop in F.five_crop(F.resize(image, [24, 24]), [12, 12])]
        return {"whole": whole, "crops": torch.stack(crops), "mask": F.pil_to_tensor(mask), "label": label}


def test_five_crops_a_mask_and_a_whole_image(folder: Path) -> None:
    batch = loaded(Pairs(folder))
    assert [tuple(leaf.shape[1:]) for leaf in recorded(batch)] == [(3, 20, 20), (5, 3, 12, 12), (1, 16, 16)]
    (program,) = programs_of(batch)
    assert len(program.packed.contents.entries) == COUNT


def for_a_gan(samples: list[Any]) -> Any:
    """Two crops of each file, in batches that the collate function makes by itself."""
    crops = [[F.to_tensor(F.resized_crop(image, at, at, 9, 9, [8, 8])) for image, _ in samples] for at in (0, 3)]
    return {
        "real": torch.stack(crops[0]),
        "other": default_collate(crops[1]),
        "labels": [label for _, label in samples],
    }


def test_a_collate_of_its_own(folder: Path) -> None:
    assert_shared(loaded(ImageFolder(str(folder)), collate_fn=for_a_gan), 2, COUNT)


def test_batches_that_nobody_joins_are_alone(folder: Path) -> None:
    with torch_sink.image_backend("device", device="meta"):
        dataset = ImageFolder(str(folder), views_of)
        views, _ = default_collate([dataset[index] for index in range(3)])
    assert len(programs_of(views)) == len(DINO)


def test_what_a_program_writes_to_is_packed_at_once(folder: Path) -> None:
    memory = torch.zeros(3, 24, 24)

    def collate(samples: list[Any]) -> Any:
        batch = (
            default_collate([samples[0][0], memory.clone(), memory]),
            default_collate([sample[0] for sample in samples]),
        )
        memory.fill_(1)
        return batch

    mixed, _ = loaded(ImageFolder(str(folder), DINO[0]), collate_fn=collate)
    assert (mixed.program.packed.source(2).decode() == 0).all()


# --- launches


def test_views_are_decoded_once(folder: Path, launched: Counter[str]) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    made_there(batch[3:] + batch[:3])
    assert launched["decoding"] == launched["prologue_kernel"] == 1
    assert launched["stage_kernel"] == sum(
        launch.begin < launch.end for each in batch for launch in each.images.batch.launches
    )


def test_a_slot_makes_all_views_side_by_side(folder: Path, launched: Counter[str]) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    alone = []
    for one in pickle.loads(pickle.dumps(batch)):
        launched.clear()
        made_there([one])
        alone.append(launched.total())
    launched.clear()
    in_slots(batch)
    assert launched["decoding"] == launched["prologue_kernel"] == 1
    assert launched.total() <= max(alone) + 2
    stages = {len(each.images.batch.launches) for each in batch}
    assert {launched["stage_kernel"]} == stages


def test_other_formats_take_another_prologue(folder: Path, launched: Counter[str]) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    formats = torch.contiguous_format, torch.channels_last
    for number, one in enumerate(batch):
        one.images.shared.make([(one.images, Wanted(META, torch.bfloat16, formats[number % 2]))])
    assert (launched["decoding"], launched["prologue_kernel"]) == (1, 2)


def test_a_subset_of_the_views(folder: Path, launched: Counter[str]) -> None:
    """Those whose tiles are not neighbors have launches of their own."""
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    in_slots([batch[0], batch[1], batch[5]])
    assert launched["decoding"] == 1
    assert launched["stage_kernel"] <= 2 * len(batch[0].images.batch.launches)


def test_a_plan_is_that_of_its_view(folder: Path) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    text = str(batch[2].plan)
    assert text.startswith(f"decode: {COUNT} by ")
    assert text.endswith("-> [3, 10, 10]")
    assert str(batch[0].program).endswith("-> [3, 24, 24], [3, 24, 24]" + ", [3, 10, 10]" * 8)


# --- memory


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch, launched: Counter[str]) -> weakref.WeakSet[Any]:
    """What programs hold on a device."""
    found: weakref.WeakSet[Any] = weakref.WeakSet()
    begin = ProgramOnDevice.__init__
    monkeypatch.setattr(ProgramOnDevice, "__init__", lambda made, *given: (found.add(made), begin(made, *given))[1])
    return found


def test_pixels_are_freed_with_the_last_view(folder: Path, alive: weakref.WeakSet[Any]) -> None:
    gc.disable()  # by reference counts alone
    try:
        batch, _ = loaded(ImageFolder(str(folder), views_of))
        made_there(batch[:8])
        assert len(alive) == 1
        made_there(batch[:2])
        assert len(alive) == 1
        made_there(batch[8:9])
        del batch[9]
        assert not alive
        made_there(batch[:1])
        assert not alive
    finally:
        gc.enable()


def test_a_view_that_was_read_on_the_cpu_holds_nothing(folder: Path, alive: weakref.WeakSet[Any]) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    made_there(batch[1:])
    assert len(alive) == 1
    batch[0].images.real()
    assert not alive


def test_views_that_nobody_moves_hold_nothing(folder: Path, alive: weakref.WeakSet[Any]) -> None:
    for number in range(30):
        batch, _ = loaded(ImageFolder(str(folder), v1.Lambda(lambda image: [DINO[0](image), DINO[2](image)])))
        made_there(batch[number % 2 :][:1])
        assert len(alive) == 1
        del batch
        assert not alive


def test_a_mixed_view_shares_the_decoding(folder: Path, launched: Counter[str]) -> None:
    batch, labels = loaded(ImageFolder(str(folder), views_of))
    with torch_sink.image_backend("device", device="meta"):
        mixed, _ = v2.MixUp(num_classes=9)(batch[0], labels)
    made_there([mixed, *batch[1:]])
    assert launched["decoding"] == 1


# --- several devices

TWO_DEVICES = pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)


@pytest.fixture
def two_devices(fake_cuda: FakeCuda, launched: Counter[str]) -> Iterator[None]:
    """Kernels do nothing on them, so Pillow decodes."""
    torch_sink.set_decode_provider("pillow")
    yield
    torch_sink.set_decode_provider(None)


def recorded_for_cuda(folder: Path, container: Any = list) -> Any:
    with torch_sink.image_backend("device", device="cuda"):
        torch.manual_seed(5)
        return next(
            iter(DataLoader(ImageFolder(str(folder), functools.partial(views_of, container=container)), COUNT))
        )[0]


def allocated() -> list[int]:
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    return [torch.cuda.memory_allocated(device) for device in range(2)]


@TWO_DEVICES
def test_views_on_two_devices_and_the_cpu(folder: Path, two_devices: None, launched: Counter[str]) -> None:
    torch.manual_seed(5)
    expected, _ = next(iter(DataLoader(ImageFolder(str(folder), views_of), COUNT)))
    batch = recorded_for_cuda(folder)
    made = [batch[0].to("cuda:1"), batch[1].to("cuda:0"), batch[2].to("cuda:1"), batch[3].cuda(1), batch[4].cuda()]
    assert [one.device.index for one in made] == [1, 0, 1, 1, 0]
    assert launched["decoding"] == 2
    assert_same_bits(batch[5].to("cpu", copy=True), expected[5])
    assert_same_bits(batch[6] + 0, expected[6])
    assert launched["decoding"] == 2
    del made, batch[5:]
    assert allocated() == [0, 0]
    assert_same_bits(batch[0].to("cpu", copy=True), expected[0])


@TWO_DEVICES
@pytest.mark.parametrize("first", range(0, 40, 10))
@pytest.mark.sampled(2)
def test_views_moved_in_any_way(folder: Path, two_devices: None, launched: Counter[str], first: int) -> None:
    """On each device the files are decoded while no view that waits has their pixels, which the last of these frees."""
    for seed in range(first, first + 10):
        chance = random.Random(seed)
        views = dict(enumerate(recorded_for_cuda(folder)[: chance.randint(2, 5)]))
        waiting, on_cpu, decoded = {*views}, set[int](), 0
        holders: list[set[int]] = [set(), set()]
        launched.clear()
        for _ in range(chance.randint(3, 12)):
            at = chance.choice([*views]) if views else 0
            action = chance.choice(("move", "move", "move", "cpu", "copy", "forget"))
            if not views:
                break
            if action == "move":
                device = chance.randrange(2)
                views[at].to(f"cuda:{device}", dtype=chance.choice((None, torch.float16)))
                if at not in on_cpu and not holders[device]:
                    decoded, holders[device] = decoded + 1, {*waiting}
            elif action == "cpu":
                views[at].to("cpu", copy=True)
                on_cpu.add(at)
            elif action == "copy":
                copy.deepcopy([*views.values()])
                continue
            else:
                del views[at]
            waiting.discard(at)
            for held in holders:
                held.discard(at)
            assert launched["decoding"] == decoded, seed
            assert [size > 0 for size in allocated()] == [bool(held) for held in holders], seed
        views.clear()
        assert allocated() == [0, 0]


# --- travel


def test_copies_stay_together(folder: Path) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    size = batch[0].program.block.nbytes
    for copied in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
        assert_shared(copied, len(DINO), COUNT)
        assert copied[0].images.shared is not batch[0].images.shared
    assert len(pickle.dumps(batch)) < size + 20_000
    assert copy.copy(batch[3]).images is batch[3].images
    assert_shared(pickle.loads(pickle.dumps(batch[2:4])), 2, COUNT)


@pytest.mark.parametrize("container", [list, tuple, named])
def test_files_are_in_the_bytes_once(folder: Path, container: Any) -> None:
    batch, _ = loaded(ImageFolder(str(folder), functools.partial(views_of, container=container)))
    scans = [path.read_bytes()[-90:-40] for path in folder.rglob("*.jpg")]
    assert [pickle.dumps(batch).count(scan) for scan in scans] == [1] * COUNT
    first, second, third = recorded(batch)[:3]
    # Views of which one is gone, or has its values.
    assert [pickle.dumps({"views": (second, [third])}).count(scan) for scan in scans] == [1] * COUNT
    first.images.destination = "cpu"
    first.images.real()
    assert [pickle.dumps((first, second, third)).count(scan) for scan in scans] == [1] * COUNT
    assert [pickle.dumps(first).count(scan) for scan in scans] == [0] * COUNT


@pytest.mark.parametrize("container", [list, tuple, named])
def test_what_is_copied_holds_its_files_once(folder: Path, container: Any) -> None:
    batch, _ = loaded(ImageFolder(str(folder), functools.partial(views_of, container=container)))
    deep, shallow = copy.deepcopy(batch), copy.copy(batch)
    blocks = [{one.program.block.data_ptr() for one in recorded(each)} for each in (batch, deep, shallow)]
    assert [len(found) for found in blocks] == [1, 1, 1]
    assert blocks[0] == blocks[2] != blocks[1]
    assert_shared(deep, len(DINO), COUNT)


@TWO_DEVICES
@pytest.mark.parametrize("container", [list, tuple, named])
def test_pinned_views_are_decoded_once(folder: Path, two_devices: None, launched: Counter[str], container: Any) -> None:
    """As the thread that pins memory does it; the views that it was given may go."""
    batch = pin_memory(recorded_for_cuda(folder, container))
    views = recorded(batch)
    assert_shared(batch, len(DINO), COUNT)
    assert all(one.is_pinned() for one in views)
    for one in reversed(views):
        one.to("cuda:1")
    assert launched["decoding"] == 1
    assert allocated() == [0, 0]


def test_a_block_is_pinned_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    pinned: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.nbytes) or tensor.clone())
    there = [one.pin_memory() for one in batch]
    assert pinned == [batch[0].program.block.nbytes]
    assert_shared(there, len(DINO), COUNT)


def test_views_of_one_batch_share_their_values_behind_a_pickle(folder: Path) -> None:
    batch, _ = loaded(ImageFolder(str(folder), views_of))
    whole, part = pickle.loads(pickle.dumps((batch[0], batch[0].view(2, -1, 3, 24, 24))))
    assert whole.images is part.images


def test_values_on_the_cpu(folder: Path) -> None:
    """Equal those of stock code, also after `torch.save`, whichever views are left."""
    torch.manual_seed(5)
    expected, _ = next(iter(DataLoader(ImageFolder(str(folder), views_of), COUNT)))
    torch.manual_seed(5)
    with torch_sink.image_backend("device", device="meta"):
        (batch, _) = next(iter(DataLoader(ImageFolder(str(folder), views_of), COUNT)))
    for one in batch:
        one.images.destination = "cpu"
    memory = io.BytesIO()
    torch.save(batch[1:3], memory)
    memory.seek(0)
    for made, stock in zip(torch.load(memory), expected[1:3], strict=True):
        assert_same_bits(made, stock)
    for made, stock in zip(batch[4:], expected[4:], strict=True):
        assert_same_bits(made + 0, stock)


def test_errors_of_the_join_are_raised_in_the_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ZeroDivisionError("no program")

    monkeypatch.setattr("torch_sink.image.run.batch.make_program", refuse)
    for options in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        with pytest.raises(ZeroDivisionError, match="no program"):
            loaded(ImageFolder(str(folder), views_of), **options)
