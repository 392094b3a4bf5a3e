"""The states of checkpoints in an object store, which has no rename: a checkpoint is committed by one conditional put of its manifest.

Keys below the checkpoint root:

    checkpoint-<id>/checkpoint_manifest.json      the commit. It names its place of objects; only this is looked for
    checkpoint-<id>/<nonce>/...                   the objects of one attempt to save; nothing refers to them until the manifest does
    checkpoint-<id>/quarantined-<nonce>.json      kept: the manifest of a checkpoint that was damaged, or of another run, and its reason
    checkpoint-<id>/abandoned-<nonce>.json        kept: likewise, newer than the checkpoint that a run continued from with overwrite=True
    .attempt-<id>-<nonce>.json                    put before the first object of an attempt and removed after all others: what a dead
                                                  attempt may have left. It names the objects that the attempt replaces, too. It lies in
                                                  the root, so that one list shows checkpoints, attempts and owners
    .run.owner.json, .run-<run id>.owner.json     see `ckpt.catalog.lease`

    attempt noted --> objects put --> manifest put on the condition that the id is as it was when the attempt began --> note removed

A writer that sleeps may wake after its attempt was taken for dead, and its objects were removed. So before objects are removed the manifest
is changed, or, where there is none, a *fence* is put in its place: the condition of the sleeper's put then fails, and it commits nothing.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ckpt.catalog.committed import (
    COMMITTED,
    Catalog,
    Commit,
    Committed,
    commit_after,
    committed_in,
    id_in,
    look,
    look_for,
    placed,
    to_be_tried_again,
)
from ckpt.catalog.lease import Lease, living_runs
from ckpt.catalog.ledger import require_valid_id, why_of_another_history
from ckpt.catalog.owner import OWNER_SUFFIX, about_process, has_ended
from ckpt.catalog.removing import left_over, without
from ckpt.catalog.retention import Retention, as_retention
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CorruptCheckpointError,
    StorageError,
    logger_of,
    sentence,
    telling,
)
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, CheckpointManifest, closing, fence, is_fence
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import ObjectPath, Place
from ckpt.format.strict_json import parse
from ckpt.storage.objects.files import side_by_side
from ckpt.storage.objects.store import Tag, store_of
from ckpt.storage.stored import files_root, read_manifest

ATTEMPT = ".attempt-"
PROBE = ".probe-"
_FENCE = re.compile(rb'  "fence": "[0-9a-f]+",\n')
_DATA = re.compile(rb'\n  "data": "([0-9a-f]{16})",\n')
_NOTE = re.compile(r"\.attempt-(?P<id>.+)-(?P<nonce>[0-9a-f]{16})\.json")
_HEAD_BYTES = 4096
_UNCLAIMED = timedelta(days=1)
"""An attempt of a save that has claimed no root, as `ckpt.save` makes them, counts as dead after this time, or when its process was one of
this machine and has ended."""

_COPIED = "its files have no place of their own: it was copied there"
_IN_FLIGHT: set[str] = set()
"""Registry: keys of the notes of this process's attempts, of all its runs."""

_log = logger_of(__name__)


@dataclass(slots=True)
class _Attempt:
    """A save of this process that is under way.

    Attributes:
        expected: version of the manifest that the attempt replaces; None: there is none.
        old: nonce of the objects that it replaces; None: there are none, or they have no place of their own.
        replaces: there is a checkpoint that it replaces.
        manifest: what `publish` commits.
        is_tried: the commit was put. Whether it is one, the store knows.
    """

    checkpoint: ObjectPath
    nonce: str
    note: str
    expected: Tag | None
    old: str | None
    replaces: bool
    manifest: bytes = b""
    is_tried: bool = False


@dataclass(slots=True)
class _Listed:
    """What a list of a root has shown.

    Attributes:
        ids: of what may be checkpoints.
        notes: of attempts, by name.
        owners: names of owner objects -> when each was put, by the store's clock, in seconds.
        times: the same of all objects in the root.
        known: checkpoints that were looked at.
    """

    ids: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    owners: dict[str, float] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    known: dict[ObjectPath, Committed[ObjectPath]] = field(default_factory=dict)

    def forget(self, checkpoint: ObjectPath) -> None:
        self.ids.discard(id_in(checkpoint.name))
        self.known.pop(checkpoint, None)


class ObjectLedger(Catalog[ObjectPath]):
    """All checkpoints below one root in an object store. See `ckpt.catalog.ledger.Ledger`, whose methods these are.

    Args: those of `Ledger`, without `delete`: a thousand objects are deleted by one request.
    """

    def __init__(
        self,
        root: ObjectPath,
        *,
        run_id: str,
        saves_as: str | None = None,
        keep_last: int | Retention | None = None,
        stale_s: float = 60.0,
    ) -> None:
        self._root = root
        self._run_id = run_id
        self._saves_as = saves_as
        self._retention = as_retention(keep_last)
        self._stale_s = stale_s
        self._store = store_of(root)
        self._opened: dict[ObjectPath, _Attempt] = {}
        self._lock: Lease | None = None
        self._listed = _Listed()

    def committed(self) -> list[Committed[ObjectPath]]:
        """Return every committed checkpoint, the oldest commit first. A list proposes them, and each one's manifest decides.

        Raises:
            StorageError: the store does not answer, or has no such bucket. An empty root is none of these.
        """
        with telling(f"checkpoint root {self._root} cannot be read"):
            self._listed = self._list()
            return self._committed_among(self._listed)

    def newer_than(self, checkpoint: Place) -> list[Committed[ObjectPath]] | None:
        """Return the checkpoints committed after this one, the oldest first; None: this one is not in the root."""
        committed = self.committed()
        at = next((number for number, commit in enumerate(committed) if commit.path == checkpoint), None)
        return None if at is None else committed[at + 1 :]

    def next_commit(self) -> Commit:
        """Return number and time for a checkpoint that will be published, after those that there were at its `open`. Lead rank only."""
        with telling(f"checkpoint root {self._root} cannot be read"):
            return commit_after(self._committed_among(self._listed))

    def claim(self, lock: Lease, progress: Callable[[], object]) -> None:
        """Acquire the root's lock, or check that it is still held. Lead rank only. The first time, see that the store keeps conditions.

        Raises:
            FolderInUseError: another run saves here.
            StorageError: the store refuses, or does not keep the condition of a put.
        """
        with telling(f"checkpoint root {self._root} cannot be written"):
            if not lock.is_held:
                self._require_conditions()
            lock.acquire(progress)
        self._lock, self._listed.known = lock, lock.known

    def open(self, checkpoint_id: str) -> ObjectPath:
        """Clean up after dead attempts, note a new one, and return the place of its objects.

        Raises:
            CheckpointExistsError: another run, which lives, has a checkpoint of this id.
            ConfigurationError: the id is not a valid name.
            StorageError: the store refuses.
        """
        require_valid_id(checkpoint_id)
        with telling(f"checkpoint root {self._root} cannot be written"):
            self._listed = self._list()
            if self._lock is not None:
                self._sweep()
            return self._begin(self._at(checkpoint_id), checkpoint_id)

    def is_seen(self, unpublished: ObjectPath) -> bool:
        """Whether this rank sees what the lead's `open` has put: it reads the same store. Any rank."""
        with suppress(FileNotFoundError):
            self._store.head(self._note_of(unpublished.parent, unpublished.name))
            return True
        return False

    def record(self, unpublished: ObjectPath, manifest: bytes) -> None:
        """Take the manifest that `publish` commits."""
        self._opened[unpublished].manifest = manifest

    def publish(
        self,
        unpublished: ObjectPath,
        checkpoint_id: str,
        *,
        refused: Mapping[ObjectPath, str] | None = None,
        replace_others: bool = False,
        committed: Callable[[ObjectPath], None] = lambda _: None,
    ) -> ObjectPath:
        """Commit an attempt by putting its manifest; return the checkpoint's address. See `Ledger.publish`.

        Raises:
            CheckpointExistsError: another run has a checkpoint of this id, or this id has changed since the attempt began.
            StorageError: the store refuses.
        """
        target = self._at(checkpoint_id)
        with telling(f"{target.name} cannot be published in {self._root}"):
            attempt = self._opened[unpublished]
            kept = attempt.replaces and self._keep_old(attempt, checkpoint_id, refused or {}, replace_others)
            self._commit(attempt)
        committed(target)
        self._finish(attempt, kept=kept)
        self._listed.ids.add(checkpoint_id)
        self._listed.known[target] = replace(committed_in(attempt.manifest, target), id=checkpoint_id)
        return target

    def require_free(self, target: ObjectPath) -> None:
        """Require that no checkpoint is where a new one shall be.

        Raises:
            CheckpointExistsError: one is, or other objects are.
        """
        with telling(f"{target} cannot be looked at"):
            folders, objects = self._store.names(target.key)
            if look(target) is not None:
                raise CheckpointExistsError(f"{target} holds a checkpoint already; choose another address, or remove this one")
            if [name for name in objects if name != MANIFEST_NAME] or [name for name in folders if not _is_nonce(name)]:
                raise CheckpointExistsError(f"{target} holds objects that are of no checkpoint; choose another address")

    def open_at(self, target: ObjectPath) -> ObjectPath:
        """As `open`, for a checkpoint whose address is not made of an id."""
        with telling(f"{target} cannot be written"):
            self._require_conditions()
            return self._begin(target, None)

    def open_again(self, target: ObjectPath, nonce: str) -> ObjectPath:
        """As `open_at`, but the objects' place is named by the caller: what a dead process has put there is there.

        Two processes that make the same copy put the same objects; the first commit counts.

        Args:
            nonce: 16 hexadecimal digits.
        """
        with telling(f"{target} cannot be written"):
            self._require_conditions()
            return self._begin(target, None, nonce)

    def leave(self, unpublished: ObjectPath) -> None:
        """Give up an attempt, without its objects and its note: the next one goes on from them."""
        if (attempt := self._opened.pop(unpublished, None)) is not None:
            _IN_FLIGHT.discard(attempt.note)

    def publish_at(
        self,
        unpublished: ObjectPath,
        target: ObjectPath,
        *,
        replaces: bool = False,
        committed: Callable[[ObjectPath], None] = lambda _: None,
    ) -> None:
        """Commit an attempt at an address of its own. See `Ledger.publish_at`.

        Args:
            replaces: a checkpoint that is there is removed once the new one has taken its place.

        Raises:
            CheckpointExistsError: a checkpoint has come there.
            StorageError: the store refuses.
        """
        attempt = self._opened[unpublished]
        with telling(f"{target} cannot be published"):
            if not replaces:
                self.require_free(target)
            elif attempt.replaces and attempt.old is None:
                self._copy_aside(target, "quarantined", _COPIED, "")
            self._commit(attempt)
        committed(target)
        self._finish(attempt, kept=False)

    def living(self) -> Set[str | None]:
        """Return the run ids of the other runs that save in this root, and may be alive."""
        self._listed = self._listed if self._opened else self._list()
        own = self._lock.name if self._lock is not None else ""
        found: set[str | None] = {*living_runs(self._root, self._listed.owners, self._stale_s, own)}
        return found - {self._saves_as}

    def quarantine(self, refused: Mapping[ObjectPath, str], *, keep: ObjectPath) -> list[ObjectPath]:
        """Set damaged checkpoints aside; return the addresses of their manifests. Missing ones are skipped."""
        moved = []
        for path, reason in refused.items():
            if path != keep and path.parent == self._root:
                with to_be_tried_again(f"cannot move {path} into quarantine"), suppress(FileNotFoundError):
                    moved += self._set_aside(path, "quarantined", reason)
        return moved

    def abandon(self, newer: Sequence[Committed[ObjectPath]]) -> list[ObjectPath]:
        """Set aside the newer checkpoints when a run continues from an older one; return the addresses of their manifests.

        The newest is set aside first, so that a kill in between leaves a consistent, shorter history. Lead rank only.
        """
        with telling(f"newer checkpoints in {self._root} cannot be set aside"):
            return [at for commit in reversed(newer) for at in self._set_aside(commit.path, "abandoned", "")]

    def discard(self, unpublished: ObjectPath) -> None:
        """Remove the objects of a failed save. Never raises: the next `open` of this run removes the rest.

        Where the store has not answered the commit, it may be one: the next `open` looks, and changes the manifest before it removes.
        """
        attempt = self._opened.pop(unpublished, None)
        if attempt is not None:
            _IN_FLIGHT.discard(attempt.note)
        if attempt is not None and not attempt.is_tried:
            with to_be_tried_again(f"cannot remove {unpublished}"):
                self._remove_objects(unpublished)
                self._store.delete([attempt.note])

    def remove(self, checkpoint: ObjectPath) -> None:
        """Remove a checkpoint: a note of it, its manifest, its objects, the note. If that fails, the next save goes on, with a warning."""
        self._remove(checkpoint, lambda one: True)

    def _remove(self, checkpoint: ObjectPath, is_doomed: Callable[[Committed[ObjectPath]], bool]) -> bool:
        """See `remove`. The manifest as it is now decides whether it is the checkpoint that is to go; return whether it went."""
        went = False
        with to_be_tried_again(f"cannot remove {checkpoint}"), suppress(FileNotFoundError):
            data, _ = self._store.get((checkpoint / MANIFEST_NAME).key)
            went = is_doomed(committed_in(bytes(data[:_HEAD_BYTES]), checkpoint)) and self._remove_what_says(checkpoint, data)
        return went

    def _remove_what_says(self, checkpoint: ObjectPath, manifest: memoryview) -> bool:
        match = _DATA.search(bytes(manifest[:_HEAD_BYTES]))
        if match is None:
            _log.warning("%s stays: its manifest names no place of objects", checkpoint)
            return False
        nonce = match[1].decode()
        note = self._note_of(checkpoint, nonce)
        self._store.put(note, self._noted(checkpoint, nonce, None))
        self._store.delete([(checkpoint / MANIFEST_NAME).key])
        self._remove_objects(checkpoint / nonce)
        self._store.delete([note])
        self._listed.forget(checkpoint)
        return True

    def _names(self) -> Iterable[str]:
        return self._store.names(self._root.key)[0]

    def _settled(self) -> list[Committed[ObjectPath]]:
        return self._committed_among(self._listed)

    def _is(self, now: ObjectPath, named: ObjectPath) -> bool:
        return now == named

    def _remove_surplus(self, old: Committed[ObjectPath]) -> bool:
        # Another run that shares the root may have replaced it.
        return self._remove(old.path, lambda now: now.run_id == old.run_id)

    def _take_out(self, one: Committed[ObjectPath], keys: Sequence[str], progress: Callable[[], object]) -> None:
        """Take components out of a checkpoint: a note of it, its manifest if nobody has changed it, objects, the note.

        A sweep finishes what a kill has interrupted, by the note.
        """
        if {*keys} <= {*one.removed}:
            return
        at = (one.path / MANIFEST_NAME).key
        data, tag = self._store.get(at)
        manifest = parse_manifest(bytes(data), str(one.path / MANIFEST_NAME))
        root = files_root(one.path, manifest)
        assert isinstance(root, ObjectPath)
        if manifest.data is None or manifest.run_id != one.run_id:  # copied there, or replaced by a run that shares the root
            return
        left = without(one.path, manifest, keys, lambda path, made: self._store.put((root / path).key, made), progress)
        if left is None:
            return
        note = self._note_of(one.path, manifest.data)
        self._store.put(note, self._noted(one.path, manifest.data, None))
        if self._store.replace(at, left.to_bytes(), tag) is None and not self._says(at, left):
            return  # another process has changed it meanwhile; the next sweep removes the note
        self._remove_left_over(one.path, left)
        self._store.delete([note])
        self._listed.known[one.path] = replace(one, removed=tuple(left.removed))

    def _says(self, at: str, manifest: CheckpointManifest) -> bool:
        """Whether this very manifest was put, by a put whose answer was lost."""
        return bytes(self._store.get(at)[0]) == manifest.to_bytes()

    def _remove_left_over(self, checkpoint: ObjectPath, manifest: CheckpointManifest) -> None:
        """Remove the objects of components that a manifest says are taken out, and its former indexes."""
        root = files_root(checkpoint, manifest)
        assert isinstance(root, ObjectPath) and root != checkpoint
        folders, objects = self._store.names(root.key)
        indexes, keys = left_over(manifest, {*folders, *objects})
        below = [found.key for key in keys for found in self._store.below((root / key).key)]
        self._store.delete([*((root / name).key for name in indexes), *below])

    def _list(self) -> _Listed:
        """List the root, by one request for each thousand of its checkpoints. What is known of checkpoints from before is kept."""
        folders, objects = self._store.names(self._root.key)
        return _Listed(
            {id_in(name) for name in folders if name.startswith(COMMITTED)},
            [name for name in objects if _NOTE.fullmatch(name)],
            {name: at for name, at in objects.items() if name.startswith(".run") and name.endswith(OWNER_SUFFIX)},
            objects,
            self._listed.known,
        )

    def _committed_among(self, listed: _Listed) -> list[Committed[ObjectPath]]:
        """Look at each listed checkpoint. One that a run which holds the root's lock has seen before is not looked at again."""
        if self._lock is None:
            listed.known.clear()
        unknown = sorted(id for id in listed.ids if self._at(id) not in listed.known)
        for id, commit in zip(unknown, side_by_side(lambda id: look_for(id, self._at(id)), unknown), strict=True):
            if commit is not None:
                listed.known[self._at(id)] = commit
        found = [listed.known[at] for id in listed.ids if (at := self._at(id)) in listed.known]
        return sorted(placed(found), key=lambda one: one.order)

    def _at(self, checkpoint_id: str) -> ObjectPath:
        return self._root / f"{COMMITTED}{checkpoint_id}"

    def _begin(self, target: ObjectPath, checkpoint_id: str | None, nonce: str | None = None) -> ObjectPath:
        """Note an attempt.

        Args:
            checkpoint_id: of a checkpoint in a root that runs share; None: see `open_at`.
        """
        key, expected, old, replaces = (target / MANIFEST_NAME).key, None, None, False
        with suppress(FileNotFoundError):
            data, expected = self._store.get(key)
            head = bytes(data[:_HEAD_BYTES])
            match = _DATA.search(head)
            old, replaces = match[1].decode() if match else None, not is_fence(bytes(data))
            if checkpoint_id is not None and replaces:
                self._require_not_of_another(committed_in(head, target))
        nonce = nonce or secrets.token_hex(8)
        note = self._note_of(target, nonce)
        self._store.put(note, self._noted(target, nonce, old))
        _IN_FLIGHT.add(note)
        self._opened[target / nonce] = _Attempt(target, nonce, note, expected, old, replaces)
        return target / nonce

    def _note_of(self, checkpoint: ObjectPath, nonce: str) -> str:
        return (self._root / f"{ATTEMPT}{checkpoint.name.removeprefix(COMMITTED)}-{nonce}.json").key

    def _noted(self, checkpoint: ObjectPath, nonce: str, old: str | None) -> bytes:
        record = {"checkpoint": checkpoint.name, "nonce": nonce, "old": old, "run_id": self._saves_as}
        return json.dumps(record if self._lock is not None else about_process(self._run_id) | record | {"run_id": None}).encode()

    def _commit(self, attempt: _Attempt) -> None:
        """Put the manifest, on the condition that the checkpoint is as it was when the attempt began."""
        assert attempt.manifest, "nothing was recorded"
        try:
            self._store.head(attempt.note)
        except FileNotFoundError:  # whoever took this process for dead has removed its objects
            raise self._changed(attempt) from None
        key = (attempt.checkpoint / MANIFEST_NAME).key
        attempt.is_tried = True
        try:
            if attempt.expected is None:
                tag = self._store.create(key, attempt.manifest)
            else:
                tag = self._store.replace(key, attempt.manifest, attempt.expected)
            is_ours = tag is not None or self._is_named(attempt)
        except OSError as error:
            raise StorageError(
                f"the store has not answered the commit of {attempt.checkpoint}, which is committed, or not, but whole if it is: a list of "
                f"the checkpoints will show. {sentence(error)}"
            ) from error
        if not is_ours:
            attempt.is_tried = False
            raise self._changed(attempt)

    def _is_named(self, attempt: _Attempt) -> bool:
        """Whether the manifest names this attempt: it was committed by a put whose answer was lost, and a mark was put into it since."""
        with suppress(FileNotFoundError):
            match = _DATA.search(bytes(self._store.get((attempt.checkpoint / MANIFEST_NAME).key)[0][:_HEAD_BYTES]))
            return match is not None and match[1].decode() == attempt.nonce
        return False

    def _changed(self, attempt: _Attempt) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{attempt.checkpoint} was changed by another process since this save began, which took this one for dead or saves under the "
            "same id; nothing is committed"
        )

    def _finish(self, attempt: _Attempt, *, kept: bool) -> None:
        """After the commit: remove what was replaced, then the note. What fails here is done by the next sweep."""
        with to_be_tried_again(f"cannot remove what {attempt.checkpoint} has replaced"):
            if attempt.old is not None and not kept:
                self._remove_objects(attempt.checkpoint / attempt.old)
            self._store.delete([attempt.note])
        self._opened.pop(attempt.checkpoint / attempt.nonce, None)
        _IN_FLIGHT.discard(attempt.note)

    def _keep_old(
        self, attempt: _Attempt, checkpoint_id: str, refused: Mapping[ObjectPath, str], replace_others: bool
    ) -> bool:
        """Put a checkpoint that is to be replaced into quarantine, if it is damaged or of another history; return whether."""
        target = attempt.checkpoint
        old = look(target)
        reason = refused.get(target)
        if attempt.old is None:
            reason = reason or _COPIED
        if reason is None and old is not None and not (old.says_id and old.id == checkpoint_id):
            reason = f"its {MANIFEST_NAME} does not say that it was saved as {checkpoint_id}"
        if reason is None and old is not None and not replace_others and not self._goes_on_from(attempt, old):
            reason = why_of_another_history(old, target.name)
        if reason is None:
            return False
        # The note must not name its objects any more, before the manifest that does is replaced.
        self._store.put(attempt.note, self._noted(target, attempt.nonce, None))
        self._copy_aside(target, "quarantined", reason, attempt.old or "")
        return True

    def _goes_on_from(self, attempt: _Attempt, old: Committed[ObjectPath]) -> bool:
        new = parse(attempt.manifest, MANIFEST_NAME)
        history = new.get("history", {})
        return bool(new.get("run_id") == old.run_id or old.number <= history.get(old.run_id or "", -1))

    def _set_aside(self, checkpoint: ObjectPath, kind: str, reason: str) -> list[ObjectPath]:
        """Give a manifest another name, so that it is no checkpoint any more; its objects stay."""
        try:
            nonce = read_manifest(checkpoint).data or ""
        except CheckpointError:
            nonce = ""
        aside = self._copy_aside(checkpoint, kind, reason, nonce)
        self._store.delete([(checkpoint / MANIFEST_NAME).key])
        return [aside]

    def _copy_aside(self, checkpoint: ObjectPath, kind: str, reason: str, nonce: str) -> ObjectPath:
        aside = checkpoint / f"{kind}-{nonce or secrets.token_hex(8)}.json"
        self._store.copy((checkpoint / MANIFEST_NAME).key, aside.key)
        if reason:
            when = datetime.now(UTC).isoformat(timespec="seconds")
            why = f"{reason}\nset aside by run {self._run_id} at {when}\n"
            self._store.put(aside.with_name(f"{aside.name}.reason.txt").key, why.encode())
            _log.warning("%s is now %s: %s", checkpoint, aside, reason)
        return aside

    def _require_conditions(self) -> None:
        """Require that the store refuses a put whose condition does not hold. Some stores take it and overwrite: nothing is safe there."""
        probe = (self._root / f"{PROBE}{secrets.token_hex(8)}").key
        self._store.create(probe, b"first")
        try:
            if self._store.create(probe, b"second") is not None:
                raise StorageError(
                    f"{self._root}: this store ignores the condition of a put (If-None-Match), so two processes could overwrite each "
                    "other's checkpoints unseen; nothing is saved there. Use a store, or a version of it, that keeps conditions"
                )
        finally:
            with to_be_tried_again(f"cannot remove {probe}"):
                self._store.delete([probe])

    def _sweep(self) -> None:
        """Remove what dead attempts have left, and finish removals that were interrupted."""
        old = datetime.now(UTC).timestamp() - _UNCLAIMED.total_seconds()
        probes = [name for name, at in self._listed.times.items() if name.startswith(PROBE) and at < old]
        self._store.delete([(self._root / name).key for name in probes])
        names = [name for name in self._listed.notes if (self._root / name).key not in _IN_FLIGHT]
        living = self.living() if names else frozenset()
        for name in names:
            with to_be_tried_again(f"cannot clean up after {name}"):
                self._sweep_one(name, living)

    def sweep_all(self) -> None:
        """Clean up after all attempts of which notes lie in this root. The caller has claimed it, and so their processes are dead."""
        self._listed = self._list()
        for name in self._listed.notes:
            self._sweep_one(name, None)

    def give_up(self, target: ObjectPath, nonce: str) -> None:
        """Remove an attempt, or what it has committed. The caller has claimed its place, and so its process is dead."""
        self._sweep_one(self._note_of(target, nonce).rpartition("/")[2], None)
        with suppress(FileNotFoundError):
            data, _ = self._store.get((target / MANIFEST_NAME).key)
            match = _DATA.search(bytes(data[:_HEAD_BYTES]))
            if match is not None and match[1].decode() == nonce:
                self._remove_what_says(target, data)

    def _sweep_one(self, name: str, living: Set[str | None] | None) -> None:
        """Clean up after the attempt that a note is of, unless one of these runs makes it; None: nobody does."""
        key = (self._root / name).key
        try:
            record = parse(bytes(self._store.get(key)[0]), name)
        except FileNotFoundError:
            return
        match = _NOTE.fullmatch(name)
        if not isinstance(record, dict) or match is None or record.get("nonce") != match["nonce"]:
            return
        checkpoint, nonce = self._root / str(record["checkpoint"]), match["nonce"]
        if checkpoint.parent != self._root or (living is not None and self._may_live(record, name, living)):
            return
        manifest = (checkpoint / MANIFEST_NAME).key
        data, tag = b"", None
        with suppress(FileNotFoundError):
            found, tag = self._store.get(manifest)
            data = bytes(found)
        committed = _DATA.search(data[:_HEAD_BYTES])
        now = committed[1].decode() if committed else None
        if now != nonce and not self._fence(manifest, data, tag):
            return  # it has just committed, or another process cleans up: the next sweep sees which
        if now == nonce and committed_in(data[:_HEAD_BYTES], checkpoint).removed:
            with suppress(CorruptCheckpointError):
                self._remove_left_over(checkpoint, parse_manifest(data, str(checkpoint / MANIFEST_NAME)))
        for gone in {nonce, record.get("old")} - {None, now}:
            if _is_nonce(str(gone)) and not self._is_kept(checkpoint, str(gone)):
                self._remove_objects(checkpoint / str(gone))
        self._store.delete([key])

    def _may_live(self, record: Mapping[str, Any], name: str, living: Set[str | None]) -> bool:
        by = record.get("run_id")
        if by is not None:
            return by in living
        return not has_ended(record) and datetime.now(UTC).timestamp() - self._listed.times[name] < _UNCLAIMED.total_seconds()

    def _fence(self, manifest: str, data: bytes, tag: Tag | None) -> bool:
        """Change what a sleeping writer expects of a manifest; return whether it is changed."""
        nonce = secrets.token_hex(8)
        if tag is None:
            return self._store.create(manifest, fence(nonce)) is not None
        if is_fence(data):
            return self._store.replace(manifest, fence(nonce), tag) is not None
        end = len(data) - len(closing("0" * 32))
        if not data.startswith(b"{\n") or data[end:] != closing(digest_of(data[:end])):
            return False  # damaged, or of another writer: it stays as it is, and so do the objects
        body = f'{{\n  "fence": "{nonce}",\n'.encode() + _FENCE.sub(b"", data[2:end], count=1)
        return self._store.replace(manifest, body + closing(digest_of(body)), tag) is not None

    def _is_kept(self, checkpoint: ObjectPath, nonce: str) -> bool:
        """Whether a manifest that was set aside names these objects."""
        _, objects = self._store.names(checkpoint.key)
        return any(name in (f"quarantined-{nonce}.json", f"abandoned-{nonce}.json") for name in objects)

    def _remove_objects(self, place: ObjectPath) -> None:
        assert _is_nonce(place.name), f"{place} is not the place of an attempt"
        self._store.delete([found.key for found in self._store.below(place.key)])


def _is_nonce(name: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{16}", name) is not None
