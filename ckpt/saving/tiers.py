"""Tiers: places of a run's checkpoints before its checkpoint root, each faster, nearer and smaller than the next one.

    memory of the hosts --drain--> local disks --drain--> the checkpoint root: a shared file system, or an object store

A save commits in the first tier, and is copied to the others that it is due in, in order and beside training. In the memory and on the
disks of hosts each host has what its own ranks have written, and copies of what some other hosts' ranks have: `HostTier`. The checkpoint
root may end the list: `remote`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt.catalog.incremental import disk_use
from ckpt.catalog.ledger import ROOT_OWNER, Ledger
from ckpt.catalog.owner import FolderLock
from ckpt.catalog.retention import Retention, as_retention
from ckpt.errors import ConfigurationError, free_bytes, unlike
from ckpt.format.digests import digest_of
from ckpt.format.places import Place, as_place, step_of
from ckpt.ranks.addresses import LOOPBACK, own_address
from ckpt.ranks.topology import Topology
from ckpt.saving.background.priority import Throttle
from ckpt.saving.checkpoint_root import SaveTarget
from ckpt.storage.keeper.client import OwnKeeper, Peer, Where, make_folder, own_keeper
from ckpt.storage.keeper.server import HOME, SOCKET

SHARED_MEMORY = Path("/dev/shm")
"""Where the memory of a host is a file system, on Linux."""

_SILENCE_S = 60.0
"""Longest wait for a word of another host's keeper."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier on the hosts of a run. Made by `memory` or `local`.

    Attributes:
        kind: "memory" or "local".
        path: a folder on each host: where checkpoints lie, or, for memory, a file system of memory.
        every: number of steps from one save to the next that is due here. The first tier takes every save.
        copies: number of other hosts that have each host's files, too.
        groups: host number -> its failure domain, such as a rack; copies go to other domains where there are some. Empty: all differ.
        copies_mib_s: most that a rank sends to other hosts, in MiB per second; None: no limit.
        keep_s: seconds for which memory stays when all ranks of a host have gone without a word.
    """

    kind: str
    path: Path
    every: int = 1
    copies: int = 0
    groups: Sequence[Any] = ()
    copies_mib_s: float | None = None
    keep_s: float = 600.0
    retention: Retention = field(default_factory=lambda: Retention(keep_last=1))

    def __post_init__(self) -> None:
        _require_count(f"{self.kind}.every", self.every, 1)
        _require_count(f"{self.kind}.copies", self.copies, 0)
        for name in ("keep_s", "copies_mib_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
                raise unlike(f"{self.kind}.{name}", value, "a number above 0")

    @property
    def removes(self) -> bool:
        """Whether its folder goes with the job: memory does."""
        return self.kind == "memory"

    def takes(self, num_bytes: int) -> str:
        """What it takes of a host, as a clause, if the ranks of one write about so many bytes in a save; 0: they are not known."""
        saves = (1 + self.copies) * ((self.retention.keep_last or 1) + 1)
        about = f"about {saves * num_bytes >> 20} MiB of each host: " if num_bytes else ""
        return f"the tier {self.kind} takes {about}{saves} times what the ranks of one write in a save"

    def is_due(self, target: SaveTarget) -> bool:
        """Whether a save is due here, by the step in its name; one that has another name is due everywhere."""
        step = step_of(target.checkpoint_id)
        return step is None or step % self.every == 0


def memory(
    *,
    copies: int = 0,
    every: int = 1,
    keep_last: int = 1,
    groups: Sequence[Any] = (),
    copies_mib_s: float | None = None,
    keep_s: float = 600.0,
    path: str | os.PathLike[str] = SHARED_MEMORY,
) -> Tier:
    """Keep saves in the memory of the hosts, where they outlive the ranks: a restart on these hosts needs no storage.

    A host's memory holds `(1 + copies) * (keep_last + 1)` times what its ranks write in a save, and once more for each later tier that
    a save is being copied to.

    Args:
        path: a file system of memory, such as a mounted `emptyDir` of medium Memory in Kubernetes.
        copies, every, groups, copies_mib_s, keep_s: see `Tier`.
    """
    return Tier("memory", Path(path), every, copies, groups, copies_mib_s, keep_s, Retention(keep_last=keep_last))


def local(
    path: str | os.PathLike[str],
    *,
    copies: int = 0,
    every: int = 1,
    keep_last: int = 1,
    groups: Sequence[Any] = (),
    copies_mib_s: float | None = None,
) -> Tier:
    """Keep saves on the disks of the hosts, each what its own ranks write.

    Args:
        path: a folder on each host.
        copies, every, groups, copies_mib_s: see `Tier`.
    """
    return Tier("local", Path(path), every, copies, groups, copies_mib_s, 600.0, Retention(keep_last=keep_last))


@dataclass(frozen=True, slots=True)
class Root:
    """The checkpoint root of a run as the last of its tiers. Made by `remote`.

    Attributes:
        place: None: it is given another way.
        every: number of steps from one save to the next that is due in it; None: likewise.
        retention: without rules: likewise.
    """

    place: Place | None = None
    every: int | None = None
    retention: Retention = field(default_factory=Retention)

    def is_due(self, checkpoint_id: str) -> bool:
        """As `Tier.is_due`."""
        step = step_of(checkpoint_id)
        return step is None or self.every is None or step % self.every == 0


def remote(
    url: str | os.PathLike[str] | Place,
    *,
    every: int | None = None,
    keep_last: int | Retention | None = None,
    keep_every: int | None = None,
) -> Root:
    """End a list of tiers with the checkpoint root, in place of the arguments of `Checkpointer` and `CheckpointCoordinator` for it.

    Args:
        url: an address in an object store, such as s3://bucket/run, or a folder that all hosts mount.
        every: see `Root`; None: as `Checkpointer` says.
        keep_last, keep_every: see `Retention`, which `keep_last` may be.
    """
    if every is not None:
        _require_count("remote.every", every, 1)
    rules = as_retention(keep_last)
    return Root(as_place(url, "url of remote()"), every, rules if keep_every is None else replace(rules, keep_every=keep_every))


def _require_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise unlike(name, value, f"a whole number of at least {least}")


def partners_of(host: int, num_hosts: int, copies: int, groups: Sequence[Any] = ()) -> list[int]:
    """Return the hosts that get copies of a host's files: the next ones in the ring, those of other groups first.

    Example:
        >>> partners_of(3, 4, 1), partners_of(0, 4, 2, groups=["a", "a", "b", "b"])
        ([0], [2, 3])
    """
    ring = [(host + step) % num_hosts for step in range(1, num_hosts)]
    if groups:
        ring.sort(key=lambda other: groups[other] == groups[host])
    return ring[:copies]


class HostTier:
    """One tier as a rank sees it: its host's folder and keeper, and the keepers of the other hosts.

    Args:
        home: the checkpoint root of the run, by which its restarts find the memory of their hosts again.
    """

    def __init__(self, tier: Tier, home: Place, topology: Topology) -> None:
        self.tier = tier
        self.host = topology.node_rank
        self.num_hosts = len(topology.nodes)
        self.is_head = topology.rank == topology.nodes[topology.node_rank][0]
        self.heads = [ranks[0] for ranks in topology.nodes]
        if tier.groups and len(tier.groups) != self.num_hosts:
            raise ConfigurationError(
                f"groups of the tier {tier.kind} names {len(tier.groups)} hosts, and the run has {self.num_hosts}: give one for each host"
            )
        if tier.copies >= self.num_hosts:
            raise ConfigurationError(
                f"the tier {tier.kind} is to have copies on {tier.copies} other hosts, and the run has {self.num_hosts - 1} of them: give "
                f"copies={self.num_hosts - 1} at most"
            )
        self.partners = partners_of(self.host, self.num_hosts, tier.copies, tier.groups)
        self.root = memory_of(home, tier.path) if tier.removes else tier.path
        self.throttle = None if tier.copies_mib_s is None else Throttle(tier.copies_mib_s)
        self.lock = FolderLock(
            self.root / ROOT_OWNER,
            run_id=str(self.root),
            what=f"the tier {tier.kind} in {self.root}",
            advice="wait for it to end, or give each run a folder of its own",
        )
        self._silence_s = min(_SILENCE_S, topology.timeout_s / 4)  # or the other ranks would take this one for one that hangs
        self._keeper: OwnKeeper | None = None
        self._peers: dict[int, tuple[Where, Peer]] = {}

    def ledger(self, run_id: str) -> Ledger:
        """The catalog of this host's folder."""
        return Ledger(self.root, run_id=str(self.root), saves_as=run_id, keep_last=self.tier.retention)

    def release(self, ledger: Ledger, folder: Path) -> None:
        """Remove one checkpoint if there are newer ones enough. On each host's first rank; any thread."""
        committed = ledger.committed()
        surplus = self.tier.retention.surplus(committed[:-1], committed[-1]) if committed else []
        if any(commit.path == folder for commit in surplus):
            ledger.remove(folder)

    def abandon(self, ledger: Ledger, is_newer: Callable[[Path], bool], progress: Callable[[int], None]) -> None:
        """Set newer checkpoints of this host aside; from memory they are removed. On each host's first rank."""
        newer = [commit for commit in ledger.committed() if is_newer(commit.path)]
        if not newer:
            return
        ledger.claim(self.lock, lambda: progress(1))
        if not self.tier.removes:
            ledger.abandon(newer)
        for commit in newer if self.tier.removes else ():
            ledger.remove(commit.path)

    def prepare(self) -> Where | None:
        """Make the host's folder, and start its keeper, if they are not there; return where the keeper is. On each host's first rank.

        Raises:
            StorageError: the folder cannot be made, is not this user's, or the keeper does not start.
        """
        if self.num_hosts == 1 and not self.tier.removes:
            return None  # an ordinary checkpoint root of one host, which nobody else asks for
        if self._keeper is not None and not (self._keeper.is_there() and (self.root / HOME / SOCKET).exists()):
            self._keeper.leave(has_ended=False)  # it was killed, or somebody has removed the folder
            self._keeper = None
        if self._keeper is None:
            make_folder(self.root, is_private=self.tier.removes)
            address = own_address() if self.num_hosts > 1 else LOOPBACK
            self._keeper = own_keeper(self.root, address, keep_s=self.tier.keep_s, removes=self.tier.removes)
            if self._keeper.where.host == LOOPBACK != address:  # started by a run on this host alone
                self._keeper.replace()
                self._keeper = own_keeper(self.root, address, keep_s=self.tier.keep_s, removes=self.tier.removes)
        return self._keeper.where

    def know(self, wheres: Sequence[Sequence[Any] | None]) -> None:
        """Note where the keepers of all hosts are, as their first ranks have told."""
        for host, where in enumerate(wheres):
            known = self._peers.get(host)
            if where is not None and (known is None or known[0] != Where(*where)):
                if known is not None:
                    known[1].close()
                self._peers[host] = Where(*where), Peer(Where(*where), silence_s=self._silence_s)

    def room(self) -> int:
        """The bytes that this host has for the tier: free ones, and those that its checkpoints take. On each host's first rank."""
        place = next(folder for folder in (self.root, *self.root.parents) if folder.exists())
        return (free_bytes(place) or 0) + disk_use(found for found in self.root.glob("checkpoint-*"))[1]

    def require_room(self, of_ranks: Sequence[Sequence[int]], topology: Topology) -> int:
        """Require that each host has room for its saves and for the copies of others; return the bytes of the host with the most.

        Args:
            of_ranks: of each rank, the bytes that it writes in a save, and `room`, if it is the first rank of its host.

        Raises:
            ConfigurationError: a host has less.
        """
        written = [sum(of_ranks[rank][0] for rank in ranks) for ranks in topology.nodes]
        needed = list(written)
        for host in range(self.num_hosts):
            for other in partners_of(host, self.num_hosts, self.tier.copies, self.tier.groups):
                needed[other] += written[host]
        saves = (self.tier.retention.keep_last or 1) + 1
        for host, num_bytes in enumerate(needed):
            room = of_ranks[self.heads[host]][1]
            if saves * num_bytes > room:
                raise ConfigurationError(
                    f"the tier {self.tier.kind} needs {saves * num_bytes >> 20} MiB on the host of rank {self.heads[host]}, for {saves} "
                    f"saves at a time, and there is room for {room >> 20} MiB in {self.root}: give it more, shard over more hosts, or keep "
                    "fewer saves and copies"
                )
        return saves * max(needed)

    @property
    def peers(self) -> dict[int, Peer]:
        """Host -> its keeper."""
        return {host: peer for host, (_, peer) in self._peers.items()}

    def close(self, *, has_ended: bool) -> None:
        """Let go of all keepers.

        Args:
            has_ended: the job has ended as it should, so that memory is not needed any more.
        """
        self.lock.release()
        if self._keeper is not None:
            self._keeper.leave(has_ended=has_ended)
            self._keeper = None
        for peer in self.peers.values():
            peer.close()
        self._peers.clear()


def memory_of(home: Place, file_system: Path = SHARED_MEMORY) -> Path:
    """Return the folder in a file system of memory that belongs to the runs of one checkpoint root."""
    return file_system / f"ckpt-{os.geteuid()}" / digest_of(str(home.absolute()).encode())[:16]
