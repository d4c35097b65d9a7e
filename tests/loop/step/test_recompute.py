"""Activation checkpoints at every level: recomputed under the precision they ran under, so nothing changes by them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as checkpoint_module
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torchvision.models import DenseNet

from torch_sink import amp
from torch_sink.loop import StepLoop

pytestmark = pytest.mark.halved

LEVELS = ("O0", "O1", "O2", "O3")
Run = Callable[..., Any]


def directly(function: Callable[..., Any], *inputs: Any) -> Any:
    return function(*inputs)


CHECKPOINTS: dict[str, Run] = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "without a check": partial(checkpoint, use_reentrant=False, determinism_check="none"),
    "nested": lambda function, *inputs: checkpoint(
        lambda *again: checkpoint(function, *again, use_reentrant=False), *inputs, use_reentrant=False
    ),
    "looked up": lambda function, *inputs: checkpoint_module.checkpoint(function, *inputs, use_reentrant=False),
}


class Blocks(nn.Module):
    """Checkpointed blocks: of layers, of functions alone, and of a parameter that is used by hand."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.stem = run, nn.Linear(6, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.0), nn.ReLU(), nn.Dropout(0.3))
        self.norm, self.scale, self.head = nn.LayerNorm(8), nn.Parameter(torch.ones(8)), nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.run(self.layers, self.stem(inputs))
        features = self.run(lambda x: x.softmax(-1) * functional.layer_norm(x, (8,)) @ x.T.softmax(0), features)
        features = features @ torch.ones(features.shape[1], 8, dtype=features.dtype) / 8
        features = self.run(lambda x: self.norm(x * self.scale) + functional.gelu(x), features)
        return self.run(lambda x: functional.log_softmax(self.head(x), -1), features)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def make_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 6, generator=generator), torch.tensor([0, 1, 2, 4])


def assert_equal(ours: list[Tensor], expected: list[Tensor], *, exactly: bool) -> None:
    for left, right in zip(ours, expected, strict=True):
        if exactly:
            assert torch.equal(left, right)
        else:  # a reentrant backward pass adds the parts of a gradient in another order, and in low precision
            torch.testing.assert_close(left, right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_change_no_gradient(name: str, level: str, dtype: torch.dtype) -> None:
    """The backward pass runs outside the model's precision, as in a loop of one's own."""
    results = []
    for run in (directly, CHECKPOINTS[name]):
        model = amp.auto_mixed_precision(Blocks(run), level, dtype)
        inputs, targets = make_batch()
        torch.manual_seed(1)
        loss = functional.nll_loss(model(inputs), targets)
        loss.backward()
        results.append([loss, *gradients(model)])
    assert_equal(results[1], results[0], exactly=name != "reentrant")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["not reentrant", "reentrant"])
def test_checkpoints_in_a_loop(name: str, level: str) -> None:
    results = []
    for run in (directly, CHECKPOINTS[name]):
        model = Blocks(run)
        torch.manual_seed(1)
        loop = StepLoop(model, functional.nll_loss, torch.optim.SGD(model.parameters(), lr=0.1), amp=level)
        results.append([loop.run([make_batch(seed) for seed in range(4)]).losses, *model.parameters()])
    assert_equal(results[1], results[0], exactly=name != "reentrant")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_densenet_saves_memory_at_every_level(level: str, dtype: torch.dtype) -> None:
    results = []
    for efficient in (False, True):
        torch.manual_seed(0)
        model = DenseNet(8, (2, 2), 16, num_classes=5, memory_efficient=efficient)
        torch.manual_seed(1)
        batches = [(torch.randn(2, 3, 32, 32), torch.tensor([1, 4])) for _ in range(2)]
        loop = StepLoop(
            model,
            functional.cross_entropy,
            torch.optim.SGD(model.parameters(), lr=0.1),
            amp=level,
            amp_dtype=dtype,
            loss_scaler=None,
        )
        results.append([loop.run(batches).losses, *model.parameters()])
    assert_equal(results[1], results[0], exactly=True)


def test_a_converted_part_of_a_checkpointed_model() -> None:
    """What begins outside the precision and what begins inside are recomputed as they ran."""
    results = []
    for run in (directly, CHECKPOINTS["not reentrant"]):
        torch.manual_seed(0)
        part = amp.auto_mixed_precision(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), "O2", torch.bfloat16)
        head = nn.Linear(8, 5)
        outputs = run(lambda x, part=part, head=head: head(part(x)).softmax(-1), make_batch()[0])
        outputs.square().sum().backward()
        results.append([outputs, *gradients(part), *gradients(head)])
    assert_equal(results[1], results[0], exactly=True)


def test_checkpoints_of_a_sequence() -> None:
    results = []
    for segments in (None, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.LayerNorm(8), nn.Linear(8, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def forward(model: Any, batch: Any, segments: Any = segments) -> Tensor:
            outputs = model(batch[0])
            if segments is not None:
                outputs = checkpoint_sequential(model, segments, batch[0], use_reentrant=False)
            return functional.cross_entropy(outputs, batch[1])

        loop = StepLoop(model, None, optimizer, forward=forward, amp="O2")
        results.append([loop.run([make_batch(), make_batch(1)]).losses, *model.parameters()])
    assert_equal(results[1], results[0], exactly=True)


def test_gradients_inside_the_forward_pass() -> None:
    """A gradient penalty: the backward pass of the checkpoint begins before the forward pass is over."""
    results = []
    for run in (directly, CHECKPOINTS["not reentrant"]):
        model = Blocks(run).eval()

        def forward(model: nn.Module, batch: Any) -> Tensor:
            inputs = batch[0].clone().requires_grad_()
            outputs = model(inputs)
            (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            return functional.nll_loss(outputs, batch[1]) + gradient.square().sum()

        loop = StepLoop(model, None, torch.optim.SGD(model.parameters(), lr=0.1), forward=forward, amp="O2")
        results.append([loop.run([make_batch(), make_batch(1)]).losses, *model.parameters()])
    assert_equal(results[1], results[0], exactly=True)


def test_a_checkpoint_does_not_keep_the_model() -> None:
    model = amp.auto_mixed_precision(Blocks(CHECKPOINTS["not reentrant"]), "O2", torch.bfloat16)
    reference = weakref.ref(model)
    outputs = model(make_batch()[0])
    outputs.sum().backward()
    del model, outputs
    gc.collect()
    assert reference() is None
