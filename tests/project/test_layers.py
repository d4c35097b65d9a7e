"""Layers import downwards only, importing torch_sink changes nothing, and the public names stay."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

import torch_sink

pytestmark = pytest.mark.once

ROOT = Path(torch_sink.__file__).resolve().parent
KERNELS = "torch_sink.triton_kernels"
IMAGE, SINK, LOOP, COMMAND_LINE = "torch_sink.image", "torch_sink.sink", "torch_sink.loop", "torch_sink.cli"
DAMAGE = "torch_sink.damage"

# What must not be loaded once every module of a layer has been imported.
NOT_LOADED_BY = {
    KERNELS: (IMAGE, SINK, LOOP, COMMAND_LINE, "torchvision", "PIL"),
    IMAGE: (SINK, LOOP, COMMAND_LINE),
    SINK: (IMAGE, LOOP, COMMAND_LINE, KERNELS, "torchvision", "PIL"),
    LOOP: (IMAGE, SINK, COMMAND_LINE, KERNELS, "torchvision", "PIL", "torch._dynamo"),
    DAMAGE: (IMAGE, SINK, LOOP, COMMAND_LINE, KERNELS, "torchvision", "PIL"),
    "torch_sink.errors": (IMAGE, SINK, LOOP, COMMAND_LINE, KERNELS, "torch", "torchvision", "PIL"),
}

# Of the kernels, what records and plans knows the layout of their jobs, which is plain numbers. The modules that launch
# them are loaded where the first batch is made, so a data worker never loads device code.
JOB_LAYOUTS = {KERNELS, *(f"{KERNELS}.{name}" for name in ("rows", "shapes", "jpeg_rows"))}
LAUNCHING = (f"{IMAGE}.run", f"{IMAGE}.decode.jpeg_decoder")

# What the source of a layer may not import anywhere, not even inside a function.
NEVER_IMPORTED_BY = {
    KERNELS: (IMAGE, SINK, LOOP, COMMAND_LINE, "torchvision", "PIL"),
    IMAGE: (SINK, LOOP, COMMAND_LINE),
    SINK: (IMAGE, LOOP, COMMAND_LINE, KERNELS, "torchvision", "PIL"),
    LOOP: (IMAGE, COMMAND_LINE, KERNELS, "torchvision", "PIL"),
    DAMAGE: (IMAGE, SINK, LOOP, COMMAND_LINE, KERNELS, "torchvision", "PIL"),
}

PUBLIC_NAMES = """
    Accuracy Callback CheckpointConfig DecodeError DecodeReport EarlyStopping Evaluation FallbackReport History
    HostSyncError JitConfig LambdaCallback
    LearningRateScheduler LossMonitor MeanIoU Model ModelCheckpoint NonFiniteLoss OnRequestExit ProgressBar QueueStats
    ReduceLROnPlateau RunContext RunHistory SinkError SinkLoader SinkTimeout StepLoop SummaryCollector SupportRow
    TimeMonitor UnsupportedOperation amp data_sink decode_images decode_providers decode_report explain
    fallback_report
    get_image_backend image_backend jit no_host_sync set_image_backend support_table timeline
"""

# The first layer is imported where not even torch is loaded, the others in forks of a process that has loaded it.
IMPORT_ALONE = """
import importlib, os, pkgutil, sys, types
stub = types.ModuleType("torch_sink")     # the package without its __init__, which imports every layer
stub.__path__ = sys.argv[1].split(os.pathsep)
sys.modules["torch_sink"] = stub
launching = sys.argv[2].split()
for layer in sys.argv[3:]:
    if os.fork() == 0:
        package = importlib.import_module(layer)
        for found in pkgutil.walk_packages(getattr(package, "__path__", []), layer + "."):
            if not found.name.startswith(tuple(launching)):
                importlib.import_module(found.name)
        print(*(f"{layer} {name}" for name in sys.modules), sep="\\n", flush=True)
        os._exit(0)
    if os.wait()[1] != 0:
        sys.exit(f"{layer} cannot be imported")
    import torch
"""

SIDE_EFFECTS = """
import json, os, signal, sys, threading
import PIL.Image, torch, torchvision, torch.utils.data
import torchvision.datasets, torchvision.transforms.functional, torchvision.transforms.v2.functional
from torch.utils.data._utils import collate, worker

def holders():
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torchvision", "PIL") or name.startswith("torch.utils.data"):
            yield name, module
            for key, value in list(vars(module).items()):
                if isinstance(value, type):
                    yield f"{name}.{key}", value

def snapshot():
    state = {f"{name}.{key}": id(value) for name, holder in holders() for key, value in list(vars(holder).items())
             if not key.startswith("_abc") and key not in ("__annotations_cache__", "__dict__")}
    for name, registry in (("OPEN", PIL.Image.OPEN), ("collate", collate.default_collate_fn_map)):
        state.update({f"{name}[{key}]": id(value) for key, value in registry.items()})
    state.update({f"signal {number}": id(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)})
    state.update({f"environment {key}": value for key, value in os.environ.items()})
    state["torch"] = (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
                      torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), torch.random.initial_seed())
    state["random"] = hash(torch.get_rng_state().numpy().tobytes())
    state["threads"] = threading.active_count()
    state["cuda"] = torch.cuda.is_initialized()
    return state

PIL.Image.init()  # Pillow registers its own plugins at the first image otherwise
before, modules = snapshot(), set(sys.modules)
import torch_sink
after = snapshot()
# Modules that torch_sink was the first to import are new, not changed.
fresh = set(sys.modules) - modules
changed = sorted(key for key in before | after if before.get(key) != after.get(key)
                 and not any(key == name or key.startswith(name + ".") for name in fresh))
torch_sink.set_image_backend("device")
active = snapshot()
assert any(before[key] != active.get(key) for key in before), "the device backend changed nothing: the test is blind"
torch_sink.set_image_backend("PIL")
restored = snapshot()
kept = [key for key in before if before[key] != restored.get(key) and not key.startswith("environment")]
print(json.dumps([changed, kept]))
"""


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def is_part_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.fixture(scope="module")
def modules_of() -> dict[str, list[str]]:
    """layer -> the modules that are loaded once all of its own are imported, but for those that launch kernels"""
    layers = sorted(NOT_LOADED_BY, key=lambda layer: "torch" not in NOT_LOADED_BY[layer])
    loaded: dict[str, list[str]] = {layer: [] for layer in layers}
    for line in run_python(
        IMPORT_ALONE, os.pathsep.join(torch_sink.__path__), " ".join(LAUNCHING), *layers
    ).splitlines():
        layer, name = line.split()
        loaded[layer].append(name)
    return loaded


@pytest.mark.parametrize("layer", NOT_LOADED_BY)
def test_a_layer_imports_alone(layer: str, modules_of: dict[str, list[str]]) -> None:
    loaded = modules_of[layer]
    assert layer in loaded
    intruders = [name for name in loaded for package in NOT_LOADED_BY[layer] if is_part_of(name, package)]
    assert not intruders


def test_what_records_and_plans_loads_no_device_code(modules_of: dict[str, list[str]]) -> None:
    loaded = modules_of[IMAGE]
    assert f"{IMAGE}.program.program" in loaded
    assert {name for name in loaded if is_part_of(name, KERNELS)} == JOB_LAYOUTS


@pytest.mark.parametrize("layer", NEVER_IMPORTED_BY)
def test_no_import_goes_upwards(layer: str) -> None:
    folder = ROOT.parent / "triton_kernels" if layer == KERNELS else ROOT / layer.rpartition(".")[2]
    files = sorted(folder.rglob("*.py"))
    assert files, f"no source under {folder}"
    upwards = [
        f"{file.relative_to(folder)}: {name}"
        for file in files
        for name in imported_names(file, layer)
        if any(is_part_of(name, package) for package in NEVER_IMPORTED_BY[layer])
    ]
    assert not upwards


def test_one_file_knows_other_training_libraries() -> None:
    """What they are called and how they wrap models and loaders changes with their releases."""
    named = re.compile(r"lightning|fabric|accelerate\b", re.IGNORECASE)
    files = [file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if named.search(file.read_text())]
    assert files == ["common/integrations.py"]


# What prints or warns, outside of the command line: file -> how often.
SPEAKS = {
    "common/ranks.py": 2,
    "loop/monitors.py": 1,  # a line, where `common.ranks.speaks`
    "common/integrations.py": 1,  # on rank 0
    "sink/passes.py": 1,  # on rank 0
    "releases.py": 1,  # on the first rank that torchrun started
    "image/core/proof.py": 1,  # of kernels on the device of this rank
}


def test_one_place_decides_which_rank_speaks() -> None:
    """A new line would come once for each GPU: log by `warn` or `warn_of_rank`, print by `show`."""
    spoken: dict[str, int] = {}
    for file in ROOT.rglob("*.py"):
        name = file.relative_to(ROOT).as_posix()
        if name.startswith("cli/"):
            continue
        calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
        count = sum(ast.unparse(call) in ("print", "_log.warning", "log.warning", "warnings.warn") for call in calls)
        spoken |= {name: count} if count else {}
    assert spoken == SPEAKS


def imported_names(file: Path, layer: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Every layer is one folder deep: "." is the layer, ".." is torch_sink.
            package = ["", layer + ".", "torch_sink."][node.level]
            names += [f"{package}{node.module or ''}.{alias.name}" for alias in node.names]
    return names


@pytest.fixture(scope="module")
def side_effects() -> list[list[str]]:
    """What importing torch_sink changes, and what is not as before once the backend is set and set back."""
    return json.loads(warm.run("-c", SIDE_EFFECTS, timeout=300).stdout)


def test_importing_changes_nothing(side_effects: list[list[str]]) -> None:
    assert side_effects[0] == []


def test_setting_the_backend_back_restores_every_attribute(side_effects: list[list[str]]) -> None:
    assert side_effects[1] == []


def test_the_public_names_are_there_and_sorted() -> None:
    code = "import torch_sink.amp; from torch_sink.amp import DynamicLossScaler; print(torch_sink.amp)"
    assert warm.run("-c", code, timeout=300).stdout
    assert [name for name in dir(torch_sink) if name[0] != "_"] == sorted({*torch_sink.__all__, *torch_sink._LATER})
    missing = sorted(set(PUBLIC_NAMES.split()) - set(torch_sink.__all__))
    assert not missing, f"removed from the public names: {missing}"
    assert list(torch_sink.__all__) == sorted(torch_sink.__all__)
    assert [name for name in torch_sink.__all__ if not hasattr(torch_sink, name)] == []
