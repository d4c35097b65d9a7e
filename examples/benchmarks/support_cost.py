"""CPU time that each row of docs/support.md costs a data worker, in torch_sink and in stock torchvision.

    python examples/benchmarks/support_cost.py [--rows TEXT ...] [--rounds N] [--add]

Each row of that table, with each choice of arguments that the table tries, is a short pipeline: a `Compose` of the
call, and of the conversions around it that it needs. It runs on each kind of image that torchvision takes there, of
32 x 32 pixels from memory and of 500 x 375 from JPEG files. Measured is the CPU time of one process that makes samples
and collates them: with stock torchvision, recording for a device elsewhere (device="meta"), and without a device
(device="cpu"), in turns and with equal seeds, hence with the same draws. Batches made without a device have to be
stock's, bit for bit. Where results differ in size, a crop of one size follows, or no batch could be made of them.

`--rows` measures those whose name contains one of the texts; with `--add`, the others stay as the JSON file has them.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

# Behind all others: the tests have folders that are called like a benchmark.
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from image.trials.support import INPUT_KINDS, Trial, arranged, entries

import torch_sink
from harness import describe, finish, make_parser, positive, save
from torch_sink.cli.photos import make_photo, write_photos
from torch_sink.cli.pipelines import seed_everything
from torch_sink.cli.worker_cost import SIDES, in_turns, one_thread, percentiles

SIZES = {"32 x 32": 64, "500 x 375": 8}  # width and height -> images of a round, which are one batch
MODULES: dict[str, Any] = {"v1": v1, "v2": v2}
WAYS = {"recorded": "torch_sink", "without a device": "on_cpu"}  # and their sides
AT_MOST = 1.15  # what a worker may spend, divided by what stock code spends
CROP = 16
Open = Callable[[], Image.Image]


class Case(NamedTuple):
    """A pipeline: `run` makes a sample of a Pillow image, `collate` a batch of samples."""

    run: Callable[[Any], Any]
    collate: Callable[[Any], Any]

    def batch(self, openers: Sequence[Open], seed: int) -> Any:
        seed_everything(seed)
        return self.collate([self.run(opened()) for opened in openers])


class Mixed:
    """A collate function that mixes the images of a batch, which have labels."""

    def __init__(self, mix: Callable[..., Any]) -> None:
        self.mix = mix

    def __call__(self, samples: Sequence[Any]) -> Any:
        return self.mix(*default_collate([(sample, at % 4) for at, sample in enumerate(samples)]))


def cases(openers: Sequence[Open], size: tuple[int, int], texts: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """(name, pipeline) of what stock torchvision can run on images of a size (height, width), as `--rows` says."""
    for row, trials in entries(size).items():
        for trial, (number, kind) in itertools.product(trials, enumerate(INPUT_KINDS)):
            name = f"{row}{trial[0].label and f' ({trial[0].label})'}, {kind}"
            chosen = ways(row, trial, number) if any(text in name for text in texts) else iter(())
            case = next(filter(functools.partial(works, openers[:8]), chosen), None)
            if case is not None:
                yield name, case


def ways(row: str, trial: Trial, number: int) -> Iterator[Case]:
    """A call among conversions, from the likeliest on."""
    module, (example, calls) = MODULES[row[:2]], trial
    call = calls[number]
    to_tensor = module.ToTensor() if module is v1 else module.ToImage()
    before = [[], [v1.PILToTensor() if module is v1 else to_tensor], [to_tensor]][number]
    before += [module.ToDtype(torch.float32, scale=True)] if number == 2 and module is v2 else []
    if example.form == "batch":
        yield Case(module.Compose([*before, _same]), Mixed(call))
        return
    call = functools.partial(_used, call) if ".functional." in row else call
    for after in ([to_tensor], [], [to_tensor, module.CenterCrop(CROP)], [module.CenterCrop(CROP)]):
        compose = module.Compose([*before, call, *after])
        yield Case(functools.partial(_sample, compose, example.form), default_collate)


def _same(image: Any) -> Any:
    return image


def _used(function: Callable[..., Any], image: Any) -> Any:
    """What a functional makes of an image; the image, where it only answers a question."""
    made = function(image)
    parts = made if isinstance(made, (list, tuple)) else [made]
    return image if all(isinstance(part, (bool, int)) for part in parts) else made


def _sample(compose: Callable[..., Any], form: str, image: Any) -> Any:
    made = compose(*arranged(image, form))
    made = made["image"] if isinstance(made, dict) else made
    return torch.stack(list(map(_tensor, made))) if isinstance(made, (list, tuple)) else made


def _tensor(image: Any) -> torch.Tensor:
    return v1.functional.to_tensor(image) if isinstance(image, Image.Image) else image


def works(openers: Sequence[Open], case: Case) -> bool:
    """Whether stock torchvision makes batches."""
    try:
        for seed in range(1, 4):
            case.batch(openers, seed)
    except Exception:
        return False
    return True


def measure(name: str, case: Case, openers: Sequence[Open], rounds: int) -> dict[str, Any]:
    """Microseconds that a sample costs in stock code, and the costs of the other sides, divided by that."""
    expected, made = (_values(case, openers, side) for side in ("stock", "on_cpu"))
    if len(expected) != len(made) or not all(map(torch.equal, expected, made)):
        sys.exit(f"{name}: the batch differs from stock torchvision's")
    sides = [side for side in SIDES if side != "torch_sink" or can_record(case, openers)]
    times = in_turns({side: functools.partial(seconds, case, openers, side) for side in sides}, rounds)
    found: dict[str, Any] = {"stock_us": round(1e6 * percentiles(times["stock"])["p50"] / len(openers), 1)}
    for side, values in times.items():
        if side != "stock":
            ratios = percentiles([value / stock for value, stock in zip(values, times["stock"], strict=True)])
            found[side] = {key: round(ratios[key], 3) for key in ("least", "p50", "most")}
    return found


def can_record(case: Case, openers: Sequence[Open]) -> bool:
    """False where stock code reads what only the device, which is elsewhere, can make."""
    try:
        seconds(case, openers, "torch_sink", seed=0)
    except torch_sink.SinkError:
        return False
    return True


def _values(case: Case, openers: Sequence[Open], side: str) -> list[torch.Tensor]:
    with torch_sink.image_backend(SIDES[side].backend, device=SIDES[side].device):
        return [leaf.clone() for leaf in tree_leaves(case.batch(openers, 0)) if isinstance(leaf, torch.Tensor)]


def seconds(case: Case, openers: Sequence[Open], side: str, seed: int) -> float:
    """CPU seconds of a batch, after one that does not count."""
    with torch_sink.image_backend(SIDES[side].backend, device=SIDES[side].device):
        case.batch(openers[: len(openers) // 4], seed)
        begun = time.process_time()
        case.batch(openers, seed)
        return time.process_time() - begun


def openers_of(size: str, folder: Path) -> list[Open]:
    """What opens the images of a size, each another one."""
    width, height = map(int, size.split(" x "))
    if SIZES[size] < 32:
        return [functools.partial(default_loader, str(path)) for path in write_photos(folder, SIZES[size])]
    arrays = [np.asarray(make_photo(width, height, seed)) for seed in range(SIZES[size])]
    return [functools.partial(Image.fromarray, array) for array in arrays]


def worst(results: dict[str, Any], side: str, count: int = 10) -> list[tuple[str, Any]]:
    """The pipelines that cost most, compared with stock code."""
    measured = [item for item in results.items() if side in item[1]]
    return sorted(measured, key=lambda item: -item[1][side]["p50"])[:count]


def as_text(report: dict[str, Any]) -> str:
    lines = ["CPU time divided by stock's: median (least to most)"]
    for (way, side), (size, results) in itertools.product(WAYS.items(), report["support_cost"].items()):
        lines.append(f"{way}, {size}:")
        for name, result in worst(results, side):
            lines.append("  {p50:.2f} ({least:.2f} to {most:.2f}) ".format_map(result[side]) + name)
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__, "support_cost")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of the three (default: 5)")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="TEXT", help="those that contain one of these")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="of the images (default: both)")
    parser.add_argument("--add", action="store_true", help="keep the other rows of the JSON file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    report = describe(arguments, "support_cost.py")
    before = json.loads(arguments.output.read_text())["support_cost"] if arguments.add else {}
    report["support_cost"] = {size: before.get(size, {}) for size in SIZES}
    with tempfile.TemporaryDirectory(prefix="torch_sink_support_") as scratch, one_thread():
        for size in arguments.sizes:
            openers, (width, height) = openers_of(size, Path(scratch)), map(int, size.split(" x "))
            for name, case in cases(openers, (height, width), arguments.rows):
                report["support_cost"][size][name] = measure(name, case, openers, arguments.rounds)
                save(report, arguments.output)
    finish(report, arguments.output, as_text(report))


if __name__ == "__main__":
    main()
