"""The compile gate: every variant of the kernels, compiled for every target, without a GPU.

    python examples/benchmarks/kernels.py [--some] [--only NAME ...] [--targets cuda:90 hip:gfx942]

Reads registers, spills, shared memory, instructions and the width of accesses to global memory from the machine code,
counts instructions that would break equal bits, and estimates what the stages of usual pipelines move and compute for
a pixel. Writes JSON, from which `report.py` makes docs/kernels.md. `--some` leaves out what lies between the smallest
and the largest stages, and the JPEG kernels for small batches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# Kernels that were made for the interpreter cannot be compiled; read when Triton is imported.
os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_gate import faults
from kernel_usage import target, usage
from torch_sink.triton_kernels.jpeg.variants import JpegVariant, jpeg_variants, some_jpeg_variants
from torch_sink.triton_kernels.variants import Variant, some_variants, variants

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "examples" / "benchmarks" / "results" / "kernels.json"
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
ALIGNED = [["tt.divisibility", 16]]


def chosen_variants(arguments: argparse.Namespace, name: str) -> list[Variant | JpegVariant]:
    """The variants for a target that the command line asks for."""
    threads = target(name).warp_size
    if arguments.some:
        chosen = [*some_variants(), *some_jpeg_variants(threads)]
    else:
        chosen = [*variants(), *jpeg_variants(threads)]
    return [variant for variant in chosen if not arguments.only or variant.name in arguments.only]


def compile_variant(variant: Variant | JpegVariant, where: GPUTarget) -> Any:
    """The compiled kernel of one variant."""
    source = ASTSource(
        fn=variant.kernel,
        signature=variant.signature,
        constexprs=variant.constants,
        attrs={(position,): ALIGNED for position in range(len(variant.pointers))},
    )
    options = {"num_warps": variant.warps, "enable_fp_fusion": False}
    if where.backend == "cuda" and variant.registers is not None:
        options["maxnreg"] = variant.registers
    return triton.compile(source, target=where, options=options)


def measure(variant: Variant | JpegVariant, name: str) -> dict[str, Any]:
    """One row of the result."""
    where = target(name)
    found = usage(compile_variant(variant, where), where)
    if variant.fuses:
        found["inexact"] = [text for text in found["inexact"] if text not in ("fma.rn.f32", "fma.rn.f32x2")]
    if isinstance(variant, JpegVariant) and variant.symbols:
        found["instructions_a_symbol"] = found["loop"] / variant.symbols
    return {"variant": variant.name, "target": name, **found}


def measure_in_processes(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows; a process for each core, because a compilation uses one."""
    targets = arguments.targets
    count = min(len(os.sched_getaffinity(0)), len(targets))
    # AMD's compiler takes longest: dealt out in this order, each process gets about as much.
    shares = [targets[::-1][start::count] for start in range(count)]
    command = [sys.executable, __file__, *sys.argv[1:], "--print", "--targets"]
    processes = [subprocess.Popen([*command, *share], stdout=subprocess.PIPE, text=True) for share in shares]
    rows = []
    for process in processes:
        printed, _ = process.communicate()
        if process.returncode:
            raise SystemExit(process.returncode)
        rows += json.loads(printed)
    order = {name: number for number, name in enumerate(TARGETS)}
    return sorted(rows, key=lambda row: (order[row["target"]], row["variant"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--some", action="store_true", help="only the smallest and the largest variants")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only variants with these names")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS, metavar="TARGET")
    parser.add_argument("--print", action="store_true", help="print the rows as JSON, in this process")
    parser.add_argument("--output", type=Path, default=RESULT, help="JSON file (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.print:
        chosen = [(variant, name) for name in arguments.targets for variant in chosen_variants(arguments, name)]
        json.dump([measure(*pair) for pair in chosen], sys.stdout)
        return 0
    from kernel_work import estimate_work
    from torch_sink.cli.machine import describe_machine

    rows = measure_in_processes(arguments)
    report = {
        "command": "python examples/benchmarks/kernels.py" + (" --some" if arguments.some else ""),
        "machine": describe_machine(),
        "kernels": rows,
        "work": estimate_work(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(rows)} variants compiled. Written: {arguments.output}")
    for fault in faults(rows):
        print(fault, file=sys.stderr)
    return int(bool(faults(rows)))


if __name__ == "__main__":
    sys.exit(main())
