"""Which dtypes reach the operators of softmax, losses and normalization, however a model calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torch_sink.loop import JitConfig, StepLoop, amp
from torch_sink.loop.engines import jit as compiler

LOW = (torch.bfloat16, torch.float16)
LABELS = torch.tensor([0, 2])


class Reader(TorchDispatchMode):
    """Writes down the dtypes of the floating point tensors that each operator gets, below autograd and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
        self.seen.setdefault(func._schema.name.removeprefix("aten::"), set()).update(value.dtype for value in tensors)
        return func(*args, **(kwargs or {}))


class Calling(nn.Module):
    """Calls a function on what a layer gives, with a parameter of its own at hand."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 1 + 2**-10))
        self.function = function

    def forward(self, inputs: Tensor) -> Any:
        return self.function(self.first(inputs), self.scale)


def attention(features: Tensor, scale: Tensor) -> Tensor:
    """As it is written by hand."""
    return (features @ features.transpose(-2, -1) * scale[0]).softmax(-1) @ features


SOFTMAX: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "functional": lambda x, w: functional.softmax(x, -1),
    "torch": lambda x, w: torch.softmax(x, dim=-1),
    "method": lambda x, w: x.softmax(-1),
    "special": lambda x, w: torch.special.softmax(x, -1),
    "softmin": lambda x, w: functional.softmin(x, dim=-1),
    "gumbel": lambda x, w: functional.gumbel_softmax(x, dim=-1),
    "module": lambda x, w: nn.Softmax(-1)(x),
    "by hand": attention,
    "in a checkpoint": lambda x, w: checkpoint(lambda y: y.softmax(-1), x, use_reentrant=False),
    "several heads": lambda x, w: functional.multi_head_attention_forward(
        *[x[:, None]] * 3, 4, 2, None, None, None, None, False, 0.0, torch.eye(4), None,
        use_separate_proj_weight=True, q_proj_weight=torch.eye(4), k_proj_weight=torch.eye(4),
        v_proj_weight=torch.eye(4),
    )[1],
}  # fmt: skip
LOG_SOFTMAX: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "functional": lambda x, w: functional.log_softmax(x, -1),
    "torch": lambda x, w: torch.log_softmax(x, -1),
    "method": lambda x, w: x.log_softmax(dim=-1),
    "module": lambda x, w: nn.LogSoftmax(-1)(x),
    "asked for float32": lambda x, w: functional.log_softmax(x, -1, dtype=torch.float32),
    "cross entropy": lambda x, w: functional.cross_entropy(x, LABELS),
    "cross entropy as a module": lambda x, w: nn.CrossEntropyLoss(weight=torch.ones(4))(x, LABELS),
}
LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "nll_loss": ("nll_loss_forward", lambda x, w: functional.nll_loss(x, LABELS)),
    "mse_loss": ("mse_loss", lambda x, w: functional.mse_loss(x, torch.zeros(2, 4))),
    "mse_loss of low precision": ("mse_loss", lambda x, w: nn.MSELoss()(x, x.detach() + 1)),
    "smooth_l1_loss": ("smooth_l1_loss", lambda x, w: functional.smooth_l1_loss(x, x.detach())),
    "kl_div": ("xlogy", lambda x, w: functional.kl_div(x, x.detach().exp(), reduction="batchmean")),
    "binary_cross_entropy": ("binary_cross_entropy", lambda x, w: functional.binary_cross_entropy(x.sigmoid(), w.expand_as(x) / 2)),
}  # fmt: skip
NORMALIZATION: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "layer_norm": ("native_layer_norm", lambda x, w: functional.layer_norm(x, (4,), w)),
    "torch.layer_norm": ("native_layer_norm", lambda x, w: torch.layer_norm(x, (4,), w)),
    "layer_norm as a module": ("native_layer_norm", lambda x, w: nn.LayerNorm(4)(x)),
    "group_norm": ("native_group_norm", lambda x, w: functional.group_norm(x, 2, w)),
    "batch_norm": ("native_batch_norm", lambda x, w: functional.batch_norm(x, torch.zeros(4), torch.ones(4), w, training=True)),
    "instance_norm": ("native_batch_norm", lambda x, w: functional.instance_norm(x[None])),
    "normalize": ("linalg_vector_norm", lambda x, w: functional.normalize(x)),
}  # fmt: skip
CASES = (
    [(f"softmax {name}", "_softmax", function) for name, function in SOFTMAX.items()]
    + [(f"log_softmax {name}", "_log_softmax", function) for name, function in LOG_SOFTMAX.items()]
    + [(name, *case) for name, case in (LOSSES | NORMALIZATION).items()]
)


def read(level: str, dtype: torch.dtype, function: Callable[[Tensor, Tensor], Any]) -> tuple[Reader, Any, nn.Module]:
    model = amp.auto_mixed_precision(Calling(function), level, dtype)
    torch.manual_seed(1)
    with Reader() as reader:
        outputs = model(torch.randn(2, 4))
    return reader, outputs, model


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("operator", "function"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_what_reaches_the_operator(
    operator: str, function: Callable[[Tensor, Tensor], Any], level: str, dtype: torch.dtype
) -> None:
    reader, outputs, model = read(level, dtype, function)
    assert reader.seen[operator] == {torch.float32}
    assert dtype in reader.seen["addmm"], "the layer before runs in low precision"
    assert outputs.dtype == torch.float32
    outputs.sum().backward()
    assert model.first.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_softmax_and_losses_are_not_rounded(level: str) -> None:
    for function, exact in (
        (SOFTMAX["functional"], lambda x: x.softmax(-1)),
        (LOG_SOFTMAX["functional"], lambda x: x.log_softmax(-1)),
        (LOG_SOFTMAX["cross entropy"], lambda x: functional.cross_entropy(x, LABELS)),
    ):
        outputs = read(level, torch.bfloat16, function)[1]
        features = read(level, torch.bfloat16, lambda x, w: x)[1]
        assert torch.equal(outputs, exact(features))


def test_functions_in_float32_get_the_parameter_and_not_its_copy() -> None:
    _, outputs, model = read("O2", torch.bfloat16, lambda x, w: functional.layer_norm(x, (4,), w).float())
    features = read("O2", torch.bfloat16, lambda x, w: x)[1]
    assert torch.equal(outputs, functional.layer_norm(features, (4,), model.scale).bfloat16().float())
    outputs.sum().backward()
    assert model.scale.grad is not None


def test_normalization_hands_low_precision_on() -> None:
    for level in ("O1", "O2"):
        for _, function in NORMALIZATION.values():
            seen = []
            read(level, torch.bfloat16, lambda x, w, function=function, seen=seen: seen.append(function(x, w)) or x)
            assert seen[0].dtype == torch.bfloat16


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_attention_modules(training: bool, weights: bool) -> None:
    """The fused kernel takes low precision, as under autocast, and computes its softmax in float32 inside."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(8, 8), layer if not weights else WithWeights())
    amp.auto_mixed_precision(model.train(training), "O2", torch.bfloat16)
    with Reader() as reader, torch.no_grad():
        outputs = model(torch.randn(2, 3, 8))
    assert outputs.dtype == torch.float32
    softmax = [name for name in reader.seen if "softmax" in name or "attention" in name or "transformer" in name]
    if weights:
        assert softmax == ["_softmax"]
        assert reader.seen["_softmax"] == {torch.float32}
    else:
        assert softmax == ["_scaled_dot_product_flash_attention_for_cpu"]
        assert reader.seen["native_layer_norm"] == {torch.float32}


class WithWeights(nn.Module):
    """Attention that gives its weights too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, weights = self.attention(inputs, inputs, inputs, need_weights=True, average_attn_weights=False)
        assert weights.dtype == torch.float32
        return outputs + weights.sum()


def test_the_fallback_of_fused_attention() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        reader = read(
            "O2", torch.bfloat16, lambda x, w: functional.scaled_dot_product_attention(*[x[None]] * 3, dropout_p=0.5)
        )[0]
    assert [reader.seen[name] for name in reader.seen if "softmax" in name] == [{torch.float32}]


MIXTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "matmul with a buffer": lambda x, w: x @ torch.eye(4),
    "buffer first": lambda x, w: torch.eye(4)[:2] @ x.T,
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x, torch.eye(4)),
    "einsum of a list": lambda x, w: torch.einsum("bi,ij->bj", [x, torch.eye(4)]),
    "linear": lambda x, w: functional.linear(x, torch.eye(4), bias=torch.ones(4)),
    "convolution": lambda x, w: functional.conv1d(x[:, None], weight=torch.ones(1, 1, 2)),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None], torch.ones(1, 2, 4), value=x[None]),
    "written by index": lambda x, w: torch.zeros(3, 4, dtype=x.dtype).index_add(0, LABELS, x.softmax(-1)),
    "written by a mask": lambda x, w: x.clone().index_put_((LABELS[:1],), torch.ones(1, 4)),
    "assigned": lambda x, w: written(x),
    "scatter": lambda x, w: x.scatter(1, LABELS[:, None], x.softmax(-1)[:, :1]),
    "sampled": lambda x, w: functional.grid_sample(x[None, None], torch.zeros(1, 1, 1, 2), align_corners=False),
    "singular values": lambda x, w: torch.linalg.svdvals(x),
    "inverse": lambda x, w: torch.linalg.inv(x @ x.T + torch.eye(2, dtype=x.dtype)),
    "Fourier": lambda x, w: torch.fft.rfft(x).abs(),
    "distances": lambda x, w: torch.cdist(x, w[None]),
    "quantile": lambda x, w: x.quantile(0.5),
}  # fmt: skip


def written(features: Tensor) -> Tensor:
    features = features.clone()
    features[LABELS[:1]] = torch.ones(1, 4)
    return features


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", MIXTURES)
def test_what_runs_in_float32_runs_in_low_precision(name: str, level: str, dtype: torch.dtype) -> None:
    """With float32 buffers among its tensors, and in functions that have no kernels for low precision."""
    _, outputs, model = read(level, dtype, MIXTURES[name])
    expected = read("O0", dtype, MIXTURES[name])[1]
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, expected, rtol=0.1, atol=0.1)
    outputs.sum().backward()
    assert model.first.weight.grad is not None


def test_levels_without_exceptions() -> None:
    low = {torch.bfloat16}
    for function, operator in ((SOFTMAX["method"], "_softmax"), (NORMALIZATION["layer_norm"][1], "native_layer_norm")):
        assert read("O3", torch.bfloat16, function)[0].seen[operator] == low
    for keep, expected in ((True, torch.float32), (False, torch.bfloat16)):
        model = amp.auto_mixed_precision(
            Calling(NORMALIZATION["layer_norm"][1]), "O3" if keep else "O2", torch.bfloat16, keep_batchnorm_fp32=keep
        )
        with Reader() as reader:
            model(torch.randn(2, 4))
        assert expected in reader.seen["native_layer_norm"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "level", [pytest.param("O1", marks=pytest.mark.slow), "O2", pytest.param("O3", marks=pytest.mark.slow)]
)
def test_compiled_code_computes_in_the_same_dtypes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, without a break in the graph: what Dynamo has traced runs as it is."""
    graphs: list[Any] = []
    monkeypatch.setattr(
        compiler,
        "eager_random_backend",
        lambda: lambda graph, inputs, *, options: graphs.append(graph) or graph.forward,
    )

    def block(features: Tensor, scale: Tensor) -> Tensor:
        return functional.layer_norm(attention(features, scale), (4,), scale)

    def function(features: Tensor, scale: Tensor) -> Tensor:
        return checkpoint(block, features, scale, use_reentrant=False).log_softmax(-1) + attention(features, scale)

    losses = []
    for mode in ("eager", "compile"):
        model = nn.Sequential(Calling(function), nn.BatchNorm1d(4), WithHeads())
        torch.manual_seed(2)
        batches = [(torch.randn(2, 4), LABELS) for _ in range(3)]
        loop = StepLoop(
            model,
            functional.nll_loss,
            torch.optim.SGD(model.parameters(), lr=0.1),
            amp=level,
            mode=mode,
            jit_config=JitConfig(fullgraph=True),
        )
        losses.append(loop.run(batches).losses)
    assert len(graphs) == 1
    assert torch.equal(*losses)


class WithHeads(nn.Module):
    """Attention over a batch as one sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.attention(inputs, inputs, inputs)[0].log_softmax(-1)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_the_user_compiled_meets_the_level_from_outside(level: str, whole: bool) -> None:
    """The graphs of the first steps serve all, although the parameters' copies are others at each."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(features: Tensor, scale: Tensor) -> Tensor:
        return functional.layer_norm(features.softmax(-1) @ features.T.detach() @ features, (4,), scale)

    losses = []
    for compiled in (True, False):
        model: nn.Module = Calling(function)
        model = nn.Sequential(torch.compile(model, backend=backend) if compiled else model) if not whole else model
        model = torch.compile(model, backend=backend) if compiled and whole else model
        torch.manual_seed(2)
        batches = [(torch.randn(2, 4), LABELS) for _ in range(12)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = StepLoop(model, functional.cross_entropy, optimizer, amp=level)
        loop.run(batches[:2])
        first = len(graphs)
        losses.append(loop.run(batches).losses)
        assert len(graphs) == first
    assert graphs
    assert torch.equal(*losses)
