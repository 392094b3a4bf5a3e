"""Save and restore a training loop: `Checkpointer` finds device, ranks and sharing patterns, and makes a `CheckpointCoordinator`."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Self

import torch

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.retention import Retention
from ckpt.coordinator import CheckpointCoordinator
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    require_no_sizes,
)
from ckpt.format.places import Place, place_of, step_of
from ckpt.loading.report import ComponentReport, LoadReport
from ckpt.memory.device import Device, device_of
from ckpt.ranks.merging import most
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Topology
from ckpt.run.arguments import (
    SETTINGS,
    as_backend,
    as_checkpoint_id,
    as_device,
    as_location,
    as_settings,
    as_strategy,
    as_tiers,
    as_topology,
    check_flags,
    check_number,
    check_step,
    given_once,
    root_given_once,
)
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.adapters import with_adapters
from ckpt.state.provider import components_of, module_of
from ckpt.state.sharing import AUTO, StateComponent
from ckpt.state.statefuls import RNGState
from ckpt.storage.checkpoint_files import same_place
from ckpt.storage.stored import read_manifest

_LOOK_S = 1.0
"""Seconds between two checks, over all ranks, for SIGTERM."""
_MOST_STEPS = 50
"""Between two checks: steps may become slower."""
_OPTIONS = SETTINGS | inspect.signature(CheckpointCoordinator).parameters.keys() - {"settings"}
_CALLED = {
    "backend": "format",
    "strategy": "load",
    "saves": "mode",
    "output_dir": "the first argument",
    "state_components": "one argument for each object",
}
"""Arguments of the coordinator that have another name here."""

_log = logging.getLogger("ckpt")


class Restored(int):
    """The step that was restored, as a number: 0 if there was no checkpoint.

    Attributes:
        path: of the checkpoint; None: there was none.
        components: one report each; `print(restored.summary())` shows them.
        metrics, metadata: as the checkpoint was saved with.
        report: all of the above, bytes and seconds; None: there was no checkpoint.
    """

    report: LoadReport | None

    def __new__(cls, step: int, report: LoadReport | None = None) -> Self:
        self = super().__new__(cls, step)
        self.report = report
        return self

    @property
    def path(self) -> Place | None:
        return place_of(self.report.path) if self.report is not None else None

    @property
    def components(self) -> tuple[ComponentReport, ...]:
        return self.report.components if self.report is not None else ()

    @property
    def metrics(self) -> Mapping[str, float | None]:
        return self.report.metrics if self.report is not None else {}

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.report.metadata if self.report is not None else {}

    def summary(self) -> str:
        """One readable line per component."""
        return self.report.summary() if self.report is not None else "nothing was restored: there is no checkpoint yet"


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A committed checkpoint.

    Attributes:
        step: None: its name is no step.
        time: of the commit, UTC.
        bytes: of its tensors and plain values.
        removed: keys of the components that retention has taken out; `restore` refuses the checkpoint to whoever has objects for them.
    """

    step: int | None
    path: Place
    time: datetime
    bytes: int
    metrics: Mapping[str, float | None]
    metadata: Mapping[str, Any]
    removed: tuple[str, ...] = ()


class Checkpointer:
    """Saves the objects of a training loop when it is time to, and restores them.

    Every rank makes one with the same arguments, and calls its methods in the same order. Ranks are those of `torch.distributed`, if it is
    initialized, else this process alone.

    Rank 0 logs what host memory saves and loads may take, and one line for each committed save and each restore (logger "ckpt", INFO;
    recipes print the same), and warns of what was not restored.

    Leaving the block saves the last step, if it was not saved. SIGTERM to any rank inside the block saves one step on all ranks, and ends
    the program with exit code 143.

    Args:
        folder: the checkpoint root, a folder, which the first save makes, or an address in an object store, such as s3://bucket/run. A
            checkpoint is `<folder>/checkpoint-<step>`. None: `tiers` ends with `ckpt.saving.tiers.remote`, which has it.
        objects: under names that are no arguments: modules, optimizers, and whatever has `state_dict` and `load_state_dict`. One that
            is None is not saved, and `restore` leaves out what a checkpoint holds under its name. `memory_budget_mib` and other options of
            `CheckpointCoordinator` are passed on to it, with settings by themselves: `keep_every`, `keep_best`, `metric`,
            `greater_is_better` and `keep_last_of` of `Retention`, `overwrite`, `when_busy` and others of `SaveSettings`, `verify` and
            `allow_pickle` of `LoadSettings`.
        every: `step` saves each step that is a multiple of it; with `tiers`, into the folder. Each tier says its own. None: 100, or what
            `remote` says.
        keep_last: number of the newest that stay, or a `ckpt.catalog.retention.Retention`.
        format: "zarr", "tensorstore", "kimi-engine", or a backend.
        load: "direct", "two-stage", or a loading strategy.
        mode: "sync", or "async" for saves that go on beside training; or `ckpt.saving.save_settings.SaveSettings`.
        sharing_patterns: name -> sharing pattern, where it cannot be inferred (`ckpt.state.pattern_check`), or should not be.
        process_groups: name -> torch process group, for objects that are equal within one of them and differ elsewhere.
        peft_base: makes components of a PEFT model under the name "model": "adapter-<name>" of each adapter, and "base", the model below
            them: "saved", or "frozen": its source and the digest of its tensors, which a load compares. Each rank reads its part of the
            base for that, once. None: it is one component, with all that it holds.
        device: whose random generators and memory are used; None: that of the modules' parameters.
        save_rng: save the random generators of each rank, under the name "rng". On other ranks than those that saved, a load seeds
            them from `torch.initial_seed()`, as it was when the Checkpointer was made, and the step.
        save_at_end: save the last step when the block is left without an error.
        on_sigterm: save at SIGTERM, within `SaveSettings.grace_s`. Only in the main thread, and if the program has no handler of its own.

    Attributes:
        coordinator: does the work; for what is not offered here.

    Raises:
        ConfigurationError: an object has no state, or an argument is of a wrong type or value.

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with ckpt.Checkpointer("checkpoints", model=model, optimizer=optimizer, every=2, keep_last=3) as checkpoints:
        ...     start = checkpoints.restore()
        ...     for step in range(start + 1, 6):
        ...         model(torch.ones(3)).sum().backward()
        ...         optimizer.step()
        ...         saved = checkpoints.step(step)
        >>> print(start, [one.step for one in checkpoints.list()])
        0 [2, 4, 5]
    """

    def __init__(
        self,
        folder: str | Place | None = None,
        /,
        *,
        every: int | None = None,
        keep_last: int | Retention | None = None,
        format: Any = "zarr",
        load: Any = "direct",
        mode: str | SaveSettings = "sync",
        sharing_patterns: Mapping[str, str] | None = None,
        process_groups: Mapping[str, Any] | None = None,
        peft_base: str | None = None,
        device: Device | str | None = None,
        save_rng: bool = True,
        save_at_end: bool = True,
        on_sigterm: bool = True,
        **objects: Any,
    ) -> None:
        check_flags(save_rng=save_rng, save_at_end=save_at_end, on_sigterm=on_sigterm)
        for name in filter(_CALLED.__contains__, objects):
            raise ConfigurationError(f"{name} of CheckpointCoordinator is {_CALLED[name]} of Checkpointer")
        options = {name: objects.pop(name) for name in [*objects] if name in _OPTIONS}
        _require_objects(objects)
        backend, strategy = as_backend(format, "format"), as_strategy(load, "load")
        given_alone = {name: options.pop(name) for name in SETTINGS & options.keys()}
        retention, saves, loads = as_settings(keep_last, mode, options.pop("loads", None), given_alone, "mode")
        tiers, root = as_tiers(options.pop("tiers", ()))
        self._retention = given_once("retention", retention, root.retention, Retention())
        self._folder = root_given_once("folder", folder, root.place)
        self._ledger = catalog_at(self._folder)
        every = given_once("every", every, root.every)
        every = 100 if every is None else every
        check_number("every", every, 1, "a whole number of at least 1, the number of steps from one save to the next")
        self._cadences = [every, *(tier.every for tier in tiers)]
        self._save_at_end = save_at_end
        self._on_sigterm = on_sigterm
        self._overwrite = saves.overwrite or saves.shared_root
        self._topology = as_topology(options.pop("topology", None))
        self._step = 0
        self._saved_step: int | None = None
        self._unsaved: dict[str, Any] | None = None  # the arguments of the last `step`, if it was not saved
        self._is_known = False  # the checkpoints in the folder are this run's own
        self._has_sigterm_come: Callable[[], bool] = lambda: False
        self._next_look, self._last_look = 0, (0, time.monotonic())
        self._open = ExitStack()
        given = {name: thing for name, thing in objects.items() if thing is not None}
        self._left_out = objects.keys() - given.keys() | (set() if save_rng else {"rng"} - given.keys())
        device = _device_of(given) if device is None else as_device(device)
        if save_rng:
            given.setdefault("rng", ProgramRNG(device, seed=torch.initial_seed(), step=lambda: self._step))
        self.coordinator = CheckpointCoordinator(
            auto_components(given, sharing_patterns or {}, peft_base, self._topology),
            process_groups,
            self._topology,
            self._folder,
            backend=backend,
            strategy=strategy,
            device=device,
            keep_last=self._retention,
            saves=saves,
            loads=loads,
            tiers=tiers,
            **options,
        )
        self._tell("%s", self.coordinator.memory)

    def restore(
        self, which: str | int | Place = "latest", *, strict: bool = True, cast: bool | Collection[str] = False
    ) -> Restored:
        """Restore all objects in place, and return the step. Collective.

        Args:
            which: "latest": the newest sound checkpoint, or none if there is none; "best": that with the best `metric`; a step; or the path
                of a checkpoint. To train on from one that is not the newest, give the Checkpointer `overwrite=True`: newer ones are set
                aside. Otherwise later saves are refused.
            strict, cast: see `CheckpointCoordinator.load_checkpoint`.

        Raises:
            CheckpointNotFoundError: the best one, the step or the path is not there.
            CheckpointError: anything else, the same on every rank.
        """
        path = self._path_of(which)
        if path is None and not self.coordinator.has_tiers and self._is_empty():
            return self._begin_anew()
        try:
            self.coordinator.load_checkpoint(path, strict=strict, leave_out=self._left_out, cast=cast)
        except CheckpointNotFoundError as error:
            if path is None and self._is_empty():
                return self._begin_anew()
            if near := difflib.get_close_matches(str(which), ("latest", "best"), n=1, cutoff=0.7):
                error.args = (f'{error} Did you mean restore("{near[0]}")?',)
            raise
        report = self.coordinator.last_load
        assert report is not None
        step = step_of(report.checkpoint_id)
        if step is None:
            raise ConfigurationError(
                f"{report.path} was restored, but its id is no step; load it with Checkpointer.coordinator"
            )
        is_own = path is None or same_place(place_of(report.path).parent, self._folder)
        self._is_known = self._is_known or is_own
        self._step = self._saved_step = step
        self._unsaved = None
        self._next_look, self._last_look = 0, (self._step, time.monotonic())
        self._tell("%s", report)
        return Restored(self._step, report)

    def _begin_anew(self) -> Restored:
        """Note that there is no checkpoint."""
        if self._topology.is_lead and (names := self._ledger.renamed()):
            _log.warning(
                "%s is empty but for %s, which is a checkpoint under another name, and restored by its path alone: the run begins anew",
                self._folder,
                names[0],
            )
        self._is_known = True
        self._tell("nothing is restored: there is no checkpoint in %s yet", self._folder)
        return Restored(0)

    def step(
        self, step: int, *, metrics: Mapping[str, float] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> bool:
        """Call it after each training step. Saves if the step is due, or if a rank was told to end. Collective.

        Args: as of `save`; for a step that is not saved they have no effect.

        Returns:
            whether a save was made, or begun.

        Raises:
            SystemExit: SIGTERM has come, or `end_after_this_step` was called; the step is saved.
            ConfigurationError: the step is no whole number from 0 on.
            CheckpointError: see `save`.
        """
        check_step(step)
        notes = {"metrics": metrics, "metadata": metadata}
        self._unsaved = None if step == self._saved_step else {"step": step, **notes}
        is_told = self.is_told_to_end(step)
        if is_told:
            self._end()
            raise SystemExit(TOLD_TO_END)
        if all(step % every for every in self._cadences) or self._unsaved is None:
            return False
        return self.save(step, **notes) is not None

    def save(
        self, step: int, *, metrics: Mapping[str, float] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Place | None:
        """Save this step now. Collective.

        Args:
            metrics: name -> value, such as of the loss, for `keep_best` and `restore("best")`. With `keep_best` each save needs `metric`;
                math.nan: there is no value. A save at SIGTERM or at the end of the block can do without.
            metadata: plain values to keep with the checkpoint; `restore` gives them back.

        Returns:
            the path; None: nothing is saved, because another save is unfinished and `SaveSettings.when_busy` is "skip".

        Raises:
            CheckpointExistsError: the folder holds checkpoints of another run, which `restore` has not been called for.
            ConfigurationError: `metric` is missing, by which `keep_best` goes.
            CheckpointError: see `CheckpointCoordinator.save_checkpoint`.
        """
        check_step(step)
        checkpoint_id = as_checkpoint_id(step)
        self._require_own_folder()
        self._step = step
        with self._telling_of_saves():
            path = self.coordinator.save_checkpoint(
                checkpoint_id=checkpoint_id, metrics=metrics, metadata=metadata, goes_home=step % self._cadences[0] == 0
            )
        if path is None:
            return None
        self._saved_step, self._unsaved = step, None
        return place_of(path)

    def check_folder(self) -> None:
        """Refuse at once what the first `save` would refuse. Collective.

        Raises:
            CheckpointExistsError: the folder holds checkpoints of another run, or newer ones than the restored one.
        """
        self._require_own_folder()
        self.coordinator.require_no_newer()

    def is_told_to_end(self, step: int) -> bool:
        """Whether SIGTERM has come to any rank, or `end_after_this_step` was called there. For loops that do not call `step`, after each
        step. Collective.

        The ranks agree on it about every `_LOOK_S`, at the same step. A loop that is told saves, and leaves the block.
        """
        if self._topology.world_size == 1 or not self._on_sigterm:
            return self._has_sigterm_come()
        if step < self._next_look:
            return False
        then, at = self._last_look
        now = time.monotonic()
        steps_s = (step - then) / max(now - at, 1e-6)
        with self._topology.phase("told to end") as phase:
            phase.merge = {"told": most(self._has_sigterm_come())}
            phase.from_lead = min(_MOST_STEPS, max(1, round(_LOOK_S * steps_s)))
        self._next_look, self._last_look = step + phase.from_lead, (step, now)
        if self.coordinator.num_pending:
            with self._telling_of_saves():
                self.coordinator.maybe_finalize()
        return bool(phase.merged["told"])

    def end_after_this_step(self) -> None:
        """Have all ranks save and end after this step, as at SIGTERM: `step` raises SystemExit. From any thread or signal handler.

        For programs in which SIGTERM is not the loop's: functions of Ray Train, notebooks, a hook that runs before a container is stopped.
        One rank is enough. Call it inside of the `with` block. Not collective.

        Raises:
            ConfigurationError: the ranks do not ask each other, because of `on_sigterm=False`.
        """
        if not self._on_sigterm:
            raise ConfigurationError("end_after_this_step() of a Checkpointer with on_sigterm=False: its ranks do not look for it")
        self.coordinator.end_after_this_step()

    def list(self) -> list[SavedStep]:
        """Return the committed checkpoints in the folder, the oldest first, without damaged ones. Not collective."""
        found = []
        for commit in self._ledger.committed():
            try:
                manifest = read_manifest(commit.path)
            except CheckpointNotFoundError:  # removed meanwhile
                continue
            except CheckpointError as error:
                _log.warning("%s is not listed: %s", commit.path, error)
                continue
            size = sum(component.size_bytes for component in manifest.components.values())
            notes = manifest.metrics, manifest.metadata, tuple(manifest.removed)
            found.append(SavedStep(step_of(commit.id), commit.path, manifest.timestamp, size, *notes))
        return found

    def find_latest(self) -> Place | None:
        """Return the newest committed checkpoint in the folder. Not collective."""
        newest = self._ledger.newest()
        return newest.path if newest is not None else None

    def wait(self) -> None:
        """Wait for saves in the background. Collective."""
        with self._telling_of_saves():
            self.coordinator.wait()

    def close(self) -> None:
        """Wait for saves in the background, and release threads, processes and memory. Collective."""
        with (
            self._open,
            self._telling_of_saves(),
        ):  # left without an error: a signal that has come does not end the process
            self.coordinator.close()

    def __enter__(self) -> Self:
        if self._on_sigterm:
            self._has_sigterm_come = self._open.enter_context(self.coordinator.sigterm_noted())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            try:
                self.coordinator.__exit__(kind, error, trace)
            finally:
                self._open.__exit__(kind, error, trace)  # a signal that has come ends the process, as without the block
            return
        if not self._save_at_end:
            self._unsaved = None
        self._end()
        if self._has_sigterm_come():
            raise SystemExit(TOLD_TO_END)

    def _end(self) -> None:
        """Save the step that `step` was called for last, unless it is saved, and close; both also if an earlier save has failed."""
        with ExitStack() as closing:
            closing.callback(self.close)
            try:
                self.wait()  # else `when_busy="skip"` could leave the last one out
            finally:
                if self._unsaved is not None:
                    self.save(**self._unsaved | {"metrics": self._completed(self._unsaved["metrics"])})

    def _completed(self, metrics: Mapping[str, float] | None) -> Mapping[str, float] | None:
        """The metrics of a save that the program has not asked for, which must not fail for lack of one."""
        kept_by = self._retention.metric if self._retention.keep_best is not None else None
        return metrics if kept_by is None else {kept_by: math.nan} | dict(metrics or {})

    @contextmanager
    def _telling_of_saves(self) -> Iterator[None]:
        """Log the saves that the block finds committed, also where it then fails."""
        known = len(self.coordinator.reports)
        try:
            yield
        finally:
            for report in self.coordinator.reports[known:]:
                self._tell("%s", report)

    def _tell(self, text: str, *values: Any) -> None:
        if self._topology.is_lead:
            _log.info(text, *values)

    def _path_of(self, which: str | int | Place) -> Place | None:
        if which == "latest":
            return None
        if which == "best":
            return self._best()
        if isinstance(which, int):
            return self._folder / f"checkpoint-{as_checkpoint_id(which)}"
        return as_location("which", which)

    def _is_empty(self) -> bool:
        """Whether the folder holds no checkpoint, as the lead sees it. Collective."""
        with self._topology.operation(f"look into {self._folder}"), self._topology.phase("look") as phase:
            if self._topology.is_lead:
                phase.from_lead = self.find_latest() is None
        return bool(phase.from_lead)

    def _best(self) -> Place:
        """The checkpoint with the best metric, as the lead sees it. Collective."""
        if self._retention.metric is None:
            raise ConfigurationError('restore("best") goes by a metric: give its name as metric')
        with self._topology.operation("search for the best checkpoint"), self._topology.phase("best") as phase:
            if self._topology.is_lead:
                best = self._retention.best(self._ledger.committed())
                if best is None:
                    raise CheckpointNotFoundError(
                        f"no checkpoint in {self._folder} was saved with the metric {self._retention.metric!r}"
                    )
                phase.from_lead = str(best.path)
        return place_of(phase.from_lead)

    def _require_own_folder(self) -> None:
        """Before the first save without `restore`: require that the folder holds no other run's checkpoints. Collective."""
        if self._is_known or self._overwrite:
            return
        with self._topology.operation(f"look into {self._folder}"), self._topology.phase("own folder"):
            newest = self.find_latest() if self._topology.is_lead else None
            if newest is not None:
                raise CheckpointExistsError(
                    f"{self._folder} holds the checkpoints of an earlier run, up to {newest.name}: call restore() first to go on "
                    "from them, choose another folder, or replace them with overwrite=True"
                )
        self._is_known = True


class ProgramRNG(RNGState):
    """Random generators of a program that seeds its own."""

    def load_changed(self, saved: Any) -> None:
        """On other ranks: continue from the program's own seed of this rank, and the step."""
        self.seed(self._seed or 0, saved[0].get("step", 0))


def names_of_objects(given: Iterable[str]) -> list[str]:
    """The names among keyword arguments of `Checkpointer` that are those of objects."""
    return [name for name in given if name not in _OPTIONS and name not in inspect.signature(Checkpointer).parameters]


def _require_objects(objects: Mapping[str, Any]) -> None:
    """Refuse a misspelt argument, or one of a former version, which Python takes for the name of an object."""
    require_no_sizes(objects)
    known = sorted(inspect.signature(Checkpointer).parameters.keys() | _OPTIONS - _CALLED.keys())
    for name, thing in objects.items():
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        if near and isinstance(thing, bool | int | float | str):
            meant = "the first argument" if near[0] == "folder" else near[0]
            raise ConfigurationError(f"{name}={thing!r}: Checkpointer has no such argument; did you mean {meant}?")


def _device_of(objects: Mapping[str, Any]) -> Device:
    modules = [module for thing in objects.values() if (module := module_of(thing)) is not None]
    return device_of(parameter for module in modules for parameter in module.parameters())


def auto_components(
    objects: Mapping[str, Any], patterns: Mapping[str, str], peft_base: str | None, topology: Topology
) -> list[StateComponent]:
    """Return objects as components whose sharing patterns are inferred, but for those in `patterns`. Collective if one is a PEFT model."""
    for name in patterns:
        if name not in objects:
            raise ConfigurationError(f"sharing_patterns: there is no object {name!r}; given were {', '.join(objects)}")
    return [
        part
        for component in components_of(objects, legacy_pattern=AUTO)
        for part in with_adapters(
            replace(
                component,
                sharing_pattern=patterns.get(component.key, component.sharing_pattern),
                elastic="derive" if isinstance(component.stateful, ProgramRNG) else None,
            ),
            peft_base,
            topology,
        )
    ]
