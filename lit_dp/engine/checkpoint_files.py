"""Which checkpoint files can be trusted (whole, uncorrupted, of plain values, finite), and which of them is the newest.

torch.save writes a CRC-32 of every record into the file; torch.load does not look at it, Python's zipfile does. So a
file proves itself: there is nothing beside it that could be lost.
"""

import errno
import os
import pickle
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch.serialization import get_unsafe_globals_in_checkpoint

FilePath: TypeAlias = Path | str
"""A Path is a local file, a str is what fsspec knows (`s3://bucket/last.ckpt`): see `located`."""

FINITE = "lit_dp.finite"
"""Entry of a checkpoint: whether its weights are all finite. A checkpoint without it counts as finite."""


class Examined(NamedTuple):
    """What a checkpoint file says about itself."""

    path: FilePath
    fault: str | None
    """Why it cannot be used, as the end of a sentence that begins with its path; None if it can."""
    epoch: int = -1
    global_step: int = -1
    finite: bool = True
    when: int = 0
    """Time of its last change, in nanoseconds since 1970."""

    @property
    def healthy(self) -> bool:
        return self.fault is None and self.finite


def examine(path: FilePath, every_record: bool = True) -> Examined:
    """Whether the checkpoint at `path` can be used, and what it holds; never raises for what the file is.

    Memory: what the checkpoint holds beside tensors; their records are only streamed past the checksum.

    Args:
        path: local or remote.
        every_record: False leaves the tensors' records out, so that next to nothing is read.
    """
    path = located(path)
    try:
        with opened(path) as file:
            fault = damage(file, every_record)
            return Examined(path, fault) if fault else _described(path, file)
    except OSError as error:
        return Examined(path, unreadable(error))


def newest(folder: FilePath, but: Collection[FilePath] = ()) -> tuple[FilePath | None, list[str]]:
    """The newest `*.ckpt` in `folder` that is valid and finite, by (global step, epoch, time), or None; and a line for
    every file passed over: those that are torn, and those newer than the chosen one that are corrupt or not finite.

    Reads no tensors of older files. Hidden files (unfinished saves among them) and `but` are not looked at.
    """
    apart = {_real(located(path)) for path in but}
    paths = [path for path in _checkpoints(located(folder)) if _real(path) not in apart]
    glanced = [examine(path, every_record=False) for path in paths]
    passed = [f"{found.path} {found.fault}" for found in glanced if found.fault]
    usable = [found for found in glanced if not found.fault]
    for candidate in sorted(usable, key=lambda found: (found.global_step, found.epoch, found.when), reverse=True):
        found = examine(candidate.path) if candidate.finite else candidate
        if found.healthy:
            return found.path, passed
        passed.append(f"{found.path} {found.fault or 'holds weights that are nan or infinite'}")
    return None, passed


def damage(file: IO[bytes], every_record: bool = True) -> str | None:
    """Why the open file is not what torch.save wrote, as the end of a sentence that begins with its path, or None."""
    start = file.read(4)
    if start != b"PK\x03\x04":
        return "is not a checkpoint (of torch.save's zip format)" if start else "is empty"
    try:
        with zipfile.ZipFile(file) as records:
            for record in records.infolist():
                # The directory's own fields have no checksum: with a flipped attribute torch reads other tensors.
                if record.external_attr or record.compress_type or record.compress_size != record.file_size:
                    return f"is corrupt: wrong directory entry of {record.filename!r}"
                if every_record or "/data/" not in record.filename:
                    _read(records, record)
        unsafe_classes(file)  # torch's reader opens it too
    except Exception as error:  # zipfile raises ten kinds of them on damaged input
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is an impossible place in the file
            raise
        torn = str(error) == "File is not a zip file"
        return "is torn: its end is missing" if torn else f"is corrupt: {first_line(error)}"
    return None


def unsafe_classes(file: IO[bytes]) -> str:
    """Names of the classes in the open checkpoint that weights_only=True refuses."""
    file.seek(0)
    try:
        return ", ".join(sorted(get_unsafe_globals_in_checkpoint(file)))  # pyright: ignore[reportArgumentType]
    except pickle.UnpicklingError:  # it is written in ways that torch does not know
        return "unknown classes"


def content_without_tensors(file: IO[bytes]) -> Any:
    """The open checkpoint with all tensors on the meta device: torch skips their records."""
    file.seek(0)
    return torch.load(file, map_location="meta", weights_only=True)


def hyperparameters(path: FilePath) -> dict[str, Any]:
    """Those of the module in a valid checkpoint, as save_hyperparameters stored them; empty where there are none."""
    with opened(located(path)) as file:
        content = content_without_tensors(file)
    return dict(content.get("hyper_parameters", {}))


def located(path: FilePath) -> FilePath:
    """`path` as a Path if it is a local file's, else as the str it was."""
    text = str(path).removeprefix("file://")
    return text if "://" in text else Path(text)


def opened(path: FilePath) -> IO[bytes]:
    """Open for reading."""
    return path.open("rb") if isinstance(path, Path) else get_filesystem(path).open(path, "rb")  # pyright: ignore


def folder_of(path: FilePath) -> FilePath:
    return path.parent if isinstance(path, Path) else path.rpartition("/")[0]


def previous_of(path: FilePath) -> FilePath:
    """Where the checkpoint that `path` replaced is kept: `last.ckpt` -> `last.previous.ckpt`."""
    if isinstance(path, Path):
        return path.with_name(f"{path.stem}.previous{path.suffix}")
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}.previous{dot}{suffix}"


def is_hidden(path: FilePath) -> bool:
    return str(path).rpartition("/")[2].startswith(".")


def reason(error: OSError) -> str:
    """`No space left on device (ENOSPC)`."""
    if error.errno is None:
        return first_line(error)
    return f"{os.strerror(error.errno)} ({errno.errorcode.get(error.errno, error.errno)})"


def unreadable(error: OSError) -> str:
    """The fault of a file that the system does not let us read."""
    return "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {reason(error)}"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _described(path: FilePath, file: IO[bytes]) -> Examined:
    try:
        content = content_without_tensors(file)
    except pickle.UnpicklingError:
        return Examined(path, f"holds {unsafe_classes(file)}: it loads with weights_only=False only")
    except OSError:
        raise
    except Exception as error:  # its checksums are right: written by something else than torch.save
        return Examined(path, f"does not load: {first_line(error)}")
    steps = [content.get(key) for key in ("epoch", "global_step")] if isinstance(content, dict) else [None]
    if not all(isinstance(step, int) for step in steps):
        return Examined(path, "is not a checkpoint of a training: it has no epoch and global_step")
    return Examined(path, None, *steps, finite=bool(content.get(FINITE, True)), when=_changed(path))  # pyright: ignore


def _read(records: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record, which compares its checksum."""
    with records.open(record) as stream:
        while stream.read(1 << 20):
            pass


def _checkpoints(folder: FilePath) -> list[FilePath]:
    if isinstance(folder, Path):
        paths: list[FilePath] = [path for path in folder.glob("*.ckpt") if not path.is_dir()]
    else:
        fs = get_filesystem(folder)
        names = fs.ls(folder, detail=False) if fs.exists(folder) else []  # without the protocol
        paths = [f"{folder.rstrip('/')}/{name.rpartition('/')[2]}" for name in names if name.endswith(".ckpt")]
    return sorted((path for path in paths if not is_hidden(path)), key=str)


def _real(path: FilePath) -> str:
    """The same for a file and a link to it (ModelCheckpoint(save_last="link"))."""
    return str(path.resolve() if isinstance(path, Path) else path)


def _changed(path: FilePath) -> int:
    if isinstance(path, Path):
        return path.stat().st_mtime_ns
    try:
        return int(get_filesystem(path).modified(path).timestamp() * 1e9)
    except NotImplementedError:  # a web server
        return 0
