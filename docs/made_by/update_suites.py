"""Write docs/suites.md from what `make suites` recorded: python docs/made_by/update_suites.py"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from suites.sources import SUITES  # noqa: E402

PAGE = ROOT / "docs" / "suites.md"
RESULTS = ROOT / "examples" / "benchmarks" / "results" / "suites.json"

TITLE = """# Other projects' tests

`make suites` runs the test-suites of torchvision, Pillow, PyTorch (its test of the DataLoader) and torchdata twice,
stock and with torch_sink, and compares the outcome of every test. A test that hangs is ended, which is an outcome as
well. It fails for a difference that is not in `tests/suites/accepted.toml`, which gives a reason for each, for an entry
of that list that is no longer needed, and for a suite that was not there.

| mode | what is added to each test |
|---|---|
| backend | `set_image_backend("device", device="cpu")` |
| handles | also, the images and tensors that a suite makes for its tests are recorded ones |
| kernels | also, the values of every recorded image are made by the kernels, in Triton's interpreter |
| sink | the backend, and every `DataLoader` iterates through a `SinkLoader` |

A recorded image is an instance of `PIL.Image.Image`, but of a class of its own. Where tests ask `type(x) is
PIL.Image.Image`, they are told what it would be in stock code; the column "asked" counts these tests. And torchvision
reports each functional to `torch._C._log_api_usage_once` at every call, not at the first one alone, as many tests look
for their own call.
"""


def main() -> int:
    PAGE.write_text(page(read_results()))
    print(f"wrote {PAGE}")
    return 0


def read_results() -> dict[str, Any]:
    """Return what the last run of each part gave; nothing where there was none."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"missing": {}, "runs": []}


def page(results: dict[str, Any]) -> str:
    """Return the text of docs/suites.md."""
    rows = results["runs"]
    lines = [TITLE]
    lines += [
        "| suite | tests of | mode | tests that ran | pass in stock | recorded in | asked | differ, accepted "
        "| differ otherwise |"
    ]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|---:|"]
    modes = [*dict.fromkeys((row["suite"], row["mode"]) for row in rows)]
    lines += [table_row([row for row in rows if (row["suite"], row["mode"]) == one]) for one in modes]
    lines += [
        "",
        "Tests that a suite skips, most of them for want of a GPU, are not counted. Tests of another release than",
    ]
    lines += ["the installed one may fail in stock code; they count as equal if they fail here too."]
    lines += [f"\n**{name} did not run**: {why}" for name, why in results["missing"].items()]
    if left := not_run(rows):
        lines += ["", f"**Not recorded yet**: {'; '.join(left)}."]
    accepted: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        accepted.update({(row["suite"], row["mode"], reason): count for reason, count in row["accepted"].items()})
    right = [(suite, mode, str(count), reason) for (suite, mode, reason), count in accepted.items()]
    lines += listed("Differences that are right as they are", "suite | mode | tests | reason", right)
    for title, key in (("Other differences", "differs"), ("Differences in one run of two", "unsteady")):
        tests = [(f"`{one['test']}`", one["stock"], one["ours"], row) for row in rows for one in row[key]]
        others = [(row["suite"], row["mode"], test, stock, ours) for test, stock, ours, row in tests]
        lines += listed(title, "suite | mode | test | stock | with torch_sink", others)
    not_collected = {(row["suite"], file, why) for row in rows for file, why in row["not_collected"].items()}
    title = "Files that the installed releases cannot run, in stock code either"
    lines += listed(title, "suite | file | why", sorted(not_collected))
    lines += [""]
    for one in dict.fromkeys(machine(row["machine"]) for row in rows):
        when = dict.fromkeys(moment(row["machine"]) for row in rows if machine(row["machine"]) == one)
        lines += [f"{one}; {'; '.join(when)}."]
    lines += ["Written by `make suites`."]
    return "\n".join(lines) + "\n"


def not_run(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return for each suite and mode the files of which there is no outcome."""
    there = {(row["suite"], row["mode"], row["pattern"]) for row in rows}
    left = []
    for suite in SUITES:
        for mode, patterns in suite.files.items():
            files = [one for one in patterns if (suite.name, mode, one) not in there]
            named = "" if len(files) == len(patterns) else f", {', '.join(files)}"
            left += [f"{suite.name}, mode {mode}{named}"] if files else []
    return left


def table_row(rows: list[dict[str, Any]]) -> str:
    """Return the line of a suite in one mode."""
    outcomes, stock = Counter[str](), Counter[str]()
    for row in rows:
        outcomes.update(row["outcomes"])
        stock.update(row["stock"])
    ran = sum(count for outcome, count in outcomes.items() if outcome not in ("skipped", "not collected"))
    recorded, asked = (sum(row[key] for row in rows) for key in ("recorded", "asked_for_types"))
    accepted, others = sum(sum(row["accepted"].values()) for row in rows), sum(len(row["differs"]) for row in rows)
    first = rows[0]
    numbers = " | ".join(f"{one:,}" for one in (ran, stock["passed"], recorded, asked, accepted, others))
    return f"| {first['suite']}, on {first['package']} | {first['tests_of']} | {first['mode']} | {numbers} |"


def listed(title: str, head: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a section with a table; none where it would have no rows."""
    if not rows:
        return []
    line = "|".join("---:" if name.strip() == "tests" else "---" for name in head.split("|"))
    cells = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return ["", f"## {title}", "", f"| {head} |", f"|{line}|", *(f"| {row} |" for row in cells)]


def machine(described: dict[str, Any]) -> str:
    """Return the releases and the machine of a run in one line."""
    releases = ", ".join(f"{name} {version}" for name, version in described["releases"].items() if version)
    where = f"{described['system']}, {described['cpu']}"
    return f"Python {described['python']}, {releases}; {where}"


def moment(described: dict[str, Any]) -> str:
    """Return the commit and the day of a run."""
    return f"commit {described['commit']}, {described['date']}"


if __name__ == "__main__":
    sys.exit(main())
