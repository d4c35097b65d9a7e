"""The API reference, the checks of calls and the options' types hold for everything that is public."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_sink
from torch_sink import Model, StepLoop

pytestmark = pytest.mark.once

PAGE = Path(torch_sink.__file__).resolve().parents[1] / "docs" / "api.md"
# Class -> public members that the reference leaves out, and who calls them instead.
LEFT_OUT = {
    "StepLoop": {"run_epochs", "prepare", "compile_ahead", "evaluator", "evaluator_of_model"},  # Model, and Evaluation
    "RunHistory": {"add", "note_counts", "note_update"},  # a run
    "FallbackReport": {"said_of_origins"},  # the commands; str() has it
    "DecodeReport": {"add", "log", "summary"},  # loaders; str() has the summary
    "JitConfig": {"captures"},  # the engines
    "Accuracy": {"sums", "compute_from"},  # evaluations
    "MeanIoU": {"sums", "compute_from", "agree"},  # evaluations
    "StaticLossScaler": {"to"},  # the loop; `scale` moves the state by itself
}
# What nobody makes: results, what events are called with, and exceptions, whose arguments are Python's.
MADE_FOR_THE_USER = {"DecodeReport", "FallbackReport", "QueueStats", "RunContext", "RunHistory", "SupportRow"}

# LambdaCallback names the events; the others take one argument, and are called inside compiled steps.
CHECKED_OTHERWISE = {"LambdaCallback", "all_finite", "grads_finite"}


def public_classes() -> dict[str, type]:
    found = {name: getattr(torch_sink, name) for name in torch_sink.__all__}
    found |= {name: getattr(torch_sink.amp, name) for name in torch_sink.amp.__all__}
    return {name: value for name, value in found.items() if isinstance(value, type)}


def documented() -> dict[str, Any]:
    """Name -> the members that the reference lists; None for all of them."""
    found = re.findall(r"^::: torch_sink\.([\w.]+)\n((?: +.*\n)*)", PAGE.read_text(), flags=re.MULTILINE)
    pages: dict[str, Any] = {}
    for name, options in found:
        listed = re.search(r"members: (?:\[(.*?)\]|false)", options, flags=re.DOTALL)
        pages[name.rpartition(".")[2]] = None if listed is None else re.findall(r"\w+", listed[1] or "")
    return pages


def members_of(kind: type) -> dict[str, Any]:
    """The public methods and properties that a class defines itself."""
    is_shown = (inspect.isfunction, lambda value: isinstance(value, property))
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("_") and any(is_one(value) for is_one in is_shown)
    }


def attributes_of(kind: type) -> set[str]:
    """The attributes that a docstring of a class describes."""
    section = re.search(r"Attributes:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(kind) or "", flags=re.DOTALL)
    return set(re.findall(r"^    (\w+):", section[1], flags=re.MULTILINE)) if section else set()


def test_the_reference_lists_every_public_member_or_leaves_it_out_on_purpose() -> None:
    pages, missing, unknown = documented(), [], []
    for name, kind in public_classes().items():
        listed = pages.get(name)
        members, described = members_of(kind), attributes_of(kind)
        if dataclasses.is_dataclass(kind):
            fields = {field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")}
            assert fields <= described, f"{name}: {fields - described}"
        if listed is None:  # mkdocstrings shows all of them
            listed = [*members] if name in pages or name in torch_sink.amp.__all__ else []
        shown = {*(listed or ()), *described, *LEFT_OUT.get(name, ())}
        missing += [f"{name}.{member}" for member in members if member not in shown]
        unknown += [
            f"{name}.{member}" for member in {*(listed or ()), *LEFT_OUT.get(name, ())} if not hasattr(kind, member)
        ]
    assert missing == []
    assert unknown == []


def test_the_check_of_the_reference_sees_a_member_that_is_not_listed() -> None:
    assert {"predict", "progress", "step_count"} <= {*members_of(StepLoop)}
    assert attributes_of(StepLoop) == {"step_count", "history", "progress"}
    assert documented()["StepLoop"][:3] == ["run", "evaluate", "predict"]


def calls() -> Iterator[tuple[str, Callable[..., Any], list[Any]]]:
    """Name, callable and leading arguments of everything public that takes arguments."""
    pages = documented()
    names = {name: torch_sink for name in torch_sink.__all__} | {
        name: torch_sink.amp for name in torch_sink.amp.__all__
    }
    for name, module in names.items():
        value = getattr(module, name)
        is_class = isinstance(value, type)
        if inspect.ismodule(value) or name in MADE_FOR_THE_USER or (is_class and issubclass(value, BaseException)):
            continue
        if inspect.signature(value).parameters and name not in CHECKED_OTHERWISE:
            yield name, value, []
        for member in pages.get(name) or () if is_class else ():
            function = getattr(value, member)
            if inspect.isfunction(function) and len(inspect.signature(function).parameters) > 1:
                yield f"{name}.{member}", function, [None]


CALLS = {name: (call, first) for name, call, first in calls()}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_fit_says_what_would(name: str) -> None:
    call, first = CALLS[name]
    with pytest.raises(TypeError, match=rf"^{name} has no argument 'no_such_argument'; its arguments are|takes none"):
        call(*first, no_such_argument=1)
    parameters = [one for one in inspect.signature(call).parameters.values() if one.name != "self"]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return
    with pytest.raises(TypeError, match=rf"^{name} got (an argument without a name that needs one|99 arguments)"):
        call(*first, *[None] * 99)
    needed = [one.name for one in parameters if one.default is one.empty]
    if needed:
        with pytest.raises(TypeError, match=rf"^{name} needs {', '.join(needed)}; call it as"):
            call(*first)
    with pytest.raises(TypeError, match=rf"^{name} (got {parameters[0].name} twice|got an argument without a name)"):
        call(*first, None, **{parameters[0].name: None})


def test_the_calls_of_the_guide_are_among_those_checked() -> None:
    methods = "run evaluate predict save resume load_state_dict"
    expected = {f"StepLoop.{name}" for name in methods.split()} | {
        f"Model.{name}" for name in ["train", "fit", "eval", "predict", "build"]
    }
    expected |= {
        "StepLoop",
        "Model",
        "SinkLoader",
        "data_sink",
        "jit",
        "set_image_backend",
        "timeline",
        "EarlyStopping",
    }
    assert expected <= {*CALLS}


# Texts that are free, or of which what is there decides.
FREE = {"prefix", "monitor", "file_name", "provider", "set_decode_provider.name", "explain.device"}


@pytest.mark.parametrize("name", CALLS)
def test_an_option_of_a_few_texts_is_typed_by_them(name: str) -> None:
    """So an editor completes them, and a type checker finds a misspelled one (`tests/user_project.py`)."""
    for one in inspect.signature(CALLS[name][0]).parameters.values():
        texts = {part.strip() for part in str(one.annotation).split("|")} - {"None"}
        assert texts != {"str"} or {one.name, f"{name}.{one.name}"} & FREE, one


def test_model_takes_the_options_of_a_loop_with_the_same_defaults() -> None:
    loop, model = inspect.signature(StepLoop).parameters, inspect.signature(Model).parameters
    names = {"amp": "amp_level"}
    of_the_call = {"model", "loss_fn", "optimizer", "steps_per_sync", "forward", "device"}
    for name in loop.keys() - of_the_call:
        ours, theirs = model[names.get(name, name)], loop[name]
        assert (ours.default, ours.annotation) == (theirs.default, theirs.annotation), name
