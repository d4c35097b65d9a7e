"""What every tensor whose values do not exist yet does: answers questions, records calls, or becomes real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from torch_sink.image.core.fallback import count_dispatch_modes, count_function_modes
from torch_sink.image.core.ops import made_by

# What no public function does. Where a release of torch lacks one of them, the backend cannot be set, and says so.
plain_call = torch._C.DisableTorchFunctionSubclass
_swap_contents = torch._C._swap_tensor_impl
_function_transforms = torch._C._functorch.peek_interpreter_stack
_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]

# What torch may ask of a lazy tensor without getting its values.
_METHODS = "size dim ndimension numel nelement element_size is_floating_point is_complex __len__ __dir__"
_FUNCTIONS = "is_floating_point is_complex is_tensor numel"
_PROPERTIES = (
    "shape dtype ndim device layout is_cuda is_cpu is_meta is_sparse is_quantized is_leaf requires_grad grad_fn "
    "itemsize nbytes"
)
_METADATA = {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in _FUNCTIONS.split()),
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
}


def _as_it_was_recorded() -> AbstractContextManager[None]:
    """A context in which values are made as if no mode were active, whatever modes the caller is in."""
    has_modes = count_function_modes() or count_dispatch_modes() or _function_transforms()
    is_unusual = has_modes or torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu")
    return _without_modes() if is_unusual else nullcontext()


@contextmanager
def _without_modes() -> Iterator[None]:
    of_functions = temporarily_clear_interpreter_stack()  # those of `torch.func`
    with of_functions, _disable_current_modes(), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        yield


class Lazy:
    """A tensor whose values do not exist yet, to be inherited from beside a class of tensors.

    Questions for shape and type are answered at once, and calls of which `calls` knows are recorded. Anything else
    first makes the values: this very object becomes the tensor, of the exact type, that stock code would have, for
    everybody who holds it. Only where C++ code holds it at that moment does it stay a lazy tensor, for a while: it
    shares the memory of the real one, which it stands for in every call.
    """

    # torch function -> what to do instead; `NotImplemented` means: on the real tensor.
    calls: ClassVar[dict[Callable[..., Any], Callable[..., Any]]]
    # The attributes that a lazy tensor has and a real one has not.
    fields: ClassVar[frozenset[str]]
    lazy_real: torch.Tensor | None = None  # only while C++ code holds this one

    @property
    def is_recording(self) -> bool:
        """False once the values were made."""
        raise NotImplementedError

    @property
    def lazy_attributes(self) -> dict[str, Any]:
        """The attributes that a program has set."""
        fields = type(self).fields
        return {name: value for name, value in vars(self).items() if name not in fields}

    def make(self) -> None:
        """Makes the values, and calls `become`."""
        raise NotImplementedError

    def materialize(self) -> torch.Tensor:
        """The real tensor: this object, unless C++ code holds it."""
        if self.lazy_real is None:
            with _as_it_was_recorded():
                type(self).make(self)  # a program may set an attribute of that name
        elif not self.lazy_real.requires_grad:
            self.become(self.lazy_real.detach())  # which succeeds once C++ code has let go of this tensor
        return vars(self).get("lazy_real", self)

    def become(self, real: torch.Tensor) -> torch.Tensor:
        """Becomes `real`, to which the caller keeps no reference. Returns the real tensor, as `materialize` does."""
        if not isinstance(self, Lazy):
            return self  # another thread was faster
        kept = self.lazy_attributes
        with plain_call():
            if _use_count(self) > 1:  # type: ignore[arg-type]
                if self.lazy_real is None:
                    self.lazy_real = real
                    torch.Tensor.data.__set__(self, real.detach())  # type: ignore[attr-defined]
                return self.lazy_real
        _swap_contents(self, real)  # type: ignore[arg-type]
        self.__class__, real.__class__ = type(real), type(self)  # type: ignore[assignment]
        self.__dict__.clear()
        self.__dict__.update(kept)
        return self  # type: ignore[return-value]

    def note_use(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Is told of each call that needs the values, before they are made."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA and args and args[0].is_recording:
            with plain_call():
                return func(*args, **kwargs)
        if func in cls.calls and "input" not in kwargs:
            result = made_by(cls.calls[func], *args, **kwargs)
            if result is not NotImplemented:
                return result
        return run_on_real(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_on_real(func, args, kwargs or {})


_LEAVES = frozenset((int, float, bool, str, torch.dtype, torch.device, torch.Tensor))


def run_on_real(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call with the real tensors of the lazy ones among its arguments."""
    held: dict[int, Lazy] = {}
    values = [*args, *kwargs.values()]
    is_flat = all(value is None or type(value) in _LEAVES or isinstance(value, Lazy) for value in values)
    for value in values if is_flat else tree_leaves(values):
        if isinstance(value, Lazy):
            value.note_use(func, (*args[1:], *kwargs.values()))
            real = value.materialize()
            if isinstance(value, Lazy):
                held[id(real)] = value
    if held:
        args, kwargs = tree_map(lambda value: value.lazy_real if isinstance(value, Lazy) else value, (args, kwargs))
    result = func(*args, **kwargs)
    # A call in place returns its tensor: give back what the caller holds.
    return held.get(id(result), result)


def make_real(function: Callable[..., Any], arguments: Iterable[Any]) -> None:
    """Makes the values of all lazy tensors among arguments, for a function that torch does not tell of."""
    for value in arguments:
        if isinstance(value, Lazy):
            value.note_use(function, ())
            value.materialize()
        elif isinstance(value, (list, tuple, dict)):
            make_real(function, value.values() if isinstance(value, dict) else value)
