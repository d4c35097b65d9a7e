"""Held while a CUDA graph is captured: a wait for the whole device, in whatever thread, would be the capture's end."""

from __future__ import annotations

import threading

capture_lock = threading.RLock()
