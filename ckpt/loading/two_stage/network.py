"""Between hosts: something carries a block from the rank that has it to one rank on every host that wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ckpt.errors import ConfigurationError


class Transport(Protocol):
    """Carries bytes between ranks of one group. Used by one thread; who takes part in a call makes it in the same order."""

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        """Begin to fill `buffer` on the ranks in `to` with that of `source`; return what waits until it is filled, or has been sent.

        Called by these ranks; global numbers. Others may be begun before this one is waited for; all are waited for in order.
        """


class TorchTransport:
    """A broadcast where the whole group takes part, else a tree of sends.

    Args:
        group: its collectives move the memory that is spread.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._members = set(dist.get_process_group_ranks(group))

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        """See `Transport.begin`."""
        order = [source, *(rank for rank in to if rank != source)]
        if set(order) == self._members:
            work: Any = dist.broadcast(buffer, source, group=self._group, async_op=True)
            return lambda: _wait_for([work])
        above, below = _in_tree(order.index(dist.get_rank()), len(order))
        if above is None:
            sent = [dist.isend(buffer, order[one], group=self._group) for one in below]
            return lambda: _wait_for(sent)
        received = dist.irecv(buffer, order[above], group=self._group)

        def pass_on() -> None:
            _wait_for([received])
            _wait_for([dist.isend(buffer, order[one], group=self._group) for one in below])

        return pass_on


def _in_tree(me: int, count: int) -> tuple[int | None, list[int]]:
    """From whom the me-th of so many gets a block, and to whom it passes it on. Who has it doubles with every round."""
    above, below, width = None, [], 1
    while width < count:
        if me < width and me + width < count:
            below.append(me + width)
        elif width <= me < 2 * width:
            above = me - width
        width *= 2
    return above, below


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def make_groups(instances: Sequence[Sequence[int]], backend: str, timeout_s: float) -> dict[int, dist.ProcessGroup]:
    """Make a process group of each of these sets of ranks, and return them by member.

    Every rank of the job calls it, those that are in none too, and makes all of them in one order, as torch wants it.

    Raises:
        ConfigurationError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise ConfigurationError(
            "strategy=two-stage sends over the network through torch.distributed, which is not initialized; call "
            "init_process_group first, or load with transport=engine of TwoStageLoad, or strategy=direct"
        )
    made: dict[int, dist.ProcessGroup] = {}
    for ranks in sorted(tuple(sorted(instance)) for instance in instances):
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend=backend)
        made |= dict.fromkeys(ranks, group)
    return made
