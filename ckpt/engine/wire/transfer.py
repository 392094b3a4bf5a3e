"""Carries buckets from the trainers' host memory to that of the rollouts, one behind the other, and checks each that comes.

    owner    host pool --copy stream--> half of a device buffer --broadcast-->
    rollout                      --broadcast--> half of a device buffer --copy stream--> landing, digest

Where the collectives take host memory there is nothing between: a bucket leaves the pool and lands where it belongs. Of a bucket that
has changed in parts, these parts travel as one message, and what they are put into is digested like any other bucket.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from queue import Empty, SimpleQueue

import torch

from ckpt.engine.update import Update
from ckpt.engine.wire.delta import Runs, bytes_of, without
from ckpt.engine.wire.group import OwnGroup
from ckpt.engine.wire.parts import Messages, copy_parts, gather, scatter
from ckpt.engine.wire.pool import digest_of_bucket
from ckpt.errors import CheckpointError, CorruptCheckpointError, RankAbsentError, RankLeftError, sentence
from ckpt.memory.device import SideStream, device_memory, same_device
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import poll_until

IN_FLIGHT = 2
PHASE = "transfer"
_END = -1  # in place of a bucket: the thread's work is over
_LOOK_S = 0.2
_END_S = 2.0


class Network:
    """Moves buckets in a thread of its own: that one may get stuck, and the calling one must not.

    Args:
        work: moves all of them, and is given what it tells of each that has come.
    """

    def __init__(self, work: Callable[[Callable[[int], None]], None]) -> None:
        self._news: SimpleQueue[int] = SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, same_device()), name="ckpt-weights", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Callable[[int], None]], None], begin: Callable[[], None]) -> None:
        try:
            begin()
            work(self._news.put)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold what is under way, and with it the connections
            self._failure = error
        self._news.put(_END)

    def buckets(self, topology: Topology, timeout_s: float) -> Iterator[int]:
        """Yield each bucket as soon as it has come. Within the phase `PHASE`.

        Raises:
            RankLeftError: another rank has gone, or stands still, or nothing came for `timeout_s`.
            RankAbsentError: the others have given this one up.
            CheckpointError: what the thread raised, if it is one.
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
                raise RankLeftError(f"rank {gone} left in the middle of it")
            if (why := topology.why_absent(others, PHASE)) is not None:
                raise RankLeftError(why)

        def failure() -> RankLeftError:
            return RankLeftError(f"no bucket came for {timeout_s:g} s")

        while (bucket := poll_until(ask, look=look, nap=None, timeout_s=timeout_s, failure=failure)) != _END:
            yield bucket
        self._thread.join()
        if isinstance(self._failure, CheckpointError):
            raise self._failure
        if self._failure is not None:
            raise RankLeftError(f"the network failed: {sentence(self._failure)}") from self._failure

    def end(self) -> None:
        """Wait a moment for the thread, whose groups have been given up. If it is stuck all the same it is left to itself."""
        self._thread.join(_END_S)


@dataclass
class Transfer:
    """One rank's part of one update.

    A rank that finds a bucket changed goes on to take part in what the others wait for, and raises in the end; they would hang
    otherwise. The network's thread knows memory, not where it comes from: one that is late writes to none that is used again.

    Args:
        groups: makes or finds the group of each owner with the rollouts, by owner; none for an owner that is the only rollout.
            The network's thread calls it.
        receivers: the rollouts.
        buffers: memory for the collectives; None: they take host memory.
        messages: host memory for parts of buckets, where they do.
        timeout_s: that may pass without a bucket.
    """

    rank: int
    update: Update
    groups: Callable[[], Mapping[int, OwnGroup]]
    receivers: Sequence[int]
    buffers: DeviceBuffers | None
    messages: Messages
    timeout_s: float

    def start(self) -> Network:
        """Begin to carry everything that this rank sends or receives. All owners and rollouts call it, then `finish`."""
        update, layout = self.update, self.update.layout
        every = range(layout.num_buckets)
        self._mine = [bucket for bucket in every if self.rank in (layout.owner(bucket), *self.receivers)]
        self._ours = update.pool.buckets(layout) if update.pool is not None else {}
        self._there = {bucket: update.landing.bucket(bucket) for bucket in every} if update.landing is not None else {}
        self._old = {bucket: update.before.bucket(bucket) for bucket in every} if update.before is not None else {}
        self._runs = update.changes.runs if update.changes is not None else {}
        return Network(self._carry)

    def finish(self, network: Network) -> None:
        """Verify what comes.

        Raises:
            CorruptCheckpointError: a bucket is not what its owner sent; naming it and the weights in it.
            RankLeftError: see `Network.buckets`.
        """
        verifier = Verifier(self.rank, self.update)
        try:
            for bucket in network.buckets(self.update.topology, self.timeout_s):
                if bucket in self._there and verifier.failure is None:
                    with suppress(CorruptCheckpointError):  # raised when nobody waits for us any more
                        verifier.check(bucket, self._there[bucket])
        except RankAbsentError as error:
            raise verifier.failure or error from error
        if verifier.failure is not None:
            raise verifier.failure

    # The network's thread

    def _carry(self, tell: Callable[[int], None]) -> None:
        groups = self.groups()
        coming: deque[tuple[int, Callable[[], None]]] = deque()
        for bucket in self._mine:
            if len(coming) == IN_FLIGHT:
                _land(*coming.popleft(), tell)
            coming.append((bucket, self._start(bucket, groups)))
        while coming:
            _land(*coming.popleft(), tell)

    def _start(self, bucket: int, groups: Mapping[int, OwnGroup]) -> Callable[[], None]:
        """Begin to move a bucket; return what waits until it is where it belongs."""
        owner = self.update.layout.owner(bucket)
        ours, there, old = self._ours.get(bucket), self._there.get(bucket), self._old.get(bucket)
        host = ours if ours is not None else there
        assert host is not None, "an owner has a pool, and all others receive"
        runs = self._runs.get(bucket, [(0, len(host))])
        if there is not None and old is not None:
            copy_parts(there, old, without(runs, len(host)))
        if there is not None and ours is not None:
            copy_parts(there, ours, runs)
        group = groups.get(owner)
        if group is None or not runs:
            return lambda: None
        if self.buffers is not None:
            return self.buffers.broadcast(group, owner, ours, there, runs)
        if bytes_of(runs) == len(host):
            return group.broadcast(host, owner)
        return self.messages.broadcast(group, owner, ours, there, runs)


def _land(bucket: int, wait: Callable[[], None], tell: Callable[[int], None]) -> None:
    wait()
    tell(bucket)


class Verifier:
    """Holds what comes against what was sent.

    Attributes:
        failure: the first that was found.
    """

    def __init__(self, rank: int, update: Update) -> None:
        self._rank = rank
        self._layout, self._digests, self._block_bytes = update.layout, update.digests, update.block_bytes
        self.failure: CorruptCheckpointError | None = None

    def check(self, bucket: int, host: torch.Tensor) -> None:
        """Raise if these bytes are not those of the bucket.

        Raises:
            CorruptCheckpointError: naming bucket, weights, sender.
        """
        if digest_of_bucket(host, self._block_bytes) == self._digests[bucket]:
            return
        names = self._layout.weights_in(bucket)
        of = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        self.failure = CorruptCheckpointError(
            f"bucket {bucket} of {self._layout.num_buckets}, with {of}, came to rank {self._rank} with other bytes than rank "
            f"{self._layout.owner(bucket)} sent"
        )
        raise self.failure


class DeviceBuffers:
    """Memory of a device that buckets pass through, in halves, each used when what was in it has been taken. One thread.

    Args:
        bucket_bytes: of the largest bucket.
        halves: 2, or 1 to save memory.

    Raises:
        DeviceMemoryError: the device has no room.
    """

    def __init__(self, device: torch.device, bucket_bytes: int, halves: int) -> None:
        self._halves = [device_memory(bucket_bytes, device) for _ in range(halves)]
        self._out, self._in = SideStream(device, "weights out"), SideStream(device, "weights in")
        self._taken: list[Callable[[], None] | None] = [None] * halves
        self._count = 0

    def broadcast(
        self, group: OwnGroup, owner: int, ours: torch.Tensor | None, there: torch.Tensor | None, runs: Runs
    ) -> Callable[[], None]:
        """Begin to move a bucket; return what waits until it has left, or is in host memory.

        Args:
            ours: what to send, on the host; None: it is received.
            there: where it shall land, on the host.
            runs: what of it travels.
        """
        number = self._count % len(self._halves)
        self._count += 1
        if (taken := self._taken[number]) is not None:
            taken()  # nothing is sent from this half, and nothing is copied from it, any more
        half = self._halves[number][: bytes_of(runs)]
        side = self._out if ours is not None else self._in
        with side:
            if ours is not None:
                gather(half, ours, runs)
            wait = group.broadcast(half, owner)  # comes after what is queued on the side stream
        done = cache(
            partial(_finish, side, wait, half, there if ours is None else None, runs)
        )  # at the first call only
        self._taken[number] = done
        return done


def _finish(
    side: SideStream, wait: Callable[[], None], half: torch.Tensor, there: torch.Tensor | None, runs: Runs
) -> None:
    with side:
        wait()  # some collectives make the stream wait, and not us
        if there is not None:
            scatter(there, half, runs)
    side.wait()
