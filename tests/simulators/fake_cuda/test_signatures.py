"""The fake device takes what this release of torch takes, and nothing else."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch

from .device import FakeCuda

REPLACED = FakeCuda()._names()
FUNCTIONS = sorted(name for name in REPLACED if inspect.isroutine(getattr(torch.cuda, name)))
CLASSES = sorted(name for name in REPLACED if inspect.isclass(getattr(torch.cuda, name)) and name != "stream")
_NAMES = {*FakeCuda()._functions_of_pools(), "_cuda_getCurrentStream", "_host_emptyCache"}
BINDINGS = {name: getattr(torch._C, name) for name in sorted(_NAMES) if hasattr(torch._C, name)}
LIKE_NEW = {"Stream": {"stream_id"}}  # what torch takes as **kwargs


def parameters(function: Any) -> list[tuple[str, Any, bool]]:
    """Name, kind and whether it may be left out, of each parameter but self."""
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default is not one.empty) for one in found if one.name not in ("self", "cls")]


def test_every_name_that_is_replaced_is_there() -> None:
    assert [name for name in REPLACED if not hasattr(torch.cuda, name)] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_what_torch_s_takes(name: str) -> None:
    if name != "stream":
        assert parameters(REPLACED[name]) == parameters(getattr(torch.cuda, name))


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_and_its_methods_take_what_torch_s_take(name: str) -> None:
    stock, fake = getattr(torch.cuda, name), REPLACED[name]
    made_by = stock.__init__ if name == "device" else stock.__new__
    known = {one for one, _, _ in parameters(made_by)} | LIKE_NEW.get(name, set())
    assert {one for one, _, _ in parameters(fake)} <= known
    for method, function in vars(fake).items():
        if method.startswith("_") or not inspect.isfunction(function) or not hasattr(stock, method):
            continue  # what only the fake has serves its own files
        theirs = getattr(stock, method)
        ours = [one for one in parameters(function) if one[1] is not inspect.Parameter.VAR_KEYWORD]
        assert ours == [one for one in parameters(theirs) if one[0] in {ours_name for ours_name, _, _ in ours}], method
        required = [one[0] for one in parameters(theirs) if not one[2]]
        assert [one[0] for one in ours if not one[2]] == required, method


@pytest.mark.parametrize("name", BINDINGS)
def test_a_function_of_the_bindings_takes_as_many_arguments(name: str, fake_cuda: FakeCuda) -> None:
    stock, fake = BINDINGS[name], getattr(torch._C, name)
    assert fake is not stock
    if stock.__doc__:
        count = len(re.findall(r"\barg\d+:", stock.__doc__))
    else:
        with pytest.raises(TypeError, match=r"takes (no|exactly one) arguments? \(7 given\)") as refused:
            stock(*range(7))
        count = int("exactly one" in str(refused.value))
    assert len(parameters(fake)) == count
