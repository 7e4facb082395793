"""Checkpoints that survive: a killed save, a full disk or weights that are nan lose no earlier file (FAULTS 19, 24)."""

import errno
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import CheckpointIO

from lit_dp.engine.checkpoint_content import all_finite, require_plain
from lit_dp.engine.checkpoint_files import (
    FINITE,
    FilePath,
    damage,
    examine,
    folder_of,
    is_hidden,
    located,
    newest,
    opened,
    previous_of,
    reason,
    unreadable,
    unsafe_classes,
)
from lit_dp.engine.checkpoint_write import write_checksummed, write_durably
from lit_dp.errors import ConfigError, RunError


class DurableCheckpointIO(CheckpointIO):
    """Saves so that the newest complete checkpoint can be found whatever happens, and loads only what is whole.

    - `NAME.ckpt` is a complete file at every moment; the one it replaced stays as `NAME.previous.ckpt`.
    - The last checkpoint with finite weights is neither replaced nor removed: a run that turned to nan can go back.
    - What is loaded is compared with the checksums in the file, and loads with weights_only=True.

    Lightning's own copies the checkpoint in memory, stages it in $TMPDIR and moves it: on another filesystem the move
    is a copy, and a kill leaves a torn file (PL 21253).

    Remote paths (`s3://...`) go through fsspec, which makes a file visible when it is complete; one before is kept
    there only when weights turn to nan.
    """

    def __init__(self) -> None:
        self._last_finite: FilePath | None = None  # of this object's saves
        self._warned = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: FilePath, storage_options: Any = None) -> None:
        """Save `checkpoint`, with an entry `lit_dp.finite`, to `path`. Rank 0 only.

        Needs memory for the largest tensor that is not on the CPU, not for a second copy.

        Raises:
            ConfigError: it holds what would not load with weights_only=True.
            RunError: the disk is full, read-only or broken. Earlier checkpoints are intact in both cases.
        """
        if storage_options is not None:
            raise ConfigError(f"{path} is not saved: DurableCheckpointIO takes no storage_options; leave them out")
        require_plain(checkpoint, path)
        path = located(path)
        content = {**checkpoint, FINITE: all_finite(checkpoint.get("state_dict", {}))}
        try:
            if isinstance(path, Path):
                write_durably(content, path)
            else:
                _upload(content, path)
        except OSError as error:
            raise RunError(f"cannot save checkpoint {path}: {reason(error)}. {_mending(error, path)}") from error
        if content[FINITE]:
            self._last_finite = path

    def load_checkpoint(
        self, path: FilePath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at `path`. Every rank reads for itself.

        Args:
            path: local or remote.
            map_location: as torch.load's; None is the CPU.
            weights_only: as torch.load's; None is True.

        Raises:
            RunError: it is missing, torn, corrupt, or holds more than plain values.
        """
        path = located(path)
        try:
            with opened(path) as file:
                fault = damage(file)
                if not fault:
                    return _load(file, path, map_location or "cpu", weights_only is not False)
        except OSError as error:
            fault = unreadable(error)
        raise RunError(f"checkpoint {path} {fault}. {_instead(path)}")

    def remove_checkpoint(self, path: FilePath) -> None:
        """Remove the checkpoint at `path` and the one before it, but not the last one whose weights are finite."""
        path = located(path)
        doomed = [path, previous_of(path)]
        spared = None if is_hidden(path) else self._last_healthy_of(doomed)  # a tuner's own is hidden
        try:
            for file in doomed:
                if file != spared:
                    _remove(file)
        except OSError as error:
            raise RunError(f"cannot remove checkpoint {path}: {reason(error)}. Remove it by hand") from error
        if spared and not self._warned:
            self._warned = True
            warnings.warn(f"{spared} is kept: no other checkpoint with finite weights is left", stacklevel=2)

    def _last_healthy_of(self, doomed: list[FilePath]) -> FilePath | None:
        """Which of `doomed` to spare, because no other healthy checkpoint is left."""
        last = self._last_finite  # may lie in another folder: Lightning's file names can hold folders
        if last is not None and last not in doomed and examine(last).healthy:
            return None
        if newest(folder_of(doomed[0]), but=doomed)[0]:
            return None
        return next((path for path in doomed if examine(path).healthy), None)


def _upload(content: dict[str, Any], address: str) -> None:
    fs = get_filesystem(address)
    if not content[FINITE] and examine(address, every_record=False).healthy:
        fs.copy(address, str(previous_of(address)))
    fs.makedirs(str(folder_of(address)), exist_ok=True)
    with fs.transaction, fs.open(address, "wb") as file:  # visible when both are closed, discarded on an error
        write_checksummed(content, file)  # pyright: ignore[reportArgumentType]


def _load(file: Any, path: FilePath, map_location: Any, weights_only: bool) -> dict[str, Any]:
    file.seek(0)
    try:
        return torch.load(file, map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise
        raise RunError(
            f"checkpoint {path} holds {unsafe_classes(file)}, which can run code when loaded. If you trust whoever"
            " wrote it, pass weights_only=False, or allow the class: torch.serialization.add_safe_globals([...])"
        ) from error


def _remove(path: FilePath) -> None:
    if not isinstance(path, Path):
        fs = get_filesystem(path)
        if fs.exists(path):
            fs.rm(path, recursive=True)
    elif path.is_dir() and not path.is_symlink():  # a sharded checkpoint
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _mending(error: OSError, path: FilePath) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        how = f"Free some space in {folder_of(path)}"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        how = f"Make {folder_of(path)} writable"
    else:
        how = "See what is wrong with that disk"
    return f"Earlier checkpoints are intact. {how}, or save elsewhere: trainer.default_root_dir"


def _instead(path: FilePath) -> str:
    other, _ = newest(folder_of(path), but=[path])
    return f"Use {other} instead" if other else f"No other valid checkpoint is in {folder_of(path)}"
