"""When an image is used again: once values were made, or planned, since its last use, the next one is another sample's.

Several uses before that are views of one sample, as of two crops that are compared.
"""

from __future__ import annotations

batches = 0  # that this process has made or planned, single images among them
were_opened = False  # images that wait for their pixels, in this process


def note_batch() -> None:
    """Values were made, or planned, or sent elsewhere."""
    global batches
    batches += 1


def note_opened() -> None:
    """An image waits for its pixels, which a dataset may keep."""
    global were_opened
    were_opened = True
