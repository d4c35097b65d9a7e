"""Why a loop runs as it does: notes for `StepLoop.explain`."""

from __future__ import annotations


class Reasons:
    """Remarks in the order of their first appearance, with counts where they repeat."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._counted: set[str] = set()

    def note(self, text: str) -> None:
        """Add a remark once."""
        self._counts.setdefault(text, 0)

    def count(self, text: str) -> None:
        """Add one to a remark's count."""
        self._counted.add(text)
        self._counts[text] = self._counts.get(text, 0) + 1

    def lines(self) -> list[str]:
        """One line a remark."""
        return [f"{text} ({count} times)" if text in self._counted else text for text, count in self._counts.items()]
