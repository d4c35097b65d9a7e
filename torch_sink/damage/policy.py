"""Whether broken files raise, are skipped or are replaced, and who says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLICIES = ("raise", "skip", "replace")


class _OfThread(threading.local):
    policy: str | None = None


_of_process = "raise"
_of_thread = _OfThread()
# Called when a thread gets a policy of its own, other than "raise".
when_one_is_set: list[Callable[[], None]] = []


def check_policy(policy: str) -> str:
    """The policy.

    Raises:
        ValueError: there is none of that name.
    """
    if policy not in POLICIES:
        allowed = ", ".join(map(repr, POLICIES))
        raise ValueError(f"on_decode_error={policy!r} is not allowed: give one of {allowed}")
    return policy


def current_policy() -> str:
    """What holds for the files that the calling thread opens, and for the loaders whose iterators it makes."""
    return _of_thread.policy or _of_process


def set_policy(policy: str) -> None:
    """Says what holds in this process where a thread has nothing else."""
    global _of_process
    _of_process = policy


def or_current(policy: str) -> str:
    """What holds where `policy` was asked for: "raise" leaves it to the process."""
    return policy if policy != "raise" else current_policy()


@contextmanager
def policy_of_thread(policy: str) -> Iterator[None]:
    """Inside, `policy` holds in the calling thread; "raise" leaves to the process what holds."""
    if policy == "raise":
        yield
        return
    is_new = policy != current_policy()
    before, _of_thread.policy = _of_thread.policy, policy
    try:
        if is_new:
            for call in when_one_is_set:
                call()
        yield
    finally:
        _of_thread.policy = before
