"""Which training writes a checkpoint, so that trainings leave each other's files alone."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Author:
    """Which training writes checkpoints.

    Each loop has a name, and a new one after it has loaded a state, because others may begin from the same state.

    Attributes:
        run: the name.
        past: after a resume, the names under which what was loaded was trained, each with the step at which this
            training left it; a name is None for checkpoints of a version that kept none.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    past: tuple[tuple[str | None, int], ...] = ()
