"""`--pipeline module:name` of scripts as people have them: a file is read before it is imported, and dicts have keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from torch_sink.cli import main
from torch_sink.cli.named import named

pytestmark = pytest.mark.once

IMPORTED = "imported.txt"  # written by a script when it is imported
HEAD = f"open({IMPORTED!r}, 'w').close()\nfrom torch.utils.data import DataLoader\n"
LOADER = "loader = DataLoader([1.0, 2.0, 3.0, 4.0], 2)\n"
TRAINING = "for epoch in range(2):\n    for batch in loader:\n        loss = model(batch)\n        loss.backward()\n"
GUARD = 'if __name__ == "__main__":\n'

# A script, the name that is asked for, and what is said before the script is imported.
REFUSED = {
    "trains": (HEAD + LOADER + TRAINING, "loader", r"importing script.py would train, by loss.backward\(\) \(line 7\)"),
    "main": (
        f"{HEAD}{LOADER}def main():\n    learn()\ndef learn():\n    for batch in loader:\n        batch.backward()\nmain()\n",
        "loader",
        r"would call main\(\), and so call learn\(\), and so train, by batch.backward\(\) \(line 9\)",
    ),
    "main from elsewhere": (f"{HEAD}from other import main\n{LOADER}main()\n", "loader", r"would call main\(\) \(line 5\)"),
    "loop.run": (f"{HEAD}{LOADER}loop.run(loader, epochs=2)\n", "loader", r"would train, by loop.run\(\) \(line 4\)"),
    "Trainer": (f"{HEAD}{LOADER}trainer.train()\n", "loader", r"would train, by trainer.train\(\)"),
    "arguments": (f"{HEAD}args = parser.parse_args()\n{LOADER}", "loader", r"read torch_sink's own command line"),
    "guarded": (
        f"{HEAD}{GUARD}    {LOADER}",
        "loader",
        r'made under `if __name__ == "__main__":`, which an import does not run; make it in a function `def '
        r"make_loader\(\):` that returns the loader, named as script:make_loader, or put `with torch_sink.explain",
    ),
    "local": (f"{HEAD}def main():\n    {LOADER}", "loader", r"it is a variable of the function `main`; make it in"),
    "misspelled": (HEAD + LOADER, "laoder", r"script.py has no `laoder` when it is imported: it has loader"),
}  # fmt: skip
# Scripts that can be imported, though a part of them looks like work.
TAKEN = {
    "guarded training": f"{HEAD}{LOADER}{GUARD}    loader.fit()\n    loss.backward()\n",
    "training in functions": f"{HEAD}{LOADER}def main():\n    loss.backward()\nlater = lambda: main()\n",
    "subprocess.run": f"{HEAD}import subprocess as loop_runner\nloop_runner.run(['true'])\n{LOADER}",
    "in a branch": f"{HEAD}try:\n    import no_such_module\nexcept ImportError:\n    {LOADER}",
    "in else of the guard": f"{HEAD}{GUARD}    pass\nelse:\n    {LOADER}",
    "by globals": f"{HEAD}globals()['loader'] = DataLoader([1.0, 2.0], 2)\n",
    "by global": f"{HEAD}def make():\n    global loader\n    {LOADER}make()\n",
    "from another file": f"{HEAD}from other import *\n",
    "by __getattr__": f"{HEAD}def __getattr__(name):\n    return DataLoader([1.0, 2.0], 2)\n",
    "in a loop": f"{HEAD}for loader in [DataLoader([1.0, 2.0], 2)]:\n    pass\n",
}
SEVERAL = HEAD + (
    "loaders = {name: DataLoader([1.0, 2.0], size) for name, size in (('train', 1), ('val', 2))}\n"
    "def make_loaders():\n    return [*loaders.values()]\n"
    "class config:\n    data = {0: {'val': loaders['val']}}\n    def __init__(self, needed): pass\n"
    "nothing = {}\nsamples = [1.0, 2.0]\n"
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "other.py").write_text(f"{HEAD}{LOADER}def main():\n    loader.backward()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("script", "other"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("command", ["explain", "bench"])
def test_what_is_needed_is_said_before_the_import(
    case: str, command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, name, said = REFUSED[case]
    (folder / "script.py").write_text(script)
    assert main([command, "--pipeline", f"script:{name}"]) == 2
    printed = capsys.readouterr().err
    assert re.search(said, printed), printed
    assert not (folder / IMPORTED).exists()


@pytest.mark.parametrize("case", TAKEN)
def test_what_can_be_imported_is(case: str, folder: Path) -> None:
    (folder / "script.py").write_text(TAKEN[case])
    assert isinstance(named("script:loader"), DataLoader)
    assert (folder / IMPORTED).exists()


def test_a_package(folder: Path) -> None:
    (folder / "script").mkdir()
    (folder / "script" / "__init__.py").write_text("")
    (folder / "script" / "data.py").write_text(f"{HEAD}{LOADER}loader.fit()\n")
    with pytest.raises(ValueError, match=r"importing data.py would train, by loader.fit\(\)"):
        named("script.data:loader")


@pytest.mark.parametrize(
    "path", ["script.py", "./script.py", "code/script.py", "{folder}/code/script.py", "code/other.py"]
)
def test_a_file_by_its_path(path: str, folder: Path) -> None:
    """Imported as where it is run: what lies beside it can be imported."""
    script = Path(path.format(folder=folder))
    script.parent.mkdir(exist_ok=True)
    script.with_name("beside.py").write_text(f"{HEAD}loaders = {{'val': DataLoader([1.0, 2.0, 3.0], 3)}}\n")
    script.write_text("from beside import loaders\n")
    try:
        assert named(f"{script}:loaders[val]").batch_size == 3
    finally:
        sys.modules.pop("beside", None)
    assert Path(sys.modules[script.stem].__file__ or "") == script.resolve()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("scrip.py", "there is no file scrip.py; there are other.py, script.py"),
        ("nowhere/script.py", "there is no file nowhere/script.py"),
        ("my-script.py", "my-script.py cannot be imported, as 'my-script' is no name of Python's: rename it"),
        ("package/inner/script.py", "belongs to a package, which lies in {folder}: run this there, with package.inner.script:loader"),
        ("random.py", "another module is called 'random', "),
        ("time.py", "another module is called 'time': rename time.py"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_imported_as_it_is(
    path: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "script.py").write_text(LOADER)
    if path not in ("scrip.py", "nowhere/script.py"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(HEAD + LOADER)
    if path.startswith("package"):
        for package in ("package", "package/inner"):
            (folder / package / "__init__.py").touch()
    assert main(["explain", "--pipeline", f"{path}:loader"]) == 2
    assert said.format(folder=folder) in capsys.readouterr().err
    assert not (folder / IMPORTED).exists()


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        ("loaders[train]", 1),
        ("loaders['val']", 2),
        ("make_loaders[0]", 1),
        ("make_loaders[1]", 2),
        ("config.data[0][val]", 2),
    ],
)
def test_one_of_several(name: str, batch_size: int, folder: Path) -> None:
    (folder / "script.py").write_text(SEVERAL)
    assert named(f"script:{name}").batch_size == batch_size


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "loaders",
            "holds 2 of them; name one: --pipeline 'script:loaders[train]' or --pipeline 'script:loaders[val]'",
        ),
        ("make_loaders", "name one: --pipeline 'script:make_loaders[0]' or --pipeline 'script:make_loaders[1]'"),
        ("loaders[test]", "script:loaders[test]: there is no [test]; it holds train, val"),
        ("make_loaders[2]", "there is no [2]; it holds 0, 1"),
        ("loaders[val][0]", "there is no [0]; a DataLoader holds nothing by names"),
        ("nothing", "script:nothing is empty"),
    ],
)
def test_which_of_several(name: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(SEVERAL)
    assert main(["explain", "--pipeline", f"script:{name}"]) == 2
    assert said in capsys.readouterr().err


def test_a_list_of_samples_is_a_dataset(folder: Path) -> None:
    (folder / "script.py").write_text(SEVERAL)
    assert named("script:samples") == [1.0, 2.0]
