"""The stand-ins for slow samplers: equal results and equal generator states, over many seeds."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from image.cases import array_opener
from image.check import run
from torch_sink.image.handles.image import LazyImage, LazyPixels, lazy_image
from torch_sink.image.stand_ins import augmentation_space
from torch_sink.image.steps import STEPS, two_wholes

SEEDS = range(10_000)
SIZES = ((375, 500), (47, 61), (1, 23), (300, 7), (2, 2))
SETTINGS = (
    *[((0.08, 1.0), (3 / 4, 4 / 3))] * 10,
    ((0.9, 1.0), (0.1, 0.2)),  # seldom fits: ten tries, then the fallback crop
    ((0.5, 0.5), (1.0, 1.0)),
    ((0.01, 4.0), (0.3, 5.0)),
)


def step_of(kind: type) -> Any:
    """What replaces its method."""
    (found,) = [each for each in STEPS if each.owner is kind]
    return found.make(getattr(kind, found.name))


def draws(function: Any, *args: Any, seeds: range = SEEDS) -> list[tuple[Any, torch.Tensor]]:
    """A sampler's result for each seed, and the generator's state after it."""
    found = []
    for seed in seeds:
        # Unlike `torch.manual_seed`, this does not also queue a call for every device.
        torch.default_generator.manual_seed(seed)
        arguments = [argument[seed % len(argument)] for argument in args]
        found.append((function(*arguments), torch.get_rng_state()))
    return found


def assert_equal_draws(actual: list[tuple[Any, torch.Tensor]], expected: list[tuple[Any, torch.Tensor]]) -> None:
    assert len({str(result) for result, _ in expected}) > 1
    for seed, ((result, state), (stock_result, stock_state)) in enumerate(zip(actual, expected, strict=True)):
        assert result == stock_result, f"seed {seed}"
        assert torch.equal(state, stock_state), f"seed {seed}"


def test_resized_crop_v1() -> None:
    stock = v1.RandomResizedCrop.get_params
    stand_in = step_of(v1.RandomResizedCrop).__func__
    images = [torch.empty(3, height, width) for height, width in SIZES]
    scales, ratios = zip(*SETTINGS, strict=True)
    # 5 sizes and 13 settings have no common divisor, so every pair is drawn.
    assert_equal_draws(draws(stand_in, images, scales, ratios), draws(stock, images, scales, ratios))


@pytest.mark.parametrize("padding", [None, 4, (0, 1, 2, 3)])
@pytest.mark.sampled(2)
def test_crop_v2(padding: Any) -> None:
    images = [[torch.empty(3, height, width)] for height, width in ((9, 9), (8, 30), (40, 9), (8, 8), (33, 47))]
    transforms = [v2.RandomCrop(8, padding=padding)]
    assert_equal_draws(
        draws(step_of(v2.RandomCrop), transforms, images), draws(v2.RandomCrop.make_params, transforms, images)
    )


@pytest.mark.parametrize("seeds", [SEEDS[:2000], pytest.param(SEEDS[2000:], marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "transform",
    [
        v1.RandomApply([v1.ColorJitter(0.4), v1.RandomHorizontalFlip()], p=0.8),
        v1.RandomApply(torch.nn.ModuleList([v1.RandomHorizontalFlip(1.0)]), p=0.5),
        v1.RandomGrayscale(0.3),
        v1.ColorJitter(0.4, 0.3, 0.2, 0.1),
        v1.ColorJitter(0.4),
        v1.RandomHorizontalFlip(0.3),
        v1.RandomCrop(6),
        v1.RandomCrop((7, 4)),
        v1.RandomCrop(8, padding=2, fill=7),
        v1.RandomCrop(10, padding=(1, 2, 3, 4), padding_mode="reflect"),
        v1.RandomCrop(12, pad_if_needed=True),
    ],
)
@pytest.mark.sampled(5)
def test_forwards_of_many_seeds(transform: Any, seeds: range) -> None:
    """What they record, against what torchvision's method records."""
    kind = type(transform)
    (found,) = [each for each in STEPS if each.owner is kind]
    with torch_sink.image_backend("device", device="meta"):
        image = lazy_image(array_opener(9, 8)())
        stand_in = functools.partial(getattr(kind, found.name), transform)
        stock = functools.partial(inspect.unwrap(getattr(kind, found.name)), transform)
        made, expected = (
            draws(lambda image, run=run: run(image).lazy_recording.calls, [image], seeds=seeds)
            for run in (stand_in, stock)
        )
        assert_equal_draws(made, expected)


@pytest.mark.parametrize(
    ("transform", "name", "value"),
    [
        (v1.ColorJitter(0.1), "brightness", [0.5, 1, 3]),
        (v1.RandomRotation(10), "degrees", [1, 2, 3]),
        (v1.RandomRotation(10), "degrees", ["1", "20"]),
        (v1.RandomRotation(10), "degrees", [np.array(1.0), np.array(2.0)]),
        (v1.RandomRotation(10), "degrees", [20, 10]),
        (v1.RandomAffine(10), "degrees", (90,)),
        (v1.RandomApply([v1.RandomHorizontalFlip(1.0)]), "p", np.float64(0.5)),
        (v1.RandomApply([v1.RandomHorizontalFlip(1.0)]), "p", 2.0),
        (v1.RandomApply([v1.RandomHorizontalFlip(1.0)]), "transforms", None),
        (v1.RandomGrayscale(0.5), "p", "0.5"),
        (v1.RandomGrayscale(0.5), "p", True),
        (v1.RandomAffine(10), "scale", (0.5, 1.0, 2.0)),
        (v1.RandomAffine(10), "scale", (1e-60, 1e-50)),
    ],
)
def test_limits_in_other_forms(transform: Any, name: str, value: Any) -> None:
    transform = copy.copy(transform)
    setattr(transform, name, value)

    def outcome() -> Any:
        torch.manual_seed(0)
        try:
            made: Any = v1.functional.pil_to_tensor(transform(array_opener(9, 8)())).clone()
        except Exception as error:
            made = type(error), str(error)
        return made, torch.get_rng_state()

    stock, state = outcome()
    with torch_sink.image_backend("device", device="cpu"):
        ours, our_state = outcome()
    assert torch.equal(our_state, state)
    assert torch.equal(ours, stock) if isinstance(stock, torch.Tensor) else ours == stock


def test_corners_of_crops() -> None:
    def stock(rows: int, columns: int) -> list[int]:
        return [int(torch.randint(0, end, size=(1,)).item()) for end in (rows, columns)]

    rows, columns = (9, 1, 5, 3_000_000_000, 2, 33), (9, 1, 7, 3_000_000_000)
    found = draws(lambda *ends: list(two_wholes(*ends)), rows, columns)
    assert_equal_draws(found, draws(stock, rows, columns))


@pytest.mark.parametrize("kind", [v1.RandAugment, v1.AutoAugment, v1.TrivialAugmentWide])
def test_augmentation_space(kind: type) -> None:
    stock = kind._augmentation_space
    stand_in = augmentation_space(kind, stock)
    transform = kind()
    calls = [(31,)] if kind is v1.TrivialAugmentWide else [(10, (7, 9)), (31, (7, 9)), (10, (9, 7)), (10, (7, 9))]
    state = torch.get_rng_state()
    for call in calls:
        expected, found = stock(transform, *call), stand_in(transform, *call)
        assert list(found) == list(expected)
        for name, (magnitudes, signed) in expected.items():
            assert found[name][0].tolist() == magnitudes.tolist()
            assert not found[name][0].flags.writeable
            assert found[name][1] == signed
        found.clear()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_space_of_its_own_is_kept() -> None:
    class OnlyInvert(v1.RandAugment):
        def _augmentation_space(self, *args: Any) -> dict[str, Any]:
            return {"Invert": (torch.tensor(0.0), False)}

    image = array_opener(9, 8)()
    expected = v1.PILToTensor()(OnlyInvert()(image))
    with torch_sink.image_backend("device", device="cpu"):
        assert torch.equal(v1.PILToTensor()(OnlyInvert()(image)).clone(), expected)


def halved_in_place(magnitudes: torch.Tensor) -> torch.Tensor:
    return magnitudes.div_(2, rounding_mode=None if magnitudes.is_floating_point() else "trunc")


@pytest.mark.parametrize("change", [halved_in_place, torch.abs, lambda magnitudes: magnitudes.flip(0)])
def test_a_space_may_change_that_of_its_base(change: Any) -> None:
    class Gentle(v1.RandAugment):
        def _augmentation_space(self, num_bins: int, image_size: Any) -> dict[str, Any]:
            space = super()._augmentation_space(num_bins=num_bins, image_size=[*image_size])
            return {name: (change(each) if each.ndim else each, signed) for name, (each, signed) in space.items()}

    class GentleV2(v2.RandAugment):
        _AUGMENTATION_SPACE = {  # noqa: RUF012  as torchvision writes it
            name: (lambda *args, make=make: None if (made := make(*args)) is None else change(made), signed)
            for name, (make, signed) in v2.RandAugment._AUGMENTATION_SPACE.items()
        }

    def made() -> list[torch.Tensor]:
        kinds = Gentle(1, 20), GentleV2(1, 20)
        return [v1.PILToTensor()(kind(array_opener(9, 8)())).clone() for _ in range(8) for kind in kinds]

    torch.manual_seed(3)
    expected = made()
    with torch_sink.image_backend("device", device="cpu"):
        torch.manual_seed(3)
        assert all(map(torch.equal, made(), expected))


def test_a_space_that_a_program_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def space(self: v1.RandAugment, *args: Any) -> dict[str, Any]:
        return {"Rotate" if self.num_ops == 1 else "Invert": (torch.tensor([90.0] * 31), False)}

    monkeypatch.setattr(v1.RandAugment, "_augmentation_space", space)
    expected = [v1.PILToTensor()(v1.RandAugment(count)(array_opener(9, 8)())) for count in (1, 2)]
    with torch_sink.image_backend("device", device="cpu"):
        found = [v1.PILToTensor()(v1.RandAugment(count)(array_opener(9, 8)())).clone() for count in (1, 2)]
    assert all(map(torch.equal, found, expected))


def test_magnitudes_follow_the_default_dtype_and_device() -> None:
    def shears() -> Any:
        return v1.RandAugment()._augmentation_space(31, (30, 30))["ShearX"][0]

    def of_both_dtypes() -> list[Any]:
        found = shears()
        torch.set_default_dtype(torch.float64)
        try:
            return [found, shears()]
        finally:
            torch.set_default_dtype(torch.float32)

    expected = of_both_dtypes()
    with torch_sink.image_backend("device", device="meta"):
        found = of_both_dtypes()
        with torch.device("meta"):
            assert shears().device.type == "meta"
        found.append(shears())
    assert [magnitudes.dtype for magnitudes in found] == ["float32", "float64", "float32"]
    for ours, stock in zip(found, [*expected, expected[0]], strict=True):
        assert ours.tolist() == stock.tolist()


def assert_recorded_as_drawn(transform: Any, openers: list[Any]) -> None:
    """The handles that a transform gives hold stock's pixels, and leave the generators in stock's state."""
    expected, stock_state = run(transform, openers, 5)
    with torch_sink.image_backend("device", device="cpu"):
        handles, state = run(lambda image: transform(lazy_image(image)), openers, 5)
        assert torch.equal(state, stock_state)
        assert all(type(handle) is LazyImage for handle in handles)
        assert [handle.tobytes() for handle in handles] == [image.tobytes() for image in expected]


class OrderOfOne(v1.ColorJitter):
    """A jitter whose order is a list, which stock code takes as well; it does nothing for a number without a meaning."""

    @staticmethod
    def get_params(*args: Any) -> Any:
        _, *factors = v1.ColorJitter.get_params(*args)
        return [3, 7, 0, -1, 2, 1], *factors


class OrderOfTwo(v2.ColorJitter):
    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        return {**super().make_params(flat_inputs), "fn_idx": range(3, -1, -1)}


@pytest.mark.parametrize("kind", [OrderOfOne, OrderOfTwo])
def test_the_order_of_a_jitter_as_a_list(kind: type) -> None:
    transform = kind(0.4, 0.4, 0.4, 0.1)
    assert_recorded_as_drawn(transform, [array_opener(9, 8, seed) for seed in range(3)])
    with torch_sink.image_backend("device", device="cpu"):
        bytes_of_torch = torch.zeros(3, 9, 8, dtype=torch.uint8)
        assert type(transform(bytes_of_torch)) is torch.Tensor


FORWARDS = {
    "v1 flip": lambda: v1.RandomHorizontalFlip(),
    "v1 vertical flip": lambda: v1.RandomVerticalFlip(0.3),
    "v1 RandAugment": lambda: v1.RandAugment(8, 6, fill=(1, 2, 3)),
    "plain": lambda: v2.Resize((7, 5)),
    "random apply": lambda: v2.RandomHorizontalFlip(0.5),
    "random apply of something": lambda: v2.RandomApply([v2.RandomVerticalFlip(0.5)], p=0.5),
    "own choice of inputs": lambda: v2.ToDtype(torch.float32, scale=True),
    "choice": lambda: v2.RandomChoice([v2.RandomHorizontalFlip(1.0), v2.RandomInvert(1.0), v2.Identity()]),
    "order": lambda: v2.RandomOrder([v2.RandomHorizontalFlip(1.0), v2.RandomCrop(4), v2.RandomVerticalFlip(0.5)]),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forwards(name: str) -> None:
    assert_recorded_as_drawn(FORWARDS[name](), [array_opener(9, 8, seed) for seed in range(12)])


def test_v2_forward_checks_its_input() -> None:
    class Refuses(v2.Transform):
        def check_inputs(self, flat_inputs: list[Any]) -> None:
            raise TypeError("not this one")

    with (
        torch_sink.image_backend("device", device="cpu"),
        pytest.raises(TypeError, match="not this one"),
    ):
        Refuses()(lazy_image(array_opener(4, 4)()))


@pytest.mark.parametrize(
    "kind",
    [
        v1.RandomHorizontalFlip,
        v1.RandomVerticalFlip,
        v1.RandomGrayscale,
        lambda p: v1.RandomApply([v1.RandomHorizontalFlip(1.0)], p),
        v2.RandomHorizontalFlip,
    ],
)
@pytest.mark.parametrize("towards", [0.0, 0.5, 1.0])
def test_a_probability_is_rounded_to_the_type_of_the_draw(towards: float, kind: Any) -> None:
    """As torch compares the two: of a probability just above the draw, nothing is left of what is above it."""
    torch.manual_seed(5)
    draw = torch.rand(1).item()
    p = draw if towards == 0.5 else math.nextafter(draw, towards)
    assert_recorded_as_drawn(kind(p), [array_opener(9, 8)])


def test_a_resized_crop_of_v2_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transform holds the name of the interpolation; method by method, recording would take three times as long."""
    monkeypatch.setattr(LazyImage, "crop", None)
    assert_recorded_as_drawn(v2.RandomResizedCrop(8), [array_opener(19, 18, seed) for seed in range(3)])


@pytest.mark.parametrize("module", [v1, v2])
def test_a_crop_is_resized_in_one_call(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods of the image, which stock code calls, cost a data worker 5 % of an ImageNet sample."""
    with torch_sink.image_backend("device", device="meta"):
        image = lazy_image(array_opener(40, 50)())
        for method in ("crop", "resize"):
            monkeypatch.delattr(LazyPixels, method)
        ops = module.RandomResizedCrop(8)(image).lazy_recording.calls
    assert [op.name for op in ops] == ["pil.crop", "pil.resize"]
