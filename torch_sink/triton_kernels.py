"""Finds the kernels of a clone, where they stand beside the package; in an install a folder of this name goes first."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

__path__ = [str(Path(__file__).resolve().parents[1] / "triton_kernels")]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
