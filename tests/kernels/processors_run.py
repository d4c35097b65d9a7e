"""Measures the parity table as other processors would: python processors_run.py [whole]; run by `test_processors.py`.

torch's CPU kernels and MKL choose their code by the processor, and by these variables when they first compute. Each
setting runs in a fork that has computed nothing yet. Prints a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from image.parity import EXACT, ImageKind, Promise, measure

from kernels import quick_interpreter

# ATEN_CPU_CAPABILITY, MKL_CBWR. What the processor lacks, torch and MKL replace by the best it has.
SETTINGS = (("default", "COMPATIBLE"), ("avx2", "AVX2"), ("default", "AVX2"), ("avx2", "COMPATIBLE"))


def goes_through_torch(operation: str, reference: str, promise: Promise) -> bool:
    """True for what torch computes in floats, whose last bits may depend on the processor."""
    return promise != EXACT and (
        not reference.endswith("float32") or operation.split(",")[0] in ("resize", "rotate", "elastic_transform")
    )


def report(capability: str, mkl: str, whole: bool) -> None:
    os.environ.update(ATEN_CPU_CAPABILITY=capability, MKL_CBWR=mkl)
    quick_interpreter.install(check_overflow=False)
    images = [ImageKind("RGB", 47, 61), ImageKind("L", 31, 20)] if whole else [ImageKind("RGB", 9, 13)]
    chosen = (lambda operation, reference, promise: True) if whole else goes_through_torch
    parity = measure(images, seed=5, chosen=chosen)
    broken = [(*row[:4], row.share) for row in parity.broken_promises()]
    result = {
        "capability": torch.backends.cpu.get_cpu_capability(), "mkl": mkl, "rows": len(parity.rows), "broken": broken,
        "bits": [row.equal for row in parity.rows],
    }  # fmt: skip
    print(json.dumps(result), flush=True)


def main() -> int:
    whole = sys.argv[1:] == ["whole"]
    for setting in SETTINGS if whole else SETTINGS[:2]:
        if os.fork() == 0:
            report(*setting, whole)
            os._exit(0)
        if os.wait()[1]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
