"""The page of a sweep: its table with bars, what differs between the jobs, advice, and failed jobs with their sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from recipes.support.page import figure, hue, page
from recipes.support.sweep_advice import advice, differing, overrides_of, spread_of
from recipes.support.tables import counted

_FIGURES = {
    "save_s": ("save s", "Seconds of a save: mean over the saves of the job"),
    "load_s": ("load s", "Seconds to load the last checkpoint"),
    "blocked_s": ("blocked s", "Seconds that training waits for a save: mean over the saves of the job"),
    "bytes_read": ("read", "Bytes that all ranks read to load the last checkpoint"),
    "bytes_written": ("written", "Bytes of the last checkpoint"),
}
_WITHOUT_BAR = "bytes_written"

Job = Mapping[str, Any]


class _Figure(NamedTuple):
    """A figure of a job.

    Attributes:
        low, high: of its single saves.
        full: what fills the bar; None: it has no bar.
    """

    value: float | None
    text: str
    tip: str | None = None
    is_best: bool = False
    low: float = 0
    high: float = 0
    full: float | None = None


def sweep_page(jobs: Sequence[Job], names: Mapping[str, str], digest_digits: int) -> str:
    """Return the page.

    Args:
        jobs: the rows of sweep.json.
        names: key of an override -> the short name that heads its column.
        digest_digits: how many digits tell the digests apart.
    """
    sound = [job for job in jobs if job["error"] is None]
    num_failed = len(jobs) - len(sound)
    keys = differing(jobs)
    differ = f"They differ in {', '.join(keys)}." if keys else "They do not differ in a key."
    spreads = any(len(job.get("save_s_each") or ()) > 1 for job in jobs)
    line = " The line over a bar reaches from the fastest to the slowest save of the job." if spreads else ""
    limits = {key: _limits(sound, key) for key in _FIGURES}
    return page(
        "sweep.html",
        f"Sweep of {counted(len(jobs), 'job')}",
        lead=f"{num_failed} of them failed. {differ}" if num_failed else differ,
        advice=advice(jobs),
        note=f"A bar is full at the greatest figure of its column; the least is green.{line} Click on a heading to sort.",
        jobs=[
            {**job, "number": number, "choices": overrides_of(job), "figures": {key: _figure(job, key, limits[key]) for key in _FIGURES}}
            for number, job in enumerate(jobs)
        ],
        keys=keys,
        names=names,
        figures=_FIGURES,
        hues={digest: hue(at) for at, digest in enumerate(dict.fromkeys(job["state_digest"] for job in sound))},
        digits=digest_digits,
        shared=[one for one in jobs[0]["overrides"] if one.partition("=")[0] not in keys],
    )


class _Limits(NamedTuple):
    """The least and the greatest figure of a job, and the greatest of any single save."""

    least: float
    greatest: float
    full: float


def _limits(jobs: Sequence[Job], key: str) -> _Limits:
    known = [job for job in jobs if job[key] is not None]
    figures = [job[key] for job in known] or [0]
    return _Limits(min(figures), max(figures), max((spread_of(job, key)[1] for job in known), default=0) or 1.0)


def _figure(job: Job, key: str, limits: _Limits) -> _Figure:
    value = job.get(key)
    if value is None:
        return _Figure(None, "-")
    text = figure(value, "seconds" if key.endswith("_s") else "bytes")
    if key == _WITHOUT_BAR:
        return _Figure(value, text, f"{value} bytes")
    is_best = value == limits.least < limits.greatest
    return _Figure(value, text, _tip(job, key, value), is_best, *spread_of(job, key), limits.full)


def _tip(job: Job, key: str, value: float) -> str:
    if key == "bytes_read":
        needed = job.get("bytes_needed")
        return f"{value} bytes" + (f", {value / needed:.2f} times what the ranks needed" if needed else "")
    low, high = spread_of(job, key)
    each = job.get(f"{key}_each") or ()
    return f"{value:.6f} s" + (f", {low:.3f} to {high:.3f} in {counted(len(each), 'save')}" if len(each) > 1 else "")
