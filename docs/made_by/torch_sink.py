"""Lets the examples and benchmarks of a clone run without an install.

Python looks for `torch_sink` beside the script that it runs, so it finds this file first. It puts the root of the clone
in front of `sys.path` and hands over to the package there. `torch_sink.py` in other folders is a link to this file.
"""

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
del sys.modules[__name__]
import_module(__name__)
