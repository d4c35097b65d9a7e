"""The table of what is replaced in other packages while the backend is on.

Every place in torchvision, Pillow, torch and timm that is replaced stands here, in `below.PLACES` or in `steps.STEPS`.
Each row says where, under which name, and what makes the stand-in from the stock object. `install` fills the places,
`uninstall` puts back the very same objects.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from types import ModuleType
from typing import Any

import PIL.Image
import torch
import torchvision
from torch.utils.data import _DatasetKind, dataloader
from torch.utils.data._utils import collate
from torchvision import tv_tensors
from torchvision.datasets import folder
from torchvision.transforms import _functional_pil, _functional_tensor, autoaugment, functional, v2
from torchvision.transforms.v2 import _auto_augment as v2_auto_augment
from torchvision.transforms.v2 import _geometry as v2_geometry
from torchvision.transforms.v2 import _transform as v2_transform
from torchvision.transforms.v2 import _utils as v2_utils
from torchvision.transforms.v2.functional import _augment, _color, _geometry, _meta, _misc, _type_conversion
from torchvision.transforms.v2.functional._utils import _KERNEL_REGISTRY

from torch_sink.common.patches import MISSING, Make, Patches, dump_with_stock_functions, read, unknown_releases
from torch_sink.damage import report as damage
from torch_sink.image import below, stand_ins, steps
from torch_sink.image.core import settings, uses
from torch_sink.image.core.fallback import ledger
from torch_sink.image.core.first_batch import look_at_first
from torch_sink.image.core.settings import Settings
from torch_sink.image.handles.array import from_array, from_buffer
from torch_sink.image.handles.file import OPERATORS, Operator, jpeg_factory, pil_loader
from torch_sink.image.handles.kept import keep_held_images
from torch_sink.image.handles.tensor import HANDLES, LazyTensor, LazyTVImage
from torch_sink.image.operations import RECORDERS
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.collate import finish_batch
from torch_sink.image.run.stack import EACH_ALONE
from torch_sink.image.stand_ins import around, before
from torch_sink.worker import fetchers
from torch_sink.worker.prepare import WORKER_LOOPS, Worker, WorkerCollate, give_pool

# One replaced place: its owner (a module, a class or a dict), the attribute or key, and stock object -> stand-in.
Row = tuple[Any, Any, Make]

TV_TENSORS = (tv_tensors.Image, tv_tensors.Mask, tv_tensors.BoundingBoxes, tv_tensors.KeyPoints, tv_tensors.Video)
# Functionals whose stock code calls methods of Pillow's images.
_THROUGH_METHODS = ("hflip", "vflip", "crop", "resize", "affine", "rotate", "perspective")
# Kernels of `transforms.v2` on tensors whose stock code calls what records.
_THROUGH_OTHERS = ("five_crop", "ten_crop")
_CONVERSIONS = {
    "to_tensor": (functional,),
    "pil_to_tensor": (functional, v2.functional, _type_conversion),
    "to_pil_image": (functional, v2.functional, _type_conversion),
    "to_image": (v2.functional, _type_conversion),
}


def rows() -> Iterator[Row]:
    """All rows, for the packages as they are installed and imported now."""
    return itertools.chain.from_iterable(found for _, found in rows_by_reason())


def rows_by_reason() -> Iterator[tuple[str, Iterator[Row]]]:
    """The rows, and why they are there."""
    yield "the switch of the backend", iter(_SWITCH)
    yield "images begin as recordings", _beginnings()
    yield "functionals of Pillow images record", _of_pillow_images()
    yield "functionals and kernels of tensors record", _of_tensors()
    yield "a step draws in less time", steps.rows()
    yield "what torchvision's functionals and transforms share", _shared()
    yield "code below Python gets real tensors", iter((*below.PLACES, (torch.jit, "script", around(_script))))
    yield "batches, and the loaders and workers that make them", _loaders()
    yield "timm's augmentations, where timm is imported", _timm()


_SWITCH: tuple[Row, ...] = (
    (torchvision, "set_image_backend", lambda stock: settings.set_backend),
    (torchvision, "_image_backend", lambda stock: "device"),
)


def _beginnings() -> Iterator[Row]:
    yield folder, "pil_loader", pil_loader
    yield PIL.Image, "fromarray", before(from_array)
    yield PIL.Image, "frombuffer", from_buffer
    yield PIL.Image.OPEN, "JPEG", lambda entry: (around(jpeg_factory)(entry[0]), *entry[1:])
    for name, call in OPERATORS.items():
        if hasattr(torch.ops.image, name):  # some builds of torchvision lack it; `hasattr` also loads it
            yield torch.ops.image, name, functools.partial(Operator, call=call)
    yield tv_tensors, "wrap", before(stand_ins.wrap)
    yield tv_tensors.Image, "__new__", before(stand_ins.new_image)
    yield tv_tensors.Mask, "__new__", before(stand_ins.new_mask)


def _of_pillow_images() -> Iterator[Row]:
    for name in vars(_functional_pil):
        if f"pil.{name}" in RECORDERS:
            yield _functional_pil, name, stand_ins.on_image(f"pil.{name}", by_methods=name in _THROUGH_METHODS)
        elif name in _THROUGH_METHODS:
            yield _functional_pil, name, stand_ins.through_methods
    yield functional, "resized_crop", stand_ins.on_image("pil.resized_crop", by_methods=True)
    yield functional, "gaussian_blur", stand_ins.on_image_as_tensor("v1.gaussian_blur")
    for name, modules in _CONVERSIONS.items():
        kind = LazyTVImage if name == "to_image" else None
        for module in modules:
            yield module, name, stand_ins.on_image(f"functional.{name}", kind=kind)
    for function, kernels in _KERNEL_REGISTRY.items():
        name = function.__name__
        if PIL.Image.Image in kernels and not name.startswith("get_"):
            yield kernels, PIL.Image.Image, stand_ins.pillow_kernel(name)


def _of_tensors() -> Iterator[Row]:
    """Of handles of both kinds, and of stacks."""
    for name, function in vars(_functional_tensor).items():
        if inspect.isfunction(function) and function.__module__ == _functional_tensor.__name__ and name[0] != "_":
            yield _functional_tensor, name, stand_ins.tensor_kernel("v1", name)
    make = stand_ins.on_tensor("convert_image_dtype", stand_ins.to_scaled_dtype)
    for module in (v2.functional, _misc):
        yield module, "convert_image_dtype", make
    for function, kernels in _KERNEL_REGISTRY.items():
        name = function.__name__
        for kind, stock_type in ((LazyTensor, torch.Tensor), (LazyTVImage, tv_tensors.Image)):
            if stock_type in kernels and name in _THROUGH_OTHERS:
                yield kernels, kind, functools.partial(_in_its_place, kernels[stock_type])
            elif stock_type in kernels:
                yield kernels, kind, stand_ins.handle_kernel(name, function)
        if name in EACH_ALONE:
            yield kernels, LazyBatch, stand_ins.handle_kernel(name, kernels[torch.Tensor])
    for kind in (v2.MixUp, v2.CutMix):
        yield kind, "transform", around(stand_ins.mix)


def _shared() -> Iterator[Row]:
    for module in (functional, _augment, _color, _geometry, _meta, _misc):
        yield module, "_log_api_usage_once", stand_ins.log_usage
    for module in (v2_transform, _augment, _color, _geometry, _meta, _misc):
        yield module, "_get_kernel", before(stand_ins.get_kernel)
    for kind in (autoaugment.AutoAugment, autoaugment.RandAugment, autoaugment.TrivialAugmentWide):
        yield kind, "_augmentation_space", functools.partial(stand_ins.augmentation_space, kind)
    for kind in (v2.RandAugment, v2.TrivialAugmentWide, v2.AutoAugment):
        yield kind, "_AUGMENTATION_SPACE", functools.partial(stand_ins.magnitudes, kind)
    for module in (v2_auto_augment, v2_geometry, v2_utils):
        yield module, "_get_fill", before(stand_ins.get_fill)
    yield v2.ToDtype, "transform", around(stand_ins.to_dtype)


def _loaders() -> Iterator[Row]:
    for kind in HANDLES:
        yield collate.default_collate_fn_map, kind, lambda _: stand_ins.collate_as_stock
    yield collate.default_collate_fn_map, torch.Tensor, before(stand_ins.collate_tensors)
    yield _DatasetKind, "create_fetcher", _create_fetcher
    yield dataloader._BaseDataLoaderIter, "__init__", _begin_iterator
    yield dataloader._BaseDataLoaderIter, "__next__", around(fetchers.next_with_hints)
    yield reduction, "dump", around(dump_with_stock_functions)
    # torch's and torchdata's, where they start data workers; the latter where it is imported.
    for name in WORKER_LOOPS:
        if name in sys.modules:
            yield sys.modules[name], "_worker_loop", functools.partial(Worker, feature=RecordingWorker())


def _timm() -> Iterator[Row]:
    if "timm.data.auto_augment" in sys.modules:  # Pillow's modules, as timm's augmentations see them
        module = sys.modules["timm.data.auto_augment"]
        yield module, "ImageEnhance", stand_ins.image_enhance
        yield module, "ImageOps", stand_ins.image_ops


def _in_its_place(kernel: Any, stock: Any) -> Any:
    """For a place that gets the kernel of another one, whatever stands there."""
    return kernel


# {module and name of a stock function: that function, and its stand-in in modules}.
_in_modules: dict[tuple[str, str], tuple[Any, Any]] = {}


def _stand_in_of(make: Make, is_in_module: bool) -> Make:
    """Makes stand-ins for which `torch.jit.script` compiles the stock function, whenever a program looked them up.

    In modules, a function has one, whatever number of them it is in, and whenever the backend is on: a program may have
    imported it, and pickle looks it up by its name.
    """

    def made(stock: Any) -> Any:
        name = getattr(stock, "__module__", ""), getattr(stock, "__qualname__", "")
        known, stand_in = _in_modules.get(name, (None, None))
        if is_in_module and known is stock:
            return stand_in
        stand_in = make(stock)
        if inspect.isfunction(stock) and inspect.isfunction(stand_in) and stand_in is not stock:
            stand_in.__prepare_scriptable__ = lambda: stock  # type: ignore[attr-defined]
        if is_in_module and inspect.isroutine(stock):
            _in_modules[name] = stock, stand_in
        return stand_in

    return made


def _script(stock: Callable[..., Any], obj: Any, optimize: Any = None, _frames_up: int = 0, **kwargs: Any) -> Any:
    """For `torch.jit.script`, which compiles the source of stock functions and of all that they call."""
    before = settings.active
    assert before is not None
    uninstall()
    try:
        return stock(obj, optimize, _frames_up + 2, **kwargs)
    finally:
        install(before)


# --- workers


def _begin_iterator(stock: Callable[..., None]) -> Callable[..., None]:
    """For `_BaseDataLoaderIter.__init__`, before workers start: they know the libraries imported by now, and share the
    pixels of the images that their dataset keeps.
    """
    begin = fetchers.begin_iterator(stock)

    @functools.wraps(stock)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        _fill_new_places()
        keep_held_images()
        begin(self, loader, *args, **kwargs)
        give_pool(self)

    return __init__


def _create_fetcher(stock: Callable[..., Any]) -> Any:
    """For `_DatasetKind.create_fetcher`, which every iterator and every worker calls once per pass."""
    create = fetchers.create_fetcher(stock, finish=finish_batch).__func__
    return staticmethod(functools.wraps(stock)(lambda *args, **kwargs: look_at_first(create(*args, **kwargs))))


class RecordingWorker:
    """What the backend does in a data worker: it is switched on, with the settings of the process that starts it."""

    settings: Settings | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self.settings or _settings_of_thread(settings.settled())}

    def __call__(self, collate: WorkerCollate, arguments: dict[str, Any]) -> None:
        given = self.settings or _settings_of_thread(settings.active)
        # A worker never asks for a device; where its parent has not yet either, it makes the pixels itself.
        given = given if given.device else given._replace(device="cpu")
        install(given)
        uses.begins_passes = False
        ledger.open(given.report, given.strict)
        collate.finish = functools.partial(finish_batch, makes_pixels=given.executes_at_once)
        collate.reporters.append(ledger.tell)
        collate.begin_writing().sends_by_value(*TV_TENSORS)


def _settings_of_thread(active: Settings | None) -> Settings:
    assert active is not None  # the stand-in is only there while the backend is on
    return active._replace(on_decode_error=damage.decode_errors.policy)


# --- switching

_patches = Patches()


def install(wanted: Settings) -> None:
    """Fills every place of the table, or none; when they are filled already, the settings change, and rows are added.

    Raises:
        RuntimeError: a place does not exist in the installed releases.
    """
    was_installed = bool(_patches)
    damage.set_policy(wanted.on_decode_error)
    try:
        _fill_places()
    except BaseException:
        if not was_installed:
            uninstall()
        raise
    settings.activate(wanted)


def _fill_places() -> None:
    for owner, name, make in rows():
        if _patches.replaces(owner, name):
            continue
        is_missing = read(owner, name) is MISSING and not isinstance(owner, dict)
        if is_missing and not hasattr(owner, name):
            raise unknown_releases(f"{owner.__name__}.{name} does not exist")
        _patches.replace(owner, name, _stand_in_of(make, isinstance(owner, ModuleType)))


def _fill_new_places() -> None:
    """Fill places of a library that was imported since the backend was set."""
    if _patches:
        _fill_places()


def uninstall() -> None:
    """Puts the stock objects back, and switches the backend off."""
    _patches.undo()
    damage.set_policy("raise")
    settings.activate(None)
