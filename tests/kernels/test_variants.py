"""The list of kernel variants, which the compile gate goes through, holds whatever the launchers choose."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image.random_pipelines import make_scenario, run
from torch.utils._pytree import tree_leaves
from torchvision import transforms as v1
from torchvision.transforms import v2

import torch_sink
from kernels.jpeg_cases import encode, open_file, pack_files, photo
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode.jpeg_decoder import JpegDecoder
from torch_sink.image.decode.source import Decoded, FinishedSource
from torch_sink.image.handles.tensor import Handle
from torch_sink.image.program.launches import make_program
from torch_sink.image.run.device import Launches, places_of
from torch_sink.triton_kernels import launching
from torch_sink.triton_kernels.jpeg import color, entropy, idct, jpeg_variants, lanes
from torch_sink.triton_kernels.launching import Variant
from torch_sink.triton_kernels.shapes import choose_lane_shape
from torch_sink.triton_kernels.stages import prologue, stage, statistics, variants

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
POINTERS = {
    torch.uint8: "*u8",
    torch.uint16: "*u16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}
DEFAULT_WARPS = 4

Launched = set[tuple[Any, ...]]


def launch_key(name: str, types: dict[str, str], constants: dict[str, Any], warps: int, registers: int | None) -> Any:
    """What makes Triton compile a kernel anew."""
    return name, frozenset(types.items()), frozenset(constants.items()), warps, registers


def key_of(variant: Variant) -> Any:
    types = {name: kind for name, kind in variant.signature.items() if kind != "constexpr"}
    return launch_key(variant.kernel.__name__, types, variant.constants, variant.warps, variant.registers)


def type_of(argument: torch.Tensor | int) -> str:
    """What Triton calls the type of an argument of a launch."""
    return "i32" if isinstance(argument, int) else POINTERS[argument.dtype]


class RecordedKernel:
    """Stands for a kernel: notes its launches and does nothing."""

    def __init__(self, kernel: Any, launched: Launched) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return self.launch

    def launch(self, *arguments: torch.Tensor | int, **options: Any) -> None:
        warps, registers = options.pop("num_warps", DEFAULT_WARPS), options.pop("maxnreg", None)
        assert options.pop("enable_fp_fusion") is False
        names = [name for name in self.kernel.arg_names if name not in options]
        types = {name: type_of(argument) for name, argument in zip(names, arguments, strict=True)}
        assert list(options) == self.kernel.arg_names[len(names) :]  # in order: launches give them by position
        self.launched.add(launch_key(self.kernel.__name__, types, options, warps, registers))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What is launched, of kernels that are chosen as for a device."""
    found: Launched = set()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for module in (prologue, stage, statistics, lanes, entropy, idct, color):
        for launcher in vars(module).values():
            if isinstance(launcher, launching.Launcher):
                monkeypatch.setattr(launcher, "_kernel", RecordedKernel(launcher._kernel, found))
                monkeypatch.setattr(launcher, "_key", lambda *_: ())
    monkeypatch.setattr(launching, "is_interpreted", lambda: False)
    return found


def launch(handle: Any, *others: torch.dtype) -> None:
    """Launches what makes a batch of one image, in the dtype of the handle and in others."""
    if isinstance(handle.lazy_recording.source, FinishedSource):
        return
    image = handle.lazy_recording
    source = image.source
    program = make_program([source], [image.calls], [((1, *image.shape), image.dtype)])
    decoded = Decoded(torch.zeros(3 if source.mode == "RGB" else 1, *source.size[::-1], dtype=torch.uint8))
    memory = torch.empty(program.workspace_bytes, dtype=torch.uint8)
    places, _ = places_of([decoded], memory)
    for dtype in {image.dtype, *others}:
        launches = Launches(program, memory, places=places)
        launches.run(program.batches, [torch.empty((1, *image.shape), dtype=dtype)])


def launch_in_all(handle: Any) -> None:
    """In every dtype that can be asked for."""
    narrow = handle.lazy_recording.dtype.itemsize == 2
    launch(handle, *(() if narrow else FLOATS))


@pytest.mark.filterwarnings("ignore")
def test_random_pipelines_launch_listed_variants(launched: Launched, tmp_path: Path) -> None:
    for seed in range(400, 430):
        with torch_sink.image_backend("device", device="meta"):
            results = [outcome.result for outcome in run(make_scenario(seed, tmp_path), seed)]
        for leaf in tree_leaves(results):
            if isinstance(leaf, Handle) and len(leaf.shape) == 3:
                launch_in_all(leaf)
    assert launched <= {key_of(variant) for variant in variants()}
    assert len(launched) > 7


def test_a_dtype_of_the_batch_has_two_stages() -> None:
    stages = [variant for variant in variants() if variant.kernel.__name__ == "stage_kernel"]
    assert len(stages) <= 8


def of_bytes(float64: bool, statistic: bool, erase: bool, goes_on: bool) -> v2.Compose:
    """Calls whose last stage, or the one before it, has just these properties."""
    on_image = [v2.RandomAutocontrast(p=1)] * statistic + [v2.ColorJitter(hue=(0.1, 0.1))] * float64
    on_tensor = [v2.RandomErasing(p=1)] * erase + [v2.RandomRotation((90, 90))] * goes_on
    return v2.Compose([*on_image, v2.PILToTensor(), *on_tensor])


def of_floats(heavy: bool, statistic: bool, goes_on: bool) -> v2.Compose:
    calls = [v2.ColorJitter(contrast=(0.5, 0.5))] * statistic + [v2.ColorJitter(hue=(0.1, 0.1))] * heavy
    after = [v2.Resize(8)] * goes_on
    return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Resize(12), *calls, *after])


def test_every_listed_variant_of_the_stages_is_launched(launched: Launched) -> None:
    pipelines = [of_bytes(*flags) for flags in itertools.product((False, True), repeat=4)]
    pipelines += [of_floats(*flags) for flags in itertools.product((False, True), repeat=3)]
    pipelines.append(v2.Compose([v2.Resize(12), v2.PILToTensor()]))
    # Bytes that the float stages make: of v1's resize without antialiasing.
    pipelines.append(v1.Compose([v1.PILToTensor(), v1.Resize((9, 8), antialias=False)]))
    with torch_sink.image_backend("device", device="meta"):
        for pipeline in pipelines:
            launch_in_all(pipeline(make_photo(16, 16, 0)))
    assert launched == {key_of(variant) for variant in variants()}


@pytest.mark.parametrize("threads_of_warp", [32, 64])
def test_exactly_the_listed_variants_of_the_jpeg_kernels_are_launched(
    threads_of_warp: int, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entropy, "LANES_A_WARP", threads_of_warp)
    file = open_file(encode(photo(16, 16)))
    assert file is not None
    for shape in {choose_lane_shape(2**exponent) for exponent in range(40)}:
        JpegDecoder(*pack_files([file], shape.bits), shape).launch()
    assert launched == {key_of(variant) for variant in jpeg_variants(threads_of_warp)}
