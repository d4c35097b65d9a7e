"""CPU time that a fallback costs a data worker: the README's median filter, in its pipeline and left out of it.

    python examples/benchmarks/fallback_cost.py [--data DIR --name NAME]

Measured as in `worker_cost.py`, in batches of 32: stock torchvision, and a worker that records for a GPU. The filter is
Pillow's, which no kernel replaces: in its place the worker decodes the photograph, crops it and filters it, and goes on
recording behind it. All sides take turns, with equal seeds. Writes JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from PIL import ImageFilter
from torchvision import transforms as v1

from harness import describe, distinct, finish, make_parser, photographs, positive
from torch_sink.cli.pipelines import find_images
from torch_sink.cli.worker_cost import SIDES, fallbacks_of, in_turns, milliseconds, percentiles, spread
from worker_cost import check_equal
from worker_rows import MOST_FILES, SMALL, of_photographs

MEDIAN = v1.Lambda(lambda image: image.filter(ImageFilter.MedianFilter()))
WITHOUT, WITH = "without the filter", "with the filter"
ROWS = {
    name: of_photographs(v1.Compose([v1.RandomResizedCrop(224), *filters, v1.ToTensor()]))
    for name, filters in ((WITHOUT, []), (WITH, [MEDIAN]))
}


def as_text(report: Mapping[str, Any]) -> str:
    """What was measured, a line a pipeline."""
    return "\n".join(
        f"{name:20} stock {spread(row['stock_ms'], 3)} ms, recorded {spread(row['torch_sink_ms'], 3)} ms"
        for name, row in report["fallback_cost"].items()
    )


def main() -> None:
    parser = make_parser(__doc__, "fallback_cost", images=120)
    parser.add_argument("--rounds", type=positive, default=7, help="turns of each side (default: 7)")
    arguments = parser.parse_args()
    with photographs(arguments) as given, distinct(given, MOST_FILES) as folder:
        report = describe(arguments, "fallback_cost.py", given)
        files = find_images(folder)
        pipelines = {name: row.pipeline(name, files) for name, row in ROWS.items()}
        for name, pipeline in pipelines.items():
            check_equal(name, pipeline)
        fallbacks = {name: fallbacks_of(pipeline, SMALL) for name, pipeline in pipelines.items()}
        sides = {
            (name, side): partial(milliseconds, pipeline, SIDES[side], ROWS[name].images)
            for name, pipeline in pipelines.items()
            for side in ("stock", "torch_sink")
        }
        times = in_turns(sides, arguments.rounds)
        report["fallback_cost"] = {
            name: {
                "batch_size": SMALL,
                "fallbacks": fallbacks[name],
                **{f"{side}_ms": percentiles(times[name, side]) for side in ("stock", "torch_sink")},
            }
            for name in ROWS
        }
    finish(report, arguments.output, as_text(report))


if __name__ == "__main__":
    main()
