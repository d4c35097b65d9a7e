"""Reads and writes checkpoints: directories that are either complete or ignored."""

from __future__ import annotations

import itertools
import json
import operator
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_sink.common.arguments import check_text
from torch_sink.common.ranks import warn
from torch_sink.errors import SinkError
from torch_sink.loop.core.author import Author
from torch_sink.loop.core.distributed import Ranks

STATE_FILE, MANIFEST_FILE, FORMAT = "state.pt", "complete.json", 1
RANK_FILE, SHARDS_FOLDER = "rank-{:05d}.pt", "shards"
# The parts that differ between processes: random generators, position in the data, gradients of an unfinished
# accumulation, and buffers, because running statistics of BatchNorm belong to the batches of one process. So do loss
# functions and parameters outside of the model, whose gradients no wrapper averages.
PER_RANK = (
    "random",
    "loader",
    "gradients",
    "other_buffers",
    "loss_fn",
    "loss_fn_buffers",
    "other_parameters",
    "other_gradients",
)
_NAME = re.compile(r"^(?P<prefix>.+)-(?P<step>\d{8,})(\.(?P<replaced>replaced)|\.older\d+)?$")


def resumed_from(path: Path) -> Author:
    """The author of what is trained from a checkpoint on."""
    manifest = read_manifest(path)
    written = manifest["written"]
    past = [(name, step) for name, step in written.get("past", ())]
    return Author(past=(*past, (written["run"], manifest["step"])))


def check_prefix(prefix: str) -> None:
    """Raise unless `prefix` can begin the name of a checkpoint's directory."""
    check_text("prefix", prefix, "a name without '/'")
    if not prefix or "/" in prefix:
        raise ValueError(f"prefix={prefix!r}: pass a name without '/'")


def write_checkpoint(
    directory: Path,
    prefix: str,
    step: int,
    state: dict[str, Any],
    *,
    ranks: Ranks,
    author: Author,
    write_shards: Callable[[str], None] | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint so that after a kill older ones are usable, and an incomplete one does not look complete.

    1. Files are written to a directory with a temporary name and synced to the disk.
    2. The manifest is written last, with names and sizes: a directory that lacks or contradicts it is incomplete.
    3. The directory is renamed to its final name; an older one of the same step is renamed first and then deleted, or
       kept under another name if another training has written it.

    The manifest says which training wrote it, and its place in the order in which those of the directory were written.
    Clocks have no part in that.

    With more than one process, all must call this, with a shared file system: rank 0 writes the common parts and each
    rank its own ones (`PER_RANK`).

    Args:
        author: the training; that of rank 0 counts.
        write_shards: writes a sharded model to the folder that it is called with.
        about: plain values that the manifest holds too.

    Returns:
        Path of the checkpoint.
    """
    final, many, is_first = directory / f"{prefix}-{step:08d}", ranks.size > 1, ranks.rank == 0
    temporary = directory / f".{final.name}.tmp"
    try:
        if is_first:
            directory.mkdir(parents=True, exist_ok=True)
            for path in directory.iterdir():
                if re.fullmatch(rf"\.{re.escape(prefix)}-\d+\.tmp", path.name):  # left by a process that was killed
                    shutil.rmtree(path, ignore_errors=True)
            temporary.mkdir()
        own = {name: state[name] for name in PER_RANK if name in state} if many else {}
        if many:
            ranks.wait()
            _write_tensors(temporary / RANK_FILE.format(ranks.rank), own)
        if write_shards is not None:
            write_shards(str(temporary / SHARDS_FOLDER))
        if is_first:
            _write_tensors(temporary / STATE_FILE, {name: value for name, value in state.items() if name not in own})
        if many:
            ranks.wait()
        if is_first:
            # A network file system may show old sizes of other ranks' files.
            mine = {temporary / STATE_FILE, temporary / RANK_FILE.format(0)}
            sizes = {
                str(path.relative_to(temporary)): path.stat().st_size if path in mine else None
                for path in sorted(temporary.rglob("*"))
                if path.is_file()
            }
            versions = {"format": FORMAT, "ranks": ranks.size, "torch": torch.__version__}
            place = max(_places(directory), default=0) + 1
            written = {"run": author.run, "past": author.past, "place": place}
            manifest = {**(about or {}), "step": step, "written": written, **versions, "files": sizes}
            _complete(temporary, final, manifest, author)
        if many:
            ranks.wait()
    except BaseException:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # frees a full disk
        raise
    return final


def _write_tensors(path: Path, state: dict[str, Any]) -> None:
    with open(path, "wb") as file:  # on a full disk torch.save(path) would raise an unclear error, this raises OSError
        torch.save(state, file)
    _sync(path)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe:
        raise SinkError(
            f"the state holds {', '.join(unsafe)}, which would not load with weights_only=True; keep tensors and plain "
            "numbers in state_dict(), or name the class to torch.serialization.add_safe_globals"
        )


def _complete(temporary: Path, final: Path, manifest: dict[str, Any], author: Author) -> None:
    (temporary / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    _sync(temporary / MANIFEST_FILE)
    _sync(temporary)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if _is_of_another(final, author):
            free = (final.with_name(f"{final.name}.older{number}") for number in itertools.count(1))
            kept = next(path for path in free if not path.exists())
            os.replace(final, kept)
            warn("%s, which another training has written, is now %s", final, kept.name)
        else:
            os.replace(final, replaced)
    os.replace(temporary, final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_of_another(path: Path, author: Author) -> bool:
    """Whether another training has written a checkpoint here."""
    try:
        return not has_written(author, read_manifest(path))
    except FileNotFoundError:
        return False  # there is none that was ever complete
    except ValueError:
        return True


def has_written(author: Author, manifest: dict[str, Any]) -> bool:
    """Whether a checkpoint is of this training, or was on the way to the state that it was resumed from."""
    run, step = manifest["written"]["run"], manifest.get("step", 0)
    return bool(run == author.run) or any(run == name and step <= left_at for name, left_at in author.past)


def _places(directory: Path) -> Iterator[int]:
    """The places of all checkpoints of a directory, damaged ones too, in the order in which they were written."""
    for path in directory.iterdir():
        if _NAME.match(path.name) is not None:
            with suppress(OSError, ValueError):
                yield read_manifest(path)["written"]["place"]


def list_checkpoints(directory: Path, prefix: str | None = None) -> list[Path]:
    """The complete checkpoints under `directory`, in the order in which they were written.

    Those of earlier versions, which did not keep the order, come first, lowest step first. Incomplete ones are left
    out, with a warning.
    """
    return [one.path for one in read_checkpoints(directory, prefix)]


class Checkpoint(NamedTuple):
    """A complete checkpoint; the latest is the largest."""

    order: tuple[int, int, bool, float]
    path: Path
    manifest: dict[str, Any]


def read_checkpoints(directory: Path, prefix: str | None = None) -> list[Checkpoint]:
    """The checkpoints of `list_checkpoints` with their manifests."""
    found: list[Checkpoint] = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.match(path.name)
        if match is None or path.name.startswith(".") or not (path / MANIFEST_FILE).is_file():
            continue
        try:
            manifest = read_manifest(path)
            problem = _damage(path, manifest)
        except ValueError:
            manifest, problem = {}, f"{MANIFEST_FILE} is no JSON"
        if problem is not None:
            warn("%s is left out: %s", path, problem)
        elif prefix is None or match["prefix"] == prefix:
            place, step = manifest["written"]["place"], int(match["step"])
            order = place, step, match["replaced"] is None, path.stat().st_mtime
            found.append(Checkpoint(order, path, manifest))
    return sorted(found, key=operator.attrgetter("order"))


def own_checkpoints(directory: Path, author: Author, prefix: str | None = None) -> list[Checkpoint]:
    """The checkpoints of `read_checkpoints` that a training has written."""
    return [one for one in read_checkpoints(directory, prefix) if has_written(author, one.manifest)]


def read_manifest(path: Path) -> dict[str, Any]:
    """Step and files of a checkpoint, and the plain values that were saved with them.

    "written" says by which training, and at which place in the order of the directory; None and 0 for a checkpoint of
    an earlier version, which kept neither.
    """
    manifest: dict[str, Any] = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    written = manifest.get("written")
    manifest["written"] = {"run": None, "place": 0} | (written if isinstance(written, dict) else {})
    return manifest


def newest_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint under `directory` that was written last, or None."""
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file; pass the directory that checkpoints were saved to")
    if (directory / MANIFEST_FILE).is_file():
        raise ValueError(f"{directory} is itself a checkpoint; pass the directory that it lies in: {directory.parent}")
    return next(reversed(list_checkpoints(directory)), None)


def _damage(path: Path, manifest: dict[str, Any]) -> str | None:
    """What is missing in a checkpoint with a manifest; None if it is complete."""
    for name, size in manifest.get("files", {}).items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if size is not None and file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes of {size}"
    return None


def read_checkpoint(path: Path, ranks: Ranks) -> dict[str, Any]:
    """Load the state of a complete checkpoint, without shards; its tensors are on the CPU."""
    manifest = read_manifest(path)
    if manifest.get("format") != FORMAT:
        raise SinkError(f"{path} has checkpoint format {manifest.get('format')}, this version reads {FORMAT}")
    if manifest["ranks"] != ranks.size:
        raise SinkError(
            f"{path} was written by {manifest['ranks']} processes and this run has {ranks.size}; the positions in the "
            "data belong to processes, so resume with as many"
        )
    state = _read_tensors(path / STATE_FILE)
    if ranks.many:
        state.update(_read_tensors(path / RANK_FILE.format(ranks.rank)))
    return state


def _read_tensors(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise SinkError(f"{path} cannot be read; delete {path.parent} to resume from the one before it") from error
    return state


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint, manifest first, so that a kill in between leaves one that is known to be incomplete."""
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are written to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
