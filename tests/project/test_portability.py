"""The CPU path runs where neither Triton nor forks exist, as on a laptop with macOS or Windows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_sink.cli.photos import write_photos

pytestmark = pytest.mark.once_on_oldest

ROOT = Path(__file__).resolve().parents[2]

# Read by every interpreter at its start, those of spawned workers included.
HIDE = """
import os
from importlib.machinery import PathFinder

NAMES = ("fork", "register_at_fork", "sched_getaffinity", "pwrite", "pread", "O_CLOEXEC")
stock = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    if name.partition(".")[0] == "triton":
        return None
    if name == "torch_sink":
        import torch, torchvision  # they look at sys.platform, which says Linux here
        for missing in NAMES:
            vars(os).pop(missing, None)
    return stock(name, path, target)

PathFinder.find_spec = staticmethod(find_spec)
"""

TRAINING = """
import sys
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

import torch_sink

if __name__ == "__main__":
    steps = [transforms.RandomResizedCrop(32), transforms.RandomHorizontalFlip(), transforms.ToTensor()]

    def losses(backend):
        with torch_sink.image_backend(backend):
            torch.manual_seed(0)
            photos = datasets.ImageFolder(sys.argv[1], transforms.Compose(steps))
            loader = DataLoader(photos, 4, shuffle=True, num_workers=1, multiprocessing_context="spawn")
            model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loop = torch_sink.StepLoop(model, torch.nn.functional.cross_entropy, optimizer)
            with torch_sink.SinkLoader(loader) as batches:
                return loop.run(batches, epochs=1).losses

    assert torch.equal(losses("PIL"), losses("device"))
    assert "triton" not in sys.modules
    print("equal losses;", torch_sink.fallback_report())
"""


@pytest.fixture
def laptop(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds neither Triton nor what only Linux has."""
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run(code: str, environment: dict[str, str], folder: Path, *arguments: str) -> str:
    script = folder / "script.py"
    script.write_text(code)
    finished = subprocess.run(
        [sys.executable, script, *arguments], env=environment, capture_output=True, text=True, timeout=240
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_training_equals_stock(laptop: dict[str, str], tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", count=8)
    assert "equal losses; no fallbacks" in run(TRAINING, laptop, tmp_path, str(tmp_path / "photos"))


def test_the_doctor_does_not_ask_for_triton(laptop: dict[str, str], tmp_path: Path) -> None:
    report = run("from torch_sink.cli import main\nmain(['doctor'])", laptop, tmp_path)
    assert re.search(r"^missing triton +not installed: pixels are made on the CPU", report, re.MULTILINE)
    assert "Everything that is needed works." in report


def test_triton_is_required_on_linux_only() -> None:
    required = re.findall(r'"(triton[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert [line.partition(";")[2].strip() for line in required if line.startswith("triton>")] == [
        "sys_platform == 'linux'"
    ]
