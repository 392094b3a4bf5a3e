"""Copy committed saves from the first tier to the later ones, in a thread of each rank, beside training and beside the next saves.

Of a tier that is slower than the saves that are due in it, the newest one waits, and takes the place of the one that waited before: so
memory is bounded, and what arrives there is never old. The threads of all ranks agree on each step over a topology of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpt.catalog.copying import copy_files
from ckpt.catalog.incremental import previous_of, same_files
from ckpt.errors import CheckpointError, SaveAbandonedError, sentence
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import start
from ckpt.saving.background.priority import in_background
from ckpt.saving.checkpoint_root import SaveTarget
from ckpt.saving.host_folder import Kept
from ckpt.saving.prepared_save import Destination, SaveReport, Written
from ckpt.storage.direct_io import Buffers

_AGAIN_S = 0.05

_log = logging.getLogger("ckpt")


class Later(NamedTuple):
    """A tier after the first one.

    Attributes:
        name: in messages.
        is_due: whether a save is due there.
        place: makes the destination of a copy.
        claims: whether this rank claims it: the lead, or the first rank of each host.
    """

    name: str
    is_due: Callable[[SaveTarget], bool]
    place: Callable[[Kept], Destination]
    claims: bool


class _Waiting(NamedTuple):
    number: int
    kept: Kept


class Drains:
    """The copies of one run's saves to later tiers. Made by every rank, in one order.

    Args:
        topology: of the training thread.
        later: the tiers after the first, in order.
        finished: called in the thread, on every rank, with the report of each copy.
        released: called in the thread, on every rank, with a save that has been copied, or not.
    """

    def __init__(
        self,
        topology: Topology,
        later: Sequence[Later],
        finished: Callable[[Later, SaveReport], None],
        released: Callable[[Kept], None],
    ) -> None:
        self._topology = topology
        self._branch_name = topology.name_branch()
        self._branch: Topology | None = None
        self._later = later
        self._finished = finished
        self._released = released
        self._changed = threading.Condition()
        self._waiting: dict[int, _Waiting] = {}
        self._offered: dict[int, _Waiting] = {}  # to the other ranks, in the agreement on the next copy
        self._running: Kept | None = None
        self._is_releasing = False
        self._newest: dict[int, Kept] = {}
        self._num_given = 0
        self._is_closing = False
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures: list[Exception] = []
        self._ended_by: CheckpointError | None = None
        self._buffers = Buffers(direct_io=True)

    def give(self, kept: Kept, *, everywhere: bool = False) -> None:
        """Have a committed save copied to the tiers that it is due in. Every rank calls it, in one order; from any thread.

        Args:
            everywhere: to all tiers that do not have it. It is not being copied yet.
        """
        with self._changed:
            self._num_given += 1
            for number, tier in enumerate(self._later):
                is_due = self._newest.get(number) is not kept if everywhere else tier.is_due(kept.target)
                if is_due:
                    before = self._waiting.get(number)
                    if before is not None and self._topology.is_lead:
                        found = before.kept.target.checkpoint_id
                        _log.warning(
                            "checkpoint-%s is not copied to %s, which is slower than the saves: a newer one is",
                            found,
                            tier.name,
                        )
                    self._waiting[number] = _Waiting(self._num_given, kept)
            if self._ended_by is not None and self._topology.is_lead:
                _log.warning("checkpoint-%s stays where it is: %s", kept.target.checkpoint_id, self._ended_by)
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ckpt-drains", daemon=True)
                start(self._thread)
            self._changed.notify_all()

    def pinned(self) -> set[Path]:
        """The checkpoints of the first tier, on this host, that are still needed for copies."""
        with self._changed:
            needed = [waiting.kept for waiting in (*self._waiting.values(), *self._offered.values())]
            return {kept.folder for kept in needed + ([self._running] if self._running else [])}

    def wait(self) -> None:
        """Wait until nothing is to be copied any more. Every rank calls it, and all get the same error.

        Raises:
            CheckpointError: of the first copy that failed since the last call; or nothing is copied any more, because a rank has gone.
        """
        with self._changed:
            while self._thread is not None and self._thread.is_alive() and (self._waiting or self._running or self._is_releasing):
                self._changed.wait(0.2)
                self._topology.progress()
            failures, self._failures = self._failures, []
            if self._waiting and self._ended_by is not None:
                failures.append(self._ended_by)  # also when it has been raised before: what waits stays where it is
        if failures:
            raise failures[0]

    def hurry(self) -> None:
        """Wait less for absent ranks, because this process has been asked to end. Any thread."""
        if self._branch is not None:
            self._branch.expect_absence()

    def give_up(self) -> None:
        """End all copies soon. Any thread."""
        self._given_up.set()

    def close(self) -> None:
        """End the thread, after the copy that is under way. What waits is not copied: see `wait`."""
        with self._changed:
            self._is_closing = True
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        in_background()
        try:
            self._branch = branch = self._topology.branch(self._branch_name)
            while self._has_work():
                self._copy_next(branch)
        except BaseException as error:  # the ranks are no longer together
            self._ended_by = CheckpointError(f"checkpoints are not copied to later tiers any more: {sentence(error)}")
            self._ended_by.__cause__ = error
            if not self._is_closing:
                self._failures.append(self._ended_by)
                _log.warning("%s", self._ended_by)
        finally:
            if self._branch is not None:
                self._branch.close()
                self._branch = None
            with self._changed:
                self._running, self._is_releasing = None, False
                self._changed.notify_all()

    def _has_work(self) -> bool:
        """Wait until something is to be copied; False: nothing will be."""
        with self._changed:
            while not self._waiting:
                if self._is_closing:
                    return False
                self._changed.wait()
            return True

    def _copy_next(self, branch: Topology) -> None:
        """Agree with the other ranks on what all of them have been given, and copy it."""
        with branch.phase("next copy") as phase:
            with self._changed:
                self._offered = dict(self._waiting)
            phase.to_lead = {str(number): waiting.number for number, waiting in self._offered.items()}
            phase.answer = lambda: _common(phase.gathered)
        with self._changed:
            # What training has given meanwhile waits for the next time: other ranks may not have it yet.
            agreed = None if phase.from_lead is None else self._offered[phase.from_lead]
            if agreed is not None and self._waiting.get(phase.from_lead) is agreed:
                del self._waiting[phase.from_lead]
            self._running, self._offered = None if agreed is None else agreed.kept, {}
        if self._running is None:  # one rank has been given a newer save already
            time.sleep(_AGAIN_S)
            return
        tier = self._later[phase.from_lead]
        kept = self._running
        failure: CheckpointError | None = None
        try:
            report = self._copy(kept, tier, branch)
            self._finished(tier, report)
        except CheckpointError as error:
            failure = error
            if branch.is_lead:
                _log.warning("checkpoint-%s is not in %s: %s", kept.target.checkpoint_id, tier.name, error)
        with self._changed:
            self._running, self._is_releasing = None, True
            if failure is None:
                self._newest[phase.from_lead] = kept
            else:
                self._failures.append(failure)
        self._released(kept)
        with self._changed:
            self._is_releasing = False
            self._changed.notify_all()

    def _copy(self, kept: Kept, tier: Later, branch: Topology) -> SaveReport:
        """Copy what each rank has written, and commit it; files that the newest checkpoint there has are linked. Collective."""
        began = time.perf_counter()
        place = tier.place(kept)
        with place.discarding(), branch.operation(f"copy of checkpoint-{kept.target.checkpoint_id} to {tier.name}"):
            with branch.phase("claim"):
                if tier.claims:
                    place.claim(branch)
            place.open(branch)
            with branch.phase("write") as phase:
                written = self._progress_of(branch)
                before = place.previous(branch.rank)
                same = same_files(before and previous_of(kept.folder, branch.rank, before.min_live), before)
                linked = copy_files(
                    kept.folder, place.folder, kept.files, rank=branch.rank, written=written, buffers=self._buffers, same=same
                )
                result = replace(kept.mine, linked_bytes=linked, write_s=time.perf_counter() - began)
                Written.say(result, phase, branch.rank)
            place.publish(replace(kept.save, destination=place), Written.heard(result, phase, branch), branch)
        assert place.report is not None, "it is published"
        return place.report

    def _progress_of(self, branch: Topology) -> Callable[[int], None]:
        def progress(num_bytes: int) -> None:
            if self._given_up.is_set():
                raise SaveAbandonedError(f"rank {branch.rank} was asked to end before the copy was complete")
            branch.progress(num_bytes)

        return progress


def _common(of_ranks: Sequence[Mapping[str, int]]) -> int | None:
    """The first tier for which all ranks wait with the same save; None: there is none yet."""
    for number, given in sorted(of_ranks[0].items(), key=lambda row: int(row[0])):
        if all(waiting.get(number) == given for waiting in of_ranks):
            return int(number)
    return None
