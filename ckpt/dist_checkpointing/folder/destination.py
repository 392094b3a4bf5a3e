"""A folder that the user has made as the destination of a save: its permitted contents, and the leftovers of interrupted saves.

The coordinator publishes a checkpoint by a rename. Here the manifest, written last, makes the folder a checkpoint, and a marker keeps
other saves out of it until then.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.backends.base import DATABASE
from ckpt.backends.zarr_format import DOCUMENT
from ckpt.dist_checkpointing.folder.save_marker import INDEX, Making, SaveMarker, given_mark, lines_of
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS, SHARDED
from ckpt.format.metadata import CONFIG_FNAME
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.prepared_save import Destination, PreparedSave, require_reachable
from ckpt.saving.writing import WriteResult

_log = logging.getLogger("ckpt")
_NAMES = (COMMON, OBJECTS, SHARDED, DOCUMENT, DATABASE, MANIFEST_NAME)


class GivenFolder(Destination):
    """An existing folder without a checkpoint. See `Destination`.

    Args:
        is_marked: the caller has put a marker into the folder, or the one above.
    """

    def __init__(self, folder: Path, *, is_marked: bool = False) -> None:
        self.folder = folder
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
                if self._own_mark is not None:
                    self._own_mark.remove()

    def discard(self, error: BaseException | None = None) -> None:
        """Let the marker go. The files stay, and their marker: the next save through dist_checkpointing.save removes them."""
        if self._own_mark is not None:
            self._own_mark.let_go()


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
        files, folders: below the folder, the folders from the deepest on; each file is listed.
    """

    proofs: Sequence[str]
    made: Sequence[Making] = ()
    files: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    def lists(self, path: str) -> bool:
        """Whether a dead save may have made the file, or top folder, at this path."""
        return any(one.lists(path) for one in self.made)

    def remove_from(self, folder: Path, progress: Callable[[], object]) -> None:
        """Remove the files, then those of the folders that are empty, then the proofs. Nothing else in a given folder is ever removed."""
        with CheckpointFolder(folder) as opened:
            for remove, paths in ((os.unlink, self.files), (os.rmdir, self.folders), (os.unlink, self.proofs)):
                for path in paths:
                    progress()
                    try:
                        with opened.parent(path) as (above, name):
                            remove(name, dir_fd=above)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        if error.errno != errno.ENOTEMPTY:  # somebody has put a file there
                            raise


def _make_free(folder: Path, mark: SaveMarker, progress: Callable[[], object]) -> None:
    marks = mark.others()
    owned = Owned([path.name for path in marks], [line for path in marks for line in lines_of(path)])
    if not owned.lists(MANIFEST_NAME):
        _require_without(folder, MANIFEST_NAME)
    for name in sorted(os.listdir(folder)):
        if name in _NAMES or INDEX.fullmatch(name) or owned.lists(name):
            _look_at(folder, name, owned, progress)
    if owned.files or owned.folders:
        named = (owned.files or owned.folders)[0]
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
        if path.is_symlink() or not path.is_file():
            raise _in_the_way(path)
        owned.files.append(name)
        return
    for inside, folders, files in os.walk(path, topdown=False):
        progress()
        above = Path(inside).relative_to(folder)
        for each in files:
            if not owned.lists((above / each).as_posix()) or not stat.S_ISREG(os.lstat(Path(inside, each)).st_mode):
                raise _in_the_way(Path(inside, each))
            owned.files.append((above / each).as_posix())
        for each in folders:
            if Path(inside, each).is_symlink():
                raise _in_the_way(Path(inside, each))
        owned.folders.append(above.as_posix())


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
        raise CheckpointExistsError(
            f"{folder} holds a checkpoint already; save into another folder, or remove this one"
        )
