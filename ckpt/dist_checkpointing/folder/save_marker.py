"""Marker file of a save into a folder: another save sees by its lock whether the first one still runs, and by its lines what that has made.

Its first line says which process saves. Before the save creates anything, it adds a line about it (`Making`); a save that fails then leaves
its marker. Marker and lines are the proof by which the next save removes files.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ckpt.backends.base import DATABASE
from ckpt.backends.zarr_format import DOCUMENT
from ckpt.catalog.owner import is_held, new_lock_file
from ckpt.errors import CheckpointExistsError, CorruptCheckpointError, free_bytes, needing
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS, SHARDED
from ckpt.format.names import PLAIN_NAME
from ckpt.format.places import Place
from ckpt.format.strict_json import read
from ckpt.ranks.addresses import machine
from ckpt.saving.writing import path_of
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import Given
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import naming, write_all
from ckpt.storage.metadata import CONFIG_FNAME
from ckpt.storage.removal import Same, remove

MARK = re.compile(r"\.saving-[0-9a-f]{8}")
INDEX = re.compile(r"index-([0-9]{5,})(\.[0-9]+)?\.json")

_BESIDE = re.compile(rf"\.({MANIFEST_NAME}|{CONFIG_FNAME})\.[0-9a-f]{{8}}")
_IN_DATABASE = re.compile(r"(rank-[0-9]{5,}/)?(manifest\.ocdbt|d/[0-9a-f]{32})(\.__lock)?")
_PACKED = re.compile(r"[a-z]+/(rank-[0-9]{5,}/)?packed-[a-z0-9_]+-[0-9]{5,}[^/]*")
_IN_ARRAY = re.compile(rf"{DOCUMENT}|c(/[0-9]+)*")
_IN_GROUP = re.compile(rf"(rank-[0-9]{{5,}}/)?({DOCUMENT}|{PLAIN_NAME})")


class Making(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True, dict=True):
    """A line of a marker: what a save is about to create.

    Attributes:
        base: folder below that of the marker: "", or that of common state or objects.
        world_size: ranks that write an index.
        store: name of the format.
        components: key -> sharing pattern.
        arrays: names of all arrays with a path of their own.
        manifest: digest of the manifest that is about to be written there; "": none is.
        machine, pid: in the first line, of the process that saves.
    """

    base: Annotated[str, msgspec.Meta(pattern=f"^({COMMON}|{OBJECTS})?$")]
    world_size: int = 0
    store: str = ""
    components: dict[Annotated[str, msgspec.Meta(pattern=f"^({COMMON}|{OBJECTS}|{SHARDED})$")], SharingPattern] = {}
    arrays: list[str] = []
    manifest: str = ""
    machine: str = ""
    pid: int = 0

    @cached_property
    def _paths(self) -> set[str]:
        components = {key: StateComponent(key, Given({}), pattern) for key, pattern in self.components.items()}
        return {path_of(name, components) for name in self.arrays if name.partition("/")[0] in components}

    def lists(self, path: str) -> bool:
        """Whether the save may have created the file, or top folder, at this path below the marker's folder."""
        if self.base:
            if path == self.base:
                return True
            if not path.startswith(f"{self.base}/"):
                return False
            path = path.removeprefix(f"{self.base}/")
        first, _, rest = path.partition("/")
        if first == DATABASE:
            return self.store == "ocdbt" and (not rest or _IN_DATABASE.fullmatch(rest) is not None)
        if first in self.components:
            return not rest or self._lists_in(path, rest)
        index = INDEX.fullmatch(path)
        if is_beside(path):
            return True
        if index is not None:
            return index[2] is None and int(index[1]) < self.world_size
        return path in (DOCUMENT, MANIFEST_NAME) and self.world_size > 0

    def _lists_in(self, path: str, rest: str) -> bool:
        parts = path.split("/")
        for end in (2, 3):  # <component>/<array>, or <component>/<rank>/<array>
            array, inside = "/".join(parts[:end]), "/".join(parts[end:])
            if _IN_ARRAY.fullmatch(inside) and (array in self._paths or _PACKED.fullmatch(array)):
                return True
        return _IN_GROUP.fullmatch(rest) is not None


class SaveMarker:
    """A file in the folder, locked until `remove`, or the end of this object or process. Lead rank only.

    Attributes:
        path: of the file in `folder`.

    Raises:
        CheckpointExistsError: another save into the folder is under way, of this process or of another one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / f".saving-{secrets.token_hex(4)}"
        self._descriptor = new_lock_file(self.path)
        self._same = Same.of(self._descriptor)
        self._has_made = False
        self._close = weakref.finalize(self, _release, self._descriptor)
        try:
            is_held(self._descriptor, folder)  # locks it
            self._write(Making(base="", machine=machine(), pid=os.getpid()))
        except BaseException:
            self.remove()
            raise
        others = [path for path in self.others() if _is_locked(path)]
        if others:  # two saves that begin at one moment find each other, and both fail
            self.remove()
            raise CheckpointExistsError(
                f"another save into {folder} is under way ({others[0].name}): wait for it, or finalize it if it is an asynchronous one of "
                "this job, or save into another folder"
            )

    def others(self) -> list[Path]:
        """The other markers in the folder."""
        return [
            self.folder / name
            for name in sorted(os.listdir(self.folder))
            if MARK.fullmatch(name) and name != self.path.name
        ]

    def add(self, making: Making) -> None:
        """Note what this save is about to create."""
        self._write(making)
        self._has_made = True

    def _write(self, making: Making) -> None:
        line = json.dumps(msgspec.to_builtins(making)).encode() + b"\n"  # keys may hold any text
        with needing(self.path.name, lambda: len(line), free_bytes(self.folder)), naming(self.path):
            write_all(self._descriptor, memoryview(line))

    def require(self) -> None:
        """Require that no other save has taken over the folder.

        Raises:
            CheckpointExistsError: one has.
        """
        if not self.path.exists():
            raise CheckpointExistsError(
                f"another save into {self.folder} has begun since this one did, which is therefore given up; what the other one saves "
                "stays as it is"
            )

    def remove(self) -> None:
        """Remove the file, at the end of the save."""
        remove(self.path, self._same)
        self._close()

    def let_go(self) -> None:
        """Unlock the file after a failure. It stays if the save may have created something."""
        if self._has_made:
            self._close()
        else:
            self.remove()


def is_beside(name: str) -> bool:
    """Whether this is the name of a temporary file that a save renames over its manifest or `metadata.json`."""
    return _BESIDE.fullmatch(name) is not None


def dead_marks(folder: Path) -> list[str]:
    """The names of the markers in the folder of a complete checkpoint: of saves that were killed at their very end."""
    found = []
    for name in sorted(os.listdir(folder)):
        if MARK.fullmatch(name) and not _is_locked(folder / name):
            with suppress(CheckpointExistsError):
                found += [name] if lines_of(folder / name) else []
    return found


def lines_of(mark: Path) -> list[Making]:
    """Read the marker of a dead save; without a line that it has not ended. An empty one is of a save that had not begun.

    Raises:
        CheckpointExistsError: this is no marker.
    """
    try:
        with CheckpointFolder(mark.parent) as folder:
            *lines, rest = folder.read(mark.name, MAX_FILE_BYTES).split(b"\n")
        made = [read(line, Making, mark.name) for line in (lines or [rest] if rest else lines)]
    except CorruptCheckpointError as error:
        raise CheckpointExistsError(
            f"{mark} has the name of a save's marker, and no save has written it so: remove it, or save into another folder"
        ) from error
    return made


_given: ContextVar[Any] = ContextVar("the mark of the save that is under way", default=None)


@contextmanager
def marked(mark: Any) -> Iterator[None]:
    """Have saves inside the block use this marker instead of making one. Let it go if the block fails."""
    token = _given.set(mark)
    try:
        yield
    except BaseException:
        if mark is not None:
            mark.let_go()
        raise
    finally:
        _given.reset(token)


def given_mark(folder: Place) -> tuple[Any, str]:
    """The marker that a caller has made for this folder, or for the one above, or None; and the folder's path below that of the marker."""
    mark = _given.get()
    if mark is not None and mark.folder == folder:
        return mark, ""
    return (mark, folder.name) if mark is not None and mark.folder == folder.parent else (None, "")


def _release(descriptor: int) -> None:
    """Unlock, because a forked process may have the descriptor too; then close."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_locked(path: Path) -> bool:
    """Whether a running save holds this marker. Only a regular file can be one."""
    try:
        with CheckpointFolder(path.parent) as folder:
            try:
                descriptor = folder.open(path.name, os.O_RDWR)  # NFS locks no file that is open for reading only
            except PermissionError:
                descriptor = folder.open(path.name)
    except (FileNotFoundError, CorruptCheckpointError):
        return False
    try:
        return is_held(descriptor, path.parent)
    finally:
        os.close(descriptor)
