"""`python -m torch_sink`."""

from __future__ import annotations

import sys

from torch_sink.cli import main

sys.exit(main())
