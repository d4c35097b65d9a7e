"""The text of docs/inside/kernels.md: what the worst variants use, what stages do for a pixel, then every variant."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from kernel_gate import mean_bits
from report_tables import Report, table
from torch_sink.triton_kernels.shapes import LANE_SHAPES

_HEADS = ["target", "registers", "spilled bytes", "shared bytes", "instructions", "loads", "stores"]


def kernels_page(report: Report) -> str:
    """The text of docs/inside/kernels.md."""
    rows = sorted(report["kernels"], key=lambda row: (kernel_of(row), row["target"]))
    kernels = {name: list(found) for name, found in groupby(rows, kernel_of)}
    lines = ["# Kernels", "", "Written by `python examples/benchmarks/report.py`; `make kernels` measures again.", ""]
    lines += [
        "This page is for readers who tune kernels: how large the compiled kernels are, and what they execute.",
        "Nothing on it was measured on a GPU.",
        "",
        f"All variants of all kernels are compiled ahead of time for each target: {len(rows)} of {report['variants']}",
        f"compilations{outdated(report)}. The table shows the worst variant of each kernel: the most registers, bytes",
        "and instructions of the machine code, and the narrowest accesses to global memory, in bits for one thread.",
        "",
        table(["kernel", "variants", *_HEADS], list(worst_rows(kernels))),
        "",
        *compile_lines(report),
        "## Work",
        "",
        "What a stage does for one pixel of its output, estimated from the plan of a 500 x 375 photograph, with the",
        "random draws of one seed. Each byte of the input counts once; arithmetic is counted in the formulas.",
        "",
        table(["pipeline: stage", "taps", "bytes read", "bytes written", "arithmetic"], work_rows(report)),
        "",
        *executed_lines(report),
        "## Every variant",
        "",
        "Loads and stores are the bits of one thread's access, times the number of such instructions.",
        "",
    ]
    for name, found in kernels.items():
        variants = sorted(found, key=lambda row: row["variant"])
        lines += [f"<details><summary>{name}</summary>", ""]
        lines += [table(["variant", *_HEADS], [variant_row(row) for row in variants]), "", "</details>", ""]
    releases, commit = report["machine"]["releases"], report["machine"]["commit"]
    lines += [f"Triton {releases['triton']}, commit {commit}, {report['machine']['date']}: `{report['command']}`.", ""]
    return "\n".join(lines)


def compile_lines(report: Report) -> list[str]:
    """The section of what a first batch compiles."""
    stage = ["prologue", "stage, light, float32"]
    batches = {
        "resized crop + flip": stage,
        "+ ColorJitter": [*stage, "statistics"],
        "a heavy stage besides": ["stage, heavy, float32"],
        "JPEG decoder": _decoder_of_large_batches(report),
    }
    targets = sorted({row["target"] for row in report["kernels"]})
    seconds = {(row["variant"], row["target"]): row.get("seconds") for row in report["kernels"]}
    rows = []
    for name, variants in batches.items():
        found = [[seconds.get((variant, target)) for variant in variants] for target in targets]
        rows.append([name, str(len(variants)), *["-" if None in each else f"{sum(each):.1f}" for each in found]])
    return [
        "## Compilation",
        "",
        "CPU seconds that a first batch spends in compilers before its kernels are in Triton's cache. With several",
        "cores, kernels compile at the same time; `python -m torch_sink warm` does it ahead. Each dtype of a batch has",
        "two stage kernels, a light and a heavy one; the other kernels do not depend on the dtype.",
        "",
        table(["first batch", "kernels", *map(architecture, targets)], rows),
        "",
    ]


def _decoder_of_large_batches(report: Report) -> list[str]:
    """The JPEG kernels that a large batch launches: of those that come in several sizes, the largest."""
    names = {row["variant"] for row in report["kernels"] if row["variant"].startswith("jpeg")}
    bits = {name: int(name.split(", ")[1].split()[0]) for name in names if name.endswith(" bits")}
    return sorted(name for name in names if bits.get(name, 0) in (0, max(bits.values(), default=0)))


def executed_lines(report: Report) -> list[str]:
    """The section of what kernels execute."""
    counts = report["counts"]
    files, heads = counts["files"], ["instructions", "wavefronts", "sectors a load", "sectors a store"]
    made_by = "photographs" if files["given"] else "generated photographs"
    *kernels, _ = zip(*counts["decoder"], strict=True)
    return [
        "## What is executed",
        "",
        "The PTX for sm_90, run on the CPU: instructions of a thread and wavefronts of the load-store units for one",
        "pixel, sectors of 32 bytes for one load or store of a warp. **Counts are no times.** A kernel also waits for",
        "memory and for results that it depends on, and a decoder for its longest lane; so nothing here says how many",
        "microseconds a GPU takes, and no GPU has been measured.",
        "",
        f"For a pixel of the output, on {counts['images']} generated photographs of 500 x 375:",
        "",
        table(["pipeline", *heads], [executed_row(row) for row in counts["pipelines"]]),
        "",
        f"The JPEG decoder, for a pixel of an image, on {files['count']} {made_by} with a mean of",
        f"{files['mean_bytes'] / 1e3:.0f} kB. Only the crops that `RandomResizedCrop` reads are transformed, as in",
        f"training: {files['share_of_crops']:.0%} of the pixels. Bits of a lane: {lanes_of_batches(counts['lanes'])}.",
        "",
        table(
            ["kernel", *[f"instructions, lanes of {shape.bits}" for shape in LANE_SHAPES]],
            [[rows[0]["name"], *[f"{row['instructions_a_pixel']:.1f}" for row in rows]] for rows in kernels]
            + [["all", *[f"{rows[-1]['instructions_a_pixel']:.0f}" for rows in counts["decoder"]]]],
        ),
        "",
        f"Its accesses to memory, with lanes of {LANE_SHAPES[-1].bits} bits:",
        "",
        table(["kernel", *heads[1:]], [executed_row(row)[:1] + executed_row(row)[2:] for row in counts["decoder"][-1]]),
        "",
    ]


def lanes_of_batches(lanes: dict[str, int]) -> str:
    """ "1024 (32 or 64 files), ...": the bits of a lane, and the batches that have them."""
    batches: dict[int, list[str]] = {}
    for batch, number in lanes.items():
        batches.setdefault(LANE_SHAPES[number].bits, []).append(batch)
    return ", ".join(f"{bits} ({' or '.join(found)} files)" for bits, found in batches.items())


def executed_row(row: Report) -> list[str]:
    """What one pipeline, or one kernel of the decoder, executes."""
    sectors = [f"{row['sectors_a_request'].get(kind, 0):.1f}" for kind in ("ld.global", "st.global")]
    return [row["name"], f"{row['instructions_a_pixel']:.0f}", f"{row['wavefronts_a_pixel']:.2f}", *sectors]


def kernel_of(row: Report) -> str:
    """ "jpeg write, 4096 bits" -> "jpeg write"."""
    return row["variant"].partition(",")[0]


def outdated(report: Report) -> str:
    """What is to be said of variants that are not compiled, or have changed since."""
    return f"; {report['outdated']} are missing or of an earlier state" if report["outdated"] else ""


def worst_rows(kernels: dict[str, list[Report]]) -> Iterable[list[str]]:
    """One row for each kernel and target."""
    for name, rows in kernels.items():
        for target, found in groupby(rows, lambda row: row["target"]):
            variants = list(found)
            most = [str(max(row[key] for row in variants)) for key in ("registers", "spills", "shared")]
            longest = max(variants, key=lambda row: row["instructions"])
            narrowest = [f"{min(mean_bits(row[key]) for row in variants):.0f}" for key in ("loads", "stores")]
            yield [name, str(len(variants)), architecture(target), *most, str(longest["instructions"]), *narrowest]


def variant_row(row: Report) -> list[str]:
    """All figures of one variant on one target."""
    used = [str(row[key]) for key in ("registers", "spills", "shared")]
    accesses = [" ".join(f"{bits}x{count}" for bits, count in row[key].items()) for key in ("loads", "stores")]
    return [row["variant"], architecture(row["target"]), *used, str(row["instructions"]), *accesses]


def architecture(target: str) -> str:
    """ "cuda:90" -> "sm_90"."""
    backend, _, name = target.partition(":")
    return f"sm_{name}" if backend == "cuda" else name


def work_rows(report: Report) -> list[list[str]]:
    """One row for each stage of each pipeline."""
    return [
        [
            f"{name}: {stage['stage']}",
            str(stage["taps"]),
            *[f"{stage[key]:.1f}" for key in ("bytes_read", "bytes_written")],
            str(stage["arithmetic"]),
        ]
        for name, stages in report["work"].items()
        for stage in stages
    ]
