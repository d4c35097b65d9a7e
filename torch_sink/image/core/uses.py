"""Tells whether a second sample uses an image: it does when a batch was made or planned since the last use.

Uses without a batch in between belong to one sample, such as two crops that are compared.
"""

from __future__ import annotations

batches = 0  # how many batches and single images this process has made, planned, or sent to another process
were_opened = False  # whether this process has opened images whose pixels are not made yet, which a dataset may keep
