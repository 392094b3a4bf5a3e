"""The output of a run: lines or a progress bar on the terminal, and summary.json at the end."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ckpt.errors import CorruptCheckpointError, StorageError, sentence
from ckpt.format.durable import replace_durably
from ckpt.loading.loader import LoadReport
from ckpt.saving.prepared_save import SaveReport
from recipes.support import CONF
from recipes.support.config import GIVEN, by_dotted_key, values_of

SUMMARY_NAME = "summary.json"

_FOLDER_KEYS = ("run_name", "output_dir", "run_dir")
"""The keys of a run's folder, and what else depends on them is below it."""

_LINES = 12
"""About the number of lines that a run prints where there is no progress bar."""


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

    def add_resume(self, loaded: LoadReport, digest: str) -> None:
        step = int(loaded.checkpoint_id)
        self.first_step, self.final_step = step + 1, step
        self.resumed_from = str(loaded.path)
        self.fell_back_from = [str(path) for path in loaded.fell_back_from]
        self.loaded_digest = digest
        self.add_load(loaded)

    def add_load(self, loaded: LoadReport) -> None:
        self.load_s, self.bytes_read, self.bytes_needed = loaded.load_s, loaded.bytes_read, loaded.bytes_needed

    def add_step(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        self.final_step = step

    def add_saves(self, reports: Sequence[SaveReport]) -> Sequence[SaveReport]:
        """Add the saves of this process that are new, and return them."""
        new = reports[len(self.checkpoints) :]
        for saved in new:
            entry = {"path": str(saved.path), "step": int(saved.checkpoint_id), "bytes": saved.bytes}
            self.checkpoints.append(entry | {"save_s": saved.save_s, "blocked_s": saved.blocked_s})
        return new

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write a run's summary.json atomically, and return its path.

    Raises:
        StorageError: the file cannot be written: the folder was removed, or the disk is full.
    """
    path = run_dir / SUMMARY_NAME
    try:
        replace_durably(path, (json.dumps(summary, indent=2) + "\n").encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {sentence(error)}; was the folder removed?") from error
    return path


class Report:
    """The progress of a run: a bar on a terminal, lines elsewhere.

    Args:
        shown: False on every rank but one.
    """

    def __init__(self, cfg: Mapping[str, Any], *, shown: bool) -> None:
        self.cfg = cfg
        self.steps: int = cfg["train"]["steps"]
        self.console = Console(quiet=not shown, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._started = time.monotonic()
        self._is_first = True

    @contextmanager
    def running(self, first_step: int) -> Iterator[None]:
        """Show the progress of the steps from `first_step` on, inside the block."""
        self._started = time.monotonic()
        if first_step > self.steps:
            self._say(f"the run is at step {first_step - 1} already; nothing to do up to train.steps={self.steps}")
        if not self.console.is_terminal or self.console.quiet:
            yield
            return
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[loss]}"))
        # No refresh thread, so that a debugger in the training loop has the terminal alone.
        with Progress(*columns, TimeRemainingColumn(), console=self.console, auto_refresh=False) as self._bar:
            self._task = self._bar.add_task("", total=self.steps, completed=first_step - 1, loss="")
            yield
        self._bar = None

    def step(self, step: int, loss: float, saved: Sequence[SaveReport]) -> None:
        """Show a step, and the saves that were committed since the last one."""
        line = f"step {step:>6}/{self.steps}  loss {loss:.4f}"
        if len(saved) == 1 and int(saved[0].checkpoint_id) == step:
            self._say(f"{line}  {_saved(saved[0])}")
        elif saved:
            self.saved(saved)
        elif self._bar is None and (self._is_first or step % max(1, self.steps // _LINES) == 0):
            self._say(line)
        self._is_first = False
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"loss {loss:.4f}", refresh=True)

    def saved(self, saved: Sequence[SaveReport]) -> None:
        """Show saves that were committed in the background."""
        for one in saved:
            self._say(f"{_saved(one)}, of which training waited {one.blocked_s:.3f} s")

    def resumed(self, loaded: LoadReport) -> None:
        """Show the checkpoint that was resumed, those that were skipped, and the keys of the config that differ."""
        if loaded.fell_back_from:
            damaged, are = loaded.fell_back_from, "is" if len(loaded.fell_back_from) == 1 else "are"
            self._say(
                f"WARNING: resume=latest fell back to {loaded.path}, because {', '.join(damaged)} {are} damaged",
                style="bold red",
            )
        step = int(loaded.checkpoint_id)
        self._say(f"resumed {loaded.path} at step {step}: {_speed(loaded.bytes_read, loaded.load_s)}")
        for line in loaded.summary().splitlines():
            self._say(f"  {line}")
        for line in config_differences(loaded.config_text, self.cfg) if loaded.config_text else []:
            self._say(f"  config differs: {line}")

    def reread(self, loaded: LoadReport) -> None:
        self._say(f"read back {Path(loaded.path).name}, bit for bit: {_speed(loaded.bytes_read, loaded.load_s)}")

    def done(self, summary: Summary, path: Path) -> None:
        took = time.monotonic() - self._started
        if summary.losses:
            first, last = summary.losses[0], summary.losses[-1]
            self._say(
                f"trained {len(summary.losses)} of {self.steps} steps in {took:.1f} s, loss {first:.4f} -> {last:.4f}"
            )
        self._say(f"state digest {summary.state_digest}, summary in {path}")

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style)


def config_differences(saved: str, now: Mapping[str, Any]) -> list[str]:
    """Return a line for each key whose value differs from the checkpoint's config.yaml; one line if that file is no config.

    `resume` is left out. The keys of the run's folder, and of paths in it, share the last line.
    """
    try:
        before = values_of(saved)
    except CorruptCheckpointError as error:
        return [str(error)]
    after = by_dotted_key({key: value for key, value in now.items() if key != GIVEN})
    absent = object()
    differing = [
        key
        for key in sorted({*before, *after})
        if before.get(key, absent) != after.get(key, absent) and key != "resume" and not key.startswith(_wired_keys())
    ]
    moved = [key for key in _FOLDER_KEYS if key in differing]
    moved += [key for key in differing if key not in moved and _has_moved(before, after, key)]
    lines = [_difference(before, after, key) for key in differing if key not in moved]
    if moved:
        others = f", and with it {', '.join(moved[1:])}" if moved[1:] else ""
        lines.append(_difference(before, after, moved[0]) + others)
    return lines


def _has_moved(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> bool:
    """Whether a value is a path in the run's folder, and differs by that folder alone."""
    was, now = before.get(key), after.get(key)
    if not (isinstance(was, str) and isinstance(now, str)):
        return False
    folders = [(str(before[one]), str(after[one])) for one in _FOLDER_KEYS[1:] if one in before and one in after]
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


def _saved(one: SaveReport) -> str:
    linked = f", {(one.bytes - one.written_bytes) / 1e6:.1f} MB linked" if one.written_bytes < one.bytes else ""
    return f"saved {Path(one.path).name}: {_speed(one.bytes, one.save_s)}{linked}"


def _speed(num_bytes: int, seconds: float) -> str:
    rate = num_bytes / seconds / 1e9 if seconds > 0 else 0.0
    return f"{seconds:.3f} s, {num_bytes / 1e6:.1f} MB, {rate:.2f} GB/s"
