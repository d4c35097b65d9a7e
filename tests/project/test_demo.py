"""The demo and the training example, run as a user runs them."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.once_on_oldest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


sys.path.append(str(EXAMPLES / "demo"))  # what demo.py imports lies beside it


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    return load_example("demo/demo")


def run_example(*arguments: object, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=EXAMPLES.parent)


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    output = tmp_path_factory.mktemp("demo")
    finished = run_example(EXAMPLES / "demo" / "demo.py", "--epochs", 2, "--minimum-accuracy", 0.3, "--output", output)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout, json.loads((output / "demo_report.json").read_text()), output


def test_the_demo_trains_equally_with_and_without_torch_sink(short_demo: tuple[str, dict, Path]) -> None:
    printed, report, output = short_demo
    stock, sink = report["stock"], report["torch_sink"]
    assert len(stock["losses"]) == len(sink["losses"]) == 46
    if report["machine"]["gpu"] is None:
        assert stock["losses"] == sink["losses"]
        assert "without a GPU both do the same work" in printed
        assert "equal bits in all 46 steps" in printed
    assert stock["syncs"] == 46
    assert sink["syncs"] < 5
    ratio = report["worker_cost"]["ratio"]
    assert ratio["least"] > 2
    assert f"batch 32: {ratio['p50']:.1f} ({ratio['least']:.1f} to {ratio['most']:.1f}) times less" in printed
    assert (output / "demo_report.png").stat().st_size > 1000


def test_the_demo_prints_a_line_for_each_step(short_demo: tuple[str, dict, Path]) -> None:
    printed, _, _ = short_demo
    lines = [re.fullmatch(r"(.*?) \.\.\. (.* )?\d+\.\d s", line) for line in printed.splitlines()]
    steps = [line[1] for line in lines if line]
    trained = [f"Training with {name}, run {run} of 4" for run, name in enumerate(("stock", "torch_sink", "torch_sink", "stock"), 1)]  # fmt: skip
    measured = [f"Measuring a data worker, round {number} of 7" for number in range(1, 8)]
    wrote = ["Writing 1,797 handwritten digits as JPEG files", "Writing 64 photo-like JPEG files"]
    assert steps == [wrote[0], *trained, wrote[1], *measured]
    assert len(re.findall(r"\.\.\. \.* 46 steps in \d+ s, with imports and test \d+\.\d s\n", printed)) == 4
    assert "\r" not in printed


@pytest.mark.parametrize(
    ("stock", "sink", "is_noise"),
    [([10, 11], [10.5, 12], True), ([10, 11], [8, 9], False), ([10, 11], [12, 13], False), ([10, 11], [11, 12], True)],
)
def test_the_chart_and_the_table_say_the_same_of_speed(
    stock: list[float],
    sink: list[float],
    is_noise: bool,
    short_demo: tuple[str, dict, Path],
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import matplotlib.figure

    _, report, _ = short_demo
    report = copy.deepcopy(report)
    report["stock"]["seconds"], report["torch_sink"]["seconds"] = stock, sink
    (line,) = [line for line in demo.format_table(report).splitlines() if line.startswith("images per second")]
    axes: list[matplotlib.axes.Axes] = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: axes.extend(figure.axes))
    demo.draw_chart(report, Path("unused"))
    chart = axes[1]
    assert ("no difference" in line) == ("no difference" in chart.get_title()) == is_noise
    labels = [text.get_text() for text in chart.texts]
    assert all(label in line for label in labels)
    drawn = [sorted(line.get_ydata()) for line in chart.lines]
    assert [f"{runs[0]:.0f}-{runs[-1]:.0f}" for runs in drawn] == labels
    # What the eye sees: the two lines overlap just where the text says "no difference".
    assert (drawn[0][0] <= drawn[1][-1] and drawn[1][0] <= drawn[0][-1]) == is_noise
    assert chart.get_ylim()[0] == 0


def test_the_demo_prints_the_lines_that_differ(short_demo: tuple[str, dict, Path]) -> None:
    printed, report, _ = short_demo
    added = [line[1:].strip() for line in report["script_diff"] if line.startswith("+")]
    assert 'torch_sink.set_image_backend("device")' in added
    assert len(added) <= 8
    assert all(line in printed for line in added)
    script = (EXAMPLES / "demo" / "sink.py").read_text()
    assert all(line in script for line in added)


def test_the_demo_fails_when_the_runs_differ(short_demo: tuple[str, dict, Path], demo: ModuleType) -> None:
    _, report, _ = short_demo
    report = copy.deepcopy(report)
    report["machine"]["gpu"] = None
    report["largest_loss_difference"] = 1e-9
    assert any("loss curves differ" in fault for fault in demo.find_faults(report, 0.0))
    report["largest_loss_difference"] = 0
    assert demo.find_faults(report, 0.0) == []
    report["torch_sink"]["accuracy"] = 0.96
    assert any("torch_sink run is 96.00%" in fault for fault in demo.find_faults(report, 0.97))


@pytest.mark.parametrize(
    ("losses", "expected"), [([1.0, 2.5], 0.5), ([1.0], float("inf")), ([1.0, float("nan")], float("inf"))]
)
def test_loss_curves_of_unequal_length_or_with_nan_differ(
    losses: list[float], expected: float, demo: ModuleType
) -> None:
    assert demo.largest_difference([1.0, 2.0], losses) == expected


def train(*options: object) -> subprocess.CompletedProcess[str]:
    return run_example(EXAMPLES / "train_image_folder.py", *options)


def test_training_on_a_folder_stops_and_resumes(generated_photos: Path, tmp_path: Path) -> None:
    options = ("--data", generated_photos, "--model", "squeezenet1_1", "--image-size", 64, "--batch-size", 8)
    options += ("--output", tmp_path / "checkpoints", "--workers", 1, "--steps-per-sync", 3)
    first = train(*options, "--epochs", 1)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "44 training and 4 validation images, 4 classes" in first.stdout
    assert "validation accuracy" in first.stdout
    second = train(*options, "--epochs", 2, "--resume")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumed at step 5 from" in second.stdout
    assert "\n5 steps in" in second.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "/no/such/folder"), "there is no such folder"),
        (("--data", str(EXAMPLES / "benchmarks" / "results")), "class folder"),
        (("--data", ".", "--model", "resnet19"), "resnet19 is no classification model of torchvision; close: resnet1"),
        (("--data", ".", "--epochs", "0"), "--epochs 0: at least 1 is needed"),
        (("--data", ".", "--backend", "opencv"), "invalid choice: 'opencv'"),
    ],
)
def test_training_says_what_is_wrong_with_its_arguments(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(options) == 2
    assert message in capsys.readouterr().err


def test_training_on_a_folder_without_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cats").mkdir()
    assert exit_status(("--data", str(tmp_path))) == 2
    assert "cats" in capsys.readouterr().err


def exit_status(options: tuple[str, ...]) -> int:
    try:
        return load_example("train_image_folder").main(options)
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
