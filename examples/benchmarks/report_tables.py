"""The sections of docs/performance.md: one table a result file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Report = dict[str, Any]
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
    files = ""
    if photographs:
        kind = "photographs" if photographs.get("given", True) else "generated images"
        files = f", {photographs['count']} {kind} of {photographs['mean_bytes'] / 1000:.0f} kB"
    return (
        f"{hardware}; torch {releases['torch']}, torchvision {releases['torchvision']}, Triton {releases['triton']}, "
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


def worker_cost(report: Report) -> str:
    rows = []
    for name, result in report["worker_cost"].items():
        mark = " (partly in stock code)" if result["fallbacks"] else ""
        times = [f"{result[key]['p50']:.2f}" for key in ("stock_ms", "torch_sink_ms")]
        on_cpu = [f"{result['on_cpu_ms']['p50']:.2f}", f"{result['on_cpu_ratio']:.2f}"]
        rows.append([name + mark, *times, f"{result['ratio']:.1f}", *on_cpu])
    heads = ["pipeline", "stock", "torch_sink, device elsewhere", "ratio", "torch_sink, no device", "ratio"]
    return table(heads, rows)


def slabs(report: Report) -> str:
    rows = [
        [name, *(f"{result[side]['p50']:.1f}" for side in ("worker", "training"))]
        for name, result in report["slabs"].items()
    ]
    return table(["files of a batch", "worker", "training process"], rows)


def host_cost(report: Report) -> str:
    results = [
        (f"{pipeline}, files in {block} memory", result)
        for pipeline, blocks in report["host_cost"].items()
        for block, result in blocks.items()
    ]
    parts = ["receive the batch", "copy the files", "decode", "add addresses", "launch", "the rest", "in all"]
    rows = []
    for name, result in results:
        costs = [f"{result['us_an_image'].get(part, {'p50': 0})['p50']:.2f}" for part in parts]
        copied = [f"{value:.0f}" for value in result["bytes_copied_an_image"].values()]
        rows.append([name, *costs, *copied, str(result["launches"])])
    return table(["us an image", *parts, "bytes of files copied", "of tables", "launches a batch"], rows)


def loader(report: Report) -> str:
    rows = [
        [
            name,
            f"{result['images_per_second']['p50']:.0f}",
            f"{result['ratio']['p50']:.3f}",
            f"{result['wait_p50_ms']:.2f}",
            f"{result['wait_p99_ms']:.2f}",
            f"{result['cpu_ms_per_image']['p50']:.2f}",
            f"{result['resident_mib']['p50']:.0f}",
        ]
        for name, result in report["loaders"].items()
    ]
    heads = ["loader", "images/s", "ratio in one round, median", "p50 wait, ms", "p99 wait, ms"]
    return table([*heads, "CPU ms an image", "resident, MiB"], rows)


def loop(report: Report) -> str:
    parts = []
    for model, measured in report["models"].items():
        rows = []
        for name, result in measured["loops"].items():
            idle = f"{result['gpu_idle_share']:.1%}" if "gpu_idle_share" in result else "-"
            medians = [result[key]["p50"] for key in ("steps_per_second", "host_microseconds", "extra_microseconds")]
            figures = [f"{medians[0]:.1f}", f"{medians[1]:.0f}", f"{medians[2]:+.0f}"]
            share = f"{result['extra_share']['p50']:+.1%}"
            rows.append([name, *figures, share, f"{result['syncs_per_step']:.2f}", idle])
        heads = ["steps/s", "host us a step", "us over plain", "share", "syncs a step", "GPU idle"]
        parts.append(table([f"{model}, {measured['rounds']} rounds", *heads], rows))
    return "\n\n".join(parts)


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
`cudnn.benchmark`. None is measured unless its first batch, and its model's loss on stock's first batch (of a \
StepLoop's model outside of the loop), agree with stock's.

* "stock" is the loop of a tutorial: a `DataLoader` over stock torchvision, and the loss is read at every step.
* "prefetcher + compile" is what an expert writes: data workers stop at bytes, a prefetcher sends the next batch on a \
side stream and normalizes it there, the model is compiled, and the loss is read every 50 steps.
* "torch_sink" is the image backend, a `SinkLoader` and a `StepLoop`.
* "synthetic" is the same `StepLoop` over one batch that stays on the device: nothing that reads files can be faster.

Each trains on one pass that never ends, so its workers are never cold. The steps in which it compiles or captures do \
not count. Meanwhile its workers may have made two batches each, and three may wait in a queue: so many are thrown \
away before the first round, or a slow loader would look fast. A round takes four times as many steps. A figure is the \
median of the rounds; a round ends when the GPU has finished.

Peaks of memory are those of training with the first number of workers, beyond what the process held before it made \
the model. "Allocated" are the bytes of tensors, "reserved" is what PyTorch's allocator took from the device for them, \
and "page-locked" is memory of the host."""

HOW_LOOPS_ARE_MEASURED = """\
What a loop costs besides the model: batches lie on the device already. All loops get the same batches without an end, \
the same weights and SGD, which is fused for all of them on a GPU; `cudnn.benchmark` is on. Each compiles and captures \
before the first round. Then the loops take turns, in the opposite order in every second round, so that a busy machine \
slows all of them. A figure is the median of the rounds. Host time is what the training thread spends on the CPU. \
"Over plain" is the difference within a round: to the plain loop where a `StepLoop` runs eager code, to \
`torch.compile` where it compiles or captures. "reduce-overhead" is PyTorch's own way to CUDA graphs."""

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
    "worker_cost": (
        "Data workers",
        "What an image costs a data worker: CPU milliseconds for dataset and collate, on one thread, with files in the "
        'page cache. "Device elsewhere" is a worker on a machine with a GPU, which makes the pixels. With "no device" '
        "the worker makes them itself, in stock code.",
        False,
        worker_cost,
    ),
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
        "loaders they are copied once.",
        False,
        host_cost,
    ),
    "loader": (
        "Loaders",
        "Stock torchvision code behind three loaders that take turns. Without a GPU all three do the same work, and a "
        "`SinkLoader` must not cost anything.",
        False,
        loader,
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
