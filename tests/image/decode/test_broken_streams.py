"""Broken files in iterable datasets: an error ends their generators, so it is raised and says where to catch it."""

from __future__ import annotations

import gc
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import torch_sink
from image.broken_files import COUNT, OPENERS, QUIET, V1, V2, Stream, assert_same_batches, backend, checked, said_of
from torch_sink.damage.report import POLICIES

pytestmark = [pytest.mark.halved, QUIET]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(6)
def test_the_error_says_where_to_catch_it(paths: list[Path], policy: str, opener: str, workers: int) -> None:
    stream = Stream(paths, OPENERS[opener], V1)
    with backend(policy):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever stock code raises for a file
            list(DataLoader(stream, batch_size=4, num_workers=workers))
        said = said_of(caught.value)
        assert said.count("ends the generator of an IterableDataset") == 1
        assert "on_decode_error='skip'" not in said
        assert any(str(path) in said for path in paths)
        assert not torch_sink.decode_report()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [V1, V2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.sampled(6)
def test_a_generator_that_catches_it_goes_on(paths: list[Path], policy: str, transform: Any, workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    torch.manual_seed(5)
    expected = list(DataLoader(Stream(paths, checked, transform, goes_on=True), **options))
    with backend(policy):
        torch.manual_seed(5)
        assert_same_batches(list(DataLoader(Stream(paths, checked, transform, goes_on=True), **options)), expected)
        assert not torch_sink.decode_report()


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_under_a_policy_files_are_checked_where_they_are_opened(paths: list[Path], policy: str, opener: str) -> None:
    """So that a generator finds what stock code finds there, and without decoding anything."""
    torch.manual_seed(5)
    expected = list(DataLoader(Stream(paths, OPENERS[opener], V1, goes_on=True), batch_size=4))
    with backend(policy):
        torch.manual_seed(5)
        assert_same_batches(list(DataLoader(Stream(paths, OPENERS[opener], V1, goes_on=True), batch_size=4)), expected)


class Names(IterableDataset[Any]):
    """A stream without any image."""

    def __iter__(self) -> Iterator[int]:
        yield from range(COUNT)
        raise FileNotFoundError(2, "No such file or directory", "shards/0003.tar")


def test_an_error_of_something_else_gets_no_advice() -> None:
    with backend("skip"), pytest.raises(FileNotFoundError) as caught:
        list(DataLoader(Names(), batch_size=None))
    assert "IterableDataset" not in said_of(caught.value)


# An error leaves the archive open, until its frames are gone.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("policy", POLICIES)
def test_webdataset_goes_on_with_its_own_handler(paths: list[Path], policy: str, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for number, path in enumerate(path for path in paths if path.is_file()):
            for name, data in ((f"{number:03}.jpg", path.read_bytes()), (f"{number:03}.cls", f"{number}".encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))

    def samples(handler: Any) -> list[Any]:
        torch.manual_seed(5)
        data = webdataset.WebDataset(os.fspath(tmp_path / "shard.tar"), shardshuffle=False, empty_check=False)
        stream = data.decode("pil", handler=handler).to_tuple("jpg", "cls").map_tuple(V1, int)
        return list(DataLoader(stream, batch_size=None))

    expected = samples(webdataset.ignore_and_continue)
    assert 0 < len(expected) < COUNT
    with backend(policy):
        assert_same_batches(samples(webdataset.ignore_and_continue), expected)
        with pytest.raises(Exception):  # noqa: B017, PT011 - as in stock code
            samples(webdataset.reraise_exception)
    gc.collect()
