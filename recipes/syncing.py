"""The weight sync run on one rank, a trainer, a rollout or both: what it is made of, and the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING, DictConfig, OmegaConf
from rich.console import Console

from ckpt.device import Device
from ckpt.digest import state_digest
from ckpt.engine import LiveModel, WholeWeights
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.statefuls import ModelState
from ckpt.topology import Topology
from recipes.config import AT_RUN_TIME, TrainKeys, bind, check_batch, made
from recipes.report import Summary, write_summary
from recipes.roles import AgreeKeys, RoleKeys, check_roles, join_engine, require_ranks
from recipes.training import Training


@dataclass
class ColocatedRoleKeys(RoleKeys):
    colocated: bool = MISSING


@dataclass
class SyncKeys:
    run_name: str = MISSING
    output_dir: str = MISSING
    run_dir: str = MISSING
    roles: ColocatedRoleKeys = field(default_factory=ColocatedRoleKeys)
    train: TrainKeys = field(default_factory=TrainKeys)
    agree: AgreeKeys = field(default_factory=AgreeKeys)
    engine: dict[str, Any] = MISSING
    device: dict[str, Any] = MISSING
    parallel: dict[str, Any] = MISSING
    model: dict[str, Any] = MISSING
    data: dict[str, Any] = MISSING
    optimizer: dict[str, Any] = MISSING


def checked_sync(cfg: DictConfig) -> dict[str, Any]:
    """Return the run's config as a plain dictionary, resolved, with right types. Costs next to nothing; no rank has started.

    Raises:
        ConfigurationError, OmegaConfBaseException: naming the key, what was found and the way out.
        DeviceUnavailableError: this machine does not have the device.
    """
    typed = OmegaConf.merge(OmegaConf.structured(SyncKeys), cfg)
    run: dict[str, Any] = OmegaConf.to_container(typed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    run["run_dir"] = str(Path(run["run_dir"]).absolute())
    for name in ("device", "parallel", "model", "data", "optimizer"):
        bind(run[name], name, AT_RUN_TIME[name])
    bind(run["engine"], "engine", ("device", "colocated", "is_master"))
    _check_numbers(run)
    made(run["device"]).require()
    made(run["data"])
    engine: VersionedEngine = made(run["engine"], colocated=run["roles"]["colocated"])
    if engine.colocated != run["roles"]["colocated"]:
        raise ConfigurationError("engine=naive has trainer and rollout in one process: give roles.colocated=true")
    layout = made(run["parallel"])
    layout.check(run["roles"]["trainer"])
    check_batch(run, layout, run["roles"]["trainer"])
    roles = run["roles"]
    # Torch's default group is that of training; rollouts are none of its business.
    return run | {
        "components": {},
        "launch": {"nproc_per_node": _num_ranks(roles), "in_process_group": roles["trainer"]},
    }


def sync_weights(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Train `train.steps` steps, each ending with an update of all rollouts; return the summary. Every rank calls it."""
    roles = cfg["roles"]
    require_ranks(roles, _num_ranks(roles), topology)
    run_dir = Path(cfg["run_dir"])
    if topology.is_lead:
        run_dir.mkdir(parents=True, exist_ok=True)
        Summary.remove(run_dir)
    device: Device = made(cfg["device"])
    device.use(topology.local_rank)
    make = partial(made, cfg["engine"], device=device, colocated=roles["colocated"], is_master=topology.is_lead)
    with join_engine(make, topology, roles) as engine:
        return _Run(cfg, topology, device, engine).run(run_dir)


class _Run:
    """One rank of the run, whose roles it has."""

    def __init__(self, cfg: dict[str, Any], topology: Topology, device: Device, engine: VersionedEngine) -> None:
        self.cfg = cfg
        self.topology = topology
        self.engine = engine
        self.training: Training | None = None
        self.live: LiveModel | None = None
        with topology.operation("the set-up of the run"), topology.phase("build"), device.telling_of_room():
            if topology.rank in engine.trainers:
                self.trainers = topology.part("trainers", engine.trainers)
                self.training = Training(cfg, self.trainers, device)
                self.training.join()
                self.weights = WholeWeights(self.training.model_state, self.trainers)
            if topology.rank in engine.rollouts:
                # Of another seed: what it ends with, it has received.
                model: torch.nn.Module = made(cfg["model"], seed=cfg["train"]["seed"] + 1 + topology.rank)
                self.live = LiveModel(ModelState(_of_types(model, engine).to(device.torch_device)))

    def run(self, run_dir: Path) -> dict[str, Any]:
        steps = self.cfg["train"]["steps"]
        console = Console(quiet=not self.topology.is_lead, highlight=False, markup=False, emoji=False, soft_wrap=True)
        losses: list[float | None] = []
        updates = []
        began = time.monotonic()
        for step in range(1, steps + 1):
            loss = self.training.step() if self.training is not None else None
            report = self._update(step)
            losses.append(loss)
            updates.append(report)
            if loss is not None and (step in (1, steps) or step % max(1, steps // 12) == 0):
                console.print(f"step {step:>6}/{steps}  {_told(loss, report)}")
        holders = self._holders()
        summary = {
            "world_size": self.topology.world_size,
            "first_step": 1,
            "final_step": steps,
            "losses": losses,
            "updates": updates,
            **holders,
        }
        if self.topology.is_lead:
            path = write_summary(run_dir, summary)
            console.print(
                f"{len(holders['rollouts'])} rollouts hold version {steps} with the trainers' digest {holders['trainer']['digest']}, "
                f"after {time.monotonic() - began:.1f} s; summary in {path}"
            )
        return summary

    def _update(self, step: int) -> dict[str, Any]:
        """Publish what this rank trains, and receive what it rolls out with."""
        report: dict[str, Any] = {}
        if self.training is not None:
            report = asyncio.run(self.engine.send_weights(self.weights, step))
        if self.live is not None:
            report = asyncio.run(self.engine.receive_into(self.live, step))
        return report

    def _holders(self) -> dict[str, Any]:
        """What every trainer and rollout holds, by digests of its own tensors.

        Raises:
            CorruptCheckpointError: a rollout holds other bits than the trainers.
        """
        with self.topology.operation("the digests of the weights"), self.topology.phase("digest") as phase:
            said: dict[str, Any] = {}
            if self.training is not None:
                published = _Published(self.training.model_state, self.engine)
                said["trainer"] = {
                    "version": self.engine.version.step if self.engine.version else None,
                    "digest": state_digest({"model": published}, self.trainers),
                }
            if self.live is not None:
                with self.live.reading() as version:
                    said["rollout"] = {
                        "rank": self.topology.rank,
                        "version": version.step if version else None,
                        "digest": state_digest({"model": self.live}, Topology.alone(self.topology.progress)),
                    }
            phase.payload = said
        trainer = phase.payloads[0]["trainer"]
        rollouts = [one["rollout"] for one in phase.payloads if "rollout" in one]
        for rollout in rollouts:
            if (rollout["version"], rollout["digest"]) != (trainer["version"], trainer["digest"]):
                raise CorruptCheckpointError(f"rank {rollout['rank']} holds {rollout}, the trainers hold {trainer}")
        return {"trainer": trainer, "rollouts": rollouts}


class _Published:
    """The trainers' weights in the types in which they travel."""

    def __init__(self, stateful: ModelState, engine: VersionedEngine) -> None:
        self._stateful = stateful
        self._engine = engine
        self.tied_names = stateful.tied_names

    def state_dict(self) -> dict[str, Any]:
        state = self._stateful.state_dict()
        return {name: tensor.to(self._engine.travels_as(name, tensor.dtype)) for name, tensor in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("what is published is read only")


def _of_types(model: torch.nn.Module, engine: VersionedEngine) -> torch.nn.Module:
    """A model to generate with, in the types in which its weights come."""
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        parameter.data = parameter.to(engine.travels_as(name, parameter.dtype))
    return model


def _check_numbers(run: Mapping[str, Any]) -> None:
    roles, train = run["roles"], run["train"]
    check_roles(run)
    for key, value, least in (
        ("train.steps", train["steps"], 1),
        ("train.seed", train["seed"], 0),
        ("train.batch_size", train["batch_size"], 1),
    ):
        if value < least:
            raise ConfigurationError(f"{key}={value}: expected at least {least}")
    if roles["colocated"] and roles["trainer"] != roles["rollout"]:
        raise ConfigurationError(
            f"roles.colocated=true: each of the {roles['trainer']} trainers is a rollout; give roles.rollout={roles['trainer']}"
        )


def _num_ranks(roles: Mapping[str, Any]) -> int:
    num: int = roles["trainer"] if roles["colocated"] else roles["trainer"] + roles["rollout"]
    return num


def _told(loss: float, report: Mapping[str, Any]) -> str:
    seconds = "  ".join(f"{part} {report[f'{part}_s']:.3f}" for part in ("offload", "gather", "transfer", "reload"))
    return f"loss {loss:.4f}  published {report['num_bytes'] / 1e6:.1f} MB in {report['blocked_s']:.3f} s ({seconds})"
