"""The claim of one save on a folder or an address: a lock keeps other saves out, and tells what a dead one has left.

In a folder a save writes into a hidden folder of its own, and moves what is in there out at its end. So a save that was killed leaves the
hidden folder, which is known by its name. A note says what is moved, so that the next save moves it back.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from ckpt.catalog.lease import Lease
from ckpt.catalog.owner import OWNER_SUFFIX, FolderLock
from ckpt.errors import CheckpointExistsError
from ckpt.format.digests import digest_of
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS
from ckpt.format.places import Place
from ckpt.format.strict_json import Digest
from ckpt.storage.files import empty, own_name, remove, sync_folder, write_durably
from ckpt.storage.metadata import CONFIG_FNAME, CheckpointingConfig, save_config

OWNER = f".saving{OWNER_SUFFIX}"
STAGED = re.compile(r"\.saving-all-[0-9a-f]{8}")
"""Name of the hidden folder of a save."""
NOTE = "moving.json"
PARTS = [f"{name}/{MANIFEST_NAME}" for name in (COMMON, OBJECTS)]
"""Manifests of the small checkpoints beside the tensors."""

_UNDER_WAY: weakref.WeakValueDictionary[Place, SaveClaim] = weakref.WeakValueDictionary()
"""Registry: what this process saves to, which shares its locks."""


class SaveClaim:
    """A claim, until `remove` or `let_go`. Lead rank only.

    Raises:
        CheckpointExistsError: another save of this process to the place is under way.
        FolderInUseError: one of another process is.
    """

    def __init__(self, place: Place, progress: Callable[[], object]) -> None:
        self.place = place
        self._key = place.resolve() if isinstance(place, Path) else place
        if self._key in _UNDER_WAY:
            raise CheckpointExistsError(
                f"another save into {place} is under way: finalize it if it is an asynchronous one of this job, or save elsewhere"
            )
        claimed: dict[str, Any] = {
            "run_id": secrets.token_hex(8),
            "what": f"{place}",
            "advice": "wait for it to end, or save elsewhere",
        }
        self._lock = (
            FolderLock(place / OWNER, **claimed) if isinstance(place, Path) else Lease(place / OWNER, **claimed)
        )
        _UNDER_WAY[self._key] = self
        try:
            self._lock.acquire(progress)
        except BaseException:
            self.let_go()
            raise

    def require(self) -> None:
        """Require that no other save has taken over.

        Raises:
            CheckpointExistsError: one may have.
        """
        if not self._lock.stands():
            raise CheckpointExistsError(
                f"the lock on {self.place} was lost, so another save into it may have begun, and this one is given up"
            )

    def complete(self, config: CheckpointingConfig) -> None:
        """Write `metadata.json`, which makes what was saved a checkpoint."""
        save_config(config, self.place)

    def remove(self) -> None:
        """Let other saves come, at the end of a save."""
        self.let_go()

    def let_go(self) -> None:
        """Let other saves come after a failure. The next one removes what this one has left."""
        _UNDER_WAY.pop(self._key, None)
        self._lock.release()


class Moving(msgspec.Struct, forbid_unknown_fields=True):
    """The note of what a save moves.

    Attributes:
        names: in the hidden folder.
        manifests: path below it -> digest.
        last: name of the file that makes the folder a checkpoint.
    """

    names: list[str]
    manifests: dict[str, Digest]
    last: str


class FolderClaim(SaveClaim):
    """A claim on a folder.

    Attributes:
        staged: the hidden folder, which whoever writes into it makes.
    """

    def __init__(self, folder: Path, progress: Callable[[], object]) -> None:
        self.folder = folder
        self.staged = folder / f".saving-all-{secrets.token_hex(4)}"
        super().__init__(folder, progress)

    def publish(self, last: str) -> None:
        """Move all that is staged to the folder, durably, the manifest last.

        Args:
            last: as of `Moving`.

        Raises:
            CheckpointExistsError: somebody has put something under one of the names.
        """
        if not self.staged.exists():  # strategies of the user's have written elsewhere
            return
        names = sorted(os.listdir(self.staged), key=lambda name: name == MANIFEST_NAME)
        there = [path for path in (MANIFEST_NAME, *PARTS) if (self.staged / path).exists()]
        manifests = {path: digest_of((self.staged / path).read_bytes()) for path in there}
        write_durably(self.staged / NOTE, json.dumps(msgspec.to_builtins(Moving(names, manifests, last))).encode())
        for name in names:
            if os.path.lexists(self.folder / name):
                raise in_the_way(self.folder / name)
            os.rename(self.staged / name, self.folder / name)
        sync_folder(self.folder)

    def complete(self, config: CheckpointingConfig) -> None:
        self.publish(CONFIG_FNAME)
        super().complete(config)

    def remove(self) -> None:
        remove(self.staged, own_name)
        super().remove()

    def let_go(self) -> None:
        with suppress(OSError):  # what is not empty stays
            remove(self.staged, empty)
        super().let_go()


def in_the_way(path: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} is in the way, and no save that was interrupted lists it as its own; remove it if nobody needs it, or save into a folder "
        "of its own, such as an empty one"
    )


_given: ContextVar[Any] = ContextVar("the claim of the save that is under way", default=None)


@contextmanager
def claimed(claim: Any) -> Iterator[None]:
    """Have saves inside the block use this claim instead of making one. Let it go if the block fails."""
    token = _given.set(claim)
    try:
        yield
    except BaseException:
        if claim is not None:
            claim.let_go()
        raise
    finally:
        _given.reset(token)


def given_claim(place: Place) -> tuple[Any, str]:
    """The claim that a caller has made on this place, or on the one above, or None; and the place's path below that of the claim."""
    claim = _given.get()
    if claim is not None and claim.place == place:
        return claim, ""
    return (claim, place.name) if claim is not None and claim.place == place.parent else (None, "")
