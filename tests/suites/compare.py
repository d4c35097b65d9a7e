"""Compares the outcomes of two runs of a suite, and holds what differs against the list of accepted differences."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .runs import Outcome

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings along

ACCEPTED = Path(__file__).with_name("accepted.toml")


class Difference(NamedTuple):
    """A test whose outcome is not that of stock code."""

    suite: str
    mode: str
    test: str
    stock: str
    ours: str
    said: str  # by the test that failed


class Accepted(NamedTuple):
    """Differences that are right as they are.

    Args:
        suite: its name.
        modes: in which they are seen.
        tests: patterns of tests; "*" stands for any text.
        reason: why stock code's outcome is not wanted.
    """

    suite: str
    modes: tuple[str, ...]
    tests: tuple[str, ...]
    reason: str

    def covers(self, difference: Difference, pattern: str, mode: str) -> bool:
        """Whether one of the patterns accepts a difference in one of the modes."""
        is_of_run = (difference.suite, difference.mode) == (self.suite, mode)
        return is_of_run and re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), difference.test) is not None


def read_accepted(path: Path = ACCEPTED) -> list[Accepted]:
    """The entries of the list."""
    entries = tomllib.loads(path.read_text())["accepted"]
    return [Accepted(one["suite"], tuple(one["modes"]), tuple(one["tests"]), one["reason"]) for one in entries]


def differences(suite: str, mode: str, stock: Mapping[str, Outcome], ours: Mapping[str, Outcome]) -> list[Difference]:
    """The tests whose outcomes differ; "missing" is the outcome of a test that one of the runs lacks."""
    missing = Outcome("missing")
    pairs = {test: (stock.get(test, missing), ours.get(test, missing)) for test in {**stock, **ours}}
    return [
        Difference(suite, mode, test, before.outcome, now.outcome, now.said or before.said)
        for test, (before, now) in pairs.items()
        if before.outcome != now.outcome
    ]


def reasons(found: Iterable[Difference], accepted: Iterable[Accepted]) -> dict[Difference, str]:
    """The reason for each difference that is accepted."""
    return {
        one: entry.reason
        for one in found
        for entry in accepted
        if any(entry.covers(one, pattern, mode) for pattern in entry.tests for mode in entry.modes)
    }


def stale(
    found: Iterable[Difference], accepted: Iterable[Accepted], ran: Iterable[tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """The accepted (suite, mode, pattern) that no difference needs, among the suites and modes that ran whole."""
    found, ran = list(found), set(ran)
    return [
        (entry.suite, mode, pattern)
        for entry in accepted
        for mode in entry.modes
        for pattern in entry.tests
        if (entry.suite, mode) in ran and not any(entry.covers(one, pattern, mode) for one in found)
    ]
