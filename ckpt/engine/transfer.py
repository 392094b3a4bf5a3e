"""Carries buckets from the trainers' host memory to that of the rollouts, one behind the other, and checks each that comes.

    owner    host pool --copy stream--> half of a device buffer --broadcast-->
    rollout                      --broadcast--> half of a device buffer --copy stream--> landing, digest

Where the collectives take host memory there is nothing between: a bucket leaves the pool and lands where it belongs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from ckpt.device import SideStream, device_memory, same_device, wait_for
from ckpt.engine.group import OwnGroup
from ckpt.engine.layout import WeightLayout
from ckpt.engine.pool import HostPool, Landing, digest_of_bucket
from ckpt.errors import CorruptCheckpointError, RankLeftError, sentence
from ckpt.topology import Topology

IN_FLIGHT = 2
_LOOK_S = 0.2


@dataclass
class Transfer:
    """One rank's part of one update.

    A rank that fails goes on to take part in what the others wait for, and raises in the end; the others would hang otherwise.

    Args:
        pool: of a rank that owns buckets.
        landing: of a rollout.
        groups: the group of each owner with the rollouts, by owner; none for an owner that is the only rollout.
        receivers: the rollouts.
        digests: of every bucket.
        buffers: memory for the collectives; None: they take host memory.
        timeout_s: that may pass without a bucket.
    """

    rank: int
    topology: Topology
    layout: WeightLayout
    pool: HostPool | None
    landing: Landing | None
    groups: Mapping[int, OwnGroup]
    receivers: Sequence[int]
    digests: Mapping[int, str]
    buffers: DeviceBuffers | None
    timeout_s: float

    def run(self) -> None:
        """Carry everything that this rank sends or receives. All owners and rollouts call it.

        Raises:
            CorruptCheckpointError: a bucket is not what its owner sent; naming it and the weights in it.
            RankLeftError: another rank has gone, or nothing comes.
        """
        self._come: SimpleQueue[int | BaseException | None] = SimpleQueue()
        verifier = Verifier(self.rank, self.layout, self.digests)
        mine = [bucket for bucket in range(self.layout.num_buckets) if self.rank in self._members(bucket)]
        thread = threading.Thread(target=self._carry, args=(mine, same_device()), name="ckpt-weights", daemon=True)
        thread.start()
        while (bucket := await_news(self._come, self.topology, self.timeout_s, verifier)) is not None:
            if self.landing is not None and verifier.failure is None:
                with suppress(CorruptCheckpointError):  # raised when nobody waits for us any more
                    verifier.check(bucket, self.landing.bucket(bucket))
        thread.join()
        if verifier.failure is not None:
            raise verifier.failure

    def _members(self, bucket: int) -> tuple[int, ...]:
        return (self.layout.owner(bucket), *self.receivers)

    # The network's thread

    def _carry(self, mine: Sequence[int], begin: Callable[[], None]) -> None:
        try:
            begin()
            coming: deque[tuple[int, Callable[[], None]]] = deque()
            for bucket in mine:
                if len(coming) == IN_FLIGHT:
                    self._land(*coming.popleft())
                coming.append((bucket, self._start(bucket)))
            while coming:
                self._land(*coming.popleft())
        except BaseException as error:
            self._come.put(error)
        else:
            self._come.put(None)

    def _land(self, bucket: int, wait: Callable[[], None]) -> None:
        wait()
        self._come.put(bucket)

    def _start(self, bucket: int) -> Callable[[], None]:
        """Begin to move a bucket; return what waits until it is where it belongs."""
        owner = self.layout.owner(bucket)
        ours = self.pool.bucket(self.layout, bucket) if owner == self.rank and self.pool is not None else None
        there = self.landing.bucket(bucket) if self.landing is not None else None
        if ours is not None and there is not None:
            there.copy_(ours)
        group = self.groups.get(owner)
        if group is None:
            return lambda: None
        if self.buffers is None:
            buffer = ours if ours is not None else there
            assert buffer is not None, "an owner has a pool, and all others receive"
            return _waiting(group.broadcast(buffer, owner))
        return self.buffers.broadcast(group, owner, ours, there)


class Verifier:
    """Holds what comes against what was sent.

    Attributes:
        failure: the first that was found.
    """

    def __init__(self, rank: int, layout: WeightLayout, digests: Mapping[int, str]) -> None:
        self._rank = rank
        self._layout = layout
        self._digests = digests
        self.failure: CorruptCheckpointError | None = None

    def check(self, bucket: int, host: torch.Tensor) -> None:
        """Raise if these bytes are not those of the bucket.

        Raises:
            CorruptCheckpointError: naming bucket, weights, sender.
        """
        if digest_of_bucket(host) == self._digests[bucket]:
            return
        names = self._layout.weights_in(bucket)
        of = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        self.failure = CorruptCheckpointError(
            f"bucket {bucket} of {self._layout.num_buckets}, with {of}, came to rank {self._rank} with other bytes than rank "
            f"{self._layout.owner(bucket)} sent"
        )
        raise self.failure


def await_news(
    news: SimpleQueue[int | BaseException | None], topology: Topology, timeout_s: float, verifier: Verifier
) -> int | None:
    """Return the next bucket that has come; None: that was all. What moves them is another thread, which may be stuck.

    Raises:
        RankLeftError: another rank has gone, or nothing came for `timeout_s`; or what the verifier found before that.
    """
    heard = time.monotonic()
    others = set(range(topology.world_size)) - {topology.rank}
    while True:
        topology.progress()
        try:
            said = news.get(timeout=_LOOK_S)
        except Empty:
            gone = topology.has_raised(others)
            if gone is not None:
                raise verifier.failure or RankLeftError(f"rank {gone} left in the middle of it") from None
            if time.monotonic() - heard > timeout_s:
                raise verifier.failure or RankLeftError(f"no bucket came for {timeout_s:.0f} s") from None
            continue
        if isinstance(said, BaseException):
            raise verifier.failure or RankLeftError(f"the network failed: {sentence(said)}") from said
        return said


class DeviceBuffers:
    """Memory of a device that buckets pass through, in halves, each used when what was in it has been taken. One thread.

    Args:
        bucket_bytes: of the largest bucket.
        halves: 2, or 1 to save memory.

    Raises:
        DeviceMemoryError: the device has no room.
    """

    def __init__(self, device: torch.device, bucket_bytes: int, halves: int) -> None:
        self._device = device
        self._halves = [device_memory(bucket_bytes, device) for _ in range(halves)]
        self._out, self._in = SideStream(device, "weights out"), SideStream(device, "weights in")
        self._taken: list[Callable[[], None] | None] = [None] * halves
        self._count = 0

    def broadcast(
        self, group: OwnGroup, owner: int, ours: torch.Tensor | None, there: torch.Tensor | None
    ) -> Callable[[], None]:
        """Begin to move a bucket; return what waits until it has left, or is in host memory.

        Args:
            ours: what to send, on the host; None: it is received.
            there: where it shall land, on the host.
        """
        number = self._count % len(self._halves)
        self._count += 1
        if (taken := self._taken[number]) is not None:
            taken()  # nothing is sent from this half, and nothing is copied from it, any more
        host = ours if ours is not None else there
        assert host is not None, "it is sent or received"
        half = self._halves[number][: len(host)]
        if ours is not None:
            with self._out:
                half.copy_(ours, non_blocking=True)
            self._out.wait()
        work = group.broadcast(half, owner)
        done = _once(lambda: self._finish(work, half, there if ours is None else None))
        self._taken[number] = done
        return done

    def _finish(self, work: dist.Work, half: torch.Tensor, there: torch.Tensor | None) -> None:
        work.wait()
        wait_for(self._device)  # some collectives make the device wait, and not us
        if there is not None:
            with self._in:
                there.copy_(half, non_blocking=True)
            self._in.wait()


def _waiting(work: dist.Work) -> Callable[[], None]:
    def wait() -> None:
        work.wait()

    return wait


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """Call it the first time only."""
    called = False

    def wrapped() -> None:
        nonlocal called
        if not called:
            called = True
            call()

    return wrapped
