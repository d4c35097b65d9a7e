"""Rules and fixtures that every test shares."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import random
import signal
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Programs that tests start find this clone as the tests do: in pyproject.toml, `pythonpath`.
os.environ["PYTHONPATH"] = (
    f"{Path(__file__).resolve().parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
)
# OpenMP threads that spin while they wait take the cores that the data workers need. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Several files at a time: none takes more than one core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
import torch.utils.data._utils
import warm
from odd_photos import write_odd_photos

warm.prepare()
# Python 3.14 begins workers by "forkserver". Most tests make their datasets in functions, which only a fork can take;
# those about other start methods name them.
multiprocessing.set_start_method("fork", force=True)

# These files keep a core busy longest: begun last, they would be all that runs.
LONGEST = (
    "kernels/test_interpreted.py",
    "kernels/test_compiled.py",
    "test_together.py",
    "project/test_demo.py",
    "engines/test_compile.py",
    "core/test_distributed.py",
    "clients/test_strict.py",
    "kernels/test_compile.py",
    "kernels/test_processors.py",
    "tracing/test_timeline.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Undo what a shell does to jobs in the background: it lets them, and all that they start, ignore Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files go in the order of their names, but for the longest. Marks come before pytest selects by them."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONGEST))
    sample(items)
    share_out(items)


def cases_of(mark: str, items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each parametrized test that has a mark, without the slow ones, in an order drawn by their names."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker(mark) and hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            cases[item.path, item.name.partition("[")[0]].append(item)
    return [sorted(drawn, key=lambda item: zlib.crc32(item.name.encode())) for drawn in cases.values()]


def sample(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(count)`, so many cases stay everyday ones, and the others are slow.

    Where parameters are multiplied, all their values occur as evenly as so many cases allow.
    """
    for left in cases_of("sampled", items):
        times_seen: Counter[tuple[str, int]] = Counter()
        (count,) = next(left[0].iter_markers("sampled")).args
        for _ in range(min(count, len(left))):
            chosen = min(left, key=lambda item: sum(times_seen[value] for value in values_of(item)))
            times_seen.update(values_of(chosen))
            left.remove(chosen)
        for item in left:
            item.add_marker("slow")


def values_of(item: pytest.Item) -> list[tuple[str, int]]:
    """The parameters of a case and their values, each by the object that all cases with it share."""
    return [(name, id(value)) for name, value in item.callspec.params.items()]


def share_out(items: list[pytest.Item]) -> None:
    """Of a test marked `halved`, one half of the cases is left to the newest releases, the other to the oldest.

    Which, is drawn by their names: where parameters are multiplied, each half has every value of each.
    """
    cases: dict[tuple[Path, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_elsewhere = any(item.get_closest_marker(name) for name in ("slow", "once", "once_on_oldest"))
        if item.get_closest_marker("halved") and hasattr(item, "callspec") and not is_elsewhere:
            cases[item.path, item.name.partition("[")[0]].append(item)
    for (_, name), drawn in cases.items():
        drawn.sort(key=lambda item: zlib.crc32(item.name.encode()))
        first = zlib.crc32(name.encode())
        for number, item in enumerate(drawn if len(drawn) > 1 else [], first):
            item.add_marker("once" if number % 2 else "once_on_oldest")


def pytest_collection_finish() -> None:
    """Keep what is loaded by now out of later garbage collections: with it, each full one takes 0.2 seconds.

    And let a DataLoader wait for its workers one second, not five, before it terminates them: where it is collected in a
    cycle, such as that of a caught error, what tells them to end is gone. Loaded code has taken 5 seconds for all else.
    """
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1.0
    gc.freeze()
    atexit.register(gc.unfreeze)  # extension modules count what nobody released


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip CUDA tests with a reason where there is no device; on a GPU runner a missing device is a failure.

    Those marked `cuda(rehearsed=True)` are not skipped: without a device they run on the fake one.
    """
    marker = item.get_closest_marker("cuda")
    if marker is None or torch.cuda.is_available():
        return
    if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
        pytest.fail("FAIL_WITHOUT_CUDA=1, but torch.cuda.is_available() is false", pytrace=False)
    if not marker.kwargs.get("rehearsed"):
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def restore_random_state() -> Iterator[None]:
    """Keep a test's seeds and draws away from the tests after it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@pytest.fixture
def bit_generator_of_numpy(restore_random_state: None) -> Iterator[Callable[[Any], None]]:
    """Puts a bit generator in the place of numpy's global one, until the end of the test."""
    usual = np.random.get_bit_generator()
    yield np.random.set_bit_generator
    np.random.set_bit_generator(usual)


@pytest.fixture(scope="session")
def generated_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ImageFolder tree of photo-like files: all JPEG kinds, odd sizes, some PNG. Treat it as read-only."""
    folder = tmp_path_factory.mktemp("generated_photos")
    write_odd_photos(folder)
    return folder


@pytest.fixture(scope="session")
def photos(request: pytest.FixtureRequest) -> Path:
    """The ImageFolder tree named by TORCH_SINK_PHOTOS, else generated files. Treat it as read-only."""
    named = os.environ.get("TORCH_SINK_PHOTOS")
    if not named:
        return request.getfixturevalue("generated_photos")
    folder = Path(named)
    if not folder.is_dir():
        pytest.fail(f"TORCH_SINK_PHOTOS={named} is not a folder; unset it to use generated files", pytrace=False)
    return folder
