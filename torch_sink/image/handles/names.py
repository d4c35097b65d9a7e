"""Lazy images and tensors go by the names and types of stock ones, also in every error message that names a type."""

from __future__ import annotations

import copyreg
import importlib
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)

# {class of lazy images or tensors: the stock class that its objects stand for}.
STOCK_TYPES: dict[type, type] = {}


def named_as(stock: type) -> Callable[[Class], Class]:
    """Makes a class go by the name of the stock class that its objects stand for; pickles find it by `lazy_class`."""

    def name(cls: Class) -> Class:
        cls.lazy_class = cls.__module__, cls.__qualname__  # type: ignore[attr-defined]
        cls.__module__, cls.__qualname__, cls.__name__ = stock.__module__, stock.__qualname__, stock.__name__
        STOCK_TYPES[cls] = stock
        return cls

    return name


def stock_type(kind: type) -> type:
    """The stock class that objects of a class stand for; of any other class, the class itself."""
    return STOCK_TYPES.get(kind, kind)


def _reduced(cls: type) -> tuple[Callable[..., Any], tuple[Any, ...]] | str:
    # A pickle holds only what any Python has: whoever reads it may not have this package.
    return (operator.itemgetter(0), ((STOCK_TYPES[cls],),)) if cls in STOCK_TYPES else cls.__qualname__


class StockType(type):
    """The class of lazy classes, which hold for the stock class: programs ask `isinstance(made, type(given))`.

    A lazy class that travels in a pickle, such as a key of a dict, arrives as the stock class. In this package,
    `isinstance` therefore asks for a base of these classes, and `type(...) is` for one of them.
    """

    def __init_subclass__(cls) -> None:
        copyreg.pickle(cls, _reduced)  # type: ignore[arg-type]

    def __instancecheck__(cls, instance: object) -> bool:
        stock = STOCK_TYPES.get(cls)
        return super().__instancecheck__(instance) if stock is None else isinstance(instance, stock)

    def __subclasscheck__(cls, subclass: type) -> bool:
        stock = STOCK_TYPES.get(cls)
        # Not `issubclass`: an abstract stock class would ask its subclasses, of which this is one.
        return super().__subclasscheck__(subclass) if stock is None else type.__subclasscheck__(stock, subclass)


copyreg.pickle(StockType, _reduced)  # type: ignore[arg-type]


class StockTensorType(StockType, torch._C._TensorMeta):
    """The class of the classes of lazy tensors."""


def stays(protocol: Any) -> bool:
    """True for a pickle that may be read without this package: not one that travels between processes of a program.

    `torch.save` writes protocol 2, and joblib takes its hashes of protocol 3; multiprocessing writes Python's default.
    """
    return protocol < 4  # type: ignore[no-any-return]


def unpickled(lazy_class: tuple[str, str], attributes: dict[str, Any], *args: Any) -> Any:
    """An object of the class that was defined in that module under that name: what pickles call.

    `attributes` are those that the program has set on it.
    """
    module, name = lazy_class
    made = getattr(importlib.import_module(module), name)(*args)
    made.__dict__.update(attributes)
    return made


# Methods that Python calls, as programs write them; those of operators also with their operands exchanged or in place.
_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
_WRITTEN = {
    "__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">=", "__invert__": "~",
    "__getitem__": "x[...]", "__setitem__": "x[...] = ...", "__contains__": "in", "__array__": "numpy.asarray",
    "__dlpack__": "from_dlpack", "__deepcopy__": "copy.deepcopy",
    **{f"__{way}{name}__": sign for name, sign in _OPERATORS.items() for way in ("", "r")},
    **{f"__i{name}__": f"{sign}=" for name, sign in _OPERATORS.items()},
}  # fmt: skip


def written(function: Any) -> str:
    """A function, a method, an operator or an attribute of torch as a program writes it."""
    name = getattr(function, "__name__", str(function))
    if isinstance(function, torch._ops.OpOverload):  # reached below Python, as `mul.Tensor` or `_to_copy.default`
        return function.overloadpacket.__name__.removeprefix("_")
    if name in ("__get__", "__set__"):
        owners = (vars(cls).items() for cls in torch.Tensor.__mro__)
        # Properties have no name before Python 3.13.
        found = next(
            (known for items in owners for known, value in items if value is function.__self__), "an attribute"
        )
        return f"{found} = ..." if name == "__set__" else found
    return _WRITTEN.get(name, name.strip("_") if name.startswith("__") else name)


class PixelAccess:
    """What `load()` returns to code outside Pillow: it makes the pixels when one of them is read or written.

    Most callers of `load()` want the file read and its errors raised. A file that could raise was decoded instead.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def __getitem__(self, position: Any) -> Any:
        return self._load()[position]

    def __setitem__(self, position: Any, value: Any) -> None:
        self._load()[position] = value
