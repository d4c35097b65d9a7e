"""Every function of torch that takes a tensor gives, or raises, of recorded images and batches what it does of others."""

from __future__ import annotations

import pytest

from image.torch_calls import FAMILIES, differences, functions

# A few at a time, so that a report says where it stands.
PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_of_torch(family: str, part: int) -> None:
    names = [*functions(family)][part::PARTS]
    assert [line for name, function in names for line in differences(f"{family}.{name}", function)] == []


@pytest.mark.parametrize("name", ["sum", "fft_fft", "mul_", "__getitem__", "numpy", "data.__set__"])
def test_some_methods(name: str) -> None:
    methods = dict(functions("torch.Tensor"))
    if name in methods:
        assert differences(f"torch.Tensor.{name}", methods[name]) == []


def test_a_crash_is_seen() -> None:
    """Without what stands in for it, a call that reads memory at once would end the process."""

    def crash(x: object) -> None:
        import ctypes

        from torch_sink.image.handles.lazy import Lazy

        if isinstance(x, Lazy):
            ctypes.string_at(0)

    found = differences("crash", crash)
    assert len(found) == 1
    assert "ended with 11: ours image x" in found[0]
