"""Alarms: a checkpoint whose tensors are what they were some steps ago holds, more often than not, the wrong bytes.

Published cases: every checkpoint of a run was one and the same (NeMo-RL 3312); the optimizer in each was that of the first step
(NeMo-RL 4183). Both were saved, committed and verified; only who resumed from them could tell.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.saving.writing import WriteResult, joined_checksum
from ckpt.state.overlap import optimizer_of
from ckpt.state.sharing import StateComponent
from ckpt.state.statefuls import ModelState


class StaleStateCheck:
    """Knows the tensors of earlier checkpoints of this process by their digests. Every rank finds the same.

    Args:
        components: those whose object is, or has, an optimizer, or is a module that one of these optimizers trains, change with every step.
    """

    def __init__(self, components: Sequence[StateComponent]) -> None:
        optimizers = {c.key: found for c in components if (found := optimizer_of(c.stateful)) is not None}
        trained = {id(p) for one in optimizers.values() for group in one.param_groups for p in group["params"]}
        self._steps_change = {
            c.key
            for c in components
            if c.key in optimizers
            or (isinstance(c.stateful, ModelState) and any(id(p) in trained for p in c.stateful.module.parameters()))
        }
        self._seen: dict[str, dict[str, str]] = {}

    def alarms(self, checkpoint_id: str, votes: Sequence[WriteResult]) -> list[str]:
        """Say what is in this checkpoint as it was in one of an earlier step, and should not be; and remember this one.

        Ids are taken for steps where they are numbers; of others, two that differ are.
        """
        keys = sorted({key for vote in votes for key in vote.tensor_checksums})
        now = {key: joined_checksum(vote.tensor_checksums.get(key, "") for vote in votes) for key in keys}
        older = {key: self._older(key, digest, checkpoint_id) for key, digest in now.items()}
        for key, digest in now.items():
            self._seen.setdefault(key, {})[digest] = checkpoint_id
        same = {id for id in older.values() if id is not None}
        if keys and None not in older.values() and len(same) == 1:
            (id,) = same
            return [
                f"checkpoint-{checkpoint_id} holds, in every tensor, the same bits as checkpoint-{id}, though the step has advanced: "
                "either nothing was trained, or it is not the state of this step that was saved"
            ]
        return [
            f"{key} in checkpoint-{checkpoint_id} is, bit for bit, what it was in checkpoint-{id}, though the step has advanced: the "
            "object that is saved may not be the one that is trained"
            for key, id in older.items()
            if id is not None and key in self._steps_change
        ]

    def _older(self, key: str, digest: str, checkpoint_id: str) -> str | None:
        """The checkpoint of an earlier step in which this component was the same."""
        id = self._seen.get(key, {}).get(digest)
        if id is None or id == checkpoint_id:
            return None
        are_steps = id.isdecimal() and checkpoint_id.isdecimal()
        return id if not are_steps or int(id) < int(checkpoint_id) else None
