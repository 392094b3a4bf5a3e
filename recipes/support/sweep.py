"""A sweep: a line on stdout for each job when it has ended, and a table of one row per job.

The table is rewritten after every job, so that an interrupted sweep keeps its rows. What a job itself says is in its own log, `job.log`;
with `hydra.verbose=recipes` it is on stdout, between a line for the job's begin and one for its end.

Jobs may run at the same time in several processes (`hydra/launcher=joblib`, `submitit_local`): each job writes its row to a file of
its own, and then the table from all row files. The command writes the table once more at the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Group

from ckpt.cli.pages.page import figure
from ckpt.cli.pages.sweep_page import digest_digits, short_names, sweep_page
from ckpt.cli.tables import DataConsole, add_row, full_line, table_of
from ckpt.errors import printable
from ckpt.storage.files import replace_durably
from recipes.support.keys import as_typed
from recipes.support.report import SUMMARY_NAME

COLUMNS = ("save s", "load s", "blocked", "written", "read", "digest")
_ROWS = ".rows"
"""The folder of the row files while the sweep runs."""


class SweepTable(Callback):
    """Hydra callback: keeps sweep.json, sweep.txt and sweep.html in the folder of the sweep.

    Rows are in files, since other launchers run jobs in other processes, each with a copy of this object. Hydra calls no `on_multirun_end`
    when a job has failed.
    """

    _shared: Collection[str] = ()
    """The overrides of the command line that all jobs have."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if _is_lead():
            for name in ("sweep.json", "sweep.txt", "sweep.html"):
                (_folder(config) / name).unlink(missing_ok=True)
            shutil.rmtree(_folder(config) / _ROWS, ignore_errors=True)
            self._shared = _shared(config.hydra.overrides.task)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Say which job is under way: above its report, if `hydra.verbose` shows that; else on a terminal, until it ends."""
        if _is_of_sweep(config) and (config.hydra.verbose or _on_terminal()):
            print(self._beginning(config), end="\n" if config.hydra.verbose else "\r", flush=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if _is_of_sweep(config):
            folder = _folder(config)
            (folder / _ROWS).mkdir(exist_ok=True)
            row = row_of(job_return)
            replace_durably(folder / _ROWS / f"{config.hydra.job.num:05d}.json", json.dumps(row).encode())
            erased = "\x1b[K" if _on_terminal() else ""
            print(f"{erased}{self._beginning(config)}: {printable(_ending(row))}", flush=True)
            with contextlib.suppress(OSError):  # the folder of a refused job is empty
                Path(str(config.hydra.runtime.output_dir)).rmdir()
            _leave_table(folder)

    def _beginning(self, config: DictConfig) -> str:
        """Such as "job 3 ckpt=zarr launch.nproc_per_node=2": the overrides that not all jobs have."""
        own = [override for override in config.hydra.overrides.task if override not in self._shared]
        return printable(" ".join([f"job {config.hydra.job.num}", *map(as_typed, own)]))


def row_of(job: JobReturn) -> dict[str, Any]:
    """Return the row of a job in sweep.json.

    Seconds are the mean over the job's saves, which `save_s_each` and `blocked_s_each` list; bytes are of its last checkpoint, which
    `load.reread` reads back.
    """
    row: dict[str, Any] = {"overrides": [as_typed(override) for override in job.overrides or ()], "error": None}
    if job.status is not JobStatus.COMPLETED:
        error = job._return_value  # the property raises it
        return row | {"error": " ".join(str(error).split()) or type(error).__name__}
    assert job.hydra_cfg is not None
    run_dir = Path(str(job.hydra_cfg.hydra.runtime.output_dir))
    summary = json.loads((run_dir / SUMMARY_NAME).read_text(encoding="utf-8"))
    saves = summary["checkpoints"]
    return row | {
        "save_s": fmean(save["save_s"] for save in saves) if saves else None,
        "load_s": summary["load_s"],
        "blocked_s": fmean(save["blocked_s"] for save in saves) if saves else None,
        "bytes_written": saves[-1]["bytes"] if saves else None,
        "bytes_read": summary["bytes_read"],
        "bytes_needed": summary["bytes_needed"],
        "save_s_each": [save["save_s"] for save in saves],
        "blocked_s_each": [save["blocked_s"] for save in saves],
        "state_digest": summary["state_digest"] or "",  # of a sync_weights without checkpoints
        "run_dir": str(run_dir),
    }


def show(folder: Path) -> None:
    """Write the table of the sweep in `folder` a last time, and print it if a job has run."""
    rows = _leave_table(folder)
    shutil.rmtree(folder / _ROWS, ignore_errors=True)
    if rows:
        console = DataConsole()
        wide = console if console.is_terminal else DataConsole(width=_WIDTH)
        wide.print(sweep_table(rows))
        print(printable(f"sweep.json, sweep.txt and sweep.html are in {folder}"), flush=True)


def sweep_table(rows: list[dict[str, Any]]) -> Group:
    """Return the rows as a table that fits 80 columns, and the errors of failed jobs below it.

    A row shows the overrides that not all jobs share, one a line, with shortened keys. Below the table are the shared overrides and
    the full keys. sweep.json has everything in full.
    """
    first, *others = (row["overrides"] for row in rows)
    common = [override for override in first if others and all(override in other for other in others)]
    own = [[override.partition("=") for override in row["overrides"] if override not in common] for row in rows]
    short = short_names([key for of_job in own for key, _, _ in of_job])
    table = table_of("job", "overrides", *COLUMNS, right=(0, *range(2, 1 + len(COLUMNS))), wide=(1,))
    table.title = f"{len(rows)} jobs: seconds of a save and a load, bytes of one checkpoint"
    digits = digest_digits(rows)
    for number, (row, of_job) in enumerate(zip(rows, own, strict=True)):
        lines = [line for key, sign, value in of_job for line in _lines(f"{short[key]}{sign}", value)]
        add_row(table, str(number), lines, *_cells(row, digits))
    notes = [f"in all jobs: {' '.join(common)}"] if common else []
    shortened = [key for key, name in short.items() if name != key]
    notes += [f"keys in full: {', '.join(shortened)}"] if shortened else []
    notes += [f"job {number} failed: {row['error']}" for number, row in enumerate(rows) if row["error"]]
    return Group(table, *map(full_line, notes))


def _lines(key: str, value: str) -> list[str]:
    """An override on one line, or on two if it is long."""
    return [f"{key}{value}"] if len(key) + len(value) <= _OVERRIDE_WIDTH else [key, f"  {value}"]


_OVERRIDE_WIDTH = 20
"""Characters for an override in a table of 80 columns."""
_WIDTH = 200
"""Width of the table in files and in a pipe."""


def _cells(row: dict[str, Any], digest_digits: int) -> list[str]:
    if row["error"]:
        return ["failed", *[""] * (len(COLUMNS) - 1)]
    times = [figure(row[name], "seconds") for name in ("save_s", "load_s", "blocked_s")]
    sizes = [figure(row[name], "bytes") for name in ("bytes_written", "bytes_read")]
    return [*times, *sizes, row["state_digest"][:digest_digits]]


def _leave_table(folder: Path) -> list[dict[str, Any]]:
    """Read the row files in the order of the jobs, write the table if there are any, and return the rows."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / _ROWS).glob("*.json"))]
    if rows:
        text = io.StringIO()
        DataConsole(file=text, width=_WIDTH, force_terminal=False).print(sweep_table(rows))
        html = sweep_page(rows)
        for name, content in {"json": json.dumps(rows, indent=2) + "\n", "html": html, "txt": text.getvalue()}.items():
            replace_durably(folder / f"sweep.{name}", content.encode())
    return rows


def _shared(overrides: Iterable[str]) -> list[str]:
    """The overrides of a command line that all jobs have, as Hydra's sweeper gives them to each."""
    parsed = OverridesParser.create().parse_overrides([*overrides])
    single = [override for override in parsed if not override.is_sweep_override()]
    return [f"{override.get_key_element()}={override.get_value_element_as_str()}" for override in single]


def _ending(row: dict[str, Any]) -> str:
    """Such as "save 0.125 s, load 0.046 s, digest 6b076312", or why the job has failed."""
    if row["error"]:
        return f"failed: {row['error']}"
    times = [f"{name} {row[key]:.3f} s" for name, key in (("save", "save_s"), ("load", "load_s")) if row[key] is not None]
    digest = [f"digest {row['state_digest'][:8]}"] if row["state_digest"] else []
    return ", ".join([*times, *digest]) or "done, nothing was saved"


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _is_of_sweep(config: DictConfig) -> bool:
    return str(config.hydra.mode).endswith("MULTIRUN") and _is_lead()


def _folder(config: DictConfig) -> Path:
    return Path(str(config.hydra.sweep.dir)).absolute()


def _is_lead() -> bool:
    from recipes.support.ranks import rank_of_environment

    return rank_of_environment() == 0
