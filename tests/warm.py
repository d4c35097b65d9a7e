"""Programs in processes that have loaded torch and torchvision already, which takes seconds.

Python's fork server loads them once, and each program runs in a fork of it. That is no new interpreter: what a program
finds in `sys.modules`, in variables of the environment that libraries read as they are loaded, or after its last line,
is tested in one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOADED = ["torch", "torch._dynamo", "torch.utils.data", "torchvision.datasets", "torchvision.models", "torchvision.transforms.v2"]  # fmt: skip


def prepare() -> None:
    """What the fork server of this process loads, before it is started."""
    multiprocessing.set_forkserver_preload(LOADED)


def run(
    *arguments: str | Path, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS`: a script, `-c` and code, or `-m` and a module, with its arguments."""
    given = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        environment = dict(os.environ if env is None else env)
        started = given, str(cwd or os.getcwd()), environment, [str(output) for output in outputs]
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=started)
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(given, timeout, *(output.read_bytes() for output in outputs))
        said = [output.read_text() if output.exists() else "" for output in outputs]
    return subprocess.CompletedProcess(given, process.exitcode, *said)


def _run(arguments: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    multiprocessing.set_start_method(None, force=True)  # this process knows that a fork server has started it
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix)) and path not in given]
    sys.path[:] = [*filter(None, given), *installed]
    code = 0
    try:
        _main(*arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.exit(code)


def _main(first: str, *others: str) -> None:
    """The program becomes `__main__`."""
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if first == "-m":
        import runpy

        sys.argv[:] = others
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv[:] = ["-c", *others[1:]]
        sys.path.insert(0, "")
        exec(others[0], vars(main))
    else:
        sys.argv[:] = [first, *others]
        sys.path.insert(0, str(Path(first).resolve().parent))
        main.__file__ = first
        exec(compile(Path(first).read_text(), first, "exec"), vars(main))
