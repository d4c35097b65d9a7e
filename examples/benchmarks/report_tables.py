"""The sections of docs/performance.md: one table a result file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_sink.image.decode.jpeg_decoder import BESIDE_ROUNDS
from torch_sink.triton_kernels.shapes import LANE_SHAPES, LEAST_BYTES

Report = dict[str, Any]
HOST_PARTS = ("receive the batch", "copy the files", "decode", "add addresses", "launch", "the rest")
EXPLAIN_BATCH = 64  # the command's default
PEAKS = ("allocated", "reserved", "page_locked")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; the first column is text, the others are numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(report: Report) -> str:
    """What the figures were measured on, and with which command."""
    machine = report["machine"]
    releases = machine["releases"]
    hardware = machine["gpu"] or f"{machine['cpu']}, {machine['cpu_cores']} cores, no GPU"
    photographs = report.get("photographs")
    load = f", load average {machine['load_average']}" if "load_average" in machine else ""
    files = ""
    if photographs:
        kind = "photographs" if photographs.get("given", True) else "generated images"
        files = f", {photographs['count']} {kind} of {photographs['mean_bytes'] / 1000:.0f} kB"
        files += f" ({photographs['name']})" if photographs.get("name") else ""
    return (
        f"{hardware}{load}; torch {releases['torch']}, torchvision {releases['torchvision']}, "
        f"Triton {releases['triton']}, "
        f"Pillow {releases['pillow']}{files}; commit {machine['commit']}, {machine['date']}: `{report['command']}`."
    )


def insert_between(text: str, begin: str, end: str, written: str) -> str:
    """A page's text with new lines between its two markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page lacks the lines {begin.strip()!r} and {end!r} that surround what is written")
    return f"{before}{begin}{written}{end}{after}"


def slabs(report: Report) -> str:
    rows = [
        [name, *(f"{result[side]['p50']:.1f}" for side in ("worker", "training"))]
        for name, result in report["slabs"].items()
    ]
    return table(["files of a batch", "worker", "training process"], rows)


def epoch_border(report: Report) -> str:
    rows = [
        [name, *(f"{result[part]['p50']:.2f}" for part in ("first", "epoch"))]
        for name, result in report["epoch_border"].items()
    ]
    return table(["seconds waited", "for the first batch of an epoch", "for all of its batches"], rows)


def of_epoch_border(report: Report) -> str:
    """What beginning the next epoch early saves, in a sentence for the page of the data sink."""
    waited = {name: f"{result['epoch']['p50']:.2f} s" for name, result in report["epoch_border"].items()}
    options, both = report["options"], waited["SinkLoader, persistent_workers and prefetch_next_epoch"]
    return (
        f"With {options['workers']} workers on {report['machine']['cpu_cores']} cores and batches of "
        f"{options['batch_size']} photographs, a `SinkLoader` waited {waited['SinkLoader']} in each epoch, "
        f"{waited['SinkLoader, prefetch_next_epoch']} with `prefetch_next_epoch=True`, "
        f"{waited['SinkLoader, persistent_workers']} with `persistent_workers=True` alone and {both} with both "
        "([measured](performance.md#between-two-epochs)).\n"
    )


def host_cost(report: Report) -> str:
    results = [
        (f"{pipeline}, files in {block} memory", result)
        for pipeline, blocks in report["host_cost"].items()
        for block, result in blocks.items()
    ]
    parts, rows = [*HOST_PARTS, "in all"], []
    for name, result in results:
        costs = [f"{result['us_an_image'].get(part, {'p50': 0})['p50']:.2f}" for part in parts]
        copied = [f"{value:.0f}" for value in result["bytes_copied_an_image"].values()]
        rows.append([name, str(result["images"]), *costs, *copied, str(result["launches"])])
    heads = ["us an image", "images a batch", *parts, "bytes of files copied", "of tables", "launches"]
    return f"{table(heads, rows)}\n\n{launches_of_decoder(report)}"


def launches_of_decoder(report: Report) -> str:
    """How many of the launches decode JPEG files, and what they depend on."""
    counts = [(least, BESIDE_ROUNDS + shape.rounds) for least, shape in zip(LEAST_BYTES, LANE_SHAPES, strict=True)]
    encoded = report["options"]["batch"] * report["photographs"]["mean_bytes"]
    here = [count for least, count in counts if least < encoded][-1]
    steps = [f"{count} from {least / 1e6:.1f} MB on" for least, count in counts[1:]]
    return (
        f"Of the launches, {here} decode {encoded / 1e6:.0f} MB of JPEG files. A batch of fewer bytes is cut into "
        f"shorter pieces, which need more rounds to agree: {counts[0][1]} launches for a small batch, "
        f"{', '.join(steps)}. The others do not depend on the batch size. `explain` counts both kinds, for a batch of "
        f"{EXPLAIN_BATCH} unless told otherwise."
    )


def loader(report: Report) -> str:
    rows = [
        [
            name,
            f"{result['images_per_second']['p50']:.0f}",
            beside_1(result["ratio"]),
            f"{result['wait_p50_ms']:.2f}",
            f"{result['wait_p99_ms']:.2f}",
            f"{result['cpu_ms_per_image']['p50']:.2f}",
            f"{result['resident_mib']['p50']:.0f}",
        ]
        for name, result in report["loaders"].items()
    ]
    heads = ["loader", "images/s", "images/s, divided by DataLoader's", "p50 wait, ms", "p99 wait, ms"]
    return table([*heads, "CPU ms an image", "resident, MiB"], rows)


def beside_1(ratio: dict[str, float]) -> str:
    """A ratio and the middle of its rounds; what lies on both sides of 1 is no difference."""
    if ratio["p20"] == ratio["p80"]:
        return "1"
    shown = f"{ratio['p50']:.2f} ({ratio['p20']:.2f} to {ratio['p80']:.2f})"
    return f"{shown}, no difference" if ratio["p20"] <= 1 <= ratio["p80"] else shown


def loop(report: Report) -> str:
    parts = []
    for model, measured in report["models"].items():
        on_gpu = any("gpu_idle_share" in result for result in measured["loops"].values())
        rows = [[name, *(_on_gpu(result) if on_gpu else _on_cpu(result))] for name, result in measured["loops"].items()]
        beside = "time of a step, divided by the plain loop's"
        heads = ["steps/s", "host us a step", "us over plain", beside, "syncs a step", "GPU idle"]
        heads = heads if on_gpu else [beside, "syncs a step"]
        parts.append(table([f"{model}, {measured['rounds']} rounds", *heads], rows))
    return "\n\n".join(parts)


def _on_gpu(result: Report) -> list[str]:
    idle = f"{result['gpu_idle_share']:.1%}" if result.get("gpu_idle_share") is not None else "-"
    medians = [result[key]["p50"] for key in ("steps_per_second", "host_microseconds", "extra_microseconds")]
    return [f"{medians[0]:.1f}", f"{medians[1]:.0f}", f"{medians[2]:+.0f}", *_on_cpu(result), idle]


def _on_cpu(result: Report) -> list[str]:
    ratio = {key: 1 + share for key, share in result["extra_share"].items()}
    return [beside_1(ratio), f"{result['syncs_per_step']:.2f}"]


def transforms(report: Report) -> str:
    parts = []
    for pipeline, contenders in report["pipelines"].items():
        batches = list(next(iter(contenders.values()))["images_per_second"])
        rows = []
        for name, result in contenders.items():
            # What does not depend on the batch was measured at the smallest.
            measured = [result["images_per_second"].get(batch) for batch in batches]
            speeds = [f"{speed['p50']:.0f}" if speed else "-" for speed in measured]
            share = list(result.get("bandwidth_share", {}).values())
            rows.append([name, *speeds, str(result["launches"] or "-"), f"{share[-1]['p50']:.1%}" if share else "-"])
        heads = [pipeline, *[f"images/s at {batch}" for batch in batches], "launches", "share of a copy's bandwidth"]
        parts.append(table(heads, rows))
    bandwidth = f"A copy on the device reads and writes {report['copy_bytes_per_second']['p50'] / 1e9:.0f} GB/s."
    return "\n\n".join([*parts, bandwidth])


def jpeg(report: Report) -> str:
    rows = []
    for batch, result in report["batches"].items():
        device, host = result["device"], result["host_us_an_image"]
        keys = "images_per_second_kernels", "images_per_second"
        speeds = [f"{device[key]['p50']:.0f}" if key in device else "-" for key in keys]
        stages = ", ".join(f"{stage} {value['p50']:.0f}" for stage, value in device["stages"].items())
        costs = [f"{host[key]['p50']:.1f}" for key in ("header", "layout", "tables")]
        rows.append([batch, *speeds, *costs, stages, str(device["decoded_again"])])
    costs = [f"{part}, us an image" for part in ("header", "layout", "tables")]
    heads = ["batch", "images/s in kernels", "images/s in all", *costs]
    return table([*heads, "stages, us a batch", "decoded again by Pillow"], rows)


def decode(report: Report) -> str:
    batches = list(next(iter(report["decoders"].values()))["images_per_second"])
    rows = []
    for name, result in report["decoders"].items():
        speeds = [f"{result['images_per_second'][batch]['p50']:.0f}" for batch in batches]
        rows.append([name, *speeds, f"{result['difference']['mean_abs']:.4f}", str(result["difference"]["largest"])])
    heads = ["decoder", *[f"images/s at {batch}" for batch in batches], "mean difference to Pillow", "largest"]
    return table(heads, rows)


def train(report: Report) -> str:
    parts = []
    for model, measured in report["models"].items():
        contenders = measured["contenders"]
        ceiling = next((one["images_per_second"]["p50"] for one in contenders.get("synthetic", {}).values()), None)
        rows, peaks = [], []
        for name, counts in contenders.items():
            for workers, result in counts.items():
                idle = f"{result['gpu_idle_share']['p50']:.0%}" if "gpu_idle_share" in result else "-"
                speed, cpu = (result[key]["p50"] for key in ("images_per_second", "cpu_seconds_per_1000_images"))
                figures = [f"{speed:.0f}", f"{speed / ceiling:.1%}" if ceiling else "-", f"{cpu:.2f}", idle]
                rows.append([name, "-" if name == "synthetic" else workers, *figures])
                if "peak_bytes" in result:
                    held = [f"{result['peak_bytes'][key] / 2**30:.2f}" for key in PEAKS]
                    peaks.append([name, workers, *held])
        heads = ["workers", "images/s", "of synthetic data", "CPU s per 1,000 images", "GPU idle"]
        parts.append(table([model, *heads], rows))
        if peaks:
            heads = ["workers", *(f"{name.replace('_', '-')}, GiB" for name in PEAKS)]
            parts.append(table([f"{model}, peak of memory", *heads], peaks))
    return "\n\n".join(parts)


def scale(report: Report) -> str:
    parts = []
    for name in ("batch", "photograph", "steps_per_sync"):
        values = report[name]["values"]
        rows = [[size, f"{value['p50']:.3f}"] for size, value in values.items()]
        parts.append(table([name.replace("_", " "), report[name]["unit"]], rows))
    rows = [
        [size, f"{value['first_batch_ms']['p50']:.2f}", f"{value['batch_us']['p50']:.0f}"]
        for size, value in report["dataset"]["values"].items()
    ]
    parts.append(table(["samples in the dataset", "first batch, ms", "each later batch, us"], rows))
    return "\n\n".join(parts)


HOW_TRAINING_IS_MEASURED = """\
End to end: from JPEG files to the optimizer's step. All contenders get the same samples in the same order and begin \
with the same weights. All train in bfloat16 autocast and channels_last, with fused SGD, page-locked batches and \
`cudnn.benchmark`. A contender is measured only if its first batch, and its model's loss on stock's first batch, \
differ from stock's by no more than bfloat16 explains; the model is called outside of any loop.

* "stock" is the loop of a tutorial: a `DataLoader` over stock torchvision, and the loss is read at every step.
* "prefetcher + compile" is what an expert writes: data workers stop at bytes, a prefetcher sends the next batch on a \
side stream and normalizes it there, the model is compiled, and the loss is read every 50 steps.
* "torch_sink" is the image backend, a `SinkLoader` and a `StepLoop`.
* "synthetic" is the same `StepLoop` over one batch that stays on the device: nothing that reads files can be faster.

Each trains on one pass that never ends, so its workers are never cold. The steps in which it compiles or captures do \
not count. While it compiles, its workers make up to two batches each, and three more may wait in a queue. These are \
thrown away before the first round, because they would make a slow loader look fast. A round takes four times as many \
steps, and ends when the GPU has finished. A figure is the median of the rounds.

Peaks of memory are those of training with the first number of workers, beyond what the process held before it made \
the model. "Allocated" are the bytes of tensors, "reserved" is what PyTorch's allocator took from the device for them, \
and "page-locked" is memory of the host."""

HOW_LOOPS_ARE_MEASURED = """\
What a loop costs besides the model: batches lie on the device already. All loops get the same batches without an end, \
the same weights and SGD, which is fused for all of them on a GPU; `cudnn.benchmark` is on. Each compiles and captures \
before the first round. Then the loops take turns, in the opposite order in every second round, so that a busy machine \
slows all of them. A figure is the median of the rounds. Ratios are those within a round, with the 20th and the 80th \
percentile, and "no difference" where 1 lies between these; a loop that compiles or captures is compared with \
`torch.compile`. On a CPU a `StepLoop` gains nothing. On a GPU, host time is what the \
training thread spends on the CPU; "reduce-overhead" is PyTorch's own way to CUDA graphs."""

# Result file -> the figures in it that only a GPU gives.
GPU_FIGURES = {
    "loader": "images/s, waits and host cost of the three loaders where batches are copied to a GPU",
    "loop": "graph mode; steps/s, host us a step, syncs a step and GPU idle share of every loop",
    "transforms": "images/s at batch 64 to 1,024 of torch_sink, torchvision v2 on CUDA tensors, Kornia and one CPU "
    "thread on four ImageNet pipelines; launches a batch; share of the bandwidth of a copy",
    "decode": "images/s at batch 64 to 1,024 of every decoder, and the difference of its pixels to Pillow's",
    "jpeg": "us a batch of each stage of the JPEG kernels, images/s in kernels and in all",
    "train": "images/s, GPU idle share and CPU seconds per 1,000 images of ResNet-50, ShuffleNetV2 and MobileNetV3 "
    "from JPEG files with 1 to 16 workers: stock, prefetcher and compiled loop, torch_sink; the ceiling with "
    "synthetic data; the peak of allocated, reserved and page-locked memory",
    "scale": "ms an image by batch and by size of the photographs, us a step by steps per sync, us a batch by dataset",
}
# Result file -> title, what it says, whether only a GPU's figures count, and the section's table.
SECTIONS: dict[str, tuple[str, str, bool, Callable[[Report], str]]] = {
    "slabs": (
        "From a worker to the training process",
        "What it costs to hand over encoded files: CPU microseconds for an image, until it is ready for the copy to a "
        "device. A `SinkLoader` uses slabs: memory that both processes share and that is page-locked once.",
        False,
        slabs,
    ),
    "host_cost": (
        "The training process",
        "What an image costs the main thread that trains: CPU microseconds from receiving the batch to the last "
        "launch, on a device that launches nothing. With a `SinkLoader`, files arrive in pinned memory; with other "
        "loaders they are copied once. Each of DINO's ten views of a file counts as an image.",
        False,
        host_cost,
    ),
    "loader": (
        "Loaders",
        "Stock torchvision code behind three loaders that take turns. Without a GPU all three do the same work, and a "
        "`SinkLoader` must not cost anything. Ratios are those within a round: the median, the 20th and the 80th "
        'percentile, and "no difference" where 1 lies between these.',
        False,
        loader,
    ),
    "epoch_border": (
        "Between two epochs",
        "How long a training waits where one epoch ends and the next begins, with steps that are slower than the "
        "workers: median seconds for the first batch of an epoch, and for all batches of it, its end included.",
        False,
        epoch_border,
    ),
    "loop": (
        "Training loops",
        HOW_LOOPS_ARE_MEASURED,
        False,
        loop,
    ),
    "transforms": ("Transforms", "From decoded uint8 images to the batch, on the device.", True, transforms),
    "decode": ("Decoders", "The same files from memory, in turns.", True, decode),
    "jpeg": ("JPEG kernels", "Baseline JPEG files, every stage on the device.", True, jpeg),
    "train": ("Training from JPEG files", HOW_TRAINING_IS_MEASURED, True, train),
    "scale": ("Scale", "How cost grows when one size grows alone.", True, scale),
}
