"""What torch_sink itself does between sinks is no wait to `no_host_sync`; what a user's step does is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from torch_sink import amp
from torch_sink.errors import HostSyncError
from torch_sink.loop import Callback, History, StepLoop, no_host_sync
from torch_sink.loop.callbacks import EVENTS
from torch_sink.mindspore import Model, data_sink
from torch_sink.sink import SinkLoader


class Numbers(Dataset[Any]):
    """Draws, and looks at what it drew: making a sample may keep the host busy."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(4) + torch.rand(()).item(), torch.tensor(index % 2)


def make_loader(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(0)
    )


def make_network(activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), activation or nn.ReLU(), nn.Linear(4, 2))


def make_loop(**options: Any) -> StepLoop:
    model = make_network()
    return StepLoop(model, functional.cross_entropy, torch.optim.AdamW(model.parameters()), steps_per_sync=2, **options)


def make_model(activation: nn.Module | None = None) -> Model:
    network = make_network(activation)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return Model(network, functional.cross_entropy, optimizer, metrics={"accuracy", "loss"})


class EveryEvent(Callback):
    """Reads values on the host in each of the twelve events."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        for name in EVENTS:
            setattr(self, name, lambda context, name=name: self.look(name))

    def look(self, name: str) -> None:
        torch.ones(2).tolist()
        assert torch.ones(()).item() == 1
        self.seen.add(name)


def iterate_and_resume(folder: Path, workers: int = 0) -> None:
    with SinkLoader(make_loader(workers)) as loader:
        next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        assert len(list(loader)) == 2
        loader.restart()
        assert len(list(loader)) == 3
        loader.stats()


def save_and_resume(folder: Path) -> None:
    options: dict[str, Any] = {"ema": 0.9, "amp": "O2", "amp_dtype": torch.float16, "clip_grad_norm": 1.0}
    loop, loader = make_loop(**options), SinkLoader(make_loader())
    loop.run(loader, max_steps=2)
    loop.save(folder, loader)
    again = make_loop(**options)
    assert again.resume(folder, SinkLoader(make_loader())) == 2
    again.load_state_dict(loop.state_dict())
    again.ema_model(), again.explain(), repr(again), repr(again.scaler)
    again.close()


def run_every_event(folder: Path) -> None:
    note = EveryEvent()
    history = make_loop().run(make_loader(), epochs=2, callbacks=[note, History()])
    assert (len(history.losses), len(history.learning_rates)) == (6, 6)
    assert len(note.seen) == 6


def fit_every_event(folder: Path, sink: bool = True) -> None:
    note = EveryEvent()
    model = make_model()
    options = {"dataset_sink_mode": sink, "valid_dataset_sink_mode": sink}
    model.fit(2, make_loader(), make_loader(), callbacks=[note, History()], **options)
    assert len(note.seen) == 12
    model.eval(make_loader(), callbacks=[note])
    model.predict(torch.randn(2, 4))


OWN: dict[str, Callable[[Path], Any]] = {
    "data_sink": lambda folder: [data_sink(lambda x, y: x.sum(), make_loader(), sink_size=5)() for _ in range(2)],
    "SinkLoader": iterate_and_resume,
    "SinkLoader with workers": lambda folder: iterate_and_resume(folder, workers=1),
    "events of a run": run_every_event,
    "events of fit": fit_every_event,
    "events of fit without sinks": lambda folder: fit_every_event(folder, sink=False),
    "save and resume": save_and_resume,
    "evaluate": lambda folder: make_loop().evaluate(make_loader(), metrics={"accuracy"}),
    "build": lambda folder: make_model().build(make_loader(), make_loader()),
    "scalers": lambda folder: amp.DynamicLossScaler().load_state_dict(amp.DynamicLossScaler().state_dict()),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.sampled(5)
def test_own_code_is_exempt(name: str, tmp_path: Path) -> None:
    with no_host_sync():
        OWN[name](tmp_path)


class Looking(nn.Module):
    """Waits where it is called, when it evaluates, when it trains, or both."""

    def __init__(self, *modes: bool) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training in self.modes:
            inputs.max().item()
        return inputs


def counted(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() + x.max().item()


class LookingMetric:
    """Reads its values at each batch."""

    def reset(self) -> None: ...

    def update(self, output: Tensor, labels: Tensor) -> None:
        output.max().item()

    def compute(self) -> float:
        return 0.0


OTHERS: dict[str, Callable[[], Any]] = {
    "function of a data_sink": lambda: data_sink(counted, make_loader())(),
    "its second step": lambda: data_sink(lambda x, y: counted(x, y), make_loader(), sink_size=2)(),
    "model that trains": lambda: make_model(Looking(True)).train(1, make_loader()),
    "model that is evaluated": lambda: make_model(Looking(False)).eval(make_loader()),
    "model that fit evaluates": lambda: make_model(Looking(False)).fit(1, make_loader(), make_loader()),
    "metric": lambda: make_loop().evaluate(make_loader(), metrics={"looking": LookingMetric()}),
    "step of one's own": lambda: [counted(*batch) for batch in SinkLoader(make_loader())],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_step_does_is_not(name: str) -> None:
    with pytest.raises(HostSyncError, match=rf"{Path(__file__).name}:\d+: .*reads one element"), no_host_sync():
        OTHERS[name]()


def test_an_evaluation_inside_an_epoch_of_its_loader_is_no_wait() -> None:
    with SinkLoader(make_loader()) as loader, no_host_sync():
        batches = [next(iter(loader))]
        make_model().eval(loader)
        batches += list(loader.rest())
    assert [len(labels) for _, labels in batches] == [4, 4, 4]
