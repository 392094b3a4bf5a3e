"""The weight sync run on one rank, which is a trainer, a rollout or both: its parts, and the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate

from ckpt import CheckpointCoordinator
from ckpt.engine import LiveModel, WholeWeights
from ckpt.engine.elastic.elastic import ElasticEngine
from ckpt.engine.elastic.membership import Rendezvous
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import CorruptCheckpointError
from ckpt.memory.device import Device
from ckpt.ranks.sigterm import sigterm_noted
from ckpt.ranks.topology import Topology
from ckpt.state.state_digest import state_digest
from ckpt.state.statefuls import ModelState
from ckpt.storage.files import replace_durably
from recipes.support.config import made
from recipes.support.report import SUMMARY_NAME, Report, Summary, write_summary
from recipes.training.facts import facts_of
from recipes.training.roles import found_job, held_by, join_engine, live_model, require_ranks
from recipes.training.serving import Served
from recipes.training.sync_config import num_ranks
from recipes.training.training import Training, resume, settle_start

RENDEZVOUS_NAME = "rendezvous.json"
"""The file of a run, while it runs, by which rollouts find it."""


def settle_sync(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the config with which the run begins, as `settle_start` does, if it has checkpoints."""
    return cfg if cfg["ckpt"] is None else settle_start(cfg)


def sync_weights(cfg: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """Train up to step `train.steps` and update all rollouts after each; return the summary on rank 0. Every rank calls it."""
    roles = cfg["roles"]
    require_ranks(roles, num_ranks(roles), topology)
    run_dir = Path(cfg["run_dir"])
    if topology.is_lead:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in (SUMMARY_NAME, RENDEZVOUS_NAME):
            (run_dir / name).unlink(missing_ok=True)
    device: Device = made(cfg["device"])
    device.use(topology.local_rank)
    make = partial(made, cfg["engine"], device=device, colocated=roles["colocated"])
    if roles["colocated"]:
        with join_engine(partial(make, is_master=topology.is_lead), topology, roles) as engine:
            return _Trainer(cfg, topology, device, _Colocated(cfg, topology, device, engine)).run(run_dir)
    if roles["inference"] is not None:
        with closing(Served(cfg, topology)) as served:
            return _Trainer(cfg, topology, device, served).run(run_dir)
    member, rendezvous = found_job(make, topology, roles, facts_of(cfg))
    with member:
        if topology.rank < roles["trainer"]:
            return _Trainer(cfg, topology, device, _Separate(topology, member, rendezvous)).run(run_dir)
        _roll_out(cfg, topology, device, member)
    return None


def _roll_out(cfg: Mapping[str, Any], topology: Topology, device: Device, member: ElasticEngine) -> None:
    """Run a rollout that the job starts with."""
    live = _initial_model(cfg, topology, device, member.engine)
    # Launchers send SIGTERM to all ranks; trainers that save at it tell rollouts when the run is over.
    saves_at_sigterm = cfg["ckpt"] is not None and cfg["save"]["on_sigterm"]
    with sigterm_noted(cfg["save"]["grace_s"]) if saves_at_sigterm else nullcontext():
        while asyncio.run(member.receive_into(live)) is not None:
            continue
        asyncio.run(member.reply(held_by(live, topology.rank, Topology.alone(topology.progress))))
    with topology.operation("the digests of the weights"), topology.phase("digest"):
        pass  # the lead compares them with what it published; all ranks raise its error


def _initial_model(cfg: Mapping[str, Any], topology: Topology, device: Device, engine: VersionedEngine) -> LiveModel:
    """Make the model of a rollout that the job starts with. Collective; trainers make their parts meanwhile."""
    with topology.operation("the set-up of the run"), topology.phase("build"), device.telling_of_room():
        return live_model(cfg["model"], engine, device, seed=cfg["train"]["seed"] + 1 + topology.rank)


class _Colocated:
    """Updates where each trainer is its own rollout. Other rollouts cannot join."""

    def __init__(self, cfg: Mapping[str, Any], topology: Topology, device: Device, engine: VersionedEngine) -> None:
        self.engine = engine
        self.sender = self
        self._topology = topology
        self._live = _initial_model(cfg, topology, device, engine)

    def open(self, run_dir: Path) -> None:
        """Do nothing: no rollout can join."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        await self.engine.send_weights(weights, global_steps)
        return await self.engine.receive_into(self._live, global_steps)

    def end(self, run_dir: Path, published: dict[str, Any]) -> list[dict[str, Any]]:
        with self._topology.operation("the digests of the weights"), self._topology.phase("gather") as phase:
            phase.payload = held_by(self._live, self._topology.rank, Topology.alone(self._topology.progress))
        return phase.payloads


class _Separate:
    """A trainer's updates of rollouts that come and go."""

    def __init__(self, topology: Topology, member: ElasticEngine, rendezvous: Rendezvous) -> None:
        self.engine = member.engine
        self.sender = member
        self._topology = topology
        self._rendezvous = rendezvous

    def open(self, run_dir: Path) -> None:
        """Write rendezvous.json, by which rollouts can join from now on."""
        if self._topology.is_lead:
            replace_durably(run_dir / RENDEZVOUS_NAME, self._rendezvous.encode())

    def end(self, run_dir: Path, published: dict[str, Any]) -> list[dict[str, Any]]:
        """End the run for the rollouts; return what each of them holds, on the lead."""
        if not self._topology.is_lead:
            return []
        (run_dir / RENDEZVOUS_NAME).unlink(missing_ok=True)
        replies = asyncio.run(self.sender.end(published))
        return [replies[number] for number in sorted(replies)]


class _Trainer:
    """One trainer's part of the run.

    Args:
        updates: how its updates reach rollouts.
    """

    def __init__(
        self, cfg: dict[str, Any], topology: Topology, device: Device, updates: _Colocated | _Separate | Served
    ) -> None:
        self.cfg = cfg
        self.topology = topology
        self.updates = updates
        self.coordinator: CheckpointCoordinator | None = None
        self.summary = Summary(world_size=topology.world_size, tags=cfg.get("tags", []))
        self.reports: list[dict[str, Any]] = []
        with topology.operation("the set-up of the run"), topology.phase("build"), device.telling_of_room():
            self.report = Report(cfg, shown=topology.is_lead, topology=topology)
            self.trainers = topology.part("trainers", range(cfg["roles"]["trainer"]))
            self.training = Training(cfg, self.trainers, device)
            self.training.join()
            self.weights = WholeWeights(self.training.model_state, self.trainers)
        if cfg["ckpt"] is not None:
            self.coordinator = self.training.coordinated(instantiate(cfg["coordinator"]))

    def run(self, run_dir: Path) -> dict[str, Any] | None:
        began = time.monotonic()
        with ExitStack() as context:
            context.enter_context(closing(self.report))
            if self.coordinator is not None:
                context.enter_context(self.coordinator)
                self.report.console.print(self.coordinator.memory)
                if self.cfg["resume"] is not None:
                    resume(self.training, self.coordinator, self.summary, self.report)
                context.enter_context(self.training.told_to_end(self.coordinator))
            self.updates.open(run_dir)
            if self.summary.final_step:  # the rollouts get the resumed weights before the next step
                self._publish(self.summary.final_step)
            for step in range(self.summary.first_step, self.cfg["train"]["steps"] + 1):
                self._step(step)
                if self.training.is_over:
                    self.report.ended(step, by_callback=not self.training.is_told_to_end)
                    break
            if self.coordinator is not None:
                self.coordinator.wait()
                self.report.saved(self.summary.add_saves(self.coordinator.reports))
                self.summary.state_digest = self.training.digest()
            holders = self._holders(run_dir)
        self.training.require_not_told_to_end(self.summary, self.report)
        if not self.topology.is_lead:
            return None
        summary = self.summary.as_dict() | {"updates": self.reports, **holders}
        path = write_summary(run_dir, summary)
        holding = "1 rollout holds" if len(holders["rollouts"]) == 1 else f"{len(holders['rollouts'])} rollouts hold"
        self.report.console.print(
            f"{holding} version {holders['trainer']['version']} with the trainers' digest "
            f"{holders['trainer']['digest']}, after {time.monotonic() - began:.1f} s; summary in {path}"
        )
        return summary

    def _step(self, step: int) -> None:
        """Train a step, save it if it is due, and update the rollouts."""
        steps = self.cfg["train"]["steps"]
        loss = self.training.step()
        ended = time.monotonic()
        self.summary.add_step(step, loss)
        self.report.trained(step, loss)
        is_saved = False
        if self.coordinator is not None:
            is_saved = self.training.save(self.coordinator, step, self.summary, self.report)
            self.report.saved(self.summary.add_saves(self.coordinator.reports))
        update = self._publish(step, saved=is_saved)
        self.report.updated(step, update, time.monotonic() - ended)
        if step in (1, steps) or step % max(1, steps // 12) == 0:
            self.report.console.print(f"step {step:>6}/{steps}  loss {loss:.4f}  {_shown(update)}")

    def _publish(self, step: int, *, saved: bool = False) -> dict[str, Any]:
        """Update the rollouts with the weights of a step: of the live model, or with `publish=saved` of the save."""
        sender = self.updates.sender
        if saved and self.cfg["publish"] == "saved":
            assert self.coordinator is not None
            report = asyncio.run(self.coordinator.publish(sender, step))
        else:
            report = asyncio.run(sender.send_weights(self.weights, step))
        self.reports.append({"step": step} | report)
        return report

    def _holders(self, run_dir: Path) -> dict[str, Any]:
        """Return the version and the digest of the tensors that trainers and each rollout hold.

        Raises:
            CorruptCheckpointError: on all ranks of the job; a rollout holds other bits than the trainers.
        """
        engine = self.updates.engine
        published = _Published(self.training.model_state, engine)
        with self.trainers.operation("the digest of the weights"):
            digest = state_digest({"model": published}, self.trainers)
        trainer = {"version": self.summary.final_step, "digest": digest}
        rollouts = self.updates.end(run_dir, trainer)
        with self.topology.operation("the digests of the weights"), self.topology.phase("digest"):
            for rollout in rollouts:
                if (rollout["version"], rollout["digest"]) != (trainer["version"], trainer["digest"]):
                    raise CorruptCheckpointError(f"rank {rollout['rank']} holds {rollout}, the trainers hold {trainer}")
        return {"trainer": trainer, "rollouts": rollouts}


class _Published:
    """The trainers' weights in the types in which they travel; read only."""

    def __init__(self, stateful: ModelState, engine: VersionedEngine) -> None:
        self._stateful = stateful
        self._engine = engine
        self.tied_names = stateful.tied_names

    def state_dict(self) -> dict[str, Any]:
        state = self._stateful.state_dict()
        return {name: tensor.to(self._engine.travels_as(name, tensor.dtype)) for name, tensor in state.items()}


def _shown(report: Mapping[str, Any]) -> str:
    if not report.get("num_bytes"):
        return "published to nobody: no rollout has come"
    seconds = "  ".join(f"{part} {report[f'{part}_s']:.3f}" for part in ("offload", "gather", "transfer", "reload"))
    return f"published {report['num_bytes'] / 1e6:.1f} MB in {report['blocked_s']:.3f} s ({seconds})"
