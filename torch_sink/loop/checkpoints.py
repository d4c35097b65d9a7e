"""Reads and writes checkpoints: directories that are either complete or ignored."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_sink.errors import SinkError
from torch_sink.loop.core.distributed import Ranks

_log = logging.getLogger("torch_sink")
STATE_FILE, MANIFEST_FILE, FORMAT = "state.pt", "complete.json", 1
RANK_FILE, SHARDS_FOLDER = "rank-{:05d}.pt", "shards"
# The parts that differ between processes: random generators, position in the data, gradients of an unfinished
# accumulation, and buffers, because running statistics of BatchNorm belong to the batches of one process.
PER_RANK = ("random", "loader", "gradients", "other_buffers")
_NAME = re.compile(r"^(?P<prefix>.+)-(?P<step>\d{8,})(?P<replaced>\.replaced)?$")


def write_checkpoint(
    directory: Path,
    prefix: str,
    step: int,
    state: dict[str, Any],
    *,
    ranks: Ranks,
    write_shards: Callable[[str], None] | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint so that after a kill older ones are usable, and an incomplete one does not look complete.

    1. Files are written to a directory with a temporary name and synced to the disk.
    2. The manifest is written last, with names and sizes: a directory that lacks or contradicts it is incomplete.
    3. The directory is renamed to its final name; an older one of the same step is renamed first and then deleted.

    With more than one process, all must call this, with a shared file system: rank 0 writes the common parts and each
    rank its own ones (`PER_RANK`).

    Args:
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
            files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
            sizes = {str(path.relative_to(temporary)): path.stat().st_size if path in mine else None for path in files}
            versions = {"format": FORMAT, "ranks": ranks.size, "torch": torch.__version__}
            _complete(temporary, final, {**(about or {}), "step": step, **versions, "files": sizes})
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


def _complete(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    (temporary / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    _sync(temporary / MANIFEST_FILE)
    _sync(temporary)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        os.replace(final, replaced)
    os.replace(temporary, final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def list_checkpoints(directory: Path, prefix: str | None = None) -> list[Path]:
    """Complete checkpoints under `directory`, lowest step first; incomplete ones are left out, with a warning."""
    if not directory.is_dir():
        return []
    found: list[tuple[int, int, float, Path]] = []
    for path in directory.iterdir():
        match = _NAME.match(path.name)
        if match is None or path.name.startswith(".") or not (path / MANIFEST_FILE).is_file():
            continue
        if (problem := _damage(path)) is not None:
            _log.warning("%s is left out: %s", path, problem)
        elif prefix is None or match["prefix"] == prefix:
            found.append((int(match["step"]), match["replaced"] is None, path.stat().st_mtime, path))
    return [entry[-1] for entry in sorted(found)]


def read_manifest(path: Path) -> dict[str, Any]:
    """Step and files of a checkpoint, and the plain values that were saved with them."""
    manifest: dict[str, Any] = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    return manifest


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint under `directory`, or None."""
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file; pass the directory that checkpoints were saved to")
    if (directory / MANIFEST_FILE).is_file():
        raise ValueError(f"{directory} is itself a checkpoint; pass the directory that it lies in: {directory.parent}")
    return next(reversed(list_checkpoints(directory)), None)


def _damage(path: Path) -> str | None:
    """What is missing in a checkpoint with a manifest; None if it is complete."""
    try:
        files = read_manifest(path).get("files", {})
    except ValueError:
        return f"{MANIFEST_FILE} is no JSON"
    for name, size in files.items():
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
