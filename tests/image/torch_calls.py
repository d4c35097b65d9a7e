"""Calls of functions of torch with recorded images and batches, each beside the same call with stock tensors.

A function is called in a child process of its own, with every list of arguments in turn: a signal ends the child alone,
and what the child said before is what it called last.
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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import default_collate
from torchvision.transforms import functional as F

import torch_sink
from image.cases import encoded, opener
from torch_sink.image.core import state
from torch_sink.image.handles.lazy import Lazy

SIZE = 20  # of the images, which are square: much of linear algebra wants it
SECONDS_PER_FUNCTION = 60

# What has no values that could be compared, takes minutes, or calls into the process: not functions of tensors.
LEFT_OUT = re.compile(
    r"(^|\.)(compile|save|load|import_ir_module.*|set_\w+|hub|seed|manual_seed|fork|wait|_fork|_wait|register_\w+"
    r"|use_deterministic_algorithms|get_file_path|classproperty|typename|_\w*callback\w*|unify_type_list|__class__"
    r"|__init__|__dict__|__getstate__|__weakref__|_python_dispatch|_version|_functionalize\w+|_weight_norm_interface"
    r"|has_torch_function\w*|__subclasshook__|__init_subclass__|__new__|__dir__|__setstate__|__reduce\w*__|_make_\w+|vitals_enabled|set_vital"
    r"|prepare_multiprocessing_environment|_running_with_deploy|initial_seed|__delattr__|__setattr__|__getattribute__)$"
)
_UNWRITTEN = re.compile(r"empty|resize|new$|Tensor$")  # memory that nobody wrote to, in stock code as well


def _image() -> torch.Tensor:
    return F.to_tensor(F.resize(opener(encoded(31, 27, 4))(), [SIZE, SIZE]))


SUBJECTS: dict[str, Callable[[], torch.Tensor]] = {
    "image": _image,
    "batch": lambda: default_collate([_image(), _image()]),
    "batch of one": lambda: _image().unsqueeze(0),
    "stack": lambda: torch.stack([_image(), _image()]),
}

# Lists of arguments, of an image or a batch and of a stock tensor of the same values.
ARGUMENTS: dict[str, Callable[[Any, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "x": lambda x, y: ((x,), {}),
    "input=x": lambda x, y: ((), {"input": x}),
    "x, x": lambda x, y: ((x, x), {}),
    "x, y": lambda x, y: ((x, y), {}),
    "y, x": lambda x, y: ((y, x), {}),
    "x, 0": lambda x, y: ((x, 0), {}),
    "x, 1": lambda x, y: ((x, 1), {}),
    "x, 0.5": lambda x, y: ((x, 0.5), {}),
    "x, [0]": lambda x, y: ((x, [0]), {}),
    "x, (2, 2)": lambda x, y: ((x, (2, 2)), {}),
    "x, 0, 1": lambda x, y: ((x, 0, 1), {}),
    "x, 1, 0, 1": lambda x, y: ((x, 1, 0, 1), {}),
    "x, (0, 1), (1, 0)": lambda x, y: ((x, (0, 1), (1, 0)), {}),
    "x, -1, 2.0": lambda x, y: ((x, -1, 2.0), {}),
    "x, 0, index": lambda x, y: ((x, 0, torch.tensor([0])), {}),
    "x, 0, index, part": lambda x, y: ((x, 0, torch.tensor([0]), y[:1]), {}),
    "x, mask": lambda x, y: ((x, y > 0.5), {}),
    "x, mask, 3": lambda x, y: ((x, y > 0.5, 3), {}),
    "mask, x, y": lambda x, y: ((y > 0.5, x, y), {}),
    "x, y, y": lambda x, y: ((x, y, y), {}),
    "y, x, x": lambda x, y: ((y, x, x), {}),
    "x, half": lambda x, y: ((x, torch.float16), {}),
    "x, its size": lambda x, y: ((x, tuple(y.shape)), {}),
    "x, its last size": lambda x, y: ((x, [SIZE]), {}),
    "x, matrix": lambda x, y: ((x, torch.linspace(0, 1, 5 * SIZE).view(5, SIZE)), {}),
    "x, filters": lambda x, y: ((x, torch.linspace(0, 1, 4 * 3 * 9).view(4, 3, 3, 3)), {}),
    "x, mean, variance": lambda x, y: ((x, torch.zeros(3), torch.ones(3)), {}),
    "x, a string": lambda x, y: ((x, "mean"), {}),
    "a string, x": lambda x, y: (("ij,jk", x), {}),
    "[x, x]": lambda x, y: (([x, x],), {}),
    "[x, y], 1": lambda x, y: (([x, y], 1), {}),
    "[x], [y]": lambda x, y: (([x], [y]), {}),
    "function, x": lambda x, y: ((_square, x), {}),
    "out=x": lambda x, y: ((y, y), {"out": x}),
}


def _square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


_MODULES = {
    "torch": torch,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.func": torch.func,
    "torch.nn.init": torch.nn.init,
    "torch.nn.utils": torch.nn.utils,
    "torch.utils.dlpack": torch.utils.dlpack,
    "torch.autograd.functional": torch.autograd.functional,
}


def _of_a_transform(name: str) -> Callable[..., Any]:
    """A transform of functions, applied to one and called."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch.func, name)(function)(*args, **kwargs)

    return call


def _found_when_called(owner: Any, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def functions(family: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Those of a module, or the methods and properties of a tensor, by name."""
    if family == "torch.Tensor":
        for name in dir(torch.Tensor):
            found = inspect.getattr_static(torch.Tensor, name)
            if LEFT_OUT.search(name) or isinstance(found, (staticmethod, classmethod)):
                continue
            if callable(getattr(torch.Tensor, name)):
                yield name, _found_when_called(torch.Tensor, name)
            elif hasattr(found, "__get__"):
                yield f"{name}.__get__", lambda x, name=name: getattr(x, name)
                yield f"{name}.__set__", lambda x, y, name=name: setattr(x, name, y)
        return
    module = _MODULES[family]
    for name in sorted(vars(module)):
        found = getattr(module, name)
        is_private = name.startswith("_") and family != "torch"
        if callable(found) and not isinstance(found, type) and not is_private and not LEFT_OUT.search(name):
            yield name, _found_when_called(module, name)
            if family == "torch.func":
                yield f"{name}(f)", _of_a_transform(name)


FAMILIES = ("torch.Tensor", *_MODULES)

# --- one function, in a child


def differences(name: str, function: Callable[..., Any]) -> list[str]:
    """What differs, of a function, between recorded images and batches and stock tensors; runs in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w", buffering=1) as pipe:
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            signal.alarm(SECONDS_PER_FUNCTION)
            try:
                _compare_all(name, function, pipe)
            except BaseException:
                pipe.write(f"difference {traceback.format_exc()!r}\n")
            pipe.write("done\n")
            pipe.flush()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read().splitlines()
    status = os.waitpid(child, 0)[1]
    found = [line.removeprefix("difference ") for line in said if line.startswith("difference ")]
    if said[-1:] != ["done"] and not (said and said[-1].startswith("stock ")):  # there stock code itself crashes
        found.append(f"the process ended with {status}: {said[-1] if said else 'at once'}")
    return [f"{name}: {line}" for line in found]


def _compare_all(name: str, function: Callable[..., Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for subject, make in SUBJECTS.items():
        stock = make().clone()
        expected = _outcomes("stock", subject, name, function, make, stock, pipe, list(ARGUMENTS))
        works = [arguments for arguments, found in expected.items() if not found[0].startswith("raised")]
        # Wrong arguments are wrong for all: those of an image stand for them.
        compared = list(ARGUMENTS) if subject == "image" else works
        with torch_sink.image_backend("device", device="cpu"):
            type(state.settled()).executes_at_once = False  # as where a device makes the batch
            made = _outcomes("ours", subject, name, function, make, stock, pipe, compared)
        unequal = [arguments for arguments in compared if made[arguments] != expected[arguments]]
        again = _outcomes("stock", subject, name, function, make, stock, pipe, unequal)
        for arguments in unequal:
            if again[arguments] == expected[arguments]:  # stock code itself gives the same twice
                difference = _first_difference(made[arguments], expected[arguments])
                pipe.write(f"difference {subject}, ({arguments}): {difference}\n")
        if not works:
            return  # takes no tensor, or none of these lists


def _outcomes(
    whose: str,
    subject: str,
    name: str,
    function: Any,
    make: Callable[[], Any],
    y: torch.Tensor,
    pipe: Any,
    lists: list[str],
) -> dict[str, list[str]]:
    """By the names of the lists of arguments. Before each call it writes which comes."""
    outcomes = {}
    for arguments in lists:
        pipe.write(f"{whose} {subject} {arguments}\n")
        outcomes[arguments] = outcome(name, function, make(), y.clone(), arguments)
    return outcomes


def _first_difference(made: list[str], expected: list[str]) -> str:
    for one, other in zip(made, expected, strict=False):
        if one != other:
            return f"{one[:300]!r}, stock {other[:300]!r}"
    return f"{len(made)} parts, stock {len(expected)}"


def outcome(name: str, function: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, arguments: str) -> list[str]:
    """What a call gives or raises, what it makes of its arguments, and what it draws."""
    args, kwargs = ARGUMENTS[arguments](x, y)
    torch.default_generator.manual_seed(3)
    try:
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
        for each, found in functions(family):
            print("\n".join(differences(f"{family}.{each}", found)) or ".", end="\n", flush=True)
