"""Runs a program in a process of its own, in which a warning is an error, and says what is left when it is done.

`python -W error -m clients.strict PHOTOS FOLDER NAME ROW`, with ROW a JSON object: who runs it, and what is around it.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import multiprocessing.util
import re
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from traces import command, left_since, traces

import torch_sink

from . import CLIENTS
from .client import Client, Run, seed_all


@dataclass(frozen=True)
class Ran:
    """What a process said of its program.

    Args:
        losses: what the program returned.
        warned: the text of each warning, those of forked workers among them, if warnings were counted.
        left: what was there afterwards and not before, by kind.
        has_recorded: the image backend took part.
    """

    losses: list[float]
    warned: list[str]
    left: dict[str, list[str]]
    has_recorded: bool = False


class Unwrapped(Run):
    """A run of the program with the two lines alone."""

    def sink(self, loader: Any) -> Any:
        return loader


def train(client: Client, photos: Path, folder: Path, row: dict[str, str]) -> tuple[list[float], bool]:
    """The program's losses, and whether something was recorded."""
    is_ours, before = row["who"] == "ours", row["lines"] == "before the imports"
    kind = Run if row["loader"] == "SinkLoader" else Unwrapped
    with ExitStack() as around:
        if is_ours and row["timeline"] == "timeline around":
            around.enter_context(torch_sink.timeline(folder / "run.html"))
        if not before:
            importlib.import_module(client.module)
        if is_ours:
            around.enter_context(torch_sink.image_backend("device", device="cpu"))
        importlib.import_module(client.module)
        if is_ours and row["timeline"] == "timeline inside":
            around.enter_context(torch_sink.timeline(folder / "run.html"))
        run = kind(photos, folder, torch.device("cpu"), is_ours)
        seed_all(1)
        with run.cleanup:
            losses = client.program(run)
        return losses, is_ours and torch_sink.fallback_report().has_recorded


def name_of(trace: Any) -> str:
    text = command(psutil.Process(trace)) if isinstance(trace, int) else getattr(trace, "name", str(trace))
    return re.sub(r"(?<=/sem\.)\w+|\d+", "0", text)


def main(photos: str, folder: str, name: str, text: str) -> None:
    row = json.loads(text)
    multiprocessing.set_start_method(row["start"])
    texts = Path(folder, "warnings.txt")
    texts.touch()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        with texts.open("a") as file:
            file.write(json.dumps(str(message)) + "\n")

    if row["who"] == "stock":
        warnings.simplefilter("always")
        warnings.showwarning = note
    for known in row["known"]:
        warnings.filterwarnings("ignore", message=re.escape(known))
    multiprocessing.util.get_temp_dir()  # of the process's own sockets, which stays until it ends
    before = traces()
    losses, has_recorded = train(CLIENTS[name], Path(photos), Path(folder), row)
    warned = [json.loads(line) for line in texts.read_text().splitlines()]
    # Named without what differs from run to run.
    left = {kind: sorted(map(name_of, more)) for kind, more in left_since(before).items()}
    ran = Ran(losses, warned, left, has_recorded)
    print(json.dumps({"program": name, **dataclasses.asdict(ran)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
