"""`pytest -p simulators.fake_cuda.left_out`: what the fake device cannot show, and why; everything else marked `cuda` runs on it."""

from __future__ import annotations

import pytest

# Name of a test behind "tests/", its parameters left out -> the reason.
REASONS = {
    "image/decode/test_decode.py::test_nvjpeg_where_it_is_named": "nvJPEG decodes on a real device only",
    "loop/engines/test_cuda.py::test_compiled_and_captured": "torch.compile writes kernels for a real device",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if _name(item) in REASONS]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, reason in REASONS.items():
        terminalreporter.write_line(f"left out on the fake device: {name}: {reason}")


def _name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/").partition("[")[0]
