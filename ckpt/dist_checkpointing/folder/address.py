"""An address in an object store as the destination of a save. The counterpart of `destination.py`.

Tensors, common state and objects are committed one after the other, each by a conditional put of its manifest; `metadata.json` is put last,
makes the three a checkpoint, and names the place of the files of each. A lease keeps other saves away until then, and a note of the places,
which the end of the save removes, is the proof by which the next save removes what a dead one has left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ckpt.catalog.committed import look
from ckpt.catalog.object_ledger import ObjectLedger
from ckpt.dist_checkpointing.folder.claim import SaveClaim, given_claim
from ckpt.errors import CheckpointExistsError, logger_of
from ckpt.format.manifest import COMMON, OBJECTS, SHARDED
from ckpt.format.places import ObjectPath
from ckpt.format.strict_json import fit, parse
from ckpt.ranks.topology import Topology
from ckpt.saving.new_folder import NewFolder
from ckpt.saving.prepared_save import PreparedSave, Written
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.metadata import CheckpointingConfig, maybe_load_config, save_config
from ckpt.storage.objects.store import store_of

_PARTS = ".saving.parts.json"
_MOST_BYTES = 1 << 16

_log = logger_of(__name__)


class GivenAddress(NewFolder):
    """The address of a save through dist_checkpointing, or of a strategy alone. See `GivenFolder`."""

    def __init__(self, place: ObjectPath) -> None:
        super().__init__(place, replaces=True)
        self._claim: AddressClaim | None = None

    def open(self, topology: Topology) -> None:
        """See `NewFolder.open`.

        Raises:
            CheckpointExistsError: a checkpoint is at the address, and no caller has looked at it.
        """
        with topology.phase("look"):
            if topology.is_lead:
                self._claim, base = given_claim(self.path)
                if self._claim is None and look(self.path) is not None:
                    raise _holds_a_checkpoint(self.path)
        super().open(topology)
        with topology.phase("note"):
            if self._claim is not None:
                self._claim.note(base or SHARDED, self.folder.name)

    def publish(self, save: PreparedSave[Any], written: Written, topology: Topology) -> None:
        """See `NewFolder.publish`.

        Raises:
            CheckpointExistsError: another save may have begun there.
        """
        with topology.phase("claim"):
            if self._claim is not None:
                self._claim.require()
        super().publish(save, written, topology)


class AddressClaim(SaveClaim):
    """A claim on an address.

    Attributes:
        parts: component -> name of the place of its files, of what this save has begun to write.
    """

    def __init__(self, place: ObjectPath, progress: Callable[[], object]) -> None:
        self.address = place
        self.parts: dict[str, str] = {}
        super().__init__(place, progress)

    def note(self, component: str, place: str) -> None:
        """Note what this save is about to write: the proof by which the next one removes it."""
        self.parts[component] = place
        files_below(self.address).write(_PARTS, json.dumps(self.parts).encode())

    def complete(self, config: CheckpointingConfig) -> None:
        save_config(config, self.address, self.parts)

    def remove(self) -> None:
        store_of(self.address).delete([(self.address / _PARTS).key])
        super().remove()


def take_address(place: ObjectPath, progress: Callable[[], object]) -> AddressClaim:
    """Refuse an address that is in use, or holds a checkpoint; claim it, and remove what a dead save has noted as its own."""
    _require_none(place)
    claim = AddressClaim(place, progress)
    try:
        _require_none(place)
        ObjectLedger(place, run_id=f"save into {place}").sweep_all()
        for component, nonce in _left_at(place).items():
            at = place if component == SHARDED else place / component
            _log.warning("%s is what an interrupted save has left, and is removed now", at / nonce)
            ObjectLedger(at.parent, run_id=f"save into {place}").give_up(at, nonce)
        for at in (place, place / COMMON, place / OBJECTS):
            if look(at) is not None:
                raise _holds_a_checkpoint(at)
    except BaseException:
        claim.let_go()
        raise
    return claim


def _left_at(place: ObjectPath) -> dict[str, str]:
    """What the save before has begun to write, and not ended."""
    try:
        with files_below(place) as files:
            found = fit(parse(files.read(_PARTS, _MOST_BYTES), _PARTS), dict[str, str], _PARTS)
    except FileNotFoundError:
        return {}
    if not found.keys() <= {COMMON, OBJECTS, SHARDED} or not all(re.fullmatch("[0-9a-f]{16}", nonce) for nonce in found.values()):
        raise CheckpointExistsError(f"{place / _PARTS} is in the way, and no save has written it; remove it if nobody needs it")
    return found


def _require_none(place: ObjectPath) -> None:
    if maybe_load_config(place) is not None:
        raise _holds_a_checkpoint(place)


def _holds_a_checkpoint(place: Any) -> CheckpointExistsError:
    return CheckpointExistsError(f"{place} holds a checkpoint already; save to another address, or remove this one")
