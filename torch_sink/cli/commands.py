"""The command line: `python -m torch_sink doctor | support | explain DIR | warm | bench`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch_sink.errors import SinkError

BENCH_PIPELINES = ("v1 train", "v1 train + ColorJitter", "v1 train + RandAugment", "v2 train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what follows the program's name; default `sys.argv[1:]`.

    Returns:
        The exit status: 0, 1 when something is broken, 2 when the arguments cannot be used.
    """
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (ValueError, FileNotFoundError, NotADirectoryError, SinkError) as error:
        print(f"torch-sink: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output, `head` for instance, has seen enough.
        sys.stderr.close()
        return 0


def doctor(options: argparse.Namespace) -> int:
    """Say what is installed, what would be used, what is missing and how to get it."""
    from torch_sink.cli.doctor import examine, format_findings

    findings = examine()
    print(format_findings(findings))
    return int(any(finding.state == "broken" for finding in findings))


def support(options: argparse.Namespace) -> int:
    """Print how each of torchvision's transforms runs."""
    from torch_sink.cli.support_text import format_support

    print(format_support(options.markdown))
    return 0


def explain(options: argparse.Namespace) -> int:
    """Print what a pipeline would do with the first images of a folder, without touching a pixel."""
    from torch_sink.cli.explain import explain_folder

    print(explain_folder(options.folder, options.pipeline, options.batch_size))
    return 0


def warm(options: argparse.Namespace) -> int:
    """Compile the kernels of a pipeline ahead of time, so that the first batch does not wait for them."""
    from torch_sink.cli.warm import warm as compile_kernels

    if options.batch_size < 1:
        raise ValueError(f"a batch of {options.batch_size} images launches nothing; give 1 or more")
    return compile_kernels(
        options.pipelines, options.target, options.batch_size, options.processes, everything=options.all
    )


def bench(options: argparse.Namespace) -> int:
    """Measure stock against torch_sink on this machine; print a table, write JSON and PNG."""
    from torch_sink.cli import bench_report
    from torch_sink.cli.photos import write_photos

    if not options.output.is_dir():
        raise NotADirectoryError(f"--output {options.output} is not a folder; create it first")
    with tempfile.TemporaryDirectory(prefix="torch_sink_bench_") as scratch:
        if options.data is None:
            write_photos(scratch, count=16 if options.quick else 80, odd=False)
        folder = options.data or Path(scratch)
        report = bench_report.run(folder, BENCH_PIPELINES, workers=options.workers, quick=options.quick)
    report["photographs"]["given"] = options.data is not None
    print(bench_report.format_report(report))
    json_path, chart_path = options.output / "torch_sink_bench.json", options.output / "torch_sink_bench.png"
    json_path.write_text(json.dumps(report, indent=1) + "\n")
    written = [json_path]
    try:
        bench_report.draw_chart(report, chart_path)
        written.append(chart_path)
    except ModuleNotFoundError as error:
        print(f"No chart: {error.name} is not installed (pip install matplotlib).")
    print(f"Written: {', '.join(map(str, written))}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(prog="torch-sink", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help=doctor.__doc__, description=doctor.__doc__)
    command.set_defaults(command=doctor)

    command = commands.add_parser("support", help=support.__doc__, description=support.__doc__)
    command.add_argument("--markdown", action="store_true", help="as a Markdown table")
    command.set_defaults(command=support)

    command = commands.add_parser("explain", help=explain.__doc__, description=explain.__doc__)
    command.add_argument("folder", type=Path, metavar="DIR", help="folder that holds images, at any depth")
    command.add_argument("--pipeline", default="v1 train", help="one of the built-in pipelines (default: v1 train)")
    command.add_argument("--batch-size", type=int, default=32, help="images to look at (default: 32)")
    command.set_defaults(command=explain)

    command = commands.add_parser("warm", help=warm.__doc__, description=warm.__doc__)
    about = "a built-in pipeline, or module:attribute of a transform or dataset (default: all built-in ones)"
    command.add_argument("pipelines", nargs="*", metavar="PIPELINE", help=about)
    command.add_argument("--target", help="GPU to compile for, such as cuda:90 (default: this machine's)")
    command.add_argument("--batch-size", type=int, default=64, help="images in a batch (default: 64)")
    command.add_argument("--processes", type=int, help="that compile at a time (default: one a core)")
    command.add_argument("--all", action="store_true", help="every variant of every kernel instead")
    command.set_defaults(command=warm)

    command = commands.add_parser("bench", help=bench.__doc__, description=bench.__doc__)
    command.add_argument("--data", type=Path, metavar="DIR", help="ImageFolder tree (default: generated images)")
    command.add_argument("--workers", type=int, default=2, help="data workers (default: 2)")
    command.add_argument("--quick", action="store_true", help="rough figures in half a minute")
    command.add_argument("--output", type=Path, default=Path.cwd(), help="folder for JSON and PNG (default: here)")
    command.set_defaults(command=bench)
    return parser
