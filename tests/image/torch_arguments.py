"""What functions of torch are called with: images and batches, and lists of arguments; and the functions themselves."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import functional as F

from image.cases import encoded, opener

SIZE = 20  # of the images, which are square: much of linear algebra wants it

# What has no values that could be compared, takes minutes, or changes the process: not functions of tensors. And
# `pin_memory`, which stock code refuses without an accelerator, where a batch that waits for one is as it should be;
# and `lstsq`, whose last bits depend on where its arguments lie, in stock code too.
LEFT_OUT = re.compile(
    r"(^|\.)(compile|save|load|import_ir_module.*|set_\w+|hub|seed|manual_seed|fork|wait|_fork|_wait|register_\w+"
    r"|use_deterministic_algorithms|get_file_path|classproperty|typename|_\w*callback\w*|unify_type_list|__class__"
    r"|__init__|__dict__|__getstate__|__weakref__|_python_dispatch|_version|_functionalize\w+|_weight_norm_interface"
    r"|_(en|dis)able_functionalization|lstsq"
    r"|has_torch_function\w*|__subclasshook__|__init_subclass__|__new__|__dir__|__setstate__|__reduce\w*__|_make_\w+"
    r"|vitals_enabled|set_vital|prepare_multiprocessing_environment|_running_with_deploy|initial_seed|__delattr__"
    r"|__setattr__|__getattribute__|pin_memory)$"
)


_PHOTO = opener(encoded(SIZE, SIZE, 4))().convert("RGB")
_GRAY = _PHOTO.convert("L")


def _image() -> torch.Tensor:
    return F.to_tensor(_PHOTO)


SUBJECTS: dict[str, Callable[[], torch.Tensor]] = {
    "image": _image,
    "batch": lambda: default_collate([_image(), _image()]),
    "batch of one": lambda: _image().unsqueeze(0),
    "stack": lambda: torch.stack([_image(), _image()]),
    "image of bytes": lambda: F.pil_to_tensor(_GRAY),
    "pixel": lambda: F.pil_to_tensor(_GRAY.resize((1, 1))),
}


def _square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def _written(x: Any) -> Any:
    x[..., 0] = 3
    return x * 2


def _weights(*shape: int) -> torch.Tensor:
    return torch.linspace(0, 1, torch.Size(shape).numel()).view(shape)


def _indices(y: torch.Tensor) -> torch.Tensor:
    return torch.zeros(y.shape, dtype=torch.int64)


def _pivots(y: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, y.shape[-1] + 1, dtype=torch.int32).expand(y.shape[:-1]).contiguous()


def _given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


_FIRST = torch.tensor([0])

# Lists of arguments, of an image or a batch and of a stock tensor of the same values.
ARGUMENTS: dict[str, Callable[[Any, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "x": lambda x, y: _given(x),
    "input=x": lambda x, y: _given(input=x),
    "x that wants gradients": lambda x, y: _given(x.requires_grad_()),
    "x, x": lambda x, y: _given(x, x),
    "x, y": lambda x, y: _given(x, y),
    "y, x": lambda x, y: _given(y, x),
    "x, 0": lambda x, y: _given(x, 0),
    "x, 1": lambda x, y: _given(x, 1),
    "1, x": lambda x, y: _given(1, x),
    "x, 0.5": lambda x, y: _given(x, 0.5),
    "x, [0]": lambda x, y: _given(x, [0]),
    "x, (2, 2)": lambda x, y: _given(x, (2, 2)),
    "x, 2, 2": lambda x, y: _given(x, 2, 2),
    "x, (5, 6), (2, 2)": lambda x, y: _given(x, (5, 6), (2, 2)),
    "x, 0, 1": lambda x, y: _given(x, 0, 1),
    "x, 1, 0, 1": lambda x, y: _given(x, 1, 0, 1),
    "x, (0, 1), (1, 0)": lambda x, y: _given(x, (0, 1), (1, 0)),
    "x, -1, 2.0": lambda x, y: _given(x, -1, 2.0),
    "x, y, dim=-3": lambda x, y: _given(x, y, dim=-3),
    "x, y, upper=True": lambda x, y: _given(x, y, upper=True),
    "x, 0, index": lambda x, y: _given(x, 0, _FIRST),
    "x, 0, index, 3": lambda x, y: _given(x, 0, _FIRST, 3),
    "x, 0, index, part": lambda x, y: _given(x, 0, _FIRST, y[:1]),
    "x, 0, index, part, name": lambda x, y: _given(x, 0, _FIRST, y[:1], "amax"),
    "x, 0, indices": lambda x, y: _given(x, 0, _indices(y)),
    "x, 0, indices, y": lambda x, y: _given(x, 0, _indices(y), y),
    "y, 0, indices, x": lambda x, y: _given(y, 0, _indices(y), x),
    "x, (index,), part": lambda x, y: _given(x, (_FIRST,), y[:1]),
    "x, indices, 2": lambda x, y: _given(x, _indices(y), 2),
    "x, classes": lambda x, y: _given(x, _indices(y)[:, 0] if y.ndim == 4 else _indices(y)[..., 0]),
    "x, mask": lambda x, y: _given(x, y > 0.5),
    "x, mask, 3": lambda x, y: _given(x, y > 0.5, 3),
    "x, mask, y": lambda x, y: _given(x, y > 0.5, y),
    "mask, x, y": lambda x, y: _given(y > 0.5, x, y),
    "x, y, y": lambda x, y: _given(x, y, y),
    "y, x, x": lambda x, y: _given(y, x, x),
    "x, half": lambda x, y: _given(x, torch.float16),
    "x, its size": lambda x, y: _given(x, tuple(y.shape)),
    "x, its last size": lambda x, y: _given(x, [y.shape[-1]]),
    "x, matrix": lambda x, y: _given(x, _weights(5, SIZE)),
    "matrix, x, x": lambda x, y: _given(_weights(SIZE, SIZE), x, x),
    "x, cube, vector": lambda x, y: _given(x, _weights(3, SIZE, 5), _weights(5)),
    "x, filters": lambda x, y: _given(x, _weights(4, 3, 3, 3)),
    "x, as many filters": lambda x, y: _given(x, _weights(3, 3, 3, 3)),
    "x, filters of lines": lambda x, y: _given(x, _weights(SIZE, SIZE, 3)),
    "x, filters of volumes": lambda x, y: _given(x, _weights(2, 2, 3, 3, 3)),
    "x, grid": lambda x, y: _given(x, _weights(len(y), 5, 5, 2)),
    "x, three": lambda x, y: _given(x, _weights(3)),
    "x, mean, variance": lambda x, y: _given(x, torch.zeros(3), torch.ones(3)),
    "x, pivots, y": lambda x, y: _given(x, _pivots(y), y),
    "y, x, pivots": lambda x, y: _given(y, x, _pivots(y)),
    "x, targets, lengths, lengths": lambda x, y: _given(
        x, torch.ones(SIZE, 2, dtype=torch.int64), torch.full((SIZE,), 3), torch.full((SIZE,), 2)
    ),
    "x, a string": lambda x, y: _given(x, "mean"),
    "x, a pattern": lambda x, y: _given(x, "c h w -> h w c"),
    "a string, x": lambda x, y: _given("ij,jk", x),
    "x, a class": lambda x, y: _given(x, tv_tensors.Image),
    "x, function": lambda x, y: _given(x, lambda value: value / 2),
    "x, y, function": lambda x, y: _given(x, y, lambda one, other: one - other),
    "[x, x]": lambda x, y: _given([x, x]),
    "[x, y], 1": lambda x, y: _given([x, y], 1),
    "[x], [y]": lambda x, y: _given([x], [y]),
    "function, x": lambda x, y: _given(_square, x),
    "function that writes, x": lambda x, y: _given(_written, x),
    "function, x, y": lambda x, y: _given(_square, x, y),
    "function, (x,), (y,)": lambda x, y: _given(_square, (x,), (y,)),
    "module, {}, x": lambda x, y: _given(nn.Flatten(0), {}, x),
    "out=x": lambda x, y: _given(y, y, out=x),
    "a generator": lambda x, y: _given(x, generator=torch.Generator().manual_seed(1)),
}

_MODULES = {
    "torch": torch,
    "torch.nn.functional": nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
    "torch.func": torch.func,
    "torch.nn.init": nn.init,
    "torch.nn.utils": nn.utils,
    "torch.nn.utils.rnn": nn.utils.rnn,
    "torch.utils": torch.utils,
    "torch.utils.data": torch.utils.data,
    "torch.utils.dlpack": torch.utils.dlpack,
    "torch.utils.checkpoint": torch.utils.checkpoint,
    "torch.autograd": torch.autograd,
    "torch.autograd.functional": torch.autograd.functional,
    "torch.sparse": torch.sparse,
    "torch.nested": torch.nested,
    "torch.testing": torch.testing,
}
FAMILIES = ("torch.Tensor", "torch.nn", *_MODULES)


def _of_a_transform(name: str) -> Callable[..., Any]:
    """A transform of functions, applied to one and called."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch.func, name)(function)(*args, **kwargs)

    return call


def _found_when_called(owner: Any, name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def functions(family: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Those of a module, by name; or the methods and properties of a tensor; or modules of a network."""
    if family == "torch.Tensor":
        yield from _methods()
    elif family == "torch.nn":
        yield from _networks()
    else:
        yield from _functions_of_module(family)


def _functions_of_module(family: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    module = _MODULES[family]
    for name in sorted(vars(module)):
        found = getattr(module, name)
        is_private = name.startswith("_") and family != "torch"
        is_torchs = (getattr(found, "__module__", None) or "torch").startswith("torch")
        if (
            callable(found)
            and not isinstance(found, type)
            and is_torchs
            and not is_private | bool(LEFT_OUT.search(name))
        ):
            yield name, _found_when_called(module, name)
            if family == "torch.func":
                yield f"{name}(f)", _of_a_transform(name)


def _methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(torch.Tensor):
        found = inspect.getattr_static(torch.Tensor, name)
        if LEFT_OUT.search(name) or isinstance(found, (staticmethod, classmethod)):
            continue
        if callable(getattr(torch.Tensor, name)):
            yield name, _found_when_called(torch.Tensor, name)
        elif hasattr(found, "__get__"):
            yield f"{name}.__get__", lambda x, name=name: getattr(x, name)
            yield f"{name}.__set__", lambda x, y, name=name: setattr(x, name, y)


_OF_CONSTRUCTORS = ((), (2,), (3,), (SIZE,), (3, 4, 3), (SIZE, 2), (SIZE, SIZE, 5))
_MOST_PARAMETERS = 100_000


def _networks() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Modules of `torch.nn`, with the arguments of which there is one, none where it wants none."""
    for name, kind in sorted(vars(nn).items()):
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            continue
        for args in _OF_CONSTRUCTORS:
            made = _network(kind, args)
            if made is None or any(map(is_lazy, made.parameters())):
                continue
            if sum(parameter.numel() for parameter in made.parameters()) > _MOST_PARAMETERS:
                continue
            yield f"{name}{args}", _fresh(made)
            if "Attention" in name or "Transformer" in name:  # these have another way to compute then
                yield f"{name}{args}.eval()", torch.no_grad()(_fresh(copy.deepcopy(made).eval()))
            if not args:
                break


def _network(kind: type[nn.Module], args: tuple[Any, ...]) -> nn.Module | None:
    with warnings.catch_warnings(), suppress(TypeError, ValueError, AssertionError, NotImplementedError, RuntimeError):
        warnings.simplefilter("ignore")  # of modules that will go
        torch.manual_seed(3)
        return kind(*args)
    return None


def _fresh(module: nn.Module) -> Callable[..., Any]:
    """The module as it was made at each call."""
    return lambda *args, **kwargs: copy.deepcopy(module)(*args, **kwargs)
