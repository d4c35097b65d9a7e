"""Who speaks where several processes train together: rank 0 for all of them, the others of what is theirs alone."""

from __future__ import annotations

import logging

from torch import distributed

_log = logging.getLogger("torch_sink")


def group_rank() -> int:
    """The rank of this process in torch's process group; 0 without one."""
    return distributed.get_rank() if _is_in_group() else 0


def speaks(every_rank: bool = False) -> bool:
    """Whether this process prints and writes what every rank could: rank 0 does, or each rank if `every_rank`."""
    return every_rank or group_rank() == 0


def of_rank(text: str) -> str:
    """The text with the rank in front, if there is more than one."""
    return f"rank {group_rank()}: {text}" if _is_in_group() and distributed.get_world_size() > 1 else text


def warn(message: str, *values: object) -> None:
    """Logs a warning that every rank has to give alike; only rank 0 does."""
    if speaks():
        _log.warning(message, *values, stacklevel=2)


def warn_of_rank(message: str, *values: object, exc_info: bool = False) -> None:
    """Logs a warning of what may have happened in this process alone; it names the rank."""
    _log.warning(of_rank("%s"), message % values if values else message, exc_info=exc_info, stacklevel=2)


def _is_in_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
