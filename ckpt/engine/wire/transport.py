"""What carries weights to rollouts, for loads: broadcasts in process groups of our own, beside torch's default one or without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import Store

from ckpt.engine.wire.group import OwnGroup
from ckpt.errors import RankLeftError
from ckpt.memory.device import Device


class EngineTransport:
    """One rank's end. See `ckpt.loading.two_stage.network.Transport`; it may be used by one thread after another, for many loads.

    The ranks that take part in a parcel have a group, which they make when the first of its kind comes.

    Args:
        store: of all ranks.
        name: equal on all of them, and used once in this store.
        device: its collectives move the memory that is spread.
        timeout_s: of every broadcast.

    Attributes:
        name: as given.
    """

    def __init__(self, store: Store, name: str, rank: int, *, device: Device, timeout_s: float) -> None:
        self._store = store
        self.name = name
        self._rank = rank
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[tuple[int, ...], OwnGroup] | None = {}

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        """See `Transport.begin`.

        Raises:
            RankLeftError: it has been given up, before or while somebody waits.
        """
        return self._group(tuple(sorted({source, *to}))).broadcast(buffer, source)

    def give_up(self) -> None:
        """Leave in the middle, and wait for nobody; any thread. It is of no more use."""
        groups, self._groups = self._groups, None
        for group in (groups or {}).values():
            group.give_up()

    def close(self) -> None:
        """Leave. Nothing is under way any more."""
        groups, self._groups = self._groups, None
        for group in (groups or {}).values():
            group.close()

    def _group(self, members: tuple[int, ...]) -> OwnGroup:
        groups = self._groups
        if groups is None:
            raise RankLeftError("the transport has been given up")
        if members not in groups:
            name = f"{self.name}-{'-'.join(map(str, members))}"
            made = OwnGroup(self._store, name, members, self._rank, device=self._device, timeout_s=self._timeout_s)
            if self._groups is not groups:
                made.give_up()
                raise RankLeftError("the transport has been given up")
            groups[members] = made
        return groups[members]
