"""Triton's interpreter, without what takes half of its time and proves little.

At every call of a function inside a kernel it replaces the functions of `triton.language` by its own, though they have
been replaced since the launch began. And it computes every integer sum and product once more in 64 bits, to see whether
it overflows; what overflows has wrong bits, which the tests see. `-m slow` runs with this check.
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


def install(*, check_overflow: bool) -> None:
    """Makes the interpreter of this process quick."""
    import triton.language
    from triton.runtime import interpreter

    if not isinstance(interpreter._patch_lang, _ReplaceOnce):
        interpreter._patch_lang = _ReplaceOnce(interpreter._patch_lang, triton.language)
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", check_overflow)
