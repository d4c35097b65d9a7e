"""Whether kernels give stock code's pixels on this machine: they make a few small images before the first batch."""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import PIL
import torch
from PIL import features

from torch_sink.triton_kernels.shapes import are_interpreted


class Verdict(NamedTuple):
    """The outcome of comparing the kernels' images with stock code's."""

    holds: bool  # all images were equal
    reason: str = ""  # otherwise the first difference, or the error
    lasts: bool = True  # the outcome is final; an error, such as a want of memory, is not


class Proof:
    """Compares the images of some kernels with stock code's, before they make a batch on a device.

    A verdict is found once for each kind of device, driver, releases and build of the kernels, and kept in Triton's
    cache, where later processes read it. An error, for want of memory for instance, is no verdict: at later questions
    the kernels are tried again, less and less often.

    Args:
        name: of the verdict in the cache.
        instead: what happens where the kernels are wrong, a sentence for the warning that says so.
        compare: makes images on a device, and gives the first difference to stock code in words; "" without one.
        folders: of the package's code that takes part.
        kernels: their folder in that of all kernels.
    """

    def __init__(
        self, name: str, instead: str, compare: Callable[[torch.device], str], folders: Sequence[Path], kernels: str
    ) -> None:
        self._file, self._instead, self._compare = f"{name}.json", instead, compare
        self._folders, self._kernels = folders, kernels
        self._lock = threading.RLock()
        self.forget()

    def forget(self) -> None:
        """Forgets what this process has found out, and leaves the cache as it is."""
        self._found: dict[torch.device, Verdict] = {}
        self._asked: Counter[torch.device] = Counter()  # since it was tried without a verdict
        self._warned: set[tuple[torch.device, bool]] = set()

    def verdict(self, device: torch.device) -> Verdict:
        """Whether the kernels are right on a device; warns, once, where they are not. Other threads wait meanwhile."""
        device = _with_index(device)
        found = self._found.get(device)
        if found is not None and found.lasts:
            return found
        with self._lock:
            found = self._found.get(device)
            if found is None or (not found.lasts and self._is_due(device)):
                found = self.recalled(device)
                if found is None:
                    found = self.prove(device)
                    # Where the cache cannot be written, each process finds out again.
                    with suppress(OSError, RuntimeError, ImportError):
                        if found.lasts:
                            self._cache(device).put(json.dumps(found), self._file, binary=False)
                self._found[device] = found
                if not found.holds and (device, found.lasts) not in self._warned:
                    self._warned.add((device, found.lasts))
                    later = "" if found.lasts else ". They are tried again at later batches"
                    text = f"{self._instead}: {found.reason}{later}. See python -m torch_sink doctor"
                    warnings.warn(text, RuntimeWarning, stacklevel=3)
            return found

    def is_refuted(self, device: torch.device) -> bool:
        """True where this process has found the kernels wrong, for good; finds nothing out."""
        found = self._found.get(_with_index(device))
        return found is not None and found.lasts and not found.holds

    def prove(self, device: torch.device) -> Verdict:
        """Compares again, without the cache; the device may be the CPU in a process with Triton's interpreter."""
        try:
            # Autocast of the caller would change what stock code makes.
            with torch.autocast("cpu", enabled=False):
                difference = self._compare(device)
        except Exception as error:  # of a compiler, a driver or a device
            text = str(error).strip().partition("\n")[0]
            return Verdict(False, f"{type(error).__name__}: {text}", lasts=False)
        return Verdict(not difference, difference)

    def recalled(self, device: torch.device) -> Verdict | None:
        """The verdict in the cache; None where there is none, or it cannot be read."""
        with suppress(OSError, RuntimeError, ValueError, TypeError, ImportError):
            if path := self._cache(device).get_file(self._file):
                return Verdict(*json.loads(Path(path).read_text()))
        return None

    def _cache(self, device: torch.device) -> Any:
        """Triton's folder for this device and build."""
        from triton.runtime.cache import get_cache_manager

        return get_cache_manager(self.fingerprint(device))

    def fingerprint(self, device: torch.device) -> str:
        """Equal where the kernels would do the same: of the device, its driver, the releases at work, and our code."""
        import torchvision
        import triton

        from torch_sink.triton_kernels import shapes

        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        facts = [name, _driver(), torch.__version__, torchvision.__version__, triton.__version__, PIL.__version__]
        facts += [str(features.version("libjpeg_turbo")), str(are_interpreted()), str(torch.get_default_dtype())]
        digest = hashlib.sha256(json.dumps(facts).encode())
        of_kernels = Path(shapes.__file__).parent
        for folder in (*self._folders, of_kernels / self._kernels, of_kernels):
            for path in sorted(folder.glob("*.py")):
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def _is_due(self, device: torch.device) -> bool:
        """True at the first, second, fourth, eighth ... question after a try without a verdict."""
        self._asked[device] += 1
        return self._asked[device].bit_count() == 1


def _with_index(device: torch.device) -> torch.device:
    """A device with its number; "cuda" is the current one."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def _driver() -> str:
    """Release of the driver's kernel module; where the system hides it (WSL), what the driver's library says."""
    for path in (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version")):
        if path.is_file():
            return path.read_text().strip()
    version = ctypes.c_int()
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{platform.release()} {version.value}"
