"""A folder that the user has made as the destination of a save: its permitted contents, and the leftovers of interrupted saves.

The coordinator publishes a checkpoint by one rename. Here the user's folder exists, and may hold other files: what is saved is moved into
it, the manifest last, out of a hidden folder in it.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt.backends.base import DATABASE
from ckpt.backends.zarr import DOCUMENT
from ckpt.dist_checkpointing.folder.claim import (
    NOTE,
    OWNER,
    PARTS,
    STAGED,
    FolderClaim,
    Moving,
    given_claim,
    in_the_way,
)
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.digests import digest_of
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS, SHARDED
from ckpt.format.strict_json import read
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.prepared_save import Destination, PreparedSave, Written, require_reachable
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import is_shown, own_name, remove, replace_durably
from ckpt.storage.metadata import CONFIG_FNAME
from ckpt.storage.stored import read_manifest, recorded_sizes

INDEX = re.compile(r"index-([0-9]{5,})(\.[0-9]+)?\.json")
BESIDE = re.compile(rf"\.({MANIFEST_NAME}|{CONFIG_FNAME})\.[0-9a-f]{{8}}")
"""A temporary file that a save renames over its manifest or `metadata.json`."""

_log = logging.getLogger("ckpt")
_NAMES = (COMMON, OBJECTS, SHARDED, DOCUMENT, DATABASE, MANIFEST_NAME)


class GivenFolder(Destination):
    """An existing folder without a checkpoint. See `Destination`.

    Args:
        is_part: it is one of the small checkpoints in a folder; without a claim on that the ranks write straight into it.
    """

    def __init__(self, folder: Path, *, is_part: bool = False) -> None:
        self.what = f"save into {folder}"
        self._place = folder
        self._is_part = is_part
        self._claim: FolderClaim | None = None
        self._own_claim: FolderClaim | None = None

    def claim(self, topology: Topology) -> None:
        """Do nothing: the caller has made the folder, and `open` asks whether it is free."""

    def open(self, topology: Topology) -> None:
        """Refuse a folder that is not free, and claim it, unless the caller has.

        Raises:
            CheckpointExistsError: a checkpoint, or a part of one, is in the folder.
        """
        with topology.phase("open") as phase:
            if topology.is_lead:
                self._claim, base = given_claim(self._place)
                if self._claim is None and not self._is_part:
                    self._claim = self._own_claim = take(self._place, topology.progress, beside=(COMMON, OBJECTS))
                folder = self._place if self._claim is None else self._claim.staged / base
                folder.mkdir(parents=self._claim is not None, exist_ok=True)
                _require_free(folder, () if self._is_part else (COMMON, OBJECTS))
                phase.from_lead = str(folder)
        self.folder: Path = Path(phase.from_lead)
        with topology.phase("reach"):
            require_reachable(self._place.parent, partial(is_shown, self.folder), topology)

    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
        """Write the manifest; with a claim of its own it makes the folder a checkpoint.

        Raises:
            CheckpointExistsError: a later save has taken over the folder.
        """
        with topology.phase("record"):
            if topology.is_lead:
                if self._claim is not None:
                    self._claim.require()
                there = {path: root / path for path in PARTS for root in (self._place, self.folder) if (root / path).is_file()}
                beside = {path: file.read_bytes() for path, file in there.items()}
                record = partial(replace_durably, self.folder / MANIFEST_NAME)
                ManifestWriter(save, written.results, topology, beside=beside).write(self._place.name, record)
                if self._own_claim is not None:
                    self._own_claim.publish(MANIFEST_NAME)
                    self._own_claim.remove()

    def discard(self, error: BaseException | None = None) -> None:
        """Let its own claim go. The hidden folder stays: the next save removes it."""
        if self._own_claim is not None:
            self._own_claim.let_go()


def take(folder: Path, progress: Callable[[], object], *, beside: Collection[str] = ()) -> FolderClaim:
    """Refuse a folder that is missing or in use, or holds a checkpoint or other files under the names of a save; claim it, and remove what
    interrupted saves have left.

    Args:
        beside: names of small checkpoints that may be there.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointExistsError(f"{folder} is a file, where a folder to save into should be")
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} does not exist: make the folder that a checkpoint is to be saved into")
    if (folder / CONFIG_FNAME).exists():
        raise _holds_a_checkpoint(folder)
    claim = FolderClaim(folder, progress)
    try:
        left = {folder / name: _moved_by(folder, name) for name in sorted(os.listdir(folder)) if STAGED.fullmatch(name)}
        _require_free(folder, {*beside, *chain.from_iterable(moving.names for moving in left.values())})
        for staged, moving in left.items():
            _take_back(folder, staged, moving)
        if left:
            _log.warning("%s holds what an interrupted save has left, which is removed now: %s", folder, next(iter(left)).name)
            for path in [*left, *(folder / name for name in filter(BESIDE.fullmatch, os.listdir(folder)))]:
                remove(path, own_name)
    except BaseException:
        claim.let_go()
        raise
    if others := sorted({*os.listdir(folder)} - {OWNER, *beside}):
        _log.warning("%s is not empty: %s and what else is there stays, and belongs to no checkpoint", folder, others[0])
    return claim


def _moved_by(folder: Path, name: str) -> Moving:
    """The note of the interrupted save whose hidden folder has this name, with what it has moved; of one that was complete, nothing."""
    try:
        with CheckpointFolder(folder) as opened:
            moving = read(opened.read(f"{name}/{NOTE}", MAX_FILE_BYTES), Moving, f"{name}/{NOTE}")
    except FileNotFoundError:
        return Moving([], {}, "")
    except CorruptCheckpointError as error:
        raise in_the_way(folder / name) from error
    gone = [inside for inside in moving.names if _is_used(inside) and not os.path.lexists(folder / name / inside)]
    is_complete = (folder / moving.last).exists()
    return Moving([] if is_complete else [inside for inside in gone if os.path.lexists(folder / inside)], moving.manifests, moving.last)


def _take_back(folder: Path, staged: Path, moving: Moving) -> None:
    """Move what an interrupted save has moved to the folder back to its hidden one."""
    for name in moving.names:
        os.rename(folder / name, staged / name)
    if moving.names and (foreign := _foreign_in(staged, moving)) is not None:
        for name in moving.names:
            os.rename(staged / name, folder / name)
        raise in_the_way(folder / foreign)


def _foreign_in(staged: Path, moving: Moving) -> str | None:
    """The path of something that the interrupted save has not made; None: all is its own."""
    known = {NOTE}
    for path, digest in moving.manifests.items():
        with suppress(FileNotFoundError, CorruptCheckpointError), CheckpointFolder(staged) as opened:
            if digest_of(opened.read(path, MAX_FILE_BYTES)) == digest:
                base = path.removesuffix(MANIFEST_NAME)
                listed = recorded_sizes(staged / base, read_manifest(staged / base))
                known |= {f"{base}{file}" for file in (MANIFEST_NAME, *listed)}
                continue
        return next(name for name in (path, *moving.names) if os.path.lexists(staged / name))
    below = (Path(inside, name) for inside, folders, files in os.walk(staged) for name in (*folders, *files))
    found = (path for path in below if path.is_symlink() or not path.is_dir())
    return next((name for path in found if (name := path.relative_to(staged).as_posix()) not in known), None)


def _require_free(folder: Path, beside: Collection[str]) -> None:
    """Refuse a folder that holds a checkpoint, or anything but `beside` under the names of a save."""
    names = [name for name in sorted(os.listdir(folder)) if name not in beside]
    if MANIFEST_NAME in names:
        raise _holds_a_checkpoint(folder)
    for name in names:
        if _is_used(name):
            raise in_the_way(folder / name)


def _is_used(name: str) -> bool:
    """Whether a save may use a name."""
    return name in _NAMES or INDEX.fullmatch(name) is not None


def _holds_a_checkpoint(folder: Path) -> CheckpointExistsError:
    return CheckpointExistsError(f"{folder} holds a checkpoint already; save into another folder, or remove this one")
