"""`with torch_sink.explain():` around programs as they are: they run as they would without, and end with a report."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import torch_sink
from torch_sink.cli import explain as command
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import pipeline_of

pytestmark = pytest.mark.once

FILES, SIDE = 6, 32
TRANSFORM = transforms.Compose([transforms.RandomResizedCrop(SIDE), transforms.RandomHorizontalFlip(), transforms.ToTensor()])  # fmt: skip
OFF = "the image backend was off"


class OnlyOnce(IterableDataset[float]):
    values = iter([0.0] * 8)

    def __iter__(self) -> Iterator[float]:
        return self.values


@pytest.fixture(autouse=True)
def _few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MEASURED_IMAGES", FILES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    (root / "one").mkdir()
    for seed in range(FILES):
        make_photo(90, 60, seed).save(root / "one" / f"{seed}.jpg")
    return root


def loader_of(folder: Path, **options: Any) -> DataLoader[Any]:
    return DataLoader(ImageFolder(str(folder), TRANSFORM), 3, shuffle=True, **options)


def plain(folder: Path, **options: Any) -> list[torch.Tensor]:
    """A program of two epochs, which draws before, between and after."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    loader = loader_of(folder, **options)
    return [image for _ in range(2) for image, _ in loader]


def draws() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}])
@pytest.mark.sampled(1)
def test_a_plain_loop_runs_as_without(
    options: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = torch.Generator()
    stock, stock_draws = (
        plain(folder, generator=generator.manual_seed(5), **options),
        [*draws(), generator.initial_seed()],
    )
    stock_state = generator.get_state()
    with torch_sink.explain("cuda"):
        batches = plain(folder, generator=generator.manual_seed(5), **options)
    assert all(map(torch.equal, batches, stock))
    assert [*draws(), generator.initial_seed()] == stock_draws
    assert torch.equal(generator.get_state(), stock_state)
    printed = capsys.readouterr().out
    assert OFF in printed
    assert "Pipeline DataLoader of ImageFolder" in printed
    assert "read 2 times in this run" in printed
    assert printed.count("The workers make ") == 1
    assert ("the loader has none\n" in printed) == (not options)
    assert ("; 1 data worker\n" in printed) == bool(options)
    found = command.explain(pipeline_of("again", loader_of(folder)), "cuda")
    launches = next(part.title for part in command.report_of(found).parts if "Launches" in part.title)
    for line in (launches, "none: every transform can run on the GPU", f"float32 [3, 3, {SIDE}, {SIDE}]"):
        assert line in printed
    assert re.search(r"a sample costs it [\d.]+ ms of CPU time", printed)


@pytest.mark.usefixtures("unmeasured")
def test_the_step_loop_and_what_falls_back_in_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def losses() -> list[float]:
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE**2, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with torch_sink.image_backend("device", device="cpu"), torch_sink.SinkLoader(loader_of(folder)) as loader:
            loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, optimizer)
            found = loop.run(loader, epochs=2).losses.tolist()
            np.asarray(loader.dataset.loader(loader.dataset.samples[0][0]))
        return found

    with torch_sink.explain("cuda"):
        watched = losses()
        before = torch_sink.fallback_report().counts
        assert before
    assert watched == losses()
    printed = capsys.readouterr().out
    assert OFF not in printed
    assert "read 2 times in this run" in printed
    assert printed.count("Pipeline ") == 1  # the copy that a SinkLoader reads is the loader
    assert "1 x pixels of a Pillow image: read by other code" in printed.partition("Pipeline")[0]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata, on the newest torch
def test_loaders_of_torchdata_and_those_in_sink_loaders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ImageFolder(str(folder), TRANSFORM)
    with (
        torch_sink.SinkLoader(StatefulDataLoader(data, 3, num_workers=1)) as in_a_sink,
        torch_sink.explain("cuda"),
    ):
        assert [len(labels) for _, labels in StatefulDataLoader(data, 2)] == [2, 2, 2]
        assert [len(labels) for _, labels in in_a_sink] == [3, 3]
    printed = capsys.readouterr().out
    assert printed.count("Pipeline StatefulDataLoader of ImageFolder\n") == printed.count("read once in this run") == 2
    for size in (2, 3):
        assert f"float32 [{size}, 3, {SIDE}, {SIDE}]" in printed


@pytest.mark.usefixtures("unmeasured")
def test_the_policy_of_a_sink_loader_and_the_first_loaders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = folder / "one" / "broken.jpg"
    broken.write_bytes(b"no image")
    try:
        with torch_sink.explain("cuda"):
            for _ in range(6):
                with torch_sink.SinkLoader(loader_of(folder), on_decode_error="skip") as loader:
                    assert sum(len(labels) for _, labels in loader) == FILES
    finally:
        broken.unlink()
    printed = capsys.readouterr().out
    assert printed.count("Pipeline DataLoader of ImageFolder\n") == 4
    assert printed.endswith("\nand 2 more loaders\n")
    assert "cannot be looked at" not in printed


def test_the_report_leaves_the_counts_of_the_run_alone(folder: Path) -> None:
    with torch_sink.image_backend("device", device="cpu"):
        with torch_sink.explain():
            np.asarray(ImageFolder(str(folder))[0][0])
            list(loader_of(folder))
            counts = torch_sink.fallback_report().counts
        assert torch_sink.fallback_report().counts == counts != {}
        assert torch_sink.get_image_backend() == "device"


@pytest.mark.usefixtures("unmeasured")
def test_ctrl_c_ends_with_the_report_and_an_error_without(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_into(error: BaseException) -> None:
        with torch_sink.explain():
            next(iter(loader_of(folder)))
            raise error

    stock = DataLoader.__iter__
    with pytest.raises(KeyboardInterrupt):
        run_into(KeyboardInterrupt())
    assert "read once in this run" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        run_into(ZeroDivisionError())
    assert capsys.readouterr().out == ""
    assert DataLoader.__iter__ is stock


@pytest.mark.usefixtures("unmeasured")
def test_what_cannot_be_looked_at_does_not_end_the_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch_sink.explain():
        assert len(list(DataLoader(OnlyOnce(), 4))) == 2
        list(loader_of(folder))
    printed = capsys.readouterr().out
    assert "DataLoader of OnlyOnce, a stream that may be read only once: it cannot be looked at: " in printed
    assert "Pipeline DataLoader of ImageFolder\n" in printed
    with torch_sink.explain():
        pass
    assert "no DataLoader was read inside of the block" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: torch_sink.explain("b300"), ValueError, "'b300' is not known; \"cuda\" says what"),
        (lambda: torch_sink.explain(DataLoader([1])), TypeError, "DataLoader is not known; put `with torch_sink.expl"),
    ],
)
def test_a_mistake_is_said_at_once(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@pytest.mark.slow
def test_it_is_imported_when_it_is_asked_for() -> None:
    code = "import sys, torch_sink; assert not {'torchvision', 'torch_sink.cli'} & {*sys.modules}; torch_sink.explain"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
