"""A program that ends without `close()`: its workers end with it, and no thread is started for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sink.left_open import STATES
from sink.test_awkward_moments import wait_until_gone

PROGRAM = Path(__file__).with_name("left_open.py")
CONTEXTS = ["spawn", "forkserver"]
FORKED = [name for name in STATES if name not in CONTEXTS]


@pytest.mark.parametrize(
    "states",
    [
        FORKED,
        # These load torch anew, which takes seconds.
        pytest.param(["spawn"], marks=pytest.mark.slow),
        pytest.param(["forkserver"], marks=pytest.mark.once_on_oldest),
    ],
    ids=["fork", *CONTEXTS],
)
def test_what_a_program_leaves_open(states: list[str]) -> None:
    """However it was started, and in each state; nothing is printed, and nobody is waited for in vain."""
    ended = subprocess.run([sys.executable, PROGRAM, *states], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
    wait_until_gone(
        [int(pid) for pid in ended.stdout.split()]
    )  # Python's own helpers of "forkserver" go a moment later
