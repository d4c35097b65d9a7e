"""Models at the levels of mixed precision: what computes in which dtype, eager, compiled and checkpointed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchvision.models import ConvNeXt, VisionTransformer
from torchvision.models.convnext import CNBlock, CNBlockConfig
from torchvision.models.vision_transformer import EncoderBlock

from loop.reference import make_batches, make_model, plain_loop
from torch_sink import amp
from torch_sink.loop import JitConfig, StepLoop
from torch_sink.loop.engines import jit as compiler

pytestmark = pytest.mark.halved

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


def read(level: str, dtype: torch.dtype, function: Callable[[Tensor, Tensor], Any]) -> tuple[Reader, Any, nn.Module]:
    model = amp.auto_mixed_precision(Calling(function), level, dtype)
    torch.manual_seed(1)
    with Reader() as reader:
        outputs = model(torch.randn(2, 4))
    return reader, outputs, model


@pytest.mark.parametrize("dtype", LOW)
def test_o1_is_autocast(dtype: torch.dtype) -> None:
    """Bit for bit the recipe of PyTorch, with outputs in float32."""
    results = []
    for ours in (True, False):
        model, batches = make_model(), make_batches(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(5)
        if ours:
            loop = StepLoop(model, functional.cross_entropy, optimizer, amp="O1", amp_dtype=dtype, loss_scaler=None)
            losses = loop.run(batches).losses
        else:

            def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
                return functional.cross_entropy(outputs.float(), targets)

            losses, _ = plain_loop(
                model, loss_fn, optimizer, batches, context=lambda: torch.autocast("cpu", dtype=dtype)
            )
        results.append([losses, *model.state_dict().values()])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


NORMALIZATION: dict[str, tuple[str, nn.Module]] = {
    "LayerNorm": ("native_layer_norm", nn.LayerNorm(4)),
    "GroupNorm": ("native_group_norm", nn.GroupNorm(2, 4)),
    "BatchNorm1d": ("native_batch_norm", nn.BatchNorm1d(4)),
    "RMSNorm": ("_fused_rms_norm", nn.RMSNorm(4)),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("name", NORMALIZATION)
def test_normalization_computes_in_float32_and_hands_low_precision_on(
    name: str, level: str, dtype: torch.dtype
) -> None:
    operator, layer = NORMALIZATION[name]
    given: list[torch.dtype] = []

    class Normalizing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), layer

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.norm(self.first(inputs))
            given.append(outputs.dtype)
            return outputs

    model = amp.auto_mixed_precision(Normalizing(), level, dtype)
    with Reader() as reader:
        outputs = model(torch.randn(2, 4))
    assert given == [dtype]
    assert outputs.dtype == torch.float32
    if level == "O2" or name == "RMSNorm":
        assert reader.seen.get(operator, {torch.float32}) == {torch.float32}
    else:
        assert dtype in reader.seen.get(operator, {dtype})
    assert dtype in reader.seen["addmm"], "the layer before runs in low precision"
    outputs.sum().backward()
    assert model.first.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
def test_attention_modules(training: bool) -> None:
    """The fused kernel takes low precision, as under autocast, and computes its softmax in float32 inside."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(8, 8), layer)
    amp.auto_mixed_precision(model.train(training), "O2", torch.bfloat16)
    with Reader() as reader, torch.no_grad():
        outputs = model(torch.randn(2, 3, 8))
    assert outputs.dtype == torch.float32
    attentions = [name for name in reader.seen if "softmax" in name or "attention" in name or "transformer" in name]
    assert attentions == ["_scaled_dot_product_flash_attention_for_cpu"]
    assert reader.seen[attentions[0]] == {torch.bfloat16}
    assert reader.seen["native_layer_norm"] == {torch.float32}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_models_of_torchvision(level: str, dtype: torch.dtype, checkpointed: bool) -> None:
    """Parameters used by hand (class token, positions, layer scale), normalization of channels, depth dropped."""
    torch.manual_seed(0)
    block = CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)
    models: list[nn.Module] = [VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=5), ConvNeXt(list(block), 0.5, 1.0)]
    for model in models:
        plain, inputs = copy.deepcopy(model).eval(), torch.randn(2, 3, 16, 16)
        amp.auto_mixed_precision(model.eval(), level, dtype)
        seen: list[torch.dtype] = []
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output.dtype))
            elif isinstance(module, (EncoderBlock, CNBlock)):
                module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(args[0].dtype))
        outputs = checkpoint(model, inputs, use_reentrant=False) if checkpointed else model(inputs)
        assert outputs.dtype == torch.float32
        torch.testing.assert_close(outputs, plain(inputs), rtol=0.05, atol=0.05)
        assert set(seen) == {dtype}
        outputs.square().sum().backward()
        plain(inputs).square().sum().backward()
        for ours, exact in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert ours.grad.dtype == torch.float32
            assert (ours.grad - exact.grad).norm() <= 0.1 * exact.grad.norm() + 1e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_model_computes_last_is_not_rounded(compiled: bool) -> None:
    """As the logits of CLIP, which a parameter of the model itself scales."""
    torch._dynamo.reset()
    seen: list[Tensor] = []
    model = Calling(lambda features, scale: features * scale)
    loop = StepLoop(
        torch.compile(model, backend="eager") if compiled else model,
        lambda outputs, _: (seen.append(outputs.detach()), outputs.mean())[1],
        torch.optim.SGD(model.parameters(), lr=0.0),
        amp="O2",
    )
    inputs = torch.randn(2, 4)
    loop.run([(inputs, inputs)])
    with torch.autocast("cpu", torch.bfloat16):
        features = functional.linear(inputs, model.first.weight, model.first.bias)
    assert features.dtype == torch.bfloat16
    assert torch.equal(seen[0], (features * model.scale).detach())


def test_float64_stays() -> None:
    model = amp.auto_mixed_precision(nn.Sequential(nn.LayerNorm(4).double()), "O2", torch.bfloat16)
    assert model(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64


MIXTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "matmul with a buffer": lambda x, w: x @ torch.eye(4),
    "buffer first": lambda x, w: torch.eye(4)[:2] @ x.T,
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x, torch.eye(4)),
    "einsum of a list": lambda x, w: torch.einsum("bi,ij->bj", [x, torch.eye(4)]),
    "linear": lambda x, w: functional.linear(x, torch.eye(4), bias=torch.ones(4)),
    "convolution": lambda x, w: functional.conv1d(x[:, None], weight=torch.ones(1, 1, 2)),
    "attention": lambda x, w: functional.scaled_dot_product_attention(x[None], torch.ones(1, 2, 4), value=x[None]),
    "attention by hand": attention,
    "softmax": lambda x, w: (x * w).softmax(-1) @ torch.eye(4),
    "cross entropy": lambda x, w: functional.cross_entropy(x, LABELS),
    "sampled": lambda x, w: functional.grid_sample(x[None, None], torch.zeros(1, 1, 1, 2), align_corners=False),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", MIXTURES)
def test_functions_meet_both_dtypes(name: str, level: str, dtype: torch.dtype) -> None:
    """A float32 buffer or parameter among tensors of low precision."""
    _, outputs, model = read(level, dtype, MIXTURES[name])
    expected = read("O0", dtype, MIXTURES[name])[1]
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, expected, rtol=0.1, atol=0.1)
    outputs.sum().backward()
    assert model.first.weight.grad is not None


def test_a_loss_function_computes_in_float32_at_o2() -> None:
    """Its products too, such as those of a contrastive loss, in training and in evaluation."""
    seen: list[torch.dtype] = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        product = outputs @ outputs.T
        seen.append(product.dtype)
        return product.mean()

    model = make_model()
    loop = StepLoop(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), amp="O2")
    loop.run(make_batches(1))
    loop.evaluate(make_batches(1))
    assert seen == [torch.float32] * 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "level", [pytest.param("O1", marks=pytest.mark.slow), "O2", pytest.param("O3", marks=pytest.mark.slow)]
)
def test_compiled_code_computes_in_the_same_dtypes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, without a break in the graph: what Dynamo has traced runs as it is."""
    graphs: list[Any] = []
    monkeypatch.setattr(
        compiler,
        "inductor_backend",
        lambda graph, inputs, *, options: graphs.append(graph) or graph.forward,
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
@pytest.mark.sampled(2)
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
