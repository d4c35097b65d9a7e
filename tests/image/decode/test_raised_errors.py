"""`on_decode_error` with errors that are no damage, which are raised; and without a policy, where all are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets.folder import default_loader

import torch_sink
from image.broken_files import (
    OPENERS,
    QUIET,
    V1,
    Files,
    backend,
    batches,
    broken_reason,
    loaded,
    opened,
    pixels,
)
from torch_sink.damage.report import broken_file
from torch_sink.sink.workers import WorkerGuard

pytestmark = [pytest.mark.halved, QUIET]


class Raises:
    """A transform of the user with an error in it."""

    def __init__(self, make: Callable[[], Exception]) -> None:
        self.make = make

    def __call__(self, image: Image.Image) -> Any:
        raise self.make()


def first_batch(dataset: Any, policy: str, workers: int) -> Any:
    """The first batch, or what is raised in its place; torch would wait 5 seconds for a worker that raised.

    Killing it would have torch's handler of SIGCHLD raise, at any moment.
    """
    with backend(policy):
        iterator = iter(DataLoader(dataset, batch_size=4, num_workers=workers))
        try:
            return next(iterator)
        finally:
            if workers:
                WorkerGuard(iterator).stop()


@pytest.mark.parametrize(
    ("error", "workers"),
    [
        (KeyError("k"), 0),
        (ValueError("v"), 0),
        (OSError("o"), 0),
        (OSError("o"), 1),
        (FileNotFoundError(errno.ENOENT, "", "x.txt"), 0),
    ],
)
def test_errors_of_the_users_own_code_are_raised(paths: list[Path], error: Exception, workers: int) -> None:
    with pytest.raises(type(error)):
        first_batch(Files(paths, loaded, Raises(lambda: error)), "skip", workers)


def save_wrongly(image: Image.Image) -> None:
    image.convert("RGBA").save(os.devnull, "JPEG")


def read_after_closing(path: Path) -> Image.Image:
    with open(path, "rb") as file:
        image = Image.open(file)
    return image.convert("RGB")


@pytest.mark.parametrize(
    ("load", "transform", "error"),
    [
        (lambda path: default_loader(None), V1, TypeError),
        (lambda path: Image.open(None), V1, AttributeError),
        (lambda path: Image.open(path, mode="w"), V1, ValueError),
        (opened, save_wrongly, OSError),
        (loaded, transforms.RandomCrop(100), ValueError),
    ],
)
def test_wrong_arguments_are_raised(
    paths: list[Path], load: Callable[[Any], Any], transform: Any, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        batches(Files(paths, load, transform), "skip", batch_size=4)
    assert not isinstance(caught.value, torch_sink.DecodeError)


def test_a_file_that_was_closed_too_early_is_an_error_of_the_code(tmp_path: Path) -> None:
    path = tmp_path / "whole.png"
    Image.new("RGB", (64, 64)).save(path)
    with pytest.raises(ValueError, match="closed file"):
        batches(Files([path], read_after_closing, V1), "skip")


@pytest.mark.parametrize(
    ("number", "is_broken"), [(errno.EACCES, True), (errno.EIO, True), (errno.EMFILE, False), (errno.ENOMEM, False)]
)
def test_what_the_operating_system_says(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, number: int, is_broken: bool
) -> None:
    """That one file cannot be read, or that the machine is at its end."""
    stock = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("00003.jpg"):
            raise OSError(number, os.strerror(number), path)
        return stock(path, *args, **kwargs)

    import builtins

    stock_builtin = builtins.open

    def refuse_builtin(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith("00003.jpg"):
            raise OSError(number, os.strerror(number), path)
        return stock_builtin(path, *args, **kwargs)

    good = [path for path in paths[:8] if broken_reason(path) is None]
    assert not paths[3].is_dir()
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(builtins, "open", refuse_builtin)
    for load in (loaded, opened):
        if is_broken:
            made = batches(Files(paths[:8], load, V1), "skip", batch_size=8)
            assert len(made[0][0]) == len([path for path in good if path != paths[3]])
            assert os.strerror(number) in torch_sink.decode_report().files[str(paths[3])]
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                batches(Files(paths[:8], load, V1), "skip", batch_size=8)


def test_strict_stays_strict(paths: list[Path]) -> None:
    with backend(strict=True), pytest.raises(torch_sink.UnsupportedOperation):
        list(DataLoader(Files(paths, loaded, pixels), batch_size=4))


def test_an_error_that_was_raised_from_one_of_a_file_counts() -> None:
    def fails() -> None:
        try:
            Image.open(os.devnull)
        except OSError as error:
            raise RuntimeError("sample 3 is bad") from error

    with pytest.raises(RuntimeError) as caught:
        fails()
    assert broken_file(caught.value, "") == (os.devnull, f"cannot identify image file {os.devnull!r}")


# --- "raise"


@pytest.mark.parametrize("name", OPENERS)
def test_without_a_policy_stock_codes_exception_is_raised(paths: list[Path], name: str) -> None:
    """The same exception at the same sample, for every file."""
    for path in paths:
        stock, made = outcome(OPENERS[name], path), None
        with backend("raise"):
            made = outcome(OPENERS[name], path)
        assert made == stock, path


def outcome(load: Callable[[str], Any], path: Path) -> Any:
    """The batch of one file, or the class of what is raised."""
    try:
        (batch,) = DataLoader(Files([path], load, V1))
        return batch[0].shape
    except Exception as error:
        # Damage in the scan of a complete file shows when its batch is made.
        return OSError if isinstance(error, torch_sink.DecodeError) else type(error)


def test_without_a_policy_a_worker_raises_as_well(paths: list[Path]) -> None:
    broken = [path for path in paths if path.is_file() and broken_reason(path) is not None]
    with pytest.raises(OSError, match=str(broken[0])):
        first_batch(Files(broken[:4], loaded, V1), "raise", workers=1)


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
def test_pillow_s_own_function_opens_files(policy: str) -> None:
    stock = PIL.Image.open
    with backend(policy):
        assert PIL.Image.open is stock
        with pytest.raises(OSError, match="cannot identify"):
            PIL.Image.open(os.devnull)


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_an_error_of_a_recorded_call_is_raised(paths: list[Path], policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no memory is left for the pixels of a good file, its sample is not left out."""

    def flip(image: Image.Image, method: int) -> Image.Image:
        raise RuntimeError("can't allocate memory")

    with torch_sink.image_backend("device", device="meta", on_decode_error=policy):
        image = transforms.functional.hflip(default_loader(str(paths[0])))
        monkeypatch.setattr(Image.Image, "transpose", flip)
        with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
            image.tobytes()
    assert broken_file(caught.value, "sample 0") is None
