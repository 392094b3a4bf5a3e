"""One rank of a run: read its environment, join the other ranks, take a device, make the process group, run the job.

The only reader of RANK, WORLD_SIZE, LOCAL_RANK, GROUP_RANK, MASTER_ADDR and MASTER_PORT, which Slurm's own variables become first.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt.cli.arguments import spelled
from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError, describe, rebuild, sentence
from ckpt.memory.device import INTERFACE_VARIABLES, OWN_DEVICE, Device
from ckpt.ranks.addresses import LOOPBACK, address_towards, interface_of, machine
from ckpt.ranks.merging import alike
from ckpt.ranks.stores import connection, where_is
from ckpt.ranks.topology import Topology
from recipes.support.config import made
from recipes.support.run_folder import RunFolder, opened
from recipes.support.sentences import in_config_words
from recipes.support.slurm import cores_of_task, slurm_variables

Job = Callable[[dict[str, Any], Topology], dict[str, Any] | None]
"""The function that all ranks run, with rank 0's config; its value on rank 0 is the result."""

_POSITIONS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
RANK_VARIABLES = frozenset((*_POSITIONS, "MASTER_ADDR", "MASTER_PORT", OWN_DEVICE))
"""The variables that launchers set for each rank; they are not inherited by ranks started here."""
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def take_slurm_ranks() -> None:
    """Set the variables of a rank, if this process is one of several tasks of Slurm's `srun`.

    Raises: as `slurm_variables`.
    """
    os.environ.update(slurm_variables(os.environ))


def ranks_exist() -> bool:
    """Whether another program, such as torchrun or srun, started this process as one of several ranks."""
    return "RANK" in os.environ or bool(slurm_variables(os.environ))


def rank_of_environment() -> int:
    """Return this process's rank among the ranks that exist; 0 if none do."""
    return number_of("RANK", default=0)


def num_existing() -> int | None:
    """Return how many ranks exist; None: none do, so the run starts them. Slurm's become ranks, as in `take_slurm_ranks`."""
    take_slurm_ranks()
    return number_of("WORLD_SIZE") if ranks_exist() else None


@dataclass(frozen=True)
class Environment:
    """The variables that the launcher of the existing ranks sets.

    Attributes:
        host: this rank's host; the agents of one torchrun on one machine count as hosts of their own.
        address, port: of the store.
        store_is_held: by the launcher, so that it outlives any rank; otherwise rank 0 holds it.
    """

    rank: int
    world_size: int
    local_rank: int | None
    host: str
    address: str
    port: int
    store_is_held: bool

    @classmethod
    def read(cls) -> Environment:
        host = socket.gethostname()
        if number_of("GROUP_WORLD_SIZE", default=1) > 1:
            host = f"{host}/{number_of('GROUP_RANK')}"
        return cls(
            rank=number_of("RANK"),
            world_size=number_of("WORLD_SIZE"),
            local_rank=number_of("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None,
            host=host,
            address=os.environ.get("MASTER_ADDR", "localhost"),
            port=number_of("MASTER_PORT"),
            store_is_held=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def number_of(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigurationError(
            f"the environment says RANK={os.environ.get('RANK')}, but {name} is {text!r}: start all ranks with torchrun, or "
            "give each RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or unset RANK to start them here"
        )
    return int(text)


def threads_of(num_ranks: int) -> int | None:
    """Return the threads of each of the ranks that share the cores of this process; None: OMP_NUM_THREADS says so."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, usable_cores() // num_ranks)


def take_threads(num_ranks: int) -> None:
    """Have torch use no more threads in this process, one of the ranks of a host, than are for it.

    Slurm may have bound each task to cores of its own: these are not shared.
    """
    of_task = cores_of_task(os.environ)
    is_bound = of_task is not None and usable_cores() <= of_task
    if (threads := threads_of(1 if is_bound else num_ranks)) is not None and threads < torch.get_num_threads():
        torch.set_num_threads(threads)


def usable_cores() -> int:
    """Return the cores that this process may use: those it is bound to, within the quota of its control groups (Linux, version 2)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [float(bound)]
    with suppress(OSError):
        groups = _OWN_GROUPS.read_text().splitlines()
        here = _GROUPS / next((group.removeprefix("0::/") for group in groups if group.startswith("0::")), "")
        for folder in (here, *here.parents):
            with suppress(OSError, ValueError):  # no file, or no limit: "max"
                quota, period = (folder / "cpu.max").read_text().split()
                quotas.append(float(quota) / float(period))
            if folder == _GROUPS:
                break
    return max(1, int(min(quotas)))


@contextmanager
def environment_with(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block; afterwards the whole environment is as before."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


_asked_to_end = threading.Event()
"""Of this process, a rank that gets no signals."""


def end_after_this_step() -> None:
    """Have the run of this process save and end after its step, as at SIGTERM. Any thread."""
    _asked_to_end.set()


def is_asked_to_end() -> bool:
    return _asked_to_end.is_set()


def grace_s(cfg: Mapping[str, Any]) -> float:
    """Return how many seconds a rank may take to end after SIGTERM."""
    return cfg["save"]["grace_s"] if "save" in cfg else cfg["agree"]["grace_s"]


def run_job(
    job: Job,
    cfg: dict[str, Any],
    store: dist.Store,
    environment: Environment,
    *,
    take_from_lead: bool,
    end: Callable[[RankAbsentError], None],
    folder: RunFolder | None = None,
) -> dict[str, Any] | None:
    """Join the other ranks in `store`, which jobs may have used before, and run the job. Every rank calls it.

    Args:
        take_from_lead: run rank 0's `cfg`, as `RunFolder.opened` settled it, and not this rank's own.
        end: ends this process with an error; called in another thread, for this one may wait for a rank that stands still.
        folder: of the run; rank 0 opens it while the job runs. None: it is open already, or the job writes nothing.
    """
    topology = Topology.join(
        dist.PrefixStore("topology", store),
        environment.rank,
        environment.world_size,
        local_rank=environment.local_rank,
        host=environment.host,
        timeout_s=cfg["agree"]["timeout_s"],
        grace_s=grace_s(cfg),
    )
    topology.watch(lambda message: end(RankAbsentError(message)))
    with topology, spelled(in_config_words), ExitStack() as open_until_the_end:
        if take_from_lead:
            cfg = _taken_from_lead(cfg, topology, folder, open_until_the_end)
        with topology.phase("take a device") as phase:
            device: Device = made(cfg["device"])  # whose plugin may also bring the collectives
            device.use(topology.local_rank)
            phase.merge = {"machine": alike(machine("net"))}
        num_members = cfg["launch"].get("in_process_group", topology.world_size)
        own = topology.store_for("process group")
        assert own is not None, "a topology that was joined has a store"
        of_group = connection(own, cfg["agree"]["timeout_s"])
        is_one_machine = phase.merged["machine"].odd_rank is None
        address = LOOPBACK if is_one_machine else own_address_towards(environment.address, environment.port)
        with listening_on(address), _process_group(device.backends, of_group, topology, num_members):
            result = job(cfg, topology)
    return result if environment.rank == 0 else None


def _taken_from_lead(
    cfg: dict[str, Any], topology: Topology, folder: RunFolder | None, stack: ExitStack
) -> dict[str, Any]:
    """Open the run's folder on the lead, and return the lead's config on every rank; an error of opening is raised on every rank."""
    refusal: BaseException | None = None
    with topology.phase("take rank 0's configuration") as phase:
        if topology.is_lead:
            try:
                phase.from_lead = {"config": stack.enter_context(opened(folder, cfg, topology.progress)).cfg}
            except (CheckpointError, OSError) as error:
                refusal, phase.from_lead = error, {"refused": describe(error)}
    answer = phase.from_lead
    if "refused" in answer:
        raise rebuild(answer["refused"]) from refusal
    return answer["config"]


@contextmanager
def listening_on(address: str | None) -> Iterator[None]:
    """Make process groups listen only on the interface with this address. Variables that are set already stay.

    Args:
        address: of this machine; None: torch chooses.
    """
    interface = address and interface_of(address)
    wanted = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    # Elsewhere the devices' libraries choose, for these also select the interfaces of tensors.
    if interface and address == LOOPBACK:
        wanted |= dict.fromkeys(INTERFACE_VARIABLES, f"={interface}")
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:  # the job's own changes of the environment stay
        for name in new:
            os.environ.pop(name, None)


def own_address_towards(host: str, port: int) -> str | None:
    """Return the address of this machine from which it reaches a host, or None if the system does not tell."""
    try:
        return address_towards(host, port)
    except OSError:
        return None


@contextmanager
def _process_group(backends: str, store: dist.Store, topology: Topology, num_members: int) -> Iterator[None]:
    if dist.is_initialized():
        raise CheckpointError("a default process group exists already, left over from something before this job")
    if topology.rank >= num_members:
        yield
        return
    try:
        dist.init_process_group(backends, store=store, rank=topology.rank, world_size=num_members)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RankAbsentError(f"the store at {where_is(store)} did not answer as the process group was made: {sentence(error)}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def tracebacks_of_bugs() -> Iterator[None]:
    """Print the traceback of a bug, on the rank that met it; the agreed error that is raised is one sentence."""
    try:
        yield
    except CheckpointError as error:
        if (bug := bug_beneath(error)) is not None:
            traceback.print_exception(bug)
        raise


def bug_beneath(error: BaseException) -> BaseException | None:
    """Return the bug that caused this error, or is it; None if the whole chain consists of expected errors.

    An error of another library that a class of our family was raised for, in so many words, is expected. One that ranks have
    agreed on (it has a phase), or that has no other class than the family's, is raised for whatever was met.
    """
    cause: BaseException | None = error
    while isinstance(cause, CheckpointError):
        is_for_anything = type(cause) is CheckpointError or cause.phase is not None
        beneath = cause.__cause__
        if isinstance(cause, RankAbsentError) or not (is_for_anything or isinstance(beneath, CheckpointError)):
            return None
        cause = beneath
    return None if isinstance(cause, (OSError, SystemExit, dist.DistError, torch.OutOfMemoryError)) else cause
