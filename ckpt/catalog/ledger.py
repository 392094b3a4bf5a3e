"""The states of checkpoint folders: unpublished -> committed -> replaced, quarantined or removed. Each step is one rename.

Names below the checkpoint root:

    checkpoint-<id>                       committed: it holds a manifest with this id. Only this is looked for, with one exception:
    .replaced-<id>-<nonce>                the old checkpoint of that id while the new one is renamed. If there is no committed
                                          checkpoint-<id>, a kill came between, and readers take this one
    .unpublished-<id>-<nonce>             a save in progress, or the rest of a killed one
    .unpublished-<id>-<nonce>.owner.json  beside it: its owner; locked by the lead rank, with the heartbeat as mtime
    .run.owner.json                       likewise the run that saves in this root, while it lives
    .run-<run id>.owner.json              likewise each of the runs that share this root
    .claim-<nonce>                        an owner file before its rename, or the rest of one after a kill
    .quarantined-<id>-<nonce>             kept: a damaged checkpoint whose name a save needed, or that shared a damaged file; or
                                          whatever else had that name: the checkpoint of another run, a link, a folder without a
                                          checkpoint or with that of another id
    .quarantined-<id>-<nonce>.reason.txt  beside it: the reason
    .abandoned-<id>-<nonce>               kept: newer than the checkpoint that a run continued from with overwrite=True
    .removed-<id>-<nonce>                 being deleted: never read; the next save finishes the deletion

A folder in which a whole manifest has another id than its name is the user's, who has copied or renamed a checkpoint: it is not counted,
moved or removed, and nothing is linked to it. It can be loaded by its path. With a damaged manifest it is a damaged checkpoint of its name.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckpt.backends.base import DATABASE
from ckpt.backends.zarr import DOCUMENT
from ckpt.catalog.committed import (
    COMMITTED,
    Catalog,
    Commit,
    Committed,
    commit_after,
    continues,
    id_in,
    look,
    look_for,
    placed,
    warned,
)
from ckpt.catalog.owner import (
    OWNER_SUFFIX,
    FolderLock,
    Owner,
    abandoned,
    file_system_now,
    living_runs,
    owner_file,
    remove_dead_claims,
)
from ckpt.catalog.removing import left_over, without
from ckpt.catalog.retention import Retention, as_retention
from ckpt.errors import (
    Argument,
    CheckpointError,
    CheckpointExistsError,
    ConfigurationError,
    FolderInUseError,
    logger_of,
    sentence,
    telling,
)
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import Place
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import (
    empty,
    exchange,
    is_shown,
    listed,
    own_name,
    remove,
    replace_durably,
    sync_folder,
    write_durably,
)
from ckpt.storage.stored import files_root, read_manifest

ROOT_OWNER = f".run{OWNER_SUFFIX}"
_VALID_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.-]{1,200}")
_HIDDEN = re.compile(r"\.(?P<kind>unpublished|replaced|quarantined|abandoned|removed)-(?P<id>.+)-[0-9a-f]{8}")
_PART = re.compile(r"(?!\.{1,2}\Z)[^/\0]+")

_log = logger_of(__name__)


def require_valid_id(checkpoint_id: str) -> None:
    """Refuse an id that cannot be part of a name.

    Raises:
        ConfigurationError: it is that.
    """
    if not _VALID_ID.fullmatch(checkpoint_id):
        raise ConfigurationError(
            f"checkpoint id {checkpoint_id!r} is part of a folder's name: use 1 to 200 of A-Z a-z 0-9 _ . -, but not . or .. alone"
        )


class Ledger(Catalog[Path]):
    """All checkpoints below one root. Any rank may read; only the lead opens, publishes, discards and retains.

    Args:
        root: the checkpoint root; need not exist before the first `open`.
        run_id: of this run and its restarts. Unpublished folders of dead processes of this run are removed at once; those of other runs
            after `stale_s` without a heartbeat.
        saves_as: the `run_id` in the manifests of this run alone; None: they have none.
        keep_last: how many checkpoints of a run `retain` leaves, or a `Retention`; None keeps all.
        stale_s: seconds without a heartbeat, by the file system's clock, after which an unlocked save counts as abandoned.
        delete: deletes, now or later, replaced and surplus checkpoints, which have been renamed already.
    """

    def __init__(
        self,
        root: Path,
        *,
        run_id: str,
        saves_as: str | None = None,
        keep_last: int | Retention | None = None,
        stale_s: float = 60.0,
        delete: Callable[[Path], None] | None = None,
    ) -> None:
        self._root = Path(root)
        self._run_id = run_id
        self._saves_as = saves_as
        self._retention = as_retention(keep_last)
        self._stale_s = stale_s
        self._delete = delete or delete_folder
        self._opened: dict[Path, Owner] = {}
        self._restored: dict[Path, Path] = {}

    def committed(self) -> list[Committed[Path]]:
        """Return every committed checkpoint, the oldest commit first, without those under names of the user's. Writes nothing.

        A missing root holds none.
        """
        with telling(f"checkpoint root {self._root} cannot be read"):
            names = self._names()
            for _ in range(10):
                found = self._committed_among(names)
                before, names = names, self._names()
                if before == names:  # else a save renamed folders meanwhile, which can hide one from us
                    break
        return found

    def newer_than(self, checkpoint: Place) -> list[Committed[Path]] | None:
        """Return the checkpoints committed after this one, the oldest first; None: this one is not in the root.

        Args:
            checkpoint: its folder may have any name.
        """
        if not isinstance(checkpoint, Path):
            return None
        where, committed = os.path.realpath(checkpoint), self.committed()
        at = next((number for number, commit in enumerate(committed) if os.path.realpath(commit.path) == where), None)
        if at is not None:
            return committed[at + 1 :]
        this = look(Path(where)) if os.path.dirname(where) == os.path.realpath(self._root) else None
        return None if this is None else [commit for commit in committed if commit.order[:3] > this.order[:3]]

    def next_commit(self) -> Commit:
        """Return number and time for a checkpoint that will be published. Lead rank only."""
        with telling(f"checkpoint root {self._root} cannot be read"):
            names = [name for name in self._names() if name.startswith((COMMITTED, ".replaced-"))]
            found = [one for name in names if (one := look(self._root / name))]
        return commit_after(found)

    def claim(self, lock: FolderLock, progress: Callable[[], object]) -> None:
        """Create the root if needed, and acquire its lock, or check that it is still held. Lead rank only.

        Args:
            progress: see `FolderLock.acquire`.

        Raises:
            FolderInUseError: another run saves here.
            StorageError: the root cannot be created or written.
        """
        with self._told_of_root():
            _make_folder(self._root)
            lock.acquire(progress)

    def _told_of_root(self) -> AbstractContextManager[None]:
        return telling(f"checkpoint root {self._root} cannot be written", Argument("output_dir", None, "choose another folder"))

    def open(self, checkpoint_id: str) -> Path:
        """Clean up after dead saves and return a new, empty, unpublished folder that this process owns.

        The owner file beside it stays locked, and its mtime young, until `publish` or `discard`.

        Raises:
            CheckpointExistsError: another run, which lives, has a checkpoint of this id.
            ConfigurationError: the id is not a valid file name.
            StorageError: the root cannot be created or written.
        """
        require_valid_id(checkpoint_id)
        with self._told_of_root():
            _make_folder(self._root)
            self._clean_up()
            self._require_not_of_another(look_for(checkpoint_id, self._root / f"{COMMITTED}{checkpoint_id}"))
            folder = self._aside("unpublished", checkpoint_id)
            self._make(folder)
        return folder

    def _make(self, folder: Path, *, is_new: bool = True) -> None:
        """Make an unpublished folder that this process owns."""
        self._opened[folder] = Owner(folder, self._run_id)
        try:
            folder.mkdir(exist_ok=not is_new)
        except OSError:
            self._release(folder)
            raise

    def open_at(self, target: Path) -> Path:
        """As `open`, for a checkpoint that gets a name of its own: see `publish_at`."""
        return self.open(safe_id(target.name))

    def open_again(self, target: Path, nonce: str) -> Path:
        """As `open_at`, but the folder is named by the caller: what a dead process has left in it is there.

        Args:
            nonce: at least 8 hexadecimal digits.

        Raises:
            FolderInUseError: a process that lives has opened it.
        """
        folder = self._root / f".unpublished-{safe_id(target.name)}-{nonce[:8]}"
        with telling(f"{target} cannot be written"), _named(target):
            _make_folder(self._root)
            with abandoned(folder, self._run_id, file_system_now(self._root), self._stale_s) as dead:
                if not dead and owner_file(folder).exists():
                    raise FolderInUseError(f"{target} is being made by another process; wait until it has ended")
            self._make(folder, is_new=False)
        return folder

    def leave(self, unpublished: Path) -> None:
        """Give up a folder, and leave it with its owner file, which names its owner: `open_again` goes on from its files."""
        if (owner := self._opened.pop(unpublished, None)) is not None:
            owner.let_go()

    def is_seen(self, unpublished: Path) -> bool:
        """Whether this rank sees the folder that the lead has opened. Any rank; network file systems show it late."""
        return is_shown(unpublished)

    def record(self, unpublished: Path, manifest: bytes) -> None:
        """Write the manifest into an unpublished folder, after all other files, durably."""
        replace_durably(unpublished / MANIFEST_NAME, manifest)

    def publish(
        self,
        unpublished: Path,
        checkpoint_id: str,
        *,
        refused: Mapping[Path, str] | None = None,
        replace_others: bool = False,
        committed: Callable[[Path], None] = lambda _: None,
    ) -> Path:
        """Commit a complete and durable folder, which has a manifest, by renaming it; return its final path.

        A committed checkpoint of the same id is moved aside first and removed afterwards: readers find the old or the new one at any
        moment. That of a run from which the new one does not go on, a checkpoint in `refused`, and whatever is no checkpoint of this id,
        is quarantined instead.

        Args:
            refused: checkpoint that this run found damaged -> reason.
            replace_others: checkpoints of all runs that have ended are removed.
            committed: called with the final path after the rename, before anything is removed.

        Raises:
            CheckpointExistsError: another run, which lives, has committed a checkpoint of this id.
            StorageError: the commit failed; an old checkpoint of this id is back in its place.
        """
        target = self._root / f"{COMMITTED}{checkpoint_id}"
        with self._publishing(unpublished, target):
            self._require_not_of_another(look_for(checkpoint_id, self._root / f"{COMMITTED}{checkpoint_id}"))
            aside = self._make_way(target, checkpoint_id, refused or {})
            try:
                self._rename(unpublished, target)
            except OSError:
                if aside is not None:
                    os.rename(aside, target)
                raise
        committed(target)
        self._restored.pop(target, None)
        self._release(unpublished)
        if aside is not None and aside.name.startswith(".replaced-"):
            self._retire(aside, target, checkpoint_id, self._delete, others=replace_others)
        return target

    def living(self) -> Set[str | None]:
        """Return the run ids of the other runs that save in this root, and may be alive."""
        if not (names := [name for name in self._names() if name.startswith(".run")]):
            return set()
        found: set[str | None] = {*living_runs(self._root, names, self._stale_s)}
        return found - {self._saves_as}

    def require_free(self, target: Path) -> None:
        """Require that nothing, or an empty folder, is where a new checkpoint shall be.

        Raises:
            CheckpointExistsError: something is.
        """
        if (target / MANIFEST_NAME).exists():
            raise CheckpointExistsError(
                f"{target} holds a checkpoint already; choose another folder, or remove this one"
            )
        if os.path.lexists(target) and not (target.is_dir() and not target.is_symlink() and not os.listdir(target)):
            is_full = target.is_dir() and not target.is_symlink()
            raise CheckpointExistsError(f"{target} is {'a folder that is not empty' if is_full else 'no folder'}; choose another path")

    def publish_at(
        self,
        unpublished: Path,
        target: Path,
        *,
        replaces: bool = False,
        committed: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Commit a complete and durable folder by giving it a name of its own, which is free.

        Args:
            replaces: the name need not be free. A checkpoint that was saved there, or a symbolic link, is removed, once the new one has
                taken its name, which is atomic where the file system can swap two names. Elsewhere a kill between two renames leaves the
                old one as `<stem>.replaced-<nonce><suffix>`. Anything else is kept under such a name, with a warning.
            committed: as of `publish`.

        Raises:
            CheckpointExistsError: something has come there.
            StorageError: it cannot be renamed.
        """
        is_ours, old = is_removable(target), None
        with self._publishing(unpublished, target):
            if replaces and os.path.lexists(target):
                old = self._put_in_place_of(target, unpublished, swap=is_ours)
            else:
                self.require_free(target)
                remove(target, empty)  # else the rename could not be undone
                self._rename(unpublished, target)
        committed(target)
        if old is not None and is_ours:
            self._remove(old, target, self._delete)
        elif old is not None:
            _log.warning(
                "what was at %s is no checkpoint of this package, or was saved under another name; it is now %s",
                target,
                old,
            )
        self._release(unpublished)

    @contextmanager
    def _publishing(self, unpublished: Path, target: Path) -> Iterator[None]:
        with telling(f"{target} cannot be published"):
            if not (unpublished / MANIFEST_NAME).is_file():
                raise FileNotFoundError(errno.ENOENT, "it holds no manifest", str(unpublished / MANIFEST_NAME))
            sync_folder(unpublished)
            yield

    def _rename(self, unpublished: Path, target: Path) -> None:
        """Rename durably. If the rename cannot be made durable, it is undone."""
        os.rename(unpublished, target)
        try:
            sync_folder(self._root)
        except OSError:
            os.rename(target, unpublished)
            raise

    def _put_in_place_of(self, target: Path, unpublished: Path, *, swap: bool) -> Path:
        """Give a folder the name of what is at `target`; return the new path of that: with `swap`, that of the folder, if possible."""
        if swap and exchange(unpublished, target):
            try:
                sync_folder(self._root)
            except OSError:
                exchange(unpublished, target)
                raise
            return unpublished
        aside = target.with_name(f"{target.stem}.replaced-{secrets.token_hex(4)}{target.suffix}")
        os.rename(target, aside)
        try:
            self._rename(unpublished, target)
        except OSError:
            os.rename(aside, target)
            raise
        return aside

    def quarantine(self, refused: Mapping[Path, str], *, keep: Path) -> list[Path]:
        """Quarantine checkpoints that this run found damaged, so that no later save links their files.

        Lead rank only, after a save was published. A checkpoint that cannot be moved stays, with a warning.

        Args:
            refused: path -> reason. Missing ones are skipped.
            keep: the checkpoint just published, perhaps under the path of a refused one.

        Returns:
            their new paths.
        """
        found = self.committed()
        moved = []
        for path, reason in refused.items():
            one = next((commit for commit in found if self._is(commit.path, path)), None)
            if one is not None and not self._is(one.path, keep):
                with warned(f"cannot move {one.path} into quarantine"):
                    moved.append(self._put_in_quarantine(one.path, one.id, reason))
        return moved

    def abandon(self, newer: Sequence[Committed[Path]]) -> list[Path]:
        """Set aside the newer checkpoints when a run continues from an older one; return their new paths.

        The newest is moved first, so that a kill in between leaves a consistent, shorter history. They are kept until the user
        removes them. Lead rank only.

        Args:
            newer: the oldest first.

        Raises:
            StorageError: one cannot be renamed.
        """
        moved = []
        with telling(f"newer checkpoints in {self._root} cannot be set aside"):
            for commit in reversed(newer):
                moved.append(self._aside("abandoned", commit.id))
                os.rename(commit.path, moved[-1])
                sync_folder(self._root)
        return moved

    def discard(self, unpublished: Path) -> None:
        """Remove a failed save. Never raises: the next `open` of this run removes the rest."""
        match = _HIDDEN.fullmatch(unpublished.name)
        if match is None or not unpublished.exists() or self._remove(unpublished):
            self._release(unpublished)
        else:
            self.leave(unpublished)

    def remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint below the root, whatever its name: rename it, then delete it. If that fails, it stays, with a warning."""
        self._remove(checkpoint, checkpoint, self._delete)

    def _settled(self) -> list[Committed[Path]]:
        self._settle_replaced(self._names())
        return [commit for commit in self.committed() if not commit.path.is_symlink()]

    def _remove_surplus(self, old: Committed[Path]) -> bool:
        return self._remove(old.path, old.path, self._delete)

    def _take_out(self, one: Committed[Path], keys: Sequence[str], progress: Callable[[], object]) -> None:
        """Take components out of a checkpoint, or finish that after a kill. Their folders are renamed out of it, and then deleted.

        The manifest keeps its time: of checkpoints in other folders the newest is named by it.
        """
        if {*keys} <= {*one.removed} and not any(os.path.lexists(one.path / key) for key in one.removed):
            return
        manifest = read_manifest(one.path)
        root, at = files_root(one.path, manifest), one.path / MANIFEST_NAME
        assert isinstance(root, Path)
        if root != one.path:
            with CheckpointFolder(one.path) as files:
                files.require_folder(root.name)
        if (left := without(one.path, manifest, keys, lambda path, data: write_durably(root / path, data), progress)) is not None:
            saved = at.stat()
            replace_durably(at, left.to_bytes())
            os.utime(at, ns=(saved.st_atime_ns, saved.st_mtime_ns))
            manifest = left
        indexes, folders = left_over(manifest, os.listdir(root))
        for name in os.listdir(one.path):
            if name.startswith(f".{MANIFEST_NAME}."):  # left by a kill before its rename
                remove(one.path / name, own_name)
        for name in indexes if manifest.removed else ():
            remove(root / name, listed)
        for key in folders:
            doomed = self._aside("removed", one.id)
            os.rename(root / key, doomed)
            self._delete(doomed)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self._root))
        except FileNotFoundError:
            return []

    def _committed_among(self, names: list[str]) -> list[Committed[Path]]:
        published = {id_in(name) for name in names if name.startswith(COMMITTED)}
        found = {id: one for id in published if (one := look_for(id, self._root / f"{COMMITTED}{id}"))}
        for id, candidates in self._replaced_among(names).items():
            if id not in found and candidates:
                found[id] = candidates[-1]
        return sorted(placed(list(found.values())), key=lambda one: one.order)

    def _replaced_among(self, names: list[str]) -> dict[str, list[Committed[Path]]]:
        """Return id -> checkpoints that were moved aside, the oldest commit first."""
        aside: dict[str, list[Committed[Path]]] = {}
        for name in names:
            match = _HIDDEN.fullmatch(name)
            if match is not None and match["kind"] == "replaced":
                one = look_for(match["id"], self._root / name)
                aside.setdefault(match["id"], []).extend([one] if one else [])
        return {id: sorted(some, key=lambda one: one.order) for id, some in aside.items()}

    def _aside(self, kind: str, checkpoint_id: str) -> Path:
        return self._root / f".{kind}-{checkpoint_id}-{secrets.token_hex(4)}"

    def _clean_up(self) -> None:
        names = self._names()
        self._settle_replaced(names)
        remove_dead_claims(self._root, names)
        now = file_system_now(self._root)
        for name in sorted({name.removesuffix(OWNER_SUFFIX) for name in names}):
            path, match = self._root / name, _HIDDEN.fullmatch(name)
            if match is None:
                continue
            if match["kind"] == "removed":
                self._finish_removal(path, self._home_of(path, match["id"]), delete_folder)
            elif match["kind"] == "unpublished" and path not in self._opened:
                with warned(f"cannot clean up {path}"), abandoned(path, self._run_id, now, self._stale_s) as dead:
                    # A kill after an exchange leaves the old checkpoint under this name.
                    if dead and (not path.exists() or self._remove(path, self._home_of(path, match["id"]))):
                        remove(owner_file(path), own_name)

    def _home_of(self, aside: Path, id: str) -> Path:
        """Return the path of a checkpoint before it got a hidden name with this id. One saved by its path has no commit number."""
        one = look(aside)
        if one is not None and one.number == 0 and id == safe_id(one.id) and _PART.fullmatch(one.id):
            return self._root / one.id
        return self._root / f"{COMMITTED}{id}"

    def _settle_replaced(self, names: list[str]) -> None:
        """Finish replacements that a kill interrupted: restore the old checkpoint, or remove it if the new one is committed."""
        for id, candidates in self._replaced_among(names).items():
            target = self._root / f"{COMMITTED}{id}"
            with warned(f"cannot settle the replacement of {target}"):
                if candidates and look_for(id, target) is None:
                    self._make_way(target, id, refused={})
                    back = candidates.pop().path
                    os.rename(back, target)
                    sync_folder(self._root)
                    self._restored[target] = back
                for old in candidates:
                    self._retire(old.path, target, id, delete_folder)

    def _retire(self, old: Path, new: Path, id: str, delete: Callable[[Path], None], *, others: bool = False) -> None:
        """Remove a checkpoint that a new one has replaced; keep it in quarantine if the new one is not of its history."""
        one = look(old)
        if others or one is None or continues(new, one):
            self._remove(old, new, delete)
            return
        with warned(f"cannot move {old} into quarantine"):
            self._put_in_quarantine(old, id, why_of_another_history(one, new.name))

    def _make_way(self, target: Path, checkpoint_id: str, refused: Mapping[Path, str]) -> Path | None:
        """Move aside the folder at `target`; return its new path, or None if there is none."""
        if not os.path.lexists(target):
            return None
        reason = self._why_refused(target, checkpoint_id, refused)
        if reason is not None:
            return self._put_in_quarantine(target, checkpoint_id, reason)
        aside = self._aside("replaced", checkpoint_id)
        os.rename(target, aside)
        return aside

    def _put_in_quarantine(self, path: Path, checkpoint_id: str, reason: str) -> Path:
        aside = self._aside("quarantined", checkpoint_id)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        os.rename(path, aside)
        why = aside.with_name(f"{aside.name}.reason.txt")
        with warned(f"cannot write {why}"):
            write_durably(why, f"{reason}\nmoved here from {path.name} by run {self._run_id} at {when}\n".encode())
        _log.warning("%s is now %s: %s", path, aside, reason)
        return aside

    def _why_refused(self, target: Path, checkpoint_id: str, refused: Mapping[Path, str]) -> str | None:
        if target.is_symlink():
            return "it is no checkpoint, but a symbolic link"
        if not (target / MANIFEST_NAME).is_file():
            return f"it holds no {MANIFEST_NAME}, so it is no checkpoint"
        if (one := look_for(checkpoint_id, target)) is None or not one.says_id:
            return f"its {MANIFEST_NAME} does not say that it was saved as {checkpoint_id}"
        return next((reason for path, reason in refused.items() if self._is(target, path)), None)

    def _is(self, now: Path, named: Path) -> bool:
        """Whether `named` is the checkpoint at `now`, by this path or by its path before it was restored."""
        return os.path.abspath(named) in map(os.path.abspath, (now, self._restored.get(now, now)))

    def _remove(self, path: Path, home: Path | None = None, delete: Callable[[Path], None] | None = None) -> bool:
        """Rename a folder to `.removed-...`, then delete it. Return False, with a warning, if the rename fails.

        Args:
            home: the folder in which files stay that the user has put into a checkpoint; None: it was never published.
        """
        doomed = self._aside("removed", _name_of(home or path))
        try:
            os.rename(path, doomed)
        except OSError as error:
            _log.warning("cannot remove %s, the next save tries again: %s", path, sentence(error))
            return False
        self._finish_removal(doomed, home, delete or delete_folder)
        return True

    def _finish_removal(self, doomed: Path, home: Path | None, delete: Callable[[Path], None]) -> None:
        """Delete a renamed checkpoint, but for what the user has put beside its files, which goes back to `home`."""
        try:
            for name in _files_of_user(doomed) if home is not None else ():
                assert home is not None
                home.mkdir(exist_ok=True)
                back = home / name if not os.path.lexists(home / name) else home / f"{name}.{secrets.token_hex(4)}"
                os.rename(doomed / name, back)
                _log.warning("%s stays, and belongs to no checkpoint: the one that it was put into is removed", back)
        except CheckpointError as error:
            if (doomed / MANIFEST_NAME).is_file():  # else another process deletes it, too
                with warned(f"cannot move {doomed} into quarantine"):
                    why = f"it was to be removed, but may hold files of the user's, which its manifest does not tell: {error}"
                    self._put_in_quarantine(doomed, _name_of(home or doomed), why)
                return
        except OSError as error:
            _log.warning("cannot remove %s, the next save tries again: %s", doomed, sentence(error))
            return
        delete(doomed)

    def _release(self, unpublished: Path) -> None:
        owner = self._opened.pop(unpublished, None)
        if owner is not None:
            with warned(f"cannot remove {owner_file(unpublished)}"):
                owner.release()


def _files_of_user(checkpoint: Path) -> list[str]:
    """Return what lies in a checkpoint's folder beside what its save has put there. Folders of components are not looked into."""
    if checkpoint.is_symlink() or not (checkpoint / MANIFEST_NAME).is_file():
        return []  # its deletion has begun
    manifest = read_manifest(checkpoint)
    made = {file.partition("/")[0] for file in manifest.files} | {MANIFEST_NAME, DOCUMENT, DATABASE, *manifest.components}
    return sorted({*os.listdir(checkpoint)} - made)


def run_owner(run_id: str) -> str:
    """Return the name of the owner file of a run that shares its root with others."""
    return f".run-{run_id}{OWNER_SUFFIX}"


def safe_id(name: str) -> str:
    """Return a valid id that resembles the name of a folder, for the names of hidden folders beside it.

    It has no `_`: Lightning takes every name that contains `hpc_ckpt_` for a checkpoint.
    """
    return re.sub(r"[^A-Za-z0-9.-]", "-", name)[:200]


def is_there(path: Place) -> bool:
    """Whether something is at a path, or a checkpoint at an address."""
    return os.path.lexists(path) if isinstance(path, Path) else look(path) is not None


def is_removable(path: Place) -> bool:
    """Whether a path is that of a checkpoint which was saved under this name, or a symbolic link, of which the link alone is removed."""
    return (isinstance(path, Path) and path.is_symlink()) or ((one := look(path)) is not None and one.id in (path.name, id_in(path.name)))


def _name_of(folder: Path) -> str:
    """The part of hidden names that tells of a folder."""
    id = id_in(folder.name)
    return id if id != folder.name and _VALID_ID.fullmatch(id) else safe_id(folder.name)


def _make_folder(path: Path) -> None:
    """Create a folder and its parents durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def why_of_another_history(one: Committed[Any], name: str) -> str:
    """Why a checkpoint that was saved under this name is quarantined."""
    by = f"run {one.run_id}" if one.run_id is not None else "an unknown run"
    return f"it was saved as {name} by {by}, and a run that did not go on from it has saved under this id, too"


def require_removable(checkpoint: Path) -> None:
    """Refuse a checkpoint that this user may not rename or delete, before anything of it is touched.

    Raises:
        OSError: naming the folder that may not be written.
    """
    above = checkpoint.parent.stat()
    if above.st_mode & stat.S_ISVTX and os.geteuid() not in (0, above.st_uid, checkpoint.stat().st_uid):
        raise PermissionError(errno.EPERM, "only its owner may remove it", str(checkpoint))
    for folder in [checkpoint.parent, *(Path(inside) for inside, _, _ in os.walk(checkpoint))]:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            code = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
            raise OSError(code, os.strerror(code), str(folder))


def delete_folder(doomed: Path) -> None:
    """Delete a renamed folder or file. Another process may be deleting it, too. Never raises."""
    with warned(f"cannot delete {doomed}, the next save tries again"):
        remove(doomed, own_name)


@contextmanager
def _named(target: Path) -> Iterator[None]:
    """Have an error inside the block name this path in place of a hidden one beside it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and Path(error.filename).parent == target.parent:
            error.filename = str(target)
        raise
