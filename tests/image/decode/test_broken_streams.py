"""`on_decode_error` in iterable datasets: an exception would end their generators, so placeholders stand for broken files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

import torch_sink
from image.broken_files import (
    COUNT,
    JPEG,
    OPENERS,
    QUIET,
    V1,
    V2,
    Files,
    Stream,
    assert_same_batches,
    batches,
    loaded,
    pixels,
)

pytestmark = [pytest.mark.halved, QUIET]


def in_gray_and_alpha(image: Image.Image) -> torch.Tensor:
    """A transform that falls back."""
    return V1(image.convert("LA").convert("RGB"))


@pytest.mark.parametrize(
    ("workers", "opener", "transform"),
    [
        (0, "default_loader", V1),
        (0, "default_loader", V2),
        (0, "Image.open", V1),
        (0, "Image.open", V2),
        (0, "Image.open", pixels),
        (0, "default_loader", in_gray_and_alpha),
        (0, "open and Image.open", V1),
        (2, "default_loader", V2),
        (2, "Image.open", pixels),
    ],
)
def test_streams(paths: list[Path], workers: int, opener: str, transform: Callable[[Any], Any]) -> None:
    if opener.startswith("open "):  # what the user's own `open` raises ends the stream
        paths = [path for path in paths if path.is_file()]
    options = {"batch_size": None, "num_workers": workers}
    torch.manual_seed(5)
    expected = list(DataLoader(Stream(paths, OPENERS[opener], transform, goes_on=True), **options))
    made = batches(Stream(paths, OPENERS[opener], transform), "skip", 5, **options)
    if workers:  # a broken sample still takes its turn
        made, expected = (sorted(samples, key=lambda sample: sample[1]) for samples in (made, expected))
    assert_same_batches(made, expected)
    assert torch_sink.decode_report().skipped == len(paths) - len(expected)


def test_batches_of_a_stream_keep_their_other_samples(paths: list[Path]) -> None:
    """Skipping does not fill them up, as for samples by index."""
    by_index = batches(Files(paths, loaded, V1), "skip", batch_size=6)
    assert_same_batches(batches(Stream(paths, loaded, V1), "skip", batch_size=6), by_index)
    by_index = batches(Files(paths, loaded, V1), "replace", batch_size=12)
    assert_same_batches(batches(Stream(paths, loaded, V1), "replace", batch_size=12), by_index)


def test_a_stream_replaces_by_its_next_good_sample_and_at_its_end_by_the_last(paths: list[Path]) -> None:
    good = [label for _, label in batches(Stream(paths, loaded, V1), "skip", batch_size=None)]
    made = batches(Stream(paths, loaded, V1), "replace", batch_size=None)
    assert [label for _, label in made] == [
        min((other for other in good if other >= index), default=good[-1]) for index in range(COUNT)
    ]


class Names(IterableDataset[Any]):
    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[Any]:
        return iter([(os.fspath(path), index) for index, path in enumerate(self.paths)])


class StreamOfNames(Names):
    """Reads the files that a stream names."""

    def __iter__(self) -> Iterator[Any]:
        for path, index in DataLoader(Names(self.paths), batch_size=None):
            yield V1(loaded(path)), index


def test_a_stream_that_reads_another_one(paths: list[Path]) -> None:
    expected = batches(Stream(paths, loaded, V1), "skip", batch_size=None)
    made = batches(StreamOfNames(paths), "skip", batch_size=None)
    assert [label for _, label in made] == [label for _, label in expected]


def test_streams_that_hold_samples_back(paths: list[Path]) -> None:
    """Placeholders are known by what they are, as long as nobody reads their pixels."""
    expected = batches(Stream(paths, loaded, V1), "skip", batch_size=None)
    held = batches(Stream(paths, loaded, V1, buffer=7), "skip", batch_size=None)
    assert [label for _, label in held] == [label for _, label in expected]


@pytest.mark.parametrize("is_broken", [lambda index: index == 2, lambda index: index > 8], ids=["at first", "later"])
def test_pixels_read_by_a_stream_that_holds_samples_back(tmp_path: Path, is_broken: Callable[[int], bool]) -> None:
    """Which sample is broken cannot be told: no good one is dropped in its place, and no black image delivered."""
    files = [tmp_path / f"{index}.jpg" for index in range(20)]
    for index, path in enumerate(files):
        path.write_bytes(JPEG[0][: 400 if is_broken(index) else None])
    with pytest.raises(torch_sink.DecodeError, match="cannot be told: catch the error there"):
        batches(Stream(files, loaded, pixels, buffer=7), "skip", batch_size=None)
