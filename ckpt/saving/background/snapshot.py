"""A copy of one rank's share of a save, in host memory that is kept from save to save; and how it gets there.

    the thread that trains     copies what may change any time, and returns
    the copier                 beside the next forward and backward, what only an optimizer's step changes (save.overlap)
    the thread that writes     takes item after item, and gives the memory back

What has no room waits until something before it is written. Each item's digests are taken while its bytes are still in the processor's
cache; whoever writes it makes sure that they are the same still.

Where the files of a save are kept in memory (backends/pool.py), an item is copied to its place there, and stays; only what is put together
of several ranks' parts passes through the arena.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from ckpt.backends.base import staged_digests
from ckpt.errors import SaveAbandonedError, StateChangedError
from ckpt.format.dtypes import raw_bytes, torch_dtype
from ckpt.memory.arena import Arena, room_for
from ckpt.memory.copies import Halves, Staging, Streams
from ckpt.memory.device import same_device, uses_accelerator, wait_for_accelerator
from ckpt.planning.plan import ChunkTask, SavePlan
from ckpt.saving.gathering import Regions, sent
from ckpt.saving.writing import Item, Pack, RankWritePlan, Staged, laid_end_to_end
from ckpt.state.collect import RankState
from ckpt.state.overlap import Watched

_ALIGNED = 64
_LITTLE_PINNED_BYTES = 8 << 20
"""Of the halves that parts of chunks pass through on their way to other ranks."""


class Snapshot:
    """One save's. `take` in the thread that trains, then `wait` at any time; the rest by the thread that writes.

    States. Each arrow sets the events below it, for which other threads wait; an error, which is kept, leads to `over` from all of them:

        new --take--> sending --------> copying --all copied--> over
         |                  |             ^  |                   ^  _is_over, _may_be_written
         |                  _has_sends    |  no room left        |
         |                                |  v  _may_be_written  |
         |                               copying while writing --+
         +--fail, then take--------------------------------------+

    `sending` is the thread that trains; it copies on, or leaves the rest to the copier. Before `_may_be_written` no item is handed out.
    `give_up`, in any state but `new`, ends the copying with an error, waits for `over`, and gives all memory back to the arena.
    Only who copies uses the tensors (`_regions`, `_contribution`, `_watched`), and lets go of them on the way to `over`.

    Args:
        arena: large enough for `arena_bytes` of this share.
        placed: number of an item -> the memory of exactly its bytes, which it is copied to and not written from before all are copied.
        watched: what only optimizers' steps change; it is copied later, by a thread of its own. None: nothing is.
        pinned_bytes: of memory that copies from devices pass through; None: the arena is pinned itself.
    """

    def __init__(
        self,
        share: RankWritePlan,
        plan: SavePlan,
        contribution: RankState,
        arena: Arena,
        *,
        watched: Watched | None,
        pinned_bytes: int | None,
        placed: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        self._placed = placed or {}
        self._share = share
        self._contribution: RankState | None = contribution
        self._regions: Regions | None = Regions(plan, contribution)
        self._arena = arena
        self._watched = watched
        self._pinned_bytes = pinned_bytes
        self._sends: dict[int, bytes] = {}
        self._streams = Streams("staging")
        self._being_written: tuple[int, torch.Tensor] | None = None
        self._ready: queue.SimpleQueue[tuple[Staged, torch.Tensor] | None] = queue.SimpleQueue()
        self._has_sends = threading.Event()
        self._may_be_written = threading.Event()
        self._is_over = threading.Event()
        self._is_given_up = False
        self._error: BaseException | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Copy what must not wait, and start copying the rest. What goes wrong with a copy fails the save, not the caller."""
        later: list[tuple[int, Item]] = []
        try:
            if self._error is not None:
                raise self._error
            self._meet_devices()
            staging = Staging(Halves(self._pinned_bytes or _LITTLE_PINNED_BYTES), self._streams)
            self._sends = sent(self._share, self._the_regions, staging)
            self._has_sends.set()  # before anything waits for room, which there is once they have arrived
            now, later = self._parted()
            self._copy(now)
        except Exception as error:
            self._error = error
        except BaseException as interrupt:
            self._error = interrupt
            self._end()
            raise
        finally:
            self._has_sends.set()
        if later and self._error is None:
            arguments = later, same_device()
            threading.Thread(target=self._copy_later, args=arguments, name="copier", daemon=True).start()
        else:
            self._end()

    def fail(self, error: Exception) -> None:
        """There is to be no copy: `take` does nothing, and whoever asks for items learns why."""
        self._error = error

    def wait(self) -> None:
        """Return when the copy is complete, or has failed. Any thread; at once where it is."""
        self._is_over.wait()

    @property
    def is_complete(self) -> bool:
        return self._is_over.is_set()

    def sends(self) -> dict[int, bytes]:
        self._has_sends.wait()
        if self._error is not None:
            raise self._error
        return self._sends

    def items(self) -> Iterator[Staged]:
        """Every item: once all are copied, for training may be waiting for that, or once one has no room. Those with places come in order.

        Raises: what went wrong with the copy.
        """
        self._may_be_written.wait()
        for staged, room in self._in_order() if self._placed else iter(self._next_ready, None):
            self._being_written = staged.number, room
            yield staged
            self._give_back_written()
        self.check()

    def _in_order(self) -> Iterator[tuple[Staged, torch.Tensor]]:
        """Once all are copied, or the copy has failed."""
        in_order = sorted(iter(self._next_ready, None), key=lambda ready: ready[0].number)
        self._ready.get()  # the end, which comes last again
        for ready in (*in_order, None):
            self._ready.put(ready)
        return iter(self._next_ready, None)

    def check(self) -> None:
        """Wait until all is copied, and raise what went wrong."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Let go of everything: nobody will ask for more. Any thread, any time, also when all went well."""
        self._is_given_up = True
        self._is_over.wait()
        self._give_back_written()
        while (ready := self._next_ready()) is not None:
            self._give_back(ready[0].number, ready[1])

    def _give_back_written(self) -> None:
        """Not left to the end of the loop over the items: an error that came between keeps that loop as long as it is kept itself."""
        if self._being_written is not None:
            self._give_back(*self._being_written)
            self._being_written = None

    def _give_back(self, number: int, room: torch.Tensor) -> None:
        if number not in self._placed:
            self._arena.give_back(room)

    def _next_ready(self) -> tuple[Staged, torch.Tensor] | None:
        ready = self._ready.get()
        if ready is None:
            self._ready.put(None)  # the end stays the end
        return ready

    def _meet_devices(self) -> None:
        """Wait now for what is queued on devices, and not when the copier comes: training has queued more by then."""
        for item in self._share.items if uses_accelerator() else ():
            for tensor in self._the_regions.of_item(item):
                if not tensor.is_cpu:
                    self._streams.on(tensor.device)

    def _parted(self) -> tuple[list[tuple[int, Item]], list[tuple[int, Item]]]:
        """What is copied before control returns, and what later."""
        now: list[tuple[int, Item]] = []
        later: list[tuple[int, Item]] = []
        assert self._regions is not None
        for number, item in enumerate(self._share.items):
            tensors = self._regions.of_item(item) if self._watched is not None and isinstance(item, ChunkTask) else []
            if self._watched is not None and tensors and all(map(self._watched.holds, tensors)):
                for tensor in tensors:
                    self._watched.note(item.name, tensor)  # type: ignore[union-attr]
                later.append((number, item))
            else:
                now.append((number, item))
        return now, later

    @torch.no_grad()
    def _copy_later(self, items: Sequence[tuple[int, Item]], work_here: Callable[[], None]) -> None:
        try:
            work_here()
            self._copy(items)
        except BaseException as error:
            self._error = error
        self._end()

    def _end(self) -> None:
        """Nothing more is copied: look whether what was copied is the state of the call, and let go of it."""
        try:
            if self._error is None:
                self._require_unchanged()
        except BaseException as error:
            self._error = error
        self._contribution = self._regions = self._watched = None
        self._ready.put(None)
        self._is_over.set()
        self._may_be_written.set()

    def _require_unchanged(self) -> None:
        changed = self._watched.changed() if self._watched is not None else []
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise StateChangedError(
                f"{changed[0]}{more} was written to while the save was still copying it: between the call and the step of its optimizer "
                "nothing may change a parameter in place; call wait_for_snapshot() before what does, or save with saves.overlap=False"
            )
        assert self._contribution is not None
        self._contribution.require_unchanged()

    def _copy(self, items: Sequence[tuple[int, Item]]) -> None:
        """Copy items to the arena and hand them over; one from a device is on its way while the one before is digested."""
        rooms: dict[int, torch.Tensor] = {}
        coming = 0

        def with_tensors() -> Iterator[tuple[tuple[int, Item], list[torch.Tensor]]]:
            nonlocal coming
            for coming, item in items:
                yield (coming, item), self._the_regions.of_item(item)

        def room_in_arena(num_bytes: int) -> torch.Tensor:
            rooms[coming] = self._take(coming, num_bytes)
            return rooms[coming]

        through = room_in_arena if self._pinned_bytes is None else Halves(self._pinned_bytes)
        try:
            for (number, item), hosts in Staging(through, self._streams).ahead(with_tensors()):
                if number not in rooms:
                    rooms[number] = self._take(number, sum(map(_in_a_row, _bytes_of(self._share, item))))
                    hosts = _copied(item, hosts, rooms[number])
                elif isinstance(item, Pack):
                    hosts = [_joined(hosts, rooms[number])]
                else:
                    hosts = [host if _lies_in(host, rooms[number]) else host.clone() for host in hosts]
                digests = [staged_digests(host, self._grid_of(item, host)) for host in hosts]
                self._ready.put((Staged(number, hosts, digests), rooms.pop(number)))
        finally:
            if rooms:  # it has failed, and what was on its way may be so still
                wait_for_accelerator()
                for number, room in rooms.items():
                    self._give_back(number, room)

    def _grid_of(self, item: Item, host: torch.Tensor) -> tuple[int, ...]:
        """The shape in which a host tensor is stored: a whole chunk as its store wants it, a part of one, or a pack, as it is."""
        if isinstance(item, ChunkTask) and item.own == (item.box,):
            return self._share.stored_shape(item)
        return tuple(host.shape)

    def _take(self, number: int, num_bytes: int) -> torch.Tensor:
        self._require_wanted()
        if number in self._placed:
            return self._placed[number]
        return self._arena.take(num_bytes, self._wait_for_room)

    def _wait_for_room(self) -> None:
        self._may_be_written.set()
        self._require_wanted()

    def _require_wanted(self) -> None:
        if self._is_given_up:
            raise SaveAbandonedError("the save failed before its copy was complete")

    @property
    def _the_regions(self) -> Regions:
        assert self._regions is not None, "the copy is complete"
        return self._regions


def arena_bytes(share: RankWritePlan, *, is_pinned: bool, placed: Collection[int] = ()) -> tuple[int, int]:
    """The bytes of an arena that a share needs at least, and those with which nothing of it has to wait.

    Args:
        is_pinned: two items are under way from a device at a time, and a third must have room wherever they lie.
        placed: the items that are not copied to it. Where there are any, all others must have room at a time.
    """
    sizes = [
        room_for(sum(_in_a_row(num_bytes) for num_bytes in _bytes_of(share, item)))
        for number, item in enumerate(share.items)
        if number not in placed
    ]
    if placed:
        return sum(sizes), sum(sizes)
    largest = max(sizes, default=0)
    return largest * (3 if is_pinned else 1), max(sum(sizes), largest * (3 if is_pinned else 1))


def _bytes_of(share: RankWritePlan, item: Item) -> list[int]:
    if isinstance(item, Pack):
        return [share.item_bytes(item)]
    itemsize = torch_dtype(share.arrays[item.name].dtype).itemsize
    return [box.num_elements * itemsize for box in item.own]


def _in_a_row(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _copied(item: Item, hosts: Sequence[torch.Tensor], room: torch.Tensor) -> list[torch.Tensor]:
    """Copy the host tensors of an item to its room."""
    if isinstance(item, Pack):
        num_bytes = sum(host.nbytes for host in hosts)
        return [laid_end_to_end(hosts, room[:num_bytes].view(torch_dtype(item.dtype)))]
    copies = []
    for host in hosts:
        copies.append(room[: host.nbytes].view(host.dtype).view(host.shape))
        room = room[_in_a_row(host.nbytes) :]
        _copy_bits(copies[-1], host)
    return copies


def _copy_bits(to: torch.Tensor, host: torch.Tensor) -> None:
    """Copy a host tensor by one thread, that lets go of the interpreter, and not by torch's, which training may be using."""
    if host.is_contiguous() and not host.is_conj() and not host.is_neg():
        np.copyto(raw_bytes(to).numpy(), raw_bytes(host).numpy())
    else:
        to.copy_(host.detach())


def _joined(hosts: Sequence[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
    """The tensors of a pack, which came to the room end to end, as one. Those that found none there are joined beside it."""
    total = sum(host.nbytes for host in hosts)
    if all(not host.numel() or _lies_in(host, room) for host in hosts):
        return room[:total].view(hosts[0].dtype)
    return laid_end_to_end(hosts, torch.empty(total // hosts[0].element_size(), dtype=hosts[0].dtype))


def _lies_in(host: torch.Tensor, room: torch.Tensor) -> bool:
    return 0 <= host.data_ptr() - room.data_ptr() < len(room)
