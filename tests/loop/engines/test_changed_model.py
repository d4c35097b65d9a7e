"""What a callback makes of model and optimizer between two epochs holds from the next step on, as in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

from loop.engines.test_on_fake_cuda import UNCOMPILED
from torch_sink.amp import StaticLossScaler
from torch_sink.loop import Evaluation, LambdaCallback, StepLoop

pytestmark = pytest.mark.halved

SCALE = 64.0


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def make_batches(count: int = 6, seed: int = 1) -> list[Any]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 6, generator=draw), torch.randint(0, 3, (4,), generator=draw)) for _ in range(count)]


Optimizer = torch.optim.Optimizer
DEVICE = {"of": "cpu"}


def made(layer: nn.Module) -> Any:
    return layer.to(DEVICE["of"])


def replace_head(model: nn.Sequential, optimizer: Optimizer) -> None:
    torch.manual_seed(5)
    model[4] = made(nn.Linear(8, 3))
    optimizer.param_groups[0]["params"] = list(model.parameters())


def replace_weight(model: nn.Sequential, optimizer: Optimizer) -> None:
    """A parameter in the place of another, in the same layer."""
    torch.manual_seed(5)
    model[4].weight = nn.Parameter(torch.randn(3, 8).to(DEVICE["of"]))
    optimizer.param_groups[0]["params"] = list(model.parameters())


def add_layer(model: nn.Sequential, optimizer: Optimizer) -> None:
    torch.manual_seed(5)
    model.append(made(nn.Linear(3, 3)))
    optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.05})


def swap_groups(model: nn.Sequential, optimizer: Optimizer) -> None:
    """As many groups as before, but other ones."""
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.3})


def unfreeze(model: nn.Sequential, optimizer: Optimizer) -> None:
    model[0].requires_grad_(True)


def freeze(model: nn.Sequential, optimizer: Optimizer) -> None:
    model[2].requires_grad_(False)


def remove_weights(model: nn.Sequential, optimizer: Optimizer) -> None:
    for layer in (model[2], model[4]):
        prune.l1_unstructured(layer, "weight", amount=0.5)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def parametrize_weight(model: nn.Sequential, optimizer: Optimizer) -> None:
    parametrize.register_parametrization(model[2], "weight", Symmetric())


def normalize_weight(model: nn.Sequential, optimizer: Optimizer) -> None:
    parametrizations.weight_norm(model[4])
    optimizer.param_groups[0]["params"] = list(model.parameters())


class Rounded(nn.Linear):
    """A layer of quantization-aware training: it has the parameters of the layer that it stands for."""

    def forward(self, inputs: Tensor) -> Tensor:
        rounded = (self.weight * 16).round() / 16
        return functional.linear(inputs, self.weight + (rounded - self.weight).detach(), self.bias)


def swap_for_rounded(model: nn.Sequential, optimizer: Optimizer) -> None:
    for place in (2, 4):
        rounded = Rounded(1, 1)
        rounded.weight, rounded.bias = model[place].weight, model[place].bias
        model[place] = rounded


CHANGES: list[Callable[[nn.Sequential, Optimizer], None]] = [
    replace_head,
    replace_weight,
    add_layer,
    swap_groups,
    unfreeze,
    freeze,
    remove_weights,
    parametrize_weight,
    normalize_weight,
    swap_for_rounded,
]


class Average:
    """The reference: every parameter's own average, found by the parameter or by its name; the first update copies."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        known = [*self.values.values()]
        now: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parameter in model.named_parameters():
            old = next((value for owner, value in known if owner is parameter), None)
            old = self.values[name][1] if old is None and name in self.values else old
            new = parameter.clone() if old is None else old.lerp(parameter, 1 - 0.9)
            now[name] = parameter, new
        self.values = now


def plain(change: Any, kind: Any, *, clip: float | None, scaled: bool) -> tuple[Any, Optimizer, Average, list[float]]:
    DEVICE["of"] = "cpu"
    model, average, losses = make_model(), Average(), []
    optimizer = kind(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled, growth_interval=1000)
    for epoch in range(3):
        if epoch == 1:
            change(model, optimizer)
        for inputs, targets in make_batches():
            model.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in model.parameters():  # clipping sees them too
                if scaled and parameter not in held and parameter.grad is not None:
                    parameter.grad.div_(SCALE)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            average.update(model)
            losses.append(loss.item())
    return model, optimizer, average, losses


def ours(change: Any, kind: Any, device: str, *, clip: float | None, scaled: bool, **options: Any) -> tuple[Any, ...]:
    DEVICE["of"] = device
    model = make_model().to(device)
    optimizer = kind(model.parameters())

    def at_begin(context: Any) -> None:
        if context.original_args().cur_epoch_num == 2:
            change(model, optimizer)

    scaler = StaticLossScaler(SCALE) if scaled else None
    options = {"steps_per_sync": 4, "clip_grad_norm": clip, "loss_scaler": scaler, "ema": 0.9, **options}
    loop = StepLoop(model, functional.cross_entropy, optimizer, **options)
    evaluation = Evaluation(make_batches(2, seed=9), {"accuracy"}, ema=True)
    history = loop.run(make_batches(), epochs=3, callbacks=[LambdaCallback(on_train_epoch_begin=at_begin), evaluation])
    return loop, history


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("kind", "clip", "scaled"), [(sgd, 0.3, False), (adamw, 0.3, True)], ids=["SGD", "AdamW, scaled"]
)
@pytest.mark.sampled(10)
def test_a_changed_model_trains_as_in_the_plain_loop(change: Any, kind: Any, clip: float, scaled: bool) -> None:
    expected, _, average, losses = plain(change, kind, clip=clip, scaled=scaled)
    loop, history = ours(change, kind, "cpu", clip=clip, scaled=scaled)
    assert torch.equal(history.losses, torch.tensor(losses))
    named, averaged = dict(expected.named_parameters()), dict(loop.ema_model().named_parameters())
    for name, weight in loop.model.named_parameters():
        assert torch.equal(weight, named[name]), name
        assert torch.equal(averaged[name], average.values[name][1]), name
    inputs = make_batches(1, seed=9)[0][0]
    with torch.no_grad():
        for name, weight in expected.named_parameters():
            weight.copy_(average.values[name][1])
        assert torch.equal(loop.ema_model()(inputs), expected(inputs)), "the averaged model has the changed layers"
        assert torch.equal(loop.predict(inputs, ema=True), expected(inputs))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.sampled(10)
def test_graphs_of_a_changed_model_are_captured_again(fake_cuda: FakeCuda, change: Any, scaled: bool) -> None:
    expected, _, average, losses = plain(change, sgd, clip=0.3, scaled=scaled)
    options = {"mode": "graph", "jit_config": UNCOMPILED}
    loop, history = ours(change, sgd, "cuda", clip=0.3, scaled=scaled, **options)
    assert "mode: graph" in loop.explain(), loop.explain()
    assert "captured again" in loop.explain()
    torch.testing.assert_close(history.losses, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    named, averaged = dict(expected.named_parameters()), dict(loop.ema_model().named_parameters())
    for name, weight in loop.model.named_parameters():
        torch.testing.assert_close(weight.cpu(), named[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(averaged[name].cpu(), average.values[name][1], rtol=1e-4, atol=1e-5)
    loop.close()


@pytest.mark.parametrize("change", [replace_head, add_layer, remove_weights])
def test_new_layers_compute_in_the_loops_precision(change: Any) -> None:
    """At O2 the outputs of layers are in low precision, those of a new layer too; nothing of it stays on any model."""
    dtypes: list[torch.dtype] = []
    probe = lambda module, inputs, output: dtypes.append(inputs[0].dtype)  # noqa: E731

    def and_look(model: nn.Sequential, optimizer: Optimizer) -> None:
        change(model, optimizer)
        model.append(nn.ReLU())
        model[-1].register_forward_hook(probe)

    loop, _ = ours(and_look, sgd, "cpu", clip=None, scaled=False, amp="O2")
    assert set(dtypes) == {torch.bfloat16}
    loop.close()
    for model in (loop.model, loop.ema_model()):
        assert not any(module._forward_hooks for module in model[:-1].modules())


def test_the_older_weight_norm_and_pruning_may_come_before_the_loop() -> None:
    """They keep a tensor with a history, which cannot be copied as it is."""
    model = make_model()
    with pytest.warns(FutureWarning, match="weight_norm"):
        weight_norm(model[2])
    prune.l1_unstructured(model[4], "weight", amount=0.5)
    model(make_batches(1)[0][0])
    loop = StepLoop(model, functional.cross_entropy, sgd(model.parameters()), ema=0.5)
    loop.run(make_batches(1))
    inputs = make_batches(1)[0][0]
    assert torch.equal(loop.ema_model()(inputs), model(inputs)), "the first update copies the weights"


def test_evaluation_graphs_are_captured_again_for_other_layers(fake_cuda: FakeCuda) -> None:
    """No parameter moves where an activation is replaced."""
    model = make_model().cuda()
    loop = StepLoop(model, functional.cross_entropy, sgd(model.parameters()), mode="graph", jit_config=UNCOMPILED)
    batches = make_batches(4)
    relu = loop.evaluate(batches)["loss"]
    model[1] = nn.Tanh()
    tanh = loop.evaluate(batches)["loss"]
    model.cpu()
    expected = torch.stack([functional.cross_entropy(model(x), y) for x, y in batches]).mean().item()
    assert tanh == pytest.approx(expected, rel=1e-5) != pytest.approx(relu, rel=1e-3)
    loop.close()


def test_what_a_hook_changes_holds_from_the_next_sink_on() -> None:
    """Without any callback: the new head is zeroed and clipped."""

    def make() -> tuple[nn.Sequential, Optimizer]:
        DEVICE["of"] = "cpu"
        model = make_model()
        optimizer = sgd(model.parameters())
        steps = iter(range(1, 7))

        def replace_after_four(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if next(steps) == 4:
                replace_head(model, optimizer)

        optimizer.register_step_post_hook(replace_after_four)
        return model, optimizer

    model, optimizer = make()
    losses = []
    for inputs, targets in make_batches():
        model.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        losses.append(loss.item())
    ours, optimizer = make()
    loop = StepLoop(ours, functional.cross_entropy, optimizer, steps_per_sync=2, clip_grad_norm=0.3)
    assert torch.equal(loop.run(make_batches()).losses, torch.tensor(losses))
    assert all(map(torch.equal, ours.parameters(), model.parameters()))
