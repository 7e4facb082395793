"""Write a checkpoint file so that at every moment, also after a kill or a power cut, a complete one can be found.

Order: hidden file beside the target, its data on the disk, read back, the old file kept under a second name, rename,
folder on the disk. A rename inside one folder is atomic; a move to another filesystem is not.
"""

import contextlib
import errno
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lit_dp.engine.checkpoint_files import FINITE, content_without_tensors, examine, previous_of, unsafe_classes
from lit_dp.errors import ConfigError

STALE_SECONDS = 3600
"""A save's hidden file that has not grown for so long is nobody's."""

NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What a filesystem without hard links answers."""

BUFFER_BYTES = 1 << 20


def write_durably(content: dict[str, Any], target: Path) -> None:
    """Write `content` to `target`; what stood there stays as NAME.previous.ckpt, unless that one is worth more.

    Raises:
        OSError: whatever the system said; nothing that was there before is changed.
        ConfigError: the file would not load with weights_only=True.
    """
    partial, previous = partial_of(target), Path(previous_of(target))
    try:
        _make_folder(target.parent)
        _clear(target.parent, partial)
        _stream(content, partial)
        _require_readable(partial, target)
        if _worth_keeping(target, previous, every_record=not content[FINITE]):
            _keep(target, previous)
        os.replace(partial, target)
        _sync_folder(target.parent)
    except BaseException:
        for leftover in (partial, partial_of(previous)):
            with contextlib.suppress(OSError):
                os.unlink(leftover)
        raise


def partial_of(target: Path) -> Path:
    """Where `target` is written until it is complete: always the same, so that a killed save leaves one at most."""
    return target.with_name(f".{target.name}.partial")


def write_checksummed(content: dict[str, Any], file: IO[bytes]) -> None:
    """torch.save to an open file, without a copy in memory; with checksums where somebody traded them for speed."""
    before, watched = get_crc32_options(), _Watched(file)
    set_crc32_options(True)
    try:
        torch.save(content, watched)  # pyright: ignore[reportArgumentType]
    except RuntimeError:
        if watched.error is None:
            raise
        raise watched.error from None
    finally:
        set_crc32_options(before)


class _Watched:
    """Remembers the first error of the disk: torch answers some of them with a RuntimeError of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _stream(content: dict[str, Any], partial: Path) -> None:
    """Write, and wait until the disk has it."""
    with open(partial, "xb", BUFFER_BYTES) as file:
        write_checksummed(content, file)
        file.flush()
        os.fsync(file.fileno())


def _require_readable(partial: Path, target: Path) -> None:
    with open(partial, "rb") as file:
        try:
            content_without_tensors(file)
        except pickle.UnpicklingError as error:
            refused = unsafe_classes(file)
            raise ConfigError(f"{target} is not saved: {refused} would load with weights_only=False only") from error
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, "what was written cannot be read back") from error


def _worth_keeping(target: Path, previous: Path, every_record: bool) -> bool:
    """Whether the old `target` is to replace `previous`: a broken or nan one never pushes out a healthy one."""
    if not target.is_file():
        return False
    return examine(target, every_record).healthy or not examine(previous, every_record).healthy


def _keep(target: Path, previous: Path) -> None:
    """Give `target` the name `previous` too, so that `target` is there at every moment."""
    link = partial_of(previous)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link)
    try:
        os.link(target, link)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        os.replace(target, previous)
        return
    os.replace(link, previous)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link)  # a rename does nothing where both names are one file already, after a kill at this place


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents, each on the disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(folder.parent)


def _clear(folder: Path, partial: Path) -> None:
    """Remove what killed saves left: `partial`, and others that nobody is writing any more."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)  # never overwritten in place: it may be a second name of a good file
    for leftover in _stale(folder):
        with contextlib.suppress(OSError):
            os.unlink(leftover)


def _stale(folder: Path) -> Iterator[Path]:
    for path in folder.glob(".*.ckpt.partial"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                yield path


def _sync_folder(folder: Path) -> None:
    """Put the folder's names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems sync no folders
            raise
    finally:
        os.close(handle)
