"""Find the sharing pattern of components that are declared "auto", from the state of all ranks.

| object | state of the ranks | pattern |
|---|---|---|
| declares `sharing_pattern` (`ckpt.state.abilities.Declared`) | | that one |
| module, optimizer, state dict | equal | replicated |
| | DTensors, ShardedTensors, or different keys | sharded |
| | different bits under one key, equal within a process group | per_group of it |
| | different bits under one key, otherwise | unknown: an error |
| any other | equal | replicated |
| | DTensors or ShardedTensors | sharded; an error where plain tensors or values beside them differ |
| | different | per_rank |

Equality by chance, as of generators with one seed, loses nothing: the pattern is that of one checkpoint, and is found again for the
next. For modules and optimizers, whose tensors are large, it is found once they hold any, and then kept; later saves compare a sample of
each tensor of their copies (validation level "quick"), and refuse copies that have diverged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ckpt.errors import ReplicationError
from ckpt.ranks.merging import alike_by_name, first
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import Declared, offers
from ckpt.state.collect import digest_of_json, look_at
from ckpt.state.doctor import Diagnosis
from ckpt.state.pattern_check import examine
from ckpt.state.replication import Fingerprint
from ckpt.state.sharing import EQUAL_COPIES, Sharing, SharingPattern, StateComponent
from ckpt.state.statefuls import Given, ModelState, OptimizerState

_REPLICATED, _SHARDED = Sharing(SharingPattern.REPLICATED), Sharing(SharingPattern.SHARDED)


class AutoSharing:
    """The patterns that were found for the components of one run. Every rank has one, and all find the same.

    Attributes:
        settled: the components as the last `settle` returned them; before the first one, "auto" counts as replicated.
        examined: those whose state it compared on all ranks, bit by bit.
    """

    def __init__(self, components: Iterable[StateComponent], topology: Topology) -> None:
        self._components = list(components)
        self._topology = topology
        self._kept: dict[str, Sharing] = {}
        self.settled = [component.with_sharing(_REPLICATED) if component.is_auto else component for component in self._components]
        self.examined: set[str] = set()

    def settle(self) -> list[StateComponent]:
        """Return the components, each with the pattern to save it under. Collective if any is "auto".

        Raises:
            ReplicationError: a module's or optimizer's pattern cannot be known; on every rank.
        """
        unknown = [component for component in self._components if component.is_auto and component.key not in self._kept]
        self.examined = set()
        found = self._kept | {component.key: _declared(component) or _REPLICATED for component in unknown}
        unknown = [component for component in unknown if _declared(component) is None]
        if unknown and self._topology.world_size > 1:
            found |= self._find(unknown)
        self.settled = [
            self._settled(component, found[component.key]) if component.is_auto else component for component in self._components
        ]
        return self.settled

    def _settled(self, component: StateComponent, sharing: Sharing) -> StateComponent:
        """The component under a pattern that was found; copies of a module that may have diverged since are compared by samples."""
        found = component.with_sharing(sharing)
        if self._topology.world_size == 1 or not _is_large(component) or sharing.pattern not in EQUAL_COPIES:
            return found
        return replace(found, validate_replication=True, validation_level=component.validation_level or "quick")

    def _find(self, components: Sequence[StateComponent]) -> dict[str, Sharing]:
        seen: dict[str, Mapping[str, Fingerprint]] = {}
        with self._topology.phase("sharing") as phase:
            for component in components:
                phase.component = component.key
                seen[component.key] = _seen(component, self._topology.world_size)
            phase.component = None
            phase.merge = {
                "digests": alike_by_name({key: digest_of_json(leaves) for key, leaves in seen.items()}),
                "kinds": first({f"{_kind_of(leaves)} {key}": None for key, leaves in seen.items()}),
            }
        found: dict[str, Sharing] = {}
        unlike: list[StateComponent] = []
        to_keep: set[str] = set()
        for component in components:
            key = component.key
            kinds = {kind for kind in ("plain", "whole", "piece") if f"{kind} {key}" in phase.merged["kinds"]}
            if "piece" not in kinds and phase.merged["digests"][key].is_alike:
                found[key] = _REPLICATED
            elif "piece" not in kinds and not _is_large(component):
                found[key] = Sharing(SharingPattern.PER_RANK)
            else:
                unlike.append(component.with_sharing(_REPLICATED))
            self.examined.add(key)
            if _is_large(component) and kinds != {"plain"}:
                to_keep.add(key)
        if unlike:
            diagnoses = examine(
                {component.key: component for component in unlike},
                {component.key: seen[component.key] for component in unlike},
                self._topology,
            )
            found |= {diagnosis.component: _pattern_of(diagnosis) for diagnosis in diagnoses}
        self._kept |= {key: found[key] for key in to_keep}
        return found


def _is_large(component: StateComponent) -> bool:
    """Whether it is a module, an optimizer or a state dict, whose copies can only differ if they are parts."""
    return isinstance(component.stateful, ModelState | OptimizerState | Given)


def _declared(component: StateComponent) -> Sharing | None:
    """The pattern that the object declares itself."""
    stateful = component.stateful
    pattern = stateful.sharing_pattern if offers(stateful, Declared) else None
    return None if pattern is None else Sharing(SharingPattern(pattern))


@torch.no_grad()
def _seen(component: StateComponent, world_size: int) -> Mapping[str, Fingerprint]:
    """The state of this rank; nothing of an optional component that fails, which is not saved."""
    try:
        return look_at(component, world_size)
    except Exception:
        if component.required:
            raise
        return {}


def _kind_of(leaves: Mapping[str, Fingerprint]) -> str:
    """The kind of tensors: "piece" of larger ones, "whole", or "plain" for none."""
    if not any(leaf.dtype for leaf in leaves.values()):
        return "plain"
    return "piece" if any(leaf.place is not None for leaf in leaves.values()) else "whole"


def _pattern_of(diagnosis: Diagnosis) -> Sharing:
    """The pattern of a module or an optimizer that differs between ranks.

    Raises:
        ReplicationError: it may be parts of larger tensors, or copies that have diverged.
    """
    for wanted in (SharingPattern.REPLICATED, SharingPattern.SHARDED, SharingPattern.PER_GROUP):
        fitting = [pattern for pattern in diagnosis.found if pattern.pattern is wanted]
        if fitting:
            return fitting[0]
    if diagnosis.found == (Sharing(SharingPattern.GLOBAL),):  # on rank 0 alone
        return _SHARDED
    key, (first, other) = diagnosis.component, diagnosis.ranks
    raise ReplicationError(
        f"component {key}: ranks {first} and {other} hold different values of {diagnosis.leaf}, which does not say what part of a larger "
        "tensor each of them is. So its sharing pattern cannot be inferred: they may be parts, or copies that should be equal and are not. "
        f"Use DTensors, or name in process_groups a group whose members are equal. With sharing_pattern=per_rank for {key} the "
        "checkpoint would hold what each rank has"
    )
