"""Command line: `python -m torch_sink doctor | support | explain | bench`, and what the benchmarks share with it."""

from torch_sink.cli.commands import main

__all__ = ["main"]
