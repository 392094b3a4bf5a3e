"""The keys of the weight sync recipes, and their checks before a rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import ConfigurationError
from ckpt.format.places import local_path
from recipes.support import config
from recipes.training.facts import ENGINE_AT_RUN_TIME
from recipes.training.roles import AgreeWithGraceKeys, RoleKeys, check_roles
from recipes.training.serving import check_inference

PUBLISH = ("live", "saved")


@dataclass
class SyncRoleKeys(RoleKeys):
    colocated: bool = MISSING
    inference: str | None = MISSING


@dataclass
class InferenceKeys:
    urls: list[str] | None = MISSING
    python: str | None = MISSING
    workers: int = MISSING
    args: list[str] = MISSING
    prompt: str = MISSING
    tokens: int = MISSING
    timeout_s: float = MISSING


@dataclass
class SyncKeys(config.RunKeys):
    """The keys of a training run, and those of its weight updates."""

    roles: SyncRoleKeys = field(default_factory=SyncRoleKeys)
    inference: InferenceKeys = field(default_factory=InferenceKeys)
    agree: AgreeWithGraceKeys = field(default_factory=AgreeWithGraceKeys)  # one key more than training's
    engine: dict[str, Any] = MISSING
    publish: str = MISSING
    ckpt: dict[str, Any] | None = None  # type: ignore[assignment]  # a run that saves nothing
    load: config.LoadKeys = field(default_factory=lambda: config.LoadKeys(reread=False))
    launch: config.LaunchKeys = field(default_factory=lambda: config.LaunchKeys(nproc_per_node=0))  # the roles' ranks


@dataclass
class JoinKeys:
    run: str = MISSING
    engine: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    updates: int | None = MISSING
    catch_up: bool = MISSING
    wait_s: float = MISSING
    device: dict[str, Any] = MISSING
    local_rank: int = MISSING


def checked_sync(cfg: DictConfig) -> dict[str, Any]:
    """Return the run's config as a plain dictionary, resolved, with typed values. No rank has started yet.

    Raises:
        ConfigurationError, OmegaConfBaseException: a key or a value is wrong; names it and the next step.
        DeviceUnavailableError: this machine does not have the device.
    """
    run = config.resolved(SyncKeys, cfg)
    config.require_names(run)
    local_path(run["output_dir"], "output_dir")
    config.make_absolute(run, "run_dir")
    config.bind(run["engine"], "engine", ENGINE_AT_RUN_TIME)
    _check_numbers(run)
    check_inference(run)
    if run["roles"]["inference"] is not None:
        run["roles"]["rollout"] = 0
    _check_saves(run)
    config.check_logging(run)
    roles = run["roles"]
    config.check_training(run, roles["trainer"])
    engine: VersionedEngine = config.made(run["engine"], colocated=roles["colocated"])
    if engine.colocated != roles["colocated"]:
        raise ConfigurationError("engine=naive has trainer and rollout in one process: give roles.colocated=true")
    run |= _checked_training(run) if run["ckpt"] is not None else {"components": {}}
    _check_published(run)
    # Torch's default process group has the trainers alone.
    launch = {"nproc_per_node": num_ranks(roles), "in_process_group": roles["trainer"]}
    return run | {"launch": launch, config.LINES_TO: config.file_of_lines(run["run_dir"])}


def checked_join(cfg: DictConfig) -> dict[str, Any]:
    """Return the config of a rollout that joins a running job, as `checked_sync` does, with the same errors."""
    run = config.resolved(JoinKeys, cfg)
    config.make_absolute(run, "run")
    config.bind(run["device"], "device", config.AT_RUN_TIME["device"])
    for name, given in (("engine", ENGINE_AT_RUN_TIME), ("model", config.AT_RUN_TIME["model"])):
        if run[name] is not None:
            config.bind(run[name], name, given, config.OFFERED.get(name, ()))
    config.require_numbers(run, {"updates": 1, "wait_s": 0, "local_rank": 0})
    config.made(run["device"]).require()
    return run


def num_ranks(roles: Mapping[str, Any]) -> int:
    """Return the number of ranks that a job starts with."""
    return roles["trainer"] if roles["colocated"] else roles["trainer"] + roles["rollout"]


def _checked_training(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of training and of its checkpoints, checked as `recipes.train` does, for the ranks that train."""
    own = {key.name: run[key.name] for key in fields(config.RunKeys)}
    own["agree"] = {"timeout_s": run["agree"]["timeout_s"]}
    own["launch"] = {"nproc_per_node": run["roles"]["trainer"]}
    found = config.checked(OmegaConf.create(own), num_ranks=run["roles"]["trainer"])
    return found | {"agree": run["agree"]}


def _check_saves(run: Mapping[str, Any]) -> None:
    if run["publish"] not in PUBLISH:
        raise ConfigurationError(f"publish={run['publish']}: expected one of {', '.join(PUBLISH)}")
    if run["ckpt"] is not None:
        return
    for key, nothing in (("resume", None), ("overwrite", False), ("publish", "live")):
        if run[key] != nothing:
            raise ConfigurationError(
                f"{key}={str(run[key]).lower() if run[key] is True else run[key]}: this run has no checkpoints; give "
                "ckpt=kimi-engine, or another backend"
            )


def _check_published(run: Mapping[str, Any]) -> None:
    """Refuse `publish=saved` with a backend that keeps no save in host memory."""
    if run["publish"] == "live" or config.kept_memories(run) is not None:
        return
    backend = run["ckpt"]["_target_"].rpartition(".")[2]
    raise ConfigurationError(
        f"publish=saved takes the weights of a save out of host memory, and the backend chosen with ckpt=, {backend}, keeps none there: "
        "give ckpt=kimi-engine with ckpt.pool=true, or publish=live"
    )


def _check_numbers(run: Mapping[str, Any]) -> None:
    roles = run["roles"]
    check_roles(run, least_rollouts=0)
    numbers = {"train.steps": 1, "train.seed": 0, "train.batch_size": 1, "inference.workers": 1, "inference.tokens": 1}
    config.require_numbers(run, numbers, seconds=("inference.timeout_s",))
    if roles["colocated"] and roles["trainer"] != roles["rollout"]:
        raise ConfigurationError(
            f"roles.colocated=true: each of the {roles['trainer']} trainers is a rollout; give roles.rollout={roles['trainer']}"
        )
