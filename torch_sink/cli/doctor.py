"""The command `doctor`: checks releases, device, kernels, decoder and mode, and says how to get what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch_sink import __version__
from torch_sink.releases import NEWEST, OLDEST, is_newer, numbers_of

if TYPE_CHECKING:
    import torch

PACKAGES = {"torch": "torch", "torchvision": "torchvision", "triton": "triton", "pillow": "PIL", "numpy": "numpy"}
EXTRAS = {
    "tqdm": "progress bars",
    "matplotlib": "the charts of bench and of the demo",
    "tensorboard": "SummaryCollector",
    "torchdata": "StatefulDataLoader",
}
SMALL_SHARED_MEMORY_BYTES = 1 << 30
# Part of a message of Triton, its assembler or the driver; what is wrong; what to do.
_KNOWN = (
    ("libcuda.so cannot found", "Triton does not find libcuda.so.1", "run ldconfig, or set TRITON_LIBCUDA_PATH"),
    ("unsupported toolchain", "the driver is too old for what Triton assembles", "update the NVIDIA driver"),
    ("kernel image is invalid", "the driver is too old for what Triton assembles", "update the NVIDIA driver"),
    ("version is insufficient", "the driver is too old for this build of torch", "update the NVIDIA driver"),
    ("is not defined for option 'gpu-name'", "Triton does not know this GPU yet", "pip install -U torch triton"),
    ("failed to map segment", "Triton's cache lies where nothing may be executed", "set TRITON_CACHE_DIR"),
)
_INSTALL_COMPILER = "install one, for instance: apt install gcc; or name one: CC=/path/to/cc"
_FAILURES = (ImportError, RuntimeError, OSError, AttributeError, ValueError)


class Finding(NamedTuple):
    """One line of the report, with a state: "ok", "missing" (the rest works without it) or "broken"."""

    subject: str
    state: str
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Run all checks; one that raises becomes a finding and does not end the report."""
    findings = [Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")]
    findings.append(Finding("torch_sink", "ok", f"{__version__} ({Path(__file__).parents[1]})"))
    findings += [_check_release(package) for package in PACKAGES]
    if all(finding.state != "broken" for finding in findings):
        checks = (_check_compiled_part, _check_device, _check_kernels, _check_decoder, _check_stages, _check_mode)
        findings += [_run(check) for check in checks]
        findings += [_check_shared_memory()] if os.path.isdir("/dev/shm") else []
    for module, purpose in EXTRAS.items():
        try:
            release = getattr(importlib.import_module(module), "__version__", "installed")
            findings.append(Finding(module, "ok", f"{release}, for {purpose}"))
        except ImportError:
            said = f"not installed; needed for {purpose}"
            findings.append(Finding(module, "missing", said, f"pip install {module}"))
    return findings


def format_findings(findings: list[Finding]) -> str:
    """Format the report as text."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for subject, state, detail, remedy in findings:
        lines.append(f"{state:8}{subject:{width}}  {detail}")
        lines += [f"{'':8}{'':{width}}  -> {remedy}"] if remedy else []
    broken = sum(finding.state == "broken" for finding in findings)
    lines.append(f"\n{broken} broken: see the lines above." if broken else "\nEverything that is needed works.")
    return "\n".join(lines)


def _run(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except _FAILURES as error:
        subject = check.__name__.removeprefix("_check_").replace("_", " ")
        return Finding(subject, "broken", f"{type(error).__name__}: {error}", "reinstall: pip install -U torch-sink")


def _check_release(package: str) -> Finding:
    oldest = OLDEST.get(package, "0")
    module, wanted = PACKAGES[package], f"{package}>={oldest}"
    # The compiled parts of torch and torchvision only fit each other if both are installed together.
    remedy = f"pip install -U {'torch torchvision' if 'torch' in module else repr(wanted)}"
    if module == "triton" and _needs_no_triton():
        return Finding(package, "missing", "not installed: pixels are made on the CPU, with the same results")
    try:
        release: str = importlib.import_module(module).__version__
    except _FAILURES as error:
        return Finding(package, "broken", f"cannot be imported: {type(error).__name__}: {error}", remedy)
    if numbers_of(release) < numbers_of(oldest):
        return Finding(package, "broken", f"{release} is too old, {wanted} is needed", remedy)
    if is_newer(package, release):
        said = f"{release}, newer than the {NEWEST[package]} that this torch_sink is tested with"
        return Finding(package, "missing", said, "pip install -U torch-sink, or compare with stock code")
    return Finding(package, "ok", release)


def _needs_no_triton() -> bool:
    """Whether Triton is not installed on a machine without a GPU, where nothing uses it."""
    import torch

    return importlib.util.find_spec("triton") is None and not torch.cuda.is_available()


def _check_compiled_part() -> Finding:
    import torch
    from torchvision.ops import nms

    nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([1.0]), 0.5)
    return Finding("torchvision ops", "ok", "torchvision's compiled part fits torch")


def _check_device() -> Finding:
    import torch

    from torch_sink.cli.machine import gpu_driver, gpu_name

    name = gpu_name()
    if name is None and not _has_nvidia_driver():
        detail = "none found: pixels are made on the CPU, in the data workers, with the same results"
        return Finding("accelerator", "missing", detail, "nothing to do, unless this machine has a GPU: see nvidia-smi")
    if name is None:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            detail = f"the driver of an NVIDIA GPU is loaded, but torch cannot use it: {error}".partition("\n")[0]
            if torch.version.cuda is None:
                remedy = "install a build of torch for CUDA: https://pytorch.org/get-started"
            elif "too old" in str(error):
                remedy = "update the driver, or install torch for an older CUDA"
            else:
                remedy = "see nvidia-smi"
            return Finding("accelerator", "broken", detail, remedy)
        return Finding("accelerator", "broken", "torch can use CUDA, but sees no GPU", "see CUDA_VISIBLE_DEVICES")
    detail = f"{name} ({torch.accelerator.current_accelerator()})"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        free, total = torch.cuda.mem_get_info()
        detail += f", sm_{major}{minor}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, driver {gpu_driver()}"
    return Finding("accelerator", "ok", detail)


def _has_nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def _check_kernels() -> Finding:
    import torch

    if _needs_no_triton():
        return Finding("kernels", "missing", "they need Triton")
    importlib.import_module("torch_sink.triton_kernels")
    if not torch.cuda.is_available():
        return Finding("kernels", "ok", "torch_sink.triton_kernels can be imported; kernels run where there is a GPU")
    try:
        seconds = launch(torch.device("cuda"))
    except Exception as error:  # whatever Triton, a compiler or the driver raises
        return Finding("kernels", "broken", *_diagnose(error))
    if found := _missing_tool():
        detail, remedy = found
        return Finding("kernels", "missing", f"what is in Triton's cache runs; for the rest {detail}", remedy)
    return Finding("kernels", "ok", f"one was compiled and launched in {seconds:.1f} s")


def launch(device: torch.device) -> float:
    """Compile and launch the smallest kernel on a device, wait for it, and return the seconds that took."""
    import torch

    from torch_sink.triton_kernels.launching import compiler_options, probe_kernel

    started = time.perf_counter()
    values = torch.zeros(16, dtype=torch.uint8, device=device)
    probe_kernel[(1,)](values, **compiler_options())
    if values.tolist() != [1, *[0] * 15]:
        raise RuntimeError(f"the kernel that writes 1 left {values.tolist()}")
    return time.perf_counter() - started


def _diagnose(error: Exception) -> tuple[str, str]:
    """What is wrong, and what to do, after a kernel could not be launched."""
    if found := _missing_tool() or unwritable_cache():
        return found
    said = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
    all_said = "".join(traceback.format_exception(error, limit=0))  # with its causes
    for part, wrong, remedy in _KNOWN:
        if part in all_said:
            return f"{wrong} ({said})", remedy
    return said, "python -m torch_sink doctor 2>&1 shows what the compiler says; report it with this line"


def _missing_tool() -> tuple[str, str] | None:
    """What is wrong, and what to do, if a C compiler or Python.h is missing, which Triton needs."""
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named is not None else ["gcc", "clang"])):
        there = "there is neither gcc nor clang" if named is None else f"CC={named} is none"
        return f"Triton needs a C compiler, and {there}", _INSTALL_COMPILER
    folder = Path(sysconfig.get_paths()["include"])
    if (folder / "Python.h").is_file():
        return None
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return f"Triton needs Python.h, and it is not in {folder}", f"install it, for instance: apt install {release}-dev"


def unwritable_cache() -> tuple[str, str] | None:
    """What is wrong, and what to do, if Triton's cache of compiled kernels cannot be written; None if it can."""
    from triton import knobs

    folder = str(knobs.cache.dir)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        reason = f"Triton's cache {folder} cannot be written: {error.strerror}"
        return reason, "set TRITON_CACHE_DIR to a folder that can be written"


def _check_decoder() -> Finding:
    import torch
    from PIL import features

    from torch_sink.image.core.settings import default_device
    from torch_sink.image.decode.jpeg_proof import JPEG_KERNELS
    from torch_sink.image.decode.providers import candidates, decode_providers

    device = torch.device(default_device())
    providers = [provider.name for provider in candidates(device)]
    if not providers or not features.check("jpg"):
        return Finding("decoder", "broken", "Pillow was built without JPEG", "pip install --force-reinstall pillow")
    if providers[0] == "triton" and not (found := JPEG_KERNELS.prove(device)).holds:
        detail = f"Pillow's threads decode JPEG files, for the kernels cannot: {found.reason}"
        return Finding("decoder", "broken", detail, "see the line about kernels; else report it with this line")
    asked = [name for name in decode_providers() if name not in providers]
    others = {"what it cannot take goes to": providers[1:], "where it is named:": asked}
    listed = [f"{what} {', '.join(names)}" for what, names in others.items() if names]
    return Finding("decoder", "ok", "; ".join([f"{providers[0]} decodes", *listed]))


def _check_stages() -> Finding:
    """Runs the self-test of the kernels for float32; for other dtypes, reads the result of a batch or of `warm`."""
    import torch

    from torch_sink.image.core.settings import default_device
    from torch_sink.image.run.stage_proof import STAGE_KERNELS

    device = torch.device(default_device())
    if device.type == "cpu":
        return Finding("transforms", "ok", "stock torchvision makes pixels on the CPU, in the data workers")
    verdicts = {
        str(dtype).removeprefix("torch."): proof.prove(device) if dtype == torch.float32 else proof.recalled(device)
        for dtype, proof in STAGE_KERNELS.items()
    }
    wrong = [f"{name}: {found.reason}" for name, found in verdicts.items() if found is not None and not found.holds]
    if wrong:
        detail = f"stock torchvision makes batches on the CPU, for the kernels cannot ({'; '.join(wrong)})"
        return Finding("transforms", "broken", detail, "see the line about kernels; else report it with this line")
    right = ", ".join(name for name, found in verdicts.items() if found is not None)
    return Finding("transforms", "ok", f"kernels make batches; their pixels are stock torchvision's, as {right}")


def _check_mode() -> Finding:
    import torch

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    detail = f'mode "auto" runs as "{"graph" if torch.cuda.is_available() else "eager"}"'
    if compiler is None:
        remedy = 'only mode "compile" needs one, for instance: apt install g++'
        return Finding("step loop", "missing", f"{detail}; no C++ compiler", remedy)
    return Finding("step loop", "ok", f"{detail}; C++ compiler for torch.compile: {compiler}")


def _check_shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free
    detail = f"{free / 2**30:.1f} GiB free in /dev/shm, through which data workers hand over batches"
    if free < SMALL_SHARED_MEMORY_BYTES:
        return Finding("shared memory", "missing", detail, "in a container: docker run --ipc=host or --shm-size=8g")
    return Finding("shared memory", "ok", detail)
