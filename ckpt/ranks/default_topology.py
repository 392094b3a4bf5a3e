"""The topology of calls that are given none: of the ranks of torch's default process group. The one handle of a process on its job."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist
from torch.distributed import PrefixStore

from ckpt.errors import private_name
from ckpt.ranks.topology import Topology

_chosen: ContextVar[Topology | None] = ContextVar("topology of this job", default=None)


class _Job:
    """This process's part in its job.

    Attributes:
        timeout_s: of process groups that are joined from now on.
        joined: the default process group, and the topology that its ranks have joined; None: not joined yet.
        alone: the topology of each thread without torch.distributed; nested calls get the same one.
    """

    def __init__(self) -> None:
        self.timeout_s = 300.0
        self.joined: tuple[weakref.ref[dist.ProcessGroup], Topology] | None = None
        self.alone = threading.local()

    def leave(self) -> None:
        """Tell the ranks of an earlier process group, if any of them still waits, that this one has left."""
        joined, self.joined = self.joined, None
        if joined is not None:
            joined[1].close()


_job = _Job()
atexit.register(_job.leave)


def wait_at_most(timeout_s: float) -> None:
    """Set how long ranks wait for one that does not move, in seconds, before all raise; default 300.

    It holds for process groups that are joined later, and must be equal on all ranks. The timeout of torch's process group is that of
    its own collectives, which are not used.
    """
    _job.timeout_s = timeout_s


def current_topology() -> Topology:
    """Return the topology of the ranks of torch's default process group, joined once; of one rank without such a group.

    The first call joins, and so is collective; later calls cost nothing. A new process group is joined anew.

    Raises:
        RankAbsentError: a rank did not join.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if not (dist.is_available() and dist.is_initialized()):
        if not hasattr(_job.alone, "topology"):
            _job.alone.topology = Topology.alone()
        alone: Topology = _job.alone.topology
        return alone
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialized"
    if _job.joined is None or _job.joined[0]() is not group:
        _job.leave()
        default = private_name(
            "torch.distributed.distributed_c10d", "_get_default_store", "join the ranks of torch's default group"
        )
        store = PrefixStore("ckpt", default())
        joined = Topology.join(store, dist.get_rank(), dist.get_world_size(), timeout_s=_job.timeout_s)
        _job.joined = (
            weakref.ref(group),
            joined,
        )  # a group that its program lets go ends, and with it the store that it holds
    return _job.joined[1]


@contextmanager
def use_topology(topology: Topology) -> Iterator[None]:
    """Make calls inside the block, of this thread, use this topology."""
    token = _chosen.set(topology)
    try:
        yield
    finally:
        _chosen.reset(token)
