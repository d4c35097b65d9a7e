"""The order in which torch adds up float32 numbers on the CPU: the last bits of a mean depend on it.

Sources: `aten/src/ATen/native/cpu/SumKernel.cpp`, `aten/src/ATen/native/TensorIteratorReduce.cpp` and
`aten/src/ATen/ParallelOpenMP.h` of PyTorch. `triton_kernels/float_sum.py` adds in the same order.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Numbers that are added at once: a vector has so many lanes, a row so many vectors, each with a sum of its own.
_LANES, _VECTORS = 8, 4
# A sum is begun afresh after so many rows; so many such sums are added up likewise, and so on.
_STEP, _LEVELS = 16, 4
# Fewer numbers than these are added by one thread.
_GRAIN = 32768
# Of more numbers a thread makes longer steps, which the kernel does not.
_LARGEST_PART = 2**19 * _LANES * _VECTORS
# The kernel keeps the sums of so many threads.
_MOST_THREADS = 256


def parts_of(count: int, threads: int) -> tuple[int, int]:
    """How many threads add up `count` numbers, and how many numbers each of them gets; the last may get fewer."""
    parts = min(threads, -(-count // _GRAIN)) if count >= _GRAIN else 1
    return parts, -(-count // parts)


def summing_threads(count: int) -> int | None:
    """How many threads torch adds up `count` numbers with, here and now; None where its order is not known."""
    threads = torch.get_num_threads()
    parts, longest = parts_of(count, threads)
    if threads > _MOST_THREADS or longest > _LARGEST_PART or not _is_order_known():
        return None
    return threads if parts > 1 else 1


def sum_in_order(numbers: Floats, threads: int) -> np.float32:
    """The sum of float32 [count], as that many threads of torch make it, bit for bit."""
    parts, longest = parts_of(len(numbers), threads)
    if parts == 1:
        return _sum_by_one_thread(numbers)
    sums = np.zeros(threads, np.float32)
    for part in range(parts):
        sums[part] = _sum_by_one_thread(numbers[part * longest : (part + 1) * longest])
    return _sum_by_one_thread(sums)


def _sum_by_one_thread(numbers: Floats) -> np.float32:
    lanes = _LANES if len(numbers) >= _LANES else 1
    vectors = numbers[: len(numbers) // lanes * lanes].reshape(-1, lanes)
    rows = vectors[: len(vectors) // _VECTORS * _VECTORS].reshape(-1, _VECTORS * lanes)
    first, *others = _sum_of_rows(rows).reshape(_VECTORS, lanes)
    in_lanes = _one_by_one(np.stack([first, *vectors[len(rows) * _VECTORS :], *others]))
    rest = numbers[vectors.size :]
    return _one_by_one(np.concatenate([rest, in_lanes]))  # type: ignore[return-value]


def _sum_of_rows(rows: Floats) -> Floats:
    """The sum of each column of float32 [rows, columns]."""
    sums = []
    for _ in range(_LEVELS - 1):
        steps = len(rows) // _STEP
        sums.append(_one_by_one(rows[steps * _STEP :]))
        rows = _one_by_one(rows[: steps * _STEP].reshape(steps, _STEP, rows.shape[1]).swapaxes(0, 1))
    return _one_by_one(np.stack([*sums, _one_by_one(rows)]))


def _one_by_one(numbers: Floats) -> Floats:
    """The sum over the first axis, in order."""
    total = np.zeros(numbers.shape[1:], np.float32)
    for number in numbers:
        total = total + number
    return total


@functools.lru_cache(maxsize=1)
def _is_order_known() -> bool:
    """Whether torch's sums are those of this file: other processors than x86-64's have other vectors."""
    numbers = np.reciprocal(np.arange(1, 12_000, dtype=np.float32))
    samples = (numbers[:length] for length in (7, 31, 700, len(numbers)))
    return all(torch.from_numpy(some).sum().item() == sum_in_order(some, 1) for some in samples)
