"""The page of a sweep: its table with bars, what differs between the jobs, advice, and failed jobs with their sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.filesize import decimal

from recipes.support.page import Cell, Column, Markup, Row, bar, dotted, hue, page, section, table, tag
from recipes.support.sweep_advice import advice, differing, overrides_of, spread_of
from recipes.support.tables import counted

_FIGURES = {
    "save_s": ("save s", "Seconds of a save: mean over the saves of the job"),
    "load_s": ("load s", "Seconds to load the last checkpoint"),
    "blocked_s": ("blocked s", "Seconds that training waits for a save: mean over the saves of the job"),
    "bytes_read": ("read", "Bytes that all ranks read to load the last checkpoint"),
    "bytes_written": ("written", "Bytes of the last checkpoint"),
}
_WITH_BARS = ("save_s", "load_s", "blocked_s", "bytes_read")

Job = Mapping[str, Any]


def sweep_page(jobs: Sequence[Job], names: Mapping[str, str], digest_digits: int) -> str:
    """Return the page.

    Args:
        jobs: the rows of sweep.json.
        names: key of an override -> the short name that heads its column.
        digest_digits: how many digits tell the digests apart.
    """
    failed = [job for job in jobs if job["error"] is not None]
    keys = differing(jobs)
    shared = [one for one in jobs[0]["overrides"] if one.partition("=")[0] not in keys]
    lead = [f"{len(failed)} of them failed. " if failed else ""]
    lead += [f"They differ in {', '.join(keys)}." if keys else "They do not differ in a key."]
    return page(
        f"Sweep of {counted(len(jobs), 'job')}",
        tag("p", lead, class_="lead"),
        [tag("p", one, class_="advice") for one in advice(jobs)],
        section("Jobs", _table(jobs, keys, names, digest_digits), note=_how_to_read(jobs)),
        section("In all jobs", tag("p", (tag("span", one, class_="chip") for one in shared))) if shared else "",
        tag("footer", "All digits, digests and overrides are in sweep.json beside this page."),
    )


def seconds(value: float) -> str:
    """Return seconds with milliseconds, below 100."""
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _how_to_read(jobs: Sequence[Job]) -> str:
    spreads = any(len(job.get("save_s_each") or ()) > 1 for job in jobs)
    line = " The line over a bar reaches from the fastest to the slowest save of the job." if spreads else ""
    return f"A bar is full at the greatest figure of its column; the least is green.{line} Click on a heading to sort."


def _table(jobs: Sequence[Job], keys: Sequence[str], names: Mapping[str, str], digest_digits: int) -> Markup:
    columns = [Column("job", is_number=True), *(Column(names[key], tip=key) for key in keys)]
    columns += [Column(heading, is_number=True, tip=tip) for heading, tip in _FIGURES.values()]
    columns += [Column("digest", tip="Of the bits of model and optimizer at the end: equal color, equal state")]
    sound = [job for job in jobs if job["error"] is None]
    limits = {key: _limits(sound, key) for key in _FIGURES}
    digests = {digest: at for at, digest in enumerate(dict.fromkeys(job["state_digest"] for job in sound))}
    rows = []
    for number, job in enumerate(jobs):
        overrides = overrides_of(job)
        cells = [Cell(str(number), number), *(Cell(overrides.get(key, "-") or "yes") for key in keys)]
        if job["error"] is not None:
            cells.append(Cell([tag("strong", "failed: "), job["error"]], span=len(_FIGURES) + 1))
        else:
            cells += [_figure(job, key, limits[key]) for key in _FIGURES]
            digest = job["state_digest"]
            cells.append(Cell(dotted(hue(digests[digest]), tag("code", digest[:digest_digits])), tip=digest))
        rows.append(Row(cells, class_="failed" if job["error"] is not None else None))
    return table(columns, rows, name="jobs")


class _Limits(NamedTuple):
    """The least and the greatest figure of a job, and the greatest of any single save."""

    least: float
    greatest: float
    most: float


def _limits(jobs: Sequence[Job], key: str) -> _Limits:
    known = [job for job in jobs if job[key] is not None]
    figures = [job[key] for job in known] or [0]
    return _Limits(min(figures), max(figures), max((spread_of(job, key)[1] for job in known), default=0))


def _figure(job: Job, key: str, limits: _Limits) -> Cell:
    value = job[key]
    if value is None:
        return Cell("-", "")
    shown = decimal(value) if key.startswith("bytes") else seconds(value)
    if key not in _WITH_BARS:
        return Cell(shown, value, tip=f"{value} bytes")
    is_best = value == limits.least < limits.greatest
    low, high = spread_of(job, key)
    number = tag("strong", shown, class_="best") if is_best else shown
    return Cell(
        [number, bar(value, limits.most, low=low, high=high, best=is_best)], value, tip=_tip(job, key, value, low, high)
    )


def _tip(job: Job, key: str, value: float, low: float, high: float) -> str:
    if key == "bytes_read":
        needed = job.get("bytes_needed")
        return f"{value} bytes" + (f", {value / needed:.2f} times what the ranks needed" if needed else "")
    each = job.get(f"{key}_each") or ()
    return f"{value:.6f} s" + (f", {low:.3f} to {high:.3f} in {counted(len(each), 'save')}" if len(each) > 1 else "")
