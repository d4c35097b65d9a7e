"""Checkpoints as directories that are either complete or ignored, and the callback that writes them."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torch_sink.errors import SinkError
from torch_sink.loop.callbacks import Callback, RunContext, check_monitor, save_checkpoint, was_told_to_stop
from torch_sink.loop.core.arguments import check_bool, check_choice, check_count
from torch_sink.loop.core.distributed import Ranks

_log = logging.getLogger("torch_sink")
STATE_FILE, MANIFEST_FILE, FORMAT = "state.pt", "complete.json", 1
RANK_FILE, SHARDS_FOLDER = "rank-{:05d}.pt", "shards"
# What each process has for itself: its draws, its share of the data, its part of an unfinished accumulation, and its
# buffers: the running statistics of BatchNorm are those of its own batches, unless DistributedDataParallel sends them.
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
    """Write a checkpoint so that a kill at any moment leaves the older ones usable and no half one in their place.

    1. Files go to a directory with a temporary name and are synced to the disk.
    2. The manifest is written last, with names and sizes: a directory without it, or unlike it, is torn.
    3. The directory is renamed to its final name; an older one of the same step steps aside until that is done.

    With more than one process, rank 0 writes what all share and each rank what is its own, to a file system that all
    see; all must call. `write_shards` writes a sharded model below the path that it is given. The manifest also holds
    the plain values of `about`.
    """
    final = directory / f"{prefix}-{step:08d}"
    temporary = directory / f".{final.name}.tmp"
    try:
        _write(temporary, final, prefix, state, ranks, write_shards, {**(about or {}), "step": step})
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk, the room is needed
        raise
    return final


def _write(
    temporary: Path,
    final: Path,
    prefix: str,
    state: dict[str, Any],
    ranks: Ranks,
    write_shards: Callable[[str], None] | None,
    about: dict[str, Any],
) -> None:
    directory = final.parent
    if ranks.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            if re.fullmatch(rf"\.{re.escape(prefix)}-\d+\.tmp", path.name):  # left by a process that was killed
                shutil.rmtree(path, ignore_errors=True)
        temporary.mkdir()
    ranks.wait()
    own = {name: state[name] for name in PER_RANK if name in state} if ranks.many else {}
    if ranks.many:
        _write_tensors(temporary / RANK_FILE.format(ranks.rank), own)
    if write_shards is not None:
        write_shards(str(temporary / SHARDS_FOLDER))
    if ranks.rank == 0:
        _write_tensors(temporary / STATE_FILE, {name: value for name, value in state.items() if name not in own})
    ranks.wait()
    if ranks.rank == 0:
        mine = {temporary / STATE_FILE, temporary / RANK_FILE.format(0)}  # sizes of others' files may look old here
        files = [path for path in sorted(temporary.rglob("*")) if path.is_file()]
        sizes = {str(path.relative_to(temporary)): path.stat().st_size if path in mine else None for path in files}
        about = {**about, "format": FORMAT, "ranks": ranks.size, "torch": torch.__version__}
        _complete(temporary, final, {**about, "files": sizes})
    ranks.wait()


def _write_tensors(path: Path, state: dict[str, Any]) -> None:
    with open(path, "wb") as file:  # a full disk is then an OSError that says so
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
    """Complete checkpoints under `directory`, oldest step first; torn ones are left out."""
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


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint under `directory`, or None."""
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file; pass the directory that checkpoints were saved to")
    if (directory / MANIFEST_FILE).is_file():
        raise ValueError(f"{directory} is itself a checkpoint; pass the directory that it lies in: {directory.parent}")
    return next(reversed(list_checkpoints(directory)), None)


def _damage(path: Path) -> str | None:
    """What is missing of a checkpoint that has a manifest, or None."""
    try:
        files = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8")).get("files", {})
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
    """Load the state of a complete checkpoint, without shards; tensors arrive on the CPU."""
    manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
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
    """Delete a checkpoint, manifest first, so that a kill half-way leaves a torn one and not a wrong one."""
    (path / MANIFEST_FILE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or the entries of a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how many to keep.

    Attributes:
        save_checkpoint_steps: save at exactly every so many steps; sinks shrink to meet them. None: see below.
        save_checkpoint_seconds: without `save_checkpoint_steps`, save at a sink's end when so many seconds have
            passed since the last; 0 saves at each sink's end.
        keep_checkpoint_max: keep the newest so many, 0 keeps all.
        exception_save: also save, to a directory named `{prefix}_breakpoint-{step:08d}`, when an error ends the run
            between two sinks: an error of a callback (such as NonFiniteLoss) or of the data. The error is raised all
            the same. An error inside a step leaves nothing that could be saved.

    Raises:
        TypeError, ValueError: not of the type, or below the least allowed.
    """

    save_checkpoint_steps: int | None = None
    save_checkpoint_seconds: int = 0
    keep_checkpoint_max: int = 5
    exception_save: bool = False

    def __post_init__(self) -> None:
        if self.save_checkpoint_steps is not None:
            check_count("save_checkpoint_steps", self.save_checkpoint_steps, minimum=1)
        check_count("save_checkpoint_seconds", self.save_checkpoint_seconds, minimum=0)
        check_count("keep_checkpoint_max", self.keep_checkpoint_max, minimum=0)
        check_bool("exception_save", self.exception_save)


class ModelCheckpoint(Callback):
    """Writes what `StepLoop.save` writes, to directories named `{prefix}-{step:08d}`.

    A run that is stopped by a signal is saved at the step it reached. With `monitor` it saves after each evaluation
    that is among the best `keep`, nothing else, and removes the others; a resumed run knows those before it. To have
    both, pass two callbacks with a prefix each.

    Args:
        prefix: of the directories' names.
        directory: where they go; it is made if it is missing.
        config: when to save; default at each sink's end. Not with `monitor`.
        monitor: name of an evaluation result ("eval_loss", or a metric of an `Evaluation`), or None.
        mode: "min" if a smaller value is better, "max" if a larger one is. NaN is worse than any number.
        keep: how many of the best are kept.

    Raises:
        TypeError, ValueError: an argument that cannot be used; in a run, `monitor` is misspelled.
        OSError: the directory cannot be written to; found before the first step.
    """

    on_all_ranks = True

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | Path = ".",
        config: CheckpointConfig | None = None,
        *,
        monitor: str | None = None,
        mode: str = "min",
        keep: int = 1,
    ) -> None:
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            raise ValueError(f"prefix={prefix!r}: pass a name without '/'")
        if config is not None and not isinstance(config, CheckpointConfig):
            raise TypeError(f"config is a {type(config).__name__}; pass a torch_sink.CheckpointConfig")
        if config is not None and monitor is not None:
            raise ValueError(
                f"config says when to save, and monitor={monitor!r} saves after evaluations; pass two ModelCheckpoint, "
                "with a prefix each"
            )
        check_choice("mode", mode, ("min", "max"))
        check_count("keep", keep, minimum=1)
        self._prefix, self._directory = prefix, Path(directory)
        self._config = config or CheckpointConfig()
        self._monitor, self._sign, self._keep = monitor, 1.0 if mode == "min" else -1.0, keep
        self._best: list[tuple[float, Path]] = []  # the better, the smaller
        self._judged: Any = None  # the results that were looked at last
        self._saved_step = -1
        self._saved_at = 0.0
        self._context: RunContext | None = None

    def steps_to_boundary(self, step_count: int) -> int | None:
        every = self._config.save_checkpoint_steps
        return every - step_count % every if every else None

    def on_train_begin(self, run_context: RunContext) -> None:
        self._saved_step, self._saved_at = -1, time.monotonic()
        self._context = run_context
        arguments = run_context.original_args()
        if arguments.loop.ranks.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._directory).close()  # now, and not after hours
        if self._monitor is not None:
            check_monitor(self._monitor, arguments.list_callback)
            self._best = self._saved_before(arguments.loop.step_count)

    def _saved_before(self, step_count: int) -> list[tuple[float, Path]]:
        """The best checkpoints of the run that is resumed."""
        found = []
        for path in list_checkpoints(self._directory, self._prefix):
            manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
            if manifest["step"] <= step_count and self._monitor in manifest.get("monitored", {}):
                found.append((self._rank_of(manifest["monitored"][self._monitor]), path))
        return found

    def _rank_of(self, value: float) -> float:
        return math.inf if math.isnan(value) else self._sign * value

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._keep_the_best(run_context)

    def _keep_the_best(self, run_context: RunContext) -> None:
        """Save after an evaluation that nobody has looked at, if its result is among the best."""
        arguments = run_context.original_args()
        results, before = arguments.eval_results, self._judged
        self._judged = results
        if self._monitor is None or results is before or self._monitor not in (results or {}):
            return
        value = float(results[self._monitor])
        if arguments.loop.ranks.many:
            value = arguments.loop.ranks.gather(value)[0]
        rank = self._rank_of(value)
        if len(self._best) >= self._keep and rank >= max(self._best)[0]:
            return
        self._save(run_context, monitored={self._monitor: value})
        path = Path(arguments.latest_ckpt_file)
        self._best = sorted([(rank, path), *(one for one in self._best if one[1] != path)])
        for _, worse in self._best[self._keep :]:
            if arguments.loop.ranks.rank == 0:
                remove_checkpoint(worse)
        del self._best[self._keep :]

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._monitor is not None:
            self._keep_the_best(run_context)
            return
        loop, every = run_context.original_args().loop, self._config.save_checkpoint_steps
        if loop.step_count % every == 0 if every else self._is_time(loop.ranks):
            self._save(run_context)

    def on_train_end(self, run_context: RunContext) -> None:
        if self._monitor is None and was_told_to_stop(run_context.original_args()):
            self._save(run_context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context, self._context = self._context, None
        if context is None or not isinstance(error, Exception) or not self._config.exception_save:
            return
        arguments = context.original_args()
        if arguments.inside_sink or arguments.loop.ranks.many:
            where = "in the middle of a sink" if arguments.inside_sink else "on one process of several"
            _log.warning("no checkpoint of the failed run: the error came %s", where)
            return
        try:
            self._save(context, prefix=f"{self._prefix}_breakpoint")
        except Exception:
            _log.warning("no checkpoint of the failed run: saving it failed too", exc_info=True)

    def _is_time(self, ranks: Ranks) -> bool:
        """Whether enough time has passed, by the clock of any rank: all write a checkpoint, or none."""
        due = time.monotonic() - self._saved_at >= self._config.save_checkpoint_seconds
        return ranks.any_of([due])[0] if ranks.many and self._config.save_checkpoint_seconds else due

    def _save(self, run_context: RunContext, prefix: str | None = None, **about: Any) -> None:
        arguments = run_context.original_args()
        if arguments.loop.step_count == self._saved_step:
            return
        save_checkpoint(arguments, self._directory, prefix or self._prefix, about)
        self._saved_step, self._saved_at = arguments.loop.step_count, time.monotonic()
        if self._monitor is None and self._config.keep_checkpoint_max and arguments.loop.ranks.rank == 0:
            for old in list_checkpoints(self._directory, self._prefix)[: -self._config.keep_checkpoint_max]:
                remove_checkpoint(old)
