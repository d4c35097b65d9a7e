"""Consuming batches that were not: what a traversal and the random generators were before is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch_sink.common.random_state import global_random_state, set_global_random_state
from torch_sink.sink.traversal import Traversal


@contextmanager
def rehearsing(traversal: Traversal) -> Iterator[None]:
    """Inside, batches may be consumed; afterwards position, generators and global draws are as before.

    Raises:
        ValueError: the source is a generator object, which cannot be traversed twice.
    """
    source, is_loaded = traversal.source, traversal.is_loaded
    if isinstance(source.loader, Iterator):
        raise ValueError("a generator object can be traversed only once; pass the generator function, or a list")
    position = replace(traversal.position, worker_states=dict(traversal.position.worker_states))
    start, draws = source.next_start(position.pass_number), global_random_state()
    state = traversal.state_dict() if traversal.passes or traversal.resume is not None else None
    try:
        yield
    finally:
        if state is None:  # a position to resume from would bring the draws of now back when it is used
            traversal.restart()
            traversal.position = position
        else:
            traversal.load_state_dict(state)
            traversal.is_loaded = is_loaded
        source.rewind(start)
        set_global_random_state(draws)
