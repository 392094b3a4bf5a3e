"""A folder that the user has made as the destination of a save: its permitted contents, and the leftovers of interrupted saves.

The coordinator publishes a checkpoint by a rename. Here the manifest, written last, makes the folder a checkpoint, and a marker keeps
other saves out of it until then.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ckpt.backends.base import DATABASE
from ckpt.backends.zarr_format import DOCUMENT
from ckpt.dist_checkpointing.folder.save_marker import INDEX, Making, SaveMarker, given_mark, lines_of
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.digests import digest_of
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS, SHARDED, ArrayEntry, CheckpointManifest
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.prepared_save import Destination, PreparedSave, Written, require_reachable
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.durable import replace_durably
from ckpt.storage.files import is_shown
from ckpt.storage.metadata import CONFIG_FNAME
from ckpt.storage.removal import Proof, Same, empty, listed, remove

_log = logging.getLogger("ckpt")
_NAMES = (COMMON, OBJECTS, SHARDED, DOCUMENT, DATABASE, MANIFEST_NAME)


class GivenFolder(Destination):
    """An existing folder without a checkpoint. See `Destination`.

    Args:
        is_marked: the caller has put a marker into the folder, or the one above.
    """

    def __init__(self, folder: Path, *, is_marked: bool = False) -> None:
        self.folder: Path = folder
        self.what = f"save into {folder}"
        self._is_marked = is_marked
        self._making = Making(base="")
        self._mark: SaveMarker | None = None
        self._own_mark: SaveMarker | None = None

    def expect(self, save: PreparedSave[Any], topology: Topology) -> None:
        """Receive what is to be saved, for the marker. Before `open`."""
        self._making.world_size = topology.world_size
        self._making.store = save.backend.store
        self._making.components = {key: component.pattern for key, component in save.mine.components.items()}
        if topology.is_lead:
            self._making.arrays = [name for name, array in save.plan.arrays.items() if array.grid is not None]

    def open(self, topology: Topology) -> None:
        """Refuse a folder that is not free, and put a marker into it, unless the caller has.

        Raises:
            CheckpointExistsError: a checkpoint, or a part of one, is in the folder.
        """
        with topology.phase("open"):
            if topology.is_lead:
                _require_free(self.folder, [*self._making.components])
                self._mark, self._making.base = given_mark(self.folder)
                if self._mark is None and not self._is_marked:
                    self._mark = self._own_mark = SaveMarker(self.folder)
                    for dead in self._mark.others():  # it would list this save's files, too
                        raise _unfinished(dead)
                if self._mark is not None:
                    self._mark.add(self._making)
        with topology.phase("reach"):
            require_reachable(self.folder.parent, partial(is_shown, self.folder), topology)

    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
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
                write = _AnnouncedManifest(save, written.results, topology, beside=beside)
                if self._mark is not self._own_mark:  # with its own, the manifest makes the checkpoint complete
                    write.mark, write.base = self._mark, self._making.base
                write.write(self.folder.name, partial(replace_durably, self.folder / MANIFEST_NAME))
                if self._own_mark is not None:
                    self._own_mark.remove()

    def discard(self, error: BaseException | None = None) -> None:
        """Let the marker go. The files stay, and their marker: the next save through dist_checkpointing.save removes them."""
        if self._own_mark is not None:
            self._own_mark.let_go()


class _AnnouncedManifest(ManifestWriter):
    """Notes the digest of the manifest in the marker before the manifest is there, so that the next save knows it from any other."""

    mark: SaveMarker | None = None
    base = ""

    def _manifest(self, checkpoint_id: str, entries: dict[str, ArrayEntry]) -> CheckpointManifest:
        manifest = super()._manifest(checkpoint_id, entries)
        if self.mark is not None:
            self.mark.add(Making(base=self.base, manifest=digest_of(manifest.to_bytes())))
        return manifest


def take(folder: Path, progress: Callable[[], object]) -> SaveMarker:
    """Refuse a folder that is missing or in use, or holds a checkpoint or other files under the names of a save; put a marker into it, and
    remove what saves that were interrupted have made, by their markers."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointExistsError(f"{folder} is a file, where a folder to save into should be")
    _require_without(folder, CONFIG_FNAME)
    mark = SaveMarker(folder)
    try:
        _make_free(folder, mark, progress)
    except BaseException:
        mark.remove()
        raise
    return mark


@dataclass(slots=True)
class Owned:
    """What is to be removed from a folder, and the proof that saves have made it.

    Attributes:
        proofs: files that list the others: markers of dead saves, or indexes that a manifest has no more. They go last.
        made: the lines of the markers.
        files: below the folder; each is listed. Path -> proof.
        folders: likewise, from the deepest on.
    """

    proofs: Sequence[str]
    made: Sequence[Making] = ()
    files: dict[str, Proof] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)

    def lists(self, path: str) -> bool:
        """Whether a dead save may have made the file, or top folder, at this path."""
        return any(making.lists(path) for making in self.made)

    def has_made_manifest(self, path: str, folder: Path) -> bool:
        """Whether the manifest at this path is the very one that a dead save has written there."""
        base = path.rpartition("/")[0]
        try:
            with CheckpointFolder(folder) as opened:
                digest = digest_of(opened.read(path, MAX_FILE_BYTES))
        except CorruptCheckpointError:  # no regular file
            return False
        return digest in [making.manifest for making in self.made if making.base == base]

    def remove_from(self, folder: Path, progress: Callable[[], object]) -> None:
        """Remove the files, manifests last, then those of the folders that are empty, then the proofs.

        Nothing else in a given folder is ever removed.
        """
        files = sorted(self.files, key=lambda path: path.endswith(MANIFEST_NAME))
        proofs: Mapping[str, Proof] = dict.fromkeys(self.folders, empty) | dict.fromkeys(self.proofs, listed)
        with CheckpointFolder(folder) as opened:
            for path in [*files, *proofs]:
                progress()
                try:
                    with opened.parent(path) as (above, name):
                        remove(Path(name), self.files.get(path) or proofs[path], dir_fd=above)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:  # somebody has put a file there
                        raise


def _make_free(folder: Path, mark: SaveMarker, progress: Callable[[], object]) -> None:
    made = {path.name: lines_of(path) for path in mark.others()}
    owned = Owned([*made], [line for lines in made.values() for line in lines])
    if os.path.lexists(folder / MANIFEST_NAME) and not owned.has_made_manifest(MANIFEST_NAME, folder):
        raise _holds_a_checkpoint(folder)
    for name in sorted(os.listdir(folder)):
        if name in _NAMES or INDEX.fullmatch(name) or owned.lists(name):
            _look_at(folder, name, owned, progress)
    for making in chain.from_iterable(lines[:-1] for lines in made.values()):  # what precedes the last line has been done
        if owned.files and making.manifest and not (folder / making.base / MANIFEST_NAME).exists():
            raise _in_the_way(folder / next(iter(owned.files)))
    if owned.files or owned.folders:
        named = next(iter(owned.files or owned.folders))
        _log.warning("%s holds what an interrupted save has left, which is removed now: %s", folder, named)
    owned.remove_from(folder, progress)
    others = sorted({*os.listdir(folder)} - {mark.path.name})
    if others:
        _log.warning(
            "%s is not empty: %s and what else is there stays, and belongs to no checkpoint", folder, others[0]
        )


def _look_at(folder: Path, name: str, owned: Owned, progress: Callable[[], object]) -> None:
    """Add what lies at a name that a save uses to what dead saves own.

    Raises:
        CheckpointExistsError: no dead save has made it, or something in it.
    """
    if not owned.lists(name):
        raise _in_the_way(folder / name)
    progress()
    path = folder / name
    if path.is_symlink() or not path.is_dir():
        _take(name, folder, owned)
        return
    for inside, folders, files in os.walk(path, topdown=False):
        progress()
        above = Path(inside).relative_to(folder)
        for each in files:
            _take((above / each).as_posix(), folder, owned)
        for each in folders:
            if Path(inside, each).is_symlink():
                raise _in_the_way(Path(inside, each))
        owned.folders.append(above.as_posix())


def _take(path: str, folder: Path, owned: Owned) -> None:
    """Add a file to what dead saves own. Raises: as `_look_at`."""
    found = os.lstat(folder / path)
    if not owned.lists(path) or not stat.S_ISREG(found.st_mode):
        raise _in_the_way(folder / path)
    if Path(path).name == MANIFEST_NAME and not owned.has_made_manifest(path, folder):
        raise _holds_a_checkpoint((folder / path).parent)
    owned.files[path] = Same.of(found)


def _in_the_way(path: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} is in the way, and no save that was interrupted lists it as its own; remove it if nobody needs it, or save into a folder "
        "of its own, such as an empty one"
    )


def _require_free(folder: Path, components: Sequence[str]) -> None:
    """Refuse a folder that is missing, or holds a checkpoint or a part of one."""
    _require_without(folder, MANIFEST_NAME)
    # Leftovers of any backend: they must not be taken for a part of this checkpoint.
    names = {*components, DATABASE, DOCUMENT}
    for name in sorted(os.listdir(folder)):
        if name in names or INDEX.fullmatch(name):
            raise _unfinished(folder / name)


def _unfinished(path: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} exists already; if it is of a save that did not finish, remove it, or save through dist_checkpointing.save, which does"
    )


def _require_without(folder: Path, record: str) -> None:
    """Refuse a folder that is missing, or holds `record`, the file that makes it a checkpoint."""
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"{folder} does not exist: make the folder that a checkpoint is to be saved into")
    if (folder / record).exists():
        raise _holds_a_checkpoint(folder)


def _holds_a_checkpoint(folder: Path) -> CheckpointExistsError:
    return CheckpointExistsError(f"{folder} holds a checkpoint already; save into another folder, or remove this one")
