"""Triton's interpreter, without what takes half of its time and proves little.

At every call of a function inside a kernel it replaces the functions of `triton.language` by its own, though they have
been replaced since the launch began. And it computes every integer sum and product once more in 64 bits, to see whether
it overflows; what overflows has wrong bits, which the tests see. `-m slow` runs with this check. The types of blocks and
their equivalents in NumPy are made anew for every value; here equal ones are made once.
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
    """Types of blocks are values: those of one element and shape have equal attributes. Pointers are left alone."""
    stock = language.block_type.__init__
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key in made:
            vars(self).update(made[key])
            return
        stock(self, element_ty, shape)
        if type(element_ty) is language.dtype:
            made[key] = dict(vars(self))

    language.block_type.__init__ = init


def install(*, check_overflow: bool) -> None:
    """Makes the interpreter of this process quick."""
    import triton.language
    from triton.runtime import interpreter

    if not isinstance(interpreter._patch_lang, _ReplaceOnce):
        interpreter._patch_lang = _ReplaceOnce(interpreter._patch_lang, triton.language)
        _remember_numpy_types(interpreter)
        _remember_block_types(triton.language)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", check_overflow)
