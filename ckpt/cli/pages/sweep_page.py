"""The page of a sweep: its table with bars, what differs between the jobs, advice, and failed jobs with their sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.cli.pages.page import Served, hue, page
from ckpt.cli.pages.sweep_advice import advice, differing, overrides_of, spread_of, why_no_advice
from ckpt.cli.tables import counted

_FIGURES = {
    "save_s": ("save s", "seconds", "Seconds of a save: mean over the saves of the job"),
    "load_s": ("load s", "seconds", "Seconds to load the last checkpoint"),
    "blocked_s": ("blocked s", "seconds", "Seconds that training waits for a save: mean over the saves of the job"),
    "bytes_read": ("read", "bytes", "Bytes that all ranks read to load the last checkpoint"),
    "bytes_written": ("written", "bytes", "Bytes of the last checkpoint"),
}
_WITHOUT_BAR = "bytes_written"

Job = Mapping[str, Any]


def sweep_page(jobs: Sequence[Job], served: Served | None = None) -> str:
    """Return the page.

    Args:
        jobs: the rows of sweep.json.
    """
    sound = [job for job in jobs if job["error"] is None]
    num_failed = len(jobs) - len(sound)
    keys = differing(jobs)
    differ = f"They differ in {', '.join(keys)}." if keys else "They do not differ in a key."
    spreads = any(len(job.get("save_s_each") or ()) > 1 for job in jobs)
    line = " The line over a bar reaches from the fastest to the slowest save of the job." if spreads else ""
    columns = {key: _column(jobs, key) for key in _FIGURES}
    return page(
        "sweep.html",
        f"Sweep of {counted(len(jobs), 'job')}",
        lead=f"{num_failed} of them failed. {differ}" if num_failed else differ,
        served=served,
        advice=advice(jobs),
        why_none=why_no_advice(jobs),
        note=f"A bar is full at the greatest figure of its column; the least is green.{line} Click on a heading to sort.",
        jobs=[
            {**job, "number": number, "choices": overrides_of(job), "figures": {key: cells[number] for key, cells in columns.items()}}
            for number, job in enumerate(jobs)
        ],
        keys=keys,
        names=short_names(keys),
        figures=_FIGURES,
        hues={digest: hue(at) for at, digest in enumerate(dict.fromkeys(job["state_digest"] for job in sound))},
        digits=digest_digits(jobs),
        shared=[override for override in jobs[0]["overrides"] if override.partition("=")[0] not in keys],
    )


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Shorten each dotted key to its last part, or to as many last parts as make it unique."""
    names = {}
    for key in keys:
        parts = key.split(".")
        shorter = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [f".{other}" for other in keys if other != key]
        names[key] = next(name for name in shorter if name == key or not any(o.endswith(f".{name}") for o in others))
    return names


def digest_digits(rows: Sequence[Job]) -> int:
    """The number of digits that make all digests of the table distinct: nearly always 8."""
    digests = {row["state_digest"] for row in rows if not row["error"]}
    return next(n for n in range(8, 33) if n == 32 or len({digest[:n] for digest in digests}) == len(digests))


def _column(jobs: Sequence[Job], key: str) -> list[dict[str, Any]]:
    """The figures of all jobs. Bars are full at the greatest figure of any single save."""
    known = [job for job in jobs if job.get(key) is not None]
    least, greatest = (limit((job[key] for job in known), default=0) for limit in (min, max))
    full = max((spread_of(job, key)[1] for job in known), default=0) or 1.0
    cells = []
    for job in jobs:
        value = job.get(key)
        low, high = (0, 0) if value is None else spread_of(job, key)
        has_bar = value is not None and key != _WITHOUT_BAR
        limits = {"low": low, "high": high, "full": full if has_bar else None}
        cells.append({"value": value, "tip": _tip(job, key), "is_best": has_bar and value == least < greatest, **limits})
    return cells


def _tip(job: Job, key: str) -> str | None:
    value, needed, each = job.get(key), job.get("bytes_needed"), job.get(f"{key}_each") or ()
    if value is None:
        return None
    if key.startswith("bytes"):
        times = f", {value / needed:.2f} times what the ranks needed" if needed and key == "bytes_read" else ""
        return f"{value} bytes{times}"
    spread = f", {min(each):.3f} to {max(each):.3f} in {counted(len(each), 'save')}" if len(each) > 1 else ""
    return f"{value:.6f} s{spread}"
