"""An address in an object store as the destination of a save. The counterpart of `destination.py` and `save_marker.py`.

Tensors, common state and objects are committed one after the other, each by a conditional put of its manifest; `metadata.json` is put last,
and makes the three a checkpoint. A lease keeps other saves away until then. Without `metadata.json` they are what a dead save has left.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.committed import look
from ckpt.catalog.lease import Lease
from ckpt.catalog.owner import OWNER_SUFFIX
from ckpt.dist_checkpointing.folder.save_marker import given_mark
from ckpt.errors import CheckpointExistsError, logger_of
from ckpt.format.manifest import COMMON, OBJECTS, SHARDED
from ckpt.format.places import ObjectPath
from ckpt.ranks.topology import Topology
from ckpt.saving.new_folder import NewFolder
from ckpt.saving.prepared_save import PreparedSave
from ckpt.storage.metadata import maybe_load_config
from ckpt.storage.stored import read_manifest

_OWNER = f".saving{OWNER_SUFFIX}"
_UNDER_WAY: set[ObjectPath] = set()
"""Registry: addresses that this process saves to, which shares its leases."""

_log = logger_of(__name__)


class GivenAddress(NewFolder):
    """The address of a save through dist_checkpointing. See `GivenFolder`."""

    def __init__(self, place: ObjectPath) -> None:
        super().__init__(place, replaces=True)

    def expect(self, save: PreparedSave[Any], topology: Topology) -> None:
        """Do nothing: the note of an attempt names all of its objects."""

    def open(self, topology: Topology) -> None:
        """See `NewFolder.open`.

        Raises:
            CheckpointExistsError: a checkpoint is at the address, and no caller has looked at it.
        """
        with topology.phase("look"):
            if topology.is_lead and given_mark(self.path)[0] is None and look(self.path) is not None:
                raise _holds_a_checkpoint(self.path)
        super().open(topology)


class AddressMark:
    """The claim of one save on an address, until `remove`. Lead rank only. See `SaveMarker`.

    Raises:
        CheckpointExistsError: another save of this process to the address is under way.
        FolderInUseError: one of another process is.
    """

    def __init__(self, place: ObjectPath, progress: Callable[[], object]) -> None:
        self.folder = place
        if place in _UNDER_WAY:
            raise CheckpointExistsError(
                f"another save into {place} is under way: finalize it if it is an asynchronous one of this job, or save to another address"
            )
        self._lease = Lease(
            place / _OWNER, run_id=secrets.token_hex(8), what=f"{place}", advice="wait for it to end, or save to another address"
        )
        self._lease.acquire(progress)
        _UNDER_WAY.add(place)

    def require(self) -> None:
        """Require that no other save has taken over.

        Raises:
            CheckpointExistsError: one may have.
        """
        if not self._lease.stands:
            raise CheckpointExistsError(
                f"the lease on {self.folder} was lost, so another save into it may have begun, and this one is given up"
            )

    def remove(self) -> None:
        """Let other saves come: at the end of a save, or after a failure. The next one removes what this one has left."""
        _UNDER_WAY.discard(self.folder)
        self._lease.release()

    let_go = remove


def take_address(place: ObjectPath, progress: Callable[[], object]) -> AddressMark:
    """Refuse an address that is in use, or holds a checkpoint; claim it, and remove what a dead save has left.

    Only checkpoints of one component that dist_checkpointing alone saves are removed.
    """
    _require_none(place)
    mark = AddressMark(place, progress)
    try:
        _require_none(place)
        for at, component in ((place / COMMON, COMMON), (place / OBJECTS, OBJECTS), (place, SHARDED)):
            if look(at) is not None:
                if read_manifest(at).components.keys() != {component}:
                    raise _holds_a_checkpoint(at)
                _log.warning("%s is what an interrupted save has left, and is removed now", at)
                catalog_at(at.parent, run_id=f"save into {place}").remove(at)
    except BaseException:
        mark.let_go()
        raise
    return mark


def _require_none(place: ObjectPath) -> None:
    if maybe_load_config(place) is not None:
        raise _holds_a_checkpoint(place)


def _holds_a_checkpoint(place: Any) -> CheckpointExistsError:
    return CheckpointExistsError(f"{place} holds a checkpoint already; save to another address, or remove this one")
