"""Process groups independent of torch's default group, which belongs to the training program and may not exist."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from ckpt.errors import RankLeftError, private_name
from ckpt.memory.device import Device
from ckpt.ranks.stores import connection
from ckpt.ranks.waiting import poll_until

_LOOK = timedelta(seconds=0.2)


class OwnGroup:
    """A process group with the collectives of one device. Each member makes it, with the same arguments but for `rank`.

    Args:
        store: of all ranks of the engine.
        name: equal on all members; used once in this process and in this store.
        members: ranks of the engine, sorted; this rank is one of them.
        device: of this rank; the group's collectives take only its memory.
        timeout_s: of each collective.
    """

    def __init__(
        self, store: Store, name: str, members: Sequence[int], rank: int, *, device: Device, timeout_s: float
    ) -> None:
        self.members = tuple(members)
        self._timeout_s = timeout_s
        self._is_gloo = device.collectives == "gloo"
        # Torch's public functions make groups inside the default group only. They call this one, as do other projects with the
        # same need; a test notices if it goes. The store has a connection of its own, which may wait for ranks that are gone.
        new_group = private_name(
            "torch.distributed.distributed_c10d", "_new_process_group_helper", "connect the ranks of an engine"
        )
        made: tuple[Any, Any] = new_group(
            len(self.members),
            self.members.index(rank),
            [],
            device.collectives,  # alone: torch warns of two, where one of them is a plugin's
            PrefixStore(name, connection(store, timeout_s)),
            group_name=name,
            timeout=timedelta(seconds=timeout_s),
        )
        self._group: Any = made[0]
        world = private_name("torch.distributed.distributed_c10d", "_world", "connect the ranks of an engine")
        world.pg_group_ranks[self._group] = {index: index for index in range(len(self.members))}

    def broadcast(self, buffer: torch.Tensor, source: int) -> Callable[[], None]:
        """Begin to fill `buffer` on all members with that of `source`, a rank of the engine; return a function that waits for the end.

        Raises:
            RankLeftError: the group has been given up, before or during the wait.
        """
        at = self.members.index(source)
        return partial(self._wait, dist.broadcast(buffer, group=self._open(), group_src=at, async_op=True))

    def give_up(self) -> None:
        """Leave without waiting. A thread that waits for one of its collectives raises.

        A collective that cannot be aborted ends by its timeout, and holds its memory until then. The process may end before.
        """
        group, self._group = self._group, None
        if group is not None:
            thread = Thread(target=_end_late, args=(group, self._timeout_s), name="ckpt-group", daemon=True)
            with suppress(RuntimeError):  # the system gives no more threads: the collective ends by its timeout
                thread.start()

    def close(self) -> None:
        """Leave. No collective is under way."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # the others may have left before
                dist.destroy_process_group(group)

    def _open(self) -> Any:
        group = self._group
        if group is None:  # which would be torch's default group
            raise RankLeftError("the process group has been given up")
        return group

    def _wait(self, work: Any) -> None:
        if not self._is_gloo:  # a device's collectives are aborted
            work.wait()
            return

        def ended() -> bool | None:
            self._open()
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if not work.is_completed():  # the look has ended
                    return None
                work.wait()
            return True

        poll_until(ended, nap=None)


class Groups:
    """The groups of one rank by name. One thread has them made and uses them; `give_up` and `close` may come from another.

    Args:
        make: makes a group of a name and its members.
    """

    def __init__(self, make: Callable[[str, Sequence[int]], OwnGroup]) -> None:
        self._make = make
        self._made: dict[str, OwnGroup] | None = {}  # None: given up, or closed

    def of(self, name: str, members: Sequence[int]) -> OwnGroup:
        """Return a group, made at the first call. All members call it, for all their groups in one order.

        Raises:
            RankLeftError: the groups have been given up.
        """
        made = self._made
        if made is not None and name not in made:
            group = self._make(name, members)
            if self._made is None:
                group.give_up()
            else:
                made[name] = group
        if made is None or name not in made:
            raise RankLeftError("the process groups have been given up")
        return made[name]

    def give_up(self) -> None:
        """Leave all groups without waiting. No group can be had afterwards."""
        for group in self._taken():
            group.give_up()

    def close(self) -> None:
        """Leave all groups. No collective is under way."""
        for group in self._taken():
            group.close()

    def _taken(self) -> list[OwnGroup]:
        made, self._made = self._made, None
        return [*(made or {}).values()]


def _end_late(group: Any, timeout_s: float) -> None:
    """End a group with collectives under way. Its destructor would wait for these, at the end of the process too."""
    with suppress(Exception):  # it is broken
        group.abort()
    with suppress(Exception):
        dist.destroy_process_group(group)
    time.sleep(timeout_s + 1.0)
