"""Runs other projects' test-suites stock and with torch_sink, and compares them test by test.

python tests/suites/run.py [--folder DIR] [--only SUITE[:MODE[:FILES]] ...] [--jobs N] [--seconds N]

Writes docs/suites.md: rows of what was not run this time stay. Exits with 1 where a test differs and the list of accepted
differences does not say why, where an entry of that list is stale, and where a suite was not there; leave one out by
naming the others with `--only`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "docs" / "made_by")]

import update_suites as page  # noqa: E402
from suites import compare, sources  # noqa: E402
from suites.compare import Difference  # noqa: E402
from suites.runs import Outcome, Run, run  # noqa: E402
from suites.sources import SUITES, Suite  # noqa: E402
from torch_sink.cli.machine import describe_machine  # noqa: E402

Outcomes = dict[str, Outcome]


class Part(NamedTuple):
    """What one process runs: the test files of a suite that fit one pattern, in one mode, "stock" among them."""

    suite: str
    mode: str
    pattern: str


class Result(NamedTuple):
    """A part beside the same files in stock code: what differs, and the reason for what is accepted."""

    differences: list[Difference]
    reasons: dict[Difference, str]
    unsteady: list[Difference]  # those of one run of two: some tests depend on the time that things take

    @property
    def others(self) -> list[Difference]:
        return [one for one in self.differences if one not in self.reasons and one not in self.unsteady]


def main() -> int:
    arguments = parse()
    wanted = parts_wanted(arguments.only)
    found, missing = find_all({part.suite for part in wanted}, arguments.folder, arguments.scratch)
    packages = sources.install_requirements(arguments.scratch / "packages")
    accepted = compare.read_accepted()
    recording = threading.Lock()

    def run_one(part: Part, purpose: str = "") -> Outcomes:
        files = part.pattern.replace("/", "-").replace("*", "all")
        scratch = arguments.scratch / "runs" / part.suite / (purpose + part.mode) / files
        folder, begun = found[part.suite][0], time.monotonic()
        outcomes = run(Run(folder, files_of(part, folder), part.mode, scratch, packages, arguments.seconds))
        took = f"{time.monotonic() - begun:.0f} s"
        print(f"{part.suite} {part.mode} {part.pattern}: {counted(outcomes)}; {took}", flush=True)
        return outcomes

    def compare_one(part: Part) -> Result:
        ours = run_one(part)
        differences = compare.differences(part.suite, part.mode, stock[in_stock(part)], ours)
        reasons, again = compare.reasons(differences, accepted), {}
        if len(reasons) < len(differences):
            second = run_one(in_stock(part), f"{part.mode}-"), run_one(part, "second-")
            again = {one.test: one for one in compare.differences(part.suite, part.mode, *second)}
        unsteady = [one for one in differences if one not in reasons and one.test not in again]
        result = Result(differences, reasons, unsteady)
        with recording:
            record(part, stock[in_stock(part)], ours, result, found[part.suite][1], missing)
        return result

    parts = [part for part in wanted if part.suite in found and files_of(part, found[part.suite][0])]
    # The largest first: begun last, one would be all that runs.
    parts.sort(key=lambda part: -size_of(part, found[part.suite][0]))
    of_stock = [*dict.fromkeys(in_stock(part) for part in parts)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        stock = dict(zip(of_stock, pool.map(run_one, of_stock), strict=True))
        results = [*pool.map(compare_one, parts)]
    whole = {(suite.name, mode) for suite in SUITES for mode in suite.files if {*all_parts(suite, mode)} <= {*wanted}}
    stale = compare.stale([one for result in results for one in result.differences], accepted, whole - {*missing})
    page.main()
    others = say(results, stale, missing)
    return int(bool(others or stale or missing))


def say(results: list[Result], stale: list[tuple[str, str, str]], missing: dict[str, str]) -> int:
    """Prints what was found; returns how many tests differ and are not accepted."""
    for name, why in missing.items():
        print(f"{name}: NOT RUN: {why}")
    others = [one for result in results for one in result.others]
    for one in others:
        print(f"{one.suite} {one.mode} {one.test}: {one.stock} in stock code, {one.ours} here: {one.said}")
    for one in (one for result in results for one in result.unsteady):
        print(f"{one.suite} {one.mode} {one.test}: differed once, not in a second run: {one.said}")
    for suite, mode, pattern in stale:
        print(f"{suite} {mode}: {pattern} no longer differs: take it out of {compare.ACCEPTED.name}")
    known = sum(len(result.reasons) for result in results)
    print(f"{known} accepted differences, {len(others)} others, {len(stale)} stale entries, {len(missing)} not run")
    return len(others)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="checkouts, archives or files of the suites; else their releases")
    parser.add_argument("--only", nargs="+", metavar="SUITE[:MODE[:FILES]]", help="some of all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=600, help="for a test (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, default=ROOT / "local" / "suites", help="for copies, outcomes and logs")
    return parser.parse_args()


def all_parts(suite: Suite, mode: str) -> list[Part]:
    return [Part(suite.name, mode, pattern) for pattern in suite.files[mode]]


def parts_wanted(only: list[str] | None) -> list[Part]:
    """The parts to run, those of stock code apart.

    Raises:
        SystemExit: a name fits none of them.
    """
    every = [part for suite in SUITES for mode in suite.files for part in all_parts(suite, mode)]
    wanted: list[Part] = []
    for name in only or [""]:
        fits = [part for part in every if not name or [*part][: name.count(":") + 1] == name.split(":")]
        if not fits:
            known = "\n".join(":".join(part) for part in every)
            raise SystemExit(f"--only {name} is none of these, nor the beginning of one up to a colon:\n{known}")
        wanted += fits
    return [*dict.fromkeys(wanted)]


def find_all(
    wanted: Container[str], folder: Path | None, scratch: Path
) -> tuple[dict[str, tuple[Path, str]], dict[str, str]]:
    """The folder and the source of each suite, and why others are not there."""
    found, missing = {}, {}
    for suite in SUITES:
        if suite.name in wanted:
            try:
                found[suite.name] = sources.find(suite, folder, scratch)
            except LookupError as error:
                missing[suite.name] = str(error)
    return found, missing


def in_stock(part: Part) -> Part:
    return part._replace(mode="stock")


def files_of(part: Part, folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.glob(part.pattern))


def size_of(part: Part, folder: Path) -> int:
    return sum((folder / file).stat().st_size for file in files_of(part, folder))


def counted(outcomes: Outcomes) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts(outcomes).items())


def counts(outcomes: Outcomes) -> dict[str, int]:
    return dict(Counter(one.outcome for one in outcomes.values()).most_common())


def record(part: Part, stock: Outcomes, ours: Outcomes, result: Result, source: str, missing: dict[str, str]) -> None:
    """Writes the results of a part into the file with those of all; the others stay."""
    suite = next(suite for suite in SUITES if suite.name == part.suite)
    machine = describe_machine()
    row = {
        **part._asdict(),
        "package": f"{suite.package} {suite.version}",
        "tests_of": source,
        "stock": counts(stock),
        "outcomes": counts(ours),
        "recorded": sum(one.recorded for one in ours.values()),
        "asked_for_types": sum(one.asked for one in ours.values()),
        "accepted": dict(Counter(result.reasons.values()).most_common()),
        "differs": [one._asdict() for one in result.others],
        "unsteady": [one._asdict() for one in result.unsteady],
        "not_collected": {test: one.said for test, one in stock.items() if one.outcome == "not collected"},
        "machine": {name: machine[name] for name in ("date", "python", "releases", "system", "cpu", "commit")},
    }
    results = page.read_results()
    rows = {(one["suite"], one["mode"], one["pattern"]): one for one in results["runs"]} | {tuple(part): row}
    every = [tuple(one) for suite in SUITES for mode in suite.files for one in all_parts(suite, mode)]
    kept = {name: why for name, why in results["missing"].items() if all(one["suite"] != name for one in rows.values())}
    results = {"missing": {**kept, **missing}, "runs": [rows[one] for one in every if one in rows]}
    page.RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
