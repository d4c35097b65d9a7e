"""A stand-in for a batch of images that are decoded later: numbers, some of which cannot be decoded."""

from __future__ import annotations

from typing import Any

import torch

from torch_sink.errors import DecodeError


class LazyNumbers(torch.Tensor):
    """Float32 `[N, 1, 2, 2]`; row i is filled with `numbers[i]`; negative numbers cannot be decoded."""

    numbers: list[int]

    @staticmethod
    def __new__(cls, numbers: list[int]) -> LazyNumbers:
        leaf = torch.Tensor._make_wrapper_subclass(cls, (len(numbers), 1, 2, 2), dtype=torch.float32)
        leaf.numbers = numbers
        return leaf

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} ran on a lazy leaf")

    def __reduce_ex__(self, protocol: int) -> Any:
        return LazyNumbers, (self.numbers,)

    def __torch_sink_execute__(
        self,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        out: torch.Tensor | None = None,
        on_decode_error: str = "raise",
    ) -> tuple[torch.Tensor, list[int] | None]:
        good = [i for i, number in enumerate(self.numbers) if number >= 0]
        shown = None
        if len(good) < len(self.numbers):
            if on_decode_error == "raise":
                bad = next(i for i, number in enumerate(self.numbers) if number < 0)
                raise DecodeError(f"number{self.numbers[bad]}.jpg", bad, "negative")
            if on_decode_error == "skip":
                shown = good
            else:
                shown = [next((g for g in good if g >= i), good[0]) for i in range(len(self.numbers))]
        rows = range(len(self.numbers)) if shown is None else shown
        values = torch.tensor([float(self.numbers[i]) for i in rows], device=device).view(-1, 1, 1, 1)
        made = values.expand(-1, 1, 2, 2).to(dtype or torch.float32)
        if out is None:
            return made.contiguous(memory_format=memory_format), shown
        return out[: len(made)].copy_(made), shown
