"""`explain` and `bench` of a user's own pipeline: their figures are those of the batch, and mistakes say what to do."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from PIL import JpegImagePlugin

import torch_sink
from torch_sink.cli import bench, explain, main
from torch_sink.cli.explain import launches_of
from torch_sink.cli.photos import make_photo
from torch_sink.cli.pipelines import Counted, FolderImages, open_pipeline
from torch_sink.cli.worker_cost import said_beside_stock, worker_cost_table
from torch_sink.image.decode.jpeg_decoder import launch_jpegs
from torch_sink.image.program.program import Wanted
from torch_sink.image.run.batch import LazyBatch
from torch_sink.image.run.device import ProgramOnDevice
from torch_sink.triton_kernels.launching import Launcher

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
META = torch.device("meta")
FILES, SIDE = 6, 32
MODULE = """
import numpy as np
import torch
import torch_sink
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

SIZE = 3
END = [transforms.CenterCrop(32), transforms.RandomHorizontalFlip(1), transforms.ToTensor()]
transform = transforms.Compose([transforms.Resize(40), *END])
jitter = transforms.Compose([transforms.Resize(40), transforms.ColorJitter(0.4, 0.4), *END])
layers = torch.nn.Sequential(transforms.Resize(40), transforms.CenterCrop(32))
generator = torch.Generator()

def two_crops(image):
    return transform(image), jitter(image)

def read(image):
    return transform(Image.fromarray(np.asarray(image)[:, ::-1].copy()))

def fail(image):
    raise KeyError("no such label")

def by_backend(image):
    return transform(image) + (torch_sink.get_image_backend() == "device")

def by_own_generator(image):
    return transform(image) + torch.rand((), generator=generator)

def ragged(image):
    return transforms.functional.to_tensor(image)

small = torch.zeros(3, 8, 8, dtype=torch.uint8)

def read_in_pieces(image):
    pieces = transforms.functional.five_crop(transforms.functional.to_pil_image(small), 4)
    return sum(torch.roll(transforms.functional.pil_to_tensor(piece), 1) for piece in pieces * 10)

def make_loader():
    return DataLoader(ImageFolder("photos", transform), 4, num_workers=1, collate_fn=gathered)

def make_dataset(folder="photos"):
    return ImageFolder(folder, transform)

def gathered(samples):
    return {"images": torch.stack([image for image, _ in samples])}

class Photos(ImageFolder):
    def __init__(self):
        super().__init__("photos", transform)

class Folder(ImageFolder):
    pass

class Stream(IterableDataset):
    def __iter__(self):
        yield from make_dataset("photos")

def of_its_own(image):
    return torch.zeros(3, 8, 8)

empty = torch.utils.data.TensorDataset(torch.zeros(0, 3))
too_few = DataLoader(torch.utils.data.TensorDataset(torch.zeros(3, 3)), 9, drop_last=True)

def make_sink():
    return torch_sink.SinkLoader(make_loader(), on_decode_error="skip")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user: a module `train`, and JPEG files of one size in `photos`."""
    (tmp_path / "train.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_module_of_mine\ntransform = None\n")
    (tmp_path / "photos" / "one").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for seed in range(FILES):
        make_photo(90, 60, seed).save(tmp_path / "photos" / "one" / f"{seed}.jpg", quality=80 + seed)
    (tmp_path / "adopted.py").write_text(f"{MODULE}\ntorch_sink.set_image_backend('device')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Other tests may have imported a module of that name.
    before = {name: sys.modules.pop(name, None) for name in ("train", "adopted")}
    yield tmp_path
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def encoded_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.jpg"))


def printed_row(text: str, name: str) -> list[str]:
    """The cells of a table's row."""
    line = next(line for line in text.splitlines() if line.startswith(f"  {name}  ") and "#" not in line)
    return re.split(r"  +", line.strip())


def number(pattern: str, text: str) -> float:
    """The number that a report says, with commas or without."""
    found = re.search(pattern, text)
    assert found is not None
    return float(found[1].replace(",", ""))


def explained(name: str, device: str, workers: int = 1) -> explain.Explained:
    return explain.explain(open_pipeline(name, "photos", FILES), device, workers)


def test_the_command_explains_a_users_transform(folder: Path) -> None:
    options = ["--device", "cuda", "--workers", "1", "--batch-size", str(FILES)]
    command = ["-m", "torch_sink", "explain", "photos", "--pipeline", "train:transform", *options]
    finished = warm.run(*command, timeout=300)
    assert finished.returncode == 0, finished.stderr
    printed = finished.stdout
    with torch_sink.image_backend("device", device="meta"):
        bench.seed_everything(0)
        *_, batch = next(open_pipeline("train:transform", "photos", FILES).batches())
    recorded = Counter(op.name for ops in batch.program.packed.calls() for op in ops)
    assert recorded == {"pil.resize": FILES, "pil.crop": FILES, "pil.transpose": FILES, "to_tensor": FILES}
    for name, count in recorded.items():
        assert printed_row(printed, name) == [name, str(count)]
    assert f"-> float32 [{FILES}, 3, {SIDE}, {SIDE}]" in printed
    assert "none: every transform can run on the GPU" in printed
    assert f"Launches of a batch: {launches_of(batch.program).total()} (" in printed
    read, handed_over = encoded_bytes(folder) / FILES, batch.program.packed.blob.nbytes / FILES
    assert f"it reads {read:,.0f} bytes of its file and hands over {handed_over:,.0f} bytes a sample\n" in printed
    cost = number(r"a sample costs it ([\d.]+) ms of CPU time", printed)
    assert number(r"it makes ([\d,]+) images a second at most", printed) == pytest.approx(1e3 / cost, rel=0.02)
    assert number(r"a data worker here ([\d.]+) ms\s+recorded", printed) == cost


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["transform", "jitter", "two_crops"])
def test_launches_are_those_that_a_batch_makes(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(f"train:{name}", "cuda")
    launched: Counter[str] = Counter()
    monkeypatch.setattr(Launcher, "__call__", lambda launcher, *_, **__: launched.update([launcher.name]))
    monkeypatch.setattr(Launcher, "prepared", lambda launcher, *_, **__: lambda *_: launched.update([launcher.name]))
    with torch_sink.image_backend("device", device="meta"):
        for program in found.programs:
            ProgramOnDevice(program, META).make([(batch, Wanted(META)) for batch in program.batches])
            jpegs, block = program.jpegs, torch.empty(program.block.shape, dtype=torch.uint8, device=META)
            launch_jpegs(jpegs, block, torch.empty(jpegs.pixels_bytes, dtype=torch.uint8, device=META))
    assert launched.total() == sum(launches_of(program).total() for program in found.programs)
    assert f"Launches of a batch: {launched.total()} (" in explain.report_of(found).as_text()


@pytest.mark.usefixtures("unmeasured")
def test_what_falls_back_and_how_to_mend_it(folder: Path) -> None:
    found = explained("train:read", "cuda")
    assert found.fallbacks == {("pixels of a Pillow image", "read by other code: train.read"): FILES}
    text = explain.report_of(found).as_text()
    assert f"{FILES} x pixels of a Pillow image: read by other code: train.read" in text
    assert "-> use torchvision's transform of the same effect" in text
    assert "Fix the fallbacks first" in text
    # The pixels travel, and nothing is decoded behind the worker.
    assert found.worker.bytes_handed_over >= 3 * 90 * 60
    assert [launches_of(program)["decoder"] for program in found.programs] == [0]


@pytest.mark.usefixtures("unmeasured")
def test_a_pipeline_of_which_nothing_is_recorded(folder: Path) -> None:
    found = explained("train:of_its_own", "cuda")
    text = explain.report_of(found).as_text()
    assert (found.batches, found.fallbacks) == ([], {})
    said = " ".join(text.split())
    assert "Nothing of this pipeline is recorded, so torch_sink cannot speed it up. train:of_its_own gave" in said
    assert f"train:of_its_own gave float32 [{FILES}, 3, 8, 8]" in said
    assert 'Image.open(path).convert("RGB")' in said
    assert "support" not in said
    assert "pays" not in said
    # Its values travel as they are.
    assert found.worker.bytes_handed_over == 4 * 3 * 8 * 8


@pytest.mark.slow
def test_whether_the_image_backend_pays(folder: Path) -> None:
    pointless = explained("train:read_in_pieces", "cpu")
    assert pointless.beside_stock.endswith("leave the image backend at 'PIL' for this dataset.")
    for path in folder.rglob("*.jpg"):  # so large that no other work on the machine hides it
        make_photo(1000, 750, int(path.stem)).save(path)
    pays = explained("train:jitter", "cuda")
    said = re.search(r"a data worker here ([\d.]+) ms recorded, and ([\d.]+) ms in stock code", pays.beside_stock)
    assert 1000 * pays.worker.seconds == pytest.approx(float(said[1]), abs=0.001)
    assert float(said[1]) < float(said[2])
    assert pays.beside_stock.endswith("the image backend pays.")
    assert pays.beside_stock in " ".join(explain.report_of(pays).as_text().split())


def test_the_page_gives_each_word_of_the_reports_a_meaning(folder: Path) -> None:
    """And "recording" is none of them: it would mean what a worker does on one side, and both sides at once."""
    page = (ROOT / "docs" / "explain.md").read_text().partition("## The words of both reports")[2].partition("\n## ")[0]
    words = {word for cell in re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE) for word in cell.split(", ")}
    spread = {"least": 1.1, "p50": 1.2, "most": 1.3}
    cost = {f"{side}_ms": spread for side in ("stock", "torch_sink", "on_cpu")}
    cost |= {"ratio": spread, "on_cpu_ratio": spread, "batch_size": 4, "fallbacks": {}}
    assert {head.strip() for head in worker_cost_table({"a": cost}).head} - words == {"pipeline", "batch"}
    found = explained("train:jitter", "cuda")
    text = explain.report_of(found).as_text()
    said = " ".join(f"{text} {said_beside_stock(cost)} {said_beside_stock(cost, on_cpu=True)}".split())
    assert "the image backend pays" in words
    assert "the image backend pays" in said
    assert re.search(r"The workers make [\d,]+ images a second at most", said)
    assert "at most" in words
    assert not re.search(r"\brecording\b", said, re.IGNORECASE)


def test_what_stock_code_cannot_do_is_not_compared(folder: Path) -> None:
    (folder / "photos" / "one" / "0.jpg").write_bytes(b"no image")
    with torch_sink.image_backend("device", device="meta", on_decode_error="skip"):
        found = explained("train:make_dataset", "cuda")
    assert found.beside_stock.startswith("Stock code cannot be measured beside it: ")
    assert found.worker.seconds > 0


def test_the_policy_of_a_sink_loader_holds_and_stock_s_error_takes_a_line(folder: Path) -> None:
    """Also where it is the error of a data worker."""
    (folder / "photos" / "one" / "0.jpg").write_bytes(b"no image")
    found = explain.explain(open_pipeline("train:make_sink", None), "cuda")
    assert found.beside_stock.startswith("Stock code cannot be measured beside it: train:make_sink raised ")
    assert "photos/one/0.jpg" in found.beside_stock
    assert not re.search(r"Traceback|File \"|\^\^|\n", found.beside_stock)
    with pytest.raises(ValueError, match=r"photos/one/0\.jpg"):
        explain.explain(open_pipeline("train:make_loader", None), "cuda")


def test_every_reason_has_a_remedy() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = page.partition("## Reasons in the fallback report")[2].partition("\n## ")[0]
    reasons = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(reasons) > 8
    assert [reason for reason in reasons if "troubleshooting" in explain.remedy_for(reason)] == []


@pytest.mark.usefixtures("unmeasured")
def test_workers_count_where_each_has_a_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "usable_cores", lambda: 4)
    for workers, rate in ((1, 1_000), (3, 3_000), (10_000, 4_000)):
        found = explained("train:transform", "cuda", workers)
        assert (found.workers, found.images_per_second) == (workers, pytest.approx(rate))
        assert f"{rate:,} images a second at most" in explain.report_of(found).as_text()


@pytest.mark.usefixtures("unmeasured")
def test_nothing_is_said_about_the_time_of_a_gpu(folder: Path) -> None:
    for name in ("transform", "jitter", "read", "of_its_own"):
        text = explain.report_of(explained(f"train:{name}", "H200")).as_text().lower()
        assert not re.search(r"model(l)?ed|assumed:|gb/s|h100|h200", text)


def test_on_the_cpu_workers_make_the_pixels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, load = folder / "decoded", JpegImagePlugin.JpegImageFile.load

    def noted(image: JpegImagePlugin.JpegImageFile) -> Any:
        if torch_sink.get_image_backend() == "device":  # else it is the worker of stock code beside it
            with decoded.open("a") as file:  # a worker is another process
                file.write(".")
        return load(image)

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", noted)
    explained("train:jitter", "cuda")
    assert not decoded.exists()
    on_cpu = explained("train:jitter", "cpu")
    assert len(decoded.read_text()) >= FILES
    assert on_cpu.worker.bytes_handed_over == 3 * 4 * SIDE**2
    assert "Launches of a batch: 0" in explain.report_of(on_cpu).as_text()


@pytest.mark.parametrize(
    ("name", "given", "images", "kind"),
    [
        ("train:transform", "photos", FILES, FolderImages),
        ("train:layers", "photos", FILES, FolderImages),
        ("train:make_loader", None, 4, dict),
        ("train:make_sink", None, 4, dict),
        ("train:make_dataset", None, FILES, list),
        ("train:Photos", None, FILES, list),
        ("train:Stream", None, FILES, list),
    ],
)
def test_what_a_pipeline_can_be(name: str, given: str | None, images: int, kind: type, folder: Path) -> None:
    pipeline = open_pipeline(name, given, FILES)
    if name == "train:layers":
        assert isinstance(pipeline.dataset, kind)
        return
    with torch_sink.image_backend("device", device="meta"):
        count, _, batch = next(pipeline.batches())
    assert count == images
    assert any(type(leaf) is LazyBatch and len(leaf) == images for leaf in torch.utils._pytree.tree_leaves(batch))
    assert isinstance(pipeline.dataset if kind is FolderImages else batch, kind)


# arguments: what the message says
MISTAKES = {
    "explain nowhere": r"nowhere does not exist; give a folder that holds images",
    "explain train.py": r"train.py is a file; give a folder that holds images",
    "explain empty": r"no image in empty or below it; looked for .jpg",
    "explain": r"v1 train is a transform, which needs images: give the folder",
    "explain photos --pipeline transform": r"unknown pipeline 'transform'; choose one of 'v1 train'.*your own as file.py:name or module:name",
    "explain photos --pipeline train.py": r"train.py is a file: say which of its names is the pipeline, as train.py:transform",
    "explain photos --pipeline trian:transform": r"No module named 'trian'; modules are found in this folder and on PYTHONPATH",
    "explain photos --pipeline trian.py:transform": r"there is no file trian.py; there are adopted.py, broken.py, train.py",
    "explain photos --pipeline train.py:transfrom": r"train.py has no `transfrom` when it is imported: it has transform",
    "explain photos --pipeline broken:transform": r"ModuleNotFoundError: No module named 'no_such_module_of_mine' \(broken.py, line 1\)",
    "explain photos --pipeline train:transfrom": r"train.py has no `transfrom` when it is imported: it has transform",
    "explain photos --pipeline train:SIZE": r"train:SIZE is of type int; name a transform, .* a Dataset, a DataLoader or a SinkLoader",
    "explain photos --pipeline train:Folder": r"train:Folder is a class that needs arguments; name a transform, .* or a function that returns one",
    "explain --pipeline train:too_few": r"train:too_few gives no batch: give .*; with drop_last=True a batch needs 9 of them",
    "explain photos --pipeline train:fail": r"train:fail raised KeyError: 'no such label' \(train.py, line 24\)",
    "explain photos --pipeline train:Image.open": r"raised .*it got an image; a function that makes a dataset takes no parameters",
    "explain photos --pipeline train:layers": r"found <class '.*Image'>.*end its transform with transforms.ToTensor\(\)",
    "explain --pipeline train:empty": r"train:empty gives no batch: give a dataset that has samples\n",
    "explain photos --device b300": r"device 'b300' is not known; \"cuda\" says what happens where a GPU makes the pixels",
    "explain photos --workers 0": r"--workers 0 make no batches; give 1 or more",
    "explain photos --batch-size 0": r"a batch of 0 images cannot be made; give --batch-size 1 or more",
    "bench photos --json nowhere/b.json": r"lies in no folder: create nowhere first",
    "bench nowhere": r"nowhere does not exist",
    "bench photos --pipeline train:fail": r"train:fail raised KeyError",
    "bench photos --workers -1": r"--workers -1 cannot be; give 1 or more, or 0",
    "bench photos --picture photos": r"photos is a folder; give the path of a file",
    "explane photos": r"invalid choice: 'explane'.*explain",
}  # fmt: skip


@pytest.mark.parametrize("arguments", MISTAKES)
def test_what_a_mistake_says(arguments: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(arguments.split())
    except SystemExit as error:  # of argparse
        status = error.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert re.search(MISTAKES[arguments], printed.err, re.DOTALL), printed.err
    assert "Traceback" not in printed.err


def test_images_of_many_sizes_say_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_photo(50, 60, seed=9).save(folder / "photos" / "one" / "9.jpg")
    assert main(["explain", "photos", "--pipeline", "train:ragged"]) == 2
    assert "the images of a batch need one size: add transforms.Resize" in capsys.readouterr().err


def test_bench_of_a_users_pipeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--workers", "0", "--json", "b.json", "--picture", "b.png"]
    assert main(["bench", "photos", "--pipeline", "train:jitter", *options]) == 0
    printed = capsys.readouterr().out
    found = json.loads((folder / "b.json").read_text())
    assert found["photographs"] == {"count": FILES, "mean_bytes": round(encoded_bytes(folder) / FILES)}
    assert found["equal"] == {"train:jitter": True}
    assert "yes, every value" in printed
    cost = found["worker_cost"]["train:jitter"]
    assert cost["ratio"]["p50"] > 1
    row = [f"{cost[key]['p50']:.3f}" for key in ("stock_ms", "torch_sink_ms")]
    assert printed_row(printed, "train:jitter")[1:3] == row or row[0] in printed
    for name in ("stock", "torch_sink"):
        assert f"{found['loader'][name]['images_per_second']:,.0f}" in printed
    assert (folder / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "equal"), [("transform", True), ("by_backend", False), ("by_own_generator", None)])
def test_equal_pixels(name: str, equal: bool | None, folder: Path) -> None:
    assert bench.is_equal(open_pipeline(f"train:{name}", "photos", FILES)) is equal


def test_stock_code_is_measured_where_a_module_has_set_the_backend(folder: Path) -> None:
    kinds: list[type] = []

    def noted(samples: Any) -> Any:
        kinds.append(type(samples[0]))
        return torch.utils.data.default_collate(samples)

    pipeline = open_pipeline("adopted:transform", "photos", FILES)
    try:
        assert torch_sink.get_image_backend() == "device"
        pipeline.batching["collate_fn"] = Counted(noted, is_batch=True)
        bench.measure_loader(pipeline, workers=0, turns=1, seconds=0.01)
        assert kinds[0] is torch.Tensor
        assert kinds[-1] is torch_sink.LazyTensor
    finally:
        torch_sink.set_image_backend("PIL")


def test_without_a_command_the_help_says_what_each_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    for command in ("doctor", "support", "explain", "bench", "warm"):
        assert re.search(rf"^    {command} +[A-Z]", printed, re.MULTILINE)
    assert "--pipeline train:transform" in printed
