"""Detect checkpoints whose tensors equal those of an earlier step: more often than not they hold the wrong state.

Published cases: all checkpoints of a run were the same (NeMo-RL 3312); each held the optimizer of the first step (NeMo-RL 4183). They were
saved, committed and verified; the fault showed only when training was resumed from them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.format.names import step_of
from ckpt.saving.writing import WriteResult, joined_checksum
from ckpt.state.overlap import optimizer_of
from ckpt.state.sharing import StateComponent
from ckpt.state.statefuls import ModelState


class StaleStateCheck:
    """Remembers the digests of earlier checkpoints of this process. The lead asks it, once a checkpoint is committed.

    Args:
        components: those with an optimizer, and the modules that these optimizers train, must change with every step.
    """

    def __init__(self, components: Sequence[StateComponent]) -> None:
        optimizers = {c.key: found for c in components if (found := optimizer_of(c.stateful)) is not None}
        trained = {id(p) for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]}
        self._steps_change = {
            c.key
            for c in components
            if c.key in optimizers
            or (isinstance(c.stateful, ModelState) and any(id(p) in trained for p in c.stateful.module.parameters()))
        }
        self._seen: dict[str, dict[str, str]] = {}

    def alarms(self, checkpoint_id: str, results: Sequence[WriteResult]) -> list[str]:
        """Return a sentence for each component that equals that of an earlier step, and should not; remember this checkpoint.

        Ids that are numbers are steps, in their order; other ids are different steps if they differ.
        """
        keys = sorted({key for result in results for key in result.tensor_checksums})
        now = {key: joined_checksum(result.tensor_checksums.get(key, "") for result in results) for key in keys}
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
        """The id of an earlier step's checkpoint in which this component was the same."""
        id = self._seen.get(key, {}).get(digest)
        if id is None or id == checkpoint_id:
            return None
        then, now = step_of(id), step_of(checkpoint_id)
        return id if then is None or now is None or then < now else None
