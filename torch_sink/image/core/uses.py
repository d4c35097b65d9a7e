"""When a second sample uses an image: when a batch was made, or planned, since the image was last used.

Uses without a batch in between belong to one sample, as two crops that are compared do.
"""

from __future__ import annotations

batches = 0  # how many batches and single images this process has made or planned
is_collating = False  # this data worker; what it makes then is sent
were_opened = False  # whether this process has opened images whose pixels are not made yet


def note_batch() -> None:
    """Notes that values were made, planned, or sent to another process."""
    global batches
    batches += 1


def note_opened() -> None:
    """Notes that an image was opened whose pixels are not made yet, which a dataset may keep."""
    global were_opened
    were_opened = True
