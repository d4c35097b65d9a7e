"""Command line: `python -m torch_sink doctor | support | explain | warm | bench`, and what benchmarks share with it."""

from torch_sink.cli.commands import main

__all__ = ["main"]
