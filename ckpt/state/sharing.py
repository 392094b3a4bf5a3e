"""State components and their sharing patterns: the ranks that hold a component, and the address of each of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch

from ckpt.errors import Argument, ConfigurationError, ShardingError, declare
from ckpt.format.dtypes import is_dtensor
from ckpt.format.places import COMPONENT_KEY
from ckpt.planning.plan import Address
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import Elastic, offers
from ckpt.state.address import address_of, local_tensor
from ckpt.state.flatten import Leaves, TensorLeaf
from ckpt.state.replication import ValidationLevel
from ckpt.state.sharded_tensor import ShardedTensor


class SharingPattern(Enum):
    """Distribution of a component over the ranks. Manifests and config files hold these strings.

    Attributes:
        GLOBAL: one copy; rank 0 saves it, every rank loads it.
        PER_RANK: every rank has its own state.
        REPLICATED: every rank has the same bits.
        PER_GROUP: the members of an instance of the named process group have the same bits; instances differ.
        PER_NODE: the ranks of a host have the same bits; hosts differ.
        SHARDED: together the ranks hold one global state: boxes of tensors, or different keys, or both.

    Example:
        >>> ckpt.SharingPattern("per_rank")
        <SharingPattern.PER_RANK: 'per_rank'>
    """

    GLOBAL = "global"
    PER_RANK = "per_rank"
    REPLICATED = "replicated"
    PER_GROUP = "per_group"
    PER_NODE = "per_node"
    SHARDED = "sharded"


Sets = tuple[tuple[int, ...], ...]
"""Sets of ranks whose members should hold the same state."""
OWN_COPIES = (SharingPattern.PER_RANK, SharingPattern.PER_GROUP, SharingPattern.PER_NODE)
"""Patterns with several states of one component in the checkpoint, each under a prefix."""
EQUAL_COPIES = (SharingPattern.REPLICATED, SharingPattern.PER_GROUP, SharingPattern.PER_NODE)
"""Patterns under which several ranks hold equal bits."""
AUTO = "auto"
"""In place of a pattern: `ckpt.state.pattern_check` infers it, and a load takes the one that was saved."""
DECIDED_BY_OBJECT = ("derive", "repartition")
"""Values of `elastic` for objects that implement `ckpt.state.abilities.Elastic`."""
ANY_ELASTIC = ("reshard", "replica", *DECIDED_BY_OBJECT, "rebuild", "refuse")
"""Values of `elastic` under any pattern."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Hosts and process groups of a run.

    Attributes:
        nodes: ranks by host.
        groups: name of a process group -> its instances.
    """

    nodes: Sets
    groups: Mapping[str, Sets]

    @classmethod
    def of(cls, topology: Topology) -> Ranks:
        return cls(topology.nodes, {name: group.instances for name, group in topology.groups.items()})

    @property
    def world(self) -> tuple[int, ...]:
        return tuple(sorted(rank for ranks in self.nodes for rank in ranks))


@dataclass(frozen=True, slots=True)
class Sharing:
    """A pattern, with its group where it has one."""

    pattern: SharingPattern
    group: str | None = None

    def __str__(self) -> str:
        return self.pattern.name + (f" {self.group}" if self.group else "")

    def declaration(self, component: str) -> Argument:
        """Return the instruction for declaring this pattern."""
        group = {"process_group_name": self.group} if self.group else {}
        return declare(component, sharing_pattern=self.pattern.value, **group)

    def sets(self, ranks: Ranks) -> Sets:
        """Return the sets of ranks that each hold one state."""
        match self.pattern:
            case SharingPattern.PER_RANK:
                return tuple((rank,) for rank in ranks.world)
            case SharingPattern.PER_NODE:
                return ranks.nodes
            case SharingPattern.PER_GROUP:
                return ranks.groups[self.group or ""]
            case _:
                return (ranks.world,)

    def prefix(self, topology: Topology) -> str:
        """Return the folder of this rank's own copy, below the component's; "" if all ranks share one state."""
        match self.pattern:
            case SharingPattern.PER_RANK:
                return copy_prefix(self.pattern, topology.rank)
            case SharingPattern.PER_NODE:
                return copy_prefix(self.pattern, topology.node_rank)
            case SharingPattern.PER_GROUP:
                group = self.group or ""
                return copy_prefix(self.pattern, topology.groups[group].instance, group)
            case _:
                return ""


@runtime_checkable
class Stateful(Protocol):
    """The torch protocol, required of every component's object."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def _instead(given: object) -> str:
    """What to give instead of an object without state."""
    if isinstance(given, Mapping):
        return "give the module, the optimizer or another object that it is the state of"
    if type(given).__name__ == "DataLoader":
        return "give torchdata's StatefulDataLoader, or an object of your own that keeps the position"
    return "give an object that has both methods"


@dataclass
class StateComponent:
    """One part of a training run that a checkpoint holds.

    Attributes:
        key: its name in the checkpoint, in the config and on the command line; letters, digits, `_` and `-`.
        stateful: the object; its state_dict() may be nested and hold tensors and plain values.
        sharing_pattern: a `SharingPattern`, its string, or "auto": inferred (`ckpt.state.pattern_check`).
        process_group_name: which of the coordinator's process groups, for PER_GROUP; its *members* hold equal bits.
        required: if False, a save or a load that fails at this component leaves it out, on all ranks, with a warning.
        validate_replication: compare the equal copies at every save.
        metadata: notes of the caller; not stored.
        validation_level: of that comparison: "none", "quick", "tensor" or "full" (ckpt/state/replication.py); None is "tensor".
        elastic: treatment in a load on other ranks, nodes or groups than those that saved; None: see `default_elastic`.
            "reshard" loads new shards; "replica" loads any saved copy, if all are equal; "repartition" passes all saved copies to
            the object, "derive" only the first one (`ckpt.state.abilities.Elastic`); "rebuild" keeps the object's present state;
            "refuse" stops the load.

    Raises:
        ConfigurationError: the attributes contradict each other.

    Example:
        >>> ckpt.StateComponent("data", stateful, ckpt.SharingPattern.PER_RANK, elastic="refuse").pattern
        <SharingPattern.PER_RANK: 'per_rank'>
    """

    key: str
    stateful: Stateful
    sharing_pattern: SharingPattern | str
    process_group_name: str | None = None
    required: bool = True
    validate_replication: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)
    validation_level: str | None = None
    elastic: str | None = None

    def __post_init__(self) -> None:
        self.sharing_pattern = check_component(
            self.key,
            self.sharing_pattern,
            process_group_name=self.process_group_name,
            validate_replication=self.validate_replication,
            validation_level=self.validation_level,
            elastic=self.elastic,
        )
        if not isinstance(self.stateful, Stateful):
            raise ConfigurationError(
                f"component {self.key}: {type(self.stateful).__name__} has no state_dict/load_state_dict pair; {_instead(self.stateful)}"
            )
        if self.elastic in DECIDED_BY_OBJECT and not offers(self.stateful, Elastic):
            raise ConfigurationError(
                f"component {self.key}: elastic={self.elastic} needs an object with the methods fits and load_changed, of which "
                f"{type(self.stateful).__name__} lacks at least one; add it (see ckpt.state.abilities.Elastic), or ",
                declare(self.key, elastic=None),
            )

    @property
    def is_auto(self) -> bool:
        """Whether the pattern is to be found: `with_sharing` gives the component one, before it is saved or loaded."""
        return self.sharing_pattern == AUTO

    @property
    def pattern(self) -> SharingPattern:
        """`sharing_pattern` as the enum. Not of an `is_auto` component."""
        return SharingPattern(self.sharing_pattern)

    @property
    def sharing(self) -> Sharing:
        """The pattern with its process group."""
        return Sharing(self.pattern, self.process_group_name)

    def with_sharing(self, found: Sharing) -> StateComponent:
        """Return this component under a pattern that was found; `elastic` stays where it applies to that."""
        elastic = self.elastic if self.elastic in elastic_choices(found.pattern) else None
        return replace(self, sharing_pattern=found.pattern, process_group_name=found.group, elastic=elastic)


def check_component(
    key: str,
    sharing_pattern: SharingPattern | str,
    *,
    process_group_name: str | None = None,
    validate_replication: bool = False,
    validation_level: str | None = None,
    elastic: str | None = None,
) -> SharingPattern | str:
    """Check a component's declaration, without its object or ranks; return its pattern, or "auto".

    Raises:
        ConfigurationError: an unknown or contradictory choice.
    """
    if not isinstance(key, str) or not COMPONENT_KEY.fullmatch(key):
        raise ConfigurationError(f"component key {key!r} may hold letters, digits, '_' and '-' only: it names a folder")
    named = sharing_pattern.value if isinstance(sharing_pattern, SharingPattern) else sharing_pattern
    levels, equal = [level.value for level in ValidationLevel], [pattern.value for pattern in EQUAL_COPIES]

    def require(is_right: bool, name: str, found: object, otherwise: str) -> None:
        if not is_right:
            raise ConfigurationError(Argument("components", {key: {name: found}}, f"component {key}: {name}={found}"), otherwise)

    known = [*(pattern.value for pattern in SharingPattern), AUTO]
    require(named in known, "sharing_pattern", named, f": expected one of {', '.join(known)}")
    pattern = None if named == AUTO else SharingPattern(named)
    is_per_group, group = pattern is SharingPattern.PER_GROUP, process_group_name
    needs = " needs process_group_name, the group whose members hold equal state; give it, or choose another pattern"
    require(bool(group) or not is_per_group, "sharing_pattern", named, needs)
    goes_with = f" goes with sharing_pattern=per_group, not with {named}; drop one of the two"
    require(is_per_group or not group, "process_group_name", group, goes_with)
    compares = f" compares copies that should be equal, which {named} does not have; it goes with {', '.join(equal)}"
    require(named in equal or not validate_replication, "validate_replication", validate_replication, compares)
    require(validation_level in (None, *levels), "validation_level", validation_level, f": expected one of {', '.join(levels)}")
    choices = ANY_ELASTIC if pattern is None else elastic_choices(pattern)
    otherwise = f" does not apply to {named} components; leave it null or set it to {' or '.join(choices)}"
    require(elastic in (None, *choices), "elastic", elastic, otherwise)
    return AUTO if pattern is None else pattern


def default_elastic(pattern: SharingPattern) -> str:
    """Return the value of `elastic` that None stands for."""
    if pattern in OWN_COPIES:
        return "refuse"
    return "reshard" if pattern is SharingPattern.SHARDED else "replica"


def elastic_choices(pattern: SharingPattern) -> tuple[str, ...]:
    """Return the valid values of `elastic` under a pattern, the default first."""
    replica = ("replica",) if pattern in OWN_COPIES else ()
    decided = DECIDED_BY_OBJECT if pattern is not SharingPattern.SHARDED else ()
    return tuple(dict.fromkeys((default_elastic(pattern), *replica, *decided, "rebuild", "refuse")))


def level_of(component: StateComponent, *, validate_all: bool) -> ValidationLevel:
    """Return the level at which a save compares a component's equal copies.

    Args:
        validate_all: `save_checkpoint(validate=True)`: at least "tensor", except for a component that declares "none".
    """
    wanted = ValidationLevel(component.validation_level or ValidationLevel.TENSOR)
    if component.pattern not in EQUAL_COPIES or wanted is ValidationLevel.NONE:
        return ValidationLevel.NONE
    if validate_all:
        return wanted if wanted.covers(ValidationLevel.TENSOR) else ValidationLevel.TENSOR
    return wanted if component.validate_replication else ValidationLevel.NONE


def copy_prefix(pattern: SharingPattern, number: int, group: str = "") -> str:
    """Return the folder, below the component's, for the copy of one rank, node or instance of `group`, counted from 0."""
    if pattern is SharingPattern.PER_RANK:
        return f"rank-{number:05d}/"
    return f"{'node' if pattern is SharingPattern.PER_NODE else group}-{number:04d}/"


def holders_of(component: StateComponent, topology: Topology) -> Sets:
    """Return the sets of ranks that hold one state of a component: one set per prefix, in the order of the prefixes."""
    if component.pattern is SharingPattern.GLOBAL:
        return ((0,),)
    return component.sharing.sets(Ranks.of(topology))


def contributes(component: StateComponent, topology: Topology) -> bool:
    """Whether this rank contributes plain tensors and plain values of a component to the checkpoint."""
    return component.pattern is not SharingPattern.GLOBAL or topology.rank == 0


def addresses(component: StateComponent, leaves: Leaves, topology: Topology) -> dict[str, Address]:
    """Return key -> address of the tensors that this rank contributes to a component.

    A DTensor or ShardedTensor of a GLOBAL component is contributed by every rank.

    Args:
        leaves: without aliases of tied tensors.

    Raises:
        ShardingError: a DTensor spans several of the ranks, nodes or groups that each should have a copy of their own.
    """
    start = f"{component.key}/{component.sharing.prefix(topology)}"
    has_own = component.pattern in OWN_COPIES
    gives_plain = contributes(component, topology)
    found = {}
    for key, leaf in leaves.tensors.items():
        sharded = isinstance(leaf, ShardedTensor) or is_dtensor(leaf)
        if not sharded and not gives_plain:
            continue
        if sharded and has_own:
            _require_inside(component, key, leaf, topology)
        found[key] = address_of(leaf, start + key)
    return found


@torch.no_grad()  # for `local_tensor`
def find_aliases(tensors: dict[str, TensorLeaf], declared: Mapping[str, str]) -> dict[str, str]:
    """Return {alias: first name} of tied tensors: found by storage on this rank, or declared by the model.

    The first name comes first in the state dict. For a declared pair it comes first in the registration order of the whole model,
    because a pipeline stage may hold only the alias.
    """
    aliases = {}
    alone: dict[int, str] = {}
    first_at: dict[tuple[Any, ...], str] = {}
    for key, leaf in tensors.items():
        if isinstance(leaf, ShardedTensor):
            continue
        is_plain = type(leaf) is torch.Tensor or not is_dtensor(leaf)
        address = (leaf if is_plain else local_tensor(leaf)).data_ptr()
        if not address:  # no elements, or a meta tensor
            continue
        before = alone.setdefault(address, key)
        if before == key:
            continue
        # Two tensors start at this address, which is rare: compare all of their layout.
        first_at.setdefault(_memory_layout(tensors[before]), before)
        first = first_at.setdefault(_memory_layout(leaf), key)
        if first != key:
            aliases[key] = first
    aliases.update({alias: first for alias, first in declared.items() if alias in tensors})
    return aliases


def _memory_layout(leaf: TensorLeaf) -> tuple[Any, ...]:
    """Return the memory of a tensor and its view of it: equal for tied tensors alone."""
    memory = local_tensor(leaf)
    shapes = tuple(leaf.shape), tuple(memory.shape)  # type: ignore[union-attr]  # a ShardedTensor is never asked
    return memory.device, memory.data_ptr(), memory.dtype, *shapes, memory.stride()


def _require_inside(
    component: StateComponent, key: str, leaf: torch.Tensor | ShardedTensor, topology: Topology
) -> None:
    mine: Sequence[int] = next(ranks for ranks in holders_of(component, topology) if topology.rank in ranks)
    if isinstance(leaf, ShardedTensor):
        inside = leaf.box.shape == tuple(leaf.global_shape)
        across = "is a shard of a larger tensor"
    else:
        ranks = leaf.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        inside = set(ranks) <= set(mine)
        across = f"is a DTensor over the ranks {ranks}"
    if not inside:
        raise ShardingError(
            f"component {component.key} is {component.pattern.value}, but {key} {across}, beyond {list(mine)} which should "
            "have a state of their own; ",
            declare(component.key, sharing_pattern="sharded"),
        )
