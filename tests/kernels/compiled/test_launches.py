"""Every kernel can be launched through Triton's JIT: nothing raises or warns between the project and a device."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from simulators.executor.target import Launched, target_only
from torchvision.transforms import v2
from triton import knobs
from triton.runtime.jit import JITFunction

import torch_sink
from kernels.jpeg_cases import encode, open_file, pack_files, photo
from kernels.test_variants import launch
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode.jpeg_decoder import JpegDecoder
from torch_sink.triton_kernels.jpeg import color, entropy, idct, jpeg_variants, lanes
from torch_sink.triton_kernels.launching import Launcher, compiler_options
from torch_sink.triton_kernels.shapes import LANE_SHAPES
from torch_sink.triton_kernels.stages import variants


def launch_pipelines() -> None:
    of_floats = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Resize(12)])
    with torch_sink.image_backend("device", device="meta"):
        launch(v2.Compose([v2.RandomAutocontrast(p=1), v2.PILToTensor()])(make_photo(16, 16, 0)))
        launch(of_floats(make_photo(16, 16, 0)))


def loaded_decoder() -> JpegDecoder:
    file = open_file(encode(photo(16, 16)))
    assert file is not None
    return JpegDecoder(*pack_files([file], LANE_SHAPES[0].bits), LANE_SHAPES[0])


@pytest.fixture(scope="module")
def launched() -> list[Launched]:
    found: list[Launched] = []
    with target_only(found.append):
        launch_pipelines()
        loaded_decoder().launch()
    return found


def test_every_kernel_can_be_launched(launched: list[Launched]) -> None:
    listed = {variant.kernel.__name__ for variant in (*variants(), *jpeg_variants(32))}
    assert {launch.kernel for launch in launched} == listed


def test_no_launch_lets_the_compiler_fuse(launched: list[Launched]) -> None:
    assert not {launch.kernel for launch in launched if launch.metadata.enable_fp_fusion}


def test_only_nvidias_compiler_is_asked_for_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, hip, given in (("13.0", None, True), (None, "7.1", False), (None, None, False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert ("maxnreg" in compiler_options(4, 80)) == given
        assert "maxnreg" not in compiler_options(4)


def test_triton_looks_at_the_arguments_of_each_kind_of_launch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch is the one that it would be if Triton looked every time."""
    decoder, looks = loaded_decoder(), []
    stock = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *args, **kw: looks.append(kernel) or stock(kernel, *args, **kw)
    )
    found = []
    for is_kept in (True, True, False):
        launched: list[Launched] = []
        looks.clear()
        with target_only(launched.append), monkeypatch.context() as patch:
            if not is_kept:
                patch.setattr(Launcher, "_key", lambda *_: ())
            decoder.decode_coefficients()
        found.append([(launch.kernel, launch.ptx, launch.grid, *map(address, launch.arguments)) for launch in launched])
        assert len(looks) == (len(launched) if not is_kept else 0) or len(found) == 1
    assert len(launched) > LANE_SHAPES[0].rounds
    assert found[0] == found[1] == found[2]


def test_what_is_kept_of_launches_does_not_grow_with_batches() -> None:
    """Whatever their sizes, and however many lanes, tiles and images they have."""
    modules = (lanes, entropy, idct, color)
    launchers = [value for module in modules for value in vars(module).values() if isinstance(value, Launcher)]
    kept, counts = [], set()
    with target_only(lambda launched: None):
        for side in (16, 48, 176):
            file = open_file(encode(photo(side, side), quality=95))
            assert file is not None
            decoder = JpegDecoder(*pack_files([file] * (side // 16), LANE_SHAPES[0].bits), LANE_SHAPES[0])
            decoder.launch()
            counts.add(decoder._entropy.lanes)
            kept.append(sum(len(launcher._compiled) for launcher in launchers))
    assert len(counts) == 3
    assert kept[0] > 10
    assert len(set(kept)) == 1


def address(argument: torch.Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


@triton.jit(do_not_specialize=["number"])
def _copy_kernel(source, target, number, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at) + number)


def test_no_launch_gets_what_was_compiled_for_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was launched before: each launch runs what Triton's JIT itself would run."""
    memory = {dtype: torch.zeros(512, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.int32)}
    whole, half, ints = memory.values()
    cases = [
        ((whole, whole), 1, 128), ((half, whole), 1, 128), ((whole, half), 1, 128), ((ints, ints), 1, 128),
        ((whole[1:], whole), 1, 128), ((whole, whole[3:]), 1, 128), ((whole[4:], whole), 1, 128),
        ((whole, whole), 2, 128), ((whole, whole), 1 << 40, 128), ((whole, whole), 1, 256),
    ]  # fmt: skip
    launcher = Launcher(_copy_kernel, warps=1)
    launched: list[Launched] = []
    with target_only(launched.append):
        for tensors, number, block in cases * 2:
            _copy_kernel[(1,)](*tensors, number, BLOCK=block, **compiler_options(1))
            launcher((1,), tensors, (number,), BLOCK=block)
    pairs = list(zip(launched[::2], launched[1::2], strict=True))
    assert all(stock.ptx == ours.ptx and stock.grid == ours.grid for stock, ours in pairs)
    assert all(list(map(address, stock.arguments)) == list(map(address, ours.arguments)) for stock, ours in pairs)
    assert len({stock.ptx for stock, _ in pairs}) == 8
    monkeypatch.setattr(Launcher, "_key", lambda *_: ("always",))  # the fault that this would show
    launcher, again = Launcher(_copy_kernel, warps=1), []
    with target_only(again.append):
        for tensors, number, block in cases:
            launcher((1,), tensors, (number,), BLOCK=block)
    assert [launch.ptx for launch in again] != [ours.ptx for _, ours in pairs[: len(cases)]]


def test_knobs_that_change_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a user sets to look into a kernel, which was launched before."""
    launcher, values = Launcher(_copy_kernel, warps=1), torch.zeros(64, dtype=torch.int32)
    launched: list[Launched] = []
    with target_only(launched.append):
        other = "none" if hasattr(knobs.compilation, "instrumentation_mode") else ""  # Triton 3.4 has no such knob
        for is_debugged, mode in ((False, ""), (True, ""), (False, other), (False, "")):
            monkeypatch.setattr(knobs.runtime, "debug", is_debugged)
            if other:
                monkeypatch.setattr(knobs.compilation, "instrumentation_mode", mode)
            launcher((1,), (values, values), (1,), BLOCK=16)
    found = [(launch.metadata.debug, getattr(launch.metadata, "instrumentation_mode", "")) for launch in launched]
    assert found == [(False, ""), (True, ""), (False, other), (False, "")]
    assert launched[1].ptx != launched[0].ptx == launched[3].ptx


def test_hooks_of_a_kernel_see_every_launch() -> None:
    launcher, values = Launcher(_copy_kernel, warps=1), torch.zeros(64)
    launched: list[Launched] = []
    seen: list[int] = []
    with target_only(launched.append):
        launcher((1,), (values, values), (1,), BLOCK=16)
        _copy_kernel.add_pre_run_hook(lambda *_, **__: seen.append(1))
        try:
            launcher((1,), (values, values), (1,), BLOCK=16)
        finally:
            _copy_kernel.pre_run_hooks.clear()
    assert (len(launched), seen) == (2, [1])


def test_no_kernel_is_compiled_for_a_value_of_its_numbers() -> None:
    """A launch with another number runs what the first one compiled."""
    numbers = set()
    for variant in (*variants(), *jpeg_variants(32)):
        for parameter in variant.kernel.params:
            if variant.signature[parameter.name] == "i32":
                numbers.add(parameter.name)
                assert parameter.do_not_specialize, f"{parameter.name} of {variant.name}"
    assert numbers == {"lanes", "settling", "lane_bits", "warm_up_bits", "first_tile"}
