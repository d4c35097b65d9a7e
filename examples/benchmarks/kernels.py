"""The compile gate: every variant of the kernels, compiled for every target, without a GPU.

    python examples/benchmarks/kernels.py [--some] [--only NAME ...] [--targets cuda:90 hip:gfx942] [--again]

Reads registers, spills, shared memory, instructions and the width of accesses to global memory from the machine code,
counts instructions that would break equal bits and the CPU seconds of the compilation, and estimates what the stages of
usual pipelines move and compute for a pixel. Writes JSON, from which `report.py` makes docs/inside/kernels.md.

Rows of the record are kept where neither the kernel nor anything else they depend on has changed, so that after a
small change little is compiled; each new row is written at once. `--some` leaves out the stages for other dtypes than
float32, and the JPEG kernels for small batches; `--again` compiles what has not changed, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Kernels that were made for the interpreter cannot be compiled; read when Triton is imported.
os.environ["TRITON_INTERPRET"] = "0"
# Triton 3.4 leaves the last step for AMD GPUs to ROCm's linker; the figures are those of the assembly before it.
os.environ["TRITON_HIP_LLD_PATH"] = shutil.which("true") or ""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_gate import faults
from kernel_record import Rows, fingerprint, read_counts, read_rows, write_record
from kernel_usage import target, usage
from torch_sink.triton_kernels.jpeg import jpeg_variants
from torch_sink.triton_kernels.launching import Variant
from torch_sink.triton_kernels.shapes import LANE_SHAPES
from torch_sink.triton_kernels.stages import OUTPUTS, variants

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "examples" / "benchmarks" / "results" / "kernels.json"
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
ALIGNED = [["tt.divisibility", 16]]
Job = tuple[str, str]  # names of a variant and of a target
# How the names of variants end that differ little from others: stages for other dtypes, JPEG kernels for small batches.
SIMILAR = (*list(OUTPUTS)[1:], *(f"{shape.bits} bits" for shape in LANE_SHAPES[:-1]))


@functools.cache
def every_variant(name: str, *, some: bool = False) -> dict[str, Variant]:
    """The variants for a target by their names: all, or those that differ most."""
    every = (*variants(), *jpeg_variants(target(name).warp_size))
    return {variant.name: variant for variant in every if not (some and variant.name.endswith(SIMILAR))}


def every_job() -> list[Job]:
    """All of them, in the order of the record."""
    return [(variant, name) for name in TARGETS for variant in sorted(every_variant(name))]


def chosen_jobs(arguments: argparse.Namespace) -> list[Job]:
    """Those that the command line asks for."""
    by_target = {name: every_variant(name, some=arguments.some) for name in arguments.targets}
    if unknown := set(arguments.only).difference(*by_target.values()):
        raise SystemExit(f"no such variants: {', '.join(sorted(unknown))}")
    return [
        (variant, name)
        for name, found in by_target.items()
        for variant in found
        if variant in (arguments.only or found)
    ]


def options_of(variant: Variant, name: str) -> dict[str, Any]:
    """What the launcher asks of the compiler for a target."""
    options = {"num_warps": variant.warps, "enable_fp_fusion": False}
    if name.startswith("cuda") and variant.registers is not None:
        options["maxnreg"] = variant.registers
    return options


def fingerprint_of(job: Job) -> str:
    """What the row of a job depends on."""
    variant = every_variant(job[1])[job[0]]
    options = options_of(variant, job[1])
    return fingerprint(variant.kernel, variant.signature, variant.constants, ALIGNED, variant.fuses, options, job[1])


def measure(job: Job) -> dict[str, Any]:
    """Compile one variant for one target; the row of the record."""
    variant, where = every_variant(job[1])[job[0]], target(job[1])
    source = ASTSource(
        fn=variant.kernel,
        signature=variant.signature,
        constexprs=variant.constants,
        attrs={(position,): ALIGNED for position in range(len(variant.pointers))},
    )
    compiled, seconds = compiled_anew(source, where, options_of(variant, job[1]))
    found = usage(compiled, where)
    if variant.fuses:
        found["inexact"] = [text for text in found["inexact"] if text not in ("fma.rn.f32", "fma.rn.f32x2")]
    return {"variant": job[0], "target": job[1], **found, "seconds": round(seconds, 2), "source": fingerprint_of(job)}


def compiled_anew(source: ASTSource, where: GPUTarget, options: dict[str, Any]) -> tuple[Any, float]:
    """A kernel compiled with an empty cache, and the CPU seconds that it took, those of the assembler included."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        before = sum(os.times()[:4])
        return triton.compile(source, target=where, options=options), sum(os.times()[:4]) - before


def measured_in_processes(jobs: list[Job]) -> Iterator[dict[str, Any]]:
    """The rows of jobs as they are made, by a process for each core, because a compilation uses one."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    made: queue.SimpleQueue[str] = queue.SimpleQueue()
    command = [sys.executable, __file__, "--worker"]
    count = min(len(os.sched_getaffinity(0)), len(jobs))
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        for _ in range(count)
    ]
    for worker in workers:
        threading.Thread(target=_feed, args=(worker, waiting, made), daemon=True).start()
    try:
        for _ in jobs:
            line = made.get()
            if not line:
                raise SystemExit("a compiling process ended")
            yield json.loads(line)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _feed(worker: subprocess.Popen[str], waiting: queue.SimpleQueue[Job], made: queue.SimpleQueue[str]) -> None:
    """Hands one job after the other to a worker, and puts down its answers: "" when it has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        while True:
            worker.stdin.write(json.dumps(waiting.get_nowait()) + "\n")
            made.put(worker.stdout.readline())
    except queue.Empty:
        return
    except OSError:
        made.put("")


def work() -> None:
    """Measure each job that comes in, until there are no more."""
    for line in sys.stdin:
        variant, name = json.loads(line)
        print(json.dumps(measure((variant, name))), flush=True)


def by_size(jobs: list[Job], known: Rows) -> list[Job]:
    """The largest first, so that no core is left with one at the end."""
    return sorted(jobs, key=lambda job: -known.get(job, {"instructions": 0})["instructions"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--some", action="store_true", help="only the variants that differ most")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only variants with these names")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS, metavar="TARGET")
    parser.add_argument("--again", action="store_true", help="compile also what has not changed since it was recorded")
    parser.add_argument("--print", action="store_true", help="write no record, but print what was compiled as JSON")
    parser.add_argument("--list", action="store_true", help="name every variant, and compile none")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULT, help="the record (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return 0
    if arguments.list:
        print(*(f"{variant} on {name}" for variant, name in every_job()), sep="\n")
        return 0
    known = read_rows(arguments.output)
    jobs = chosen_jobs(arguments)
    changed = [job for job in jobs if arguments.again or known.get(job, {}).get("source") != fingerprint_of(job)]
    rows = measured_in_processes(by_size(changed, known))
    if arguments.print:
        json.dump(list(rows), sys.stdout)
        return 0
    fresh = record_rows(rows, arguments.output)
    print(f"{len(fresh)} compiled, {len(jobs) - len(fresh)} unchanged. Written: {arguments.output}")
    found = faults([row for job, row in read_rows(arguments.output).items() if job in jobs])
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return int(bool(found))


def record_rows(rows: Iterator[dict[str, Any]], path: Path) -> Rows:
    """Write rows into the record one by one; what was recorded before stays until it is compiled anew. Returns them."""
    from kernel_work import estimate_work
    from torch_sink.cli.machine import describe_machine

    sources = {job: fingerprint_of(job) for job in every_job()}
    head = {"command": "make kernels", "machine": describe_machine(), "work": estimate_work()} | read_counts(path)
    fresh: Rows = {}

    def write() -> None:
        # Read again: another run may have added to it meanwhile.
        found = {**read_rows(path), **fresh}
        kept = [found[job] for job in sources if job in found]
        as_recorded = sum(row.get("source") == sources[row["variant"], row["target"]] for row in kept)
        counts = {"variants": len(sources), "outdated": len(sources) - as_recorded}
        write_record({**head, **counts, "kernels": kept}, path)

    write()
    for row in rows:
        fresh[row["variant"], row["target"]] = row
        write()
        print(f"{len(fresh)}: {row['variant']} on {row['target']}", flush=True)
    return fresh


if __name__ == "__main__":
    sys.exit(main())
