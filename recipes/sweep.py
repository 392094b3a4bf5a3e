"""The table of a sweep: one row per job, written anew after every job, so that a broken sweep leaves what it had.

Jobs may run at the same time in several processes (`hydra/launcher=joblib`, `submitit_local`): each leaves its row as a file of its own,
and whoever writes the table gathers all rows. The command does so once more at the end.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.report import SUMMARY_NAME

_ROWS = ".rows"
"""The folder of the jobs' rows, as long as the sweep runs."""

COLUMNS = ("save s", "load s", "blocked s", "written", "read", "state digest")


class SweepTable(Callback):
    """A Hydra callback that keeps sweep.json, sweep.txt and sweep.svg in the folder of the sweep.

    It holds nothing between jobs, the rows are in the file. Hydra calls no `on_multirun_end` when a job has failed.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if _is_lead():
            for name in ("sweep.json", "sweep.txt", "sweep.svg"):
                (_folder(config) / name).unlink(missing_ok=True)
            shutil.rmtree(_folder(config) / _ROWS, ignore_errors=True)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if str(config.hydra.mode).endswith("MULTIRUN") and _is_lead():
            folder = _folder(config)
            (folder / _ROWS).mkdir(exist_ok=True)
            _write(folder / _ROWS / f"{config.hydra.job.num:05d}.json", json.dumps(row_of(job_return)))
            with contextlib.suppress(OSError):  # a job that was refused has made no file
                Path(str(config.hydra.runtime.output_dir)).rmdir()
            _leave_table(folder)


def row_of(job: JobReturn) -> dict[str, Any]:
    """Return what the table and sweep.json say of a job.

    Seconds are the mean of the job's saves, bytes are those of one checkpoint: its last, which `load.reread` read back.
    """
    row: dict[str, Any] = {"overrides": [str(override) for override in job.overrides or ()], "error": None}
    if job.status is not JobStatus.COMPLETED:
        error = job._return_value  # the property raises it
        return row | {"error": " ".join(str(error).split()) or type(error).__name__}
    assert job.hydra_cfg is not None
    run_dir = Path(str(job.hydra_cfg.hydra.runtime.output_dir))
    summary = json.loads((run_dir / SUMMARY_NAME).read_text(encoding="utf-8"))
    saves = summary["checkpoints"]
    return row | {
        "save_s": _mean([save["save_s"] for save in saves]),
        "load_s": summary["load_s"],
        "blocked_s": _mean([save["blocked_s"] for save in saves]),
        "bytes_written": saves[-1]["bytes"] if saves else None,
        "bytes_read": summary["bytes_read"],
        "state_digest": summary["state_digest"],
        "run_dir": str(run_dir),
    }


def show(folder: Path) -> None:
    """Write the table of the sweep in `folder` a last time, and print it, if a job has run there."""
    rows = _leave_table(folder)
    shutil.rmtree(folder / _ROWS, ignore_errors=True)
    if rows:
        console = Console()
        wide = console if console.is_terminal else Console(width=_WIDTH)
        wide.print(table_of(rows))
        print(f"sweep.json, sweep.txt and sweep.svg are in {folder}", flush=True)


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Return the rows as a rich table. A failed job's row holds its sentence; overrides of all jobs stand below it."""
    failed = any(row["error"] for row in rows)
    common = [override for override in rows[0]["overrides"] if all(override in row["overrides"] for row in rows[1:])]
    common = common if len(rows) > 1 else []
    table = Table(
        title=f"{len(rows)} jobs: seconds of one save and one load, bytes of one checkpoint over all ranks",
        caption=f"in all jobs: {' '.join(common)}" if common else None,
    )
    table.add_column("overrides", overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "state digest" else "right", no_wrap=True)
    if failed:
        table.add_column("error")
    for row in rows:
        own = " ".join(override for override in row["overrides"] if override not in common)
        table.add_row(Text(own), *_cells(row), *([Text(row["error"] or "")] if failed else []))
    return table


_WIDTH = 200
"""Characters of the table where no terminal sets a width."""


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [""] * len(COLUMNS)
    seconds = [_number(row[name], "{:.3f}") for name in ("save_s", "load_s", "blocked_s")]
    sizes = [_number(row[name], "{:,}") for name in ("bytes_written", "bytes_read")]
    return [*seconds, *sizes, row["state_digest"]]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _leave_table(folder: Path) -> list[dict[str, Any]]:
    """Gather the rows that there are, in the order of the jobs, and write the table if there are any."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / _ROWS).glob("*.json"))]
    if rows:
        _write(folder / "sweep.json", json.dumps(rows, indent=2) + "\n")
        _draw(folder, rows)
    return rows


def _draw(folder: Path, rows: list[dict[str, Any]]) -> None:
    console = Console(file=io.StringIO(), record=True, width=_WIDTH)
    console.print(table_of(rows))
    _write(folder / "sweep.svg", console.export_svg(title="sweep", clear=False))
    _write(folder / "sweep.txt", console.export_text())


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(
        f".{path.name}.{socket.gethostname()}-{os.getpid()}.unfinished"
    )  # jobs may end at a time
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)


def _folder(config: DictConfig) -> Path:
    return Path(str(config.hydra.sweep.dir)).absolute()


def _is_lead() -> bool:
    from recipes.ranks import rank_of_environment, ranks_exist

    return not ranks_exist() or rank_of_environment() == 0
