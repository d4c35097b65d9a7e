"""The guide: its code and the examples in docstrings run, and every page is reachable from the site's menu."""

from __future__ import annotations

import ast
import doctest
import importlib
import itertools
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import warm
from PIL import Image

import torch_sink
import torch_sink.errors
import torch_sink.loop
from torch_sink.cli import make_parser
from torch_sink.cli.photos import write_photos

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "made_by"))

import sink_pictures  # noqa: E402

# What the pages behind "Get started" take for granted: a model, an optimizer, loaders of small batches.
PRELUDE = """
import torch
from torch import nn
import torch_sink

torch.manual_seed(0)
device = torch.device("cpu")
batches = [(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])) for _ in range(6)]
loader = train_loader = valid_loader = batches
network = model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6))
loss_fn = nn.functional.cross_entropy
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
images, labels = batches[0]
"""
# The others show code that needs several processes or a package of its own.
RUN = ("index", "recipes", "image_backend", "data_sink", "step_loop", "callbacks", "mixed_precision")
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "torch_sink").rglob("*.py"))
    if ">>> " in path.read_text()
]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def beside_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_photos(tmp_path / "photos", count=20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the images that its own command writes, and to the verdict that it promises; but for its crops and network."""
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "start.md").read_text()
    (command,) = re.findall(r"^    python -c \"(.*)\"$", page, flags=re.MULTILINE)
    exec(command)
    count, batch_size, epochs = (int(re.search(said, page)[1]) for said in (r"writes (\d+)", r"batch_size=(\d+)", r"range\((\d+)\)"))  # fmt: skip
    assert len(list(tmp_path.rglob("*.jpg"))) == count
    assert f"({count} images in batches of {batch_size} are {count // batch_size} an epoch" in page
    script = tmp_path / "train.py"
    code = "\n\n".join(blocks(DOCS / "start.md"))
    for shown, smaller in (("RandomResizedCrop(128)", "RandomResizedCrop(32)"), ("resnet18(", "shufflenet_v2_x0_5(")):
        assert shown in code
        code = code.replace(shown, smaller)
    script.write_text(code)
    finished = warm.run(script, timeout=600)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[1] == "no fallbacks"
    assert lines[2].startswith(f"{count // batch_size * epochs} batches, ")
    assert lines[3].partition(":")[0] in ("input-bound", "compute-bound")
    assert lines[4].startswith(f"{count // batch_size * 2} steps, ")


# torch's compiler looks at the gradient of a loss that a compiled step returns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", RUN)
def test_the_code_of_a_page_runs(name: str, beside_photos: Path) -> None:
    """In this process, where torch and torchvision are loaded already."""
    code = [PRELUDE, *blocks(DOCS / f"{name}.md")]
    # A page counts in epochs of ImageNet; here a run is as long as its data are short.
    code = [re.sub(r"epochs=90|range\(900\)|fit\(10|train\(10", _shorter, block) for block in code]
    script = beside_photos / "page.py"
    script.write_text("\n\n".join(code))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        torch_sink.set_image_backend("PIL")


def _shorter(found: re.Match[str]) -> str:
    return re.sub(r"\d+", "2", found[0])


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_the_code_of_a_page_compiles(page: Path) -> None:
    for block in blocks(page):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("package", [torch_sink, torch_sink.loop], ids=lambda package: package.__name__)
def test_public_names_are_sorted_and_documented(package: ModuleType) -> None:
    names = package.__all__
    assert names == sorted(names)
    assert all(getattr(package, name).__doc__ for name in names)


def test_the_api_reference_holds_every_public_name() -> None:
    documented = re.findall(r"(?:::: |heading: )torch_sink\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(documented) == torch_sink.__all__


def test_every_command_that_a_page_names_can_be_given() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    named = {found for page in pages for found in re.findall(r"python -m torch_sink ([^#`|\n]*)", page.read_text())}
    assert len(named) > 3
    for command in named:
        make_parser().parse_args(shlex.split(command))


def test_troubleshooting_names_every_error_and_every_reason_of_the_fallback_report() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    names = [name for name, value in vars(torch_sink.errors).items() if isinstance(value, type)]
    reasons = {reason for path in (ROOT / "torch_sink").rglob("*.py") for reason in _reasons(path)}
    assert len(names) >= 6
    assert len(reasons) >= 9
    assert [text for text in (*names, *sorted(reasons)) if text not in page] == []


def _reasons(path: Path) -> Iterator[str]:
    """The constant beginnings and endings of what a module may give as a reason, in or for `report_fallback`."""
    for node in ast.walk(ast.parse(path.read_text())):
        given: list[ast.AST] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "report_fallback":
            given = [node.args[1]]
        elif isinstance(node, ast.FunctionDef) and "_reason" in node.name and path.parent.name == "handles":
            given = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value is not None]
        constants = (each for root in given for each in ast.walk(root) if isinstance(each, ast.Constant))
        yield from (text for each in constants if len(text := str(each.value).strip(" '")) > 8 and " " in text)


def test_every_page_stands_in_the_menu() -> None:
    menu = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert menu == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if "made_by" not in page.parts}


@pytest.mark.parametrize("picture", sorted((DOCS / "images").iterdir()), ids=lambda picture: picture.name)
def test_every_picture_is_for_dark_pages_too(picture: Path) -> None:
    """An SVG knows both; of a PNG there are two, and a page shows the one that fits."""
    if picture.suffix == ".svg":
        assert "prefers-color-scheme: dark" in picture.read_text()
        return
    light, dark = (f"{picture.stem.removesuffix('_dark')}{end}.png" for end in ("", "_dark"))
    pages = [page.read_text() for page in DOCS.rglob("*.md") if f"{light}#gh-light-mode-only)" in page.read_text()]
    assert pages
    assert all(f"{dark}#gh-dark-mode-only)" in page for page in pages)


def test_code_on_the_pages_is_not_cut_off() -> None:
    """The site has room for 120 columns on a screen of 1280 pixels."""
    shown = [
        line for page in DOCS.rglob("*.md") for line in re.findall(r"^(?: {4}|```).*", page.read_text(), re.MULTILINE)
    ]
    shown += [line for page in DOCS.rglob("*.md") for block in blocks(page) for line in block.splitlines()]
    assert max(map(len, shown)) <= 120


def test_the_schedules_of_the_front_picture_are_those_of_its_costs() -> None:
    """By hand, in microseconds: what the CPU does before the last kernel begins, its work, and the sync."""
    each, step = sink_pictures.LAUNCH, sink_pictures.KERNELS * sink_pictures.KERNEL
    launches = sink_pictures.KERNELS * each
    tail = sink_pictures.KERNEL + sink_pictures.SYNC
    periods = [sink_pictures.FETCH + launches + tail, launches + tail, each + step + sink_pictures.SYNC]
    periods.append(each + sink_pictures.STEPS_PER_SYNC * step + sink_pictures.SYNC)
    for sinks, period in zip(sink_pictures.LOOPS, periods, strict=True):
        made = sink_pictures.schedule(sinks, sink_pictures.STEPS)
        between = [after - before for before, after in itertools.pairwise(made.syncs)]
        assert between == pytest.approx([period] * len(between))
        assert made.busy == pytest.approx(sinks.steps_per_sync * step / period)
        for row in (made.gpu, made.cpu):
            assert all(ended <= begins for (_, ended), (begins, _) in itertools.pairwise(row))
        launched = [end for begin, end in made.cpu if end - begin == each]
        assert all(end <= begins for end, (begins, _) in zip(launched, made.gpu, strict=True))


def test_the_front_picture_and_its_texts_are_up_to_date() -> None:
    for name in ("sinks.png", "sinks_dark.png"):
        with Image.open(DOCS / "images" / name) as picture:
            assert picture.info["Description"] == sink_pictures.describe(), "run docs/made_by/sink_pictures.py"
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "how_it_works.md"):
        assert sink_pictures.describe() in page.read_text()
    text = " ".join((DOCS / "how_it_works.md").read_text().split())
    assert sink_pictures.ASSUMED in text
    assert f"{sink_pictures.WINDOW / 1000:g} ms of each loop" in text
