"""A rollout that joins a running weight sync: it finds the run, catches up, receives updates, and leaves."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ckpt.cli.tables import DataConsole, counted
from ckpt.engine import LiveModel
from ckpt.engine.elastic.catch_up import load_from_checkpoint, load_from_peers
from ckpt.engine.elastic.elastic import ElasticEngine
from ckpt.engine.elastic.membership import Rendezvous
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, RankAbsentError
from ckpt.format.places import Place, place_of, step_of
from ckpt.loading.direct import DirectLoad
from ckpt.loading.loader import Loader, committed_newest_first
from ckpt.loading.parts_of_state import by_component_of
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import StateComponent
from ckpt.state.statefuls import ModelState
from recipes.support.config import made, made_model
from recipes.support.ranks import listening_on, own_address_towards
from recipes.training.facts import RunOfRollouts, run_of
from recipes.training.roles import held_by, live_model
from recipes.training.syncing import RENDEZVOUS_NAME

_LOOK_S = 0.1
_TRIES = 3
_MOST_BYTES = 1 << 20


def join_rollout(cfg: dict[str, Any]) -> dict[str, Any]:
    """Join the run in `cfg["run"]`, receive until it ends, or `updates` times, and return the version and digest held then.

    Raises:
        RankAbsentError: there is no such run, or its first trainer is gone.
        CorruptCheckpointError: the run has ended, and its trainers hold other bits than this rollout.
        CheckpointError: the run failed.
    """
    console = DataConsole(soft_wrap=True)
    rendezvous = _found(Path(cfg["run"]), cfg["wait_s"])
    job = run_of(rendezvous.facts, cfg, str(Path(cfg["run"], RENDEZVOUS_NAME)))
    device: Device = made(cfg["device"])
    device.use(cfg["local_rank"])
    with (
        listening_on(own_address_towards(rendezvous.address, rendezvous.port)),
        ElasticEngine.come(made(job.engine, device=device), rendezvous) as member,
    ):
        live = live_model(job.model, member.engine, device, seed=job.seed + 1 + member.number)
        if (news := member.news()) is not None:
            live.check(news[1])  # before this rollout takes part in an update
            if cfg["catch_up"]:
                console.print(f"rollout {member.number} {_catch_up(live, member, job, device)}")
        with _leaving_when_told(member):
            num_updates = asyncio.run(_receive(member, live, cfg["updates"], console))
        held = held_by(live, member.number, Topology.alone())
        if member.last_words is None:
            console.print(
                f"rollout {member.number} has left with version {held['version']} after {counted(num_updates, 'update')}"
            )
            return held
        asyncio.run(member.reply(held))
        published = member.last_words
        if (held["version"], held["digest"]) != (published["version"], published["digest"]):
            raise CorruptCheckpointError(f"rollout {member.number} holds {held}, the trainers hold {published}")
        console.print(
            f"rollout {member.number} holds version {held['version']} with the trainers' digest {held['digest']}, after "
            f"{counted(num_updates, 'update')}"
        )
        return held


async def _receive(member: ElasticEngine, live: LiveModel, wanted: int | None, console: DataConsole) -> int:
    """Receive until the run ends, or `wanted` updates; return the number of updates."""
    num_updates = 0
    while (report := await member.receive_into(live)) is not None:
        num_updates += 1
        console.print(
            f"rollout {member.number} has version {report['step']}, one of {report['num_rollouts']} rollouts, after "
            f"{report['transfer_s'] + report['reload_s']:.3f} s"
        )
        if num_updates == wanted:
            member.ask_to_leave()
    return num_updates


@contextmanager
def _leaving_when_told(member: ElasticEngine) -> Iterator[None]:
    """Leave the run on SIGTERM: the other members go on without this rollout from the next update on."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)  # a second SIGTERM ends it at once
        member.ask_to_leave()

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _found(run_dir: Path, wait_s: float) -> Rendezvous:
    """Read the run's rendezvous.json, once it exists."""
    path, until = run_dir / RENDEZVOUS_NAME, time.monotonic() + wait_s
    while True:
        try:
            with path.open("rb") as file:
                return Rendezvous.decode(file.read(_MOST_BYTES), str(path))
        except FileNotFoundError as error:
            if time.monotonic() > until:
                raise RankAbsentError(
                    f"there is no {path}: recipes.sync_weights is not running with output_dir={run_dir}, or has ended, or is one of "
                    "roles.colocated=true, which no rollout can join"
                ) from error
            time.sleep(_LOOK_S)


def _catch_up(live: LiveModel, member: ElasticEngine, job: RunOfRollouts, device: Device) -> str:
    """Get the newest version from the trainers' memory or from a checkpoint, and return a sentence about it."""
    lines = []
    for _ in range(_TRIES):
        if (found := member.news()) is None or found[0].peers is None:
            break
        try:
            version = load_from_peers(live, *found, member.engine.digest_of, _reader(found[0].peers, device))
            return f"caught up with version {version.step} out of the trainers' memory"
        except (CorruptCheckpointError, RankAbsentError, ConfigurationError) as error:
            lines.append(str(error))
    for path in committed_newest_first(place_of(job.checkpoint_root)):
        if (found := member.news()) is None:
            break
        try:
            version = load_from_checkpoint(live, *found, member.engine.digest_of, *_model_in(path, job.model))
            return f"caught up with version {version.step} from {path}"
        except (CheckpointError, OSError) as error:  # damaged, of another model, or removed
            lines.append(str(error))
    return f"could not catch up and waits for its first update: {'; '.join(lines) or 'there is no checkpoint'}"


def _reader(peers: Any, device: Device) -> Callable[[Any], None]:
    from ckpt.engine.parameter_server import read_from_peers

    return partial(read_from_peers, peers, device_type=device.type, device_index=device.torch_device.index or 0)


def _model_in(path: Place, model: Mapping[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    """Load the model component of a checkpoint, and no other, in the trainers' own types; return its step and its tensors."""
    step = step_of(path.name.removeprefix("checkpoint-"))
    if step is None:
        raise ConfigurationError(f"{path.name} has an id that is no step")
    host = Device(type="cpu", collectives="gloo")
    state = ModelState(made_model(model, 0))
    component = StateComponent("model", state, "global")
    with Topology.alone() as topology:
        loader = Loader([component], topology, DirectLoad(), host, verify=True, allow_pickle=False)
        others = {*by_component_of(loader.open(path)).component_keys()} - {component.key}
        loader.load(path, strict=True, leave_out=others)
    return step, state.state_dict()
