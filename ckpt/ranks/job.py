"""The topology of calls that are given none: of the ranks of torch's default process group. The one handle of a process on its job."""

from __future__ import annotations

import atexit
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ckpt.ranks.topology import Topology

_chosen: ContextVar[Topology | None] = ContextVar("topology of this job", default=None)
_joined: list[tuple[dist.ProcessGroup, Topology]] = []
"""At most one: the default process group, and the topology that its ranks have joined."""
_numbers = itertools.count()
_alone = threading.local()
"""Of each thread without torch.distributed, its topology. Calls inside of a call find the same one, as those of several ranks do."""


_timeout_s = 300.0


def wait_at_most(timeout_s: float) -> None:
    """Say how long ranks wait for one that does not move, in seconds, before all raise; default 300.

    It holds for process groups that no call of this package has joined yet, and must be the same on every rank. The timeout
    of torch's process group is that of its own collectives, which are not used.
    """
    global _timeout_s
    _timeout_s = timeout_s


def current_topology() -> Topology:
    """Return the topology of the ranks of torch's default process group, joined once; of one rank where there is none.

    The first call of a rank joins, and so is collective; each later one costs nothing. A process group made anew is joined anew.

    Raises:
        RankAbsentError: a rank did not join.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    if not (dist.is_available() and dist.is_initialized()):
        if not hasattr(_alone, "topology"):
            _alone.topology = Topology.alone()
        alone: Topology = _alone.topology
        return alone
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is initialized"
    if not _joined or _joined[0][0] is not group:
        _leave()
        store = PrefixStore(f"ckpt/{next(_numbers)}", dist.distributed_c10d._get_default_store())
        joined = Topology.join(store, dist.get_rank(), dist.get_world_size(), timeout_s=_timeout_s)
        _joined.append((group, joined))
    return _joined[0][1]


@contextmanager
def use_topology(topology: Topology) -> Iterator[None]:
    """Make calls inside the block, of this thread, join this topology."""
    token = _chosen.set(topology)
    try:
        yield
    finally:
        _chosen.reset(token)


@atexit.register
def _leave() -> None:
    """Tell the ranks of an earlier process group, should any still wait, that this one has left."""
    while _joined:
        _joined.pop()[1].close()
