"""The command `bisect`: compare the checkpoints of two runs, replay both from the last equal one, and halve the steps between.

scan        the first common checkpoints that differ, else the first losses; and the last equal checkpoints before
reproduce   replay each run from there to where they differ; compare each replay with its own run
halve       if the replays differ: replay to the middle, until one step is left
"""

from __future__ import annotations

import functools
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckpt.cli.arguments import argued
from ckpt.cli.bisecting import checkpoints_of, compared, first_difference, opened, steps_at
from ckpt.cli.comparing import as_json, listed, of_configs
from ckpt.cli.config_text import by_dotted_key, values_of
from ckpt.cli.reading import is_checkpoint
from ckpt.cli.tables import print_json, show
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.format.places import Place, as_place, local_path, place_of, step_of
from ckpt.interop.comparing import Difference
from ckpt.loading.report import some_of
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from recipes.support import CONF
from recipes.support.config import GIVEN, checked
from recipes.support.launch import launch
from recipes.support.ranks import ranks_exist
from recipes.support.report import SUMMARY_NAME, Report, Summary
from recipes.training.restored import CHANGEABLE
from recipes.training.training import resume, set_up

_OF_TRAINING = (
    "train.", "launch.", "device.", "parallel.", "model.", "data.", "optimizer.", "components.", "pytorch_version",
)  # fmt: skip
"""Keys on which the bits of a state depend; shown before others."""

_OF_ONE_RUN = (
    "run_name", "output_dir", "run_dir", "checkpoint_root", "resume", "overwrite", "train.steps", "coordinator.",
)  # fmt: skip
"""Keys that name folders or the last step, or repeat other keys."""

_BEFORE = -1
"""The step before step 0, which is a run's state before its first step."""


@dataclass
class BisectKeys:
    """The keys of the command."""

    run: str = argued("the folder of a run, or the address of its checkpoints")
    bad: str = argued("the folder of a run, or the address of its checkpoints")
    work_dir: str | None = None
    all: bool = False
    json: bool = False

    def validate(self) -> None:
        """Raise ConfigurationError where ranks have been started already, or `work_dir` is in an object store."""
        if ranks_exist():
            raise ConfigurationError(
                "bisect starts the ranks of its replays: run it as one process, without torchrun or Slurm"
            )
        if self.work_dir is not None:
            local_path(self.work_dir, "work_dir")


@dataclass
class Parting:
    """Where two runs part. `as_dict` is the JSON of the command.

    Attributes:
        equal_up_to: the newest step at which their checkpoints, or else losses, are known to be equal; None: there is none.
        differ_at: the step of the first common checkpoints that differ.
        losses_part_at: the first step after `equal_up_to` at which the losses of the summaries differ.
        replays_part: whether the replays differ.
        step: the first step whose states differ: of the replays, or if these agree, of a run and its replay.
        a, b: the states that `differences` compares, in words.
        config: keys of the configs that differ at this step, those of training first; a is run, b is bad.
        not_reproduced: "run" or "bad" -> the first step at which the run is not what its replay is.
    """

    equal_up_to: int | None = None
    differ_at: int | None = None
    losses_part_at: int | None = None
    replays_part: bool = False
    step: int | None = None
    a: str = ""
    b: str = ""
    differences: list[Difference] = field(default_factory=list)
    config: list[Difference] = field(default_factory=list)
    not_reproduced: dict[str, int] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        return self.differ_at is None and self.losses_part_at is None

    @property
    def components(self) -> list[str]:
        """The components that differ, without the names of copies."""
        return sorted({difference.component.partition("/")[0] for difference in self.differences})

    @property
    def sentence(self) -> str:
        if self.is_equal:
            return f"the runs are equal up to step {self.equal_up_to}, the last that can be compared"
        clauses = [self._of_replays()]
        for name, step in self.not_reproduced.items():
            where = f", in {', '.join(self.components)}" if not self.replays_part and step == self.step else ""
            clauses.append(f"{name} departs from its own replay at step {step}{where}")
        if self.not_reproduced:
            clauses.append(
                "it was not deterministic, ran with other threads or versions or elsewhere, or was changed by hand or a fault of hardware"
            )
        return "; ".join(clauses)

    def _of_replays(self) -> str:
        if not self.replays_part:
            return "the replays of the two agree: what parted the runs is not in the checkpoint before, nor in their configs"
        keys = [difference.name for difference in self.config if difference.name.startswith(_OF_TRAINING)]
        cause = f"their configs differ in {some_of(keys)}"
        if not keys:
            cause = "no key of training differs, so training is not deterministic here"
        step = f"step {self.step}" if self.step else "step 0, before the first one"
        return f"the runs part at {step}, in {', '.join(self.components)}; {cause}"

    def as_dict(self) -> dict[str, Any]:
        result = {"equal": self.is_equal, "sentence": self.sentence, "components": self.components}
        rows = {name: as_json(getattr(self, name)) for name in ("differences", "config")}
        return result | vars(self) | rows


def bisect(keys: BisectKeys) -> int:
    """Find where the runs part, print it, and return 0 if they are equal, else 1.

    Raises:
        CheckpointError: a folder is no run, a checkpoint is damaged, or a run cannot be replayed here.
    """
    runs = _Run("run", as_place(keys.run, "run")), _Run("bad", as_place(keys.bad, "bad"))
    found = _scan(*runs)
    if not found.is_equal:
        with _folder(keys.work_dir) as work:
            _replay_both(runs, found, work, quiet=keys.json)
    if keys.json:
        print_json({"run": keys.run, "bad": keys.bad} | found.as_dict())
        return 0 if found.is_equal else 1
    _show(found, all=keys.all)
    return 0 if found.is_equal else 1


def _show(found: Parting, *, all: bool) -> None:
    """Print where the runs part, then the differences of the configs and of the states."""
    show(found.sentence)
    if found.config:
        show("", "configs; a is run, b is bad", *listed(found.config, all=all))
    if found.differences:
        show("", f"step {found.step}; a is {found.a}, b is {found.b}", *listed(found.differences, all=all))


class _Run:
    """What a run left: its checkpoints by step, those from which it was resumed included, and the losses of its summary by step."""

    def __init__(self, name: str, folder: Place) -> None:
        self.name = name
        self.checkpoints = checkpoints_of(folder, name, _history)
        self.losses = _losses(folder / SUMMARY_NAME) if isinstance(folder, Path) else {}

    def checkpoint_of(self, step: int) -> Place:
        """The first checkpoint at or after a step: the process that saved it made the step. Else the last one."""
        return self.checkpoints[min((at_step for at_step in self.checkpoints if at_step >= step), default=max(self.checkpoints))]

    def config(self, step: int) -> dict[str, Any]:
        """The config with which a step was made, by dotted key, with the number of ranks and the version of torch."""
        path = self.checkpoint_of(step)
        manifest = read_manifest(path)
        of_manifest = {"launch.nproc_per_node": manifest.world_size, "pytorch_version": manifest.pytorch_version}
        return by_dotted_key(_config(path)) | of_manifest

    def require_beginning(self) -> None:
        """Require that the checkpoints reach back to a process that began at step 1."""
        first = self.checkpoints[min(self.checkpoints)]
        if (resumed := _config(first).get("resume")) is not None:
            raise CheckpointNotFoundError(
                f"{first}, the oldest of {self.name}, is of a run resumed from {resumed}, which is gone: there is nothing to replay from"
            )


def _history(root: Place) -> dict[int, Place]:
    if not (found := steps_at(root)):
        return found
    before = place_of(_config(found[min(found)]).get("resume") or "latest")
    if before.name != "latest" and is_checkpoint(before):
        step = step_of(read_manifest(before).checkpoint_id)
        if step is not None and step < min(found):
            found |= {at_step: path for at_step, path in _history(before.parent).items() if at_step < step} | {step: before}
    return dict(sorted(found.items()))


def _losses(summary: Path) -> dict[int, str]:
    """Step -> the loss, as text: a loss that is no number equals itself."""
    try:
        values = json.loads(summary.read_bytes())
        return {step: repr(loss) for step, loss in enumerate(values["losses"], values["first_step"])}
    except FileNotFoundError:  # of a run that was killed
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{summary} is not the summary of a run: {error}") from error


@functools.cache
def _config(checkpoint: Place) -> Mapping[str, Any]:
    """The config of the run that saved a checkpoint, nested."""
    text = opened(checkpoint).config_text
    if "train.seed" not in values_of(text):
        raise ConfigurationError(f"{checkpoint} has no config of recipes.train: bisect replays its runs, and no others")
    config: Mapping[str, Any] = OmegaConf.to_container(OmegaConf.create(text))  # type: ignore[assignment]
    return config


def _scan(run: _Run, bad: _Run) -> Parting:
    """Compare the common checkpoints, the oldest first; if all are equal, compare the losses of later steps."""
    found = Parting()
    found.equal_up_to, found.differ_at, _ = first_difference(run.checkpoints, bad.checkpoints)
    after = _BEFORE if found.equal_up_to is None else found.equal_up_to
    common = sorted(step for step in run.losses.keys() & bad.losses.keys() if step > after)
    found.losses_part_at = next((step for step in common if run.losses[step] != bad.losses[step]), None)
    if found.is_equal:
        found.equal_up_to = max([*common, after])
        if found.equal_up_to == _BEFORE:
            raise CheckpointNotFoundError(
                "run and bad have no step in common: neither a checkpoint nor a loss of a summary.json"
            )
    return found


def _replay_both(runs: Sequence[_Run], found: Parting, work: Path, *, quiet: bool) -> None:
    """Replay both runs to where they differ, then to the middle, until one step is left; write into `found`."""
    low, high = found.equal_up_to, found.losses_part_at if found.differ_at is None else found.differ_at
    assert high is not None
    starts: Sequence[Place | None] = [None if low is None else run.checkpoints[low] for run in runs]
    if low is None:
        low = _BEFORE
        for run in runs:
            run.require_beginning()
    replays = [_Replay(run, work / run.name, quiet) for run in runs]
    ends = [replaying.to(high, low, start) for replaying, start in zip(replays, starts, strict=True)]
    departures = [departure for replaying in replays if (departure := replaying.departure()) is not None]
    found.not_reproduced = {run.name: step for step, run, _ in departures}
    found.differences = compared(*ends)
    found.replays_part = bool(found.differences)
    while found.replays_part and high - low > 1:
        middle = (low + high) // 2
        states = [replaying.to(middle, low, start) for replaying, start in zip(replays, starts, strict=True)]
        if differences := compared(*states):
            high, found.differences = middle, differences
        else:
            low, starts = middle, states
    found.step, found.a, found.b = high, "the replay of run", "the replay of bad"
    if departures and not found.replays_part:
        found.step, run, found.differences = min(departures, key=lambda one: one[0])
        found.a, found.b = f"the replay of {run.name}", f"{run.name} itself, at its next checkpoint"
    configs = (_shown(run.config(found.step)) for run in runs)
    found.config = sorted(of_configs(*configs), key=lambda one: not one.name.startswith(_OF_TRAINING))


def _shown(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith(_OF_ONE_RUN)}


class _Replay:
    """Trains the steps of a run again.

    Attributes:
        states: step -> its checkpoint, of the first replay.
        losses: step -> loss as text, of the first replay.
    """

    def __init__(self, run: _Run, folder: Path, quiet: bool) -> None:
        self.run = run
        self.folder = folder
        self.quiet = quiet
        self.states: dict[int, Place] = {}
        self.losses: dict[int, str] = {}

    def to(self, step: int, low: int, start: Place | None) -> Place:
        """Train from the state `start` of step `low` up to `step`, and return its checkpoint.

        At each checkpoint of the run between it saves and begins anew: the run may have been resumed there with another config.
        """
        for end in [*(at_step for at_step in self.run.checkpoints if low < at_step < step), step]:
            if not self.quiet:
                begin = "the beginning" if start is None else f"step {low}"
                print(f"replaying {self.run.name} from {begin} to step {end}", flush=True)
            done = launch(replay, self._config(end, start, self.folder / f"{low + 1:08d}-{end:08d}"))
            assert done is not None
            start, low = place_of(done["path"]), end
            self.states.setdefault(end, start)
            self.losses = {int(at_step): repr(loss) for at_step, loss in done["losses"].items()} | self.losses
        assert start is not None
        return start

    def departure(self) -> tuple[int, _Run, list[Difference]] | None:
        """The first step at which the run is not what its replay is, by losses and checkpoints; and the differences of its checkpoint."""
        run = self.run
        steps = [step for step, loss in sorted(self.losses.items()) if run.losses.get(step, loss) != loss][:1]
        for step, state in self.states.items():
            if step in run.checkpoints and (differences := compared(state, run.checkpoints[step])):
                return min([*steps, step]), run, differences
        return (steps[0], run, []) if steps else None

    def _config(self, end: int, start: Place | None, folder: Path) -> dict[str, Any]:
        """The config of the run at a step, with folders of the replay, and without what saves do beside training."""
        checkpoint = self.run.checkpoint_of(end)
        cfg = dict(_config(checkpoint))
        cfg |= dict.fromkeys(("output_dir", "run_dir", "checkpoint_root"), str(folder))
        cfg |= {"run_name": "bisect", "resume": start and str(start), "overwrite": False, "shared_root": False}
        cfg |= {name: OmegaConf.load(CONF / name / "default.yaml") for name in ("save", "coordinator")}
        cfg |= {"pattern_check": "off", "launch": {"nproc_per_node": read_manifest(checkpoint).world_size}}
        try:
            run = checked(OmegaConf.create(cfg))
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigurationError(
                f"the config of {checkpoint} is not one of this version of recipes.train: {reason}"
            ) from error
        return run | {GIVEN: [f"optimizer.{option}" for option in CHANGEABLE], "replay_to": end}


def replay(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Train from `resume`, or from the beginning, up to step `replay_to`, save, and return path and losses. Every rank calls it."""
    training, coordinator = set_up(cfg, topology)
    summary = Summary(world_size=topology.world_size)
    with coordinator:
        if cfg["resume"] is not None:
            resume(training, coordinator, summary, Report(cfg, shown=False))
        for step in range(summary.first_step, cfg["replay_to"] + 1):
            summary.add_step(step, training.step())
        path = coordinator.save_checkpoint(checkpoint_id=f"{cfg['replay_to']:08d}")
    return {"path": str(path), "losses": dict(enumerate(summary.losses, summary.first_step))}


@contextmanager
def _folder(work_dir: str | None) -> Iterator[Path]:
    """The folder of the replays: `work_dir`, or a temporary one, which is removed after the block, also on SIGTERM.

    Raises:
        ConfigurationError: there is something in `work_dir`.
    """
    if work_dir is not None:
        folder = Path(work_dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigurationError(f"work_dir={work_dir} is not empty: give a new folder")
        yield folder
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TOLD_TO_END))
    try:
        with tempfile.TemporaryDirectory(prefix="ckpt-bisect-") as temporary:
            yield Path(temporary)
    finally:
        signal.signal(signal.SIGTERM, before)
