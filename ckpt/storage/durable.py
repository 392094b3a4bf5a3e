"""Write small files durably: bytes and names survive a power cut. Swap two names atomically."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt.errors import free_bytes, needing
from ckpt.storage.removal import Same, own_name, remove

_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.EOPNOTSUPP)
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and make it and its name durable."""
    try:
        _write(path, data)
    except FileExistsError:  # perhaps a link to another file, which keeps its bytes
        replace_durably(path, data)
    else:
        sync_folder(path.parent)


def replace_durably(path: Path, data: bytes) -> None:
    """Write a small file durably and atomically: readers find the old file, if there was one, or the whole new one.

    A file of this name is replaced: the caller writes, or changes, the checkpoint that it belongs to.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write(beside, data)
        os.replace(beside, path)
    finally:
        remove(beside, own_name)
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


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names stand for, atomically. Return False where the system or the file system cannot.

    Source: renameat2(2) with RENAME_EXCHANGE, Linux 3.15.
    """
    if _RENAMEAT2 is None:
        return False
    if _RENAMEAT2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _renameat2() -> Any:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


_RENAMEAT2 = _renameat2()


def _write(path: Path, data: bytes) -> None:
    """Write a new file durably. If that fails, the file is removed."""
    free = free_bytes(path.parent)
    with needing(path.name, lambda: len(data), free), path.open("xb", buffering=0) as file:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException as error:
            with suppress(OSError):
                remove(path, Same.of(file.fileno()))
            if isinstance(error, OSError):  # of a call on a descriptor, which names no file
                error.filename = str(path)
            raise
