"""Which optimizers can be captured on a CUDA device that is none, and what becomes of those that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulators.fake_cuda import FakeCuda
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from loop.engines.test_on_fake_cuda import UNCOMPILED, assert_trained_alike, make_loop
from loop.reference import make_batches, make_model, plain_loop
from torch_sink.amp import DynamicLossScaler
from torch_sink.loop import LambdaCallback, StepLoop, jit
from torch_sink.loop.core.distributed import Ranks
from torch_sink.loop.engines.build import EngineSettings, resolve_modes
from torch_sink.loop.engines.memory import Places, address
from torch_sink.loop.step.optimizers import make_capturable
from torch_sink.mindspore import Model
from torch_sink.sink import SinkLoader

pytestmark = pytest.mark.halved


@pytest.fixture
def mesh(fake_cuda: FakeCuda) -> Iterator[Any]:
    """One process with a process group that does nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cuda", (1,))
    distributed.destroy_process_group()


def sharded(mesh: Any, value: float = 1.0) -> DTensor:
    return DTensor.from_local(torch.full((4, 4), value, device="cuda"), mesh, [Shard(0)])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_sharded_parameters_are_stepped_by_kernels_that_know_them(mesh: Any, name: str) -> None:
    parameter = nn.Parameter(sharded(mesh))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    make_capturable(optimizer)
    parameter.grad = sharded(mesh)
    optimizer.step()
    plain = nn.Parameter(torch.ones(4, 4))
    plain.grad = torch.ones(4, 4)
    getattr(torch.optim, name)([plain], lr=0.1).step()
    torch.testing.assert_close(parameter.to_local().cpu(), plain)


def test_sharded_models_are_not_captured(mesh: Any) -> None:
    model = nn.Linear(4, 4, device="cuda")
    model.weight = nn.Parameter(sharded(mesh))
    settings = EngineSettings("graph", UNCOMPILED, torch.device("cuda", 0))
    assert resolve_modes(model, settings) == ("eager", "eager")
    assert "models sharded by fully_shard are not captured" in settings.reasons.lines()[0]


def test_a_backward_pass_that_was_cut_off_leaves_ddp_ready_for_the_next() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = make_model(dropout=0.0)
    wrapped = nn.parallel.DistributedDataParallel(model)
    inputs, targets = make_batches(1)[0]

    def fail(gradient: Tensor) -> None:
        raise KeyError("inside")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        functional.cross_entropy(wrapped(inputs), targets).backward()
    handle.remove()
    Ranks(wrapped).reset_reducer()
    gradients = []
    for module in (wrapped, wrapped, model):
        model.zero_grad()
        functional.cross_entropy(module(inputs), targets).backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(gradients[1], gradients[2])
    distributed.destroy_process_group()


def test_a_sharded_tensor_is_where_its_part_is(mesh: Any) -> None:
    parameter = nn.Parameter(sharded(mesh))
    assert parameter.data_ptr() == 0
    assert address(parameter) == parameter.to_local().data_ptr() != 0
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    parameter.grad = sharded(mesh)
    optimizer.step()
    before = Places(nn.Module(), optimizer)
    optimizer.step()
    assert before.problem() is None
    optimizer.state[parameter]["exp_avg"] = sharded(mesh)
    assert "in the place of exp_avg of Adam," in before.problem()


class TwoDevices(nn.Module):
    """Its factor is on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(()))])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * self.factors[0].to(inputs.device)


class Complex(nn.Module):
    """Its factor is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model(dropout=0.0)
        self.factor = nn.Parameter(torch.ones((), dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) * torch.view_as_real(self.factor)[0]


def two_devices_on_cuda() -> TwoDevices:
    model = TwoDevices()
    model.inner.cuda()
    return model


@pytest.mark.parametrize(
    ("make", "make_plain", "reason"),
    [
        (two_devices_on_cuda, TwoDevices, "Adam holds parameters on cpu, outside cuda:0"),
        (lambda: Complex().cuda(), Complex, "Adam holds parameters of torch.complex64"),
    ],
    ids=["two devices", "complex"],
)
def test_parameters_that_no_graph_can_hold_train_uncaptured(
    fake_cuda: FakeCuda, make: Any, make_plain: Any, reason: str
) -> None:
    batches, model, plain = make_batches(6), make(), make_plain()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loop = StepLoop(model, functional.cross_entropy, optimizer, jit_config=UNCOMPILED)
    history = loop.run(batches)
    losses, _ = plain_loop(plain, functional.cross_entropy, torch.optim.Adam(plain.parameters(), 1e-3), batches)
    torch.testing.assert_close(history.losses, losses, rtol=1e-5, atol=1e-6)
    assert reason in loop.explain()
    assert fake_cuda.graphs_begun == 0


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("scaler", [None, 16.0])
def test_a_group_that_a_callback_adds_trains_from_the_next_sink_on(fake_cuda: FakeCuda, mode: str, scaler: Any) -> None:
    batches, plain = make_batches(12), make_model(dropout=0.0)
    first, later = list(plain[:4].parameters()), list(plain[4:].parameters())
    optimizer = torch.optim.SGD(first, lr=0.05, momentum=0.9)
    losses = [plain_loop(plain, functional.cross_entropy, optimizer, batches[:8])[0]]
    optimizer.add_param_group({"params": later, "lr": 0.01})
    losses.append(plain_loop(plain, functional.cross_entropy, optimizer, batches[8:])[0])

    model = make_model(dropout=0.0).cuda()
    optimizer = torch.optim.SGD(list(model[:4].parameters()), lr=0.05, momentum=0.9)

    def add(context: Any) -> None:
        if context.original_args().cur_step_num == 8:
            optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 0.01})

    loss_scaler = DynamicLossScaler(scaler) if scaler else None
    loop = StepLoop(
        model,
        functional.cross_entropy,
        optimizer,
        steps_per_sync=4,
        mode=mode,
        loss_scaler=loss_scaler,
        jit_config=UNCOMPILED,
    )
    history = loop.run(batches, callbacks=[LambdaCallback(on_train_step_end=add)])
    torch.testing.assert_close(history.losses, torch.cat(losses), rtol=1e-5, atol=1e-6)
    assert_trained_alike(model, plain, rtol=1e-4, atol=1e-5)
    assert f"mode: {mode}" in loop.explain()
    assert history.learning_rates[8:].tolist() == [[0.05, 0.01]] * 4
    assert history.learning_rates[:8, 1].isnan().all()


def test_a_longer_sink_needs_no_new_engine(fake_cuda: FakeCuda) -> None:
    batches = make_batches(16)
    loop = make_loop(steps_per_sync=-1)
    losses = [loop.run(batches[:6]).losses]
    engine, model_calls = loop.engine, 0

    def count(*_: Any) -> None:
        nonlocal model_calls
        model_calls += 1

    loop.model.register_forward_hook(count)
    losses.append(loop.run(batches[6:]).losses)
    plain = make_model(dropout=0.0)
    expected, _ = plain_loop(
        plain, functional.cross_entropy, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), batches
    )
    torch.testing.assert_close(torch.cat(losses), expected, rtol=1e-5, atol=1e-6)
    assert loop.engine is engine
    assert model_calls == 3, "no step but those that are captured"


def test_a_longer_sink_of_the_same_loader_is_read_from_a_longer_table(fake_cuda: FakeCuda) -> None:
    """Graphs hold the addresses of the shorter one."""
    batches = make_batches(8)
    loop = make_loop(steps_per_sync=2)
    with SinkLoader(batches) as loader:
        losses = [loop.run(loader).losses]
        loop.steps_per_sync = 8
        losses.append(loop.run(loader).losses)
    plain = make_model(dropout=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    expected, _ = plain_loop(plain, functional.cross_entropy, optimizer, batches * 2)
    torch.testing.assert_close(torch.cat(losses), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fake_cuda", [{"devices": 2, "seed": seed} for seed in range(3)], indirect=True)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_model_on_another_than_the_current_device(fake_cuda: FakeCuda, mode: str) -> None:
    batches = make_batches(8)
    loop = make_loop(model=make_model(dropout=0.0).to("cuda:1"), mode=mode, steps_per_sync=3)
    history = loop.run(batches)
    plain = make_model(dropout=0.0)
    expected, _ = plain_loop(
        plain, functional.cross_entropy, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), batches
    )
    torch.testing.assert_close(history.losses, expected, rtol=1e-5, atol=1e-6)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "NAdam"])
def test_the_optimizers_kernels_take_all_tensors_at_a_time(fake_cuda: FakeCuda, name: str) -> None:
    model = make_model().cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, foreach=True)
    scaler = DynamicLossScaler(16.0) if name.startswith("Adam") else None
    loop = StepLoop(
        model,
        functional.cross_entropy,
        optimizer,
        steps_per_sync=6,
        mode="graph",
        jit_config=UNCOMPILED,
        loss_scaler=scaler,
    )
    loop.run(make_batches(12))
    assert "mode: graph" in loop.explain()
    assert fake_cuda.calls["one tensor at a time"] == 0
    if scaler is not None:
        fused = f"aten::_fused_{name.lower()}_.tensor_lr"
        assert fake_cuda.calls[fused] > 0
        assert fake_cuda.calls["aten::where.self"] < fake_cuda.calls[fused] * 3, "no mask over parameters and state"


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("place", ["model", "method", "jit", "loss"])
def test_what_has_graphs_of_its_own_is_not_captured(fake_cuda: FakeCuda, place: str) -> None:
    model, loss_fn = make_model().cuda(), functional.cross_entropy
    if place == "model":
        model = torch.compile(model, mode="reduce-overhead")
    elif place == "method":
        model[0].compile(options={"triton.cudagraphs": True})
    elif place == "jit":
        model[0] = jit(model[0], jit_level="O2")
    else:
        loss_fn = torch.compile(loss_fn, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = StepLoop(model, loss_fn, optimizer, jit_config=UNCOMPILED)
    loop.prepare(4)
    assert "CUDA graphs of its own" in loop.explain()
    assert "mode: eager" in loop.explain()


class Recommender(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(inputs))


def test_sparse_gradients_are_not_captured(fake_cuda: FakeCuda) -> None:
    model = Recommender().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = StepLoop(model, functional.cross_entropy, optimizer, mode="graph", jit_config=UNCOMPILED)
    loop.prepare(4)
    assert "an embedding makes sparse gradients" in loop.explain()
    assert "mode: eager" in loop.explain()
    assert not any(group["fused"] for group in loop.optimizer.param_groups)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_fused_kernel_is_given_up_where_gradients_are_sparse(scaled: bool) -> None:
    """A step of SGD with sparse gradients is the plain one's, though its kernel was made the fused one."""
    batches = [(torch.randint(7, (6,)), torch.randint(5, (6,))) for _ in range(5)]
    models = [Recommender() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, plain = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    # What graph mode makes of them on a device.
    ours.param_groups[0].update(fused=True, foreach=False)
    ours._step_supports_amp_scaling = True
    scaler = DynamicLossScaler(16.0) if scaled else None
    StepLoop(models[0], functional.cross_entropy, ours, mode="eager", loss_scaler=scaler).run(batches)
    plain_loop(models[1], functional.cross_entropy, plain, batches)
    for weight, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("device_ids", "mode"), [([0], "graph"), ([0, 1], "eager")])
@pytest.mark.parametrize("fake_cuda", [{"devices": 2}], indirect=True)
def test_data_parallel_is_captured_on_one_device_only(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, device_ids: list[int], mode: str
) -> None:
    properties = SimpleNamespace(total_memory=1, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    model = nn.DataParallel(make_model(dropout=0.0).cuda(), device_ids)
    loop = StepLoop(model, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), jit_config=UNCOMPILED)
    loop.prepare(4)
    assert f"mode: {mode}" in loop.explain()
    assert ("DistributedDataParallel, with a process for each device" in loop.explain()) == (mode == "eager")
    assert loop.evaluator()._judge(None).mode == mode


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.filterwarnings(
    "ignore:.*FSDP:UserWarning", "ignore:.*FSDP:FutureWarning", "ignore:FSDP:DeprecationWarning"
)
def test_fsdp1_is_refused(mesh: Any, whole: bool) -> None:
    """Of one rank a loop would see its own losses and overflows only."""
    model = make_model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if whole:
        model = FullyShardedDataParallel(model)
    else:
        model[0] = FullyShardedDataParallel(model[0])
    with pytest.raises(TypeError, match=r"FSDP1.*fully_shard\(model\)"):
        StepLoop(model, functional.cross_entropy, optimizer)
    with pytest.raises(TypeError, match="FSDP1"):
        Model(model, functional.cross_entropy)
