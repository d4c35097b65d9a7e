"""Every record of an operation is complete: stock code, kernel work, a promise; and it has examples of its calls."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision import transforms

import torch_sink
from image.examples import REFERENCES, Arguments, Example
from image.trials import EXAMPLES, examples_of
from torch_sink.image.core.ops import LOWER, RECORDERS_OF, Operation, Promise, recorded
from torch_sink.image.operations import operations

pytestmark = pytest.mark.halved

# torch's own arithmetic mixes whole batches once they are made.
ON_BATCHES = ("batch.mix_up", "batch.cut_mix")
# No work: the bytes are what they were, or lie elsewhere in memory.
WITHOUT_WORK = (*ON_BATCHES, "to_pil_image", "contiguous", "clone")


def missing(operation: Operation) -> set[str]:
    """What a record lacks. That its examples reach each of its calls is tested by `test_parity.py`.

    A record without stock functions is of other ways to call operations that have their own.
    """
    if operation.record and not operation.stock:
        return set()
    arguments = [Arguments(random.Random(0), reference, 16, 24, 3) for reference in REFERENCES]
    on_batches = bool(operation.stock) and operation.stock.keys() <= set(ON_BATCHES)
    lacks = {
        "stock": not operation.stock or not all(map(callable, operation.stock.values())),
        "lower": not operation.is_value and not LOWER.keys() | WITHOUT_WORK >= operation.stock.keys(),
        "promise": not isinstance(operation.promise, Promise) and not callable(operation.promise),
        "examples": not any(examples_of(operation, each) for each in arguments) and not on_batches,
    }
    return {what for what, is_missing in lacks.items() if is_missing}


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.name)
def test_a_record_is_complete(operation: Operation) -> None:
    assert not missing(operation)


def test_examples_stand_in_the_order_of_operations() -> None:
    """And none is of an operation that nobody knows."""
    assert [*EXAMPLES] == [operation.name for operation in operations() if operation.name in EXAMPLES]


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.name)
@pytest.mark.sampled(24)
def test_contiguous_returns_a_tensor_itself_where_stock_code_does(operation: Operation) -> None:
    """A call after which nobody knows gives a second tensor of the same memory."""
    for reference in REFERENCES[1:]:
        a = Arguments(random.Random(0), reference, 16, 24, 3)
        image = Image.fromarray(a.noise(16, 24).mul(1 / a.scale).byte().permute(1, 2, 0).numpy())
        for example in examples_of(operation, a):
            if example.run or hasattr(a.functional, example.name):
                with suppress(TypeError, ValueError, NotImplementedError):  # arguments that this family refuses
                    expected = _called(example, a, image)
                    with torch_sink.image_backend("device", device="cpu"):
                        made = _called(example, a, image)
                        ops = made.lazy_recording.calls if hasattr(made, "lazy_recording") else ()
                        is_itself = isinstance(made, torch.Tensor) and made.contiguous() is made
                    if any(op.operation.changes_layout(op) for op in ops):
                        assert not is_itself, example.title
                    elif isinstance(expected, torch.Tensor):
                        assert is_itself == (expected.contiguous() is expected), example.title


def _called(example: Example, a: Arguments, image: Image.Image) -> Any:
    tensor = transforms.functional.to_tensor(image)
    return example.called(a.functional, tensor if a.scale != 1 else tensor.to(torch.uint8))


def test_what_is_missing_is_seen() -> None:
    assert missing(Operation("nothing", stock={}, promise=None)) == {"stock", "promise", "examples"}  # type: ignore[arg-type]
    in_kernels = Operation("half done", stock={})
    object.__setattr__(in_kernels, "stock", {"v1.half_done": abs})  # past the registries
    assert missing(in_kernels) == {"lower", "examples"}


def test_an_operation_is_defined_once() -> None:
    with pytest.raises(ValueError, match="defined twice"):
        Operation("again", stock={"v1.crop": lambda image: image})
    with pytest.raises(ValueError, match="recorded twice"):
        Operation("again", stock={}, record={"v1.crop": lambda family, handle: handle})


@pytest.mark.parametrize("kind", RECORDERS_OF)
def test_what_is_recorded_twice_raises(kind: str) -> None:
    """Else the order of imports would decide which recorder runs."""
    known = next(iter(RECORDERS_OF[kind]))
    with pytest.raises(ValueError, match="recorded twice"):
        recorded(known, of=kind)(lambda handle: handle)
