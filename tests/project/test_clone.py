"""A clone runs as it is, from its root: not installed, without `.git`, and without a home folder.

`make test-clone` runs all of it, also what compiles and trains.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from pathlib import Path
from typing import NamedTuple

import bare
import pytest

pytestmark = pytest.mark.once_on_oldest


class Clone(NamedTuple):
    """A bare clone, and the folder of packages that its processes see."""

    root: Path
    packages: Path

    def run(self, *command: Path | str, seconds: float = 240, status: int = 0) -> str:
        """What a command says that is run from the root."""
        finished = subprocess.run(
            [*map(str, command)],
            cwd=self.root,
            env=bare.environment(self.packages),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        assert finished.returncode == status, finished.stdout
        return finished.stdout

    def python(self, *arguments: Path | str, status: int = 0) -> str:
        return self.run(bare.BASE_PYTHON, *arguments, status=status)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    folder = tmp_path_factory.mktemp("bare")
    return Clone(bare.copy_clone(folder / "clone"), bare.link_packages(folder / "packages"))


def test_the_package_is_that_of_the_clone(clone: Clone) -> None:
    shown = "import torch_sink, torch_sink.triton_kernels.rows as rows; print(torch_sink.__file__, rows.__file__)"
    package, rows = clone.python("-c", shown).split()
    assert Path(package) == clone.root / "torch_sink" / "__init__.py"
    assert Path(rows) == clone.root / "triton_kernels" / "rows.py"
    assert importlib.util.find_spec("torch_sink.tests") is None, "nothing else of a clone is in the package"


def test_doctor(clone: Clone) -> None:
    assert "Everything that is needed works." in clone.python("-m", "torch_sink", "doctor")


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(clone: Clone) -> None:
    said = clone.python("-m", "torch_sink", "warm", "--target", "cuda:90", status=2)
    assert "Triton's cache /proc/nowhere/.triton/cache cannot be written" in said
    assert "set TRITON_CACHE_DIR to a folder that can be written" in said
    assert said.count("\n") == 1


def test_a_file_of_tests(clone: Clone) -> None:
    assert " passed" in clone.python("-m", "pytest", "-q", "tests/sink/ring/test_ring_protocol.py")


@pytest.mark.slow
def test_the_kernels_are_compiled_for_a_gpu_that_is_elsewhere(clone: Clone) -> None:
    said = clone.run("make", "gpu", "PART=compile", f"GPU_PYTHON={bare.BASE_PYTHON}", seconds=600)
    assert "kernels are compiled for one that is elsewhere, cuda:90" in said
    for name in ("compile", "doctor"):
        assert f"  {name}: passed" in said
    kernels = clone.root / "local" / "gpu" / "kernels"
    assert len([*kernels.glob("*/*.cubin")]) >= 20


@pytest.mark.slow
def test_the_demo(clone: Clone) -> None:
    said = clone.python("examples/demo/demo.py", "--epochs", "1", "--minimum-accuracy", "0.1")
    assert "equal bits in all 23 steps" in said
    assert (clone.root / "demo_report.png").stat().st_size > 1000


def folders_of_scripts() -> list[str]:
    scripts = (bare.ROOT / "examples").rglob("*.py")
    return sorted({str(path.parent.relative_to(bare.ROOT)) for path in scripts})


def imports_of(folder: Path) -> list[str]:
    """What the scripts of a folder import of the package, each statement once."""
    found = set()
    for script in folder.glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.partition(".")[0] == "torch_sink" for name in names):
                found.add(ast.unparse(node))
    return sorted(found)


@pytest.mark.parametrize("folder", folders_of_scripts())
def test_scripts_find_the_clone_beside_them(clone: Clone, folder: str, tmp_path: Path) -> None:
    """With their own folder first on the path, as Python runs a script."""
    imports = imports_of(clone.root / folder)
    assert imports
    script = tmp_path / "script.py"
    first = f"import sys; sys.path[0] = {str(clone.root / folder)!r}"
    script.write_text("\n".join([first, *imports, "import torch_sink", "print(torch_sink.__file__)"]))
    assert Path(clone.python(script).strip()) == clone.root / "torch_sink" / "__init__.py"
