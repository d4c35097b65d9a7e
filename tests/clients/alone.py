"""Runs programs in a process of its own: `python -m clients.alone PHOTOS FOLDER NAME...` prints what each gave.

Under TRITON_INTERPRET=1 batches are recorded and made by the kernels, as on a device: in the main process, one after
the other, since Triton interprets for one thread at a time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from . import CLIENTS
from .client import compare


def interpret_one_at_a_time() -> None:
    """Two SinkLoaders, of training and of evaluation, make batches in two threads."""
    from triton.runtime.interpreter import GridExecutor

    from kernels import quick_interpreter

    quick_interpreter.install(check_overflow=False)
    launch, lock = GridExecutor.__call__, threading.RLock()

    def with_lock(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    GridExecutor.__call__ = with_lock


def main(photos: str, folder: str, *names: str) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret_one_at_a_time()
    for name in names:
        outcome = compare(CLIENTS[name], Path(photos), Path(folder, name))
        print(json.dumps({"program": name, **dataclasses.asdict(outcome)}), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
