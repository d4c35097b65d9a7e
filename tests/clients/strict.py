"""Runs a program with stock code and then with ours, where a warning is an error, and says what is left when it is done.

`python -W error -m clients.strict PHOTOS FOLDER NAME ROW STOCK OURS`, with ROW a JSON object: what is around the program;
and a folder of temporary files for each. Both are forks of a process that has loaded torch, which takes seconds. Each ends
as a program does, and leaves what it found in `ran.json` and what it said in `stderr`, in FOLDER/stock and FOLDER/ours.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import re
import sys
import tempfile
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


def run(photos: str, folder: str, name: str, row: dict[str, Any]) -> None:
    """One of the two, in this process."""
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
    Path(folder, "ran.json").write_text(json.dumps(dataclasses.asdict(ran)))


def begin(folder: Path, temporary: str) -> None:
    """Make a fork a process with a folder, temporary files and a standard error of its own."""
    os.chdir(folder)
    os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ["TMPDIR"], tempfile.tempdir = temporary, None


def main(photos: str, folder: str, name: str, text: str, *temporary: str) -> None:
    """What stock code warns of as well is let through."""
    known: list[str] = []
    places = [Path(folder, who) for who in ("stock", "ours")]
    for place, files in zip(places, temporary, strict=True):
        place.mkdir()
        if os.fork() == 0:
            begin(place, files)
            run(photos, str(place), name, {**json.loads(text), "who": place.name, "known": known})
            return
        if os.wait()[1] != 0:
            sys.exit((place / "stderr").read_text())
        warned = json.loads((place / "ran.json").read_text())["warned"]
        known = sorted({said.replace(str(place), str(places[1])) for said in warned})


if __name__ == "__main__":
    main(*sys.argv[1:])
