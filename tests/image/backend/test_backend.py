"""Switching: the very same objects come back, switches nest, and wrong requests are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import warm
from torchvision.datasets.folder import default_loader

import torch_sink
from image.cases import encoded
from torch_sink.common.patches import read
from torch_sink.image import reroute
from torch_sink.image.core.fallback import report_fallback
from torch_sink.image.handles.image import LazyImage


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    yield
    torch_sink.set_image_backend("PIL")
    torchvision.set_image_backend("PIL")


def places() -> list[tuple[Any, Any, Any]]:
    """What is stored at every place that the backend fills."""
    return [(owner, name, read(owner, name)) for owner, name, _ in reroute.rows()]


def assert_same_objects(before: list[tuple[Any, Any, Any]]) -> None:
    after = places()
    assert [(id(owner), name) for owner, name, _ in after] == [(id(owner), name) for owner, name, _ in before]
    assert all(old is new for (_, _, old), (_, _, new) in zip(before, after, strict=True))


def test_everything_is_filled_and_everything_comes_back() -> None:
    before, setter = places(), torchvision.set_image_backend
    assert len(before) > 100
    torch_sink.set_image_backend("device", device="cpu")
    assert all(old is not new for (_, _, old), (_, _, new) in zip(before, places(), strict=True))
    torch_sink.set_image_backend("PIL")
    assert_same_objects(before)
    assert torchvision.set_image_backend is setter


def test_the_page_counts_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "docs" / "made_by"))
    import update_places

    page = update_places.PAGE.read_text()
    if f"torchvision {update_places.release()} " not in page:
        pytest.skip(f"docs/inside/image_backend.md is about another release than torchvision {torchvision.__version__}")
    # Another test may have imported timm and torchdata.
    monkeypatch.setattr(reroute, "_timm", lambda: iter(()))
    monkeypatch.setattr(reroute, "WORKER_LOOPS", reroute.WORKER_LOOPS[:1])
    assert page == update_places.with_table(page), "run python docs/made_by/update_places.py"


def test_nested_switches() -> None:
    before = places()
    with torch_sink.image_backend("device", device="cpu"):
        inside = places()
        with torch_sink.image_backend("device", device="meta", strict=True):
            assert reroute.settings.active.device == "meta"
            with torch_sink.image_backend("PIL"):
                assert_same_objects(before)
                assert torch_sink.get_image_backend() == "PIL"
            assert torch_sink.get_image_backend() == "device"
            assert reroute.settings.active.strict
        assert reroute.settings.active[:2] == ("cpu", False)
        assert len(inside) == len(places())
    assert_same_objects(before)
    assert reroute.settings.active is None


def test_a_place_that_does_not_exist_leaves_nothing_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a release of torchvision would do that torch_sink does not know."""
    before, rows = places(), list(reroute.rows())
    unknown = torchvision.transforms, "a_function_of_another_release", lambda stock: stock
    monkeypatch.setattr(reroute, "rows", lambda: iter([*rows, unknown]))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="a_function_of_another_release does not exist: this version of torch_sink does not"
        ):
            torch_sink.set_image_backend("device", device="cpu")
        monkeypatch.setattr(reroute, "rows", lambda: iter(rows))
        assert_same_objects(before)
        assert torch_sink.get_image_backend() == "PIL"
        assert reroute.settings.active is None
        monkeypatch.setattr(reroute, "rows", lambda: iter([*rows, unknown]))


LACKING = """
import os, sys, torch, torchvision
for name in sys.argv[1:]:
    if os.fork() == 0:  # each finds a torch that lacks this function alone
        delattr(torch._C, name)
        import torch_sink
        try:
            torch_sink.set_image_backend("device", device="cpu")
        except RuntimeError as error:
            print(error, torch_sink.get_image_backend(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_release_of_torch_that_lacks_a_function_is_named() -> None:
    names = ["_swap_tensor_impl", "_to_dlpack", "_set_storage_data_ptr_access_error_msg"]
    names += ["_to_dlpack_versioned"] if hasattr(torch._C, "_to_dlpack_versioned") else []  # from torch 2.9 on
    said = warm.run("-c", LACKING, *names, timeout=300).stdout.splitlines()
    for name, line in zip(names, said, strict=True):
        assert re.search(rf"{name}.*: this version of torch_sink does not know torchvision .* and torch .* PIL$", line)


def test_an_inner_switch_keeps_the_outer_report() -> None:
    with torch_sink.image_backend("device", device="cpu"):
        settings, report = reroute.settings.active, torch_sink.fallback_report
        report_fallback("an operation", "a reason")
        for name in ("PIL", "device"):
            with torch_sink.image_backend(name):
                assert not report()
                report_fallback("another operation", "a reason")
                assert list(report().counts) == [("another operation", "a reason")]
            assert list(report().counts) == [("an operation", "a reason")]
            assert reroute.settings.active == settings


def test_an_error_inside_switches_back() -> None:
    before = places()
    with pytest.raises(KeyError), torch_sink.image_backend("device", device="cpu"):
        raise KeyError
    assert_same_objects(before)


def test_twice_is_once() -> None:
    before = places()
    torch_sink.set_image_backend("device", device="cpu")
    filled = places()
    torch_sink.set_image_backend("device", device="cpu")
    assert_same_objects(filled)
    torch_sink.set_image_backend("PIL")
    torch_sink.set_image_backend("PIL")
    assert_same_objects(before)


def test_torchvision_agrees() -> None:
    assert torch_sink.get_image_backend() == torchvision.get_image_backend() == "PIL"
    torchvision.set_image_backend("accimage")
    assert torch_sink.get_image_backend() == "accimage"
    with torch_sink.image_backend("device", device="cpu"):
        assert torch_sink.get_image_backend() == torchvision.get_image_backend() == "device"
    assert torch_sink.get_image_backend() == torchvision.get_image_backend() == "accimage"
    torch_sink.set_image_backend("device", device="cpu")
    torchvision.set_image_backend("PIL")
    assert torch_sink.get_image_backend() == torchvision.get_image_backend() == "PIL"
    assert reroute.settings.active is None
    torchvision.set_image_backend("PIL")
    torch_sink.set_image_backend("device", device="cpu")
    torchvision.set_image_backend("device")
    assert torch_sink.get_image_backend() == "device"
    torch_sink.set_image_backend("accimage")
    assert torchvision.get_image_backend() == "accimage"


@pytest.mark.parametrize("name", ["pil", "cuda", "", "Device"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    before = places()
    for setter in (torch_sink.set_image_backend, lambda wrong: torch_sink.image_backend(wrong).__enter__()):
        with pytest.raises(ValueError, match=r"unknown image backend.*'device', 'PIL', 'accimage'"):
            setter(name)
    assert_same_objects(before)


def test_an_unknown_name_keeps_the_active_backend() -> None:
    torch_sink.set_image_backend("device", device="cpu")
    with pytest.raises(ValueError, match="unknown image backend 'nothing'"):
        torchvision.set_image_backend("nothing")
    assert torch_sink.get_image_backend() == "device"


@pytest.mark.parametrize("name", ["PIL", "accimage"])
@pytest.mark.parametrize("arguments", [{"device": "cpu"}, {"strict": True}])
def test_settings_of_the_device_backend_are_its_own(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"belong to the 'device' backend, not to '{name}'"):
        torch_sink.set_image_backend(name, **arguments)


@pytest.mark.parametrize("device", ["xpu", "mps", "cuda:99"])
def test_a_device_that_is_not_there(device: str) -> None:
    before = places()
    with pytest.raises(RuntimeError, match=f"'{device}' is not available"):
        torch_sink.set_image_backend("device", device=device)
    assert_same_objects(before)
    assert torch_sink.get_image_backend() == "PIL"


def test_no_device_named_means_the_accelerator_or_the_cpu() -> None:
    torch_sink.set_image_backend("device")
    expected = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    assert torch.device(reroute.settings.active.device).type == expected


def test_code_that_was_imported_before_gives_handles(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(encoded(20, 10))
    assert type(default_loader(str(path))) is not LazyImage
    with torch_sink.image_backend("device", device="cpu"):
        assert type(default_loader(str(path))) is LazyImage
    assert type(default_loader(str(path))) is not LazyImage


UNGUARDED = """
import sys
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
import torch_sink

torch_sink.set_image_backend("device")
transform = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
images = datasets.ImageFolder(sys.argv[1], transform)

def total(start_method, workers):
    torch.manual_seed(3)
    loader = DataLoader(images, batch_size=2, num_workers=int(workers), multiprocessing_context=start_method)
    return sum(batch.double().sum().item() for batch, _ in loader)

if __name__ == "__main__":
    ways = [way.split() for way in sys.argv[2:]]
    torch_sink.set_image_backend("device")
    made = [total(*way) for way in ways]
    torch_sink.set_image_backend("PIL")
    assert made == [total("fork", workers) for _, workers in ways]  # draws do not depend on how workers are started
    print("equal", made)
"""


# Each spawned worker loads torch, which takes seconds; those of a server are forks of one process that has loaded it.
@pytest.mark.once_on_oldest
@pytest.mark.parametrize("ways", [("spawn 1", "forkserver 2"), pytest.param(("spawn 2",), marks=pytest.mark.slow)])
def test_a_script_that_switches_outside_of_its_guard(tmp_path: Path, ways: tuple[str, ...]) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    for seed in range(3):
        (tmp_path / "images" / "cat" / f"{seed}.jpg").write_bytes(encoded(40, 30, seed))
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    # Not under tmp_path: the processes' sockets lie there, and the path of a socket has to be short.
    with tempfile.TemporaryDirectory() as scratch:
        finished = subprocess.run(
            [sys.executable, script, tmp_path / "images", *ways],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "TMPDIR": scratch, "TRITON_INTERPRET": "0"},
        )
        assert finished.returncode == 0, finished.stderr
        assert finished.stdout.startswith("equal")
        assert not list(Path(scratch).glob("torch_sink*")), "files were left behind"
