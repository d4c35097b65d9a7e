"""Containers of transforms: what they record, and draw, is what their transforms do when they are called one by one."""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener
from image.random_pipelines import Scenario, compare_scenario, same_value
from torch_sink.image.core import settings
from torch_sink.image.core.ops import TensorArgument
from torch_sink.image.handles.image import LazyImage
from torch_sink.image.handles.tensor import HANDLES
from torch_sink.image.steps import containers
from torch_sink.image.steps.draft import Draft, draft_of
from torch_sink.image.steps.registry import STEPS, run_of

_MODES = (v1.InterpolationMode.NEAREST, v1.InterpolationMode.BILINEAR, v1.InterpolationMode.BICUBIC)
STATISTICS = (0.5, 0.4, 0.3), (0.2, 0.3, 0.1)


def photo(seed: int = 0, size: tuple[int, int] = (40, 36)) -> Image.Image:
    return array_opener(*size, seed)()


def _cifar(module: Any) -> list[Any]:
    crop = [module.RandomCrop(32, padding=4), module.RandomHorizontalFlip()]
    if module is v1:
        return [*crop, v1.ToTensor(), v1.Normalize(*STATISTICS)]
    return [v2.ToImage(), *crop, v2.ToDtype(torch.float32, scale=True), v2.Normalize(*STATISTICS)]


def _noise(image: Any) -> Any:
    random.random()
    np.random.rand()
    torch.rand(1)
    return image


def random_transforms(chance: random.Random, module: Any, depth: int = 0) -> list[Any]:
    makers: list[Callable[[], Any]] = [
        lambda: module.RandomCrop(chance.choice((8, 20, (30, 25), 36)), padding=chance.choice((None, 2, (1, 3)))),
        lambda: module.RandomCrop(60, pad_if_needed=True),
        lambda: module.RandomResizedCrop(chance.choice((12, 30)), scale=(0.01, 4.0) if chance.random() < 0.2 else (0.1, 1)),
        lambda: module.RandomHorizontalFlip(chance.choice((0, 0.3, 1))),
        lambda: module.RandomVerticalFlip(chance.random()),
        lambda: module.Resize(chance.choice((20, (24, 30), [18]))),
        lambda: module.Resize(20, max_size=30),
        lambda: module.CenterCrop(chance.choice((10, (20, 50)))),
        lambda: module.Pad(chance.choice((1, (2, 3), (1, 2, 3, 4))), fill=chance.choice((0, (1, 2, 3)))),
        lambda: module.Pad(3, padding_mode=chance.choice(("edge", "reflect", "symmetric"))),
        lambda: module.ColorJitter(0.4, 0.3, chance.choice((0, 0.2)), chance.choice((0, 0.1))),
        lambda: module.RandomGrayscale(0.5),
        lambda: module.Grayscale(chance.choice((1, 3))),
        lambda: module.RandAugment(chance.randint(1, 4), chance.randint(0, 30), interpolation=chance.choice(_MODES)),
        lambda: module.AutoAugment(chance.choice(list(v1.AutoAugmentPolicy)), fill=chance.choice((None, 7, [1, 2, 3]))),
        lambda: module.TrivialAugmentWide(fill=chance.choice((None, 9.0, [1.5, 2, 3]))),
        lambda: module.RandomInvert(0.5),
        lambda: module.RandomPosterize(chance.choice((0, 3, 8)), 0.5),
        lambda: module.RandomSolarize(chance.choice((0.5, 128)), 0.5),
        lambda: module.RandomAdjustSharpness(chance.choice((0, 1.7)), 0.5),
        lambda: chance.choice((module.RandomAutocontrast, module.RandomEqualize))(chance.choice((0.5, 1))),
        lambda: module.GaussianBlur(chance.choice((3, (5, 1))), chance.choice(((0.1, 2.0), 1.0))),
        lambda: module.Lambda(_noise),
        lambda: module.RandomRotation(
            chance.choice((20, (90, 90), (180, 180), 0)), expand=chance.random() < 0.3, fill=chance.choice((0, 9)),
            center=chance.choice((None, (3, 5))), interpolation=chance.choice(_MODES),
        ),
        lambda: module.RandomAffine(
            30, chance.choice((None, (0.1, 0.3))), chance.choice((None, (0.7, 1.4))),
            chance.choice((None, 9, (1, 5, -4, 8))), fill=chance.choice((0, 9)), interpolation=chance.choice(_MODES),
        ),
        lambda: module.RandomPerspective(
            chance.random(), chance.choice((0.3, 1)), chance.choice(_MODES), chance.choice((0, 7))
        ),
        lambda: module.ElasticTransform(
            chance.choice((9.0, [30.0, 5.0])), chance.choice((1.0, 2.5)), chance.choice(_MODES), chance.choice((0, 7))
        ),
    ]  # fmt: skip
    if module is v2:
        makers += [
            lambda: v2.RandomZoomOut(chance.choice((0, (1, 2, 3))), (1.0, 1.7), chance.choice((0.3, 1))),
            lambda: v2.ScaleJitter((40, 30), (0.5, 1.4)),
            lambda: v2.RandomShortestSize([18, 25], chance.choice((None, 30))),
            lambda: v2.RandomResize(14, 30),
        ]
    inside = functools.partial(random_transforms, chance, module, depth + 1)
    if depth < 2:
        makers += [
            lambda: module.Compose(inside()),
            lambda: nn.Sequential(*filter(lambda made: isinstance(made, nn.Module), inside())),
            lambda: module.RandomApply(inside(), chance.random()),
            lambda: module.RandomChoice(inside(), [0.5, 2.0, 1.0]),
            lambda: module.RandomOrder(inside()),
        ]
    return [chance.choice(makers)() for _ in range(3)]


def _tail(chance: random.Random, module: Any) -> list[Any]:
    in_place = chance.random() < 0.3
    erasing = module.RandomErasing(
        chance.choice((0.5, 1)), chance.choice(((0.02, 0.33), (0.9, 1.0), (0.0, 0.0001))),
        value=chance.choice((0, "random", (0.3,))), inplace=in_place,
    )  # fmt: skip
    erasings = [erasing] * chance.randint(0, 2)
    if module is v1:
        first = [v1.ToTensor(), v1.Normalize((0.5,), (0.2,), in_place)] if chance.random() < 0.8 else [v1.PILToTensor()]
        return [*first, *erasings]
    tail = [v2.ToDtype(torch.float32, scale=chance.random() < 0.8), v2.Normalize([0.5], [0.2], in_place)]
    return [
        chance.choice((v2.ToImage, v2.PILToTensor))(),
        *tail,
        *erasings,
        *([v2.ToPureTensor()] * chance.randint(0, 1)),
    ]


def random_container(seed: int) -> Any:
    """The same for the same seed."""
    chance = random.Random(seed)
    module: Any = chance.choice((v1, v2))
    before, tail = random_transforms(chance, module), _tail(chance, module)
    if module is v2 and chance.random() < 0.4:
        return v2.Compose([tail[0], *before, *tail[1:]])
    return module.Compose([*before, *tail])


class OneByOne:
    """A container, the transforms of which are called without it, those of containers inside of it as well."""

    def __init__(self, container: Any) -> None:
        self.transforms = container.transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


def seeded(seed: int, run: Callable[[], Any]) -> tuple[Any, Any]:
    """A result or an error, and the states of the generators behind it."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        result = run()
    except Exception as error:
        result = type(error), str(error)
    return result, (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def _with_values(ops: Any) -> list[Any]:
    """Calls that are equal where the tensors among their arguments are."""
    values = [[arg.tensor.tolist() if type(arg) is TensorArgument else arg for arg in op.args] for op in ops]
    return [(op.name, of_op) for op, of_op in zip(ops, values, strict=True)]


def assert_recorded_alike(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    (made, state), (expected_made, expected_state) = actual, expected
    assert type(made) is type(expected_made)
    assert state == expected_state
    if isinstance(made, (LazyImage, *HANDLES)):
        assert _with_values(made.lazy_ops) == _with_values(expected_made.lazy_ops)
        assert list(map(type, made.lazy_ops)) == list(map(type, expected_made.lazy_ops))
        assert (made.lazy_shape, made.lazy_dtype) == (expected_made.lazy_shape, expected_made.lazy_dtype)
        assert not isinstance(made, LazyImage) or (made.size, made.mode) == (expected_made.size, expected_made.mode)
    else:
        same_value(made, expected_made) if isinstance(made, (Image.Image, torch.Tensor)) else None
        assert isinstance(made, (Image.Image, torch.Tensor)) or made == expected_made


@pytest.mark.parametrize("first", range(0, 160, 40))
@pytest.mark.filterwarnings("ignore")
def test_a_container_records_what_its_transforms_do(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = 0
    for seed in range(first, first + 40):
        container = random_container(seed)
        image = photo(seed).convert("L") if seed % 7 == 0 else photo(seed)
        with torch_sink.image_backend("device", device="meta"):
            actual = seeded(seed, lambda image=image, run=container: run(image))
            with monkeypatch.context() as patch:
                for kind in STEPS:
                    patch.setitem(STEPS, kind, STEPS[kind]._replace(known=None))  # none is a step
                one_by_one = OneByOne(container)
                expected = seeded(seed, lambda image=image, run=one_by_one: run(image))
            recorded += isinstance(actual[0], HANDLES)
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


@pytest.mark.parametrize(
    "transform",
    [
        *(module.RandomPerspective(p=1.0, fill=3) for module in (v1, v2)),
        *(module.ElasticTransform(9.0, 1.0) for module in (v1, v2)),
        *(v2.RandomZoomOut(p=1.0), v2.ScaleJitter((40, 30)), v2.RandomShortestSize([18]), v2.RandomResize(9, 12)),
    ],
)
def test_steps_record_without_calling_the_transform(transform: Any) -> None:
    with torch_sink.image_backend("device", device="meta"):
        made = run_of(transform)(transform, draft_of(photo()))  # type: ignore[misc]
        assert type(made) is Draft
        assert made.ops
    module = v2 if isinstance(transform, v2.Transform) else v1
    assert_equal_samples(module.Compose([transform, transform, module.PILToTensor(), transform]))


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
    transforms = _cifar(module)
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


def assert_equal_samples(
    container: Any, change: Callable[[], None] = lambda: None, begin: Callable[[], None] = lambda: None
) -> list[Any]:
    """Samples as stock code makes them, with a change before each; returns what the backend recorded."""

    def samples() -> list[Any]:
        begin()
        made = []
        for seed in range(8):
            change()
            made.append(seeded(seed, lambda seed=seed: container(photo(seed))))
        return made

    expected = samples()
    with torch_sink.image_backend("device", device="cpu"):
        actual = samples()
        handles = [made for made, _ in actual]
        for (made, state), (stock_made, stock_state) in zip(actual, expected, strict=True):
            assert state == stock_state
            same_value(made, stock_made)
    return handles


# --- what is somebody else's code


class _OwnForward(v1.RandomHorizontalFlip):
    def forward(self, img: Any) -> Any:
        return F.vflip(img)


class _OwnParams(v1.RandomCrop):
    @staticmethod
    def get_params(img: Any, output_size: Any) -> tuple[int, int, int, int]:
        return 1, 2, 5, 6


class _OwnTransform(v2.RandomHorizontalFlip):
    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return v2.functional.vertical_flip(inpt)


class _OwnCall(v1.ToTensor):
    def __call__(self, pic: Any) -> Any:
        return super().__call__(pic) + 1.5


def _with_own(transform: Any, **methods: Any) -> Any:
    for name, method in methods.items():
        setattr(transform, name, method)
    return transform


OWN_CODE = {
    "forward": lambda: v1.Compose([_OwnForward(1.0), v1.ToTensor()]),
    "get_params": lambda: v1.Compose([v1.Pad(1), _OwnParams(8), v1.ToTensor()]),
    "transform": lambda: v2.Compose([v2.Pad(1), _OwnTransform(1.0), v2.ToImage()]),
    "call": lambda: v1.Compose([v1.Pad(1), _OwnCall()]),
    "of an instance": lambda: v1.Compose(
        [v1.Pad(1), _with_own(v1.RandomCrop(8), get_params=lambda img, size: (1, 2, 5, 6)), v1.ToTensor()]
    ),
    "forward of an instance": lambda: v2.Compose(
        [v2.Pad(1), _with_own(v2.CenterCrop(8), forward=lambda image: v2.functional.pad(image, 2)), v2.ToImage()]
    ),
}


@pytest.mark.parametrize("name", OWN_CODE)
def test_own_methods_are_called(name: str) -> None:
    assert_equal_samples(OWN_CODE[name]())


def test_hooks_are_called() -> None:
    calls: list[str] = []
    crop, flip = v1.RandomCrop(20), v2.RandomHorizontalFlip(1.0)
    crop.register_forward_pre_hook(lambda module, inputs: calls.append("before"))
    flip.register_forward_hook(lambda module, inputs, output: v2.functional.vflip(output))
    assert_equal_samples(v1.Compose([v1.Pad(2), crop, flip, v1.ToTensor()]))
    assert len(calls) == 16
    hook = nn.modules.module.register_module_forward_pre_hook(lambda module, inputs: calls.append("any"))
    try:
        assert_equal_samples(v1.Compose([v1.Pad(2), v1.ToTensor()]))
    finally:
        hook.remove()
    assert calls.count("any") == 16


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    stock = owner.__dict__[name]
    setattr(owner, name, make(stock))
    try:
        yield
    finally:
        setattr(owner, name, stock)


def _moved_crop(stock: Any) -> Any:
    @functools.wraps(stock)
    def crop(img: Any, top: int, left: int, height: int, width: int) -> Any:
        return stock(img, 0, 0, height, width)

    return crop


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize(
    ("owner", "name", "make"),
    [
        (F, "crop", _moved_crop),
        (v1.RandomCrop, "get_params", lambda stock: staticmethod(lambda img, size: (1, 2, 5, 6))),
        (v1.RandomCrop, "forward", lambda stock: lambda self, img: F.vflip(img)),
    ],
)
def test_replaced_functions_are_called(owner: Any, name: str, make: Any, is_before: bool) -> None:
    """Whether they were replaced before the backend was set, or later."""
    container = v1.Compose([v1.Pad(2), v1.RandomCrop(20), v1.ToTensor()])
    with _replaced(owner, name, make):
        expected = container(photo())
    outside: AbstractContextManager[None] = _replaced(owner, name, make) if is_before else nullcontext()
    with outside, torch_sink.image_backend("device", device="cpu"):
        with nullcontext() if is_before else _replaced(owner, name, make):
            made = container(photo())
        same_value(made, expected)


class _Counts(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (torch.rand, torch.randint, torch.Tensor.random_)
        return func(*args, **(kwargs or {}))


class _CountsBelow(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (torch.ops.aten.rand.default, torch.ops.aten.randint.low)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [_Counts, _CountsBelow])
def test_modes_see_stocks_draws(kind: Any) -> None:
    container = v1.Compose([v1.RandomCrop(20), v1.ToTensor()])
    with torch_sink.image_backend("device", device="meta"), kind() as mode:
        container(photo())
    assert mode.calls == 2


def test_what_is_no_handle_is_stocks() -> None:
    container = v1.Compose([v1.RandomCrop(5), v1.RandomHorizontalFlip(), v1.Normalize((0.5,), (0.5,))])
    values = torch.rand(3, 9, 8)
    expected = seeded(3, lambda: container(values))
    with torch_sink.image_backend("device", device="cpu"):
        made, state = seeded(3, lambda: container(values))
    assert type(made) is torch.Tensor
    assert torch.equal(made, expected[0])
    assert state == expected[1]


class _Reads:
    """Reads every image that it is given, or the type of each."""

    def __init__(self) -> None:
        self.reads, self.kinds = True, []  # type: ignore[var-annotated]

    def __call__(self, image: Any) -> Any:
        self.kinds.append(type(image) in (LazyImage, *HANDLES))
        if self.reads:
            np.asarray(image)
        return image


@contextmanager
def as_for_a_device() -> Iterator[None]:
    """The backend, which records all samples, as for a device that has the same pixels."""
    with torch_sink.image_backend("device", device="cpu"), pytest.MonkeyPatch.context() as patch:
        assert settings.active is not None
        patch.setattr(settings, "active", settings.active._replace(interpreted=True))
        yield


@pytest.mark.parametrize("first", [v1.Pad(2), v1.PILToTensor(), v2.ToImage()])
def test_what_reads_every_image_gets_ordinary_ones(first: Any) -> None:
    """And is counted as before; where it no longer reads, it gets handles again."""
    reader = _Reads()
    container = v1.Compose([first, reader, v1.CenterCrop(8)])
    expected = [container(photo(seed)) for seed in range(200)]
    reader.kinds.clear()
    with as_for_a_device():
        made = [container(photo(seed)) for seed in range(200)]
        ((_, reason), count), *others = torch_sink.fallback_report().counts.items()
        assert (reason.rpartition(".")[0].endswith("_Reads"), count, others) == (True, 200, [])
        for actual, stock in zip(made, expected, strict=True):
            assert isinstance(actual, type(stock))
            same_value(actual, stock)
        assert 16 <= sum(reader.kinds) <= 20
        reader.reads = False
        for seed in range(100):
            container(photo(seed))
        assert all(reader.kinds[-30:])
        reader.reads = True
        for seed in range(50):
            container(photo(seed))
    with (
        torch_sink.image_backend("device", device="cpu", strict=True),
        pytest.raises(torch_sink.UnsupportedOperation, match="_Reads"),
    ):
        container(photo())


@pytest.mark.parametrize("first", [[], [v1.PILToTensor()], [v2.ToImage()]])
def test_what_always_falls_back_is_stocks_from_the_beginning(first: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values, draws and counts; what is recorded inside of it once is tried again."""
    elastic = v1.ElasticTransform(9.0, interpolation=v1.InterpolationMode.BICUBIC)
    container = v1.Compose([*first, elastic, v1.RandomHorizontalFlip()])
    tried: list[int] = []
    called = containers._called
    monkeypatch.setattr(containers, "_called", lambda *args: tried.append(1) or called(*args))
    expected = [seeded(seed, lambda seed=seed: container(photo(seed))) for seed in range(80)]
    with as_for_a_device():
        actual = [seeded(seed, lambda seed=seed: container(photo(seed))) for seed in range(80)]
        (count,) = torch_sink.fallback_report().counts.values()
        assert (count, len(tried)) == (80, 16)
        for (made, state), (stock, stock_state) in zip(actual, expected, strict=True):
            assert state == stock_state
            same_value(made, stock)
        elastic.interpolation = v1.InterpolationMode.BILINEAR
        for seed in range(200):
            made = container(photo(seed))
        assert made.is_recording


def _count_calls(function: Callable[[], Any]) -> int:
    """How many functions, of Python and C, a call calls."""
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize(
    ("transforms", "most"),
    [
        ([v1.ToTensor(), functools.partial(F.adjust_gamma, gamma=2.0)], 36),
        ([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.RandomAutocontrast(p=1.0)], 80),
        ([v1.Pad(2), v1.ElasticTransform(9.0, interpolation=v1.InterpolationMode.BICUBIC)], 38),  # two take a lock
    ],
)
def test_what_always_falls_back_costs_few_calls_more_than_stock_code(transforms: list[Any], most: int) -> None:
    container, image = v1.Compose(transforms), photo()
    stock = _count_calls(lambda: container(image))
    with as_for_a_device():
        for _ in range(40):
            container(image)
        assert _count_calls(lambda: container(image)) <= stock + most


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
@pytest.mark.parametrize(("module", "most"), [(v1, 85), (v2, 105)])
def test_a_small_image_takes_few_calls(module: Any, most: int) -> None:
    """Of Python functions; called one by one, the transforms of CIFAR's pipeline make half as many again."""
    container, image = module.Compose(_cifar(module)), photo(size=(32, 32))
    counts = []
    with torch_sink.image_backend("device", device="meta"):
        for run in (container, OneByOne(container)):
            for seed in range(3):
                run(photo(seed))
            counts.append(_python_calls(lambda run=run: run(image)))
    assert counts[0] <= most
    assert counts[1] > 1.4 * counts[0]


def _python_calls(run: Callable[[], Any]) -> int:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
