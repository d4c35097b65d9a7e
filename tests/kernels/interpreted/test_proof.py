"""Stage kernels prove themselves before the first batch on a device: a wrong build never gives wrong pixels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from image.check import assert_same_bits
from PIL import Image
from simulators.fake_cuda import FakeCuda, fake_cuda  # noqa: F401 a fixture
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, default_collate
from torchvision import transforms as v1

import torch_sink
from torch_sink.cli import doctor
from torch_sink.cli.photos import make_photo
from torch_sink.errors import DecodeError, UnsupportedOperation
from torch_sink.image.core.proof import Proof, Verdict
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.run import stage_proof as stages
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.stage_proof import STAGE_KERNELS
from torch_sink.triton_kernels.launching import is_interpreted
from torch_sink.triton_kernels.rows import Kind
from torch_sink.triton_kernels.stages import stage

has_own_device = torch.cuda.is_available() or not is_interpreted()
pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(has_own_device, reason="patches interpreted kernels on the fake device"),
]

LIGHT = v1.Compose([v1.Resize((12, 20)), v1.ToTensor(), v1.Normalize((0.5,), (0.2,))])
Fault = Callable[[torch.Tensor, bool], None]


@pytest.fixture
def device(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:  # noqa: F811
    """The fake device, whose kernels Triton's interpreter runs, in a process and with a cache that know nothing yet."""
    from simulators.fake_cuda.interpreted import interpret_in_place

    interpret_in_place(monkeypatch, fake_cuda)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    """What a new process does not know."""
    for proof in STAGE_KERNELS.values():
        proof.forget()


def install(device: pytest.MonkeyPatch, fault: Fault) -> None:
    """A build whose stage kernels have a fault: it gets what they have written, and whether the heavy variant has."""
    right = stage.run_stage

    def wrong(workspace: torch.Tensor, output: torch.Tensor, *args: Any, is_heavy: bool, **kwargs: Any) -> None:
        right(workspace, output, *args, is_heavy=is_heavy, **kwargs)
        fault(output, is_heavy)

    device.setattr(stage, "run_stage", wrong)


class Dataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> torch.Tensor:
        return LIGHT(make_photo(40, 30, at))  # type: ignore[no-any-return]


STOCK = default_collate([Dataset()[at] for at in range(4)])


def batch() -> LazyBatch:
    made = default_collate([Dataset()[at] for at in range(4)])
    assert type(made) is LazyBatch
    return made


def tries(dtype: torch.dtype = torch.float32) -> Any:
    """Watches how often the kernels prove themselves."""
    return mock.patch.object(STAGE_KERNELS[dtype], "prove", wraps=STAGE_KERNELS[dtype].prove)


def one_value_in(variant: str) -> Fault:
    def fault(output: torch.Tensor, is_heavy: bool) -> None:
        if is_heavy == (variant == "heavy"):
            output[0, 1, 3, 5] += 1

    return fault


def one_bit_of_bfloat16(output: torch.Tensor, is_heavy: bool) -> None:
    if output.dtype == torch.bfloat16:
        output.view(torch.int16)[1, 0, 0, 0] ^= 1


def raises(output: torch.Tensor, is_heavy: bool) -> None:
    if is_heavy:
        raise RuntimeError("PassManager::run failed\nand more")


def test_kernels_that_are_right_make_batches(device: pytest.MonkeyPatch) -> None:
    device.setattr("torch_sink.image.run.batch.make_for_device", None)
    with torch_sink.image_backend("device", device="cuda", strict=True), tries() as proved:
        assert_same_bits(batch().to("cuda").cpu(), STOCK)
        assert_same_bits(batch().to("cuda:0").cpu(), STOCK)
        assert not torch_sink.fallback_report()
    assert proved.call_count == 1
    forget()
    device.setattr(STAGE_KERNELS[torch.float32], "prove", None)  # the cache knows
    assert STAGE_KERNELS[torch.float32].verdict(torch.device("cuda")).holds


@pytest.mark.parametrize(
    ("fault", "dtype", "reason", "lasts"),
    [
        (
            one_value_in("light"),
            torch.float32,
            r"1 of 3990 float32 values of 'resized .*' differ \(light kernel\)",
            True,
        ),
        (
            one_value_in("heavy"),
            torch.float32,
            r"1 of 3990 float32 values of 'resized .*' differ \(heavy kernel\)",
            True,
        ),
        (
            one_bit_of_bfloat16,
            torch.bfloat16,
            r"1 of 3990 bfloat16 values of 'bicubic .*' differ \(light kernel\)",
            True,
        ),
        (raises, torch.float32, "RuntimeError: PassManager::run failed", False),
    ],
    ids=["light", "heavy", "bfloat16", "raises"],
)
def test_a_wrong_build_never_gives_wrong_pixels(
    fault: Fault, dtype: torch.dtype, reason: str, lasts: bool, device: pytest.MonkeyPatch
) -> None:
    install(device, fault)
    expected = STOCK.to(dtype)
    with torch_sink.image_backend("device", device="cuda"), tries(dtype) as proved:
        with pytest.warns(RuntimeWarning, match=f"Stock code makes batches .*: {reason}.*torch_sink doctor"):
            made = batch().to("cuda", dtype)
        assert made.device.type == "cuda"
        assert_same_bits(made.cpu(), expected)
        if dtype != torch.float32:
            assert_same_bits(batch().to("cuda").cpu(), STOCK)  # of this type the build is right
        assert_same_bits(batch().to("cuda", dtype).cpu(), expected)  # and nothing is said again
        report = str(torch_sink.fallback_report())
        assert "the kernels did not prove themselves: " in report
        assert "see python -m torch_sink doctor" in report
        assert proved.call_count == (1 if lasts else 2)
        forget()
        with pytest.warns(RuntimeWarning, match=reason):
            assert_same_bits(batch().to("cuda", dtype).cpu(), expected)
        assert proved.call_count == (1 if lasts else 3), "the cache keeps what was compared, and no error"
    strict = torch_sink.image_backend("device", device="cuda", strict=True)
    with strict, pytest.raises(UnsupportedOperation, match=reason):
        batch().to("cuda", dtype)


def test_errors_that_pass(device: pytest.MonkeyPatch) -> None:
    def out_of_memory(output: torch.Tensor, is_heavy: bool) -> None:
        if is_heavy and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    failed: list[bool] = []
    install(device, out_of_memory)
    with torch_sink.image_backend("device", device="cuda"), tries() as proved:
        with pytest.warns(RuntimeWarning, match="out of memory.*They are tried again at later batches"):
            assert_same_bits(batch().to("cuda").cpu(), STOCK)
        with mock.patch("torch_sink.image.run.batch.make_for_device", None):
            assert_same_bits(batch().to("cuda").cpu(), STOCK)
            assert_same_bits(batch().to("cuda").cpu(), STOCK)
        assert proved.call_count == 2
        assert sum(torch_sink.fallback_report().counts.values()) == 1


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_damaged_files_beside_a_wrong_build(policy: str, device: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(device, one_value_in("light"))
    files = [tmp_path / f"{at}.jpg" for at in range(3)]
    for at, file in enumerate(files):
        make_photo(64, 48, at).save(file, quality=90)
    decode = EncodedSource.decode

    def decode_two(source: EncodedSource) -> Any:
        if source.path == str(files[1]):
            raise DecodeError(source.path, -1, "broken data stream")
        return decode(source)

    device.setattr(EncodedSource, "decode", decode_two)
    good = [LIGHT(Image.open(files[at])) for at in (0, 2)]
    with torch_sink.image_backend("device", device="cuda", on_decode_error="raise"):
        lazy = default_collate([LIGHT(Image.open(file).convert("RGB")) for file in files])
        out = torch.full((3, 3, 12, 20), 7.0, device="cuda").to(memory_format=torch.channels_last)
        with pytest.warns(RuntimeWarning, match="Stock code makes batches"):
            made, rows = lazy.__torch_sink_execute__("cuda", out=out, on_decode_error=policy)
    assert rows == ([0, 2] if policy == "skip" else [0, 2, 2])
    expected = torch.stack([good[row // 2] for row in rows])
    assert torch.equal(made.cpu(), expected)
    assert torch.equal(out.cpu()[: len(rows)], expected)
    assert (out.cpu()[len(rows) :] == 7).all()


def test_a_sink_over_a_wrong_build(device: pytest.MonkeyPatch) -> None:
    install(device, one_value_in("heavy"))
    with torch_sink.image_backend("device", device="cuda"):
        loader = DataLoader(Dataset(), batch_size=2)
        sink = torch_sink.SinkLoader(loader, dtype=torch.bfloat16, memory_format=torch.channels_last)
        with sink, pytest.warns(RuntimeWarning, match="heavy kernel"):
            made = [images.cpu() for images in sink]
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in made)
    assert_same_bits(torch.cat(made).contiguous(), STOCK.to(torch.bfloat16))


def test_workers_prove_nothing(device: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def prove(proof: Proof, device: torch.device) -> Verdict:
        (tmp_path / str(os.getpid())).touch()
        return Verdict(True)

    device.setattr(Proof, "prove", prove)
    with torch_sink.image_backend("device", device="cuda"):
        for images in DataLoader(Dataset(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
            images.to("cuda")
    assert {file.name for file in tmp_path.glob("[0-9]*")} == {str(os.getpid())}


def test_doctor_says_who_makes_batches(device: pytest.MonkeyPatch) -> None:
    device.setattr("torch_sink.image.core.settings.default_device", lambda: "cuda")
    device.setattr(STAGE_KERNELS[torch.float32], "prove", lambda device: Verdict(True))
    found = doctor._check_stages()
    assert (found.state, found.detail.partition(";")[0]) == ("ok", "kernels make batches")
    assert found.detail.endswith(" as float32")
    install(device, one_bit_of_bfloat16)
    with torch_sink.image_backend("device", device="cuda"), pytest.warns(RuntimeWarning, match="bfloat16"):
        batch().to("cuda", torch.bfloat16)
    found = doctor._check_stages()
    assert found.state == "broken"
    assert "bfloat16: 1 of 3990 bfloat16 values of 'bicubic resize and contrast' differ" in found.detail


@pytest.mark.parametrize("dtype", STAGE_KERNELS)
def test_what_is_compared(dtype: torch.dtype) -> None:
    """Each variant as the plan of a user's batch chooses it, every role of an operation, every axis of a resize."""
    kinds: set[int] = set()
    for is_heavy in (False, True):
        source = stages.PixelSource(stages.picture(97, 41))
        with torch_sink.image.core.fallback.executing():
            calls = [stages._recorded_calls(source, each) for each in stages._programs(dtype, is_heavy).values()]
        program = stages._batch(source, calls, dtype, is_heavy)
        assert any(launch.is_heavy for launch in program.launches) == is_heavy
        kinds |= set(program.array("operations")[1:, 0].tolist())
    expected = {Kind.FLIP, Kind.REFLECT, Kind.LOOKUP, Kind.SOLARIZE, Kind.HUE, Kind.GRAY, Kind.EQUALIZE, Kind.CONTRAST}
    expected |= {Kind.RESAMPLE_X, Kind.RESAMPLE_Y, Kind.AFFINE, Kind.SHARPNESS, Kind.WARP, Kind.ERASE}
    expected |= {Kind.CONVOLUTION}
    if dtype != torch.uint8:
        expected = expected - {Kind.ERASE} | {Kind.NORMALIZE, Kind.BLEND_MEAN, Kind.FILTER_X, Kind.FILTER_Y, Kind.GRID}
    assert not {kind.name for kind in expected if kind not in kinds}


class Seen(TorchDispatchMode):
    """What torch's dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_no_setting_of_precision_changes_what_is_compared_with(dtype: torch.dtype) -> None:
    """`torch.set_float32_matmul_precision("medium")` rounds products of matrices on the host, too."""
    source = stages.PixelSource(stages.picture(97, 41))
    with Seen() as seen, torch_sink.image.core.fallback.executing():
        for calls in stages._programs(dtype, True).values():
            stages.replay(source.decode(), stages._recorded_calls(source, calls))
    assert "mul" in seen.names
    products = "mm", "bmm", "addmm", "baddbmm", "matmul", "convolution", "mkldnn_convolution"
    assert not seen.names.intersection(products)


def test_kernels_hold_under_a_default_dtype() -> None:
    """Which torch multiplies bytes in; a verdict that was found beside one is not that of other processes."""
    proof, device = STAGE_KERNELS[torch.uint8], torch.device("cpu")
    found = [proof.fingerprint(device)]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found.append(proof.fingerprint(device))
        assert proof.prove(device) == Verdict(True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[0] != found[1]


def test_kernels_hold_inside_of_autocast() -> None:
    precision = []

    def compare(device: torch.device) -> str:
        precision.append((torch.ones(2, 2, device=device) @ torch.ones(2, 2, device=device)).dtype)
        return ""

    with torch.autocast("cpu", torch.bfloat16):
        assert Proof("any", "", compare, [], "stages").prove(torch.device("cpu")).holds
    assert precision == [torch.float32]
