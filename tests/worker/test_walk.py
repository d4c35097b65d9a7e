"""How many functions of the package an image calls until it is recorded, and a real data worker for four of them."""

from __future__ import annotations

import json
import operator
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from call_path import PACKAGE, CallPath
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import torch_sink

pytestmark = pytest.mark.once
BATCH, BATCHES = 4, 3
SEED = 0
# Around the images and their program: fetcher, collate function, pool, record. A slab may be made.
OF_WORKER, MOST_OF_WORKER = ("worker/", "common/", "damage/"), 40
# Calls, files, and returns to a file: of an image that is not flipped, and of four, of which two are; a slab may be made.
MOST_OF_IMAGE, MOST = (33, 9, 10), (345, 25, 134)
STEPS = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(0.0), transforms.ToTensor()]


class Watch:
    """A `worker_init_fn`: writes the way of each batch, from the fetch of its samples to the record, to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, worker: int) -> None:
        path = CallPath()

        def note(frame: Any, event: str, argument: Any) -> None:
            caller = frame.f_back.f_code.co_name if frame.f_back is not None else ""
            is_fetch = frame.f_code.co_name == "fetch" and caller == "_worker_loop"
            if event == "call":
                if is_fetch:
                    path.calls.clear()
                path._note(frame, event, argument)
            elif event == "return" and is_fetch:
                self.file.write_text(json.dumps(path.calls))

        sys.setprofile(note)


def photos_of(folder: Path, *steps: Any) -> Any:
    return datasets.ImageFolder(folder, transforms.Compose([*steps, transforms.Normalize((0.5,) * 3, (0.5,) * 3)]))


def check(path: CallPath, most: tuple[int, int, int]) -> None:
    found = len(path.calls), len({*path.files}), path.returns
    print(*zip(found, ("calls", "files", "returns"), strict=True))
    assert found[0] > 0
    assert all(map(operator.le, found, most)), (found, most)


def test_the_way_of_an_image(generated_photos: Path) -> None:
    photos, path = photos_of(generated_photos, *STEPS), CallPath()
    with torch_sink.image_backend("device", device="meta"):
        photos[0]
        image, _ = path.follow(lambda: photos[1])
    assert image.is_recording
    check(path, MOST_OF_IMAGE)


def test_the_way_of_four_images(generated_photos: Path, tmp_path: Path) -> None:
    photos = photos_of(generated_photos, STEPS[0], transforms.RandomHorizontalFlip(), STEPS[2])
    file = tmp_path / "calls.json"
    indices = [list(range(BATCH))] * BATCHES
    torch.manual_seed(SEED)
    with torch_sink.image_backend("device", device="meta"):
        watched = DataLoader(photos, batch_sampler=indices, num_workers=1, worker_init_fn=Watch(file))
        assert [type(images) for images, _ in watched] == [torch_sink.LazyBatch] * BATCHES
    path = CallPath()
    path.calls = [(name, function) for name, function in json.loads(file.read_text())]
    by_file = Counter(os.path.relpath(name, PACKAGE) for name, _ in path.calls)
    print(by_file.most_common())
    assert [function for _, function in path.calls].count("_flip_v1") == BATCH
    assert [function for _, function in path.calls].count("_transpose") == BATCH // 2
    assert 0 < sum(count for name, count in by_file.items() if name.startswith(OF_WORKER)) <= MOST_OF_WORKER
    check(path, MOST)
