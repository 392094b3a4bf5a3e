"""The one function of `ckpt` that deletes files and folders. It takes a proof that they are this package's own, and checks it.

`tests/unit/format/test_removal.py` lists the few other calls. docs/decisions.md lists what is deleted, and by whom.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_Found = os.stat_result
Proof = Callable[[Path, _Found], bool]
"""Given a path and what is there now, says whether that may be deleted."""

_OWN_NAME = re.compile(
    r"\.(?:claim-|(?:unpublished|removed|converting|saving)-.+-|.+\.(?:json|yaml)\.)[0-9a-f]{8}(?:\.owner\.json)?",
    re.DOTALL,  # names of files may have line breaks
)


@dataclass(frozen=True, slots=True)
class Same:
    """Proof: it is still the very file or folder that this process has made, linked or locked."""

    device: int
    inode: int

    @classmethod
    def of(cls, which: int | Path | _Found) -> Same:
        """Of a descriptor, a path or what `stat` has found. Called by whoever has just made or locked it."""
        found = os.fstat(which) if isinstance(which, int) else os.lstat(which) if isinstance(which, Path) else which
        return cls(found.st_dev, found.st_ino)

    def __call__(self, path: Path, found: _Found) -> bool:
        return (self.device, self.inode) == (found.st_dev, found.st_ino)


def own_name(path: Path, found: _Found) -> bool:
    """Proof: its name, with a nonce, is one that this package alone gives.

    `.removed-` is given to what was shown to be a run's own (`Ledger.retain`, `Ledger.remove`), without the files of users; the others to
    what is being made: the caller knows that the maker has ended, or is the maker.
    """
    return _OWN_NAME.fullmatch(path.name) is not None


def empty(path: Path, found: _Found) -> bool:
    """Proof: it is a file without bytes, or a folder; one with entries is not removed."""
    return stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size == 0)


def listed(path: Path, found: _Found) -> bool:
    """Proof: it is a regular file, which a record of this package lists: an index of the checkpoint.

    The caller has read the path from the record, or is removing the record itself.
    """
    return stat.S_ISREG(found.st_mode)


def remove(path: Path, proof: Proof, *, dir_fd: int | None = None) -> bool:
    """Delete a file, a link, or a folder with all that is in it, if it exists and the proof holds; return whether it was deleted.

    Another process may be deleting the same.

    Args:
        proof: `Same`, `own_name`, `empty` or `listed`.
        dir_fd: of the folder that `path` is below.

    Raises:
        OSError: it cannot be deleted; a folder with `empty` as proof is not empty.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        if not proof(path, found):
            return False
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(path, dir_fd=dir_fd)
        elif proof is empty:
            os.rmdir(path, dir_fd=dir_fd)
        else:
            shutil.rmtree(path, onerror=_unless_gone, dir_fd=dir_fd)
        return True
    return False


def _unless_gone(_function: object, _path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]
