"""Covering arrays: few rows in which every pair of values of two factors occurs.

Faults of programs with many options rarely need more than two of them to show. Twelve options of three values each make
half a million combinations, but forty rows hold every pair.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]
Rule = Mapping[str, Collection[str]]


def pairs(row: Mapping[str, str]) -> Iterator[Pair]:
    """The pairs of values that a row holds."""
    return map(frozenset, itertools.combinations(row.items(), 2))


def is_allowed(row: Mapping[str, str], rules: Sequence[Rule]) -> bool:
    """Whether no rule forbids a row; what it does not name yet is forbidden by none."""
    return not any(all(row.get(name) in values for name, values in rule.items()) for rule in rules)


@dataclass
class CoveringArray:
    """Draws rows greedily: each is made of the pairs that came least often so far.

    Args:
        factors: the values of each factor.
        rules: each forbids the rows whose values are among its own, for all factors that it names.
        seed: of the draws; equal seeds give equal rows.
    """

    factors: Mapping[str, Sequence[str]]
    rules: Sequence[Rule] = ()
    seed: int = 0
    _random: random.Random = field(init=False)
    _times_seen: Counter[Pair] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._pairs = [pair for pair in self._all_pairs() if self._complete(dict(sorted(pair)))]

    def rows(self, count: int, draws: int = 4) -> list[Row]:
        """The next rows, each the best of some draws."""
        found = []
        for _ in range(count):
            row = max((self._draw() for _ in range(draws)), key=lambda row: self._worth(pairs(row)))
            self._times_seen.update(pairs(row))
            found.append({name: row[name] for name in self.factors})
        return found

    def _all_pairs(self) -> Iterator[Pair]:
        for one, other in itertools.combinations(self.factors, 2):
            for values in itertools.product(self.factors[one], self.factors[other]):
                yield frozenset(zip((one, other), values, strict=True))

    def _draw(self) -> Row:
        """A row around one of the rarest pairs."""
        rarest = min(self._times_seen[pair] for pair in self._pairs)
        pair = self._random.choice([pair for pair in self._pairs if self._times_seen[pair] == rarest])
        row = self._complete(dict(sorted(pair)))
        assert row is not None
        return row

    def _complete(self, row: Row) -> Row | None:
        """The row with values for all factors, the most valuable ones first; None if there is no allowed one."""
        if not is_allowed(row, self.rules):
            return None
        left = [name for name in self.factors if name not in row]
        if not left:
            return row
        name = self._random.choice(left)
        values = self._random.sample(self.factors[name], len(self.factors[name]))
        values.sort(key=lambda value: self._worth({(name, value)} | {item} for item in row.items()), reverse=True)
        completed = (self._complete({**row, name: value}) for value in values)
        return next((row for row in completed if row is not None), None)

    def _worth(self, found: Iterable[Collection[tuple[str, str]]]) -> float:
        """How new pairs are: one that came n times counts 8 ** -n."""
        return sum(8.0 ** -self._times_seen[frozenset(pair)] for pair in found)
