"""The command line: what it prints, what it writes, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import ImageFilter, JpegImagePlugin
from torchvision import transforms

import torch_sink
from torch_sink.cli import doctor, main, pipelines, worker_cost

pytestmark = pytest.mark.once_on_oldest


def test_python_m_torch_sink_runs_the_doctor() -> None:
    command = [sys.executable, "-m", "torch_sink", "doctor"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for subject in ("python", "torch", "torchvision", "triton", "accelerator", "decoder", "step loop", "kernels"):
        assert f" {subject} " in finished.stdout
    assert "Everything that is needed works." in finished.stdout


def test_doctor_names_what_is_broken_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(doctor.OLDEST, "triton", "99.1")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "is too old, triton>=99.1 is needed" in printed
    assert "pip install -U 'triton>=99.1'" in printed
    assert "1 broken" in printed


@pytest.mark.parametrize(
    ("release", "state"), [("11.2.0", "broken"), ("11.2.1", "ok"), ("11.3", "ok"), ("9.5", "broken")]
)
def test_doctor_takes_the_releases_that_pip_takes(release: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.__version__", release)
    monkeypatch.setitem(doctor.OLDEST, "pillow", "11.2.1")
    monkeypatch.setattr(doctor, "_run", lambda check: doctor.Finding(check.__name__, "ok", ""))
    (pillow,) = (finding for finding in doctor.examine() if finding.subject == "pillow")
    assert pillow.state == state


def test_doctor_reports_a_torchvision_that_does_not_fit_torch(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    error = "operator torchvision::nms does not exist"
    (tmp_path / "torchvision" / "__init__.py").write_text(f"raise RuntimeError({error!r})")
    command = [sys.executable, "-m", "torch_sink", "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert finished.returncode == 1, finished.stderr
    assert f"cannot be imported: RuntimeError: {error}" in finished.stdout
    assert "pip install -U torch torchvision" in finished.stdout


def test_doctor_goes_on_after_a_check_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> doctor.Finding:
        raise RuntimeError("no driver")

    monkeypatch.setattr(doctor, "_check_device", fail)
    monkeypatch.setitem(doctor.EXTRAS, "no_such_extra", "a test")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no driver" in printed
    assert "step loop" in printed
    assert "pip install no_such_extra" in printed


def test_explain_prints_the_plan_and_decodes_nothing(
    generated_photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoded = []
    stock_load = JpegImagePlugin.JpegImageFile.load

    def load(image: JpegImagePlugin.JpegImageFile) -> object:
        decoded.append(image)
        return stock_load(image)

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", load)
    assert main(["explain", str(generated_photos / "class_0"), "--batch-size", "4", "--device", "cuda"]) == 0
    printed = capsys.readouterr().out
    assert "a batch of 4 samples" in printed
    assert "-> float32 [4, 3, 224, 224]" in printed
    assert "launch 1: 4 x resample" in printed
    assert "none: every transform can run on the GPU" in printed
    assert decoded == []
    assert torch_sink.get_image_backend() == "PIL"


def test_support_lists_torchvisions_transforms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support"]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line}
    assert rows["v1.RandomResizedCrop"].split()[1] == "kernel"
    assert {"v1.ToTensor", "v2.Normalize", "v2.Lambda", "v1.functional.resize"} <= rows.keys()


@pytest.mark.parametrize(
    ("names", "status", "rows", "said"),
    [
        (["COLORJ"], 0, ["v1.ColorJitter", "v2.ColorJitter"], ""),
        (["v2.functional.hflip", "tencrop"], 0, ["v1.TenCrop", "v2.TenCrop", "v2.functional.hflip"], ""),
        (["ColorJitters", "tencrop"], 2, ["v1.TenCrop", "v2.TenCrop"], "has 'ColorJitters' in its name; near: ColorJitter"),
        (["v1.functional.rezise"], 2, [], "has 'v1.functional.rezise' in its name; near: resize"),
        (["xyz"], 2, [], "has 'xyz' in its name: without a name, the command lists them all"),
    ],
)  # fmt: skip
def test_support_of_what_is_named(
    names: list[str], status: int, rows: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["support", *names]) == status
    printed = capsys.readouterr()
    head, *lines = printed.out.partition("\n\n")[0].splitlines() or [""]
    assert [line.split()[0] for line in lines] == rows
    assert head.startswith("  transform or functional") is bool(rows)
    assert said in printed.err
    assert bool(printed.err) is bool(said)


def test_bench_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--quick", "--workers", "0"]) == 0
    written = capsys.readouterr()
    printed = written.out
    assert "16 generated images, as no folder was given, " in printed
    steps = [re.fullmatch(r"(.*) \.\.\. \d+\.\d s", line) for line in written.err.splitlines()]
    assert [each and each[1] for each in steps] == [
        "Writing 16 photo-like JPEG files, as no folder is given",
        "Looking at 16 files",
        "Recording a batch",
        "Comparing a batch with stock torchvision's",
        "Measuring a data worker, round 1 of 2",
        "Measuring a data worker, round 2 of 2",
        "Measuring images a second, turn 1 of 1",
    ]
    assert (tmp_path / "torch_sink_bench.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "torch_sink_bench.json").read_text())
    assert report["machine"]["releases"]["torch"]
    assert report["given"] is False
    assert ("the images a second, end to end" in printed) == (report["machine"]["gpu"] is not None)
    assert set(report["equal"].values()) == {True}
    for name, cost in report["worker_cost"].items():
        assert name in printed
        assert worker_cost.spread(cost["ratio"]) in printed
        assert cost["stock_ms"]["p20"] <= cost["stock_ms"]["p50"] <= cost["stock_ms"]["p80"]
    for run in ("stock", "torch_sink"):
        assert f"{report['loader'][run]['images_per_second']:,.0f}" in printed


def test_worker_cost_reports_fallbacks(generated_photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_lambda() -> transforms.Compose:
        median = transforms.Lambda(lambda image: image.filter(ImageFilter.MedianFilter()))
        return transforms.Compose([median, transforms.CenterCrop(8), transforms.ToTensor()])

    monkeypatch.setitem(pipelines.PIPELINES, "with lambda", with_lambda)
    pipeline = pipelines.open_pipeline("with lambda", generated_photos, batch_size=4)
    assert sum(worker_cost.measure_worker_cost(pipeline, rounds=1, images=4)["fallbacks"].values()) == 4
