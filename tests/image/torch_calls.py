"""Calls of functions of torch with recorded images and batches, each beside the same call with stock tensors.

Functions are called in a child process, with every list of arguments in turn: a signal ends the child alone, and what
the child said before is what it called last. Another child goes on with the next function.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import torch_sink
from image.torch_arguments import ARGUMENTS, FAMILIES, SUBJECTS, functions
from torch_sink.image.core import settings
from torch_sink.image.handles.lazy import Lazy

SECONDS_PER_FUNCTION = 150  # of the processor
SECONDS_WITHOUT_WORK = 600

# Memory that nobody wrote to, in stock code as well.
_UNWRITTEN = re.compile(r"empty|resize|new$|Tensor$|fbgemm_pack")

Named = tuple[str, Callable[..., Any]]


# --- in a child


def differences(named: Sequence[Named]) -> list[str]:
    """What differs, of functions, between recorded images and batches and stock tensors."""
    with torch_sink.image_backend("device", device="cpu"):
        pass  # what it imports is there for all children
    found, begin = [], 0
    while begin < len(named):
        said, status = _said_of_child(named[begin:])
        found += [line.removeprefix("difference ") for line in said if line.startswith("difference ")]
        begin += said.count("done")
        if begin < len(named):
            last = next((line for line in reversed(said) if line.startswith(("ours ", "stock "))), "at once")
            if not last.startswith("stock "):  # there stock code itself ends the process
                found.append(f"{named[begin][0]}: the process ended with {status}: {last}")
            begin += 1
    return found


def _said_of_child(named: Sequence[Named]) -> tuple[list[str], int]:
    """The lines of a child that compares one function after the other, and how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w", buffering=1) as pipe:
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            torch.set_num_threads(1)
            warnings.simplefilter("ignore")
            for name, function in named:
                signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_FUNCTION)
                signal.alarm(SECONDS_WITHOUT_WORK)
                try:
                    _compare_all(name, function, pipe)
                except BaseException:
                    pipe.write(f"difference {name}: {traceback.format_exc()!r}\n")
                pipe.write("done\n")
            pipe.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read().splitlines()
    return said, os.waitpid(child, 0)[1]


def _compare_all(name: str, function: Callable[..., Any], pipe: Any) -> None:
    stock = {subject: make().clone() for subject, make in SUBJECTS.items()}
    calls = [(subject, arguments) for subject in SUBJECTS for arguments in ARGUMENTS]
    expected = _outcomes("stock", name, function, calls, stock, pipe)
    # Wrong arguments are wrong for all: those of an image stand for them.
    calls = [call for call in calls if call[0] == "image" or not expected[call][0].startswith("raised")]
    with torch_sink.image_backend("device", device="cpu"):
        type(settings.settled()).executes_at_once = False  # as where a device makes the batch
        assert all(isinstance(make(), Lazy) for make in SUBJECTS.values())
        made = _outcomes("ours", name, function, calls, stock, pipe)
    unequal = [call for call in calls if made[call] != expected[call]]
    again = _outcomes("stock", name, function, unequal, stock, pipe)
    for call in unequal:
        if again[call] == expected[call]:  # stock code itself gives the same twice
            subject, arguments = call
            pipe.write(
                f"difference {name}: {subject}, ({arguments}): {_first_difference(made[call], expected[call])}\n"
            )


Call = tuple[str, str]  # the names of a subject and of a list of arguments


def _outcomes(
    whose: str,
    name: str,
    function: Any,
    calls: Sequence[Call],
    stock: dict[str, torch.Tensor],
    pipe: Any,
) -> dict[Call, list[str]]:
    """Before each call it writes which comes."""
    outcomes = {}
    for subject, arguments in calls:
        pipe.write(f"{whose} {subject}, ({arguments})\n")
        outcomes[subject, arguments] = outcome(name, function, SUBJECTS[subject](), stock[subject].clone(), arguments)
    return outcomes


def _first_difference(made: list[str], expected: list[str]) -> str:
    for one, other in zip(made, expected, strict=False):
        if one != other:
            return f"{one[:300]!r}, stock {other[:300]!r}"
    return f"{len(made)} parts, stock {len(expected)}"


def outcome(name: str, function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, arguments: str) -> list[str]:
    """What a call gives or raises, what it makes of its arguments, and what it draws."""
    torch.default_generator.manual_seed(3)
    try:
        args, kwargs = ARGUMENTS[arguments](x, y)
        result = function(*args, **kwargs)
        if inspect.isgenerator(result) or type(result).__name__.endswith("iterator"):
            result = list(result)
        kept = [] if _UNWRITTEN.search(name) else list(_described(result))
        said = [f"is argument {at}" for at, each in enumerate((*args, *kwargs.values())) if each is result]
    except Exception as error:
        said, kept = ["raised " + type(error).__name__ + _plain(_message(error))], []
    drawn = str(hash(torch.get_rng_state().numpy().tobytes()))
    values = [] if _UNWRITTEN.search(name) else [*_described(x), *_described(y)]
    return [*(said or ["gave"]), *kept, drawn, *values]


def _message(error: Exception) -> str:
    """What an error says, but for those of Python and of torch's parser of arguments, which name classes."""
    return "" if isinstance(error, (TypeError, AttributeError)) else str(error)


def _plain(text: str) -> str:
    text = re.sub(r"(torch_sink[\w.]*\.)?\bLazy(Tensor|TVImage|Batch|Stack)\b", "Tensor", text)
    return re.sub(r"0x[0-9a-f]+|\b\d{12,}\b|torch\.Tensor|tensor_data/\w+", "Tensor", text)


def _described(value: Any, depth: int = 0) -> Iterator[str]:
    """Text that is equal for equal values: type, dtype, shape, strides and bits of tensors."""
    if isinstance(value, Lazy):
        value = value.materialize()
    if isinstance(value, torch.Tensor):
        yield f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.layout} {value.device}"
        yield f"{value.requires_grad} {type(value.grad_fn).__name__}"
        if value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized:
            plain = value.detach().resolve_conj().resolve_neg()
            yield f"{value.stride()} {hash(plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes())}"
    elif isinstance(value, (list, tuple)) and depth < 4:
        yield f"{type(value).__name__} of {len(value)}"
        for each in value:
            yield from _described(each, depth + 1)
    elif isinstance(value, dict) and depth < 4:
        yield from _described(list(value.items()), depth + 1)
    elif isinstance(value, (int, float, complex, str, bool, bytes, torch.dtype, torch.Size, type(None))):
        yield _plain(repr(value))
    elif hasattr(value, "__array__"):
        yield repr(value)
    else:
        yield type(value).__name__


if __name__ == "__main__":  # prints what differs, for a look at some of them
    for family in sys.argv[1:] or FAMILIES:
        named = [(f"{family}.{name}", function) for name, function in functions(family)]
        print(f"{family}: {len(named)} functions", flush=True)
        for at in range(0, len(named), 20):
            for line in differences(named[at : at + 20]):
                print(line, flush=True)
