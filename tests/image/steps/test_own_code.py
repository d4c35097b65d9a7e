"""Containers with somebody else's code, or with what falls back: it is called as stock code calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms as v1
from torchvision.transforms import functional as F
from torchvision.transforms import v2

import torch_sink
from image.random_pipelines import same_value
from image.steps.containers import assert_equal_samples, photo, seeded

pytestmark = pytest.mark.halved


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


@pytest.mark.parametrize("transform", [v2.Normalize((0.5,), (0.2,)), v2.CenterCrop(4)])
def test_compilers_follow_stock_code(transform: Any) -> None:
    values = torch.rand(3, 9, 8)
    with torch_sink.image_backend("device", device="cpu"):
        assert torch.equal(torch.compile(transform, backend="eager", fullgraph=True)(values), transform(values))


def test_what_is_no_handle_is_stocks() -> None:
    container = v1.Compose([v1.RandomCrop(5), v1.RandomHorizontalFlip(), v1.Normalize((0.5,), (0.5,))])
    values = torch.rand(3, 9, 8)
    expected = seeded(3, lambda: container(values))
    with torch_sink.image_backend("device", device="cpu"):
        made, state = seeded(3, lambda: container(values))
    assert type(made) is torch.Tensor
    assert torch.equal(made, expected[0])
    assert state == expected[1]
