"""no_host_sync finds what would wait on a device, names the line, and its documented blind spots are blind."""

from __future__ import annotations

import ctypes
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision  # noqa: F401, its operators
from simulators.fake_cuda import FakeCuda
from torch import Tensor, nn
from torch.nn import functional

from loop.reference import make_batches, make_model
from torch_sink.errors import HostSyncError
from torch_sink.loop import LambdaCallback, StepLoop, no_host_sync
from torch_sink.thread_waits import host_sync_allowed

X = torch.tensor([3.0, 1.0, 2.0, 1.0])
INDEX = torch.tensor(1)


def backward_with_item() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Tensor) -> Tensor:
            return value * 2

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:
            return gradient * gradient.sum().item()

    Custom.apply(X.clone().requires_grad_()).sum().backward()


def hook_with_float() -> None:
    value = X.clone().requires_grad_()
    value.register_hook(lambda gradient: gradient * float(gradient[0]))
    value.sum().backward()


def clip_that_checks() -> None:
    parameter = nn.Parameter(X.clone())
    parameter.grad = X.clone()
    nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: X[0].item(),
    "float": lambda: float(X[0]),
    "bool": lambda: bool(X[0] > 1),
    "int index": lambda: X[INDEX : INDEX + 1],
    "python list index": lambda: [1, 2][INDEX],
    "mask index": lambda: X[X > 1],
    "mask write": lambda: X.clone().__setitem__(X > 1, torch.zeros(2)),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "masked_select": lambda: X.masked_select(X > 1),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "bincount": lambda: torch.tensor([1, 2]).bincount(),
    "one_hot": lambda: functional.one_hot(torch.tensor([0, 2])),
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2, 1, 1])),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "print": lambda: repr(X),
    "format": lambda: f"{X[0]:.2f}",
    "format of many": lambda: f"{X}",
    "to": lambda: X.to("cpu"),
    "to, by name": lambda: X.to(dtype=torch.float64, device="cpu"),
    "tensor of tensors": lambda: torch.tensor([[X[0]], [X[1]]]),
    "new_tensor of tensors": lambda: X.new_tensor([X[0], 1.0]),
    "inverse": lambda: torch.linalg.inv(torch.eye(2)),
    "singular values": lambda: torch.linalg.svd(torch.eye(2)),
    "eigenvalues": lambda: torch.linalg.eigh(torch.eye(2)),
    "least squares": lambda: torch.linalg.lstsq(torch.eye(2), torch.eye(2)),
    "multinomial": lambda: torch.multinomial(X.softmax(0), 2),
    "normal": lambda: torch.normal(0.0, X.abs()),
    "sample of a distribution": lambda: torch.distributions.Normal(X, X.abs(), validate_args=False).sample(),
    "histogram": lambda: X.histc(3),
    "embedding with max_norm": lambda: functional.embedding(INDEX, X[:, None].clone(), max_norm=1.0),
    "nms": lambda: torch.ops.torchvision.nms(torch.rand(4, 4), X, 0.5),
    "batch norm without momentum": lambda: nn.BatchNorm1d(1, momentum=None)(X[:, None]),
    "clip that checks": clip_that_checks,
    "custom backward": backward_with_item,
    "tensor hook": hook_with_float,
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_found_and_its_line_named(name: str) -> None:
    with (
        pytest.raises(HostSyncError, match=rf"{Path(__file__).name}:\d+: .*keep the value on the device"),
        no_host_sync(),
    ):
        WAITS[name]()
    WAITS[name]()


FREE: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: (X * 2 + 1).softmax(0),
    "tensor index": lambda: X[torch.tensor([0, 1])],
    "index_select": lambda: X.index_select(0, INDEX[None]),
    "masked_fill": lambda: X.masked_fill(X > 1, 0.0),
    "mask write of one value": lambda: X.clone().__setitem__(X > 1, 0.0),
    "where of three": lambda: torch.where(X > 1, X, 0.0),
    "cross entropy": lambda: functional.cross_entropy(X[None], torch.tensor([2])),
    "repeat with size": lambda: X.repeat_interleave(torch.tensor([1, 2, 1, 1]), output_size=5),
    "clip": lambda: nn.utils.clip_grad_norm_([nn.Parameter(X.clone())], 1.0),
    "to the device of another": lambda: X.to(INDEX.device, non_blocking=True).to(INDEX),
    "tensor of numbers": lambda: X.new_tensor([1.0, 2.0]) + torch.tensor(1.0),
    "one_hot of known classes": lambda: functional.one_hot(torch.tensor([0, 2]), num_classes=3),
    "one_hot of known classes, by place": lambda: functional.one_hot(torch.tensor([0, 2]), 3),
    "normal of one deviation": lambda: torch.normal(X, 1.0),
    "sample that keeps its gradient": lambda: torch.distributions.Normal(X, X.abs(), validate_args=False).rsample(),
    "histogram between bounds": lambda: X.histc(3, -1, 1),
    "embedding": lambda: functional.embedding(INDEX, X[:, None]),
    "inverse without check": lambda: torch.linalg.inv_ex(torch.eye(2)),
    "shape": lambda: (X.shape, X.numel(), X.device, len(X)),
}


@pytest.mark.parametrize("name", FREE)
def test_what_stays_on_the_device_is_no_wait(name: str) -> None:
    with no_host_sync():
        FREE[name]()


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adagrad])
def test_counters_of_optimizers_on_the_cpu_are_exempt(optimizer: Any) -> None:
    parameter = nn.Parameter(X.clone())
    parameter.grad = X.clone()
    instance = optimizer([parameter])
    with no_host_sync():
        instance.step()
        instance.step()


def in_another_thread() -> None:
    thread = threading.Thread(target=lambda: X[0].item())
    thread.start()
    thread.join()


def in_a_librarys_kernel() -> None:
    with torch.library._scoped_library("torch_sink_tests", "FRAGMENT") as library:
        library.define("waits(Tensor x) -> Tensor")
        library.impl("waits", lambda x: x * x[0].item(), "CPU")
        torch.ops.torch_sink_tests.waits(X)


UNSEEN: dict[str, tuple[str, Callable[[], Any]]] = {
    "thread": ("other threads", in_another_thread),
    "synchronize": ("torch.cuda.synchronize", torch.cpu.synchronize),
    "pickle": ("pickling", lambda: pickle.dumps(X)),
    "address": ("by its address", lambda: ctypes.c_float.from_address(X.data_ptr()).value),
    "kernel": ("waits inside kernels of a library", in_a_librarys_kernel),
    "device": ('not spelled "cpu"', lambda: X.to(torch.device("cpu"))),
    "numbers": ("tensors made from numbers", lambda: torch.tensor([1.0, 2.0], device=X.device)),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_detector_does_not_see(name: str) -> None:
    """As the docstring says."""
    words, waits = UNSEEN[name]
    with no_host_sync():
        waits()
    assert words in " ".join(no_host_sync.__doc__.split())


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_function_runs_its_eager_code_inside() -> None:
    """As the docstring says: nothing that the compiler made runs where it could not be seen."""
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *arguments: runs.append(1) or graph.forward(*arguments)

    compiled = torch.compile(lambda value: value.sum().item() * 2, backend=backend)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert compiled(X) == 14
        assert runs == [1]
        with pytest.raises(HostSyncError, match=rf"{Path(__file__).name}:\d+: .*reads one element"), no_host_sync():
            compiled(X)
        assert runs == [1]
        compiled(X)
        assert runs == [1, 1], "compiled again outside"


def test_allowed_regions() -> None:
    with no_host_sync():
        with host_sync_allowed():
            X.tolist()
        with pytest.raises(HostSyncError):
            X.tolist()


def test_torchs_debug_mode_is_put_back_and_the_users_is_left_alone(fake_cuda: FakeCuda) -> None:
    """Torch's warning about its mode is not passed on: in this suite a warning is an error."""
    value = torch.ones(1, device="cuda")
    with no_host_sync():
        assert torch.cuda.get_sync_debug_mode() == 1
        with host_sync_allowed():
            value.item()
    assert torch.cuda.get_sync_debug_mode() == 0
    with pytest.warns(UserWarning, match="prototype"):
        torch.cuda.set_sync_debug_mode("error")
    with no_host_sync():
        assert torch.cuda.get_sync_debug_mode() == 2
        with host_sync_allowed():
            value.item()
    assert torch.cuda.get_sync_debug_mode() == 2
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        value.item()


class Syncing(nn.Module):
    """A user's model that looks at its activations on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        self.largest = outputs.max().item()
        return outputs


def make_loop(model: nn.Module) -> StepLoop:
    return StepLoop(model, functional.cross_entropy, torch.optim.AdamW(model.parameters()), steps_per_sync=3, ema=0.9)


def test_a_run_is_free_of_waits_inside_its_sinks() -> None:
    seen = []
    with no_host_sync():
        note = LambdaCallback(on_train_step_end=lambda c: seen.append(float(c.original_args().losses[-1])))
        make_loop(make_model()).run(make_batches(7), callbacks=[note])
    assert len(seen) == 3


def test_a_model_that_waits_is_named() -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "self.largest =" in text)
    loop = make_loop(Syncing())
    loop.run(make_batches(2))
    assert f"{Path(__file__).name}:{line}" in loop.explain()
    with pytest.raises(HostSyncError, match=rf"{Path(__file__).name}:{line}:"), no_host_sync():
        loop.run(make_batches(2))
    clean = make_loop(make_model())
    clean.run(make_batches(2))
    assert "wait" not in clean.explain()
