"""Write small files durably: bytes and names survive a power cut."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.EOPNOTSUPP)


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and make it and its name durable."""
    try:
        _write(path, data)
    except FileExistsError:  # perhaps a link to another file, which keeps its bytes
        path.unlink()
        _write(path, data)
    sync_folder(path.parent)


def replace_durably(path: Path, data: bytes) -> None:
    """Write a small file durably and atomically: readers find the old file, if there was one, or the whole new one."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write(beside, data)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, as far as its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
