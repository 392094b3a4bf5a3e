"""Copy one rank's part of a save to host memory, which is reused from save to save.

    training thread     copies state that may change at any time, and returns
    copier thread       copies, during the next forward and backward, state that only an optimizer's step changes (saves.overlap)
    writing thread      takes item after item, and gives the memory back

An item without room waits until an earlier one is written. The copier takes the digests of an item while its bytes are in the processor's
cache; the writing thread takes those of items that the training thread has copied, before it hands out the first one, unless
another item waits for room. They are compared with the bytes that are written.

Where the files of a save are kept in memory (`ckpt.storage.pool`), an item is copied to its place there, and stays; only chunks that are
assembled of several ranks' parts pass through the arena.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import torch

from ckpt.backends.base import staged_digests
from ckpt.errors import CheckpointError, SaveAbandonedError, StateChangedError
from ckpt.format.dtypes import raw_bytes, torch_dtype
from ckpt.memory.copies import Halves, Staging, Streams
from ckpt.memory.device import same_device, uses_accelerator, wait_for_accelerator
from ckpt.memory.host import Arena, room_for
from ckpt.planning.plan import ChunkTask, SavePlan
from ckpt.ranks.waiting import start
from ckpt.saving.prepared_save import Regions, sent
from ckpt.saving.save_settings import setting
from ckpt.saving.writing import Item, Pack, RankWritePlan, Staged, laid_end_to_end
from ckpt.state.collect import RankState
from ckpt.state.overlap import Watched

_ALIGNED = 64
_LITTLE_PINNED_BYTES = 8 << 20
"""Bytes of the halves that partial chunks pass through on their way to other ranks."""


class Snapshot:
    """The copy for one save. The training thread calls `take`, then `wait` at any time; the writing thread calls the rest.

    States. Each arrow sets the events below it, which other threads wait for. An error is kept, and leads to `over` from every state:

        new --take--> sending --------> copying --all copied--> over
         |                  |             ^  |                   ^  _is_over, _may_be_written
         |                  _has_sends    |  no room left        |
         |                                |  v  _may_be_written  |
         |                               copying while writing --+
         +--fail, then take--------------------------------------+

    `sending` is in the training thread, which copies on, or leaves the rest to the copier. Before `_may_be_written` no item is handed out.
    `give_up`, in any state but `new`, ends the copying with an error, waits for `over`, and gives all memory back to the arena.
    Only the thread that copies uses the tensors (`_regions`, `_rank_state`, `_watched`), and releases them before `over`.

    Args:
        arena: large enough for `arena_bytes` of this plan.
        placed: number of an item -> memory of its size, outside of the arena, to copy it to. Items are handed out once all are copied.
        watched: tensors that only optimizers' steps change, for the copier to copy. None: the training thread copies all.
        pinned_bytes: of memory that copies from devices pass through; None: the arena itself is pinned.
        progress: called by the writing thread with the number of bytes that it has digested; may raise.

    Attributes:
        blocked_bytes: bytes of the items that the training thread copies. Set by `take`.
    """

    def __init__(
        self,
        write_plan: RankWritePlan,
        plan: SavePlan,
        rank_state: RankState,
        arena: Arena,
        *,
        watched: Watched | None,
        pinned_bytes: int | None,
        placed: Mapping[int, torch.Tensor] | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._progress = progress
        self._placed = placed or {}
        self._write_plan = write_plan
        self._rank_state = rank_state
        self._regions = Regions(plan, rank_state)
        self._arena = arena
        self._watched = watched
        self._pinned_bytes = pinned_bytes
        self._sends: dict[int, bytes] = {}
        self._streams = Streams("staging")
        self._being_written: tuple[int, torch.Tensor] | None = None
        self._ready: queue.SimpleQueue[tuple[Staged, torch.Tensor] | None] = queue.SimpleQueue()
        self._undigested: list[Staged] = []
        self.blocked_bytes = 0
        self._has_sends = threading.Event()
        self._may_be_written = threading.Event()
        self._is_over = threading.Event()
        self._is_given_up = False
        self._error: BaseException | None = None

    @torch.no_grad()
    def take(self) -> None:
        """Copy state that must not change first, and start the copier for the rest. An error of a copy fails the save, not the caller."""
        later: list[tuple[int, Item]] = []
        try:
            if self._error is not None:
                raise self._error
            self._meet_devices()
            staging = Staging(Halves(self._pinned_bytes or _LITTLE_PINNED_BYTES), self._streams)
            self._sends = sent(self._write_plan, self._regions, staging)
            self._has_sends.set()  # before anything waits for room: writing frees it, and begins with the exchange of these
            now, later = self._parted()
            self.blocked_bytes = sum(sum(_bytes_of(self._write_plan, item)) for _, item in now)
            self._copy(now, digest=False)  # training waits
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
            try:
                start(threading.Thread(target=self._copy_later, args=arguments, name="copier", daemon=True))
            except CheckpointError as error:
                self._error = error
                self._end()
        else:
            self._end()

    def fail(self, error: Exception) -> None:
        """Make no copy: `take` does nothing, and `items` raises this error."""
        self._error = error

    def wait(self) -> None:
        """Wait until the copy is complete, or has failed. Any thread."""
        self._is_over.wait()

    def sends(self) -> dict[int, bytes]:
        self._has_sends.wait()
        if self._error is not None:
            raise self._error
        return self._sends

    def items(self) -> Iterator[Staged]:
        """Yield every item. Starts once all are copied, or when one has no room. Placed items come in file order.

        Raises: the error of the copy.
        """
        self._may_be_written.wait()
        digests = self._late_digests()
        for staged, room in self._in_order() if self._placed else iter(self._next_ready, None):
            self._being_written = staged.number, room
            staged = staged if staged.digests else staged._replace(digests=digests.get(staged.number))
            yield staged
            self._give_back_written()
        self.check()

    def _late_digests(self) -> dict[int, list[tuple[int, ...]]]:
        """Take the digests of the items that the training thread has copied, by number."""
        undigested, self._undigested = self._undigested, []
        if not self._is_over.is_set() or self._error is not None:
            return {}  # an item waits for room, so the others are written first; or nothing will be written
        digests = {}
        for staged in undigested:
            digests[staged.number] = self._digests_of(staged)
            self._progress(sum(host.nbytes for host in staged.hosts))
        return digests

    def _in_order(self) -> Iterator[tuple[Staged, torch.Tensor]]:
        """The items in order, once all are copied or the copy has failed."""
        in_order = sorted(iter(self._next_ready, None), key=lambda ready: ready[0].number)
        self._ready.get()  # the end mark, which is put last again
        for ready in (*in_order, None):
            self._ready.put(ready)
        return iter(self._next_ready, None)

    def check(self) -> None:
        """Wait until all is copied, and raise the error of the copy."""
        self._is_over.wait()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Release all memory; no item is requested after this. Any thread, at any time after `take`, also after success."""
        self._is_given_up = True
        self._is_over.wait()
        self._give_back_written()
        while (ready := self._next_ready()) is not None:
            self._give_back(ready[0].number, ready[1])

    def _give_back_written(self) -> None:
        """Give back the memory of the item handed out last. Not at the end of the loop over the items: an error keeps its frame alive."""
        if self._being_written is not None:
            self._give_back(*self._being_written)
            self._being_written = None

    def _give_back(self, number: int, room: torch.Tensor) -> None:
        if number not in self._placed:
            self._arena.give_back(room)

    def _next_ready(self) -> tuple[Staged, torch.Tensor] | None:
        ready = self._ready.get()
        if ready is None:
            self._ready.put(None)  # the end mark stays
        return ready

    def _meet_devices(self) -> None:
        """Wait now for the work queued on devices: by the time of the copier training has queued more."""
        for item in self._write_plan.items if uses_accelerator() else ():
            for tensor in self._regions.of_item(item):
                if not tensor.is_cpu:
                    self._streams.on(tensor.device)

    def _parted(self) -> tuple[list[tuple[int, Item]], list[tuple[int, Item]]]:
        """(Items to copy before `take` returns, items for the copier)."""
        watched = self._watched
        if watched is None:
            return list(enumerate(self._write_plan.items)), []
        now: list[tuple[int, Item]] = []
        later: list[tuple[int, Item]] = []
        for number, item in enumerate(self._write_plan.items):
            if isinstance(item, ChunkTask) and all(map(watched.holds, tensors := self._regions.of_item(item))):
                for tensor in tensors:
                    watched.note(item.name, tensor)
                later.append((number, item))
            else:
                now.append((number, item))
        return now, later

    @torch.no_grad()
    def _copy_later(self, items: Sequence[tuple[int, Item]], work_here: Callable[[], None]) -> None:
        try:
            work_here()
            self._copy(items, digest=True)
        except BaseException as error:
            self._error = error
        self._end()

    def _end(self) -> None:
        """End the copying: check that the copy is the state of the call, and release the tensors."""
        try:
            if self._error is None:
                self._require_unchanged()
        except BaseException as error:
            self._error = error
        del self._rank_state, self._regions
        self._watched = None
        self._ready.put(None)
        self._is_over.set()
        self._may_be_written.set()

    def _require_unchanged(self) -> None:
        changed = self._watched.changed() if self._watched is not None else []
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise StateChangedError(
                f"{changed[0]}{more} was written to while the save was still copying it: between the call and the step of its optimizer "
                "nothing may change a parameter in place; call wait_for_snapshot() before what does, or ",
                "save with ", setting("overlap", False),
            )
        self._rank_state.require_unchanged()

    def _copy(self, items: Sequence[tuple[int, Item]], *, digest: bool) -> None:
        """Copy items, and queue them for the writer.

        Args:
            digest: take their digests; a device copies an item meanwhile. If not, the writing thread takes them.
        """
        rooms: dict[int, torch.Tensor] = {}
        coming = 0

        def with_tensors() -> Iterator[tuple[tuple[int, Item], list[torch.Tensor]]]:
            nonlocal coming
            for coming, item in items:
                yield (coming, item), self._regions.of_item(item)

        def room_in_arena(num_bytes: int) -> torch.Tensor:
            rooms[coming] = self._take(coming, num_bytes)
            return rooms[coming]

        through = room_in_arena if self._pinned_bytes is None else Halves(self._pinned_bytes)
        try:
            for (number, item), hosts in Staging(through, self._streams).ahead(with_tensors()):
                if number not in rooms:
                    rooms[number] = self._take(number, sum(map(_in_a_row, _bytes_of(self._write_plan, item))))
                    hosts = _copied(item, hosts, rooms[number])
                elif isinstance(item, Pack):
                    hosts = [_joined(hosts, rooms[number])]
                else:
                    hosts = [host if _lies_in(host, rooms[number]) else host.clone() for host in hosts]
                staged = Staged(number, hosts)
                if digest:
                    staged = staged._replace(digests=self._digests_of(staged))
                elif not self._may_be_written.is_set():  # if it is, the writing thread may have room for this one only
                    self._undigested.append(staged)
                self._ready.put((staged, rooms.pop(number)))
        finally:
            if rooms:  # after an error copies may still be running
                wait_for_accelerator()
                for number, room in rooms.items():
                    self._give_back(number, room)

    def _digests_of(self, staged: Staged) -> list[tuple[int, ...]]:
        item = self._write_plan.items[staged.number]
        return [staged_digests(host, self._grid_of(item, host)) for host in staged.hosts]

    def _grid_of(self, item: Item, host: torch.Tensor) -> tuple[int, ...]:
        """The shape of a host tensor in storage: that of the whole chunk, or its own for a part of a chunk or a pack."""
        if isinstance(item, ChunkTask) and item.own == (item.box,):
            return self._write_plan.stored_shape(item)
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


def arena_bytes(write_plan: RankWritePlan, *, is_pinned: bool, placed: Collection[int] = ()) -> tuple[int, int]:
    """(The fewest bytes that an arena for a write plan must have, the bytes with which no item waits for another).

    Args:
        is_pinned: devices copy two items to the arena at a time, and a third must have room wherever they are.
        placed: the items that are not copied to the arena. If there are any, all others must have room at once.
    """
    sizes = [
        room_for(sum(_in_a_row(num_bytes) for num_bytes in _bytes_of(write_plan, item)))
        for number, item in enumerate(write_plan.items)
        if number not in placed
    ]
    if placed:
        return sum(sizes), sum(sizes)
    largest = max(sizes, default=0)
    return largest * (3 if is_pinned else 1), max(sum(sizes), largest * (3 if is_pinned else 1))


def _bytes_of(write_plan: RankWritePlan, item: Item) -> list[int]:
    if isinstance(item, Pack):
        return [write_plan.item_bytes(item)]
    itemsize = torch_dtype(write_plan.arrays[item.name].dtype).itemsize
    return [box.num_elements * itemsize for box in item.own]


def _in_a_row(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _copied(item: Item, hosts: Sequence[torch.Tensor], room: torch.Tensor) -> list[torch.Tensor]:
    """Copy the host tensors of an item to its room in the arena."""
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
    """Copy a host tensor in this thread, without the interpreter's lock. Torch's own threads may be in use by training."""
    if host.is_contiguous() and not host.is_conj() and not host.is_neg():
        np.copyto(raw_bytes(to).numpy(), raw_bytes(host).numpy())
    else:
        to.copy_(host.detach())


def _joined(hosts: Sequence[torch.Tensor], room: torch.Tensor) -> torch.Tensor:
    """The tensors of a pack as one: they came to the room end to end, or did not fit, and are joined in new memory."""
    total = sum(host.nbytes for host in hosts)
    if all(not host.numel() or _lies_in(host, room) for host in hosts):
        return room[:total].view(hosts[0].dtype)
    return laid_end_to_end(hosts, torch.empty(total // hosts[0].element_size(), dtype=hosts[0].dtype, device="cpu"))


def _lies_in(host: torch.Tensor, room: torch.Tensor) -> bool:
    return 0 <= host.data_ptr() - room.data_ptr() < len(room)
