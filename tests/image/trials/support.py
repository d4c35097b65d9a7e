"""The trials that make the support table: every entry is called on small handles while the backend only records.

They are the examples of all operations, and the transforms and functionals of torchvision that belong to none.
`docs/made_by/update_support.py` writes what they find to `torch_sink/image/support.tsv`.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2.functional import _geometry

from image.examples import MANY_DRAWS, Arguments, Example, interpolations, sample
from image.trials import TRANSFORMS, examples_of
from torch_sink.errors import SinkError
from torch_sink.image.backend import image_backend
from torch_sink.image.core import settings
from torch_sink.image.core.fallback import ledger
from torch_sink.image.handles.image import LazyImage, lazy_image
from torch_sink.image.handles.tensor import HANDLES
from torch_sink.image.operations import operations
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.support import NOT_TRIED, SupportRow, row_names

RECORDED = "kernel"
FALLBACK = "exact fallback"
PASSES = "passes through"
REFUSED = "not applicable"

INPUT_KINDS = ("Pillow images", "uint8 tensors", "float tensors")
# From the best to the worst: an entry that draws is as good as its worst draw.
_ORDER = (PASSES, RECORDED, FALLBACK, REFUSED)
_SIZE = 16, 24  # height and width
_LARGEST_MATRIX = 4096  # values of an image that a matrix of all of them is made for
_ONLY_FUNCTIONALS = "a function that only calls functionals from this table"
_IN_FLOATS = "where stock code resizes bytes through float32"  # without AVX2


def _read(image: Any) -> Any:
    np.asarray(image)
    return image


def _other_transforms(module: ModuleType, size: tuple[int, int]) -> dict[str, list[Example]]:
    """{class name: ways to construct it} for `torchvision.transforms` or `torchvision.transforms.v2`."""
    values = 3 * size[0] * size[1]
    linear = [sample(torch.eye(values), torch.zeros(values))] if values <= _LARGEST_MATRIX else []
    flip = module.RandomHorizontalFlip(p=1.0)
    of_flips, on_detection = [sample([flip])], [sample(form="detection")]
    automatic = [way._replace(draws=MANY_DRAWS) for way in interpolations(usual="NEAREST")[:2]]
    return {
        **dict.fromkeys(("AutoAugment", "RandAugment", "TrivialAugmentWide"), automatic),
        "AugMix": [sample(draws=MANY_DRAWS)],
        **dict.fromkeys(("Compose", "RandomChoice", "RandomOrder"), of_flips),
        **dict.fromkeys(("ClampBoundingBoxes", "ClampKeyPoints", "SanitizeBoundingBoxes"), on_detection),
        "ConvertBoundingBoxFormat": [sample("CXCYWH", form="detection")],
        "GaussianNoise": [sample()],
        "Identity": [sample()],
        "RandomApply": [sample([flip], p=1.0)],
        "JPEG": [sample(90)],
        "Lambda": [sample(_read), sample(module.functional.hflip, label=_ONLY_FUNCTIONALS)],
        "LinearTransformation": linear,
        "UniformTemporalSubsample": [sample(2)],
        "RandomIoUCrop": [sample(form="detection", draws=8)],
        "SanitizeKeyPoints": [sample(labels_getter=None, form="detection")],
        "SetClampingMode": [sample("hard", form="detection")],
    }


_OTHER_FUNCTIONALS = (
    Example("clamp_bounding_boxes"), Example("clamp_keypoints"),
    Example("convert_bounding_box_format", (), {"new_format": "CXCYWH"}), Example("gaussian_noise"),
    Example("get_dimensions"), Example("get_image_num_channels"), Example("get_image_size"),
    Example("get_num_channels"), Example("get_num_frames"), Example("get_size"), Example("is_pure_tensor"),
    Example("jpeg", (90,)), Example("sanitize_bounding_boxes"), Example("sanitize_keypoints"),
    Example("uniform_temporal_subsample", (2,)),
)  # fmt: skip
# Other names of functionals of which operations have examples.
_ALIASES = {"horizontal_flip": "hflip", "vertical_flip": "vflip", "elastic": "elastic_transform"}


# A way to call a transform or functional, and what calls it so, for each of `INPUT_KINDS`.
Trial = tuple[Example, Sequence[Callable[..., Any]]]


def tried_rows() -> list[SupportRow]:
    """The support table, freshly tried: as on a processor with AVX2, and what differs on one without in `limits`."""
    with _undisturbed(), image_backend("device", device="meta"):
        return [_row(name, trials) for name, trials in entries().items()]


def entries(size: tuple[int, int] = _SIZE) -> dict[str, list[Trial]]:
    """{name of a row: the ways to call it, the usual one first}; no way for what a newer torchvision brought.

    Args:
        size: (height, width) of the images that it is called on.
    """
    found: dict[str, list[Trial]] = {}
    for prefix, trials_of in (("", transform_trials), ("functional.", functional_trials)):
        for family, module in (("v1", v1), ("v2", v2)):
            found.update({f"{family}.{prefix}{name}": each for name, each in trials_of(family, module, size).items()})
    return {name: found.get(name, []) for name in row_names()}


def transform_trials(family: str, module: ModuleType, size: tuple[int, int] = _SIZE) -> dict[str, list[Trial]]:
    """{class: the ways to construct it that are tried, the usual one first}."""
    ways: dict[str, Sequence[Example]] = {**_other_transforms(module, size), **TRANSFORMS}
    return {
        name: [
            (example, [getattr(module, name)(*example.args, **example.kwargs)] * len(INPUT_KINDS)) for example in each
        ]
        for name, each in ways.items()
        if hasattr(module, name)
    }


def functional_trials(family: str, module: ModuleType, size: tuple[int, int] = _SIZE) -> dict[str, list[Trial]]:
    """{functional: the calls of it that are tried, the usual one first}.

    Where an example is not for one of `INPUT_KINDS`, the call of another kind is tried there.
    """
    found: dict[tuple[str, str], list[Any]] = {}
    for at, kind in enumerate(("Pillow", f"{family} uint8", f"{family} float32")):
        arguments = Arguments(random.Random(0), kind, *size, channels=3)
        arguments.functional = module.functional
        examples = [example for operation in operations() for example in examples_of(operation, arguments)]
        for example in (*examples, *_OTHER_FUNCTIONALS):
            if example.run is None and hasattr(module.functional, example.name):
                call = functools.partial(example.called, module.functional)
                found.setdefault((example.name, example.label), [call] * len(INPUT_KINDS))[at] = call
    trials: dict[str, list[Trial]] = {}
    for (name, label), calls in found.items():
        trials.setdefault(name, []).append((Example(name, label=label if name in trials else ""), calls))
    return {**trials, **{alias: trials[name] for alias, name in _ALIASES.items()}}


def _row(label: str, trials: list[Trial]) -> SupportRow:
    if not trials:
        return SupportRow(label, NOT_TRIED, NOT_TRIED)
    with _bytes_resized(in_integers=True):
        usual, *others = (try_it(label[:2], *trial) for trial in trials)
    with _bytes_resized(in_integers=False):
        without = [try_it(label[:2], *trial) for trial in trials]
    on_pillow, on_uint8, on_float = usual
    on_tensor = on_float if on_uint8 == REFUSED else on_uint8
    notes = [f"{kind}: {way}" for kind, way in zip(INPUT_KINDS[1:], usual[1:], strict=True) if way != on_tensor]
    labels = [example.label for example, _ in trials]
    variants: dict[str, list[str]] = {}  # {a difference: labels of the calls of which it is said}
    for text, ways in zip(labels[1:], others, strict=True):
        for difference in _differences(ways, usual):
            variants.setdefault(difference, []).append(text)
    for text, ways, with_avx2 in zip(labels, without, [usual, *others], strict=True):
        for difference in _differences(ways, with_avx2):
            variants.setdefault(difference, []).append(f"{text}, {_IN_FLOATS}".removeprefix(", "))
    notes += [f"{', '.join(texts)}: {difference}" for difference, texts in variants.items()]
    return SupportRow(label, on_pillow, on_tensor, "; ".join(notes))


def _differences(ways: Sequence[str], usual: Sequence[str]) -> list[str]:
    """In what a call runs otherwise than the usual one; a kernel that has nothing to compute is no difference."""
    found = []
    for way in dict.fromkeys(ways):
        pairs = zip(INPUT_KINDS, ways, usual, strict=True)
        kinds = [kind for kind, own, other in pairs if own == way != other and {own, other} != {RECORDED, PASSES}]
        if kinds:
            some = "tensors" if kinds == [*INPUT_KINDS[1:]] else " and ".join(kinds)
            found.append(f"{way} on {'all images' if len(kinds) == len(INPUT_KINDS) else some}")
    return found


# --- trying


@contextmanager
def _bytes_resized(in_integers: bool) -> Iterator[None]:
    """Makes torchvision resize uint8 tensors as on a processor with AVX2, or as on one without, by float32."""
    stock = _geometry._do_native_uint8_resize_on_cpu

    def in_integers_here(interpolation: InterpolationMode) -> bool:
        return in_integers if interpolation == InterpolationMode.BILINEAR else stock(interpolation)

    with mock.patch.object(_geometry, "_do_native_uint8_resize_on_cpu", in_integers_here):
        yield


def try_it(family: str, example: Example, calls: Sequence[Callable[..., Any]]) -> list[str]:
    """How a call runs on each of `INPUT_KINDS`."""
    ways = []
    for number, call in enumerate(calls):
        torch.default_generator.manual_seed(0)  # the one that is put back; `torch.manual_seed` seeds the devices' too
        random.seed(0)
        draws = [_try_once(call, sample_image(family, number), example.form) for _ in range(example.draws)]
        ways.append(max(draws, key=_ORDER.index))
    return ways


def sample_image(family: str, number: int) -> Any:
    """A small image of one of `INPUT_KINDS`: a handle while the backend is on, else what stock code gives."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*_SIZE, 3), dtype=np.uint8))
    pillow = image if settings.active is None else lazy_image(image)
    if number == 0:
        return pillow
    if family == "v1":
        return v1.functional.pil_to_tensor(pillow) if number == 1 else v1.functional.to_tensor(pillow)
    pixels = v2.functional.to_image(pillow)
    return pixels if number == 1 else v2.functional.to_dtype(pixels, torch.float32, scale=True)


def arranged(image: Any, form: str) -> tuple[Any, ...]:
    """The arguments of a transform that takes the image in the given form; see `Example.form`."""
    labels, size = torch.tensor([0, 1]), v2.functional.get_size(image)
    if form == "detection":
        boxes = tv_tensors.BoundingBoxes([[1, 2, 9, 12], [4, 3, 20, 14]], format="XYXY", canvas_size=size)  # type: ignore[arg-type, call-arg]
        points = tv_tensors.KeyPoints([[3, 4], [12, 9]], canvas_size=size)  # type: ignore[call-arg]
        return ({"image": image, "boxes": boxes, "points": points, "labels": labels},)
    if form == "batch":
        return torch.stack([image, image]) if isinstance(image, torch.Tensor) else image, labels
    return (image,)


def _try_once(call: Callable[..., Any], image: Any, form: str) -> str:
    inputs, before = arranged(image, form), image.lazy_recording.calls
    ledger.counts.clear()
    try:
        result = call(*inputs)
    except SinkError:  # pixels of a batch were asked for, and a backend that only records has none
        try:
            call(*arranged(image.materialize(), form))
        except Exception:
            return REFUSED
        return FALLBACK
    except Exception:
        return REFUSED
    if form != "image":
        result = result["image"] if form == "detection" else result[0]
    if ledger.counts:
        return FALLBACK
    parts = list(result) if isinstance(result, (tuple, list)) else [result]
    if all(isinstance(part, (bool, int)) for part in parts):
        return PASSES
    if type(result) is LazyBatch:
        return RECORDED
    if not all(type(part) in (LazyImage, *HANDLES) and part.is_recording for part in parts):
        return FALLBACK
    return PASSES if all(part.lazy_recording.calls == before for part in parts) else RECORDED


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Puts back the generators of random numbers, the fallback counts, and where workers leave theirs."""
    generators = random.getstate(), np.random.get_state()
    try:
        with ledger.set_aside(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
