"""The benchmarks: their scripts run, their reports say what was measured, and what was not."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fallback_cost  # noqa: E402
import gpu  # noqa: E402
import harness  # noqa: E402
import host_cost  # noqa: E402
import jpeg  # noqa: E402
import kernel_usage  # noqa: E402
import report  # noqa: E402
import report_picture  # noqa: E402
import report_tables  # noqa: E402
import report_worker  # noqa: E402
import support_cost  # noqa: E402
import torch_sink  # noqa: E402
from torch_sink.cli.photos import make_photo  # noqa: E402
from torch_sink.loop.engines import build  # noqa: E402

pytestmark = pytest.mark.once_on_oldest

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;             /* 0x00000a00ff017b82 */
        /*0010*/                   LDG.E.U8 R4, desc[UR4][R2.64] ;    /* 0x0000000402047981 */
        /*0020*/              @!P0 LDG.E.64 R4, desc[UR4][R2.64] ;    /* 0x0000000402047981 */
        /*0030*/               @P1 STG.E desc[UR4][R2.64], R5 ;       /* 0x0000000502007986 */
        /*0040*/              @UP1 STG.E.128 desc[UR4][R2.64], R8 ;   /* 0x0000000502007986 */
"""

SASS_LOOP = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;             /* 0x00000a0000017b82 */
        /*0010*/                   LDG.E R4, desc[UR4][R2.64] ;       /* 0x0000000402047981 */
        /*0020*/               @P1 BRA 0x40 ;                         /* 0x0000000402047981 */
        /*0030*/                   IMAD.MOV.U32 R5, RZ, RZ, RZ ;      /* 0x0000000502007986 */
        /*0040*/              @!P0 BRA 0x10 ;                         /* 0x0000000502007986 */
        /*0050*/                   EXIT ;                             /* 0x0000000502007986 */
        /*0060*/                   BRA 0x60;                          /* 0x0000000502007986 */
"""
AMDGCN_LOOP = """
.LBB0_1:                                ;   in Loop: Header=BB0_2 Depth=1
\tv_add_u32_e32 v1, v1, v2
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
\tv_mov_b32_e32 v2, v1
.Ltmp4:
\ts_cbranch_execz .LBB0_1
; %bb.3:                                ;   in Loop: Header=BB0_2 Depth=1
\ts_branch .LBB0_2
; %bb.4:
\ts_endpgm
"""

PARTS_OF_EVERY_BATCH = (host_cost.RECEIVING, host_cost.DECODING, host_cost.PLACING, host_cost.LAUNCHING)


def test_overlapping_intervals_are_counted_once() -> None:
    assert harness.covered([(0, 10), (2, 5), (8, 12), (20, 21)]) == 13
    assert harness.covered([]) == 0


def test_batches_that_repeat_are_read_in_the_thread_that_trains() -> None:
    class Noted(harness.Repeated):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                threads.add(threading.current_thread())
                yield batch

    threads: set[threading.Thread] = set()
    with torch_sink.SinkLoader(Noted([torch.ones(2), torch.zeros(2)]), batches_per_epoch=3) as loader:
        assert [batch.tolist() for batch in loader] == [[1, 1], [0, 0], [1, 1]]
    assert threads == {threading.current_thread()}


def test_a_row_that_is_not_what_it_is_called_is_not_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec: Any = importlib.util.spec_from_file_location("loop_benchmark", BENCHMARKS / "loop.py")
    loop_benchmark = importlib.util.module_from_spec(spec)  # "loop" is a folder of tests
    monkeypatch.setitem(sys.modules, "loop_benchmark", loop_benchmark)
    spec.loader.exec_module(loop_benchmark)
    monkeypatch.setattr(build, "compiler_problem", lambda: "no compiler is there")
    plain = loop_benchmark.plain(False, None)
    loops = {"plain": plain, "torch.compile": plain}
    loops |= {f"StepLoop {mode}, sink 4": loop_benchmark.sink(mode, 4) for mode in ("eager", "compile")}
    monkeypatch.setattr(loop_benchmark, "loops", lambda cuda: loops)
    case = loop_benchmark.Case(loop_benchmark.make_mlp, (8, 64), steps=8)
    *_, measured = loop_benchmark.measure(case, torch.device("cpu"), None, rounds=1, seconds=0)
    assert list(measured["loops"]) == ["plain", "torch.compile", "StepLoop eager, sink 4"]
    problem = "8 compiled steps were to be measured, and there were 0 captured, 0 compiled, 8 eager"
    assert measured["refused"] == {"StepLoop compile, sink 4": problem}
    loop_benchmark.print_table("mlp", measured)
    assert f"is not published: {problem}" in capsys.readouterr().out


def test_cpu_seconds_count_running_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    before = harness.process_cpu_seconds()
    with subprocess.Popen([sys.executable, "-I", "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert harness.process_cpu_seconds() - before > 0.45
        child.stdin.write(b"\n")


def test_machine_code_is_read() -> None:
    instructions = kernel_usage._SASS.findall(SASS)
    assert instructions == ["LDC", "LDG.E.U8", "LDG.E.64", "STG.E", "STG.E.128"]
    assert [kernel_usage._cuda_bits(name) for name in instructions[1:]] == [8, 64, 32, 128]
    assert [kernel_usage._amd_bits(name) for name in ("global_load_ubyte_d16", "global_store_dwordx4")] == [8, 128]
    assert kernel_usage._cuda_loop(SASS_LOOP) == 4
    assert kernel_usage._cuda_loop(SASS) == 0
    assert kernel_usage._amd_loop(AMDGCN_LOOP) == 4


def test_a_command_ends_within_its_share_and_takes_its_children_along(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import os, sys, time; os.fork(); print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(600)"
    )
    run = gpu.run_command("slow", ["-I", "-S", "-c", code, str(pid)], tmp_path / "log", seconds=3)
    assert run["status"] == "out of time"
    assert run["seconds"] < 60
    with contextlib.suppress(ProcessLookupError):
        child = os.pidfd_open(int(pid.read_text()))  # a process that was killed takes a moment to die
        assert select.select([child], [], [], 20)[0]
        os.close(child)


def test_the_table_of_the_jpeg_kernels_holds_what_the_host_does() -> None:
    file = io.BytesIO()
    make_photo(32, 32, 0).save(file, "JPEG")
    host = jpeg.on_the_host(jpeg.covered_files([file.getvalue()] * 2), rounds=1)
    speed = {"p50": 1.0}
    device = {"images_per_second_kernels": speed, "images_per_second": speed, "stages": {}, "decoded_again": 0}
    written = report_tables.jpeg({"batches": {"2": {"device": device, "host_us_an_image": host}}})
    assert all(f"{part}, us an image" in written for part in host)


def test_the_host_cost_of_two_tiny_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "WARM_UP", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    output, pipeline = tmp_path / "result.json", "v1 train + ColorJitter"
    options = ("--images", "2", "--batch", "2", "--rounds", "1", "--pipelines", pipeline, "--output", str(output))
    monkeypatch.setattr(sys, "argv", ["host_cost.py", *options])
    host_cost.main()
    result = json.loads(output.read_text())
    assert "unfinished" not in result
    assert report.SECTIONS["host_cost"][3](result).startswith("| ")
    for block, cost in result["host_cost"][pipeline].items():
        parts = {name: value["p50"] for name, value in cost["us_an_image"].items()}
        whole = parts.pop(host_cost.IN_ALL)
        expected = pytest.approx(cost["sum_of_parts"]["p50"], rel=0.02)
        assert sum(parts.values()) == expected, "nothing is left out, nothing counted twice"
        copied = {host_cost.COPYING} if block == "shared" else set()
        assert parts.keys() - {host_cost.REST} == {*PARTS_OF_EVERY_BATCH, *copied}
        assert min(whole, *parts.values()) > 0
        assert cost["launches"] > 10
        assert (cost["bytes_copied_an_image"]["files"] > 0) == (block == "shared")


def test_a_gpu_gives_the_figures_that_are_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, (_, _, needs_gpu, _) in report.SECTIONS.items() if needs_gpu]
    assert set(names) < set(report.GPU_FIGURES) < set(report.SECTIONS)
    assert {f"{name}.py" for name in report.GPU_FIGURES} <= {f"{step.name}.py" for step in gpu.STEPS}
    everything = "\n".join(report.missing({}))
    assert all(f"(`{name}.py`)" in everything for name in report.GPU_FIGURES)
    assert report.missing({name: {"machine": {"gpu": "a GPU"}} for name in report.GPU_FIGURES}) == []


def measured(gpu: str | None) -> dict[str, Any]:
    worker_cost = json.loads((report.RESULTS / "worker_cost.json").read_text())
    return {**worker_cost, "machine": {**worker_cost["machine"], "gpu": gpu}}


def test_what_needs_a_gpu_is_not_measured_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoders = {"Pillow": {"images_per_second": {"64": {"p50": 123.0}}, "difference": {"mean_abs": 0.25, "largest": 3}}}
    on_cpu, on_gpu = ({**measured(gpu), "decoders": decoders} for gpu in (None, "a GPU"))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "decode.json").write_text(json.dumps(on_cpu))
    text = report.page(report.read_results())
    assert "Not measured yet on a GPU: `python examples/benchmarks/decode.py`" in text
    assert "123" not in text
    (tmp_path / "decode.json").write_text(json.dumps(on_gpu))
    text = report.page(report.read_results())
    assert "| Pillow | 123 | 0.2500 | 3 |" in text
    assert "\na GPU, load average" in text


@pytest.mark.filterwarnings("ignore")
def test_rows_of_the_support_table_are_pipelines(tmp_path: Path) -> None:
    openers = support_cost.openers_of("32 x 32", tmp_path)
    texts = [
        "v1.CenterCrop",
        "v1.TenCrop",
        "v2.MixUp",
        "v2.RandomZoomOut",
        "v2.SanitizeBoundingBoxes",
        "v1.functional.get_",
    ]
    found = dict(support_cost.cases(openers, (32, 32), texts))
    kinds = {text: {name.rpartition(", ")[2] for name in found if name.startswith(text)} for text in texts}
    everywhere = {"Pillow images", "uint8 tensors", "float tensors"}
    assert kinds == {**dict.fromkeys(texts, everywhere), "v2.MixUp": {"float tensors"}}
    assert "v1.CenterCrop (larger than the image), uint8 tensors" in found
    with torch_sink.image_backend("device", device="meta"):
        made = found["v1.TenCrop, Pillow images"].batch(openers[:3], seed=1)
        assert made.is_recording
        assert made.shape == (3, 10, 3, 8, 8)


def test_the_readme_says_what_its_own_fallback_costs() -> None:
    result = json.loads((report.RESULTS / "fallback_cost.json").read_text())
    (fallback,) = result["fallback_cost"][fallback_cost.WITH]["fallbacks"]
    assert "lambda" in fallback
    assert result["fallback_cost"][fallback_cost.WITHOUT]["fallbacks"] == {}
    readme = (report.ROOT / "README.md").read_text()
    assert "transforms.Lambda(lambda image: image.filter(ImageFilter.MedianFilter()))" in readme
    assert "[transforms.RandomResizedCrop(224), median, transforms.ToTensor()]" in readme
    costs = {("with", "stock"): 12.0, ("with", "torch_sink"): 9.96, ("without", "stock"): 4.0, ("without", "torch_sink"): 0.25}  # fmt: skip
    for (name, side), milliseconds in costs.items():
        result["fallback_cost"][f"{name} the filter"][f"{side}_ms"]["p50"] = milliseconds
    said = " ".join(report_worker.fallback_sentence(result).split())
    assert "costs a data worker 10.0 ms of CPU time instead of 0.25. The filter itself takes 8.0 ms (AMD EPYC" in said


def test_a_batch_that_differs_is_not_measured(tmp_path: Path) -> None:
    wrong = support_cost.Case(lambda image: torch.tensor(torch_sink.get_image_backend() == "device"), torch.stack)
    with pytest.raises(SystemExit, match="a name: the batch differs from stock torchvision's"):
        support_cost.measure("a name", wrong, support_cost.openers_of("32 x 32", tmp_path)[:2], rounds=1)


def test_the_report_lists_what_costs_most() -> None:
    costs = {f"pipeline {number}": {"least": number, "p50": number, "most": number} for number in range(12)}
    rows = {name: {"stock_us": 30.0, "torch_sink": cost, "on_cpu": cost} for name, cost in costs.items()}
    text = report.SECTIONS["support_cost"][3]({"support_cost": {"32 x 32": rows}})
    assert "32 x 32, recorded: 12 pipelines, 10 of them above 1.15." in text
    assert "| pipeline 11 | 30 | 11.00 (11.00 to 11.00) |\n| pipeline 10 |" in text
    assert "pipeline 2 " in text
    assert "pipeline 1 " not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("decode.py", ("--images", "8", "--batches", "4", "--rounds", "1")),
        ("train.py", ("--images", "8", "--workers", "1", "--steps", "2", "--batch-size", "2")),
        ("loader.py", ("--images", "8", "--workers", "1", "--rounds", "1", "--epochs", "1", "--batch-size", "2")),
        ("scale.py", ("--images", "4", "--rounds", "1")),
        ("worker_cost.py", ("--images", "8", "--rounds", "1", "--rows", "MNIST eval", "start")),
        ("fallback_cost.py", ("--images", "8", "--rounds", "1")),
        ("support_cost.py", ("--rounds", "1", "--rows", "v1.CenterCrop,", "functional.hflip, uint8")),
        ("slabs.py", ("--images", "8", "--rounds", "1", "--batches", "8", "--batch-size", "16")),
        (
            "epoch_border.py",
            (
                "--images",
                "4",
                "--rounds",
                "1",
                "--batches",
                "2",
                "--batch-size",
                "2",
                "--workers",
                "1",
                "--epochs",
                "2",
                "--step-seconds",
                "0.01",
            ),
        ),
    ],
)
def test_a_script_runs_small(script: str, options: tuple[str, ...], tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, BENCHMARKS / script, *options, "--output", output]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(output.read_text())
    assert result["machine"]["releases"]["torch"]
    section = report.SECTIONS[script.removesuffix(".py")][3]
    assert "| --- |" in section(result)


@pytest.mark.parametrize("text", ["in `.venv`, about 4 minutes, 6 GB):", "(takes about 4 minutes and 6 GB)."])
def test_what_a_new_environment_takes_is_what_was_measured(text: str) -> None:
    written = report.with_setup(text, {"setup_seconds": 100.0, "bytes": 7_190_000_000})
    assert written == text.replace("4", "2").replace("6", "7")


def test_the_picture_of_a_jpeg_s_way_shows_the_results() -> None:
    """`report.py --check`, which test_readme.py runs, holds the committed picture to them."""
    results = report_picture.read_figures(report.RESULTS)
    shown = report_picture.picture(results)
    ElementTree.fromstring(shown)
    kernels = [name for names in report_picture.DECODER.values() for name in names]
    for lanes in results["kernels"]["counts"]["decoder"]:
        assert sorted([*kernels, "all"]) == sorted(row["name"] for row in lanes), "each kernel in one step"
    results["worker_cost"]["worker_cost"][f"{report_picture.PIPELINE}, batch 256"]["slabs_ms"]["p50"] = 123.45
    assert "123.45 ms" in report_picture.picture(results)
    assert "123.45 ms" not in shown
