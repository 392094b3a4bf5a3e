"""Ranks, nodes, named process groups, and phases, by which all ranks succeed or all fail.

A phase is a block that all ranks enter, in the same order. Leaving it is an agreement (agreement.py): if one rank raised in it, or is
gone, all ranks raise the same error.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError, describe, rebuild
from ckpt.ranks.agreeing import Agreeing
from ckpt.ranks.agreement import Answer, PhaseIndex, PhaseOutcome, Result, conclude, concluded, payloads_by_rank
from ckpt.ranks.heartbeat import STORE_IS_GONE, Heartbeat, Watch
from ckpt.ranks.mail import Mail
from ckpt.ranks.meeting import meet
from ckpt.ranks.merging import Merged, ended, merged
from ckpt.ranks.sigterm import Termination
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError


@dataclass(frozen=True)
class Group:
    """A named process group, as this rank sees it.

    Attributes:
        members: global ranks of this rank's instance.
        instance: index of that instance in `instances`.
        instances: all instances, sorted; equal on all ranks.
    """

    name: str
    members: tuple[int, ...]
    instance: int
    instances: tuple[tuple[int, ...], ...]

    @classmethod
    def among(cls, name: str, instances: Sequence[Sequence[int]], rank: int) -> Group:
        """Return the group as a rank sees it that is in one of its instances."""
        all_of_it = tuple(tuple(members) for members in instances)
        number = next(number for number, members in enumerate(all_of_it) if rank in members)
        return cls(name, all_of_it[number], number, all_of_it)


@dataclass
class Phase:
    """One phase, as the code inside the block uses it. What a rank says there, as JSON, names those who need it.

    What each rank sends costs N times its size, if the lead needs it or the values are merged. Payloads for all ranks cost N times as much
    again, but for those that are equal, which the lead passes on once: they are for what all ranks need of each.

    Attributes:
        component: the component at hand, for the error.
        stands: a fact that holds even if another rank fails the phase, such as "checkpoint-00000020 is committed", for the error.
        to_lead: for the lead; set inside the block.
        gathered: on the lead, after the block and in `answer`: `to_lead` by rank.
        from_lead: of the lead: set inside the block, and after it the same on all ranks. What others set does not count.
        answer: called on the lead at the end of the phase, if no rank has failed; returns `from_lead`, or raises for all ranks.
        merge: name -> a value wrapped by a function of `merging`; set inside the block.
        merged: name -> the merged value; after the block on all ranks, but only on the lead, and in `answer`, if there is one.
        payload: for all ranks; set inside the block.
        payloads: by rank; set after the block. Do not change them: equal ones are one object.
    """

    name: str
    component: str | None = None
    stands: str | None = None
    to_lead: Any = None
    gathered: list[Any] = field(default_factory=list)
    from_lead: Any = None
    answer: Callable[[], Any] | None = None
    merge: dict[str, Merged] = field(default_factory=dict)
    merged: dict[str, Any] = field(default_factory=dict)
    payload: Any = None
    payloads: list[Any] = field(default_factory=list)

    def verdict(self, what: str | None) -> PhaseOutcome:
        """Return this rank's verdict: success, with what it says."""
        payload, to_lead, merge = map(_encoded, (self.payload, self.to_lead, self.merge or None))
        return PhaseOutcome(what, self.name, None, payload, to_lead, merge, self.stands)

    def conclude(self, verdicts: Mapping[int, PhaseOutcome]) -> Answer:
        """Return the lead's answer. Lead rank only."""
        by_rank = [verdicts[rank] for rank in range(len(verdicts))]
        if any(verdict.to_lead for verdict in by_rank):
            self.gathered = [_decoded(verdict.to_lead) for verdict in by_rank]
        else:
            self.gathered = [None] * len(by_rank)
        saying: dict[bytes, list[int]] = {}
        for rank, verdict in enumerate(by_rank):
            if verdict.merge:
                saying.setdefault(verdict.merge, []).append(rank)
        parts = merged((_decoded(payload), ranks[0], len(ranks)) for payload, ranks in saying.items())
        self.merged = ended(parts)
        if self.answer is None:
            return Answer(_encoded(self.from_lead), _encoded(parts or None))
        self.from_lead = self.answer()
        return Answer(_encoded(self.from_lead))

    def take(self, result: Result, world_size: int, *, is_lead: bool) -> None:
        """Set what is known after the block."""
        self.payloads = payloads_by_rank(result.payloads, world_size)
        self.from_lead = _decoded(result.answer.from_lead)
        if not is_lead:
            self.merged = ended(_decoded(result.answer.merged) or {})


def _encoded(value: Any) -> bytes:
    return b"" if value is None else json.dumps(value, separators=(",", ":")).encode()


def _decoded(data: bytes) -> Any:
    return json.loads(data) if data else None


class Topology:
    """The ranks of a job, their hosts and process groups, and the agreement of all ranks.

    One thread of a rank, always the same, makes the collective calls; `progress` may come from any.

        outside <--operation--> between phases <--phase--> in a phase
                                      |                        |
                                      +-------> failed <-------+

    - outside: a phase that begins here is an operation by itself.
    - between phases: an error of this rank fails the phase that the other ranks are in, or the next one. SIGTERM is put off.
    - in a phase: leaving the block waits for the verdicts of all ranks, except those found absent.
    - failed: all ranks raise one error, which leaves the operation without another agreement.

    Attributes:
        nodes: global ranks per host, ordered by lowest rank.
        node_rank: number of this rank's host in `nodes`.
        groups: the process groups given to `name_groups`.
        timeout_s: a rank that does not move for this long is absent.
        grace_s: longest deferral of a SIGTERM inside an operation.
        on_progress: called at each move of this rank with the bytes that have moved, or 1; from any thread. May be set at any time.
    """

    def __init__(self, rank: int, hosts: Sequence[str], *, timeout_s: float, grace_s: float) -> None:
        """Use `alone` or `join`."""
        self.rank = rank
        self.world_size = len(hosts)
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.groups: Mapping[str, Group] = {}
        self._place_on(hosts, None)
        self._agreement: Agreeing | None = None
        self._termination = Termination(grace_s)
        self._at = PhaseIndex(0, -1)
        self._whats: list[str] = []
        self._shared_error: BaseException | None = None  # the error of state failed, which the other ranks know
        self._in_phase = False
        self.on_progress: Callable[[int], None] | None = None
        self._host: str | None = None
        self._num_branches = 0

    @property
    def is_lead(self) -> bool:
        """Whether this rank decides and publishes."""
        return self.rank == 0

    @classmethod
    def alone(cls, progress: Callable[[int], None] | None = None) -> Topology:
        """Return the topology of one rank: the same calls, without store, threads or other processes.

        Args:
            progress: called at each move, such as `progress` of the job of which this rank is the lead.
        """
        topology = cls(0, [socket.gethostname()], timeout_s=300.0, grace_s=20.0)
        topology.on_progress = progress
        return topology

    @classmethod
    def supposed(cls, rank: int, hosts: Sequence[str], groups: Mapping[str, Iterable[Sequence[int]]]) -> Topology:
        """Return one rank's topology of a hypothetical run, for plans and forecasts. It has no phases.

        Args:
            hosts: of every rank, in order.
            groups: name -> all instances.

        Raises:
            ConfigurationError: a rank is in no instance of a group.
        """
        topology = cls(rank, hosts, timeout_s=300.0, grace_s=20.0)
        for name, instances in groups.items():
            of_rank = {member: members for members in instances for member in members}
            given = [of_rank.get(rank) for rank in range(len(hosts))]
            topology.groups = {**topology.groups, name: group_of(name, given, rank)}
        return topology

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        world_size: int,
        *,
        local_rank: int | None = None,
        host: str | None = None,
        timeout_s: float = 300.0,
        grace_s: float = 20.0,
    ) -> Topology:
        """Join the job's other ranks. All ranks call it, with a store (or a prefix of one) that only this job uses.

        Ranks that a launcher has restarted may find there what their earlier processes wrote, also if these were more or fewer: the
        ranks first meet (meeting.py), and use a part of the store that no earlier process can have used. Two joins over one store,
        one after the other, do not meet each other for the same reason.

        Where torch.distributed is initialized, `topology=None` of a coordinator does so through the store of the default process group.

        Args:
            store: such as `torch.distributed.TCPStore(host, port, world_size, is_master=rank == 0)`.
            local_rank: number on this host; None: the position among the host's ranks.
            host: name of this host; None: its own. Ranks that give equal names share a node.

        Raises:
            RankAbsentError: a rank did not join within `timeout_s`; on all ranks.
        """
        host = host or socket.gethostname()
        try:
            client = StoreClient(store, writer=rank, timeout_s=timeout_s)
            # Over a connection, and not the given store itself: the server that this may hold ends when its program lets it go.
            life = meet(client, rank, world_size, host=host, timeout_s=timeout_s)
            own = client.part(life.name)
            mail = Mail(own, rank, life.hosts, life.name, timeout_s)
        except StoreGoneError as error:
            raise _store_gone(None, rank, error) from error
        topology = cls(rank, [host] * world_size, timeout_s=timeout_s, grace_s=grace_s)
        topology._meet_in(own, mail, "", range(world_size), host, local_rank)
        return topology

    def _meet_in(
        self, client: StoreClient, mail: Mail, channel: str, members: Sequence[int], host: str, local_rank: int | None
    ) -> None:
        """Meet the other ranks in a part of the store that nobody else has used.

        Args:
            channel: of the mail, for these ranks.
            members: ranks of the job.
        """
        interval_s = min(1.0, self.timeout_s / 4)
        heartbeat = Heartbeat(client, self.rank, host=host, interval_s=interval_s, mail=mail, num_ranks=self.world_size)
        self._host = host
        self._agreement = Agreeing(
            client,
            heartbeat,
            self.rank,
            self.timeout_s,
            mail=mail,
            channel=channel,
            members=members,
            hinted=lambda: self._termination.asked,
        )
        try:
            with self._store_reached():
                heartbeat.start()
            with self.phase("join") as phase:
                phase.to_lead = host
                # Runs of equal names are far shorter where ranks are numbered host by host.
                phase.answer = lambda: [(name, len([*run])) for name, run in groupby(phase.gathered)]
            self._place_on([name for name, count in phase.from_lead for _ in range(count)], local_rank)
        except BaseException:
            self.close()
            raise

    def name_branch(self) -> str:
        """Return a unique name for `branch`. All ranks call it in one order, in the thread that makes the collective calls."""
        self._num_branches += 1
        return f"branch {self._num_branches}"

    def branch(self, name: str) -> Topology:
        """Join the same ranks again, for agreements of another thread beside this one. Collective among these threads.

        Progress of the branch counts here, too; the branch has the groups of this moment. Close the branch first.

        Args:
            name: equal on all ranks, used once.

        Raises:
            RankAbsentError: a rank did not join within `timeout_s`.
        """
        topology = self._joined_anew(name, range(self.world_size))
        topology.groups = self.groups
        return topology

    def part(self, name: str, ranks: Sequence[int]) -> Topology:
        """Join some of the ranks, numbered from 0 in this order. These ranks call it. Close it first.

        Args:
            name: equal on these ranks, used once.

        Raises:
            RankAbsentError: one of them did not join within `timeout_s`.
        """
        return Topology.alone(self.progress) if len(ranks) == 1 else self._joined_anew(name, ranks)

    def _joined_anew(self, name: str, ranks: Sequence[int]) -> Topology:
        """Join these ranks in a part of the store; progress there counts here, too."""
        mine = self._agreement
        if mine is None or self._host is None:
            return Topology.alone(self.progress)
        own, members = list(ranks).index(self.rank), [mine.members[rank] for rank in ranks]
        topology = Topology(own, [self._host] * len(members), timeout_s=self.timeout_s, grace_s=self.grace_s)
        client, channel = mine.client.part(name), f"{mine.channel}/{name}"
        topology._meet_in(client, mine.mail, channel, members, self._host, self.local_rank)
        topology.on_progress = self.progress
        return topology

    def store_for(self, name: str) -> Store | None:
        """Return a part of the job's store for other uses of the same ranks; None: a rank that is alone has none.

        Args:
            name: equal on all ranks, and unique.
        """
        return None if self._agreement is None else PrefixStore(name, self._agreement.client.connection)

    def watch(self, tell: Callable[[str], None]) -> None:
        """From now on call `tell`, once and in another thread, if the next rank or the store is silent for longer than `timeout_s`.

        For programs that call collectives of their own, which a rank that hangs would stop without a word: each rank watches another
        one, also outside of phases. `tell` may end the process.
        """
        if self._agreement is not None and self.world_size > 1:
            self._agreement.heartbeat.watch = Watch((self.rank + 1) % self.world_size, self.timeout_s, tell)

    def expect_absence(self) -> None:
        """Assume that a launcher ends all ranks because one is gone: a shorter silence counts as absence."""
        self._termination.asked = True

    def close(self) -> None:
        """Leave the job: stop the heartbeat. Not collective; ranks that wait for this one find that it has left."""
        if self._agreement is not None:
            self._agreement.close()

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def progress(self, num: int = 1) -> None:
        """Count progress of this rank. Any thread, any time; costs nothing."""
        if self._agreement is not None:
            self._agreement.heartbeat.move(num)
        if (tell := self.on_progress) is not None:  # read once: another thread may set it
            tell(num)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Count progress of this rank every second of the block, whose code is another program's and tells none."""
        ended = threading.Event()

        def move() -> None:
            while not ended.wait(1.0):
                self.progress()

        thread = threading.Thread(target=move, name="moving", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def require_awaited(self) -> None:
        """Check that the others still wait for this rank. Called before an irreversible step.

        A rank that stood still for long may go on after the others have timed it out and reported that the save has failed.

        Raises:
            RankAbsentError: they have ended the phase without it.
        """
        if self._is_given_up():
            where = self._what or "this phase"
            raise RankAbsentError(
                f"rank {self.rank} went on with {where} after the others had timed it out (timeout_s={self.timeout_s:g})"
            )

    def given_up_for(self) -> CheckpointError | None:
        """Return the error that the others have agreed on without this rank, in its phase or the next one; None: there is none.

        Any thread; called by another one than that which is late, and may never come.
        """
        if self._agreement is None:
            return None
        at = self._agreement.heartbeat.at
        try:
            for index in (at, PhaseIndex(at.operation, at.phase + 1)):
                result = self._agreement.settled_without_us(index)
                if result is not None and result.error is not None:
                    return rebuild(result.error)
        except StoreGoneError as error:
            return _store_gone(self._what, self.rank, error)
        return None

    def has_raised(self, ranks: Collection[int]) -> int | None:
        """Return the first of these ranks that has raised in the phase that this one is in; None: none has yet.

        For waits inside a phase for data of such a rank. Each call is several store requests.
        """
        return None if self._agreement is None else self._agreement.has_raised(self._at, ranks)

    def why_absent(self, ranks: Collection[int], phase: str) -> str | None:
        """Return why the first absent one of these ranks will not reach the end of this phase; None: none is absent.

        For waits inside a phase for data of such a rank. Patience counts from the first call, also at the end of the phase.
        """
        if self._agreement is None:
            return None
        try:
            gone = self._agreement.absent(self._at, self._what, phase, ranks)
        except StoreGoneError as error:
            return str(_store_gone(None, self.rank, error))
        return None if gone is None else gone.cause

    @contextmanager
    def operation(self, what: str) -> Iterator[None]:
        """Name the operation of the phases inside, such as "save of checkpoint-00000020". All ranks enter it.

        An exception between two phases is agreed on like one inside a phase. SIGTERM is put off until the end, at most `grace_s`, so
        that this rank can report why the job died. Operations nest: errors name the innermost.
        """
        outermost = not self._whats
        self._whats.append(what)
        try:
            with self._termination.put_off(self._is_given_up) if outermost and self._agreement else nullcontext():
                try:
                    if outermost:
                        self._begin()
                    yield
                except Exception as error:
                    if error is self._shared_error:
                        raise
                    self._agree(None, error)  # raises
                except BaseException as interrupt:
                    if interrupt is not self._shared_error:
                        self._withdraw(None, interrupt)
                    raise
                finally:
                    self._whats.pop()
                    if outermost:
                        self._end()
        finally:
            if outermost:
                self._shared_error = None

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Enter a phase; all ranks enter the same ones in the same order. Leaving the block is the agreement.

        If a rank raised in the block, or is gone, all ranks raise the same error: class and message are equal, `rank`, `phase` and
        `component` say where, and on the rank that raised, the cause is `__cause__`. All ranks wait until no rank is inside any more.
        KeyboardInterrupt and SystemExit fail the phase for the others and propagate here. Phases do not nest.
        """
        assert not self._in_phase, f"phase {name} begins inside another one"
        try:
            self._enter(name)
            phase = Phase(name)
            try:
                self._in_phase = True
                yield phase
                verdict = phase.verdict(self._what)
            except Exception as error:
                self._agree(phase, error)  # raises
            except BaseException as interrupt:
                self._withdraw(phase, interrupt)
                raise
            else:
                self._agree(phase, None, verdict)
            finally:
                self._in_phase = False
        finally:
            if not self._whats:  # a phase outside of any operation is one by itself
                self._end()

    def exchange(self, name: str, outgoing: Mapping[int, bytes], sources: Collection[int]) -> dict[int, bytes]:
        """Send `outgoing[r]` to rank r, and return what each rank of `sources` sent here. All ranks call it.

        It is a phase, and fails like one. Meant for little data, such as partial chunks: all bytes pass through the job's store.

        Raises:
            CheckpointError: a rank expects bytes that no rank sends, or the reverse; on all ranks.
        """
        at = self._next_at()
        keys = {to: f"exchange/{at}/{self.rank}-{to}" for to in outgoing if to != self.rank}
        try:
            with self.phase(name) as phase:
                phase.to_lead = [sorted(outgoing), sorted(sources)]
                phase.answer = lambda: _require_well_addressed(phase)
                for to, key in keys.items():
                    self._client.put(key, outgoing[to], compress=False)
        except CheckpointError:
            with suppress(StoreGoneError):  # and the data with it
                for key in keys.values():
                    self._client.delete(key)
            raise
        others = set(sources) - {self.rank}
        got = {source: self._fetch(f"exchange/{at}/{source}-{self.rank}") for source in sorted(others)}
        return {**got, self.rank: outgoing[self.rank]} if self.rank in outgoing else got

    def name_groups(self, process_groups: Mapping[str, dist.ProcessGroup | Sequence[int]]) -> None:
        """Register process groups by name. Each rank gives, for each name, the instance that it is a member of.

        Raises:
            ConfigurationError: a rank is in no instance of a group, or in one it does not name, or a name cannot name a folder; on
                all ranks.
        """
        with self.phase("name the process groups") as phase:
            mine = {name: _members(group) for name, group in process_groups.items()}
            phase.to_lead = mine
            phase.answer = lambda: _instances(phase.gathered)
            for name, members in mine.items():
                if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                    raise ConfigurationError(
                        f"process group {name!r}: a name may hold letters, digits, '_' and '-' only, for its instances are folders"
                    )
                if self.rank not in members:
                    raise ConfigurationError(
                        f"process group {name}: rank {self.rank} gives {members}, an "
                        "instance without itself; give each rank the instance that it is a member of"
                    )
        groups = {name: Group.among(name, instances, self.rank) for name, instances in phase.from_lead.items()}
        self.groups = {**self.groups, **groups}

    def _place_on(self, hosts: Sequence[str], local_rank: int | None) -> None:
        """Set nodes and local rank, given the host of each rank."""
        by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            by_host.setdefault(host, []).append(rank)
        self.nodes = tuple(tuple(ranks) for ranks in by_host.values())
        self.node_rank = list(by_host).index(hosts[self.rank])
        neighbours = self.nodes[self.node_rank]
        self.local_rank = neighbours.index(self.rank) if local_rank is None else local_rank

    # The agreement

    def _is_given_up(self) -> bool:
        return self._agreement is not None and self._agreement.is_given_up()

    def _begin(self) -> None:
        """Begin the next operation; skip those that the others ended without this rank: they are calls that it never made."""
        if self._agreement is None:
            return
        with self._store_reached():
            while (missed := self._agreement.settled_without_us(PhaseIndex(self._at.operation, 0))) is not None:
                if missed.what == self._what:
                    break
                self._at = PhaseIndex(self._at.operation + 1, -1)
            self._agreement.heartbeat.enter(self._at, self._what, None)

    def _end(self) -> None:
        self._at = PhaseIndex(self._at.operation + 1, -1)
        if self._agreement is not None:
            with suppress(StoreGoneError):  # raised by the phase that failed, or by the next one
                self._agreement.heartbeat.enter(self._at, None, None)

    @property
    def _client(self) -> StoreClient:
        assert self._agreement is not None, "a rank that is alone sends nothing"
        return self._agreement.client

    def _fetch(self, key: str) -> bytes:
        """Read and delete data that the agreement has announced; it has one reader."""
        with self._store_reached():
            found = self._client.take([key])
            self._client.delete(key)
        assert found is not None, f"{key} was announced and is read once"
        return found[0]

    @property
    def _what(self) -> str | None:
        return self._whats[-1] if self._whats else None

    def _next_at(self) -> PhaseIndex:
        return PhaseIndex(self._at.operation, self._at.phase + 1)

    def _enter(self, name: str | None) -> None:
        self._at = self._next_at()
        if self._agreement is None:
            assert self.world_size == 1, "the ranks of a run that is only supposed agree on nothing"
            return
        with self._store_reached():
            self._agreement.heartbeat.enter(self._at, self._what, name)

    @contextmanager
    def _store_reached(self) -> Iterator[None]:
        """Raise without an agreement if the store is gone."""
        try:
            yield
        except StoreGoneError as error:
            self._shared_error = _store_gone(self._what, self.rank, error)
            raise self._shared_error from error

    def _agree(self, phase: Phase | None, error: Exception | None, verdict: PhaseOutcome | None = None) -> None:
        """End a phase (None: fail between two) by an agreement; raise the common error, or complete the phase.

        Args:
            error: of this rank; None: `verdict` is its success.
        """
        if phase is None:
            self._enter(None)
        verdict = verdict or _failure(self._what, phase, _described(error, phase))
        cause = error

        def answer(verdicts: Mapping[int, PhaseOutcome]) -> Answer:
            nonlocal cause
            assert phase is not None, "only a failure comes between two phases"
            try:
                return phase.conclude(verdicts)
            except Exception as failure:
                cause = failure
                raise

        try:
            if self._agreement is not None:
                result = self._agreement.reach(self._at, verdict, answer)
            else:
                failure = conclude({0: verdict}, {}, 1)
                result = Result(verdict.what, failure) if failure else concluded({0: verdict}, answer)
        except StoreGoneError as gone:
            self._shared_error = _store_gone(self._what, self.rank, gone)
            raise self._shared_error from (error or gone)
        if result.error is not None:
            self._shared_error = rebuild(result.error)
            raise self._shared_error from cause
        if phase is not None:
            phase.take(result, self.world_size, is_lead=self.is_lead)

    def _withdraw(self, phase: Phase | None, interrupt: BaseException) -> None:
        if self._agreement is None:
            return
        with suppress(StoreGoneError, CheckpointError):  # no rank reads it any more, and the interrupt propagates
            if phase is None:
                self._enter(None)
            self._agreement.withdraw(self._at, _failure(self._what, phase), interrupt)
            self._shared_error = interrupt


def _failure(what: str | None, phase: Phase | None, error: dict[str, Any] | None = None) -> PhaseOutcome:
    """Return the verdict of a rank that fails, in a phase or between two."""
    name, stands = (None, None) if phase is None else (phase.name, phase.stands)
    return PhaseOutcome(what, name, error, stands=stands)


def _described(error: Exception | None, phase: Phase | None) -> dict[str, Any] | None:
    """Describe an error for the other ranks, with the component at the beginning of the message."""
    if error is None:
        return None
    described = describe(error)
    component = (phase.component if phase else None) or described["component"]
    if component is not None and described["phase"] is None:
        described["component"] = component
        if not described["message"].startswith((f"{component}:", f"{component}.", f"component {component}")):
            described["message"] = f"{component}: {described['message']}"
    return described


def _store_gone(what: str | None, rank: int, error: StoreGoneError) -> RankAbsentError:
    """Return the error of a rank that finds the store gone."""
    if error.is_silent:
        start = f"{what} failed on rank {rank}: " if what else f"rank {rank}: "
        return RankAbsentError(f"{start}{error}; the process that holds it hangs, or cannot be reached any more")
    start = f"{what} failed: " if what else ""
    return RankAbsentError(start + STORE_IS_GONE)


def _require_well_addressed(phase: Phase) -> None:
    """Raise if a rank sends data that another does not expect, or the reverse; given (to, from) of each rank."""
    sent = {(rank, to) for rank, (tos, _) in enumerate(phase.gathered) for to in tos}
    expected = {(source, rank) for rank, (_, sources) in enumerate(phase.gathered) for source in sources}
    for source, to in sorted(expected - sent):
        raise CheckpointError(f"in phase {phase.name} rank {to} waits for bytes from rank {source}, which sends it none")
    for source, to in sorted(sent - expected):
        raise CheckpointError(f"in phase {phase.name} rank {source} sends bytes to rank {to}, which expects none")


def _members(group: dist.ProcessGroup | Sequence[int]) -> list[int]:
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else list(group)


def group_of(name: str, given: Sequence[Sequence[int] | None], rank: int) -> Group:
    """Return the group, given each rank's instance.

    Raises: as `instances_of`.
    """
    return Group.among(name, instances_of(name, given), rank)


def instances_of(name: str, given: Sequence[Sequence[int] | None]) -> list[tuple[int, ...]]:
    """Return all instances of a group, sorted, given each rank's.

    Raises:
        ConfigurationError: a rank is in no instance, or two instances overlap.
    """
    for at, members in enumerate(given):
        if members is None:
            raise ConfigurationError(
                f"process group {name}: rank {at} is in no instance of it; every rank must be in one, if need be alone"
            )
        for member in members:
            if not 0 <= member < len(given) or given[member] != members:
                other = given[member] if 0 <= member < len(given) else "no such rank"
                raise ConfigurationError(
                    f"process group {name}: rank {at} gives the instance {list(members)}, and rank {member} gives "
                    f"{other}; all members of an instance must give it alike"
                )
    return sorted({tuple(members) for members in given if members is not None})


def _instances(given: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[tuple[int, ...]]]:
    """Return the instances of each group, given those that each rank names."""
    names = sorted({name for groups in given for name in groups})
    return {name: instances_of(name, [groups.get(name) for groups in given]) for name in names}


