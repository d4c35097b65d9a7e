"""A save goes a short way, and checkpoints of earlier versions load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from call_path import CallPath
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from loop.earlier import STEPS, STEPS_BEFORE, make_loader, make_loop
from torch_sink import Model, ModelCheckpoint, SinkLoader

EARLIER = Path(__file__).with_name("earlier_checkpoint")


@pytest.mark.parametrize("wraps", [False, True])
def test_a_save_enters_few_files_and_few_of_them_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wraps: bool
) -> None:
    path, save = CallPath(), ModelCheckpoint._save
    monkeypatch.setattr(ModelCheckpoint, "_save", lambda *args, **kwargs: path.follow(save, *args, **kwargs))
    network = nn.Linear(3, 2)
    model = Model(network, functional.cross_entropy, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9))
    loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.arange(16) % 2), 4, shuffle=True)
    model.train(1, SinkLoader(loader) if wraps else loader, ModelCheckpoint(directory=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["CKP-00000004"]
    assert len(path.calls) <= 64  # four of them for what is trained outside of the model
    # Two of them for what the loader's attributes are now, and one for what is trained outside of the model.
    assert len(set(path.files)) <= 10, path.files
    assert path.returns <= 10, path.files  # two of them from what is trained outside of the model


@pytest.mark.parametrize("wraps", [False, True])
def test_a_save_reads_the_random_generators_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wraps: bool) -> None:
    """They are part of the training, and, where the dataset shares them, of the position in the data."""
    reads, read = [], torch.get_rng_state
    network = nn.Linear(3, 2)
    model = Model(network, functional.cross_entropy, torch.optim.SGD(network.parameters(), lr=0.1))
    loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.arange(16) % 2), 4, shuffle=True)
    save = ModelCheckpoint._save

    def watched(*args: Any, **kwargs: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_rng_state", lambda: (reads.append(1), read())[1])
            save(*args, **kwargs)

    monkeypatch.setattr(ModelCheckpoint, "_save", watched)
    model.train(1, SinkLoader(loader) if wraps else loader, ModelCheckpoint(directory=tmp_path))
    state = torch.load(tmp_path / "CKP-00000004" / "state.pt")
    assert len(reads) == 1
    assert bytes(state["loader"]["random_state"].tolist()).endswith(bytes(state["random"]["torch"].tolist()))


def test_a_subclass_adds_to_the_position_that_is_saved(tmp_path: Path) -> None:
    class Noting(SinkLoader):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "note": 7}

    loop, loader = make_loop(), Noting(make_loader())
    loop.run(loader, max_steps=2)
    loop.save(tmp_path, loader)
    state = torch.load(tmp_path / "CKP-00000002" / "state.pt")
    assert (state["loader"]["note"], state["loader"]["batches"]) == (7, 2)
    torch.rand(3)
    assert not torch.equal(loader.state_dict()["random_state"], state["loader"]["random_state"])


class Seen:
    """Wraps a loader, and notes the first value of each batch."""

    def __init__(self, loop: Any) -> None:
        self.values: list[float] = []
        loop.model.register_forward_pre_hook(lambda _, inputs: self.values.append(float(inputs[0].flatten()[0])))


def test_a_checkpoint_of_an_earlier_version_is_gone_on_with() -> None:
    whole, data = make_loop(), make_loader()
    seen = Seen(whole)
    history = whole.run(data, epochs=2)
    assert history.steps == STEPS
    resumed, data = make_loop(), make_loader()
    later = Seen(resumed)
    assert resumed.resume(EARLIER, data) == STEPS_BEFORE
    rest = resumed.run(data, epochs=2)
    assert later.values == seen.values[STEPS_BEFORE:], "other batches"
    # The five steps before were made on another machine, whose last bits differ; draws of dropout must not.
    torch.testing.assert_close(rest.losses, history.losses[STEPS_BEFORE:], rtol=1e-4, atol=1e-5)
    assert torch.equal(rest.learning_rates, history.learning_rates[STEPS_BEFORE:])
    assert torch.equal(rest.overflows, history.overflows[STEPS_BEFORE:])
    for one, other in ((resumed.model, whole.model), (resumed.ema_model(), whole.ema_model())):
        for value, wanted in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5)
    scales = [{name: float(value) for name, value in loop.scaler.state_dict().items()} for loop in (resumed, whole)]
    assert scales[0] == scales[1]
