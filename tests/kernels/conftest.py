"""What lies in `interpreted` needs Triton's interpreter, which a process has or has not from its start.

A process that has it collects those tests directly. Any other one runs them through `test_interpreted.py`, in
processes of their own.
"""

from __future__ import annotations

import os

collect_ignore = ["test_interpreted.py" if os.environ.get("TRITON_INTERPRET") == "1" else "interpreted"]
