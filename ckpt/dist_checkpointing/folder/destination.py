"""A folder that the user has made as the destination of a save: its permitted contents, and the leftovers of interrupted saves.

The coordinator publishes a checkpoint by a rename. Here the manifest, written last, makes the folder a checkpoint, and a marker keeps
other saves out of it until then.
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
"""Temporary files that are renamed over others, and markers of saves."""

_MOST_DOCUMENT_BYTES = 1 << 20


class GivenFolder(Destination):
    """An existing folder without a checkpoint. See `Destination`.

    Args:
        components: of the save.
        is_marked: the caller has put a marker into the folder, or the one above.
    """

    def __init__(self, folder: Path, components: Iterable[str], *, is_marked: bool = False) -> None:
        self.folder = folder
        self.what = f"save into {folder}"
        self._components = list(components)
        self._is_marked = is_marked
        self._mark: SaveMarker | None = None
        self._own_mark: SaveMarker | None = None

    def open(self, topology: Topology) -> None:
        """Refuse a folder that is not free, and put a marker into it, unless the caller has.

        Raises:
            CheckpointExistsError: a checkpoint, or a part of one, is in the folder.
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

    def publish(self, save: PreparedSave[Any], results: Sequence[WriteResult], topology: Topology) -> None:
        """Write the manifest.

        Raises:
            CheckpointExistsError: a later save has taken over the folder.
        """
        with topology.phase("record"):
            if topology.is_lead:
                if self._mark is not None:
                    self._mark.require()
                parts = [f"{name}/{MANIFEST_NAME}" for name in (COMMON, OBJECTS)]
                beside = [path for path in parts if (self.folder / path).is_file()]
                ManifestWriter(save, results, topology, beside=beside).write(self.folder.name)
                self.discard()

    def discard(self, error: BaseException | None = None) -> None:
        """Remove the marker. The files stay; the next save into the folder removes them."""
        if self._own_mark is not None:
            self._own_mark.remove()


def take(folder: Path) -> SaveMarker:
    """Refuse a folder that is missing or in use, or holds a checkpoint or other files under the names of a save; put a marker into it, and
    remove the leftovers of an interrupted save."""
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
    """Refuse a folder that is missing, or holds a checkpoint or a part of one."""
    _require_without(folder, MANIFEST_NAME)
    # Leftovers of any backend: they must not be taken for a part of this checkpoint.
    left = [*(folder / component for component in components), folder / DATABASE, *folder.glob(INDEX_FILES)]
    for path in left:
        if path.exists():
            raise CheckpointExistsError(
                f"{path} exists already, of a save that did not finish; remove it, or save through dist_checkpointing.save, which does"
            )


def _require_without(folder: Path, record: str) -> None:
    """Refuse a folder that is missing, or holds `record`, the file that makes it a checkpoint."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} does not exist: make the folder that a checkpoint is to be saved into")
    if (folder / record).exists():
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already; save into another folder, or remove this one"
        )


def _leftovers(folder: Path) -> list[Path]:
    """The leftovers of an interrupted save of a sharded state dict.

    Raises:
        CheckpointExistsError: a name that such a save uses belongs to another checkpoint, or to something that no save makes.
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
    """Refuse a folder with a checkpoint of the coordinator, which has a manifest and no metadata.json."""
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
    """Whether a file or folder under a name of ours holds only the contents that a save puts there."""
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
    """Whether the document of a Zarr group has no attributes that would be lost with it. It is empty while it is being written."""
    try:
        with CheckpointFolder(document.parent) as folder:
            found = json.loads(folder.read(document.name, _MOST_DOCUMENT_BYTES) or b"{}")
    except (ValueError, OSError):
        return False
    return isinstance(found, dict) and not (found.get("attributes") or found.get("consolidated_metadata"))


def holds_array(path: Path) -> bool:
    """Whether this is the folder of a Zarr v3 array, or a part of one, and nothing else."""
    return path.is_dir() and set(os.listdir(path)) <= {"c", DOCUMENT}
