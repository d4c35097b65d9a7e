"""The house, floor by floor: a folder imports from those below it only, and no module imports itself through others."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]

# The lowest first: what a floor imports stands before it.
FLOORS = [
    *("triton_kernels", "triton_kernels.stages", "triton_kernels.jpeg"),
    *("common", "damage", "worker", "tracing"),
    "sink",
    *("image.core", "image.decode", "image.operations", "image.program"),
    *("image.handles", "image.run", "image"),
    *("loop.core", "loop.step", "loop.engines", "loop"),
    "mindspore",
    "cli",
]


def modules() -> dict[str, Path]:
    """Each module of the package, as "loop.step.update", and its file."""
    files = [*(ROOT / "torch_sink").rglob("*.py"), *(ROOT / "triton_kernels").rglob("*.py")]
    return {name: file for file in files if (name := _name_of(file)) is not None}


def _name_of(file: Path) -> str | None:
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[:2] == ("torch_sink", "triton_kernels"):
        return None  # a link to the other folder, which some checkouts have
    parts = parts[1:] if parts[0] == "torch_sink" else parts
    return ".".join(parts)


def floor_of(module: str) -> str:
    """The folder of a module; files of the package's own folder have none."""
    return module.rpartition(".")[0]


MODULES = modules()


def imported(module: str) -> list[str]:
    """The modules of the package that one imports, but for those that only a type checker needs."""
    return _imported(module, for_types=False)


@functools.cache
def _imported(module: str, *, for_types: bool) -> list[str]:
    return [*_names_imported(module, for_types)]


def _names_imported(module: str, for_types: bool) -> Iterator[str]:
    tree = ast.parse(MODULES[module].read_text())
    unneeded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test) and not for_types
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in unneeded:
            package = _package_of(module, node)
            for alias in node.names:
                name = f"{package}.{alias.name}".strip(".")
                yield next((found for found in (name, package, f"{package}.__init__") if found in MODULES), "")


def _package_of(module: str, node: ast.ImportFrom) -> str:
    """What an import names, as `MODULES` does; "" for other packages."""
    if node.level:
        base = module.split(".")[: -node.level]
        return ".".join([*base, *([node.module] if node.module else [])])
    name = node.module or ""
    return name.removeprefix("torch_sink.") if name.startswith("torch_sink.") else ""


def test_every_folder_is_a_floor() -> None:
    assert {floor_of(module) for module in MODULES} - {""} == set(FLOORS)


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_go_down(floor: str) -> None:
    upwards = [
        f"{module} imports {name}"
        for module in MODULES
        if floor_of(module) == floor
        for name in imported(module)
        if floor_of(name) and FLOORS.index(floor_of(name)) > FLOORS.index(floor)
    ]
    assert not upwards


def test_imports_are_seen() -> None:
    assert "loop.core.distributed" in set(imported("loop.step.update"))
    assert "triton_kernels.program" in set(imported("triton_kernels.stages.stage"))


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside of functions count, and those for type checkers: who reads the code walks in that circle."""
    arrows = {module: {*_imported(module, for_types=True)} - {"", module} for module in MODULES}
    in_circles = [module for module in MODULES if module in _reached(arrows, arrows[module])]
    assert not in_circles


def test_circles_are_seen() -> None:
    """A circle, and what leads into it."""
    arrows = {"above": {"one"}, "one": {"other"}, "other": {"one", "below"}, "below": set[str]()}
    assert [module for module in arrows if module in _reached(arrows, arrows[module])] == ["one", "other"]


def _reached(arrows: Mapping[str, Set[str]], modules: Set[str]) -> set[str]:
    """The modules, and all that they import, and what that imports."""
    reached, todo = set[str](), [*modules]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += arrows[name]
    return reached
