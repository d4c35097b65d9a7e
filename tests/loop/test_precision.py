"""AMP levels against models that are cast by hand, with float32 master weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_sink.loop import StepLoop, amp

from .reference import make_batches, make_model

LOW = (torch.bfloat16, torch.float16)


class Recorder(nn.Module):
    """A model of many layer kinds that writes down the dtype that each layer sees and gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.group, self.layer = nn.GroupNorm(2, 4), nn.LayerNorm(4)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.lstm, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 5)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.embedding = nn.Embedding(5, 4)
        self.register_buffer("offset", torch.full((4,), 0.125))
        self.seen: dict[str, tuple[torch.dtype, ...]] = {}

    def watch(self) -> Recorder:
        """Begin to write down, after every hook that is registered by now."""
        for name, module in self.named_children():
            module.register_forward_hook(self._note(name))
        return self

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            self.seen[name] = (args[0].dtype, next(iter(module.parameters())).dtype, first.dtype)

        return hook

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.instance(self.group(functional.relu(self.norm(self.conv(inputs))))).flatten(2).transpose(1, 2)
        features = self.layer(features) + self.offset + self.embedding(torch.zeros(1, dtype=torch.int64))
        features = self.attention(features, features, features)[0]
        return self.head(self.lstm(features)[0][:, -1])


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
    for name in ("conv", "head", "attention", "lstm"):
        assert model.seen[name] == (dtype,) * 3, name
    assert model.seen["embedding"] == (torch.int64, dtype, dtype)
    for name in ("group", "layer"):
        assert model.seen[name] == ((torch.float32,) * 2 + (dtype,) if level == "O2" else (dtype,) * 3), name
    for name in ("norm", "instance"):
        # The mixed kernels of torch take low precision activations with float32 parameters and statistics.
        assert model.seen[name] == (torch.float32 if level == "O2" else dtype, torch.float32, dtype), name
    assert all(a is b and a.dtype == torch.float32 for a, b in zip(masters, model.parameters(), strict=True))
    assert all(parameter.grad.dtype == torch.float32 for parameter in masters)
    assert model(make_batches(1)[0][0]).dtype == torch.float32
    assert model.seen["conv"] == (torch.float32,) * 3, "outside the loop the model is what it was"
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


def test_auto_is_float32_on_the_cpu() -> None:
    model = make_model()
    assert (
        StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters()), amp="auto").precision.level
        == "O0"
    )


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


def test_keep_batchnorm_fp32_overrides_the_level() -> None:
    for level, keep in (("O2", False), ("O3", True)):
        model = amp.auto_mixed_precision(Recorder(), level, torch.bfloat16, keep_batchnorm_fp32=keep)
        model.watch()(make_batches(1)[0][0])
        assert model.seen["layer"][1] == (torch.float32 if keep else torch.bfloat16)


def test_lists() -> None:
    assert nn.Linear in amp.get_white_list()
    assert nn.BatchNorm2d in amp.get_black_list()
    amp.get_white_list().clear()
    assert amp.get_white_list()
    white = amp.custom_mixed_precision(Recorder(), white_list=[nn.Conv2d], dtype=torch.bfloat16)
    white.watch()(make_batches(1)[0][0])
    assert white.seen["conv"][:2] == (torch.bfloat16,) * 2
    assert white.seen["norm"] == (torch.float32,) * 3
    assert white.seen["head"] == (torch.float32,) * 3
    black = amp.custom_mixed_precision(Recorder(), black_list=[nn.LayerNorm], dtype=torch.bfloat16)
    black.watch()(make_batches(1)[0][0])
    assert black.seen["layer"] == (torch.float32, torch.float32, torch.bfloat16)
    assert black.seen["head"][1] == torch.bfloat16


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
