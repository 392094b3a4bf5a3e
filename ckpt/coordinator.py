"""The object that saves and loads the state of one training run. The steps are in `ckpt.saving.saver` and `ckpt.loading.loader`."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from typing import Any, Self

from ckpt.backends.base import Backend
from ckpt.catalog.retention import Retention
from ckpt.errors import ConfigurationError, MissingStateError, unlike
from ckpt.format.places import Place, step_of
from ckpt.interop.registry import register_programs
from ckpt.loading.load_settings import LoadSettings
from ckpt.loading.loader import Loader
from ckpt.loading.report import LoadReport
from ckpt.loading.strategy import LoadingStrategy, check_cast
from ckpt.memory.budget import MemoryBudget
from ckpt.memory.device import Device
from ckpt.ranks.sigterm import sigterm_noted
from ckpt.ranks.topology import Topology
from ckpt.run.arguments import (
    as_checkpoint_id,
    as_location,
    as_run,
    as_settings,
    as_strategy,
    as_tiers,
    check_flags,
    given_once,
    root_given_once,
    shared_out,
)
from ckpt.run.run_history import RunHistory
from ckpt.run.tiered import TieredRun
from ckpt.run.weights_to_rollouts import IN_MEMORY, InMemory, Publisher, WeightSender
from ckpt.saving.background.background import Background
from ckpt.saving.checkpoint_root import KnownRoots, StaleStateCheck
from ckpt.saving.host_cache import host_cache_of
from ckpt.saving.prepared_save import SaveReport
from ckpt.saving.save_settings import SaveSettings
from ckpt.saving.saver import Saver
from ckpt.saving.tiers import Root, Tier
from ckpt.state.overlap import Optimizers
from ckpt.state.pattern_check import Diagnosis
from ckpt.state.provider import Provider, components_of, groups_of
from ckpt.state.sharing import StateComponent
from ckpt.storage.objects.store import retry_for

_log = logging.getLogger("ckpt")


class CheckpointCoordinator:
    """Saves and loads state components over all ranks, or on none.

    Every rank calls every method, in the same order; an error of one rank is raised on all. With `saves.mode` "async" a save goes on
    after its call has returned, and a later call reports its outcome. Close the coordinator then, or use it as a context manager: both
    wait for unfinished saves.

    Args:
        state_components: contents of a checkpoint. Bare modules and optimizers are wrapped.
        process_groups: name -> torch process group, or the global ranks of this rank's instance of it; None: no groups.
        topology: ranks, nodes and the agreement between them. None: the ranks of torch's default process group, or this process alone
            where torch.distributed is not initialized.
        output_dir: the checkpoint root, a folder, which the first save makes, or an address in an object store, such as s3://bucket/run;
            None: `tiers` has it.
        backend: writes the storage format; or "zarr", "tensorstore" or "kimi-engine" for one with its defaults.
        strategy: spreads a load over ranks; or "direct" or "two-stage".
        device: where the tensors live; or its type, such as "cpu".
        keep_last: number of checkpoints of this run that stay in the root after a save, or a `ckpt.catalog.retention.Retention`; None
            keeps all. After the load of a checkpoint of the root, it and the earlier ones of its run, and of the runs before that, count,
            too. Other runs' checkpoints stay, and do not count; nor do copied and renamed ones.
        config_text: stored as config.yaml in each checkpoint; its hash goes into the manifest.
        tiers: places on the hosts that saves go to first, the fastest first: `ckpt.saving.tiers.memory` and `local`. A save is committed
            in the first one, and copied to the others, and to output_dir, beside training. A load takes the newest of all. The last one
            may be `ckpt.saving.tiers.remote`, which is output_dir, and says which saves go there, and which stay.
        saves: how saves behave: "sync", "async", or a `ckpt.saving.save_settings.SaveSettings`.
        loads: how loads behave: a `ckpt.loading.load_settings.LoadSettings`; None: its defaults.
        memory_budget_mib: host memory of each rank that checkpointing takes beside the state, in MiB, equal on all ranks; None: no limit.
            It is shared out over what takes memory; objects given as backend or strategy keep their share. A
            `ckpt.memory.budget.MemoryBudget` has the bytes of each part.
        settings: fields of `Retention`, `SaveSettings` and `LoadSettings` by themselves, such as `verify=False` or `overwrite=True`; they
            take the place of those in `keep_last`, `saves` and `loads`.

    Attributes:
        memory: what checkpointing may take of host memory, and tiers of hosts, in one line, which `Checkpointer` logs and recipes print.
        config_text: as given; a new value goes into the next checkpoint. Equal on all ranks.
        last_save: report of the newest save that is known to be committed.
        reports: of all saves that are known to be committed, in order.
        last_load: report of the newest load.

    Raises:
        ConfigurationError: an argument is of a wrong type or value, two components share a key, or one names a group that does not exist.

    Example:
        >>> model = ckpt.StateComponent("model", torch.nn.Linear(3, 1), ckpt.SharingPattern.REPLICATED)
        >>> with ckpt.CheckpointCoordinator(
        ...     [model], None, None, "checkpoints", backend="zarr", strategy="direct", device="cpu"
        ... ) as coordinator:
        ...     path = coordinator.save_checkpoint(checkpoint_id="1")
        ...     coordinator.load_checkpoint()  # the newest
        >>> path
        'checkpoints/checkpoint-1'
    """

    def __init__(
        self,
        state_components: Iterable[StateComponent],
        process_groups: Mapping[str, Any] | None,
        topology: Topology | None,
        output_dir: str | Place | None = None,
        *,
        backend: Backend | str,
        strategy: LoadingStrategy | str,
        device: Device | str,
        keep_last: int | Retention | None = None,
        saves: SaveSettings | str = "sync",
        loads: LoadSettings | None = None,
        memory_budget_mib: int | MemoryBudget | None = None,
        config_text: str | None = None,
        tiers: Sequence[Tier | Root] | Mapping[str, Tier | Root | None] | None = None,
        **settings: Any,
    ) -> None:
        on_hosts, self._root = as_tiers(tiers)
        self.output_dir = root_given_once("output_dir", output_dir, self._root.place)
        strategy = as_strategy(strategy)
        retention, saves, loads = as_settings(keep_last, saves, loads, settings)
        retention = given_once("retention", retention, self._root.retention, Retention())
        if not isinstance(config_text, str | None):
            raise unlike("config_text", config_text, "a string, or None")
        run = as_run(state_components, process_groups, topology, backend, device)
        retention.require_components([component.key for component in run.components], run.backend.store)
        memory, self.memory = shared_out(memory_budget_mib, run, strategy, saves, self.output_dir)

        if saves.retry_s is not None:
            retry_for(saves.retry_s)
        self.config_text = config_text
        self.last_save: SaveReport | None = None
        self.reports: list[SaveReport] = []
        self.last_load: LoadReport | None = None

        self._topology = run.topology
        self._saves = saves
        self._is_to_end = False
        self._background = Background(run, saves, memory.staging) if saves.is_async else None
        # A tier has the save in memory already.
        self._host_cache = None if on_hosts else host_cache_of(run.backend, saves, memory.staging)
        self._roots = KnownRoots(
            self.output_dir,
            run_id=secrets.token_hex(8),
            stale_s=saves.stale_s,
            shared_root=saves.shared_root,
            min_live=saves.incremental_min_live if saves.incremental else None,
            delete=self._background.delete if self._background is not None else None,
            host_cache=self._host_cache,
        )
        stale_check = StaleStateCheck(run.components)
        self._history = RunHistory(run.topology, self._roots, retention=retention, overwrite=saves.overwrite)
        self._tiered: TieredRun | None = None
        if on_hosts:
            self._tiered = TieredRun(on_hosts, run.topology, self._roots, stale_check, self._history.add)
        self._saver = Saver(
            run,
            self._roots,
            pattern_check=saves.pattern_check,
            stale_check=stale_check,
            first_tier=None if self._tiered is None else self._tiered.first,
        )
        self._strategy = strategy
        self._strategy.bind(run.backend)
        files_of = self._host_cache.files_of if self._host_cache is not None else None
        register_programs()
        self._loader = Loader(
            run.components,
            run.topology,
            strategy,
            run.device,
            verify=loads.verify,
            allow_pickle=loads.allow_pickle,
            files_of=files_of,
        )
        self._publisher: Publisher | None = None
        if self._host_cache is not None or self._tiered is not None:
            patterns = self._saver.patterns
            settled = self._background.wait_until_over if self._background is not None else lambda: None
            self._publisher = Publisher(run.topology, self._in_memory, patterns, settled)

        # Last: an error before leaves no hooks behind.
        self._optimizers = Optimizers(run.components if saves.is_async else ())
        if on_hosts:
            of_host = Optimizers(run.components).foreseen_bytes(run.topology.world_size) * len(run.topology.nodes[run.topology.node_rank])
            self.memory = "; ".join([self.memory, *(tier.takes(of_host) for tier in on_hosts)])
        if self._background is not None and self._host_cache is None:
            self._background.warm_up(self._optimizers.foreseen_bytes(run.topology.world_size))
        if saves.overlap and self._background is not None:
            self._optimizers.before_steps(self._background.wait_for_snapshots)

    @classmethod
    def for_provider(
        cls,
        provider: Provider,
        topology: Topology,
        output_dir: str | Place,
        *,
        legacy_pattern: str = "replicated",
        **options: Any,
    ) -> CheckpointCoordinator:
        """Make a coordinator for the components and process groups that a trainer provides (`ckpt.state.provider`).

        Args:
            legacy_pattern: sharing pattern of objects for which the trainer names none.
            options: `backend`, `strategy`, `device` and the rest.
        """
        components = components_of(provider, legacy_pattern=legacy_pattern)
        return cls(components, groups_of(provider), topology, output_dir, **options)

    def save_checkpoint(
        self,
        checkpoint_path: str | Place | None = None,
        checkpoint_id: str | int | None = None,
        validate: bool = False,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        goes_home: bool | None = None,
    ) -> str | None:
        """Save all components and return the path of the checkpoint.

        The checkpoint is `<output_dir>/checkpoint-<checkpoint_id>`; the commit replaces an existing one of that name. Until then, and
        if anything fails on any rank, the newest checkpoint is the one before.

        With `saves.mode` "async" the commit follows some time after this returns; the checkpoint holds the state at the call. Tensors that
        are copied beside training (`saves.overlap`) must not be written to before the next step of their optimizer, or `wait_for_snapshot`.

        Args:
            checkpoint_path: the folder to save to, instead of a name in output_dir; its last part is `checkpoint-<id>`.
            checkpoint_id: default: the time of day, UTC, on the lead rank. A number is a step; 5 is "00000005".
            validate: before the commit, compare every bit of the copies that should be equal, compare the sharing patterns with the state
                of the ranks, and read everything back.
            metrics: name -> value at this step, for `Retention` and for people; stored in the manifest. Those of the lead rank.
            metadata: plain values to keep with the checkpoint, as JSON of at most 1 MiB. Those of the lead rank.
            goes_home: with tiers, whether the save is copied to output_dir, too; None: if `remote(every=)` says so, and without it always.
                `close` does so with the newest one in any case.

        Returns:
            the path, with tiers that in the first of them; None: nothing is saved, because another save is unfinished and
            `saves.when_busy` is "skip".

        Raises:
            CheckpointExistsError: an older checkpoint of output_dir was loaded by its path, newer ones lie there, and `overwrite` is false;
                or a living run that shares the root has a checkpoint of this id.
            ConfigurationError: `metrics` lacks the one by which checkpoints are kept.
            CheckpointError: the same on every rank; nothing was committed, unless its sentence ends so: then a rank failed after the
                lead had renamed the folder. It may be the error of an earlier save in the background, whose name it begins with.
        """
        started = time.perf_counter()
        root, checkpoint_id = self._named(checkpoint_path, checkpoint_id)
        goes_home = self._root.is_due(checkpoint_id) if goes_home is None else goes_home
        check_flags(validate=validate, goes_home=goes_home)
        self._history.require_no_newer(root)
        if self._background is not None:
            self.maybe_finalize(blocking=self._saves.when_busy == "wait")
            if self._background.num_pending and self._saves.when_busy == "skip":
                if self._topology.is_lead:
                    _log.warning("checkpoint-%s is skipped: the save before it is under way still", checkpoint_id)
                return None
        target = self._history.target(
            root, checkpoint_id, validate=validate, config_text=self.config_text, metrics=metrics, metadata=metadata, goes_home=goes_home
        )
        is_tiered = self._tiered is not None and self._roots.is_home(root)
        path = self._tiered.folder_of(target) if self._tiered is not None and is_tiered else target.path
        if self._background is None:
            self._add(self._saver.save(target))
            return str(path)
        with self._topology.operation(target.what):
            prepared = self._saver.prepare(target)
        self._background.begin(prepared, started, self._optimizers.watch() if self._saves.overlap else None)
        return str(path)

    def _in_memory(self) -> AbstractContextManager[InMemory | None]:
        """The newest save in memory, inside the block."""
        if self._host_cache is not None:
            return self._host_cache.reading()
        return nullcontext(None if self._tiered is None else self._tiered.in_memory())

    async def publish(self, engine: WeightSender, step: int, component: str = "model") -> dict[str, Any]:
        """Send the weights of the newest save to rollouts, from host memory: it reads no file and copies from no device.

        All ranks call it, and rollouts call `engine.receive_weights` or `receive_into`. Training and saves may go on meanwhile. An
        unfinished save of this step is waited for.

        Args:
            engine: has joined the rollouts; the ranks here are its trainers.
            step: `checkpoint_id` of the newest save, as a number; its files are still in memory.

        Returns:
            the engine's report.

        Raises:
            MissingStateError: this step is not in memory, or not in that of one host; on every rank.
            CorruptCheckpointError: the memory has changed since the save; on every rank.
            CheckpointError: the engine's.
        """
        if self._publisher is None:
            raise MissingStateError(
                f"{component} of step {step} cannot be published: this coordinator keeps nothing in memory for that. ",
                "Give it ", IN_MEMORY, ", or memory() as the first of tiers",
            )
        return await self._publisher.publish(engine, step, component)

    def maybe_finalize(self, blocking: bool = False) -> list[SaveReport]:
        """Return reports of the background saves that were committed since the last call, in order. Collective.

        It costs one agreement; nothing where no save is unfinished.

        Args:
            blocking: wait for all unfinished saves.

        Raises:
            CheckpointError: a save failed in the background, on every rank, unless `saves.on_async_error` is "warn".
        """
        reports = [] if self._background is None else self._background.finalize(blocking=blocking)
        for report in reports:
            self._add(report)
        return reports

    def wait(self) -> None:
        """Wait for all saves in the background. Collective. Raises as `maybe_finalize` does."""
        self.maybe_finalize(blocking=True)

    def wait_for_snapshot(self) -> None:
        """Wait until no save copies state any more, so that it may change. Steps of optimizers wait by themselves. Not collective."""
        if self._background is not None:
            self._background.wait_for_snapshots()

    def end_after_this_step(self) -> None:
        """Have a training loop do what it does at SIGTERM. From any thread or signal handler, on one rank or several. Not collective.

        For programs in which SIGTERM is not the loop's: threads of Ray, notebooks, a hook that runs before a container is stopped. Inside
        `sigterm_noted` the answer is True from now on. Whoever calls it ends a process that does not come to its next step.
        """
        self._is_to_end = True

    @contextmanager
    def sigterm_noted(self) -> Iterator[Callable[[], bool]]:
        """Record SIGTERM inside the block instead of ending the process, so that a training loop can save the interrupted step.

        Yields a function that returns whether this rank has received the signal. Ranks may receive it at different times, or one alone:
        exchange the answers after each step, and act on them on all ranks after the same step: `wait`, save, `wait`, leave the block,
        and exit with `ckpt.ranks.sigterm.TOLD_TO_END`.

        A process still in the block `saves.grace_s` after the signal, or at a second signal, gives up its background saves, and ends as
        without the block. Elsewhere than in the main thread, and where the program handles the signal itself, the answer is True only after
        `end_after_this_step`. Not collective.
        """
        background = self._background
        beside = [each for each in (background, self._tiered) if each is not None]

        def hurry() -> None:
            for each in beside:
                each.hurry()

        def give_up() -> None:
            for each in beside:
                each.give_up()

        self._is_to_end = False
        with (
            nullcontext() if background is None else background.sigterm_left_to_others(),
            sigterm_noted(self._saves.grace_s, hurry=hurry, give_up=give_up) as has_come,
        ):
            yield lambda: has_come() or self._is_to_end

    @property
    def has_tiers(self) -> bool:
        """Whether saves go to tiers on the hosts first."""
        return self._tiered is not None

    @property
    def num_pending(self) -> int:
        """Number of background saves whose outcome no call has reported yet."""
        return 0 if self._background is None else self._background.num_pending

    def close(self) -> None:
        """Wait for all saves in the background, and release memory and threads. Collective if a save is unfinished.

        Raises:
            CheckpointError: as `maybe_finalize` does.
        """
        has_ended = False
        try:
            self.wait()
            if self._tiered is not None:
                self._tiered.finish()
            has_ended = True
        finally:
            self._release(has_ended=has_ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # perhaps on this rank alone: unfinished saves end, or are given up, and this error is the one that is raised
            self._release()

    def _release(self, *, has_ended: bool = False) -> None:
        self._optimizers.close()
        if self._background is not None:
            self._background.close()
        if self._tiered is not None:
            self._tiered.close(has_ended=has_ended)
        self._strategy.close()
        if self._publisher is not None:
            self._publisher.close()
        if self._host_cache is not None:
            self._host_cache.close()
        self._roots.close()

    def _add(self, report: SaveReport) -> None:
        self.last_save = report
        self.reports.append(report)
        self._history.add(report)

    def diagnose(self) -> list[Diagnosis]:
        """Infer the true sharing pattern of every component from the present state of all ranks. Saves nothing. Collective.

        Call it after a training step or two: an optimizer before its first step has no state.
        """
        return self._saver.diagnose()

    def load_checkpoint(
        self,
        checkpoint_path: str | Place | None = None,
        strict: bool = True,
        *,
        leave_out: Collection[str] = (),
        cast: bool | Collection[str] = False,
    ) -> None:
        """Load all components in place; random generators last. Collective.

        Args:
            checkpoint_path: a checkpoint, which is loaded or refused; None: the newest sound one below output_dir; damaged
                ones are passed over, with a warning.
            strict: missing or unfitting state is an error. Otherwise it is left out and keeps its values: components on one side
                alone or of other ranks, tensors and plain values on one side alone, tensors of another shape or type. Something
                of each required component must match all the same. An object that is no module or optimizer, and has no
                `prepare_to_load`, gets what was saved in any case.
            leave_out: keys of components that this load does not restore, on purpose: this run's keep their state, and those
                of the checkpoint need none here.
            cast: True: tensors that were saved in another floating-point type are converted while they are read; optimizers keep the types
                of their state. Or keys of components alone, whose optimizers take the types of their parameters, as torch's
                `load_state_dict` does. An object that gets what was saved in any case gets it in the type that was saved.

        An error of an optional component (`required=False`), be it a mismatch, damage, or one raised by its object, leaves that
        component out on all ranks, and the load goes on. `last_load` reports on every component.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or the named one was removed while it was read.
            CorruptCheckpointError: the named one, or all of them, are damaged.
            CheckpointError: anything else, the same on every rank.
        """
        check_flags(strict=strict)
        check_cast(cast, [component.key for component in self._loader.components])
        load = partial(self._loader.load, strict=strict, leave_out=frozenset(leave_out), cast=cast)
        path = None if checkpoint_path is None else as_location("checkpoint_path", checkpoint_path)
        self.maybe_finalize(blocking=True)
        self._history.newer = []
        if path is not None:
            self.last_load = load(path, may_be_old=True)
            self._history.leave_newer(self.last_load)
            if self._tiered is not None and self._saves.overwrite and self._roots.is_home(path.parent):
                self._tiered.abandon_newer(path)
        else:
            needed = {c.key for c in self._loader.components} - {*leave_out}
            if self._tiered is not None:
                self._tiered.begin_load()
                self.last_load = self._history.load_newest(load, needed, partial(self._tiered.load_newest, load))
            else:
                self.last_load = self._history.load_newest(load, needed)
        self._history.go_on_from(self.last_load)

    def require_no_newer(self) -> None:
        """Refuse at once what the next save into output_dir would refuse: to come after checkpoints newer than the loaded one.

        Raises:
            CheckpointExistsError: there are some, and `overwrite` is false; on every rank.
        """
        self._history.require_no_newer(self.output_dir)

    def _named(self, checkpoint_path: str | Place | None, checkpoint_id: str | int | None) -> tuple[Place, str]:
        named = None if checkpoint_id is None else as_checkpoint_id(checkpoint_id)
        if checkpoint_path is None:
            return self.output_dir, named or self._id_of_now()
        path = as_location("checkpoint_path", checkpoint_path)
        start, _, rest = path.name.partition("checkpoint-")
        if start or not rest or named not in (None, rest):
            step = f", or for step {path} only checkpoint_id={path}" if step_of(str(path)) is not None else ""
            raise ConfigurationError(
                f"checkpoint_path {path} with checkpoint_id {checkpoint_id}: the last part of the path must be checkpoint-<id>, and agree "
                f"with the id where both are given; give such a path{step}"
            )
        return path.parent, rest

    def _id_of_now(self) -> str:
        with self._topology.phase("name") as phase:
            phase.from_lead = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
        return str(phase.from_lead)
