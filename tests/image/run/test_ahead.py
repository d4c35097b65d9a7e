"""Kernels that are compiled ahead of time are those that launches find in Triton's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from simulators.executor.target import TargetDriver, target_only
from simulators.fake_cuda import FakeCuda, fake_cuda
from torch.utils.data import default_collate
from torchvision.transforms import v2
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend as backend_for

import torch_sink
from torch_sink.cli import main
from torch_sink.cli.photos import make_photo
from torch_sink.errors import SinkError
from torch_sink.image.core.proof import Proof, Verdict
from torch_sink.image.decode.jpeg_block import lay_out_jpegs, plan_jpegs
from torch_sink.image.decode.jpeg_decoder import launch_jpegs
from torch_sink.image.decode.jpeg_proof import cases
from torch_sink.image.program.program import Wanted
from torch_sink.image.run import ahead
from torch_sink.image.run.device import make_on_device
from torch_sink.triton_kernels.jpeg import jpeg_variants
from torch_sink.triton_kernels.launching import compiler_options
from torch_sink.triton_kernels.shapes import LANE_SHAPES

__all__ = ["fake_cuda"]

TARGET = GPUTarget("cuda", 90, 32)
META = torch.device("meta")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names in Triton's cache of what would be compiled; nothing is."""
    found: set[str] = set()

    def name(source: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> mock.Mock:
        # Of what Triton's key of its cache is made, what differs between two launches in one process.
        options = backend_for(target).parse_options(dict(options)).hash()
        found.add(f"{source.name} {source.hash()} {options}")
        return mock.Mock()

    monkeypatch.setattr(triton.compiler, "compile", name)
    return found


def compile_everything() -> None:
    for number in range(len(ahead.every_variant(TARGET))):
        assert not ahead.compile_variant(number, TARGET).error


def launches(launch: Callable[[], object]) -> set[tuple[str, str]]:
    """Name and specialization of each kernel that `launch` would compile; nothing is."""
    found: set[tuple[str, str]] = set()

    def note(*, fn: Any, compile: Any, **_: Any) -> bool:
        found.add((fn.name, compile["specialization_data"]))
        return True  # which leaves out the compilation, and the launch

    with mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note), ahead._compiling_for(TARGET):
        launch()
    return found


def test_what_is_compiled_ahead_is_what_a_launch_looks_for(wanted: set[str]) -> None:
    every_variant = ahead.every_variant(TARGET)
    for variant in every_variant:
        kinds = [variant.signature[name] for name in variant.kernel.arg_names if name not in variant.constants]
        types = [ahead._DTYPES[kind.removeprefix("*")] if kind.startswith("*") else None for kind in kinds]
        arguments = [64 if kind is None else torch.empty(64, dtype=kind) for kind in types]
        options = compiler_options(variant.warps, variant.registers)
        with ahead._compiling_for(TARGET):
            variant.kernel[(1,)](*arguments, **variant.constants, **options)
    launched = set(wanted)
    assert len(launched) == len(every_variant)
    wanted.clear()
    compile_everything()
    assert wanted == launched


def launch_decoder() -> None:
    """Launches what decodes JPEG files, in every shape that a batch may choose."""
    laid_out = lay_out_jpegs([source for source, _ in cases()])
    for shape in LANE_SHAPES:
        plan, _ = plan_jpegs(laid_out, laid_out.whole_images(), laid_out.chunks.add_array, shape)
        block, pixels = (torch.empty(size, dtype=torch.uint8, device=META) for size in (plan.size, plan.pixels_bytes))
        launch_jpegs(plan, block, pixels)


def launches_of_batch(pipeline: Any, dtype: torch.dtype = torch.float32) -> set[tuple[str, str]]:
    with torch_sink.image_backend("device", device="meta"):
        batch = default_collate([pipeline(make_photo(40, 30, seed)) for seed in range(2)])
        return launches(lambda: make_on_device(batch.program, Wanted(META, dtype)))


def test_every_launch_is_among_the_listed_variants() -> None:
    everything = launches(compile_everything)
    decoder = launches(launch_decoder)
    assert len(decoder) == len(list(jpeg_variants(TARGET.warp_size)))
    assert decoder < everything
    head = [v2.RandomResizedCrop(24), v2.ColorJitter(0.4, 0.4, 0.4, 0.1)]
    tail = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.RandomErasing(p=1)]
    batch = launches_of_batch(v2.Compose([*head, *tail]))
    assert len(batch) >= 2
    assert batch < everything


def test_the_type_of_the_result_compiles_only_what_writes_it() -> None:
    pipeline = v2.Compose([v2.Resize(24), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    by_type = [launches_of_batch(pipeline, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    assert [len(found) for found in by_type] == [2, 2, 2]
    assert by_type[0] == by_type[2], "float64 is made of what the kernels write as float32"
    assert len(set.union(*by_type)) == 1 + 2


DC = next(at for at, variant in enumerate(ahead.every_variant(TARGET)) if variant.kernel.__name__ == "add_dc_kernel")


def test_a_kernel_is_compiled_once(cache: Path) -> None:
    first = ahead.compile_variant(DC, TARGET)
    assert (first.was_there, first.error) == (False, "")
    assert list(cache.rglob("add_dc_kernel.cubin"))
    assert ahead.compile_variant(DC, TARGET).was_there


def test_a_kernel_that_cannot_be_compiled_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ahead.every_variant(TARGET)[DC]._replace(warps=3)
    monkeypatch.setattr(ahead, "every_variant", lambda target: [broken])
    outcome = ahead.compile_variant(0, TARGET)
    assert "num_warps must be a power of 2" in outcome.error
    assert (outcome.name, outcome.was_there) == (broken.name, False)


def test_kernels_are_loaded_on_the_device_at_hand(
    fake_cuda: FakeCuda, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where Triton has a C compiler build what launches a kernel, no batch waits for that either."""
    dc = ahead.every_variant(TARGET)[DC]
    broken = dc._replace(name="broken", warps=3)
    built: list[str] = []
    stock = TargetDriver.launcher_cls

    def build(driver: TargetDriver, source: Any, metadata: Any) -> Any:
        built.append(metadata.name)
        return stock(driver, source, metadata)

    monkeypatch.setattr(TargetDriver, "launcher_cls", build)
    monkeypatch.setattr(TargetDriver, "get_current_device", lambda driver: "one that nothing was loaded on")
    monkeypatch.setattr(Proof, "verdict", lambda proof, device: Verdict(True))
    monkeypatch.setattr(ahead, "compile_all", lambda target: iter([]))
    launched: list[Any] = []
    with target_only(launched.append):
        for variants, status in (([dc], 0), ([broken, dc], 1)):
            monkeypatch.setattr(ahead, "every_variant", lambda target, variants=variants: variants)
            assert main(["warm"]) == status
            assert built == ["add_dc_kernel"]
        monkeypatch.setattr(ahead, "every_variant", lambda target: [dc])
        monkeypatch.setattr(Proof, "verdict", lambda proof, device: Verdict(False, "3 of 12 values differ"))
        assert main(["warm"]) == 1, "a build that is wrong is no success"
    assert launched == []
    printed = capsys.readouterr()
    assert "broken cannot be loaded: " in printed.err
    assert "Stock code replaces kernels here: 3 of 12 values differ" in printed.out


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    assert ahead.target_named("cuda:90") == TARGET
    with pytest.raises(ValueError, match="give for instance cuda:80"):
        ahead.target_named("sm_90")
    with pytest.raises(SinkError, match="launches nothing on hip:gfx942"):
        ahead.target_named("hip:gfx942")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert ahead.target_named(None) == TARGET
    monkeypatch.setattr(torch.version, "hip", "7.1")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", warp_size=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    assert ahead.target_named(None) == GPUTarget("hip", "gfx942", 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SinkError, match="no GPU here to compile for"):
        ahead.target_named(None)


def test_arguments_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "v1 train", "--target", "gpu"]) == 2
    assert "no such target: 'gpu'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_line_compiles_every_kernel(cache: Path) -> None:
    command = [sys.executable, "-m", "torch_sink", "warm", "--target", "cuda:90"]
    first, again = (subprocess.run(command, capture_output=True, text=True, timeout=600) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), first.stderr + again.stderr
    total = len(ahead.every_variant(TARGET))
    assert first.stdout.startswith(f"{total} kernels compiled for cuda:90")
    assert again.stdout.startswith("0 kernels compiled for cuda:90")
    assert f"{total} were in Triton's cache already" in again.stdout
    assert f"{total}/{total}" in first.stderr
    targets = {json.loads(path.read_text())["target"]["arch"] for path in cache.rglob("stage_kernel.json")}
    assert targets == {90}
