"""Imports the object of `--pipeline module:name`, after a check that importing the file would not train."""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import pkgutil
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader, Dataset

import torch_sink
from torch_sink.errors import add_hints

_WHERE_MODULES_ARE = "modules are found in this folder and on PYTHONPATH"
ELSEWHERE_TOO = "the same error comes without torch_sink: call it in Python to look"
_AS_A_FUNCTION = "a function `def make_loader():` that returns the loader, named as {module}:make_loader"
_AROUND = "or put `with torch_sink.explain():` around the loop of the program as it is"
_FOLDERS = (sysconfig.get_path("stdlib"), str(Path(torch_sink.__file__).parent))
_LIBRARIES = re.compile("|".join([r"[/\\]site-packages[/\\]", "<", *map(re.escape, _FOLDERS)]))
_MOST_FILES = 8  # shown where there is no such file
_KEYS = re.compile(r"\[([^\[\]]*)\]")
_TRAINS = ("backward", "fit", "fit_one_cycle")  # methods that train
_MAY_TRAIN = ("main", "train", "fit", "run")  # names of imported functions that may train
_WRITE_NAMES = {"globals", "exec", "setattr", "vars"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def named(name: str) -> Any:
    """The object of "module:attribute" or "module:attribute[key]"; a class or function without parameters is called.

    A file may stand in the place of its module: "train.py:attribute".

    Raises:
        ValueError: there is no such object, calling it raises, or importing the file would train.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # for good, because spawned data workers need it too
    whole, keys = _KEYS.sub("", name), _KEYS.findall(name)
    module, _, attribute = whole.partition(":")
    if module.endswith(".py"):
        module = _module_of(Path(module), attribute)
        whole = f"{module}:{attribute}"
    _read_first(module, attribute.partition(".")[0])
    advice = _WHERE_MODULES_ARE
    try:
        found = pkgutil.resolve_name(whole)
        if isinstance(found, (type, FunctionType)) and _needs_nothing(found):
            advice = ELSEWHERE_TOO
            found = found()
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise ValueError(said_by(name, error, advice)) from error
    for key in keys:
        parts, given = _parts(found), key.strip("'\"")  # a shell may leave the quotes
        if given not in parts:
            known = f"it holds {', '.join(parts)}" if parts else f"a {type(found).__name__} holds nothing by names"
            raise ValueError(f"{name}: there is no [{key}]; {known}")
        found = parts[given]
    parts = _parts(found)
    # A list of anything but datasets and loaders is a dataset.
    if isinstance(found, Mapping) or any(isinstance(part, (DataLoader, Dataset)) for part in parts.values()):
        several = " or ".join(f"--pipeline '{name}[{key}]'" for key in parts)
        raise ValueError(f"{name} holds {len(parts)} of them; name one: {several}" if parts else f"{name} is empty")
    return found


def _module_of(file: Path, attribute: str) -> str:
    """The module of a script that was named by its path; its folder comes first on `sys.path`, as where it is run.

    Raises:
        ValueError: there is no such file, or it cannot be imported under the name of the file alone.
    """
    module, folder = file.stem, str(file.resolve().parent)
    if not file.is_file():
        near = ", ".join(sorted(str(each) for each in file.parent.glob("*.py"))[:_MOST_FILES])
        raise ValueError(f"there is no file {file}{f'; there are {near}' if near else ''}")
    if not module.isidentifier():
        raise ValueError(f"{file} cannot be imported, as {module!r} is no name of Python's: rename it")
    package = Path(folder)
    while (package / "__init__.py").exists():
        package = package.parent
    if package != Path(folder):
        dotted = ".".join([*Path(folder).relative_to(package).parts, module])
        raise ValueError(
            f"{file} belongs to a package, which lies in {package}: run this there, with {dotted}:{attribute}"
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)  # for good, because spawned data workers need it too
    found = getattr(sys.modules[module], "__file__", None) if module in sys.modules else _file_of(module)
    if found is None or Path(found).resolve() != file.resolve():
        raise ValueError(f"another module is called {module!r}{f', {found}' if found else ''}: rename {file}")
    return module


def _parts(found: Any) -> dict[str, Any]:
    """What a dict or list holds, by keys or indices; {} for anything else."""
    if isinstance(found, (list, tuple)):
        found = dict(enumerate(found))
    return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def _needs_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def said_by(name: str, error: BaseException, advice: str) -> str:
    """A message with the error of the user's code, its line, and hints or else `advice`."""
    if isinstance(error, Exception):
        add_hints(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _LIBRARIES.search(frame.filename)]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    notes = getattr(error, "__notes__", ()) or (advice,)
    return f"{name} raised {type(error).__name__}: {_without_traceback(str(error))}{place}; {'; '.join(notes)}"


def _without_traceback(said: str) -> str:
    """The message of an error; of one from a data worker, without the traceback that stands in it."""
    lines = said.splitlines()
    if len(lines) < 2 or not lines[1].startswith("Original Traceback"):
        return said
    last = max(at for at, line in enumerate(lines) if at == 1 or line[:1].isspace())  # of the traceback
    return "; ".join(lines[last + 1 :]) or lines[0]


# --- before the import


def _read_first(module: str, attribute: str) -> None:
    """Raise ValueError if the file's text shows that it lacks the attribute, or that importing it would train."""
    file = _file_of(module)
    if module in sys.modules or file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    found = _Script(tree)
    if attribute and not found.may_have(attribute):
        raise ValueError(f"{file.name} has no `{attribute}` when it is imported: {_where(found, attribute, module)}")
    if work := found.work():
        raise ValueError(
            f"importing {file.name} would {work}; nothing was imported. Put that under "
            f'`if __name__ == "__main__":`, {_AROUND}'
        )


def _file_of(module: str) -> Path | None:
    """The path of a module's source, without importing it; None if there is no Python file."""
    path, spec = None, None
    for depth in range(1, module.count(".") + 2):
        spec = importlib.machinery.PathFinder.find_spec(".".join(module.split(".")[:depth]), path)
        if spec is None or (depth > 1 and path is None):
            return None
        path = spec.submodule_search_locations
    origin = str(spec.origin) if spec is not None else ""
    return Path(origin) if origin.endswith(".py") else None


def _where(script: _Script, name: str, module: str) -> str:
    """Where a file defines a name that importing it does not define, and what to write instead."""
    moved = f"make it in {_AS_A_FUNCTION.format(module=module)}, {_AROUND}"
    if name in script.guarded:
        return f'it is made under `if __name__ == "__main__":`, which an import does not run; {moved}'
    for function in script.functions.values():
        if name in set(_bound_in(function.body)):
            return f"it is a variable of the function `{function.name}`; {moved}"
    near = get_close_matches(name, script.bound, n=3) or sorted(script.bound)[:8]
    return f"it has {', '.join(near)}" if near else "it is empty"


class _Script:
    """The effects of importing a file, as far as its text shows."""

    def __init__(self, tree: ast.Module) -> None:
        def asks_name(test: ast.expr) -> bool:
            return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))

        guards = [node for node in tree.body if isinstance(node, ast.If) and asks_name(node.test)]
        self.body = [node for node in tree.body if node not in guards]
        self.body += [node for guard in guards for node in guard.orelse]
        self.bound = set(_bound_in(self.body))
        self.guarded = set(_bound_in([node for guard in guards for node in guard.body]))
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.modules = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }

    def may_have(self, name: str) -> bool:
        """Whether importing the file may define the name; calls such as `globals()` may define any."""
        nodes = [node for function in self.functions.values() for node in ast.walk(function)]
        declared = {declared for node in nodes if isinstance(node, ast.Global) for declared in node.names}
        calls = [node.func for node in _executed(self.body) if isinstance(node, ast.Call)]
        called = {call.id for call in calls if isinstance(call, ast.Name)}
        return bool({name, "*", "__getattr__"} & self.bound or {name} & declared or called & _WRITE_NAMES)

    def work(self) -> str:
        """Describes the first call that trains or reads the command line, with its line; "" if there is none."""
        calls = (node for node in _executed(self.body) if isinstance(node, ast.Call))
        return next((f"{what} (line {call.lineno})" for call in calls if (what := self._work_of(call, set()))), "")

    def _work_of(self, call: ast.Call, seen: set[str]) -> str:
        """Describes a call that trains or reads the command line, also inside functions of this file; else ""."""
        called = call.func
        if isinstance(called, ast.Attribute):
            if called.attr == "parse_args" and not call.args:
                return "read torch_sink's own command line, by parse_args()"
            is_of_module = isinstance(called.value, ast.Name) and called.value.id in self.modules
            is_run = called.attr == "run" and "loop" in ast.unparse(called.value).lower()
            is_trainer = called.attr == "train" and "trainer" in ast.unparse(called.value).lower()
            trains = (called.attr in _TRAINS or is_run or is_trainer) and not is_of_module
            return f"train, by {ast.unparse(called)}()" if trains else ""
        if not isinstance(called, ast.Name) or called.id in seen:
            return ""
        if called.id not in self.functions:
            return f"call {called.id}()" if called.id in _MAY_TRAIN else ""
        inside = _executed(self.functions[called.id].body)
        found = (self._work_of(node, {*seen, called.id}) for node in inside if isinstance(node, ast.Call))
        return next((f"call {called.id}(), and so {what}" for what in found if what), "")


def _executed(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The nodes that run with a body, in the order of lines: those inside classes, but not those inside functions."""
    for node in body:
        todo: list[ast.AST] = [node]
        while todo:
            here = todo.pop()
            if isinstance(here, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            yield here
            todo += reversed([*ast.iter_child_nodes(here)])


def _bound_in(body: list[ast.stmt]) -> Iterator[str]:
    """The names that a body defines in its scope; "*" stands for all names of another module."""
    todo: list[ast.AST] = [*body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, _SCOPES):
            if not isinstance(node, ast.Lambda):
                yield node.name
            continue
        todo += ast.iter_child_nodes(node)
