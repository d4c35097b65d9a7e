"""Every function of torch that takes a tensor gives, or raises, of recorded images and batches what it does of others."""

from __future__ import annotations

import pytest

from image.torch_arguments import FAMILIES, functions
from image.torch_calls import differences

# A few at a time, so that a report says where it stands.
PARTS = 8


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_of_torch(family: str, part: int) -> None:
    names = [*functions(family)][part::PARTS]
    assert differences([(f"{family}.{name}", function) for name, function in names]) == []


def test_some_methods() -> None:
    names = ("sum", "fft_fft", "mul_", "__getitem__", "numpy", "data.__set__", "sub", "type_as", "clamp_", "__rdiv__")
    assert differences([(name, function) for name, function in functions("torch.Tensor") if name in names]) == []


def test_a_crash_is_seen() -> None:
    """Without what stands in for it, a call that reads memory at once would end the process."""

    def crash(x: object) -> None:
        import ctypes

        from torch_sink.image.handles.lazy import Lazy

        if isinstance(x, Lazy):
            ctypes.string_at(0)

    found = differences([("crash", crash), ("identity", lambda x: x)])
    assert len(found) == 1
    assert found[0] == "crash: the process ended with 11: ours image, (x)"
