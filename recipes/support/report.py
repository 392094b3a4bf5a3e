"""The output of a run: lines, or one live line on a terminal, and summary.json at the end."""

from __future__ import annotations

import functools
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from ckpt.cli.config_text import by_dotted_key, values_of
from ckpt.cli.progress import SHOWN_AFTER_S
from ckpt.cli.tables import DataConsole
from ckpt.errors import CorruptCheckpointError, telling
from ckpt.loading.report import LoadReport
from ckpt.ranks.topology import Topology
from ckpt.saving.prepared_save import SaveReport
from ckpt.storage.files import replace_durably
from recipes.support import CONF
from recipes.support.config import LINES_TO, OF_THIS_START
from recipes.support.live_line import LiveLine, samples_a_second
from recipes.support.metrics import Metrics

SUMMARY_NAME = "summary.json"

_FOLDER_KEYS = ("run_name", "output_dir", "run_dir")
"""The keys of a run's folder, and what else depends on them is below it."""

_TARGET = "._target_"

_LINES = 12
"""About the number of lines that a run prints where there is no live line."""


@dataclass
class Summary:
    """The fields of `summary.json`. Bytes are summed over the ranks, seconds are the slowest rank's, paths are absolute.

    Attributes:
        losses: of this process's steps: `losses[i]` is of step `first_step + i`, the mean over the global batch.
        fell_back_from: damaged checkpoints that resume=latest skipped, newest first.
        loaded_digest: of the state right after the load that resumed the run.
        checkpoints: the saves of this process.
        skipped: steps whose save was skipped, because the one before was still being written (`save.when_busy=skip`).
        load_s: of the last load of this process, that of `load.reread` included.
        requests: of that load to the object store, of all ranks: kind -> their number, and the bytes that they carried.
        tags: of the config.
    """

    world_size: int
    first_step: int = 1
    final_step: int = 0
    losses: list[float] = field(default_factory=list)
    resumed_from: str | None = None
    fell_back_from: list[str] = field(default_factory=list)
    loaded_digest: str | None = None
    state_digest: str | None = None
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    load_s: float | None = None
    bytes_read: int | None = None
    bytes_needed: int | None = None
    requests: dict[str, dict[str, int]] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)

    def add_resume(self, loaded: LoadReport, digest: str) -> None:
        step = int(loaded.checkpoint_id)
        self.first_step, self.final_step = step + 1, step
        self.resumed_from = str(loaded.path)
        self.fell_back_from = [str(path) for path in loaded.fell_back_from]
        self.loaded_digest = digest
        self.add_load(loaded)

    def add_load(self, loaded: LoadReport) -> None:
        self.load_s, self.bytes_read, self.bytes_needed = loaded.load_s, loaded.bytes_read, loaded.bytes_needed
        self.requests = _by_name(loaded.requests)

    def add_step(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        self.final_step = step

    def add_saves(self, reports: Sequence[SaveReport]) -> Sequence[SaveReport]:
        """Add the saves of this process that are new, and return them."""
        new = reports[len(self.checkpoints) :]
        for saved in new:
            entry = {"path": str(saved.path), "step": int(saved.checkpoint_id), "bytes": saved.bytes}
            entry |= {"save_s": saved.save_s, "blocked_s": saved.blocked_s}
            self.checkpoints.append(entry | ({"requests": _by_name(saved.requests)} if saved.requests else {}))
        return new

    def as_dict(self) -> dict[str, Any]:
        """Return all, `requests` and `tags` if there are any."""
        return {name: value for name, value in asdict(self).items() if name not in ("requests", "tags") or value}


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write a run's summary.json atomically, and return its path.

    Raises:
        StorageError: the file cannot be written: the folder was removed, or the disk is full.
    """
    path = run_dir / SUMMARY_NAME
    with telling(f"{path} cannot be written", "was the folder removed?"):
        replace_durably(path, (json.dumps(summary, indent=2) + "\n").encode())
    return path


class _LinesOfJob(io.TextIOBase):
    """The log of a job of a sweep. Opened for each write: a run says its last words when all else is closed."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, text: str) -> int:
        with open(self._path, "a", encoding="utf-8") as file:
            return file.write(text)


def console_of(cfg: Mapping[str, Any]) -> Console:
    """Return the console of a run: stdout, or the log of a job of a sweep."""
    path = cfg.get(LINES_TO)
    return DataConsole(soft_wrap=True, file=None if path is None else _LinesOfJob(path))


class Report:
    """The progress of a run: one live line on a terminal, some lines elsewhere; figures for `logger=`.

    Args:
        shown: False on every rank but one.
        topology: of the job, whose progress is shown during long saves and loads; None: none is.
        console: None: `console_of` the config.

    Attributes:
        metrics: its figures; None where `shown` is False.

    Raises:
        ConfigurationError: the package that `report` names cannot be imported.
    """

    def __init__(
        self, cfg: Mapping[str, Any], *, shown: bool, topology: Topology | None = None, console: Console | None = None
    ) -> None:
        self.cfg = cfg
        self.steps: int = cfg["train"]["steps"]
        self.console = console or (console_of(cfg) if shown else DataConsole(quiet=True))
        self._topology = topology
        is_live = self.console.is_terminal and not self.console.quiet
        self._line = LiveLine(self.console, self.steps, cfg["train"]["batch_size"]) if is_live else None
        self.metrics = Metrics(cfg) if shown else None
        self._losses: dict[int, float] = {}  # of the steps since the last committed save
        self._started = time.monotonic()
        self._is_first = True

    @contextmanager
    def running(self, first_step: int) -> Iterator[None]:
        """Show the progress of the steps from `first_step` on, inside the block."""
        self._started = time.monotonic()
        if first_step > self.steps:
            self._say(f"the run is at step {first_step - 1} already; nothing to do up to train.steps={self.steps}")
        if self._line is None:
            yield
            return
        self._line.begin(first_step - 1)
        with self._line.shown():
            yield

    @contextmanager
    def moving(self, what: str) -> Iterator[None]:
        """Show the bytes that move inside the block, on a terminal, once it takes more than two seconds."""
        if self._line is None or self._topology is None:
            yield
            return
        if (num_ranks := self._topology.world_size) > 1:
            what = f"{what}, rank 0 of {num_ranks}"
        before = self._topology.on_progress
        with self._line.moving(what) as count:
            self._topology.on_progress = count
            try:
                yield
            finally:
                self._topology.on_progress = before

    def step(self, step: int, loss: float, saved: Sequence[SaveReport]) -> None:
        """Show a step, and the saves that were committed since the last one."""
        self.trained(step, loss)
        self.saved(saved)
        if self._line is not None:
            self._line.step(step, loss)
        elif not saved and (self._is_first or step % max(1, self.steps // _LINES) == 0):
            self._say(self._step_line(step, loss))
        self._is_first = False

    def trained(self, step: int, loss: float) -> None:
        """Note the loss of a step, which is shown when a save of it is committed."""
        self._losses[step] = loss
        self._add(step, {"train/loss": loss})

    def saved(self, saved: Sequence[SaveReport]) -> None:
        """Show saves that were committed, each with the loss of its step. While there is a live line, only long ones get another."""
        for save in saved:
            step = int(save.checkpoint_id)
            figures = {"save_s": save.save_s, "blocked_s": save.blocked_s, "bytes": save.bytes}
            self._add(step, {f"checkpoint/{name}": value for name, value in figures.items()})
            if self._line is not None:
                self._line.saved(save)
            if self._line is None or not self._line.is_shown or save.save_s > SHOWN_AFTER_S:
                start = f"{self._step_line(step, self._losses[step])}  " if step in self._losses else ""
                self._say(f"{start}{save}")
            self._losses = {other: loss for other, loss in self._losses.items() if other > step}

    def resumed(self, loaded: LoadReport) -> None:
        """Show the checkpoint that was resumed, those that were skipped, and the keys of the config that differ."""
        if loaded.fell_back_from:
            damaged, are = loaded.fell_back_from, "is" if len(loaded.fell_back_from) == 1 else "are"
            self._say(
                f"WARNING: resume=latest fell back to {loaded.path}, because {', '.join(damaged)} {are} damaged",
                style="bold red",
            )
        step = int(loaded.checkpoint_id)
        if self.metrics is not None:
            self.metrics.first_step = step + 1
        self._add_load(loaded)
        self._say(str(loaded))
        for line in loaded.summary().splitlines():
            self._say(f"  {line}")
        for line in config_differences(loaded.config_text, self.cfg) if loaded.config_text else []:
            self._say(f"  config differs: {line}")

    def reread(self, loaded: LoadReport) -> None:
        self._add_load(loaded)
        self._say(f"read back {Path(loaded.path).name}, bit for bit: {loaded.figures()}")

    def ended(self, step: int, *, by_callback: bool) -> None:
        """Say why a run ends before its last step, if nothing else says it."""
        if by_callback and step < self.steps:
            self._say(f"callbacks end the run at step {step}")

    def done(self, summary: Summary, path: Path) -> None:
        took = time.monotonic() - self._started
        if summary.losses:
            first, last = summary.losses[0], summary.losses[-1]
            speed = len(summary.losses) * self.cfg["train"]["batch_size"] / took
            self._say(
                f"trained {len(summary.losses)} of {self.steps} steps in {took:.1f} s, {samples_a_second(speed)}, "
                f"loss {first:.4f} -> {last:.4f}"
            )
        self._say(f"state digest {summary.state_digest}, summary in {path}")

    def updated(self, step: int, update: Mapping[str, Any], staleness_s: float) -> None:
        """Note an update of rollouts.

        Args:
            staleness_s: seconds from the end of the step until the rollouts had its weights.
        """
        if not update.get("num_bytes"):  # no rollout has come
            return
        figures = {"blocked_s": update["blocked_s"], "bytes": update["num_bytes"], "staleness_s": staleness_s}
        self._add(step, {f"sync/{name}": value for name, value in figures.items()})

    def close(self) -> None:
        """Write the figures that are buffered."""
        if self.metrics is not None:
            self.metrics.close()

    def _add(self, step: int, figures: Mapping[str, float]) -> None:
        if self.metrics is not None:
            self.metrics.add(step, figures)

    def _add_load(self, loaded: LoadReport) -> None:
        figures = {"load_s": loaded.load_s, "bytes_read": loaded.bytes_read}
        self._add(int(loaded.checkpoint_id), {f"checkpoint/{name}": value for name, value in figures.items()})

    def _step_line(self, step: int, loss: float) -> str:
        return f"step {step:>6}/{self.steps}  loss {loss:.4f}"

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style)


def config_differences(saved: str, now: Mapping[str, Any]) -> list[str]:
    """Return a line for each key whose value differs from the checkpoint's config.yaml; one line if that file is no config.

    `resume` is left out. The keys of the run's folder, and of paths in it, share the last line. Another choice of a group is one line
    with the names of both choices; keys that only one of them has are not named. Components follow from the layout, and share its line.
    """
    try:
        before = values_of(saved)
    except CorruptCheckpointError as error:
        return [str(error)]
    after = by_dotted_key({key: value for key, value in now.items() if key not in OF_THIS_START})
    absent = object()
    differing = [
        key
        for key in sorted({*before, *after})
        if before.get(key, absent) != after.get(key, absent) and key != "resume" and not key.startswith(_wired_keys())
    ]
    moved = [key for key in _FOLDER_KEYS if key in differing]
    moved += [key for key in differing if key not in moved and _has_moved(before, after, key)]
    groups = [
        key.removesuffix(_TARGET) for key in differing if key.endswith(_TARGET) and key in before and key in after
    ]
    listed = [*moved]
    lines = []
    for group in groups:
        listed += [f"{group}{_TARGET}"]
        listed += [key for key in differing if key.startswith(f"{group}.") and (key in before) != (key in after)]
        follow = [key for key in differing if key.startswith("components.")] if group == "parallel" else []
        listed += follow
        choices = [_choice(group, str(values[f"{group}{_TARGET}"])) for values in (before, after)]
        lines.append(f"{group}: {' -> '.join(choices)}{_with_it(follow)}")
    lines += [_difference(before, after, key) for key in differing if key not in listed]
    if moved:
        lines.append(_difference(before, after, moved[0]) + _with_it(moved[1:]))
    return lines


def _with_it(keys: Sequence[str]) -> str:
    return f", and with it {', '.join(keys)}" if keys else ""


@functools.cache
def _choice(group: str, target: str) -> str:
    """Return the name of the choice of a group that makes an object of this class; the class if there is no such choice."""
    for file in sorted(CONF.glob(f"{group}/*.yaml")):
        if OmegaConf.load(file).get("_target_") == target:
            return file.stem
    return target


def _has_moved(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    """Whether a value is a path in the run's folder, and differs by that folder alone."""
    was, now = before.get(key), after.get(key)
    if not (isinstance(was, str) and isinstance(now, str)):
        return False
    folders = [(str(before[key]), str(after[key])) for key in _FOLDER_KEYS[1:] if key in before and key in after]
    return any(was.startswith(f"{old}/") and now == new + was.removeprefix(old) for old, new in folders)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> str:
    return f"{key}: {_shown(before, key)} -> {_shown(after, key)}"


@functools.cache
def _wired_keys() -> tuple[str, ...]:
    """The keys of `coordinator` that repeat keys elsewhere in the config, such as `coordinator.saves`; users set the others."""
    node = OmegaConf.to_container(OmegaConf.load(CONF / "coordinator" / "default.yaml"), resolve=False)
    assert isinstance(node, dict)
    return tuple(f"coordinator.{key!s}" for key, value in node.items() if "${" in str(value))


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "(not there)"
    value = values[key]
    return str(value) if isinstance(value, str) else json.dumps(value)


def _by_name(requests: Mapping[str, Sequence[int]]) -> dict[str, dict[str, int]]:
    return {kind: {"requests": number, "bytes": num_bytes} for kind, (number, num_bytes) in requests.items()}
