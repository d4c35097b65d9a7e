"""Damaged files in batches: transforms are launched before anybody knows, and what is damaged is made anew."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from image.check import assert_same_bits, device_in_use
from image.jpeg_files import damaged, jpeg, watched_pillow
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

import torch_sink
from torch_sink.errors import DecodeError
from torch_sink.image.decode.encoded import EncodedSource
from torch_sink.image.program import block
from torch_sink.image.run import device as on_device

pytestmark = pytest.mark.once_on_oldest

PIPELINE = v1.Compose([v1.RandomResizedCrop((11, 13)), v1.RandomHorizontalFlip(), v1.ToTensor()])
MIX = v2.CutMix(num_classes=3, alpha=100.0)
WHOLE, ODD, BROKEN = "whole.jpg", "odd.jpg", "broken.jpg"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files that the kernels decode; that they find damaged and Pillow does not; that Pillow finds damaged as well."""
    (tmp_path / WHOLE).write_bytes(jpeg(24, 20, seed=1))
    (tmp_path / ODD).write_bytes(damaged(jpeg(24, 20, "4:4:4", seed=1), "zeroed", 0))
    (tmp_path / BROKEN).write_bytes(damaged(jpeg(24, 20, seed=3), "doubled", 1))
    stock = EncodedSource.decode

    def decode(source: EncodedSource) -> Any:
        if source.path.endswith(BROKEN):
            raise DecodeError(source.path, -1, "broken data stream")
        return stock(source)

    monkeypatch.setattr(EncodedSource, "decode", decode)
    torch_sink.set_decode_provider("triton")
    yield tmp_path
    torch_sink.set_decode_provider(None)


def batch_of(folder: Path, names: list[str], seed: int = 4) -> Any:
    torch.manual_seed(seed)
    return default_collate([PIPELINE(default_loader(str(folder / name))) for name in names])


def stock_and_lazy(folder: Path, names: list[str]) -> tuple[torch.Tensor, Any]:
    expected = batch_of(folder, names)
    with torch_sink.image_backend("device", device=device_in_use()):
        return expected, batch_of(folder, names)


def mixed(batch: Any) -> Any:
    torch.manual_seed(8)
    return MIX(batch, torch.arange(len(batch)) % 3)[0]


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens while a batch is made, in order."""
    seen: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (seen.append(name), function(*arguments))[1]

    monkeypatch.setattr(on_device.Launches, "run", noted("transforms", on_device.Launches.run))
    later = on_device.to_host_later
    monkeypatch.setattr(on_device, "to_host_later", lambda values: noted("wait", later(values)))
    return seen


def test_nothing_waits_before_the_transforms(folder: Path, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody opens the calls that came along."""
    monkeypatch.setattr(block, "get_worker_info", lambda: "of a worker")
    expected, batch = stock_and_lazy(folder, [WHOLE, WHOLE])
    crossed = pickle.loads(pickle.dumps(batch))
    assert_same_bits(crossed.to(device_in_use()).cpu(), expected)
    assert order == ["transforms", "wait"]
    packed_calls = crossed.program.packed
    assert packed_calls._contents is None
    assert_same_bits(crossed.materialize(), expected)
    assert packed_calls._contents is not None


def test_results_of_another_layout(folder: Path) -> None:
    expected, batch = stock_and_lazy(folder, [WHOLE, WHOLE, WHOLE])
    device = torch.device(device_in_use())
    every_other = torch.full((2 * len(expected), *expected.shape[1:]), 7.0, device=device)
    for options in ({"memory_format": torch.channels_last}, {"out": every_other[::2]}):
        made, _ = batch.__torch_sink_execute__(device, **options)
        assert not made.is_contiguous()
        assert_same_bits(made.contiguous().cpu(), expected)
    assert (every_other[1::2] == 7).all()


@pytest.mark.parametrize("mix", [lambda batch: batch, mixed], ids=["", "mixed"])
def test_what_pillow_decodes_is_made_anew(folder: Path, order: list[str], mix: Callable[[Any], Any]) -> None:
    """Also where the same file comes twice, and each time another part of it is read."""
    names = [ODD, WHOLE, ODD]
    with torch_sink.image_backend("device", device=device_in_use()), watched_pillow() as seen:
        made = mix(batch_of(folder, names)).to(device_in_use()).cpu()
    assert_same_bits(made, mix(batch_of(folder, names)))
    assert [Path(source.path).name for source in seen] == [ODD]  # type: ignore[attr-defined]
    assert order == ["transforms", "wait", "transforms"]


def test_an_error_names_the_file_and_its_place(folder: Path) -> None:
    _, batch = stock_and_lazy(folder, [WHOLE, ODD, BROKEN, WHOLE, BROKEN])
    with pytest.raises(DecodeError, match="broken data stream") as caught:
        batch.to(device_in_use())
    assert (caught.value.path, caught.value.index_in_batch) == (str(folder / BROKEN), 2)


@pytest.mark.parametrize(
    ("policy", "rows", "given"),
    [
        ("skip", [0, 1, 3], True),
        ("replace", [0, 1, 3, 3, 0], False),
        pytest.param("skip", [0, 1, 3], False, marks=pytest.mark.slow),
        pytest.param("replace", [0, 1, 3, 3, 0], True, marks=pytest.mark.slow),
    ],
)
def test_policies(folder: Path, policy: str, rows: list[int], given: bool) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = batch_of(folder, [WHOLE, ODD, BROKEN, WHOLE, BROKEN])
    expected = default_collate([image for at in rows for image in one_image(folder, at)])
    out = torch.full((5, 3, 11, 13), -7.0, device=device_in_use()) if given else None
    made, shown = batch.__torch_sink_execute__(device_in_use(), out=out, on_decode_error=policy)
    assert shown == rows
    assert_same_bits(made.cpu(), expected)
    assert [Path(broken.path).name for broken in batch.broken_files] == [BROKEN, BROKEN]
    if out is not None:
        assert made.data_ptr() == out.data_ptr()
        assert (out[len(rows) :] == -7).all()


def one_image(folder: Path, at: int) -> list[torch.Tensor]:
    """The image of a batch of `test_policies`, as stock code makes it; the broken ones only draw."""
    names = [WHOLE, ODD, WHOLE, WHOLE, WHOLE]
    return [batch_of(folder, names)[at]]


@pytest.mark.parametrize(
    ("policy", "rows"), [("replace", [0, 1, 0, 0]), pytest.param("skip", [0, 1], marks=pytest.mark.slow)]
)
def test_damage_spreads_where_images_are_mixed(folder: Path, policy: str, rows: list[int]) -> None:
    with torch_sink.image_backend("device", device=device_in_use()):
        batch = mixed(batch_of(folder, [WHOLE, ODD, BROKEN, WHOLE]))
    expected = mixed(batch_of(folder, [WHOLE, ODD, WHOLE, WHOLE]))
    made, shown = batch.__torch_sink_execute__(device_in_use(), on_decode_error=policy)
    assert shown == rows
    assert_same_bits(made.cpu(), expected[rows])
