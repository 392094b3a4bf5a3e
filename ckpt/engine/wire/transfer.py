"""Transfer of buckets from the trainers' host memory to the rollouts', in order, each verified by its digest where it arrives.

    owner    host pool --copy stream--> device buffer --broadcast-->
    rollout                          --broadcast--> device buffer --copy stream--> receive buffer, digest

Collectives that take host memory need no buffer: a bucket goes from the pool to its place there. If only parts of a bucket have
changed, these travel side by side in one broadcast; the rollout puts them into the bucket it has, and digests all of it.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from ckpt.engine.update import Update
from ckpt.engine.wire.buffers import Buffers
from ckpt.engine.wire.delta import Runs, bytes_of, without
from ckpt.engine.wire.group import Groups, OwnGroup
from ckpt.engine.wire.pool import digest_of_bucket
from ckpt.errors import CheckpointError, CorruptCheckpointError, RankAbsentError, RankLeftError, sentence
from ckpt.format.digests import digest_of
from ckpt.memory.device import same_device
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import poll_until, start

IN_FLIGHT = 2
PHASE = "transfer"
_END = -1  # in place of a bucket: the thread's work is over
_LOOK_S = 0.2
_END_S = 2.0


class Network:
    """A thread that moves buckets: a collective may hang, and the calling thread must not.

    Args:
        work: moves all buckets; it is given a function, which it calls with the number of each bucket that has arrived.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self._news: SimpleQueue[int] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, same_device()), name="ckpt-weights", daemon=True)
        start(self._thread)

    def _run(self, work: Callable[[Callable[[int], None]], None], begin: Callable[[], None]) -> None:
        try:
            begin()
            work(self._news.put)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they refer to collectives under way, and so to connections
            self._failure = error
        self._news.put(_END)

    def buckets(self, topology: Topology) -> Iterator[int]:
        """Yield the number of each bucket as soon as it has arrived. Called within the phase `PHASE`.

        Raises:
            RankLeftError: another rank is gone, or stands still, or no bucket came for `topology.timeout_s`.
            RankAbsentError: the others timed this rank out.
            CheckpointError: the thread raised it.
        """
        others = set(range(topology.world_size)) - {topology.rank}

        def ask() -> int | None:
            topology.progress()
            try:
                return self._news.get(timeout=_LOOK_S)
            except Empty:
                return None

        def look() -> None:
            topology.require_awaited()
            if (gone := topology.has_raised(others)) is not None:
                raise RankLeftError(f"rank {gone} left during the transfer")
            if (why := topology.why_absent(others, PHASE)) is not None:
                raise RankLeftError(why)

        def failure() -> RankLeftError:
            return RankLeftError(f"no bucket came for {topology.timeout_s:g} s")

        while (bucket := poll_until(ask, look=look, nap=None, timeout_s=topology.timeout_s, failure=failure)) != _END:
            yield bucket
        self._thread.join()
        error, self._failure = self._failure, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise RankLeftError(f"the network failed: {sentence(error)}") from error

    def end(self) -> None:
        """Wait up to 2 s for the thread, whose groups have been given up. A thread that still hangs is abandoned."""
        self._thread.join(_END_S)


@dataclass
class Transfer:
    """One rank's part of the transfer of one update.

    A rank that finds a bucket corrupt still takes part in all collectives, on which the others wait, and raises at the end. The network's
    thread holds its own references to memory: one that is late never writes to memory of a later update.

    Args:
        groups: of this rank; used by the network's thread.
        members: by owner, the ranks of its group with the receivers. An owner that is the only receiver has none.
        buffers: memory of the collectives.
    """

    update: Update
    groups: Groups
    members: Mapping[int, Sequence[int]]
    buffers: Buffers

    def __post_init__(self) -> None:
        update, layout = self.update, self.update.layout
        every = range(layout.num_buckets)
        arriving = update.arriving
        self._mine = every if arriving is not None else layout.buckets_of(update.topology.rank)
        self._ours = update.pool.buckets(layout) if update.pool is not None else {}
        self._there = {bucket: arriving.bucket(bucket) for bucket in every} if arriving is not None else {}
        self._old = {bucket: update.before.bucket(bucket) for bucket in every} if update.before is not None else {}
        self._runs = update.changes.runs if update.changes is not None else {}

    def start(self) -> Network:
        """Begin to send and receive. All owners and rollouts call it, then `finish`."""
        return Network(self._carry)

    def finish(self, network: Network) -> None:
        """Verify each bucket that arrives, until the last.

        Raises:
            CorruptCheckpointError: a bucket is not as its owner sent it; names the bucket and its weights.
            RankLeftError: see `Network.buckets`.
        """
        failure: CorruptCheckpointError | None = None  # raised when no other rank waits for this one
        try:
            for bucket in network.buckets(self.update.topology):
                if bucket in self._there and failure is None:
                    failure = self._mismatch(bucket)
        except RankAbsentError as error:
            raise failure or error from error
        if failure is not None:
            raise failure

    def _mismatch(self, bucket: int) -> CorruptCheckpointError | None:
        """Compare the digest of a bucket that has arrived with the one that was agreed on."""
        update, layout = self.update, self.update.layout
        if digest_of_bucket(self._there[bucket], update.block_bytes) == update.digests[bucket]:
            return None
        return CorruptCheckpointError(
            f"{layout.described(bucket)}, arrived on rank {update.topology.rank} with other bytes than rank "
            f"{layout.owner(bucket)} sent"
        )

    # The network's thread

    def _carry(self, tell: Callable[[int], None]) -> None:
        prefix = self.update.connections
        # Which rollouts receive may change and change back: a group is used again by the same ranks.
        names = {owner: f"{prefix}-{owner}-{digest_of(repr(ranks).encode())}" for owner, ranks in self.members.items()}
        groups = {owner: self.groups.of(names[owner], ranks) for owner, ranks in self.members.items()}
        coming: deque[tuple[int, Callable[[], None]]] = deque()
        for bucket in self._mine:
            if len(coming) == IN_FLIGHT:
                _land(*coming.popleft(), tell)
            coming.append((bucket, self._start(bucket, groups)))
        while coming:
            _land(*coming.popleft(), tell)
        self.buffers.let_go()

    def _start(self, bucket: int, groups: Mapping[int, OwnGroup]) -> Callable[[], None]:
        """Begin to move a bucket; return a function that waits until it has left, or is in its place."""
        owner = self.update.layout.owner(bucket)
        ours, there, old = self._ours.get(bucket), self._there.get(bucket), self._old.get(bucket)
        host = ours if ours is not None else there
        assert host is not None, "an owner has a pool, and all others receive"
        runs = self._runs.get(bucket, [(0, len(host))])
        if there is not None and old is not None:
            _copy_parts(there, old, without(runs, len(host)))
        if there is not None and ours is not None:
            _copy_parts(there, ours, runs)
        group = groups.get(owner)
        if group is None or not runs:
            return lambda: None
        if self.buffers.are_on_host and bytes_of(runs) == len(host):
            return group.broadcast(host, owner)
        return self.buffers.broadcast(group, owner, ours, there, runs)


def _land(bucket: int, wait: Callable[[], None], tell: Callable[[int], None]) -> None:
    wait()
    tell(bucket)


def _copy_parts(there: torch.Tensor, here: torch.Tensor, runs: Runs) -> None:
    for begin, end in runs:
        there[begin:end].copy_(here[begin:end])
