"""Mode "compile": the rule of float64, odd shapes, and what happens without a compiler.

Six models, small ones, of which three share their code through the cache: each costs tens of seconds to compile on two
cores.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torchvision.ops import stochastic_depth

from loop.reference import make_batches, make_model, plain_loop
from torch_sink.loop import JitConfig, StepLoop, jit
from torch_sink.loop.engines import build
from torch_sink.loop.engines import jit as compiler
from torch_sink.loop.engines.jit import jit_with
from torch_sink.loop.evaluation import monitored
from torch_sink.mindspore import Model, data_sink

pytestmark = pytest.mark.halved

COMPILED = {"mode": "compile", "steps_per_sync": 7}
OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 1e-8),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3), 1e-8),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3), 1e-3),
}


def imported(name: str) -> Any:
    """A module of the compiler; torch 2.11 warns about itself when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def uncached() -> Any:
    """Context in which graphs are compiled that an earlier test, or an earlier run of it, has compiled."""
    return imported("torch._functorch.config").patch(enable_autograd_cache=False)


def distance(first: nn.Module, second: nn.Module) -> float:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def train(
    name: str, dtype: torch.dtype, *, compiled: bool, **options: Any
) -> tuple[nn.Module, torch.Tensor, StepLoop | None]:
    model = make_model(dtype=dtype)
    optimizer = OPTIMIZERS[name][0](model.parameters())
    batches = make_batches(20, dtype=torch.float64)
    batches = [(inputs.to(dtype), targets) for inputs, targets in batches]
    torch.manual_seed(5)
    if not compiled:
        return model, plain_loop(model, functional.cross_entropy, optimizer, batches)[0], None
    loop = StepLoop(model, functional.cross_entropy, optimizer, **COMPILED, **options)
    return model, loop.run(batches).losses, loop


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_equals_plain_in_float64(name: str) -> None:
    """Dropout included: compiled code draws what eager code draws."""
    ours, our_losses, loop = train(name, torch.float64, compiled=True)
    plain, plain_losses, _ = train(name, torch.float64, compiled=False)
    assert "mode: compile" in loop.explain()
    assert distance(ours, plain) <= OPTIMIZERS[name][1]
    torch.testing.assert_close(our_losses, plain_losses, rtol=1e-5, atol=1e-6)


def test_compiled_is_as_near_to_float64_as_eager() -> None:
    exact, _, _ = train("SGD", torch.float64, compiled=False)
    plain, plain_losses, _ = train("SGD", torch.float32, compiled=False)
    ours, our_losses, _ = train("SGD", torch.float32, compiled=True)
    assert our_losses[0].item() == pytest.approx(plain_losses[0].item(), rel=1e-5)
    assert distance(ours, exact) <= 4 * distance(plain, exact) + 1e-6


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_compiled_at_a_low_precision(level: str) -> None:
    """A short batch at the end runs uncompiled, and no recompilation happens."""
    torch._dynamo.utils.counters.clear()
    model, plain = make_model(dropout=0.0), make_model(dropout=0.0)
    batches = [*make_batches(5), *make_batches(1, size=3)]
    loop = StepLoop(
        model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), amp=level, **COMPILED
    )
    losses = loop.run(batches, epochs=2).losses
    eager = StepLoop(plain, functional.cross_entropy, torch.optim.SGD(plain.parameters(), lr=0.05), amp=level)
    torch.testing.assert_close(losses, eager.run(batches, epochs=2).losses, rtol=0.05, atol=0.05)
    assert "another shape than the usual one ran uncompiled (2 times)" in loop.explain()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_data_sink_compiles_its_function() -> None:
    """Compiled once, it carries state from call to call; what cannot be compiled whole raises under fullgraph."""
    total = torch.zeros(4)

    def step(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total.add_(inputs.relu() * weight)
        return total.sum()

    torch._dynamo.utils.counters.clear()
    batches = [(torch.arange(-1.0, 3.0) + number, torch.full((4,), 2.0)) for number in range(3)]
    sink = data_sink(step, batches, sink_size=2, jit_config=JitConfig(fullgraph=True))
    compiled = [sink().item() for _ in range(3)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    total.zero_()
    eager = data_sink(step, batches, sink_size=2)
    assert compiled == [eager().item() for _ in range(3)]
    with pytest.raises(torch._dynamo.exc.Unsupported):
        jit(lambda inputs: torch._dynamo.graph_break() or inputs, fullgraph=True)(total)


def test_what_a_config_asks_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def note(function: Any, *, backend: Any, options: dict[str, Any], fullgraph: bool, dynamic: bool) -> Any:
        asked.append((backend, options))
        return function

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for config, cuda_graphs in (
        (JitConfig(), False),
        (JitConfig(fast_random=True), False),
        (JitConfig(jit_level="O2"), True),
        (JitConfig(jit_level="O2", exc_mode="no_sink"), False),
        (JitConfig(exc_mode="sink"), True),
    ):
        jit_with(make_loop, config)
        as_eager = {} if config.fast_random else {"fallback_random": True, "layout_optimization": False}
        # An environment variable could turn them on.
        assert asked.pop() == (compiler.inductor_backend, {"triton.cudagraphs": cuda_graphs, **as_eager})


@pytest.mark.parametrize("fast_random", [False, True])
def test_graphs_of_the_compiler_are_off_whatever_the_environment_says(
    fast_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would lie inside of those of mode "graph"."""
    seen: list[bool] = []

    def stop(*arguments: Any, **options: Any) -> Any:
        seen.append(inductor.triton.cudagraphs)
        raise RuntimeError("enough seen")

    inductor = imported("torch._inductor.config")
    monkeypatch.setattr(imported("torch._inductor.compile_fx"), "compile_fx_inner", stop)
    with inductor.patch({"triton.cudagraphs": True}), uncached():
        make_loop(mode="compile", jit_config=JitConfig(fast_random=fast_random)).run(make_batches(1))
    assert seen == [False]


@pytest.mark.parametrize("fast_random", [False, True])
def test_warnings_of_the_compiler_are_no_failure_to_compile(fast_random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a program makes errors of all warnings, as these tests do; what is compiled late included."""
    warned: list[str] = []

    def warn_in(owner: Any, name: str, module: str) -> None:
        function = getattr(owner, name)

        def warns(*arguments: Any, **options: Any) -> Any:
            warned.append(module)
            warnings.warn_explicit("of the compiler's own", UserWarning, "file.py", 1, module)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, staticmethod(warns) if isinstance(owner, type) else warns)

    guards = imported("torch._dynamo.guards").GuardBuilder
    warn_in(guards, "_get_generic_dict_manager_example_value", "torch._dynamo.guards")  # as on Python 3.13.0
    warn_in(imported("torch._inductor.compile_fx"), "compile_fx_inner", "of a library's")
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    loop = make_loop(model, mode="compile", jit_config=JitConfig(fast_random=fast_random))
    with uncached(), warnings.catch_warnings(record=True):  # those that are shown
        loop.run(make_batches(3))
    assert "compiling failed" not in loop.explain(), loop.explain()
    assert "torch._dynamo.guards" in warned
    assert warned.count("of a library's") == 2, "forward and backward pass"


class Checkpointed(nn.Module):
    """Draws inside a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: functional.dropout(x, 0.5), self.first(inputs), use_reentrant=False)
        return self.last(hidden.mean((2, 3)))


class Attending(nn.Module):
    """Attention without dropout, whose operator is one that could draw; noise for each sample; then dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Linear(4, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = stochastic_depth(self.first(inputs), 0.5, "row").flatten(2).transpose(1, 2)[:, None]
        attended = functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.last(functional.dropout(attended.mean((1, 2)), 0.5))


@pytest.mark.parametrize(
    ("make", "usual"),
    [
        (lambda: make_model(dropout=0.0), True),
        (make_model, False),
        (Checkpointed, False),
        (Attending, True),
    ],
)
@pytest.mark.sampled(2)
def test_the_layout_is_the_compilers_unless_a_mask_depends_on_it(
    make: Callable[[], nn.Module], usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, bool]] = []

    def stop(*arguments: Any, **options: Any) -> Any:
        asked.append((inductor.layout_optimization, inductor.fallback_random))
        raise RuntimeError("enough seen")

    inductor = imported("torch._inductor.config")
    monkeypatch.setattr(imported("torch._inductor.compile_fx"), "compile_fx_inner", stop)
    for layout in (True, False):  # what is usual is the user's decision
        loop = make_loop(make(), mode="compile")
        with inductor.patch(layout_optimization=layout), uncached():
            loop.run(make_batches(1))
        assert "compiling failed" in loop.explain()
    assert asked == [(usual, True), (False, True)]


def make_loop(model: nn.Module | None = None, **options: Any) -> StepLoop:
    model = model if model is not None else make_model()
    return StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.05), **options)


def test_without_a_compiler_steps_are_eager() -> None:
    loop = make_loop(mode="compile")
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        loop.run(make_batches(2))
    assert "mode: eager (asked for 'compile'" in loop.explain()
    assert "no working C++ compiler" in loop.explain()


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs that Inductor was given; they run as they are. What is put in first are faults: "" is none."""
    faults: list[str] = []
    compile_fx, given = imported("torch._inductor.compile_fx"), []

    def compile_inner(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        given.append(graph)
        if len(given) <= len(faults) and faults[len(given) - 1]:
            raise RuntimeError(faults[len(given) - 1])
        return imported("torch._functorch.aot_autograd").make_boxed_func(graph.forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_inner)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return faults


@pytest.mark.parametrize(
    ("at", "sizes"),
    [(0, (8,)), (1, (8,)), (3, (8, 4)), (2, (8, 8))],
    ids=["the forward pass", "the backward pass", "the backward pass of a second shape", "after BatchNorm was frozen"],
)
@pytest.mark.sampled(2)
def test_a_failing_compilation_falls_back_and_nothing_is_lost(
    compiled_graphs: list[str], at: int, sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """BatchNorm's statistics and dropout's draws are those of an eager run."""
    compiled_graphs[:] = [*at * [""], "no such kernel"]
    loop, eager = make_loop(mode="compile"), make_loop(mode="eager")
    can_undo = at % 2 == 0 or hasattr(imported("torch._functorch.config"), compiler._AHEAD)
    for run, size in enumerate(sizes):
        if run and size == 8:
            loop.model[1].eval()
            eager.model[1].eval()
        batches, is_compiled = make_batches(4, size=size), at > 2 * run + 1
        torch.manual_seed(5)
        expected = eager.run(batches).losses
        torch.manual_seed(5)
        with uncached():
            if not can_undo and not is_compiled:
                with pytest.raises(RuntimeError, match="no such kernel") as failed:
                    loop.run(batches)
                assert "torch 2.11 or later can" in "".join(failed.value.__notes__)
                return
            history = loop.run(batches)
        assert (history.compiled_steps, history.eager_steps) == ((4, 0) if is_compiled else (0, 4))
        torch.testing.assert_close(history.losses, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(loop.model[1].running_mean, eager.model[1].running_mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(loop.model[1].num_batches_tracked, eager.model[1].num_batches_tracked)
    assert "compiling failed, so steps run in eager code: RuntimeError: no such kernel" in caplog.text


def test_a_later_run_with_batches_of_another_shape_is_compiled(compiled_graphs: list[str]) -> None:
    """And the run after it, which is as the first one, finds its code again."""
    loop = make_loop(mode="compile")
    with uncached():
        counts = [loop.run(make_batches(4, size=size)) for size in (4, 8, 4)]
    assert [history.compiled_steps for history in counts] == [4, 3, 3]
    assert [history.eager_steps for history in counts] == [0, 1, 1], "what comes first is as before"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert "steps of the latest run: 0 captured, 3 compiled, 1 eager" in loop.explain()


def test_graph_without_cuda_means_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler_problem", lambda: "none is wanted here")
    loop = make_loop(mode="graph")
    loop.run(make_batches(1))
    assert "'graph' needs CUDA and the model is on cpu: it means 'compile' here" in loop.explain()
    assert "mode: eager" in loop.explain()


def test_a_compiled_model_is_not_compiled_again() -> None:
    model = make_model()
    loop = make_loop(torch.compile(model, backend="eager"), mode="compile", ema=0.5)
    loop.run(make_batches(2))
    assert "compiled already" in loop.explain()
    assert type(loop.ema_model()) is type(model)


def test_level_o0_does_not_compile() -> None:
    loop = make_loop(mode="compile", jit_config=JitConfig(jit_level="O0"))
    loop.run(make_batches(1))
    assert "mode: eager" in loop.explain()


@pytest.mark.slow
@pytest.mark.parametrize("amp_level", ["O0", "O2"])
def test_build_compiles_training_and_evaluation_ahead(amp_level: str) -> None:
    torch._dynamo.utils.counters.clear()
    graphs = torch._dynamo.utils.counters["stats"]
    network, train, valid = make_model(), make_batches(3), make_batches(3, seed=40)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    model = Model(network, functional.cross_entropy, optimizer, {"accuracy"}, mode="compile", amp_level=amp_level)
    model.build(train, valid)
    assert graphs["unique_graphs"] == 2
    history = model.fit(2, train, valid)
    assert graphs["unique_graphs"] == 2, "nothing is compiled in the run"
    assert "mode: compile" in model.loop.explain()
    plain = Model(network, functional.cross_entropy, optimizer, {"accuracy"}, amp_level=amp_level).eval(valid)
    assert history.evaluations[-1][1] == pytest.approx(monitored(plain), rel=1e-6 if amp_level == "O0" else 1e-3)
    outputs = model.predict(valid[0][0])
    torch.testing.assert_close(outputs, network.eval()(valid[0][0]).detach(), rtol=0.05, atol=0.05)


def test_a_random_operator_of_unknown_shape_counts_as_drawing() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.bernoulli.default, (graph.placeholder("inputs"),))
    assert compiler._draws_in_memory_order(node)
