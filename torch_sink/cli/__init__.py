"""The command line: `python -m torch_sink doctor | support | explain | bench | warm`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from torch_sink.errors import SinkError

if TYPE_CHECKING:
    from torch_sink.triton_kernels.launching import Variant

ABOUT = "Makes torchvision's pixels on the device, keeps batches there, and runs the training loop without waits."
EXAMPLES = """examples:
  python -m torch_sink doctor
  python -m torch_sink support ColorJitter
  python -m torch_sink explain photos --pipeline train:transform --device cuda --workers 8
  python -m torch_sink bench photos --pipeline train:make_loader --picture bench.png
"""
PIPELINE = """--pipeline train.py:NAME is NAME of that file; train:NAME is NAME of that module, here or on PYTHONPATH:
  a transform, or a function of one image   it gets the images of DIR
  a Dataset, a DataLoader or a SinkLoader   it brings its own images, DIR can be left out
  a function or class without parameters    it is called, and gives one of these
  a dict or a list of these                 write which one: --pipeline 'train:loaders[val]'
The file is read before it is imported: one that trains when imported is not.
"""
SUPPORT_LEGEND = (
    '"kernel": recorded, and made on the device. "exact fallback": stock torchvision runs on the CPU, and '
    '`fallback_report()` counts it. "passes through": nothing to compute. "not applicable": torchvision refuses it.'
)
SUPPORT_EXAMPLES = """examples:
  python -m torch_sink support ColorJitter blur
  python -m torch_sink support v2.functional.resize
It exits with 2 if a name is found nowhere, and then says which are near.
"""
SUPPORT_COLUMNS = ("transform or functional", "on Pillow images", "on tensors", "limits")
_BAR_COLUMNS = 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if something is broken, 2 for arguments that cannot be used."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (ValueError, FileNotFoundError, NotADirectoryError, SinkError) as error:
        print(f"torch-sink: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it.
        sys.stderr.close()
        return 0


def run_doctor(options: argparse.Namespace) -> int:
    """Does it work here: what is installed, what would be used, what is missing and how to get it?"""
    from torch_sink.cli.doctor import examine, format_findings

    findings = examine()
    print(format_findings(findings))
    return int(any(finding.state == "broken" for finding in findings))


def run_support(options: argparse.Namespace) -> int:
    """Which transforms run on the device: every one of torchvision's, or those that are named, one line each."""
    from torch_sink.cli.report import Table
    from torch_sink.image.support import support_table

    rows = support_table()
    of_each = {part: [row for row in rows if part.lower() in row.name.lower()] for part in options.names or [""]}
    if wanted := {row for found in of_each.values() for row in found}:
        print(f"{Table('', SUPPORT_COLUMNS, [row for row in rows if row in wanted]).as_text()}\n\n{SUPPORT_LEGEND}")
    for part in (part for part, found in of_each.items() if not found):
        known = {name.lower(): name for name in (row.name.rpartition(".")[2] for row in rows)}
        near = [known[each] for each in get_close_matches(part.lower().rpartition(".")[2], known)]
        instead = f"; near: {', '.join(near)}" if near else ": without a name, the command lists them all"
        instead += ". Calls of torch on tensors are on the page 'Image backend'"
        print(
            f"torch-sink: no transform or functional of torchvision's has {part!r} in its name{instead}",
            file=sys.stderr,
        )
    return 0 if all(of_each.values()) else 2


def run_explain(options: argparse.Namespace) -> int:
    """What would my pipeline do: operations, launches, fallbacks, and what does a data worker cost?"""
    from torch_sink.cli import explain
    from torch_sink.cli.pipelines import open_pipeline

    pipeline = open_pipeline(options.pipeline, options.folder, options.batch_size)
    print(explain.report_of(explain.explain(pipeline, options.device, options.workers)).as_text())
    return 0


def run_warm(options: argparse.Namespace) -> int:
    """Compile all kernels now, so that the first batch does not wait for those of its pipeline."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SinkError("TRITON_INTERPRET=1 is set: interpreted kernels are not compiled; unset it")
    from torch_sink.cli.doctor import unwritable_cache
    from torch_sink.image.run import ahead

    target = ahead.target_named(options.target)
    if found := unwritable_cache():
        raise SinkError("; ".join(found))
    started = time.perf_counter()
    variants, outcomes, in_place = ahead.every_variant(target), [], sys.stderr.isatty()
    for outcome in ahead.compile_all(target):
        outcomes.append(outcome)
        filled = _BAR_COLUMNS * len(outcomes) // len(variants)
        bar = f"[{'#' * filled}{'.' * (_BAR_COLUMNS - filled)}] {len(outcomes)}/{len(variants)}"
        state = "failed" if outcome.error else "in the cache" if outcome.was_there else f"{outcome.seconds:.1f} s"
        line = f"{bar} {outcome.name}, {state}"
        print(f"\r{line:79}" if in_place else line, end="" if in_place else "\n", file=sys.stderr, flush=True)
    if in_place:
        print(file=sys.stderr)
    failed = [outcome for outcome in outcomes if outcome.error]
    there = sum(outcome.was_there for outcome in outcomes)
    print(
        f"{len(outcomes) - there - len(failed)} kernels compiled for {target.backend}:{target.arch} in "
        f"{time.perf_counter() - started:.0f} s, {there} were in Triton's cache already."
    )
    for outcome in failed:
        print(f"{outcome.name} cannot be compiled: {outcome.error}", file=sys.stderr)
    if failed or options.target is not None:  # kernels for another machine cannot be loaded here
        return int(bool(failed))
    return int(not _load_and_prove(variants))


def _load_and_prove(variants: Sequence[Variant]) -> bool:
    """Load all kernels and run their self-tests on this machine's device; False if one fails."""
    import torch

    from torch_sink.image.decode.jpeg_proof import JPEG_KERNELS
    from torch_sink.image.run.ahead import load_variant
    from torch_sink.image.run.stage_proof import STAGE_KERNELS

    errors = [f"{variant.name} cannot be loaded: {error}" for variant in variants if (error := load_variant(variant))]
    for error in errors:
        print(error, file=sys.stderr)
    verdicts = [proof.verdict(torch.device("cuda")) for proof in (JPEG_KERNELS, *STAGE_KERNELS.values())]
    wrong = "; ".join(found.reason for found in verdicts if not found.holds)
    print(f"Stock code replaces kernels here: {wrong}" if wrong else "All give stock code's pixels here.")
    return not errors and not wrong


def run_bench(options: argparse.Namespace) -> int:
    """How much faster is it here: stock against torch_sink, on my own images and pipeline?"""
    from torch_sink.cli import bench
    from torch_sink.cli.photos import write_photos
    from torch_sink.cli.progress import step

    with tempfile.TemporaryDirectory(prefix="torch_sink_bench_") as scratch:
        folder = options.folder
        if folder is None and ":" not in options.pipeline:
            folder, count = Path(scratch), 16 if options.quick else 80
            with step(f"Writing {count} photo-like JPEG files, as no folder is given"):
                write_photos(folder, count=count)
        is_given = options.folder is not None
        found = bench.run(folder, options.pipeline, workers=options.workers, quick=options.quick, given=is_given)
    print(bench.report_of(found).as_text())
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"Written: {options.json}")
    try:
        bench.draw(found, options.picture)
    except ModuleNotFoundError as error:
        print(f"No picture: {error.name} is not installed (pip install matplotlib).")
    else:
        print(f"Written: {options.picture}")
    return 0


def _file(text: str) -> Path:
    """The path of an argument; raises unless its folder exists and it is no folder itself."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in no folder: create {path.parent} first"
        raise argparse.ArgumentTypeError(f"{path} {what}; give the path of a file")
    return path


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the commands and their options."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m torch_sink", description=ABOUT, epilog=EXAMPLES, formatter_class=form
    )
    parser.set_defaults(command=lambda options: print(parser.format_help()) or 0)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands, and what each answers")

    def add(run: Callable[[argparse.Namespace], int], epilog: str | None = None) -> argparse.ArgumentParser:
        about = run.__doc__ or ""
        name = run.__name__.removeprefix("run_")
        command = commands.add_parser(name, help=about, description=about, epilog=epilog, formatter_class=form)
        command.set_defaults(command=run)
        return command

    def add_with_pipeline(run: Callable[[argparse.Namespace], int], workers: str) -> argparse.ArgumentParser:
        command = add(run, PIPELINE)
        command.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="images, at any depth")
        about = "file.py:name or module:name of your own, or a built-in one (default: %(default)s)"
        command.add_argument("--pipeline", default="v1 train", metavar="NAME", help=about)
        command.add_argument("--workers", type=int, metavar="N", help=f"data workers (default: {workers})")
        return command

    add(run_doctor)
    command = add(run_support, SUPPORT_EXAMPLES)
    about = "show those whose name contains one of these, in upper or lower case (default: all)"
    command.add_argument("names", nargs="*", metavar="NAME", help=about)

    command = add_with_pipeline(run_explain, "as the DataLoader has, else one for each core")
    about = "where the pixels would be made: cuda, which this machine need not have, or cpu (default: what it has)"
    command.add_argument("--device", metavar="NAME", help=about)
    about = "of anything but a DataLoader (default: 64)"
    command.add_argument("--batch-size", type=int, default=64, metavar="N", help=about)

    command = add_with_pipeline(run_bench, "as the DataLoader has, else 2")
    command.add_argument("--quick", action="store_true", help="rough figures in half a minute")
    for option, suffix, what in (("--json", "json", "every figure"), ("--picture", "png", "the answer as a picture")):
        name, about = Path(f"torch_sink_bench.{suffix}"), f"{what} (default: %(default)s)"
        command.add_argument(option, type=_file, metavar="FILE", default=name, help=about)

    command = add(run_warm)
    about = "any pipeline; all of them run the same kernels, so none has to be named"
    command.add_argument("pipelines", nargs="*", metavar="PIPELINE", help=about)
    command.add_argument("--target", help="GPU to compile for, such as cuda:90 (default: this machine's)")
    return parser
