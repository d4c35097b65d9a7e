"""Containers of transforms: what they record, and draw, is what torchvision's own methods do, with steps and without."""

from __future__ import annotations

import functools
import gc
import inspect
import random
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from call_path import count_calls
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.random_pipelines import Scenario, compare_scenario, same_value
from image.steps.containers import assert_equal_samples, cifar, photo, random_container, seeded
from torch_sink.image import steps
from torch_sink.image.core.ops import TensorArgument
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import HANDLES, Handle

pytestmark = pytest.mark.halved


def _with_values(ops: Any) -> list[Any]:
    """Calls that are equal where the tensors among their arguments are."""
    values = [[arg.tensor.tolist() if type(arg) is TensorArgument else arg for arg in op.args] for op in ops]
    return [(op.name, of_op) for op, of_op in zip(ops, values, strict=True)]


def assert_recorded_alike(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    (made, state), (expected_made, expected_state) = actual, expected
    assert type(made) is type(expected_made)
    assert state == expected_state
    if type(made) in (LazyImage, *HANDLES):
        assert _with_values(made.lazy_recording.calls) == _with_values(expected_made.lazy_recording.calls)
        assert list(map(type, made.lazy_recording.calls)) == list(map(type, expected_made.lazy_recording.calls))
        assert (made.lazy_recording.shape, made.lazy_recording.dtype) == (
            expected_made.lazy_recording.shape,
            expected_made.lazy_recording.dtype,
        )
        assert type(made) is not LazyImage or (made.size, made.mode) == (expected_made.size, expected_made.mode)
    else:
        same_value(made, expected_made) if isinstance(made, (Image.Image, torch.Tensor)) else None
        assert isinstance(made, (Image.Image, torch.Tensor)) or made == expected_made


@pytest.mark.parametrize("first", range(0, 160, 40))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(2)
def test_steps_record_what_torchvisions_methods_do(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = 0
    for seed in range(first, first + 40):
        container = random_container(seed)
        image = photo(seed).convert("L") if seed % 7 == 0 else photo(seed)
        with torch_sink.image_backend("device", device="meta"):
            actual = seeded(seed, lambda image=image, run=container: run(image))
        with monkeypatch.context() as patch:
            patch.setattr(steps, "STEPS", [])
            with torch_sink.image_backend("device", device="meta"):
                expected = seeded(seed, lambda image=image, run=container: run(image))
            recorded += isinstance(actual[0], Handle)
            assert_recorded_alike(actual, expected)
    assert recorded > 15


@pytest.mark.parametrize("first", range(200, 280, 40))
@pytest.mark.filterwarnings("ignore")
def test_a_container_gives_stocks_values_and_draws(first: int, tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    photo(3, (50, 70)).save(path)
    openers = [photo, lambda: Image.open(path).convert("RGB"), lambda: Image.open(path)]
    for seed in range(first, first + 40):
        compare_scenario(Scenario(functools.partial(random_container, seed), openers), seed)
    gc.collect()  # files that no transform has read are closed, while their warnings are ignored


@pytest.mark.parametrize("module", [v1, v2])
@pytest.mark.parametrize("name", ["AutoAugment", "RandAugment", "TrivialAugmentWide"])
def test_automatic_augmentations(module: Any, name: str) -> None:
    for is_tensor in (False, True):
        first = [module.PILToTensor()] if is_tensor else []
        augment = getattr(module, name)(fill=[5, 6, 7])
        assert_equal_samples(module.Compose([*first, augment, augment, augment, module.RandomCrop(8)]))


@pytest.mark.parametrize("module", [v1, v2])
def test_affine_transforms_and_rotations(module: Any) -> None:
    moves = module.RandomAffine(30, (0.1, 0.3), (0.7, 1.4), (1, 5, -4, 8), fill=9)
    for rotation in (module.RandomRotation(40, expand=True), module.RandomRotation((90, 90)), module.RandomAffine(0)):
        container = module.Compose(
            [rotation, moves, module.RandomGrayscale(0.5), module.PILToTensor(), rotation, moves]
        )
        assert_equal_samples(container)


@pytest.mark.parametrize("module", [v1, v2])
@pytest.mark.parametrize("is_tensor", [False, True])
def test_tones_and_blurs(module: Any, is_tensor: bool) -> None:
    first = [module.PILToTensor() if module is v1 else v2.ToImage()] if is_tensor else []
    tones = [
        module.RandomInvert(), module.RandomPosterize(3), module.RandomSolarize(100), module.RandomAdjustSharpness(1.7),
        module.RandomAutocontrast(), module.RandomEqualize(), module.GaussianBlur(5, (0.1, 2.0)), module.CenterCrop(50),
    ]  # fmt: skip
    assert_equal_samples(module.Compose([*first, *tones, module.CenterCrop((20, 31))]))


@pytest.mark.parametrize("module", [v1, v2])
def test_what_was_recorded_before_is_not_forgotten(module: Any) -> None:
    """Behind a blur, the last bits of which depend on the processor, a threshold is stock code."""
    blur, tones = module.Lambda(lambda image: F.gaussian_blur(image, 3)), module.RandomPosterize(3, 1.0)
    with torch_sink.image_backend("device", device="meta"):
        expected = tones(module.Pad(1)(blur(photo())))
        for made in (
            module.Compose([module.Pad(1), tones])(blur(photo())),
            module.Compose([blur, module.Pad(1), tones])(photo()),
        ):
            assert type(made) is type(expected) is Image.Image
            same_value(made, expected)


@pytest.mark.parametrize("module", [v1, v2])
@pytest.mark.parametrize("value", [0, 0.5, (1, 2, 3), "random"])
@pytest.mark.parametrize("scale", [(0.02, 0.33), (0.9, 1.0), (0.0, 0.0)])
@pytest.mark.sampled(10)
def test_erased_boxes(module: Any, value: Any, scale: Any) -> None:
    first = [v1.PILToTensor()] if module is v1 else [v2.ToImage()]
    erasings = [module.RandomErasing(0.7, scale, value=value, inplace=in_place) for in_place in (False, True)]
    to_float = v1.ConvertImageDtype(torch.float32) if module is v1 else v2.ToDtype(torch.float32, scale=True)
    assert_equal_samples(module.Compose([*first, *erasings, to_float, *erasings]))


@pytest.mark.parametrize(
    "mean", [[[0.5], [0.5], [0.5]], [torch.tensor(0.5)] * 3, [0.5, 0.0, -0.0], [1, True, 0.5], "abc", [], [0.1]]
)
@pytest.mark.parametrize("first", [v1.ToTensor(), v2.ToImage()])
def test_unusual_means(mean: Any, first: Any) -> None:
    """Twice, since numbers that are equal may be of another type, or of another sign."""
    module = v1 if type(first) is v1.ToTensor else v2
    middle = [] if module is v1 else [v2.ToDtype(torch.float32, scale=True)]

    def made(mean: Any) -> Any:
        try:
            return module.Compose([first, *middle, module.Normalize(mean, [0.5, 1, 0.25])])(photo())
        except Exception as error:
            return type(error), str(error)

    means = [mean, [0.5, 0.0, 0.0], [1.0, 1, 0.5], mean]
    expected = [made(each) for each in means]
    with torch_sink.image_backend("device", device="cpu"):
        for actual, stock in zip([made(each) for each in means], expected, strict=True):
            same_value(actual, stock)


@pytest.mark.parametrize("module", [v1, v2])
def test_attributes_are_read_at_each_call(module: Any) -> None:
    transforms = cifar(module)
    crop, flip = (transform for transform in transforms if type(transform).__name__.startswith("Random"))
    order = random.Random(1)

    def change() -> None:
        crop.size = order.choice(((20, 24), (32, 32)))
        crop.padding_mode = order.choice(("constant", "reflect"))
        flip.p = order.choice((0.0, 0.5, 1))
        transforms[-1].mean = [order.random()] * 3
        if module is v1:
            crop.padding = order.choice((None, 2))

    assert_equal_samples(module.Compose(transforms), change, lambda: order.seed(1))


def test_a_ratio_of_v2_is_what_it_was_when_made() -> None:
    crop = v2.RandomResizedCrop(12)
    change = lambda: setattr(crop, "ratio", (0.2, 0.3))  # noqa: E731
    assert_equal_samples(v2.Compose([crop, v2.ToImage()]), change, lambda: setattr(crop, "ratio", (3 / 4, 4 / 3)))


def test_an_image_that_nothing_changes_is_the_image_itself() -> None:
    seen: list[Any] = []
    image = photo()
    with torch_sink.image_backend("device", device="cpu"):
        container = v1.Compose([v1.RandomHorizontalFlip(0.0), lambda given: seen.append(given) or given])
        assert container(image) is image
    assert seen[0] is image


def test_writes_behind_a_container_are_not_seen() -> None:
    image = photo()
    expected = v1.ToTensor()(image)
    with torch_sink.image_backend("device", device="cpu"):
        made = v1.Compose([v1.ToTensor()])(image)
        image.putpixel((0, 0), (1, 2, 3))
        assert torch.equal(made.clone(), expected)


@pytest.mark.once
@pytest.mark.parametrize(("module", "most"), [(v1, 150), (v2, 220)])
def test_a_small_image_takes_few_calls(module: Any, most: int) -> None:
    """Of Python functions."""
    container, image = module.Compose(cifar(module)), photo(size=(32, 32))
    with torch_sink.image_backend("device", device="meta"):
        for seed in range(3):
            container(photo(seed))
        assert count_calls(lambda: container(image)) <= most


@pytest.mark.parametrize("make", [v1.Compose, lambda transforms: v1.RandomApply(transforms, 1.0)])
def test_a_container_of_a_generator(make: Any) -> None:
    """Which has no length, and can be used once."""
    image = Image.effect_noise((40, 30), 50)

    def crop_and_convert() -> torch.Tensor:
        return v1.Compose([make(each for each in [v1.CenterCrop(9)]), v1.ToTensor()])(image)

    expected = crop_and_convert()
    with torch_sink.image_backend("device", device="meta"):
        made = crop_and_convert()
    assert torch.equal(made.cpu(), expected)


# --- the guard of a step


def test_every_step_knows_torchvisions_method() -> None:
    """In the releases that are tested; ten classes have steps."""
    assert [(each.owner, each.name) for each in steps.STEPS if not each.knows()] == []
    assert len({each.owner for each in steps.STEPS}) == len(steps.STEPS) <= 10


def of_another_release(method: Any, file: Path) -> Any:
    """A method that draws once more before it does what it does."""
    source = textwrap.dedent(inspect.getsource(method)).removeprefix("@staticmethod\n")
    head, body = re.split(r"(?<=:)\n(?=    )", source, maxsplit=1)
    file.write_text(f"{head}\n    torch.rand(1)\n{body}")
    names = dict(sys.modules[method.__module__].__dict__)
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names[method.__name__]


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (v1.RandomHorizontalFlip(), "forward"),
        (v1.RandomCrop(20), "forward"),
        (v1.RandomCrop(20), "get_params"),
        (v1.RandomResizedCrop(20), "get_params"),
        (v1.RandomApply([v1.RandomVerticalFlip(1.0)]), "forward"),
        (v1.RandomGrayscale(0.5), "forward"),
        (v1.ColorJitter(0.4, 0.4, 0.4, 0.1), "get_params"),
        (v2.RandomCrop(20), "make_params"),
    ],
)
def test_of_another_source_the_method_itself_runs(
    transform: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(transform)
    own = of_another_release(getattr(kind, name), tmp_path / "method.py")
    container = v1.Compose([transform, v1.PILToTensor()])
    before = [seeded(seed, lambda: container(photo()))[1] for seed in range(3)]
    monkeypatch.setattr(kind, name, staticmethod(own) if "self" not in inspect.signature(own).parameters else own)
    assert before != [seeded(seed, lambda: container(photo()))[1] for seed in range(3)]
    (found,) = [each for each in steps.STEPS if each.owner is kind]
    assert not found.knows() or found.name != name  # else it looks, at each call, whether `get_params` is torchvision's
    assert_equal_samples(container)
