"""Saves of one coordinator in the background: a thread for each save writes a copy of the state, and commits it.

The threads of all ranks agree over a topology of their own, which makes no collectives; the lead's thread publishes. So a checkpoint is
committed without another call of the training thread, whose later calls collect the reports, in one order on all ranks.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from ckpt.catalog.ledger import delete_folder
from ckpt.errors import CheckpointError, RankAbsentError, SaveAbandonedError, StorageError, sentence
from ckpt.memory.device import same_device
from ckpt.memory.host import Arena, staging_memory
from ckpt.ranks.merging import most, total
from ckpt.ranks.sigterm import SigtermDeferral
from ckpt.ranks.topology import Topology
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest
from ckpt.saving.background.priority import Throttle, in_background, write_throttled
from ckpt.saving.background.snapshot import Snapshot, arena_bytes
from ckpt.saving.prepared_save import PreparedSave, SaveReport
from ckpt.saving.save_settings import SaveSettings, setting
from ckpt.saving.saver import SavedRun
from ckpt.saving.writing import RankWritePlan, Staged, WriteJob, WriteResult
from ckpt.state.overlap import Watched

_WORTH_A_THREAD_BYTES = 16 << 20
_ESTIMATE_MARGIN = 1.05
"""Room for buffers, for other components, and for the rounding of items to pages."""

_log = logging.getLogger("ckpt")


@dataclass(eq=False)
class _Pending:
    """One unfinished save.

    Attributes:
        blocked_s: seconds that training has waited for it on this rank.
        over: set when its thread has ended.
        failure: sentence of its error, once its thread has failed.
    """

    snapshot: Snapshot
    blocked_s: float
    over: threading.Event
    report: SaveReport | None = None
    failure: str | None = None


class Background:
    """Runs the background saves of a coordinator, or of a `FolderSaves`, one after another.

    Called by the training thread, unless a method says otherwise.

    Args:
        run: components, backend and device; its topology is that of the training thread.
        most_bytes: of host memory for copies; a larger state is copied as the items before it are written, while training waits. None: as
            much as a save takes, or two with `when_busy="queue"`, but at most half of the host's free memory.
    """

    def __init__(self, run: SavedRun, settings: SaveSettings, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._topology = topology = run.topology
        self._settings = settings
        self._device = run.device
        self._queue = AsyncCallsQueue(lambda: topology, look=self._given_up_for)
        self._branch: Topology | None = None
        self._branch_name = topology.name_branch()
        self._num_joins = 0
        self._arena = Arena(staging_memory)
        self._warming: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._pending: list[_Pending] = []
        self._last: _Pending | None = None
        self._finalized: list[SaveReport] = []
        self._deletions: list[threading.Thread] = []
        self._deleting = threading.Lock()
        self._given_up = threading.Event()
        self._has_told = False
        self._throttle = None if settings.writer_mib_s is None else Throttle(settings.writer_mib_s)
        self._sigterm = SigtermDeferral(settings.grace_s, is_over=self._is_over, hurry=self.hurry, give_up=self.give_up)
        # Before the interpreter shuts anything down: a writer may have threads to start still.
        threading._register_atexit(_call, weakref.WeakMethod(self._drain))  # type: ignore[attr-defined]

    @property
    def num_pending(self) -> int:
        """Number of saves that have begun and are not finalized. Equal on all ranks."""
        return self._queue.get_num_unfinalized_calls()

    def warm_up(self, foreseen_bytes: int) -> None:
        """Allocate and touch the memory for copies now, beside training, so that the first save stops training as long as later ones.

        Args:
            foreseen_bytes: an estimate of this rank's part. The first save allocates anew if it takes more.
        """
        if foreseen_bytes >= _WORTH_A_THREAD_BYTES:
            arguments = min(self._wanted(int(foreseen_bytes * _ESTIMATE_MARGIN)), self._limit()), same_device()
            thread = threading.Thread(target=self._touch, args=arguments, name="staging memory", daemon=True)
            with suppress(RuntimeError):  # the system gives this process no more threads: the first save touches it
                thread.start()
                self._warming = thread

    def _touch(self, num_bytes: int, work_here: Callable[[], None]) -> None:
        in_background()
        work_here()
        with suppress(Exception):  # the first save asks for this memory again, and says why there is none
            self._arena.prepare(num_bytes, self._is_closing.is_set)

    def begin(self, prepared: PreparedSave[Any], started: float, watched: Watched | None) -> None:
        """Copy the state, or begin to, and start the thread that writes it. An error from here on is raised by `finalize`.

        Args:
            started: `time.perf_counter` at the call of the save.
            watched: tensors that only steps of optimizers change, to be copied beside training.
        """
        self._sigterm.arm()
        self.wait_for_snapshots()  # or this save could take the room that the one before needs
        snapshot = self._snapshot(prepared, watched)
        # The thread of a save that was given up may still run.
        before = None if self._last is None else self._last.over
        self._last = pending = _Pending(snapshot, 0.0, threading.Event())
        self._pending.append(pending)
        number = self._queue.schedule_async_request(
            AsyncRequest(
                self._run,
                (prepared, pending, started, before),
                [partial(self._finish, pending)],
                what=prepared.destination.what,
                abandon_fns=[partial(self._forget, pending)],
            )
        )
        if self._queue.has_ended(number) and not pending.over.is_set():
            snapshot.fail(StorageError("its thread could not be started"))  # `finalize` says why
            prepared.destination.discard()
            pending.over.set()
        snapshot.take()
        pending.blocked_s = time.perf_counter() - started

    def delete(self, folder: Path) -> None:
        """Delete a folder that was renamed out of the way, in a thread: freeing gigabytes takes file systems long. Any thread."""
        thread = threading.Thread(target=_delete, args=(folder,), name="deletion", daemon=True)
        with self._deleting:
            try:
                thread.start()
            except RuntimeError:  # the process may have no more threads; the save is committed all the same
                delete_folder(folder)
                return
            self._deletions = [*(deletion for deletion in self._deletions if deletion.is_alive()), thread]

    def wait_for_snapshots(self) -> None:
        """Wait until no save copies state any more. Any thread, before it changes state."""
        for pending in list(self._pending):
            began = time.perf_counter()
            pending.snapshot.wait()
            pending.blocked_s += time.perf_counter() - began

    def wait_until_over(self) -> None:
        """Wait until this rank writes nothing any more. Any thread. Raises nothing of a save that failed."""
        for pending in list(self._pending):
            pending.over.wait()

    def finalize(self, *, blocking: bool) -> list[SaveReport]:
        """Agree on the saves that have ended, and return the reports of those that were committed, in order. Collective.

        Args:
            blocking: wait for all saves.

        Raises:
            CheckpointError: a save failed, and `on_async_error` is "raise"; saves behind it are left for the next call.
        """
        while before := self.num_pending:
            try:
                self._queue.maybe_finalize_async_calls(blocking)
            except CheckpointError as error:
                is_of_a_save = self.num_pending < before and not isinstance(error, RankAbsentError)
                if self._settings.on_async_error == "raise" or not is_of_a_save:
                    raise
                if self._topology.is_lead:
                    _log.warning("training goes on without a checkpoint: %s", error)
                continue
            break
        if not self.num_pending:
            self._sigterm.disarm()
        reports, self._finalized = self._finalized, []
        return reports

    def hurry(self) -> None:
        """Wait less for absent ranks, because this process has been asked to end. Any thread."""
        if self._branch is not None:
            self._branch.expect_absence()

    def give_up(self) -> None:
        """Fail this rank's part of all unfinished saves. Any thread."""
        self._given_up.set()

    @contextmanager
    def sigterm_left_to_others(self) -> Iterator[None]:
        """Leave the handling of SIGTERM to the caller inside the block."""
        self._sigterm.disarm()
        try:
            yield
        finally:
            if self._pending:  # none after `close`, which may leave saves that no call has reported
                self._sigterm.arm()

    def close(self) -> list[str]:
        """Wait for unfinished saves, and release memory and threads.

        Returns:
            the errors of saves that no call has reported.
        """
        self._drain()
        failures = [pending.failure for pending in self._pending if pending.failure is not None]
        self._sigterm.disarm()
        if self._branch is not None:
            self._branch.close()
            self._branch = None
        self._pending.clear()
        self._last = None  # its snapshot holds views of kept memory, each with a descriptor
        self._is_closing.set()
        if self._warming is not None:
            self._warming.join()
        self._arena.let_go()
        return failures

    def _snapshot(self, prepared: PreparedSave[Any], watched: Watched | None) -> Snapshot:
        """Make a snapshot of the rank's part, and room for it in the arena; without memory it is one that fails the save."""
        placed, error = _rooms_in(prepared)
        is_on_device = self._device.type != "cpu"
        snapshot = Snapshot(
            prepared.write_plan,
            prepared.plan,
            prepared.mine,
            self._arena,
            watched=watched,
            pinned_bytes=self._device.pinned_bytes if is_on_device and placed else None,
            placed=placed,
            progress=self._go_on,
        )
        least, whole = arena_bytes(prepared.write_plan, is_pinned=is_on_device and not placed, placed=placed)
        try:
            if error is not None:
                raise error
            self._arena.grow(self._capacity(least, whole), lambda: None)
        except Exception as reason:
            snapshot.fail(reason)
        return snapshot

    def _capacity(self, least: int, whole: int) -> int:
        """The bytes of the arena, by the settings and the free memory of the host."""
        limit = self._limit()
        if limit < whole and not self._has_told:
            self._has_told = True
            _log.warning(
                "the copy of rank %d's part takes %.0f MiB of host memory, of which it may take %.0f: training waits while what came "
                "before is written. Give it a larger memory_budget_mib, or shard over more ranks.",
                self._topology.rank,
                whole / 2**20,
                max(least, limit) / 2**20,
            )
        return max(least, min(self._wanted(whole), limit))

    def _wanted(self, whole: int) -> int:
        return whole * (2 if self._settings.when_busy == "queue" else 1)

    def _limit(self) -> int:
        if self._most_bytes is not None:
            return self._most_bytes
        num_ranks = len(self._topology.nodes[self._topology.node_rank])
        return self._arena.num_bytes + int(psutil.virtual_memory().available) // (2 * num_ranks)

    def _run(
        self, prepared: PreparedSave[Any], pending: _Pending, started: float, before: threading.Event | None
    ) -> None:
        """Write and commit one save, after the one before it is over. In a thread of its own."""
        try:
            in_background(self._settings.writer_cores, local_rank=self._topology.local_rank)
            if before is not None:
                before.wait()
            if self._branch is None:
                self._num_joins += 1
                self._branch = self._topology.branch(f"{self._branch_name}/{self._num_joins}")
            prepared.run(self._branch, pending.snapshot, self._write, started=started)
            pending.report = prepared.destination.report
        except BaseException as error:
            pending.failure = sentence(error)
            raise
        finally:
            pending.snapshot.give_up()
            if pending.report is None:
                prepared.destination.discard()
            pending.over.set()

    def _write(
        self, write_plan: RankWritePlan, job: WriteJob, staged: Iterable[Staged], progress: Callable[[int], None]
    ) -> WriteResult:
        """Write what a plan says, until the saves are given up.

        Args:
            progress: that of the branch, which `_go_on` shows.
        """
        return write_throttled(self._throttle, self._given_up, write_plan, job, staged, self._go_on)

    def _go_on(self, num_bytes: int) -> None:
        """Show progress of the writing thread, unless the saves are given up."""
        if self._given_up.is_set():
            found = f"rank {self._topology.rank} was asked to end, and the save did not within "
            raise SaveAbandonedError(found, setting("grace_s", f"{self._settings.grace_s:g}"))
        assert self._branch is not None, "a save has begun to run"
        self._branch.progress(num_bytes)

    def _finish(self, pending: _Pending) -> None:
        """Finalize a save that all ranks have committed, with the longest `blocked_s` of a rank, and the `blocked_bytes` of all."""
        with self._topology.phase("report") as phase:
            phase.merge = {"seconds": most(pending.blocked_s), "bytes": total(pending.snapshot.blocked_bytes)}
        assert pending.report is not None
        merged = phase.merged
        self._finalized.append(replace(pending.report, blocked_s=merged["seconds"], blocked_bytes=merged["bytes"]))
        self._forget(pending)

    def _forget(self, pending: _Pending) -> None:
        if pending in self._pending:
            self._pending.remove(pending)

    def _is_over(self) -> bool:
        return all(pending.over.is_set() for pending in self._pending)

    def _given_up_for(self) -> CheckpointError | None:
        """The error that the other ranks have agreed on without this rank's thread, which hangs or is late; None: there is none."""
        return None if self._branch is None else self._branch.given_up_for()

    def _drain(self) -> None:
        """Wait for unfinished saves and deletions. Also called when the interpreter ends."""
        for pending in list(self._pending):
            pending.over.wait()
        for thread in self._deletions:
            thread.join()


def _rooms_in(prepared: PreparedSave[Any]) -> tuple[Mapping[int, torch.Tensor], Exception | None]:
    """The places of items in memory that is kept, or the error of making that memory."""
    try:
        return prepared.destination.rooms(prepared.write_plan, prepared.backend), None
    except Exception as error:
        return {}, error


def _delete(folder: Path) -> None:
    in_background()
    delete_folder(folder)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method, unless its object is gone."""
    if (bound := method()) is not None:
        bound()
