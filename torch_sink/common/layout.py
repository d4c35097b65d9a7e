"""The layout that batches of images will have where they are made; a SinkLoader tells the workers that it starts."""

from __future__ import annotations

import torch

wanted: torch.memory_format = torch.contiguous_format


def want(layout: torch.memory_format) -> None:
    """In a data worker: says in which layout its batches will be made."""
    global wanted
    wanted = layout
