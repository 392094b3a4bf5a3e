"""Load a committed checkpoint into the objects of a run, on all ranks or on none. The steps of a load, in order.

    open -> check -> settle -> gather copies -> read -> apply

No tensor is read before every rank has found that its components fit the checkpoint. A component that does not fit stops the
load, or is left out on all ranks: compatibility.py and state_matching.py decide.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ckpt.catalog.catalog import catalog_at
from ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingStateError,
    RankAbsentError,
    StorageError,
    describe,
    rebuild,
)
from ckpt.format import strict_json
from ckpt.format.manifest import CONFIG_NAME, MANIFEST_NAME, STATE, CheckpointManifest
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.format.strict_json import refusing
from ckpt.loading.compatibility import (
    asked_for,
    copies_for_object,
    fit,
    goes_on,
    passed_over,
    require_something,
    rows_for_object,
)
from ckpt.loading.other_checkpoint import Opening, programs
from ckpt.loading.parts_of_state import by_component_of
from ckpt.loading.report import ComponentReport, LoadReport, Status
from ckpt.loading.sources import CheckpointSource, CommittedSource, Rows
from ckpt.loading.state_matching import (
    Match,
    beside_own_memory,
    match_changed,
    report_of_trouble,
    settle,
)
from ckpt.loading.strategy import (
    Components,
    LoadingStrategy,
    Reading,
    ReadStats,
    StoredCheckpoint,
    batches_of,
    convert_into,
    readings_of,
)
from ckpt.memory.device import Device, wait_for_all
from ckpt.ranks.merging import first, most, slowest, total
from ckpt.ranks.topology import Phase, Topology
from ckpt.state.abilities import RestoredLast, offers
from ckpt.state.sharing import StateComponent
from ckpt.storage.extents import CheckedBlocks
from ckpt.storage.host_memory import NOTHING_HELD, HeldFiles, MemoryFile
from ckpt.storage.objects.store import CountedRequests, Counts, all_of
from ckpt.storage.stored import gone, has_manifest, identity_of, read_listed_file, read_manifest_bytes

__all__ = ["LoadReport", "Loader", "committed_newest_first"]

_MAY_COME_OF_REMOVAL = (CorruptCheckpointError, StorageError, CheckpointNotFoundError, MissingStateError)
"""Errors of a load whose checkpoint is removed meanwhile; the last one where all components are optional."""

_log = logging.getLogger("ckpt")


def manifest_bytes_at(path: Place) -> bytes:
    """Read the manifest as `read_manifest_bytes` does; the error about a path without one says what is there instead.

    Raises: as `read_manifest_bytes`.
    """
    try:
        return read_manifest_bytes(path)
    except CheckpointNotFoundError as error:
        advice = programs().advice(path)
        raise (error if advice is None else CheckpointNotFoundError(advice)) from error


def _is_restored_last(one: Match) -> bool:
    stateful = one.component.stateful
    return offers(stateful, RestoredLast) and stateful.restored_last


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads one checkpoint into the objects of the components.

    Args: those of `CheckpointCoordinator`, which makes one, and
        files_of: returns the files that this host holds in memory, of the checkpoint with the manifest given; None: there are none.
    """

    components: Sequence[StateComponent]
    topology: Topology
    strategy: LoadingStrategy
    device: Device
    _: KW_ONLY
    verify: bool
    allow_pickle: bool
    files_of: Callable[[bytes, Topology], HeldFiles] | None = None

    def load(
        self,
        path: Place,
        *,
        strict: bool,
        leave_out: Collection[str] = (),
        cast: Components = False,
        may_be_old: bool = False,
    ) -> LoadReport:
        """Load once. See `CheckpointCoordinator.load_checkpoint`. Collective.

        Args:
            may_be_old: the folder may be an old checkpoint without a manifest: the user has named it.

        Raises:
            CheckpointGoneError: it was removed meanwhile.
        """
        before = identity_of(path) if self.topology.is_lead else None
        try:
            report = self._load(path, strict=strict, leave_out=leave_out, cast=cast, may_be_old=may_be_old)
        except _MAY_COME_OF_REMOVAL as error:
            self._require_still_there(path, before, error)
            raise
        if any(component.status is Status.FAILED for component in report.components):
            self._require_still_there(path, before, None)
        self._tell(report)
        return report

    def _require_still_there(self, path: Place, before: tuple[object, ...] | None, cause: Exception | None) -> None:
        """Let the lead check that a checkpoint found damaged has not been removed meanwhile. Collective.

        Args:
            before: `identity_of` the checkpoint when the load began.

        Raises:
            CheckpointGoneError: it has been removed; on every rank.
        """
        with self.topology.operation(f"load of {path.name}"), self.topology.phase("look again") as phase:
            if self.topology.is_lead:
                phase.from_lead = before is not None and identity_of(path) != before
        if phase.from_lead:
            raise gone(path) from cause

    def _load(
        self, path: Place, *, strict: bool, leave_out: Collection[str], cast: Components, may_be_old: bool
    ) -> LoadReport:
        started = time.perf_counter()
        with self.topology.operation(f"load of {path.name}"), _forgetting_unless_loaded() as matches:
            asked = CountedRequests(path)
            source = self._open(path, may_be_old, share_checks=True)
            if STATE not in [component.key for component in self.components]:
                with self.topology.phase("components"):
                    source = by_component_of(source)
            load = replace(self, components=asked_for(self.components, source, leave_out))
            with self.topology.phase("check") as phase:
                load._match(source, strict, cast, phase, matches)
                phase.to_lead = {key: match.to_json() for key, match in matches.items()}
                phase.answer = lambda: load._settled(matches, phase.gathered, strict)
            reports, batches = strict_json.convert(phase.from_lead, tuple[dict[str, ComponentReport], dict[str, int]])
            with self.topology.phase("compare keys"):
                for key, report in reports.items():
                    if not goes_on(report) or report.changed:
                        matches[key].forget_prepared()
                others = passed_over(source, self.components, leave_out, strict=strict)
            load._gather_copies(source, matches, reports)
            read, needed, slowest = self._read(source, matches, reports, batches)
            load_s, requests = self._apply(matches, reports, started, asked)
            require_something(reports)
        return LoadReport(
            str(path),
            source.checkpoint_id,
            load_s,
            read,
            needed,
            source.config_text,
            slowest_rank=slowest,
            requests=requests,
            components=(*reports.values(), *others.values()),
            run_id=source.run_id,
            history=source.history,
            metrics=source.metrics,
            metadata=source.metadata,
        )

    def open(self, path: Place) -> CheckpointSource:
        """Open a checkpoint that is named by its path. Collective."""
        with self.topology.operation(f"open {path.name}"):
            source = self._open(path, may_be_old=True, share_checks=False)
            with self.topology.phase("indexes"):
                if isinstance(source, CommittedSource):
                    source.require_chunks()
            return source

    def _open(self, path: Place, may_be_old: bool, *, share_checks: bool) -> CheckpointSource:
        """Open the checkpoint: the lead reads and checks the manifest once, and all ranks parse the same bytes; or it finds old files.

        Args:
            share_checks: of the ranks of a host that read a block, one checks it. For a load, whose ranks find it in the page cache.
        """
        where = str(path / MANIFEST_NAME)
        manifest: CheckpointManifest | None = None
        ranks_here = self.topology.nodes[self.topology.node_rank]
        makes_table = isinstance(path, Path) and share_checks and self.verify and self.topology.rank == ranks_here[0] < ranks_here[-1]
        checked = CheckedBlocks.make() if makes_table else None
        with self.topology.phase("open") as phase:
            phase.payload = checked and checked.place
            if self.topology.is_lead:
                found = None if not may_be_old or has_manifest(path) else programs().found_at(path, allow_pickle=self.allow_pickle)
                if found:
                    phase.from_lead = {"other": found}
                else:
                    data = manifest_bytes_at(path) if may_be_old else read_manifest_bytes(path)
                    manifest = parse_manifest(data, where)
                    phase.from_lead = {"manifest": data.decode(), "config": ""}
                    if CONFIG_NAME in manifest.files:
                        with refusing(CONFIG_NAME):
                            config = read_listed_file(path, manifest, CONFIG_NAME, self._held(data))
                            phase.from_lead["config"] = config.decode()
        found = phase.from_lead
        if (other := found.get("other")) is not None:
            is_state_alone = [component.key for component in self.components] == [STATE]
            opening = Opening(self.strategy, self.device, self.allow_pickle, is_state_alone)
            return programs().opened(path, other, self.topology, opening)
        if checked is None and (place := phase.payloads[ranks_here[0]]) is not None:
            checked = CheckedBlocks.join(MemoryFile(*place))
        data = found["manifest"].encode()
        stored = StoredCheckpoint(path, manifest or parse_manifest(data, where), self._held(data), checked)
        return CommittedSource(stored, found["config"], self.topology, self.strategy, self.device, verify=self.verify)

    def _held(self, manifest: bytes) -> HeldFiles:
        """The files in memory of this host, of the checkpoint with this manifest."""
        return NOTHING_HELD if self.files_of is None else self.files_of(manifest, self.topology)

    def _match(
        self, source: CheckpointSource, strict: bool, cast: Components, phase: Phase, matches: dict[str, Match]
    ) -> None:
        """Compare every component with its saved state. Raises for a mismatch that stops the load; others are noted in the match."""
        optional = {component.key for component in self.components if not component.required}
        damaged = source.check(optional)
        for component in self.components:
            phase.component = component.key
            matches[component.key] = Match(component)  # so that the object is told if this load fails
            matches[component.key] = fit(
                source, component, strict=strict, cast=cast, damage=damaged.get(component.key)
            )
        phase.component = None

    def _settled(self, matches: Mapping[str, Match], of_ranks: Sequence[Mapping[str, Any]], strict: bool) -> Any:
        """Decide for every component, from the matches of all ranks, whether it is loaded. Lead rank only.

        Returns:
            as JSON, (component -> report, component -> the most batches that any rank converts).
        """
        reports = {
            component.key: settle(
                component, [of_rank[component.key] for of_rank in of_ranks], matches[component.key].saved_keys, strict=strict
            )
            for component in self.components
        }
        require_something(reports)
        batches = {key: max(of_rank[key].get("batches", 0) for of_rank in of_ranks) for key in matches}
        return msgspec.to_builtins((reports, batches))

    def _gather_copies(
        self, source: CheckpointSource, matches: dict[str, Match], reports: dict[str, ComponentReport]
    ) -> None:
        """Match components that are made from other ranks' copies with all of these; the lead reads their plain values."""
        changed = [component for component in self.components if reports[component.key].changed]
        if not changed:
            return
        with self.topology.phase("gather copies") as phase:
            if self.topology.is_lead:
                phase.from_lead = {component.key: _rows_of_copies(source, component, phase) for component in changed}
                phase.component = None
        for component in changed:
            key = component.key
            got = phase.from_lead[key]
            if isinstance(got, dict):
                reports[key] = report_of_trouble(key, 0, rebuild(got), self.topology.world_size)
                continue
            matches[key] = match_changed(component, copies_for_object(source, component, got))
            count = matches[key].restored * self.topology.world_size
            reports[key] = replace(reports[key], restored=count, wanted=count)

    def _read(
        self,
        source: CheckpointSource,
        matches: Mapping[str, Match],
        reports: dict[str, ComponentReport],
        batches: Mapping[str, int],
    ) -> tuple[int, int, int | None]:
        """Fill the tensors; return the bytes read and needed, by all ranks, and the rank that took longest to read.

        An optional component is read into new memory first, and so keeps its state if a part of it proves damaged.

        Args:
            batches: component -> the most batches that any rank converts.
        """
        going = [matches[key] for key, report in reports.items() if goes_on(report)]
        wait_for_all(request.out for match in going for request in match.requests)
        required = [request for match in going if match.component.required for request in match.requests]
        optional = [(match, beside_own_memory(match)) for match in going if not match.component.required]
        readings: deque[_Step] = deque()
        try:
            readings.append(_Step(source.prepare(required)))
            for match in going:
                converted = batches_of(match.casts) if match.component.required else []
                converted += [[] for _ in range(len(converted), batches[match.key])]
                for requests, convert in readings_of(converted):
                    readings.append(_Step(source.prepare(requests), convert))
            for match, requests in optional:
                readings.append(_Step(source.prepare(requests), key=match.key))
            with self.topology.phase("read") as phase:
                began = time.perf_counter()
                stats, failed = _run(readings)
                read, needed = sum(s.bytes_read for s in stats), sum(s.bytes_needed for s in stats)
                phase.merge = {
                    "bytes": total([read, needed]),
                    "failed": first(failed),
                    "slowest": slowest(time.perf_counter() - began, self.topology.rank),
                }
        finally:
            with ExitStack() as closing:  # all, also if one fails
                for step in readings:
                    closing.callback(step.reading.close)
        merged = phase.merged
        _note_failures(reports, merged["failed"], self.topology.world_size)
        for match, requests in optional:
            if goes_on(reports[match.key]):
                convert_into(match.outs, (request.out for request in requests))
        return *merged["bytes"], -merged["slowest"][1] if self.topology.world_size > 1 else None

    def _apply(
        self, matches: dict[str, Match], reports: dict[str, ComponentReport], started: float, asked: CountedRequests
    ) -> tuple[float, Counts]:
        """Give every object its state, random generators last; return the seconds of the slowest rank, and the requests of all ranks."""
        with self.topology.phase("apply") as phase:
            going = [match for key, match in matches.items() if goes_on(reports[key])]
            failed: dict[str, Any] = {}
            for match in sorted(going, key=_is_restored_last):
                phase.component = match.key
                try:
                    match.apply()
                except Exception as error:
                    if match.component.required:
                        raise
                    failed[match.key] = describe(error)
                else:
                    del matches[match.key]
            phase.component = None
            phase.merge = {
                "seconds": most(time.perf_counter() - started),
                "failed": first(failed),
                "requests": total(asked.made()),
            }
        _note_failures(reports, phase.merged["failed"], self.topology.world_size)
        return phase.merged["seconds"], all_of([phase.merged["requests"]])

    def _tell(self, report: LoadReport) -> None:
        """Log a line, by the lead, for each component that was not restored as it was saved."""
        if self.topology.is_lead:
            for component in report.components:
                if component.status is not Status.RESTORED:
                    _log.warning("component %s", component)
                elif component.changed:
                    _log.info("component %s", component)


def committed_newest_first(root: Place) -> list[Place]:
    """The committed checkpoints below a root, the newest commit first."""
    return [commit.path for commit in reversed(catalog_at(root).committed())]


@dataclass(frozen=True, slots=True)
class _Step:
    """A reading, and what follows it.

    Attributes:
        convert: called once it has run.
        key: the optional component that it fills; None: it fills required ones.
    """

    reading: Reading
    convert: Callable[[], None] | None = None
    key: str | None = None


def _run(readings: deque[_Step]) -> tuple[list[ReadStats], dict[str, Any]]:
    """Run all readings, also after one has failed, for other ranks may wait for this one in each; then raise the first error.

    Args:
        readings: those that have run are removed, and their memory is free for the next.

    Returns:
        stats of the readings, and the optional components that failed: key -> `describe` of the error.
    """
    stats: list[ReadStats] = []
    failed: dict[str, Any] = {}
    fatal: Exception | None = None
    while readings:
        step = readings.popleft()
        try:
            stats.append(step.reading.run())
            if step.convert is not None:
                step.convert()
        except RankAbsentError:
            for reading in readings:
                reading.reading.close()  # so ranks that wait for this one in a later reading learn of it now
            raise
        except Exception as error:
            if step.key is not None and isinstance(error, (CorruptCheckpointError, OSError)):
                failed[step.key] = describe(error)
            else:
                fatal = fatal or error
    if fatal is not None:
        raise fatal
    return stats, failed


@contextmanager
def _forgetting_unless_loaded() -> Iterator[dict[str, Match]]:
    """Tell the objects whose matches are still in the dictionary at the end to forget what they prepared."""
    matches: dict[str, Match] = {}
    try:
        yield matches
    finally:
        for match in matches.values():
            match.forget_prepared()


def _rows_of_copies(source: CheckpointSource, component: StateComponent, phase: Phase) -> list[Rows] | dict[str, Any]:
    """The plain values of the copies for one object, or `describe` of the damage of an optional component."""
    phase.component = component.key
    try:
        return rows_for_object(source, component)
    except CorruptCheckpointError as error:
        if component.required:
            raise
        return describe(error)


def _note_failures(
    reports: dict[str, ComponentReport], failed: Mapping[str, tuple[int, Mapping[str, Any]]], world_size: int
) -> None:
    """Report an optional component as failed if it failed on any rank, with the reason of the lowest one."""
    for key, (rank, description) in failed.items():
        reports[key] = replace(
            reports[key],
            status=Status.FAILED,
            reason=f"{CheckpointError(description['message'])}" + (f" (rank {rank})" if world_size > 1 else ""),
            restored=0,
        )
