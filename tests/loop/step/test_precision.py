"""AMP levels against models that are cast by hand, with float32 master weights."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import re
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from loop.reference import make_batches, make_model
from torch_sink import amp
from torch_sink.loop import StepLoop

pytestmark = pytest.mark.halved

LOW = (torch.bfloat16, torch.float16)


class Recorder(nn.Module):
    """A model of many layer kinds that writes down the dtype that each layer sees and gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.group, self.layer = nn.GroupNorm(2, 4), nn.LayerNorm(4)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.head = nn.Linear(4, 5)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.embedding = nn.Embedding(5, 4)
        self.register_buffer("offset", torch.full((4,), 0.125))
        self.seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}

    def watch(self) -> Recorder:
        """Begin to write down, after every hook that is registered by now."""
        for name, module in self.named_children():
            module.register_forward_hook(self._note(name))
        return self

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self.seen[name] = (args[0].dtype, first.dtype)

        return hook

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.instance(self.group(functional.relu(self.norm(self.conv(inputs))))).flatten(2).transpose(1, 2)
        features = self.layer(features) + self.offset + self.embedding(torch.zeros(1, dtype=torch.int64))
        features = self.attention(features, features, features)[0]
        return self.head(features[:, -1])


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_runs_in_low_precision(level: str, dtype: torch.dtype) -> None:
    model = Recorder()
    seen_losses: list[torch.dtype] = []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        seen_losses.append(outputs.dtype)
        return functional.cross_entropy(outputs, targets)

    masters = list(model.parameters())
    loop = StepLoop(model, loss_fn, torch.optim.SGD(masters, lr=0.1), amp=level, amp_dtype=dtype, loss_scaler=None)
    model.watch()
    history = loop.run(make_batches(2))
    assert history.losses.isfinite().all()
    assert seen_losses == [torch.float32] * 2
    assert model.seen["conv"] == (torch.float32, dtype), "autocast has cast what it got"
    assert model.seen["embedding"] == (torch.int64, dtype)
    assert model.seen["head"] == (dtype, dtype)
    for name in ("norm", "group", "layer", "instance"):
        assert model.seen[name] == (torch.float32 if level == "O2" else dtype, dtype), name
    assert all(a is b and a.dtype == torch.float32 for a, b in zip(masters, model.parameters(), strict=True))
    assert all(parameter.grad.dtype == torch.float32 for parameter in masters)
    assert model(make_batches(1)[0][0]).dtype == torch.float32
    assert model.seen["layer"] == (torch.float32,) * 2, "outside the loop the model is what it was"
    loop.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_o2_equals_a_model_cast_by_hand() -> None:
    """Masters in float32; at each step a copy is cast, run, and its gradients are brought back."""
    batches = make_batches(6)
    model = make_model(dropout=0.0)
    by_hand = copy.deepcopy(model)
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), amp="O2")
    losses = loop.run(batches).losses

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    expected = []
    for inputs, targets in batches:
        low = copy.deepcopy(by_hand)
        for module in low.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                module.to(torch.bfloat16)
        conv, norm, *rest = low
        features = norm(conv(inputs.bfloat16()).float()).bfloat16()
        loss = functional.cross_entropy(nn.Sequential(*rest)(features).float(), targets)
        loss.backward()
        for master, copied in zip(by_hand.parameters(), low.parameters(), strict=True):
            master.grad = copied.grad.float()
        by_hand[1].load_state_dict(norm.state_dict())
        optimizer.step()
        expected.append(loss.item())
    assert losses.tolist() == expected
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def hooks_on(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("end", ["refused", "dropped", "closed"])
def test_no_loop_leaves_its_hooks(end: str) -> None:
    """Neither on the model nor on the average: under autocast of the user's own they would cast."""
    model = Recorder()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if end == "refused":
        with pytest.raises(TypeError, match="optimizer is a str"):
            StepLoop(model, functional.cross_entropy, "sgd", amp="O2")
    else:
        loop = StepLoop(model, functional.cross_entropy, optimizer, amp="O2", ema=0.9)
        loop.run(make_batches(2))
        loop.evaluate(make_batches(1), ema=True)
        average = loop.ema_model()
        assert hooks_on(model) > 0
        assert hooks_on(average) > 0
        if end == "closed":
            loop.close()
        else:
            del loop
            gc.collect()
        assert hooks_on(average) == 0
    assert hooks_on(model) == 0


def test_auto_is_float32_on_the_cpu() -> None:
    model = make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters()), amp="auto")
    assert loop.state.precision.level == "O0"


@pytest.mark.parametrize("level", ["O1", "auto", "O2", "O3"])
def test_auto_mixed_precision_changes_calls_of_the_model(level: str) -> None:
    model = Recorder()
    names = list(model.state_dict())
    assert amp.auto_mixed_precision(model, level, torch.bfloat16) is model
    assert list(model.state_dict()) == names
    outputs = model.watch()(make_batches(1)[0][0])
    assert outputs.dtype == torch.float32
    assert model.seen["conv"][-1] == torch.bfloat16
    outputs.sum().backward()
    assert model.conv.weight.grad.dtype == torch.float32
    with pytest.raises(ValueError, match="already"):
        amp.auto_mixed_precision(model, level)
    with pytest.raises(ValueError, match="auto_mixed_precision already"):
        StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters()), amp="O1")


ROOTS: dict[str, tuple[Any, Any]] = {
    "Linear": (lambda: nn.Linear(4, 4), lambda: torch.randn(2, 4)),
    "Conv2d": (lambda: nn.Conv2d(3, 4, 3), lambda: torch.randn(2, 3, 8, 8)),
    "Bilinear": (lambda: nn.Bilinear(4, 4, 2), lambda: (torch.randn(2, 4), torch.randn(2, 4))),
    "LayerNorm": (lambda: nn.LayerNorm(4), lambda: torch.randn(2, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), lambda: torch.randn(2, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), lambda: torch.randn(2, 4)),
    "LSTM": (lambda: nn.LSTM(4, 4), lambda: torch.randn(3, 2, 4)),
    "Embedding": (lambda: nn.Embedding(5, 4), lambda: torch.tensor([0, 4])),
    "PReLU": (nn.PReLU, lambda: torch.randn(2, 4)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), lambda: (torch.randn(3, 2, 4),) * 3),
    "own parameter": (lambda: Scaled(), lambda: torch.randn(2, 4)),
}


class Scaled(nn.Module):
    """A root with a parameter, a buffer and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.register_buffer("rotation", torch.eye(4))

    def forward(self, inputs: Tensor, shift: float = 0.0) -> Tensor:
        return self.linear(inputs @ self.rotation * self.scale) + shift


CONVERSIONS: dict[str, Any] = {
    **{level: lambda m, d, level=level: amp.auto_mixed_precision(m, level, d) for level in ("O1", "auto", "O2", "O3")},
    "O2 all low": lambda m, d: amp.auto_mixed_precision(m, "O2", d, keep_batchnorm_fp32=False),
    "white list": lambda m, d: amp.custom_mixed_precision(m, white_list=amp.get_white_list(), dtype=d),
    "black list": lambda m, d: amp.custom_mixed_precision(m, black_list=amp.get_black_list(), dtype=d),
}


# Torch's autocast has no float16 LSTM on most CPUs.
ROOT_CASES = [
    (name, conversion, dtype)
    for name in ROOTS
    for conversion in CONVERSIONS
    for dtype in LOW
    if (name, dtype) != ("LSTM", torch.float16) or conversion == "white list"
]


@pytest.mark.parametrize(("name", "conversion", "dtype"), ROOT_CASES)
@pytest.mark.sampled(60)
def test_the_root_may_own_parameters(name: str, conversion: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, make_inputs = ROOTS[name]
    inputs = make_inputs()
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    plain = make()
    model = CONVERSIONS[conversion](copy.deepcopy(plain), dtype)
    try:
        expected, outputs = plain(*inputs), model(*inputs)
    except RuntimeError as error:  # of a processor that has no LSTM in this type: torch's own autocast raises it too
        with pytest.raises(RuntimeError, match=re.escape(str(error))), torch.autocast("cpu", dtype=dtype):
            plain(*inputs)
        return
    expected, outputs = [value[0] if isinstance(value, tuple) else value for value in (expected, outputs)]
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, expected, rtol=0.05, atol=0.05)
    outputs.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_converted_model_is_copied_pickled_and_freed(conversion: str) -> None:
    model = CONVERSIONS[conversion](Scaled(), torch.bfloat16)
    inputs = torch.randn(2, 4)
    expected = model(inputs)
    assert str(inspect.signature(model.forward)) == str(inspect.signature(Scaled().forward))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.mul_(1)
        assert torch.equal(again(inputs), expected)
        again(inputs).sum().backward()
        assert again.scale.grad is not None
        assert model.scale.grad is None, "it is a model of its own"
    part = copy.deepcopy(model.linear)
    assert part(inputs).dtype == torch.float32
    reference, forward = weakref.ref(model), model.forward
    model(inputs).sum().backward()
    gc.disable()
    try:
        del model, expected
        assert reference() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="keep the model"):
        forward(inputs)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loop_and_its_model_are_freed_without_garbage_collection(level: str) -> None:
    model = make_model()
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), amp=level)
    loop.run(make_batches(2))
    reference = weakref.ref(model)
    gc.disable()
    try:
        del model, loop
        assert reference() is None
    finally:
        gc.enable()


def test_parts_that_are_replaced_after_the_conversion() -> None:
    model = amp.auto_mixed_precision(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "O2", torch.bfloat16)
    model[1] = nn.Linear(4, 2)
    model[0].weight = nn.Parameter(torch.eye(4))
    model(torch.randn(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is not None
    assert model[0].weight.dtype == torch.float32


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    model = amp.auto_mixed_precision(Scaled(), "O2", torch.bfloat16)
    parameters = list(model.parameters())
    for wrong, error in ((torch.randn(2, 5), RuntimeError), (Interrupting(), KeyboardInterrupt)):
        with pytest.raises(error):
            model(wrong)
        assert all(ours is theirs for ours, theirs in zip(parameters, model.parameters(), strict=True))
    assert model(torch.randn(2, 4)).dtype == torch.float32


class Interrupting:
    """Something at whose use Ctrl-C is pressed."""

    def __matmul__(self, other: Any) -> Any:
        raise KeyboardInterrupt


@dataclasses.dataclass
class Outputs:
    logits: Tensor
    hidden: dict[str, Tensor]


class Levels(list[Tensor]):
    """Features of several sizes."""


class Pair(namedtuple("Pair", ["left", "right"])):
    """A named tuple with more to it."""


def test_outputs_in_containers_are_float32() -> None:
    class Giving(nn.Linear):
        def forward(self, inputs: Tensor) -> Any:
            value = super().forward(inputs)
            others = Levels([value]), Pair(value, inputs.shape)
            return Outputs(value, OrderedDict(a=value)), defaultdict(list, b=[value]), (value, "text", None), *others

    model = amp.auto_mixed_precision(Giving(4, 4), "O2", torch.bfloat16)
    first, second, third, levels, pair = model(torch.randn(2, 4))
    assert (type(levels), type(pair)) == (Levels, Pair)
    assert (levels[0].dtype, pair.left.dtype) == (torch.float32,) * 2
    assert pair.right.numel() == 8
    assert type(first) is Outputs
    assert type(first.hidden) is OrderedDict
    assert isinstance(second, defaultdict)
    values = [first.logits, first.hidden["a"], second["b"][0], third[0]]
    assert [value.dtype for value in values] == [torch.float32] * 4
    assert third[1:] == ("text", None)
    assert second["missing"] == []


def test_keep_batchnorm_fp32_overrides_the_level() -> None:
    for level, keep in (("O2", False), ("O3", True)):
        model = amp.auto_mixed_precision(Recorder(), level, torch.bfloat16, keep_batchnorm_fp32=keep)
        model.watch()(make_batches(1)[0][0])
        assert model.seen["layer"] == (torch.float32 if keep else torch.bfloat16, torch.bfloat16)


class Product(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ inputs


@pytest.mark.parametrize("lists", [{"white_list": [Product]}, {"black_list": [Product]}])
def test_layers_without_parameters_compute_where_their_inputs_lie(
    lists: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of either list, on a device of which nothing but the inputs tells."""
    model = amp.custom_mixed_precision(nn.Sequential(Product()), **lists)
    seen: list[str] = []
    monkeypatch.setattr(torch, "autocast", lambda kind, **_: seen.append(kind) or nullcontext())
    with FakeTensorMode():
        model(torch.empty(3, 3, device="cuda"))
    assert seen
    assert set(seen) == {"cuda"}


def test_lists() -> None:
    assert nn.Linear in amp.get_white_list()
    assert nn.BatchNorm2d in amp.get_black_list()
    amp.get_white_list().clear()
    assert amp.get_white_list()
    white = amp.custom_mixed_precision(Recorder(), white_list=[nn.Conv2d], dtype=torch.bfloat16)
    inputs = make_batches(1)[0][0]
    features = white.watch().conv(inputs)
    assert torch.equal(features, features.bfloat16().float()), "computed in low precision"
    white(inputs)
    assert set(white.seen.values()) == {(torch.float32,) * 2, (torch.int64, torch.float32)}
    black = amp.custom_mixed_precision(Recorder(), black_list=[nn.LayerNorm, nn.Linear], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        features = black.head(torch.randn(3, 4).bfloat16())
    assert features.dtype == torch.bfloat16, "what it hands on"
    with torch.no_grad():
        black.head.weight.fill_(1 + 2**-10)
        exact = functional.linear(torch.ones(1, 4), black.head.weight, black.head.bias)
    assert torch.equal(black.head(torch.ones(1, 4)), exact)
    black.watch()(inputs)
    assert black.seen["layer"][1] == black.seen["conv"][1] == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: amp.auto_mixed_precision([], "O2"), TypeError, "model is a list"),
        (lambda: amp.auto_mixed_precision(nn.Linear(1, 1), "O5"), ValueError, "amp_level='O5'"),
        (lambda: amp.auto_mixed_precision(nn.Linear(1, 1), "O2", torch.int8), ValueError, "torch.int8"),
        (lambda: amp.custom_mixed_precision(nn.Linear(1, 1)), ValueError, "exactly one"),
        (lambda: amp.custom_mixed_precision(nn.Linear(1, 1), white_list=[], black_list=[]), ValueError, "exactly one"),
        (lambda: amp.custom_mixed_precision(nn.Linear(1, 1), white_list=[torch.relu]), TypeError, "types only"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


class Refusing(OrderedDict[str, Tensor]):
    """As the outputs of Hugging Face's models, which refuse `update`."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("You cannot use ``update`` on this instance.")


class Naming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Refusing:
        outputs = Refusing()
        outputs["logits"] = self.linear(inputs)
        return outputs


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_outputs_that_cannot_be_updated(level: str) -> None:
    model = Naming()
    loop = StepLoop(
        model,
        lambda outputs, labels: functional.cross_entropy(outputs["logits"], labels),
        torch.optim.SGD(model.parameters(), lr=0.1),
        amp=level,
    )
    history = loop.run([(torch.randn(2, 4), torch.tensor([0, 1]))])
    assert history.losses.isfinite().all()
    outputs = amp.auto_mixed_precision(Naming(), level, torch.bfloat16)(torch.randn(2, 4))
    assert type(outputs) is Refusing
    assert outputs["logits"].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The input to trace is already")
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", ["scripted", "traced", "a part"])
def test_torch_script_has_no_casts_between_layers(kind: str, level: str) -> None:
    """The hooks of a scripted module raise, those of a traced one do nothing."""
    layer = nn.Sequential(nn.Linear(6, 3), nn.ReLU())
    model = torch.jit.trace(layer, torch.ones(2, 6)) if kind == "traced" else torch.jit.script(layer)
    model = nn.Sequential(model) if kind == "a part" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"amp='{level}' casts .* TorchScript module does not run; pass amp='O1'"):
        StepLoop(model, functional.cross_entropy, optimizer, amp=level)
    loop = StepLoop(model, functional.cross_entropy, optimizer, amp="O1")
    assert loop.run([(torch.ones(2, 6), torch.tensor([0, 2]))]).losses.isfinite().all()
