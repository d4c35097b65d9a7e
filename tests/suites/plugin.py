"""A plugin of pytest that runs each test of somebody else's suite with the image backend on, and writes its outcome.

Modes:
    stock: as it is.
    backend: `set_image_backend("device", device="cpu")` around each test.
    handles: also, the images that the suite makes for its tests are handles, as what a data worker's tests get.
    kernels: also, kernels make the values of each handle, in Triton's interpreter (TRITON_INTERPRET=1).
    sink: the backend, and each DataLoader iterates through a SinkLoader.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import functools
import importlib
import json
import os
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import torch.utils.data
from PIL.JpegImagePlugin import JpegImageFile
from torchvision import tv_tensors
from torchvision.transforms import v2

import torch_sink
from torch_sink.image import stand_ins
from torch_sink.image.decode.source import PixelSource, beginning
from torch_sink.image.handles import names
from torch_sink.image.handles.file import LazyJpegImageFile
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import HANDLES, LazyTensor
from torch_sink.image.run.batch import LazyBatch

MODES = ("stock", "backend", "handles", "kernels", "sink")
# What a test holds, and the type that it has in stock code.
STOCK_TYPES = {**names.STOCK_TYPES, LazyBatch: torch.Tensor, LazyJpegImageFile: JpegImageFile}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mode", choices=MODES, required=True)
    parser.addoption("--outcomes", type=Path, required=True, help="a line for each test; those in it are left out")


def pytest_configure(config: pytest.Config) -> None:
    faulthandler.register(signal.SIGUSR1, file=os.dup(2))  # where a test hangs, before it is ended
    seed(0)  # what modules draw for their parameters
    # torchvision reports each functional to torch's log at every call, which the backend does at the first one alone, and
    # tests of every functional look for their own call, which is a later one.
    stand_ins.log_usage = lambda stock: stock
    mode = config.getoption("--mode")
    if mode in ("handles", "kernels"):
        for name, makers in MAKERS.items():
            with contextlib.suppress(ModuleNotFoundError):  # of another suite
                module = importlib.import_module(name)
                for maker, make in makers.items():
                    replace(module, maker, make)
    if mode == "kernels":
        from kernels import quick_interpreter

        quick_interpreter.install(check_overflow=False)
        replace(LazyTensor.__mro__[1], "_replayed", made_by_kernels)
        replace(LazyImage, "_load", loaded_by_kernels)
    if mode == "sink":
        replace(torch.utils.data.DataLoader, "__iter__", through_sink)
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes"), mode), "torch_sink_outcomes")


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts what `make` makes of an attribute in its place, where there is one."""
    if hasattr(owner, name):
        setattr(owner, name, functools.wraps(getattr(owner, name))(make(getattr(owner, name))))


def seed(number: int) -> None:
    """Seeds all global generators: a test's draws do not depend on those before it, nor on the mode."""
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


class Outcomes:
    """Switches the backend on around each test, and writes what became of it."""

    def __init__(self, path: Path, mode: str) -> None:
        self.path, self.mode = path, mode
        self.outcome, self.said = "passed", ""

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out what has run, before another test hung, and what the suite skips, mostly for want of a GPU."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        done = {json.loads(line).get("test") for line in lines}
        items[:] = [item for item in items if item.nodeid not in done and not item.get_closest_marker("skip")]
        if self.mode != "stock":
            for module in {item.getparent(pytest.Module) for item in items}:
                ask_for_stock_types(module.obj)  # type: ignore[union-attr]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(test=report.nodeid, outcome="not collected", said=last_line(report))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.write(begins=item.nodeid)
        self.outcome, self.said = "passed", ""
        seed(zlib.crc32(item.nodeid.encode()))
        STAND_IN.has_helped = False
        made.clear()
        if self.mode == "stock":
            result = yield
            more = {}
        else:
            torch_sink.set_image_backend("device", device="cpu")
            try:
                result = yield
            finally:
                report = torch_sink.fallback_report()
                recorded = bool(made) if self.mode == "kernels" else report.has_recorded
                more = {"recorded": recorded, "asked": STAND_IN.has_helped}
                torch_sink.set_image_backend("PIL")
        self.write(test=item.nodeid, outcome=self.outcome, said=self.said, **more)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "wasxfail"):
            self.outcome = "xfailed" if report.skipped else "xpassed"
        elif report.failed:
            self.outcome = "failed" if report.when == "call" else f"error in {report.when}"
            self.said = last_line(report)
        elif report.skipped:
            self.outcome = "skipped"


def last_line(report: Any) -> str:
    """What a test said last: the message of its exception, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[:300]


# --- types


class _Type(type):
    """Of the stand-in for `type` in modules of tests: `type(x)` is the type that the object has in stock code."""

    has_helped = False  # it has answered otherwise than `type`, in this test

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = builtins.type(*args, **kwargs)
        stock = STOCK_TYPES.get(made, made) if len(args) == 1 else made
        STAND_IN.has_helped |= stock is not made
        return stock

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, builtins.type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.type)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.type

    __hash__ = type.__hash__


STAND_IN = _Type("type", (), {})


def ask_for_stock_types(module: Any) -> None:
    """Lets `type(x) is PIL.Image.Image` in a module hold for the handle of an image, as `isinstance` does."""
    vars(module).setdefault("type", STAND_IN)


# --- images as handles


def is_on() -> bool:
    return torch_sink.get_image_backend() == "device"


def handle_of(tensor: Any) -> Any:
    """A handle with the values of an image [C, H, W], of bytes or floats in [0, 1]; other tensors as they are."""
    kinds = (torch.Tensor, tv_tensors.Image)
    if not is_on() or type(tensor) not in kinds or tensor.dtype not in (torch.uint8, torch.float32):
        return tensor
    fits = tensor.ndim == 3 and tensor.shape[0] in (1, 3) and tensor.numel() and tensor.is_contiguous()
    if not fits or tensor.device.type != "cpu" or tensor.requires_grad:
        return tensor
    values = tensor if tensor.dtype == torch.uint8 else (tensor * 255).round().to(torch.uint8)
    array = values.as_subclass(torch.Tensor).permute(1, 2, 0).numpy()
    image = PIL.Image.fromarray(np.ascontiguousarray(array if array.shape[2] == 3 else array[:, :, 0]))
    made = v2.functional.pil_to_tensor(image).contiguous()
    if tensor.dtype == torch.float32:
        made = v2.functional.to_dtype(made, torch.float32, scale=True)
    if type(tensor) is tv_tensors.Image:
        made = tv_tensors.Image(made)
    assert type(made) in HANDLES, "the backend records what a test gets"
    return made


def image_of(image: PIL.Image.Image) -> PIL.Image.Image:
    """A handle of a copy of a Pillow image."""
    if not is_on() or image.mode not in ("L", "RGB") or 0 in image.size or image.info:
        return image
    return LazyImage(beginning(PixelSource(image.copy())))


def one(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: handle_of(stock(*args, **kwargs))


def two(stock: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that returns a tensor and the Pillow image of the same values."""

    def make(*args: Any, **kwargs: Any) -> Any:
        tensor, image = stock(*args, **kwargs)
        return handle_of(tensor), image_of(image)

    return make


def many(stock: Callable[..., Any]) -> Callable[..., Any]:
    """For a function that returns a batch of images [N, C, H, W]."""

    def make(*args: Any, **kwargs: Any) -> Any:
        batch = stock(*args, **kwargs)
        images = [handle_of(image.contiguous()) for image in batch] if batch.ndim == 4 else []
        return torch.stack(images) if images and all(type(image) in HANDLES for image in images) else batch

    return make


def picture(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: image_of(stock(*args, **kwargs))


# Functions with which suites make images for their tests: torchvision's, and Pillow's.
MAKERS: dict[str, dict[str, Callable[..., Any]]] = {
    "common_utils": {"make_image": one, "_create_data": two, "_create_data_batch": many},
    "Tests.helper": {"hopper": picture},
}


# --- values made by kernels

made: list[torch.Size] = []  # the shapes of the images that kernels made, in this test


def made_by_kernels(stock: Callable[..., Any]) -> Callable[..., Any]:
    """For `_Handle._replayed`: the values of a handle are those of a batch of one."""

    def replayed(handle: Any) -> torch.Tensor:
        batch = torch.stack([handle.record_nothing()]) if is_on() else None
        if not isinstance(batch, LazyBatch):
            return stock(handle)
        made.append(batch.shape)
        return batch.to("cpu")[0]

    return replayed


def loaded_by_kernels(stock: Callable[..., Any]) -> Callable[..., Any]:
    """For `LazyImage._load`: the pixels of an image are those of the tensor that it would become."""

    def load(image: Any) -> Any:
        if is_on() and image.is_recording and image.lazy_recording.calls and image.mode in ("L", "RGB"):
            values = v2.functional.pil_to_tensor(image.copy())
            info = image.info if "info" in vars(image) else None
            if type(values) is LazyTensor:
                array = values.materialize().permute(1, 2, 0).numpy()
                pixels = PIL.Image.fromarray(np.ascontiguousarray(array if image.mode == "RGB" else array[:, :, 0]))
                pixels.info = dict(info or {})
                pixels.load()
                recording = image.lazy_recording
                source = PixelSource(pixels, recording.source.path)
                vars(image).update(lazy_recording=recording.of_pixels(source))
        return stock(image)

    return load


# --- DataLoaders through a SinkLoader


def through_sink(stock: Callable[..., Any]) -> Callable[..., Any]:
    """For `DataLoader.__iter__`: the same batches, through a SinkLoader, which is kept as long as the loader."""

    def __iter__(loader: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not is_on() or caller.startswith("torch_sink."):
            return stock(loader)
        fields = vars(loader)  # an assignment is what a DataLoader may refuse
        if "_sink" not in fields:
            fields["_sink"] = torch_sink.SinkLoader(loader, device="cpu")
        return iter(fields["_sink"])

    return __iter__
