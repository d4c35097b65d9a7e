"""The record of the kernels: a row for each variant and target, kept until something that it depends on changes."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton import language as tl
from triton.runtime.jit import JITFunction

# A row by (variant, target).
Rows = dict[tuple[str, str], dict[str, Any]]


def read_rows(path: Path) -> Rows:
    """The rows of a record; none where there is no file."""
    rows = json.loads(path.read_text())["kernels"] if path.is_file() else []
    return {(row["variant"], row["target"]): row for row in rows}


def read_counts(path: Path) -> dict[str, Any]:
    """What `kernel_counts.py` has put into a record, which compiling leaves as it is."""
    record = json.loads(path.read_text()) if path.is_file() else {}
    return {"counts": record["counts"]} if "counts" in record else {}


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record, each row on a line of its own. A reader sees the old file or the new one, never a part."""
    head = {name: value for name, value in record.items() if name != "kernels"}
    rows = ",\n  ".join(json.dumps(row) for row in record["kernels"])
    text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "kernels": [\n  {rows}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def fingerprint(kernel: JITFunction[Any], *compiled_with: Any) -> str:
    """What a row depends on, as 16 hexadecimal digits: code, Triton's release, whatever else is given, and the reader.

    Args:
        kernel: its code, that of the functions it calls and the constants they name count; comments and docstrings
            do not, nor where they stand.
        compiled_with: signature, constants, options, target.
    """
    parts = [triton.__version__, sorted(code_of(kernel).items()), repr(compiled_with), _reader()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@functools.cache
def _reader() -> str:
    return Path(__file__).with_name("kernel_usage.py").read_text()


@functools.cache
def code_of(kernel: JITFunction[Any]) -> dict[str, str]:
    """{name: code} of a kernel and of all functions that it calls, and {name: value} of the constants they name.

    Of a named tuple the value is the names of its fields.
    """
    found: dict[str, str] = {}
    waiting, seen = [kernel], set[JITFunction[Any]]()
    while waiting:
        function = waiting.pop()
        name, tree = function.__name__, function.parse()
        code = ast.unparse(_without_docstring(tree.body[0]))
        if found.setdefault(name, code) != code:
            raise TypeError(f"{kernel.__name__} calls two functions of the name {name}")
        if function in seen:
            continue
        seen.add(function)
        for used in sorted(_global_names(tree)):
            value = function.__globals__.get(used)
            if isinstance(value, JITFunction):
                waiting.append(value)
            elif isinstance(value, tl.constexpr):
                found[f"{name}.{used}"] = repr(value.value)
            elif isinstance(value, type) and hasattr(value, "_fields"):  # a named tuple
                found[f"{name}.{used}"] = repr(value._fields)
            elif value is not None and not _belongs_to_triton(value):
                raise TypeError(f"{name} uses {used}, which is neither a kernel's function nor a tl.constexpr")
    return found


def _global_names(function: ast.AST) -> set[str]:
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    own = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return {node.id for node in names} - own


def _without_docstring(function: ast.FunctionDef) -> ast.FunctionDef:
    first = function.body[0]
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    function.body = function.body[has_docstring:] or [ast.Pass()]
    return function


def _belongs_to_triton(value: Any) -> bool:
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return module.partition(".")[0] == "triton"
