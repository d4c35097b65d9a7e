"""Data workers: every start method gives stock's batches, and a worker of a device decodes nothing."""

from __future__ import annotations

import copy
import gc
import io
import json
import multiprocessing.reduction
import operator
import pickle
from itertools import compress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import pil_loader
from torchvision.transforms.functional import to_tensor

import torch_sink
from image.check import assert_same_bits
from image.worker_data import WatchedCollate, count_decodes, jitter_transform, sharpened_transform, train_transform
from torch_sink.image import reroute
from torch_sink.image.program.launches import make_program
from torch_sink.image.program.program import ARRAYS
from torch_sink.image.run.batch import Images, LazyBatch
from torch_sink.image.run.shared import SharedProgram
from torch_sink.sink.openers import DataLoaderOpener

SAMPLES, EPOCHS = 10, 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # From Python 3.12 on, starting a worker by fork warns when the process has threads.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def some_images(folder: Path, transform: Any) -> Subset[Any]:
    images = ImageFolder(str(folder), transform)
    return Subset(images, range(0, len(images), max(len(images) // SAMPLES, 1))[:SAMPLES])


def epochs_of(dataset: Any, **loader: Any) -> list[list[torch.Tensor]]:
    """Batches of all epochs, seeded alike."""
    torch.manual_seed(77)
    batches = DataLoader(dataset, batch_size=4, shuffle=True, **loader)
    return [list(batch) for _ in range(EPOCHS) for batch in batches]


def assert_same_batches(actual: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    assert len(actual) == len(expected) == EPOCHS * 3
    for (images, targets), (stock_images, stock_targets) in zip(actual, expected, strict=True):
        assert_same_bits(images, stock_images)
        assert torch.equal(targets, stock_targets)


# A worker that is spawned imports torch anew, which takes seconds; one of a server gets the same, and is a fork.
FAST = [(None, 0, False), ("fork", 1, True), ("fork", 2, False), ("forkserver", 1, True)]
ALL = [
    (method, count, keep) for method in ("fork", "forkserver", "spawn") for count in (1, 4) for keep in (True, False)
]


@pytest.mark.parametrize(
    ("start_method", "workers", "persistent"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FAST)],
)
def test_batches_equal_stock(
    photos: Path, start_method: str | None, workers: int, persistent: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = some_images(photos, train_transform())
    loader = {"num_workers": workers, "persistent_workers": persistent, "pin_memory": True}
    # Draws depend on the number of workers, not on how they are started: the reference may take the fastest way.
    expected = epochs_of(dataset, multiprocessing_context="fork" if workers else None, **loader)
    stock_state = torch.get_rng_state()
    with torch_sink.image_backend("device", device="cpu"):
        made = epochs_of(dataset, multiprocessing_context=start_method, **loader)
        report = torch_sink.fallback_report()
    assert torch.equal(torch.get_rng_state(), stock_state)
    assert_same_batches(made, expected)
    assert len({batch[0].sum().item() for batch in expected}) == len(expected), "the epochs draw alike"
    assert not report, str(report)
    gc.collect()
    assert capfd.readouterr().err == ""  # nor from workers that end


def test_batches_in_slabs_equal_stock(photos: Path) -> None:
    """What is recorded for a device, made on the CPU from the files as they lie in memory that is used again."""
    dataset = some_images(photos, train_transform())
    expected = epochs_of(dataset, num_workers=1, persistent_workers=True)
    kept = []
    torch.manual_seed(77)
    with torch_sink.image_backend("device", device="meta"):
        opener = DataLoaderOpener(DataLoader(dataset, 4, shuffle=True, num_workers=1, persistent_workers=True), None)
        pool = opener.make_pool()
        assert pool is not None
        for images, targets in (batch for _ in range(EPOCHS) for batch in opener.open()):
            kept.append(
                [
                    LazyBatch(
                        Images.of(SharedProgram(images.program._replace(destination="cpu")), images.images.batch)
                    ),
                    targets,
                ]
            )
            if len(kept) % 3:
                kept[-1] = [kept[-1][0].materialize(), targets.clone()]
        opener.close()
    assert pool.batches_received == EPOCHS * 3
    assert_same_batches([[images.to("cpu"), targets] for images, targets in kept], expected)


@pytest.mark.parametrize("transform", [jitter_transform, sharpened_transform])
@pytest.mark.sampled(1)
def test_batches_equal_stock_without_persistent_workers(photos: Path, transform: Any) -> None:
    dataset = some_images(photos, transform())
    expected = epochs_of(dataset, num_workers=2, multiprocessing_context="fork")
    with torch_sink.image_backend("device", device="cpu"):
        made = epochs_of(dataset, num_workers=2, multiprocessing_context="fork")
        report = torch_sink.fallback_report()
    assert_same_batches(made, expected)
    assert not report, str(report)


def test_a_batch_crosses_as_its_block(photos: Path) -> None:
    """Its arrays lie in it, whichever copy of it that is; they are those of a program made here."""
    images = ImageFolder(str(photos), train_transform())
    with torch_sink.image_backend("device", device="meta"):
        loader = DataLoader(images, len(images), num_workers=1, multiprocessing_context="fork")
        (batch,) = [images for images, _ in loader]
    there = batch.program
    assert len(pickle.dumps(there[1:])) < 2048
    sources, entries = there.packed.sources(), there.packed.entry_of_image
    anew = make_program(
        [sources[at] for at in entries],
        there.packed.calls(),
        [(each.shape, each.dtype) for each in there.batches],
        *there[2:4],
    )
    for crossed in (
        there,
        there._replace(packed=there.packed.in_block(there.packed.blob.clone())),
        pickle.loads(pickle.dumps(there)),
    ):
        assert crossed[1:] == anew[1:]
        assert list(crossed.arrays) == list(ARRAYS)
        for name in ARRAYS:
            found = crossed.array(name)
            np.testing.assert_array_equal(found, anew.array(name))
            assert np.shares_memory(found, crossed.block.numpy()) or not found.size
        assert crossed.jpegs.size > 0
        assert crossed.packed.calls() == there.packed.calls()


def what_workers_did(folder: Path, dataset: Any, workers: int, start_method: str) -> list[dict[str, Any]]:
    for _ in DataLoader(
        dataset,
        batch_size=2,
        num_workers=workers,
        multiprocessing_context=start_method,
        worker_init_fn=count_decodes,
        collate_fn=WatchedCollate(folder, start_method),
    ):
        pass
    return [json.loads(file.read_text()) for file in sorted(folder.iterdir())]


def jpegs(folder: Path, transform: Any) -> Subset[Any]:
    """JPEG files only: what else there is has to be decoded at once."""
    images = ImageFolder(str(folder), transform)
    chosen = [at for at, (path, _) in enumerate(images.samples) if path.lower().endswith((".jpg", ".jpeg"))]
    return Subset(images, chosen[:8])


@pytest.mark.parametrize(
    ("start_method", "workers", "transform"),
    [
        ("fork", 2, train_transform),
        ("fork", 2, sharpened_transform),
        ("forkserver", 1, train_transform),
        ("forkserver", 1, sharpened_transform),
    ],
)
def test_a_worker_of_a_device_decodes_nothing(
    photos: Path, tmp_path: Path, start_method: str, workers: int, transform: Any
) -> None:
    with torch_sink.image_backend("device", device="meta"):
        seen = what_workers_did(tmp_path, jpegs(photos, transform()), workers, start_method)
    assert seen == [{"decodes": 0, "cuda": False, "kernels": False}] * workers


def test_decodes_are_counted_where_the_cpu_executes(photos: Path, tmp_path: Path) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        (seen,) = what_workers_did(tmp_path, jpegs(photos, train_transform()), 1, "fork")
    assert seen["decodes"] >= 8
    assert not seen["kernels"]


def functions_replaced() -> list[Any]:
    """Those in modules of torchvision and Pillow, as they are now."""
    places = [(owner, name) for owner, name, _ in reroute.rows() if isinstance(owner, ModuleType)]
    found = [vars(owner)[name] for owner, name in places if owner.__name__.startswith(("torchvision.", "PIL."))]
    return [function for function in found if callable(function) and hasattr(function, "__qualname__")]


def dumped(value: Any) -> bytes:
    """What a process that is spawned would be given."""
    written = io.BytesIO()
    multiprocessing.reduction.dump(value, written)
    return written.getvalue()


def identities(functions: list[Any]) -> list[int]:
    return [next(at for at, other in enumerate(functions) if other is function) for function in functions]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_functions_cross_to_processes_of_any_start_method() -> None:
    """Whenever a program imported them; and one function is one object everywhere."""
    stock = functions_replaced()
    is_public = [function.__name__[0] != "_" for function in stock]
    with torch_sink.image_backend("device", device="cpu"):
        replaced = functions_replaced()
        assert identities(replaced) == identities(stock)
        assert len(set(identities(stock))) > 60
        public = list(compress(replaced, is_public))
        assert pickle.loads(pickle.dumps([*public, v1.Lambda(Image.fromarray)]))[:-1] == public
        assert copy.deepcopy(public) == public
        pickle.dumps(default_collate_fn_map)
        of_stock, of_ours = dumped(stock), dumped(public)
        assert pickle.loads(of_stock) == stock
    assert pickle.loads(of_stock) == stock
    # As in a worker, where the backend is not on yet.
    assert pickle.loads(of_ours) == list(compress(stock, is_public))
    with torch_sink.image_backend("device", device="cpu"):
        torch.jit.script(torch.nn.Identity())
        assert all(map(operator.is_, functions_replaced(), replaced))
        assert pickle.loads(pickle.dumps(public)) == public


def test_what_a_program_pickles_with_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pickler(multiprocessing.reduction.ForkingPickler):
        def reducer_override(self, value: Any) -> Any:
            return (complex, (3, 4)) if value is pytest else NotImplemented

    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.reduction, "ForkingPickler", Pickler)
        with torch_sink.image_backend("device", device="cpu"):
            assert pickle.loads(dumped([pytest, pil_loader])) == [3 + 4j, pil_loader]
    monkeypatch.setattr(multiprocessing.reduction, "dump", lambda value, file, protocol=None: file.write(b"mine"))
    with torch_sink.image_backend("device", device="cpu"):
        assert dumped(pil_loader) == b"mine"


def test_a_forked_server_gets_functions_that_were_imported_before(photos: Path) -> None:
    dataset = ImageFolder(str(photos), v1.Compose([v1.CenterCrop(20), to_tensor]), loader=pil_loader)
    few = Subset(dataset, range(4))
    expected = next(iter(DataLoader(few, 4)))
    with torch_sink.image_backend("device", device="cpu"):
        found = next(iter(DataLoader(few, 4, num_workers=1, multiprocessing_context="forkserver")))
    assert_same_bits(found[0], expected[0])


def test_workers_that_already_run_keep_their_backend(photos: Path) -> None:
    dataset = some_images(photos, train_transform())
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    with torch_sink.image_backend("device", device="meta"):
        assert isinstance(next(iter(loader))[0], LazyBatch)
    assert isinstance(next(iter(loader))[0], LazyBatch)
    fresh = DataLoader(dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert type(next(iter(fresh))[0]) is torch.Tensor


class Tracked(Dataset[int]):
    """How many objects a full collection would go through in a data worker."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return len(gc.get_objects())


def test_a_full_collection_spares_what_there_was_before_the_worker() -> None:
    """It goes through all that torch and its libraries made, and copies the pages that the worker shares with them."""
    (stock,) = next(iter(DataLoader(Tracked(), num_workers=1))).tolist()
    with torch_sink.image_backend("device", device="meta"):
        (ours,) = next(iter(DataLoader(Tracked(), num_workers=1))).tolist()
    assert ours < stock / 10
