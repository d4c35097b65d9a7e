"""What lies in `interpreted` needs Triton's interpreter, which a process has or has not from its start, or a device.

A process that has it collects those tests directly. Any other one runs them through `test_interpreted.py`, in
a process of its own; where there is a device, it runs them there as well.
"""

from __future__ import annotations

import os

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = ["test_interpreted.py"]
elif not torch.cuda.is_available() and os.environ.get("FAIL_WITHOUT_CUDA") != "1":
    collect_ignore = ["interpreted"]
