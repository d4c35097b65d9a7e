"""Several features replace one function of torch: in any order, undone in any order, and known to data workers."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import worker
from torchvision import datasets, transforms

import torch_sink
from torch_sink.common.patches import Patches

pytestmark = pytest.mark.halved


class Base:
    def inherited(self) -> list[str]:
        return ["stock"]


class Owner(Base):
    def usual(self) -> list[str]:
        return ["stock"]

    @staticmethod
    def fixed() -> list[str]:
        return ["stock"]


KEYS = {"key": lambda: ["stock"]}
CALLS: dict[str, tuple[Any, Callable[[], list[str]]]] = {
    "usual": (Owner, lambda: Owner().usual()),
    "inherited": (Owner, lambda: Owner().inherited()),
    "fixed": (Owner, lambda: Owner.fixed()),
    "key": (KEYS, lambda: KEYS["key"]()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("leaving", [*itertools.permutations("abc")])
def test_layers_go_in_any_order(name: str, leaving: tuple[str, ...]) -> None:
    owner, call = CALLS[name]

    def stored() -> dict[str, int]:
        return {key: id(value) for key, value in (owner if owner is KEYS else vars(owner)).items()}

    def layer(letter: str) -> Callable[[Any], Any]:
        def make(below: Any) -> Any:
            stand_in = lambda *args: [*below(*args), letter]  # noqa: E731
            return staticmethod(stand_in) if name == "fixed" else stand_in

        return make

    before, left = stored(), ["a", "b", "c"]
    features = {letter: Patches() for letter in left}
    for letter, feature in features.items():
        feature.replace(owner, name, layer(letter))
    for letter in leaving:
        assert call() == ["stock", *left]
        features[letter].undo()
        left.remove(letter)
    assert call() == ["stock"]
    assert stored() == before


def worker_spans(path: Path) -> int:
    """Batches that a timeline saw data workers make."""
    found = json.loads(path.with_suffix(".json").read_text())["traceEvents"]
    return sum(event["ph"] == "X" and event["name"] == "make a batch" for event in found)


def read_all(photos: Path, method: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    data = datasets.ImageFolder(photos, transforms.Compose([transforms.RandomResizedCrop(8), transforms.ToTensor()]))
    first = torch.utils.data.Subset(data, range(4))
    return [images for images, _ in DataLoader(first, 2, num_workers=1, multiprocessing_context=method)]


ORDERS: list[Any] = [*itertools.product(["fork"], ["backend", "timeline"], ["backend", "timeline"])]
ORDERS += [("forkserver", "backend", "timeline"), ("forkserver", "timeline", "timeline")]


@pytest.mark.parametrize(("method", "entering", "leaving"), ORDERS)
def test_a_timeline_and_the_image_backend(
    method: str, entering: str, leaving: str, generated_photos: Path, tmp_path: Path
) -> None:
    """Whichever begins or ends first, workers record images, the timeline sees them, and torch is as it was."""
    before, expected = worker._worker_loop, read_all(generated_photos, "fork")
    features: dict[str, Callable[[], Any]] = {
        "backend": lambda: torch_sink.image_backend("device", device="meta"),
        "timeline": lambda: torch_sink.timeline(tmp_path / "run.html"),
    }
    order = [entering, *(features.keys() - {entering})]
    with ExitStack() as stack:
        held = {name: stack.enter_context(ExitStack()) for name in order}
        for name in order:
            held[name].enter_context(features[name]())
        batches = read_all(generated_photos, method)
        assert all(type(batch) is torch_sink.LazyBatch for batch in batches), "the workers recorded"
        held[leaving].close()
        after = read_all(generated_photos, "fork")
        assert (type(after[0]) is torch_sink.LazyBatch) == (leaving == "timeline")
        if leaving == "backend":
            assert all(torch.equal(batch, other) for batch, other in zip(after, expected, strict=True))
    assert worker_spans(tmp_path / "run.html") == (2 if leaving == "timeline" else 4)
    assert worker._worker_loop is before


LATE_IMPORT = """
import sys
import torch_sink
from torchvision import datasets, transforms

def main(path):
    torch_sink.set_image_backend("device", device="meta")
    from torchdata.stateful_dataloader import StatefulDataLoader
    from timm.data.auto_augment import rand_augment_transform  # looks at Pillow's modules when it is imported
    steps = [transforms.Resize((8, 8)), rand_augment_transform("rand-m9-n2", {}), transforms.ToTensor()]
    data = datasets.ImageFolder(path, transforms.Compose(steps))
    loader = StatefulDataLoader(data, 2, num_workers=1, multiprocessing_context="spawn")
    print(type(next(iter(loader))[0]) is torch_sink.LazyBatch, str(torch_sink.fallback_report()).count("\\n"))

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.once_on_oldest
def test_libraries_that_are_imported_after_the_backend_was_set(generated_photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    pytest.importorskip("timm")
    script = tmp_path / "late.py"
    script.write_text(LATE_IMPORT)
    command = [sys.executable, str(script), str(generated_photos)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split()[0] == "True"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_timeline_shows_the_workers_of_torchdata(generated_photos: Path, tmp_path: Path) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    data = datasets.ImageFolder(
        generated_photos, transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    )
    with torch_sink.timeline(tmp_path / "run.html"):
        for _ in module.StatefulDataLoader(torch.utils.data.Subset(data, range(4)), 2, num_workers=1):
            pass
    assert worker_spans(tmp_path / "run.html") == 2


def test_a_timeline_that_cannot_be_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback changes the folder; the disk is full at the end."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [(torch.randn(4, 3), torch.tensor([0, 1, 1, 0]))] * 2
    leave = torch_sink.LambdaCallback(on_train_begin=lambda context: os.chdir("/"))
    loop.run(data, callbacks=leave, timeline="run.html")
    assert (tmp_path / "run.html").stat().st_size > 1000

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch_sink.tracing.write_page", full)
    assert loop.run(data, timeline=tmp_path / "again.html").steps == 2
    assert "No space left" in caplog.text
    with pytest.raises(ZeroDivisionError), torch_sink.timeline(tmp_path / "again.html"):
        _ = 1 / 0
