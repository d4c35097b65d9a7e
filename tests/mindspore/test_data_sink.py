"""`data_sink`: steps that take their batches from the queue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_sink.mindspore import data_sink
from torch_sink.sink import SinkLoader


def test_data_sink_continues_the_traversal() -> None:
    batches = [(torch.tensor(float(number)), torch.tensor(1.0)) for number in range(4)]
    step = data_sink(lambda a, b: a + b, batches, sink_size=3)
    assert [step().item() for _ in range(4)] == [3.0, 2.0, 1.0, 4.0]
    step.close()
    step.close()
    named = data_sink(lambda x: x, [{"x": torch.tensor(7.0)}])
    assert named().item() == 7.0


def test_data_sink_binds_a_sink_loader_to_one_function() -> None:
    with SinkLoader([torch.tensor(float(number)) for number in range(4)]) as loader:
        first = data_sink(lambda x: x, loader)
        assert first().item() == 0.0
        with pytest.raises(ValueError, match="bound to another function"):
            data_sink(lambda x: -x, loader)
        first.close()
        second = data_sink(lambda x: -x, loader)
        assert second().item() == -1.0, "the traversal goes on"
        first.close()
        with pytest.raises(ValueError, match="bound to another function"):
            data_sink(lambda x: x, loader)
        del second
        assert data_sink(lambda x: x, loader)().item() == 2.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, []), TypeError, "fn is a int"),
        ((print, [], 0), ValueError, "sink_size=0"),
        ((print, [], -1), ValueError, "sink_size=-1"),
        ((print, [], 1.5), TypeError, "sink_size=1.5"),
        ((print, [], 1, "O1"), TypeError, "JitConfig"),
    ],
)
def test_data_sink_arguments(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        data_sink(*arguments)
