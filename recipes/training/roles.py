"""Ranks that train and ranks that receive: their numbers, how their engines join, and the model of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import MISSING
from torch.distributed import Store

from ckpt.engine import LiveModel, MasterMetadata
from ckpt.engine.elastic.elastic import ElasticEngine, meeting, reached_store
from ckpt.engine.elastic.membership import Rendezvous
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import ConfigurationError
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.state_digest import state_digest
from ckpt.state.statefuls import ModelState
from recipes.support.config import AgreeKeys, made_model, require_numbers


@dataclass
class RoleKeys:
    trainer: int = MISSING
    rollout: int = MISSING


@dataclass
class AgreeWithGraceKeys(AgreeKeys):
    """The keys of `agree` in a run without checkpoints, or with optional ones: `save.grace_s` follows `agree.grace_s`."""

    grace_s: float = MISSING


def check_roles(run: Mapping[str, Any], *, least_rollouts: int = 1) -> None:
    """Refuse a role without ranks, and a deadline of 0 seconds.

    Args:
        least_rollouts: 0 if rollouts may come later.

    Raises:
        ConfigurationError: a number is too small.
    """
    require_numbers(run, {"roles.trainer": 1, "roles.rollout": least_rollouts}, seconds=("agree.timeout_s",))


def require_ranks(roles: Mapping[str, Any], num_ranks: int, topology: Topology) -> None:
    """Refuse a number of ranks, such as torchrun's, that differs from that of the roles.

    Raises:
        ConfigurationError: the numbers differ.
    """
    if topology.world_size != num_ranks:
        raise ConfigurationError(
            f"roles.trainer={roles['trainer']} and roles.rollout={roles['rollout']} take {num_ranks} ranks, but there are "
            f"{topology.world_size}"
        )


def found_job(
    make: Callable[[], VersionedEngine], topology: Topology, roles: Mapping[str, Any], facts: Mapping[str, Any]
) -> tuple[ElasticEngine, Rendezvous]:
    """Make this rank's engine and join the others', so that rollouts can come and go. Collective.

    Args:
        facts: the job's facts for rollouts that join, as data.

    Returns:
        the engine, and the addresses by which such a rollout finds the job.
    """
    store: Store | None = None
    with topology.operation("the set-up of the run"), topology.phase("prepare the engine") as phase:
        engine = make()
        if topology.is_lead:
            store, rendezvous = meeting(engine.timeout_s, facts, topology.world_size)
            phase.from_lead = asdict(rendezvous)
    rendezvous = Rendezvous(**phase.from_lead)
    member = ElasticEngine.found(
        engine,
        store or reached_store(rendezvous),
        rank=topology.rank,
        num_trainers=roles["trainer"],
        num_rollouts=roles["rollout"],
        host=f"host-{topology.node_rank}",
    )
    return member, rendezvous


def join_engine(make: Callable[[], Any], topology: Topology, roles: Mapping[str, Any]) -> VersionedEngine:
    """Make this rank's engine and join the others', as a manager of workers does: collect and distribute the addresses. Collective."""
    with topology.operation("the set-up of the run"), topology.phase("prepare the engine") as phase:
        engine: VersionedEngine = make()
        master = engine.prepare()
        phase.payload = None if master is None else list(master)
    metadata = [None if payload is None else MasterMetadata(*payload) for payload in phase.payloads]
    trainers, rollouts = engine.build_topology(roles["trainer"], roles["rollout"], metadata)
    own = {name: [*trainers[name], *rollouts[name]][topology.rank] for name in trainers}
    engine.init_process_group(**own, host=f"host-{topology.node_rank}")
    return engine


def live_model(node: Mapping[str, Any], engine: VersionedEngine, device: Device, *, seed: int) -> LiveModel:
    """Make the rollout's model, in the types in which its weights travel.

    Args:
        node: the job's `model`.
        seed: of the initial weights; it differs from the trainers', so that equal weights at the end were received.
    """
    model = made_model(node, seed)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        parameter.data = parameter.to(engine.travels_as(name, parameter.dtype))
    return LiveModel(ModelState(model.to(device.torch_device)))


def held_by(live: LiveModel, rank: int, topology: Topology) -> dict[str, Any]:
    """Return the version that a rollout holds, and the digest of its own tensors."""
    with live.reading() as version:
        return {
            "rank": rank,
            "version": version.step if version else None,
            "digest": state_digest({"model": live}, topology),
        }
