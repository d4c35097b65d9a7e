"""Triton's interpreter, without what takes half of its time and proves little.

At every call of a function inside a kernel it replaces the functions of `triton.language` by its own, though they have
been replaced since the launch began. And it computes every integer sum and product once more in 64 bits, to see whether
it overflows; what overflows has wrong bits, which the tests see. `-m slow` runs with this check. The types and shapes of
blocks, their equivalents in NumPy and the type that a sum has are made anew for every value; here equal ones are made
once. Operands of equal type and shape are converted and broadcast all the same; here they are left as they are.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


class _ReplaceOnce:
    """Stands for `_patch_lang` of the interpreter: one replacement a launch for each set of language modules."""

    def __init__(self, replace: Any, language: ModuleType) -> None:
        self._replace = replace
        self._languages = (language, language.core)
        self._visible_in: dict[str, tuple[bool, ...]] = {}
        self._done: set[tuple[bool, ...]] = set()
        self._launched = False

    def _visible(self, module: str, names: dict[str, Any]) -> tuple[bool, ...]:
        """Which language modules a function sees."""
        if module not in self._visible_in:
            known = [value for value in names.values() if isinstance(value, ModuleType)]
            self._visible_in[module] = tuple(language in known for language in self._languages)
        return self._visible_in[module]

    def __call__(self, function: Any) -> Any:
        visible = self._visible(function.__module__, function.__globals__)
        if self._launched and visible in self._done:
            return None
        scope = self._replace(function)
        self._done.add(visible)
        if not self._launched:
            self._launched = True
            if scope is None:  # Triton 3.4 never restores them
                return None
            restore = scope.restore

            def restore_after_launch() -> None:
                restore()
                self._done.clear()
                self._launched = False

            scope.restore = restore_after_launch
        return scope


def _remember_numpy_types(interpreter: ModuleType) -> None:
    """The interpreter builds a table of all types for each that it looks up."""
    stock = interpreter._get_np_dtype
    found: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in found:
            found[name] = stock(of)
        return found[name]

    interpreter._get_np_dtype = numpy_type


def _remember_block_types(language: ModuleType) -> None:
    """Types of blocks are values: those of one element and shape share their attributes. Pointers are left alone."""
    stock = language.block_type.__init__
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(side, "value", side) for side in shape))  # Triton 3.4 has constants there
        if key in made:
            self.__dict__ = made[key]
            return
        stock(self, element_ty, shape)
        if type(element_ty) is language.dtype:
            made[key] = vars(self)

    language.block_type.__init__ = init


def _remember_shapes(language: ModuleType) -> None:
    """Blocks of one type have equal shapes, which nothing changes."""
    stock = language.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("of_its_tensors")
        if known is None:
            stock(self, handle, type)
            type.of_its_tensors = (self.shape, self.numel, self.dtype)
            return
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known

    language.tensor.__init__ = init


def _leave_equal_operands(semantic: Any) -> None:
    """What these functions find out after several comparisons of types and shapes, one by one."""
    stock_cast, stock_broadcast = semantic.cast, semantic.broadcast_impl_value
    stock_check, stock_type = semantic.binary_op_type_checking_impl, semantic.computation_type_impl
    types: dict[tuple[Any, ...], Any] = {}

    def cast(self: Any, value: Any, to: Any, *args: Any, **kwargs: Any) -> Any:
        return value if value.dtype is to.scalar else stock_cast(self, value, to, *args, **kwargs)

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if _of_one_shape(left, right) else stock_broadcast(self, left, right)

    def check(self: Any, left: Any, right: Any, *args: bool, **kwargs: bool) -> Any:
        are_tensors = isinstance(left, self.tensor) and isinstance(right, self.tensor)
        is_division = bool(kwargs) or len(args) > 3
        if are_tensors and not is_division and left.dtype is right.dtype and not left.dtype.is_ptr():
            return self.broadcast_impl_value(left, right)
        return stock_check(self, left, right, *args, **kwargs)

    def computation_type(self: Any, left: Any, left_is_scalar: bool, right: Any, *args: bool) -> Any:
        key = (left.name, left_is_scalar, right.name, *args)
        if key not in types:
            types[key] = stock_type(self, left, left_is_scalar, right, *args)
        return types[key]

    semantic.cast, semantic.broadcast_impl_value = cast, broadcast
    semantic.binary_op_type_checking_impl, semantic.computation_type_impl = check, computation_type


def _of_one_shape(left: Any, right: Any) -> bool:
    """A number's type has no shape."""
    one, other = vars(left.type).get("shape"), vars(right.type).get("shape")
    return one is other or (one is not None and other is not None and one.values == other.values)


def install(*, check_overflow: bool) -> None:
    """Makes the interpreter of this process quick."""
    import triton.language
    from triton.runtime import interpreter

    if not isinstance(interpreter._patch_lang, _ReplaceOnce):
        interpreter._patch_lang = _ReplaceOnce(interpreter._patch_lang, triton.language)
        _remember_numpy_types(interpreter)
        _remember_block_types(triton.language)
        _remember_shapes(triton.language)
        _leave_equal_operands(interpreter.TritonSemantic)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", check_overflow)
