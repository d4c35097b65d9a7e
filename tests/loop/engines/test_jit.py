"""`jit` on functions, modules, classes and methods: they stay what they were, and their code is compiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_sink.loop import JitConfig, jit
from torch_sink.loop.engines import jit as compiler
from torch_sink.mindspore import data_sink

# torch 2.11 warns about itself when its compiler is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

X = torch.arange(8.0).reshape(2, 4) - 3


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that Dynamo recorded; they run as they are, for Inductor would take seconds for each."""
    recorded: list[Any] = []

    def backend(graph: Any, inputs: Any, *, options: Any) -> Callable[..., Any]:
        recorded.append(graph)
        return graph.forward

    monkeypatch.setattr(compiler, "inductor_backend", backend)
    torch._dynamo.reset()
    return recorded


class Net(nn.Module):
    """Hidden size and dropout as attributes."""

    def __init__(self, hidden: int = 3) -> None:
        super().__init__()
        self.hidden = hidden
        self.linear, self.dropout = nn.Linear(4, hidden), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.dropout(self.linear(inputs)).relu()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # the compiler's own look at it
def test_a_jitted_module_stays_what_it_is(graphs: list[Any]) -> None:
    model, plain = Net(), Net()
    plain.load_state_dict(model.state_dict())
    jitted = jit(model)
    assert jitted is model
    assert isinstance(jitted, Net)
    assert list(jitted.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in jitted.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert jitted.hidden == 3
    for training in (True, False):
        jitted.train(training), plain.train(training)
        torch.manual_seed(1)
        ours = jitted(X)
        torch.manual_seed(1)
        assert torch.equal(ours, plain(X))
        assert jitted.training is jitted.dropout.training is training
    assert len(graphs) == 2, "one for training, one for evaluation"
    assert jitted.calls.item() == 2
    without = jitted(X)
    handle = jitted.register_forward_hook(lambda module, inputs, output: output + 1)
    hooked = jitted(X)
    assert torch.equal(hooked, without + 1)
    handle.remove()
    hooked.sum().backward()
    assert model.linear.weight.grad is not None
    assert torch.equal(copy.deepcopy(jitted)(X), jitted(X))


def make_methods() -> list[tuple[Any, float]]:
    """Two classes with every kind of method, and what they add."""

    class Methods:
        shift = 10.0

        @jit
        def plain(self, inputs: Tensor) -> Tensor:
            return inputs + self.shift

        @staticmethod
        @jit(fullgraph=True)
        def static(inputs: Tensor) -> Tensor:
            return inputs + 2

        @classmethod
        @jit(dynamic=True)
        def of_class(cls, inputs: Tensor) -> Tensor:
            return inputs + 2 * cls.shift

    class Inherited(Methods):
        shift = 20.0

    return [(Methods, 10.0), (Inherited, 20.0)]


def test_methods(graphs: list[Any]) -> None:
    for owner, shift in make_methods():
        for name, value in {"static": 2, "of_class": 2 * shift}.items():
            assert torch.equal(getattr(owner, name)(X), X + value), name
            assert torch.equal(getattr(owner(), name)(X), X + value), name
            assert getattr(owner, name).__name__ == name
        assert torch.equal(owner().plain(X), X + shift)
        assert torch.equal(jit(owner().plain)(X), X + shift)
    assert len(graphs) >= 3


class Scaled:
    """An object that is called."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


def compiles_functional() -> bool:
    """Whether `torch.compile` takes a function of torch.nn.functional itself; that of torch 2.8 runs it as it is."""
    seen: list[Any] = []
    torch.compile(nn.functional.relu, backend=lambda graph, inputs: seen.append(graph) or graph.forward)(X)
    return bool(seen)


def test_other_callables(graphs: list[Any]) -> None:
    calls: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (jit(functools.partial(torch.add, X)), X + X),
        (jit(Scaled(2.0)), X * 2),
        (jit(Scaled(3.0).__call__), X * 3),
        (jit(torch.sin), X.sin()),
        (jit(nn.functional.relu), X.relu()),
    ]
    for function, expected in calls:
        assert torch.equal(function(X), expected)
    assert len(graphs) == len(calls) - (not compiles_functional())
    once = jit(lambda inputs: inputs - 1)
    assert jit(once) is once, "it is compiled already"


def test_data_sink_takes_a_module(graphs: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    sink = data_sink(model, [X, -X], sink_size=2, jit_config=JitConfig(fullgraph=True))
    assert torch.equal(sink(), model(-X))
    assert len(graphs) == 1
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    for _ in range(12):  # more than the compiler's limit for one function
        jit(nn.Linear(4, 2), fullgraph=True)(X)
    assert len(graphs) == 13


@pytest.mark.parametrize("level", ["O0", "no compiler"])
def test_nothing_is_compiled(graphs: list[Any], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if level == "no compiler":
        monkeypatch.setattr(compiler, "compiler_problem", lambda: "no C++ compiler")
    arguments = {"jit_level": "O0"} if level == "O0" else {}
    model = Net()
    assert jit(model, **arguments) is model
    assert jit(torch.sin, **arguments) is torch.sin
    model(X)
    assert not graphs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (3, "jit got int"),
        (Net, r"jit got the class Net; .*model = jit\(Model\(\)\)"),
        (staticmethod(torch.sin), "jit got the staticmethod sin; decorate its methods, below @staticmethod"),
    ],
)
def test_what_cannot_be_compiled(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        jit(wrong)
