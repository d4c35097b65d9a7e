"""Who decodes on a GPU, tried without one: the kernels and nvJPEG are replaced where they would touch the device."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torchvision.io import ImageReadMode

from image.cases import encoded
from torch_sink.cli import doctor
from torch_sink.errors import DecodeError
from torch_sink.image.core import proof as proof_module
from torch_sink.image.core.proof import Proof
from torch_sink.image.decode import jpeg_decoder as jpeg
from torch_sink.image.decode import providers
from torch_sink.image.decode.encoded import EncodedSource, encoded_source
from torch_sink.image.decode.jpeg_proof import JPEG_KERNELS
from torch_sink.image.decode.providers import candidates, decode_sources, providers_for
from torch_sink.image.decode.source import Box, Decoded, PixelSource
from torch_sink.image.run.stage_proof import STAGE_KERNELS
from torch_sink.triton_kernels.shapes import are_interpreted

GPU = torch.device("cuda", 0)
Kernels = Callable[..., list[Decoded | None]]


def source(data: bytes) -> EncodedSource:
    found = encoded_source(data, "a test's file")
    assert found is not None
    return found


SOURCES = [source(encoded(41, 33, 1, subsampling="4:2:0")), source(encoded(20, 20, 2, "L"))]
FULL_CHROMA = source(encoded(17, 11, 3, subsampling="4:4:4"))
PROGRESSIVE = source(encoded(30, 20, 4, progressive=True))


def pillows(item: EncodedSource, box: Box | None = None) -> Decoded:
    """What right kernels would leave on the device: planes."""
    pixels = np.atleast_3d(np.array(item.decode()))
    if box is not None:
        pixels = pixels[box.top : box.top + box.height, box.left : box.left + box.width]
    return Decoded(torch.from_numpy(pixels.transpose(2, 0, 1).copy()), box)


class FakeKernels:
    """Stands for `decode_jpegs`: Pillow's pixels, but for the fault of a test; counts its calls."""

    def __init__(self, fault: Callable[[list[Decoded | None]], Any] = lambda images: None) -> None:
        self.fault, self.calls = fault, 0

    def __call__(
        self, sources: Sequence[EncodedSource], boxes: Sequence[Box | None], device: torch.device, shape: Any = None
    ) -> list[Decoded | None]:
        assert device.type == "cuda"
        self.calls += 1
        images: list[Decoded | None] = [pillows(*item) for item in zip(sources, boxes, strict=True)]
        self.fault(images)
        return images


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A machine whose torch says that it has a GPU, with a cache of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield monkeypatch
    forget()


def forget() -> None:
    """What a new process does not know."""
    JPEG_KERNELS.forget()


def use(gpu: pytest.MonkeyPatch, kernels: FakeKernels) -> FakeKernels:
    gpu.setattr(jpeg, "decode_jpegs", kernels)
    return kernels


def decoded_by_pillow(device: torch.device = GPU, sources: Sequence[EncodedSource] = SOURCES) -> int:
    """How many images Pillow decodes; all must be right."""
    pillow = providers.PROVIDERS["pillow"]
    with mock.patch.object(pillow, "decode", wraps=pillow.decode, create=True) as seen:
        images = decode_sources(sources, device)
    for image, item in zip(images, sources, strict=True):
        assert isinstance(image, Decoded)
        assert torch.equal(image.pixels, pillows(item).pixels)
    return sum(len(call.args[0]) for call in seen.call_args_list)


def test_kernels_that_are_right_decode_by_default(gpu: pytest.MonkeyPatch) -> None:
    kernels = use(gpu, FakeKernels())
    assert decoded_by_pillow() == 0
    shapes = kernels.calls - 1
    assert shapes == 3  # each shape of lanes was tried before
    assert decoded_by_pillow(torch.device("cuda")) == 0
    assert kernels.calls == shapes + 2
    assert decoded_by_pillow(GPU, [PROGRESSIVE, *SOURCES]) == 1


def test_the_verdict_outlives_the_process(gpu: pytest.MonkeyPatch) -> None:
    use(gpu, FakeKernels())
    assert decoded_by_pillow() == 0
    forget()
    kernels = use(gpu, FakeKernels())
    assert decoded_by_pillow() == 0
    assert kernels.calls == 1
    forget()
    gpu.setattr(proof_module, "_driver", lambda: "another driver")
    assert decoded_by_pillow() == 0
    assert kernels.calls == 1 + 4


OF_ALL_KERNELS = "triton_kernels/shapes.py", "triton_kernels/launching.py"
OF_JPEG = "decode/jpeg_block.py", "decode/jpeg_decoder.py", "jpeg/entropy.py", "triton_kernels/jpeg_rows.py"
OF_STAGES = "operations/resize.py", "program/plan.py", "core/lowering.py", "run/device.py", "stages/points.py"


@pytest.mark.parametrize(
    ("proof", "names"), [(JPEG_KERNELS, OF_JPEG), (STAGE_KERNELS[torch.float16], OF_STAGES)], ids=["jpeg", "stages"]
)
def test_a_verdict_is_of_all_the_code_at_work(proof: Proof, names: Sequence[str], gpu: pytest.MonkeyPatch) -> None:
    before = proof.fingerprint(GPU)
    read_bytes = Path.read_bytes
    for name in (*names, *OF_ALL_KERNELS):
        gpu.setattr(Path, "read_bytes", lambda path, name=name: read_bytes(path) + b" " * str(path).endswith(name))
        assert proof.fingerprint(GPU) != before, name


def test_compiled_and_interpreted_kernels_are_proved_apart(gpu: pytest.MonkeyPatch) -> None:
    before = JPEG_KERNELS.fingerprint(GPU)
    gpu.setattr(proof_module, "are_interpreted", lambda: not are_interpreted())
    assert JPEG_KERNELS.fingerprint(GPU) != before


def test_threads_wait_for_one_proof(gpu: pytest.MonkeyPatch) -> None:
    kernels = use(gpu, FakeKernels(lambda images: time.sleep(0.05)))
    with ThreadPoolExecutor(4) as threads:
        assert {found.holds for found in threads.map(JPEG_KERNELS.verdict, [GPU] * 4)} == {True}
    assert kernels.calls == 3


def one_value_is_wrong(images: list[Decoded | None]) -> None:
    gray = next(image for image in images if image is not None and len(image.pixels) == 1)
    gray.pixels[0, 3, 4] ^= 1


def one_is_damaged(images: list[Decoded | None]) -> None:
    images[1] = None


def no_compiler(images: list[Decoded | None]) -> None:
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nAnd more.")


@pytest.mark.parametrize(
    ("fault", "reason", "lasts"),
    [
        (one_value_is_wrong, "1 of 3015 values of a gray file differ from Pillow's", True),
        (one_is_damaged, "the kernels take a 4:2:2 file for damaged", True),
        (no_compiler, "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", False),
    ],
)
def test_kernels_that_are_wrong_decode_nothing(
    fault: Callable[[list[Decoded | None]], Any], reason: str, lasts: bool, gpu: pytest.MonkeyPatch
) -> None:
    kernels = use(gpu, FakeKernels(fault))
    with pytest.warns(RuntimeWarning, match=r"Pillow's threads decode .*torch_sink doctor"):
        assert decoded_by_pillow() == len(SOURCES)
    calls = kernels.calls
    assert [provider.name for provider in candidates(GPU)] == (["pillow"] if lasts else ["triton", "pillow"])
    assert [decoded_by_pillow() for _ in range(8)] == [len(SOURCES)] * 8
    # Again after 1, 2, 4 and 8 batches; nothing more is said.
    assert kernels.calls == calls + (0 if lasts else 4)
    assert JPEG_KERNELS.verdict(GPU) == (False, reason, lasts)
    forget()
    # What was compared is remembered; what failed may have been mended.
    repaired = use(gpu, FakeKernels())
    if lasts:
        with pytest.warns(RuntimeWarning, match="Pillow's threads decode"):
            assert decoded_by_pillow() == len(SOURCES)
    else:
        assert decoded_by_pillow() == 0
    assert bool(repaired.calls) != lasts


def test_kernels_without_a_verdict_are_tried_again(gpu: pytest.MonkeyPatch) -> None:
    def out_of_memory(images: list[Decoded | None]) -> None:
        if not tried:
            tried.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nAnd more.")

    tried: list[bool] = []
    use(gpu, FakeKernels(out_of_memory))
    with pytest.warns(RuntimeWarning, match=r"Tried to allocate 2.00 GiB\.. They are tried again at later batches"):
        assert decoded_by_pillow() == len(SOURCES)
    assert decoded_by_pillow() == 0
    forget()
    gpu.setattr(JPEG_KERNELS, "prove", None)  # the cache knows
    assert decoded_by_pillow() == 0


@pytest.mark.parametrize(
    ("fault", "state", "detail"),
    [
        (lambda images: None, "ok", "triton decodes; what it cannot take goes to pillow"),
        (one_value_is_wrong, "broken", "the kernels cannot: 1 of 3015 values of a gray file differ"),
    ],
)
def test_doctor_says_who_decodes(fault: Any, state: str, detail: str, gpu: pytest.MonkeyPatch) -> None:
    use(gpu, FakeKernels(fault))
    gpu.setattr("torch_sink.image.core.settings.default_device", lambda: "cuda")
    found = doctor._check_decoder()
    assert found.state == state
    assert detail in found.detail


def test_an_unwritable_cache_is_no_error(gpu: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    gpu.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    use(gpu, FakeKernels())
    assert decoded_by_pillow() == 0


def test_nothing_is_proved_for_images_that_are_no_jpeg(gpu: pytest.MonkeyPatch) -> None:
    kernels = use(gpu, FakeKernels())
    decode_sources([PixelSource(SOURCES[0].decode())], GPU)
    decode_sources(SOURCES, GPU, "pillow")
    assert [provider.name for provider in candidates(GPU)] == ["triton", "pillow"]
    assert kernels.calls == 0


class Nvjpeg:
    """Stands for torchvision's operator; `log` holds what happened in which order."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.log = fails, []

    def __call__(self, files: list[torch.Tensor], mode: int, device: torch.device) -> list[torch.Tensor]:
        self.log.append(("decode", len(files), mode, device))
        if self.fails:
            raise RuntimeError("nvjpegDecodeBatched failed")
        return [torch.full((3, 11, 17), 7, dtype=torch.uint8) for _ in files]


@pytest.fixture
def nvjpeg(gpu: pytest.MonkeyPatch) -> Nvjpeg:
    operator = Nvjpeg()
    gpu.setattr(providers, "_nvjpeg", lambda: operator)
    gpu.setattr(torch.cuda, "current_device", lambda: 0)
    gpu.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    gpu.setattr(torch.cuda, "synchronize", lambda device: operator.log.append(("synchronize", device)))
    return operator


def test_nvjpeg_decodes_only_where_it_is_named(nvjpeg: Nvjpeg, gpu: pytest.MonkeyPatch) -> None:
    kernels = use(gpu, FakeKernels())
    assert decoded_by_pillow(GPU, [FULL_CHROMA]) == 0
    assert nvjpeg.log == []
    kernels.calls = 0
    named, other = decode_sources([FULL_CHROMA, SOURCES[0]], torch.device("cuda"), "nvjpeg")
    assert isinstance(named, Decoded)
    assert isinstance(other, Decoded)
    assert torch.all(named.pixels == 7)
    assert torch.equal(other.pixels, pillows(SOURCES[0]).pixels)  # what it cannot take, right kernels do
    assert kernels.calls == 1
    # torchvision makes a new decoder where the device differs from the last one, and never frees the old one.
    assert nvjpeg.log == [("decode", 1, ImageReadMode.RGB.value, GPU)]


def test_nothing_is_freed_while_a_failed_nvjpeg_may_write_to_it(nvjpeg: Nvjpeg) -> None:
    nvjpeg.fails = True
    pillow = providers.PROVIDERS["pillow"]

    def decode(*arguments: Any) -> list[Decoded | DecodeError]:
        nvjpeg.log.append(("pillow",))
        return type(pillow).decode(pillow, *arguments)

    with mock.patch.object(pillow, "decode", decode, create=True):
        (image,) = decode_sources([FULL_CHROMA], GPU, "nvjpeg")
    assert isinstance(image, Decoded)
    assert torch.equal(image.pixels, pillows(FULL_CHROMA).pixels)
    assert [entry[0] for entry in nvjpeg.log] == ["decode", "synchronize", "pillow"]


def test_nvjpeg_leaves_everybodys_warnings_alone(nvjpeg: Nvjpeg) -> None:
    """`catch_warnings` in a thread lets warnings that were shown once be shown again, in all threads."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            warnings.warn("shown once", stacklevel=1)
            decoding = threading.Thread(target=decode_sources, args=([FULL_CHROMA], GPU, "nvjpeg"))
            decoding.start()
            decoding.join()
    assert [str(warning.message) for warning in shown] == ["shown once"]


@pytest.mark.parametrize(
    ("operators", "names"), [(["decode_jpegs_cuda"], ["triton", "nvjpeg", "pillow"]), ([], ["triton", "pillow"])]
)
def test_a_torchvision_without_nvjpeg(operators: list[str], names: list[str], gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "cuda", "13.0")
    gpu.setattr(torch.ops, "image", SimpleNamespace(**dict.fromkeys(operators, print)))
    providers._nvjpeg.cache_clear()
    try:
        assert [provider.name for provider in providers_for(GPU)] == names
    finally:
        providers._nvjpeg.cache_clear()
