"""Every kernel can be launched through Triton's JIT: nothing raises or warns between the project and a device."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms import v2
from triton.runtime.jit import JITFunction

import torch_sink
from kernels.compiled.target import Launched, target_only
from kernels.jpeg_cases import encode, open_file, pack_files, photo
from kernels.test_variants import launch
from torch_sink.cli.photos import make_photo
from torch_sink.image.decode.jpeg.decode import JpegDecoder
from torch_sink.triton_kernels import launching
from torch_sink.triton_kernels.jpeg import synchronize
from torch_sink.triton_kernels.jpeg.variants import jpeg_variants
from torch_sink.triton_kernels.launching import compiler_options
from torch_sink.triton_kernels.shapes import LANE_SHAPES
from torch_sink.triton_kernels.stages.variants import variants


def launch_pipelines() -> None:
    of_floats = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Resize(12)])
    with torch_sink.image_backend("device", device="meta"):
        launch(v2.Compose([v2.RandomAutocontrast(p=1), v2.PILToTensor()])(make_photo(16, 16, 0)))
        launch(of_floats(make_photo(16, 16, 0)))


def loaded_decoder() -> JpegDecoder:
    file = open_file(encode(photo(16, 16)))
    assert file is not None
    batch, inputs = pack_files([file], LANE_SHAPES[0].bits)
    decoder = JpegDecoder(batch.capacity, LANE_SHAPES[0], torch.device("cpu"), interpreted=False)
    decoder.load(batch, inputs)
    return decoder


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


def test_triton_looks_at_the_arguments_of_all_rounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch is the one that it would be if Triton looked every time."""
    decoder, looks = loaded_decoder(), []
    stock = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda kernel, *args, **kw: looks.append(kernel) or stock(kernel, *args, **kw)
    )
    found = []
    for is_repeated in (True, False):
        launched: list[Launched] = []
        looks.clear()
        with target_only(launched.append), monkeypatch.context() as patch:
            if not is_repeated:
                patch.setattr(launching.Repeated, "__call__", look_each_time)
            decoder.decode_coefficients()
        rounds = LANE_SHAPES[0].rounds
        assert [launch.kernel for launch in launched].count("round_kernel") == rounds
        assert looks.count(synchronize.round_kernel) == (1 if is_repeated else rounds)
        found.append([(launch.kernel, launch.ptx, launch.grid, *map(address, launch.arguments)) for launch in launched])
    assert found[0] == found[1]


def look_each_time(repeated: launching.Repeated, *arguments: torch.Tensor | int) -> None:
    repeated._kernel[repeated._grid](*arguments, **repeated._constants, **repeated._options)


def address(argument: torch.Tensor | int) -> int:
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
