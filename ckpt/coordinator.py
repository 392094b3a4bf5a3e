"""The one object that saves and loads a training run: a table of contents of the steps in saver.py and loader.py."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckpt.backends.base import Backend
from ckpt.catalog.incremental import linked_with
from ckpt.catalog.ledger import Ledger, newer_than
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointGoneError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
)
from ckpt.loading.loader import Loader, committed_newest_first
from ckpt.loading.report import LoadReport, Status
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import Device
from ckpt.ranks.sigterm import sigterm_noted
from ckpt.ranks.topology import Topology
from ckpt.saving.arguments import (
    as_backend,
    as_checkpoint_id,
    as_components,
    as_device,
    as_folder,
    as_groups,
    as_saves,
    as_strategy,
    as_topology,
    check_count,
    check_flags,
    check_keep_last,
    check_seconds,
    check_text,
)
from ckpt.saving.background.background import Background
from ckpt.saving.checkpoint_root import KnownRoots, SaveReport, SaveTarget
from ckpt.saving.host_cache import host_cache_of
from ckpt.saving.publishing import Publisher, WeightSender
from ckpt.saving.save_settings import SaveSettings
from ckpt.saving.saver import SavedRun, Saver
from ckpt.saving.writing import PACKED_BYTES
from ckpt.state.doctor import Diagnosis
from ckpt.state.overlap import Optimizers
from ckpt.state.provider import Provider, components_of, groups_of
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import as_stateful

_MOST_GONE = 100  # checkpoints that may be removed under one load, which is too slow for the run that saves them then
IN_THE_FOREGROUND = SaveSettings()

_log = logging.getLogger("ckpt")


class CheckpointCoordinator:
    """Saves and loads state components over all ranks, or on none.

    Every method is called by all ranks in the same order; an error of one rank is raised by all of them. With `saves.mode` "async" a
    save goes on after its call has returned, and what becomes of it is told by a later call. Then the coordinator is closed at the end, or
    used as a context manager, which waits for what is under way.

    Args:
        state_components: what a checkpoint holds. Bare modules and optimizers are wrapped.
        process_groups: name -> torch process group, or the global ranks of this rank's instance of it; None: there are none.
        topology: ranks, nodes and the agreement between them. None: the ranks of torch's default process group, or this process alone
            where torch.distributed is not initialized.
        output_dir: the checkpoint root; made when the first save needs it.
        backend: writes the storage format; or "zarr", "tensorstore" or "kimi-engine" for one with its defaults.
        strategy: spreads a load over ranks; or "direct" or "two-stage".
        device: where the tensors live; or its type, such as "cpu".
        keep_last: how many checkpoints of this run stay in the root after a save; None keeps all. Those of a run that it was resumed
            from, by loading a checkpoint of the same root, are its own; those of others stay, and do not count.
        verify: check every byte that a load reads.
        config_text: stored as config.yaml in each checkpoint; its hash goes into the manifest.
        overwrite: checkpoints that lie in the root already, of whatever run, are removed once the first new one is committed. After a
            load of one of them, by its path, only the newer ones go, at once: they are renamed `.abandoned-<id>-<nonce>`.
        shared_root: several runs may save into the root at a time. Otherwise the first save claims it, until the coordinator is closed
            or its process ends, and another run's save is refused.
        allow_pickle: a checkpoint without a manifest, named by its path, is read from its pickled files (ckpt/loading/legacy.py): tensors
            and plain values, and nothing else.
        pattern_check: what the first save of several ranks does about a sharing pattern that is not the true one, as far as one hash
            over all state can tell: "warn" refuses one that would lose state and tells of one that is wasteful or suspicious,
            "error" refuses these, too, and "off" does not look.
        packed_mib: the longest array that small tensors are packed in, in MiB: the memory that packing them takes.
        stale_s: silence after which another run's unfinished save counts as abandoned, in seconds.
        saves: whether training waits for saves, and what may go on beside it.

    Attributes:
        config_text: as given; what is set here goes into the next checkpoint. Equal on all ranks.
        last_save: what the newest save did that is known to be committed.
        reports: of all saves that are known to be committed, in order.
        last_load: what the newest load did.

    Raises:
        ConfigurationError: an argument is of a wrong type or value, two components share a key, one names a group that does not
            exist, or `output_dir` is the address of an object store.
    """

    def __init__(
        self,
        state_components: Iterable[StateComponent],
        process_groups: Mapping[str, Any] | None,
        topology: Topology | None,
        output_dir: str | Path,
        *,
        backend: Backend | str,
        strategy: LoadingStrategy | str,
        device: Device | str,
        keep_last: int | None = None,
        verify: bool = True,
        config_text: str | None = None,
        overwrite: bool = False,
        shared_root: bool = False,
        stale_s: float = 60.0,
        allow_pickle: bool = False,
        pattern_check: str = "warn",
        packed_mib: int = PACKED_BYTES >> 20,
        saves: SaveSettings = IN_THE_FOREGROUND,
    ) -> None:
        self.output_dir = as_folder("output_dir", output_dir)
        components = [dataclasses.replace(c, stateful=as_stateful(c.stateful)) for c in as_components(state_components)]
        _require_distinct(components)
        process_groups, saves = as_groups(process_groups), as_saves(saves)
        backend, strategy, device = as_backend(backend), as_strategy(strategy), as_device(device)
        check_keep_last(keep_last)
        check_count("packed_mib", packed_mib, unit=" MiB")
        check_seconds("stale_s", stale_s)
        check_text("config_text", config_text)
        check_flags(verify=verify, overwrite=overwrite, shared_root=shared_root, allow_pickle=allow_pickle)
        topology = as_topology(topology)
        if process_groups:
            topology.name_groups(process_groups)
        _require_groups(components, topology)
        run = SavedRun(components, topology, backend, device)

        self.config_text = config_text
        self.last_save: SaveReport | None = None
        self.reports: list[SaveReport] = []
        self.last_load: LoadReport | None = None

        # What this run knows of the checkpoints in output_dir, and may do to them.
        self._run_ids: tuple[str | None, ...] = (secrets.token_hex(8),)
        self._keep_last = keep_last
        self._overwrite = overwrite
        self._left_behind: list[str] = []  # newer than what was loaded, and of a history that does not go on
        self._refused: dict[Path, str] = {}
        self._condemned: dict[Path, str] = {}

        self._topology = topology
        self._saves = saves
        self._background = Background(run, saves) if saves.is_async else None
        self._keeper = host_cache_of(backend, saves)
        self._roots = KnownRoots(
            self.output_dir,
            run_id=f"{self.output_dir.absolute()}" + (f", of {self._run_ids[0]}" if shared_root else ""),
            stale_s=stale_s,
            shared_root=shared_root,
            min_live=saves.incremental_min_live if saves.incremental else None,
            delete=self._background.delete if self._background is not None else None,
            keeper=self._keeper,
        )
        self._saver = Saver(run, self._roots, pattern_check=pattern_check, packed_bytes=packed_mib << 20)

        self._strategy = strategy
        self._strategy.bind(backend)
        self._loader = Loader(
            components,
            topology,
            strategy,
            device,
            verify=verify,
            allow_pickle=allow_pickle,
            files_of=self._keeper.files_of if self._keeper is not None else None,
        )

        self._publisher: Publisher | None = None
        if self._keeper is not None:
            patterns = {component.key: component.pattern for component in components}
            settled = self._background.wait_until_over if self._background is not None else lambda: None
            self._publisher = Publisher(topology, self._keeper, patterns, settled)

        # Last: an error before leaves no hooks behind.
        self._optimizers = Optimizers(components if saves.overlap else ())
        if self._background is not None:
            self._optimizers.before_steps(self._background.wait_for_snapshots)

    @classmethod
    def for_provider(
        cls,
        provider: Provider,
        topology: Topology,
        output_dir: str | Path,
        *,
        legacy_pattern: str = "replicated",
        **options: Any,
    ) -> CheckpointCoordinator:
        """Make a coordinator of what a trainer says of itself: its components and process groups (ckpt/state/provider.py).

        Args:
            legacy_pattern: sharing pattern of the objects of a trainer that names none.
            options: `backend`, `strategy`, `device` and the rest.
        """
        components = components_of(provider, legacy_pattern=legacy_pattern)
        return cls(components, groups_of(provider), topology, output_dir, **options)

    def save_checkpoint(
        self, checkpoint_path: str | Path | None = None, checkpoint_id: str | int | None = None, validate: bool = False
    ) -> str | None:
        """Save all components and return the path of the checkpoint.

        The checkpoint is `<output_dir>/checkpoint-<checkpoint_id>`; an existing one of that name is replaced at the moment of the
        commit. Until then, and if anything fails on any rank, the newest checkpoint is the one before.

        With `saves.mode` "async" it is committed some time after this returns, and holds the state at the call. What is copied beside
        training (`saves.overlap`) must not be written to before the next step of its optimizer, or `wait_for_snapshot`.

        Args:
            checkpoint_path: the folder to save to, instead of a name in output_dir; its last part is `checkpoint-<id>`.
            checkpoint_id: default: the time of day, UTC, as the lead reads it. A number is taken for the step; 5 is "00000005".
            validate: compare all copies that should be equal, by every bit, hold every declaration against what the ranks have, and
                read everything back, before the commit.

        Returns:
            the path; None if nothing is saved, because another save is under way still and `saves.when_busy` is "skip".

        Raises:
            CheckpointExistsError: an older checkpoint of output_dir was loaded by its path, newer ones lie there, and `overwrite` is false.
            CheckpointError: the same on every rank; nothing was committed, unless it says so at its end: then another rank
                failed when the lead had renamed the folder already. It may be the error of an earlier save in the background, whose
                name it begins with.
        """
        started = time.perf_counter()
        check_flags(validate=validate)
        root, checkpoint_id = self._named(checkpoint_path, checkpoint_id)
        if self._roots.is_home(root):
            self._require_one_history()
        if self._background is not None:
            self._learn(blocking=self._saves.when_busy == "wait")
            if self._background.num_pending and self._saves.when_busy == "skip":
                if self._topology.is_lead:
                    _log.warning("checkpoint-%s is skipped: the save before it is under way still", checkpoint_id)
                return None
        target = self._target(root, checkpoint_id, validate)
        if self._background is None:
            self._take_in(self._saver.save(target))
            return str(target.path)
        with self._topology.operation(target.what):
            prepared = self._saver.prepare(target)
        self._background.begin(prepared, started, self._optimizers.watch() if self._saves.overlap else None)
        return str(target.path)

    async def publish(self, engine: WeightSender, step: int, component: str = "model") -> dict[str, Any]:
        """Give rollouts the weights that have just been saved, out of host memory: no file is read, and no device asked.

        All ranks call it, and rollouts `engine.receive_weights` or `receive_into`. Training may go on, and save; what is published is not
        touched by that. A save of this step that is under way is waited for.

        Args:
            engine: has joined the rollouts; the ranks here are its trainers.
            step: `checkpoint_id` of the newest save, which is in memory still, as a number.

        Returns:
            what the engine says of it.

        Raises:
            MissingStateError: this step is not in memory, or not in that of one host; on every rank.
            CorruptCheckpointError: the memory is not what was saved; on every rank.
            CheckpointError: what the engine raises.
        """
        if self._publisher is None:
            raise MissingStateError(
                f"{component} of step {step} cannot be published: this coordinator keeps nothing in memory. Give it "
                "backend=KimiEngineBackend(pool=True) and saves.writer='thread'"
            )
        return await self._publisher.publish(engine, step, component)

    def maybe_finalize(self, blocking: bool = False) -> list[SaveReport]:
        """Learn which saves in the background have been committed since the last call, in order. Collective.

        It costs one agreement; nothing where none is under way.

        Args:
            blocking: wait for all that are under way.

        Raises:
            CheckpointError: a save failed in the background, on every rank, unless `saves.on_async_error` is "warn".
        """
        return self._learn(blocking=blocking)

    def wait(self) -> None:
        """Wait for all saves in the background. Collective. Raises as `maybe_finalize` does."""
        self._learn(blocking=True)

    def wait_for_snapshot(self) -> None:
        """Return when no state is being copied any more, so that everything may change. Optimizers' steps wait by themselves.

        Not collective.
        """
        if self._background is not None:
            self._background.wait_for_snapshots()

    @contextmanager
    def sigterm_noted(self) -> Iterator[Callable[[], bool]]:
        """Note SIGTERM inside the block, in place of ending the process, so that a training loop can save the step that it interrupts.

        Gives a function that says whether the signal has come to this rank. It may come to ranks at different times, or to one
        alone: exchange the answers after each step, and act on them on all ranks after the same one: `wait`, save, `wait`, leave the block,
        and end with `ckpt.ranks.sigterm.TOLD_TO_END`.

        A process that has not left the block `saves.grace_s` after the signal, or when a second one comes, gives up what is being saved in
        the background, and ends as without the block. Enter it in the main thread; elsewhere, and where the program handles the
        signal itself, the answer is always False. Not collective.
        """
        background = self._background
        if background is None:
            with sigterm_noted(self._saves.grace_s) as has_come:
                yield has_come
            return
        with (
            background.sigterm_left_to_others(),
            sigterm_noted(self._saves.grace_s, hurry=background.hurry, give_up=background.give_up) as has_come,
        ):
            yield has_come

    @property
    def num_pending(self) -> int:
        """Saves in the background whose end no call has told of yet."""
        return 0 if self._background is None else self._background.num_pending

    def close(self) -> None:
        """Wait for all saves in the background, and let go of memory, threads and processes. Collective, if any are under way.

        Raises:
            CheckpointError: as `maybe_finalize` does.
        """
        try:
            self.wait()
        finally:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # on this rank alone, perhaps: what is under way ends, or is given up, and the error stays the one that is told
            self._let_go()

    def _let_go(self) -> None:
        self._optimizers.close()
        if self._background is not None:
            self._background.close()
        self._strategy.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._keeper is not None:
            self._keeper.close()
        self._roots.close()

    def _learn(self, *, blocking: bool) -> list[SaveReport]:
        """Take in what has become of saves in the background."""
        reports = [] if self._background is None else self._background.finalize(blocking=blocking)
        for report in reports:
            self._take_in(report)
        return reports

    def _take_in(self, report: SaveReport) -> None:
        self.last_save = report
        self.reports.append(report)
        self._refused.pop(Path(report.path), None)
        if self._roots.is_home(Path(report.path).parent):
            self._overwrite = False
            self._condemned.clear()  # they have been moved

    def diagnose(self) -> list[Diagnosis]:
        """Say of every component which sharing pattern it truly has, as far as one look can tell. Saves nothing.

        Best after a training step or two: an optimizer before its first step has nothing to look at.
        """
        return self._saver.diagnose()

    def load_checkpoint(self, checkpoint_path: str | Path | None = None, strict: bool = True) -> None:
        """Load all components, straight into the memory they hold; random generators last.

        Args:
            checkpoint_path: a checkpoint folder, which is loaded or refused; None: the newest committed one below output_dir that
                is sound, falling back, loudly, over damaged ones.
            strict: what is missing or does not fit is an error. Otherwise it is left out and keeps its state: components that are
                not there or belong to other ranks, tensors and plain values on one side alone, tensors of another shape
                or type. At least something of each required component must match, though.

        What is an error by this measure at an optional component (`required=False`), and so is damage, or its object's refusal,
        leaves that component out on all ranks, and the load goes on. `last_load` reports on every component.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or the named one was removed while it was read.
            CorruptCheckpointError: the named one, or all of them, are damaged.
            CheckpointError: anything else, the same on every rank.
        """
        check_flags(strict=strict)
        path = None if checkpoint_path is None else as_folder("checkpoint_path", checkpoint_path)
        self._learn(blocking=True)
        self._left_behind = []
        if path is not None:
            self.last_load = self._loader.load(path, strict=strict, may_be_old=True)
            self._leave_newer(self.last_load)
        else:
            self.last_load = self._load_newest(strict)
        self._go_on_from(self.last_load)
        if any(one.status is Status.FAILED for one in self.last_load.components):
            self._roots.distrusted.add(Path(self.last_load.path))

    def _go_on_from(self, loaded: LoadReport) -> None:
        """Belong to the training history of a checkpoint that lies in output_dir, so that its checkpoints are this run's own."""
        if self._roots.is_home(Path(loaded.path).parent) and not self._overwrite:
            known = (loaded.run_id, *self._run_ids) if loaded.run_id is not None else (*self._run_ids, None)
            self._run_ids = tuple(dict.fromkeys(known))

    def _leave_newer(self, loaded: LoadReport) -> None:
        """Look for checkpoints that are newer than a loaded one of output_dir. Set them aside if they may be overwritten.

        Otherwise those of its own history are in the way of the next save; those of other runs stay, as they always do.
        """
        path, ledger = Path(loaded.path), Ledger(self.output_dir, run_id="reader")
        with self._topology.operation(f"load of {path.name}"), self._topology.phase("look for newer") as phase:
            if self._topology.is_lead:
                newer = newer_than(path, ledger.committed()) if self._roots.is_home(path.parent) else None
                if newer and self._overwrite:
                    ledger.abandon(newer)
                    names = ", ".join(one.path.name for one in newer)
                    _log.warning("set aside, for this run goes on from %s: %s", path, names)
                    newer = []
                own = [one.path.name for one in newer or () if one.run_id == loaded.run_id]
                phase.payload = {"is_here": newer is not None, "newer": own}
        said = phase.payloads[0]
        self._left_behind = said["newer"]
        if said["is_here"]:
            self._overwrite = False  # what is left is the history that goes on

    def _require_one_history(self) -> None:
        if self._left_behind and self.last_load is not None:
            raise CheckpointExistsError(
                f"{Path(self.last_load.path).name} was loaded, and {self.output_dir} holds newer checkpoints: "
                f"{', '.join(self._left_behind)}. What is saved now would lie among them, as one history. Set them aside with "
                "overwrite=True, or save to another output_dir"
            )

    def _load_newest(self, strict: bool) -> LoadReport:
        """Load the newest checkpoint that is sound. If one is removed while it is read, look at the list again."""
        passed_over: dict[Path, str] = {}
        paths, num_gone = self._find(), 0
        while (path := next((one for one in paths if one not in passed_over), None)) is not None:
            try:
                report = self._loader.load(path, strict=strict)
            except CorruptCheckpointError as error:
                self._pass_over(path, error, passed_over)
            except CheckpointNotFoundError as error:
                paths, num_gone = self._find(), num_gone + 1
                is_gone = isinstance(error, CheckpointGoneError) or path not in paths
                if not is_gone or num_gone > _MOST_GONE:
                    raise
            else:
                self._refused.update((one, passed_over[one]) for one in paths if one in passed_over)
                return dataclasses.replace(report, fell_back_from=tuple(map(str, paths[: paths.index(path)])))
        if not paths:
            raise CheckpointNotFoundError(f"there is no committed checkpoint in {self.output_dir}")
        reasons = "; ".join(passed_over.values())
        raise CorruptCheckpointError(f"every checkpoint in {self.output_dir} is damaged: {reasons}")

    def _find(self) -> list[Path]:
        """The committed checkpoints in output_dir as the lead sees them, the newest first."""
        with (
            self._topology.operation(f"search for checkpoints in {self.output_dir}"),
            self._topology.phase("find") as phase,
        ):
            if self._topology.is_lead:
                phase.payload = [str(path) for path in committed_newest_first(self.output_dir)]
        return [Path(path) for path in phase.payloads[0]]

    def _pass_over(self, path: Path, error: CorruptCheckpointError, passed_over: dict[Path, str]) -> None:
        """Note a damaged checkpoint, and those that share the damaged file."""
        passed_over[path] = str(error)
        if self._topology.is_lead:
            _log.warning("%s is damaged and passed over: %s", path, error)
        sharing = self._sharing_damage(path, error)
        passed_over.update(sharing)
        if sharing:
            self._condemned |= {path: str(error), **sharing}

    def _sharing_damage(self, path: Path, error: CorruptCheckpointError) -> dict[Path, str]:
        """The checkpoints that have a damaged file of this one in common with it, and what is wrong with them."""
        if error.file is None:
            return {}
        with self._topology.phase("look for links") as phase:
            if self._topology.is_lead:
                phase.payload = [str(other) for other in linked_with(path.parent, path, [error.file])]
        return {
            Path(other): f"{error.file} is one and the same file as that of {path.name}, which is damaged"
            for other in phase.payloads[0]
        }

    def _target(self, root: Path, checkpoint_id: str, validate: bool) -> SaveTarget:
        """What a save is to do. Only in output_dir does it remove checkpoints, or move them away, other than the one of its own name."""
        is_home = self._roots.is_home(root)
        return SaveTarget(
            root,
            checkpoint_id,
            validate=validate,
            refused=dict(self._refused),
            keep_last=self._keep_last if is_home else None,
            condemned=dict(self._condemned) if is_home else {},
            run_ids=self._run_ids,
            remove_others=self._overwrite and is_home,
            config_text=self.config_text,
        )

    def _named(self, checkpoint_path: str | Path | None, checkpoint_id: str | int | None) -> tuple[Path, str]:
        named = None if checkpoint_id is None else as_checkpoint_id(checkpoint_id)
        if checkpoint_path is None:
            return self.output_dir, named or self._id_of_now()
        path = as_folder("checkpoint_path", checkpoint_path)
        start, _, rest = path.name.partition("checkpoint-")
        if start or not rest or named not in (None, rest):
            raise ConfigurationError(
                f"checkpoint_path {path} with checkpoint_id {checkpoint_id}: the last part of the path must be checkpoint-<id>, and agree "
                "with the id where both are given"
            )
        return path.parent, rest

    def _id_of_now(self) -> str:
        with self._topology.phase("name") as phase:
            phase.payload = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        return str(phase.payloads[0])


def _require_distinct(components: Sequence[StateComponent]) -> None:
    seen: set[str] = set()
    for component in components:
        if component.key in seen:
            raise ConfigurationError(
                f"two state components have the key {component.key!r}; a checkpoint holds one of each name"
            )
        seen.add(component.key)


def _require_groups(components: Sequence[StateComponent], topology: Topology) -> None:
    for component in components:
        if component.pattern is SharingPattern.PER_GROUP and component.process_group_name not in topology.groups:
            known = ", ".join(sorted(topology.groups)) or "none"
            raise ConfigurationError(
                f"component {component.key}: there is no process group {component.process_group_name!r}; this run has: {known}"
            )
