"""`with image_backend(...)`: blocks inside of each other, and those of several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torchvision
from torch.utils.data import DataLoader

import torch_sink
from image.backend.test_backend import assert_same_objects, places
from torch_sink.image import backend, reroute
from torch_sink.image.core.fallback import report_fallback


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """After each test here, every block is left: the process has to be as it was."""
    before, setter = places(), torchvision.set_image_backend
    yield
    assert_same_objects(before)
    assert torchvision.set_image_backend is setter
    assert torch_sink.get_image_backend() == torchvision.get_image_backend() == "PIL"
    assert reroute.settings.active is None


def device(**options: Any) -> Any:
    return torch_sink.image_backend("device", device="cpu", **options)


def test_blocks_inside_of_each_other() -> None:
    torch_sink.set_image_backend("device", device="meta")
    settings = reroute.settings.active
    report_fallback("around the blocks", "a reason")
    with device(strict=True):
        assert reroute.settings.active is not None
        assert reroute.settings.active.strict
        assert not torch_sink.fallback_report()
        with torch_sink.image_backend("PIL"):
            assert torch_sink.get_image_backend() == "PIL"
        assert reroute.settings.active.strict
        with pytest.raises(ValueError, match="unknown image backend"), torch_sink.image_backend("pil"):
            pass
        assert reroute.settings.active.strict
    assert reroute.settings.active == settings
    assert list(torch_sink.fallback_report().counts) == [("around the blocks", "a reason")]
    torch_sink.set_image_backend("PIL")


def in_thread(function: Callable[[], None]) -> list[Exception]:
    """What a function raises in a thread of its own."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="another")
    thread.start()
    thread.join()
    return raised


def test_other_threads_are_refused() -> None:
    with device():
        inside = places()
        for use in (lambda: device().__enter__(), lambda: torch_sink.set_image_backend("PIL")):
            (error,) = in_thread(use)
            assert isinstance(error, torch_sink.SinkError)
            assert "another thread is inside of `with image_backend(...)`" in str(error)
        assert_same_objects(inside)
        report_fallback("an operation", "a reason")
        assert in_thread(lambda: torch_sink.image_backend("PIL").__enter__())
        assert list(torch_sink.fallback_report().counts) == [("an operation", "a reason")]


def test_many_threads_at_a_time() -> None:
    """Each of them is inside alone, or is refused."""
    outcomes: list[str] = []
    begin = threading.Barrier(8)

    def enter() -> None:
        begin.wait()
        for _ in range(3):
            try:
                with device():
                    assert reroute.settings.active is not None
                    outcomes.append("inside")
            except torch_sink.SinkError:
                outcomes.append("refused")

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 24
    assert "inside" in outcomes


def test_a_block_of_a_thread_that_has_ended_hinders_nobody() -> None:
    block = device()
    assert not in_thread(lambda: block.__enter__())
    with device():
        pass
    assert not in_thread(lambda: torch_sink.set_image_backend("device", device="cpu"))
    block.__exit__(None, None, None)


def test_a_generator_with_a_block_that_another_thread_closes() -> None:
    def inside() -> Iterator[None]:
        with device():
            yield

    generator = inside()
    next(generator)
    assert not in_thread(generator.close)  # type: ignore[attr-defined]
    assert torch_sink.get_image_backend() == "PIL"
    assert not in_thread(lambda: torch_sink.set_image_backend("PIL"))
    with device():
        assert in_thread(lambda: torch_sink.set_image_backend("PIL"))


def test_threads_that_set_the_backend_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, begun, others = backend._switch, threading.Event(), []

    def switch(*args: Any) -> None:
        if not begun.is_set():
            begun.set()
            others.append(threading.Thread(target=lambda: errors.extend(in_thread(set_it))))
            others[0].start()
            others[0].join(0.05)  # it waits for this one
        stock(*args)

    def set_it() -> None:
        torch_sink.set_image_backend("PIL")

    errors: list[Exception] = []
    monkeypatch.setattr(backend, "_switch", switch)
    set_it()
    others[0].join()
    assert not errors


class SwitchesItself(list):  # type: ignore[type-arg]
    """A dataset whose code switches the backend in the data worker."""

    def __getitem__(self, index: Any) -> Any:
        with torch_sink.image_backend("PIL"):
            return torch_sink.get_image_backend()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_workers_that_are_started_inside_of_a_block_switch_as_they_like() -> None:
    with device():
        loader = DataLoader(SwitchesItself([0, 1]), num_workers=1, multiprocessing_context="fork")
        assert list(loader) == [["PIL"], ["PIL"]]
