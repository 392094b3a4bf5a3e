"""A folder that the user has made as the place of a save: what may lie in it, and what an interrupted save has left there.

The coordinator saves under a name that is published by a rename. Here the manifest, written last, is all that makes a checkpoint of
the folder, and a mark keeps other saves out of it until then.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ckpt.backends.base import DATABASE
from ckpt.backends.zarr_format import DOCUMENT
from ckpt.dist_checkpointing.folder.save_marker import MARK, SaveMarker, given_mark
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS, SHARDED
from ckpt.format.metadata import CONFIG_FNAME
from ckpt.format.stored import read_manifest
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.prepared_save import Destination, PreparedSave, require_reachable
from ckpt.saving.writing import WriteResult

_log = logging.getLogger("ckpt")
INDEX_FILES = "index-[0-9][0-9][0-9][0-9][0-9]*.json"
BESIDE_FILES = (f".{MANIFEST_NAME}.*", f".{CONFIG_FNAME}.*", f"{MARK}*")
"""Files that are about to take the place of another one, or say that a save has begun."""

_MOST_DOCUMENT_BYTES = 1 << 20


class GivenFolder(Destination):
    """A folder that exists, and holds no checkpoint.

    Args:
        components: of the save.
        is_marked: the caller has marked it, or the one above, as being saved into.
    """

    def __init__(self, folder: Path, components: Iterable[str], *, is_marked: bool = False) -> None:
        self.folder = folder
        self.what = f"save into {folder}"
        self._components = list(components)
        self._is_marked = is_marked
        self._mark: SaveMarker | None = None
        self._own_mark: SaveMarker | None = None

    def open(self, topology: Topology) -> None:
        """Refuse a folder that is not free, and mark it, unless the caller has.

        Raises:
            CheckpointExistsError: a checkpoint, or a part of one, lies in the folder.
        """
        with topology.phase("open"):
            if topology.is_lead:
                _require_free(self.folder, self._components)
                if not self._is_marked:
                    self._mark = given_mark(self.folder)
                    if self._mark is None:
                        self._mark = self._own_mark = SaveMarker(self.folder)
        with topology.phase("reach"):
            require_reachable(self.folder, topology)

    def publish(self, save: PreparedSave[Any], votes: Sequence[WriteResult], topology: Topology) -> None:
        """Write the manifest.

        Raises:
            CheckpointExistsError: another save into the folder has begun since this one did.
        """
        with topology.phase("record"):
            if topology.is_lead:
                if self._mark is not None:
                    self._mark.require()
                parts = [f"{name}/{MANIFEST_NAME}" for name in (COMMON, OBJECTS)]
                beside = [path for path in parts if (self.folder / path).is_file()]
                ManifestWriter(save, votes, topology, beside=beside).write(self.folder.name)
                self.discard()

    def discard(self, error: BaseException | None = None) -> None:
        """Remove the mark. What has been written stays, for the next save into the folder to remove."""
        if self._own_mark is not None:
            self._own_mark.remove()


def take(folder: Path) -> SaveMarker:
    """Refuse a folder that is missing or holds a checkpoint, or files of others where a save puts its own, or that another save
    writes into; mark it, and remove what an interrupted save has left in it."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointExistsError(f"{folder} is a file, where a folder to save into should be")
    _require_without(folder, CONFIG_FNAME)
    mark = SaveMarker(folder)
    try:
        _make_free(folder, mark)
    except BaseException:
        mark.remove()
        raise
    return mark


def _make_free(folder: Path, mark: SaveMarker) -> None:
    left = [path for path in _leftovers(folder) if path != mark.path]
    if left:
        _log.warning("%s holds what an interrupted save has left, which is removed now: %s", folder, left[0].name)
    for path in left:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    others = sorted({*os.listdir(folder)} - {mark.path.name})
    if others:
        _log.warning(
            "%s is not empty: %s and what else is there stays, and belongs to no checkpoint", folder, others[0]
        )


def _require_free(folder: Path, components: Iterable[str]) -> None:
    """Refuse a folder that is missing, or holds a checkpoint or a part of one; nothing is removed."""
    _require_without(folder, MANIFEST_NAME)
    # Whichever backend saved before: what is left of it must not be taken for a part of this checkpoint.
    left = [*(folder / component for component in components), folder / DATABASE, *folder.glob(INDEX_FILES)]
    for path in left:
        if path.exists():
            raise CheckpointExistsError(
                f"{path} exists already, of a save that did not finish; remove it, or save through dist_checkpointing.save, which does"
            )


def _require_without(folder: Path, record: str) -> None:
    """Refuse a folder that is missing, or holds the file by which a checkpoint is known."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} does not exist: make the folder that a checkpoint is to be saved into")
    if (folder / record).exists():
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already; save into another folder, or remove this one"
        )


def _leftovers(folder: Path) -> list[Path]:
    """What a save of a sharded state dict that did not end has left in a folder.

    Raises:
        CheckpointExistsError: under a name that such a save uses lies a checkpoint of another kind, or something else that it
            would not have made.
    """
    _require_no_other_checkpoint(folder)
    found = [path for name in (COMMON, OBJECTS, SHARDED, DOCUMENT) if (path := folder / name).exists()]
    for path in found:
        if not _is_of_a_save(path):
            raise CheckpointExistsError(
                f"{path} is in the way, and no save has made it; save into a folder of its own, such as an empty one"
            )
    found += [path for name in (DATABASE, MANIFEST_NAME) if (path := folder / name).exists()]
    return found + [path for pattern in (*BESIDE_FILES, INDEX_FILES) for path in sorted(folder.glob(pattern))]


def _require_no_other_checkpoint(folder: Path) -> None:
    """Refuse what has a manifest and is whole, for all that it has no metadata.json: the coordinator's checkpoints."""
    try:
        components = read_manifest(folder).components
    except CheckpointNotFoundError:
        return
    except CorruptCheckpointError as error:  # not half written: it comes by a rename
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already, and a damaged one ({error}); save into another folder, or remove this one"
        ) from error
    if list(components) != [SHARDED]:
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already, of {', '.join(components) or 'nothing'}; save into another folder"
        )


def _is_of_a_save(path: Path) -> bool:
    """Whether a folder by one of our names has in it what we put there, and nothing else; and the group's document what we say."""
    if path.is_symlink():
        return False
    if path.name == DOCUMENT:
        return _is_bare_group(path)
    if not path.is_dir():
        return False
    inside = list(path.iterdir())
    if path.name == SHARDED:
        return all(one.name == DOCUMENT or holds_array(one) for one in inside)
    ours = (path.name, DOCUMENT, MANIFEST_NAME, *BESIDE_FILES, INDEX_FILES)
    return all(any(fnmatchcase(one.name, pattern) for pattern in ours) for one in inside)


def _is_bare_group(document: Path) -> bool:
    """Whether a Zarr group has nothing to say that would be lost with its document, which is empty while it is being written."""
    try:
        with CheckpointFolder(document.parent) as folder:
            found = json.loads(folder.read(document.name, _MOST_DOCUMENT_BYTES) or b"{}")
    except (ValueError, OSError):
        return False
    return isinstance(found, dict) and not (found.get("attributes") or found.get("consolidated_metadata"))


def holds_array(path: Path) -> bool:
    """Whether this is the folder of a Zarr v3 array, or what is left of one, and nothing else."""
    return path.is_dir() and set(os.listdir(path)) <= {"c", DOCUMENT}
