"""Whatever a data worker makes arrives as stock code sends it, or is an error at its place; no pass waits for ever."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from image.check import assert_same_bits
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision import tv_tensors

import torch_sink
from torch_sink import SinkLoader

pytestmark = [pytest.mark.halved, pytest.mark.filterwarnings("ignore")]  # prototypes of torch

SECONDS = 60  # for one batch, before a test fails


class Wrapped(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.inner if isinstance(one, cls) else one for one in args), **(kwargs or {}))


def ragged(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(5), torch.ones(3)], layout=layout)


def seen_by_vmap() -> torch.Tensor:
    seen = []
    torch.vmap(lambda row: seen.append(row) or row)(torch.ones(3, 2))
    return seen[0]


def with_field(tensor: torch.Tensor, field: Any) -> torch.Tensor:
    tensor.field = field  # type: ignore[attr-defined]
    return tensor


SENT: list[Callable[[], Any]] = [
    lambda: ragged(torch.strided),
    lambda: {"rows": [ragged(torch.jagged), torch.ones(2)]},
    lambda: ragged(torch.strided).as_subclass(tv_tensors.Mask),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    lambda: torch.empty(3, device="meta"),
    lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    lambda: torch.ones(3, requires_grad=True),
    lambda: Wrapped(torch.ones(3)),
    lambda: with_field(tv_tensors.Mask(torch.ones(2, 2)), "mine"),
    lambda: torch.arange(90000.0)[70000:70003],
    lambda: torch.ones(1).expand(4),
    lambda: torch.ones(0, 3),
    lambda: torch.ones(3).share_memory_(),
    lambda: torch.ones(1 << 18),
    lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
]
REFUSED: list[Callable[[], Any]] = [
    lambda: torch.ones(2, 3).to_mkldnn(),
    lambda: torch.ones(3, requires_grad=True) * 2,
    seen_by_vmap,
    lambda: with_field(tv_tensors.Mask(torch.ones(2, 2)), lambda: 1),
    lambda: [torch.ones(1 << 16), lambda: 1],
    threading.Lock,
]


class Made(Dataset):
    def __init__(self, makes: list[Callable[[], Any]]) -> None:
        self.makes = makes

    def __len__(self) -> int:
        return len(self.makes)

    def __getitem__(self, index: int) -> Any:
        return self.makes[index]()


def first(samples: list[Any]) -> Any:
    return samples[0]


def loader_of(makes: list[Callable[[], Any]], kind: Any = DataLoader) -> Any:
    return kind(Made(makes), batch_size=1, num_workers=1, collate_fn=first, timeout=SECONDS)


def received(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, with the message of an error in its place."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            yield str(error)


def assert_same(made: Any, stock: Any) -> None:
    assert type(made) is type(stock)
    if isinstance(stock, dict):
        assert_same(list(made.values()), list(stock.values()))
    elif isinstance(stock, (list, PackedSequence)):
        for one, other in zip(made, stock, strict=True):
            assert_same(one, other)
    elif not isinstance(stock, torch.Tensor):
        assert made == stock
    elif stock.is_nested:
        assert_same([*made.unbind()], [*stock.unbind()])
    else:
        facts = ("dtype", "device", "layout", "shape", "requires_grad", "is_quantized")
        assert [getattr(made, fact) for fact in facts] == [getattr(stock, fact) for fact in facts]
        assert vars(made).keys() == vars(stock).keys()
        if type(stock) is Wrapped:
            made, stock = made.inner, stock.inner
        if stock.device.type == "cpu" and stock.layout is torch.strided and not stock.is_quantized:
            assert (made.stride(), made.storage_offset()) == (stock.stride(), stock.storage_offset())
            assert_same_bits(made.detach(), stock.detach())
        elif stock.device.type == "cpu":
            assert torch.equal(*(one.int_repr() if one.is_quantized else one.to_dense() for one in (made, stock)))


@pytest.mark.parametrize(
    ("kind", "backend", "wraps"),
    [
        (DataLoader, True, False),
        (StatefulDataLoader, True, False),
        (DataLoader, False, True),
        (StatefulDataLoader, True, True),
    ],
)
@pytest.mark.sampled(2)
def test_it_arrives_or_is_an_error(kind: Any, backend: bool, wraps: bool) -> None:
    expected = list(loader_of(SENT))
    shared = set(os.listdir("/dev/shm"))
    with contextlib.ExitStack() as stack:
        if backend:
            stack.enter_context(torch_sink.image_backend("device", device="cpu"))
        loader = loader_of([*SENT, *REFUSED, *SENT], kind)
        made = received(iter(stack.enter_context(SinkLoader(loader)) if wraps else loader))
        for stock in expected:
            assert_same(next(made), stock)
        for _ in REFUSED:
            assert "cannot be sent to the training process" in next(made)
        for stock in expected:
            assert_same(next(made), stock)
        assert not list(made)
    left = set(os.listdir("/dev/shm")) - shared
    assert not [name for name in left if name.startswith("torch_")]


class WithState(Made):
    """A dataset with a state that cannot be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": lambda: 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is none")


@pytest.mark.parametrize("wraps", [False, True])
def test_a_state_that_cannot_be_sent(wraps: bool) -> None:
    loader = StatefulDataLoader(WithState(SENT), batch_size=1, num_workers=1, collate_fn=first, timeout=SECONDS)
    with torch_sink.image_backend("device", device="cpu"), contextlib.ExitStack() as stack:
        used: Any = stack.enter_context(SinkLoader(loader)) if wraps else loader
        stack.enter_context(pytest.raises(RuntimeError, match=r"cannot be sent .*: the state of its dataset"))
        iter(used)
