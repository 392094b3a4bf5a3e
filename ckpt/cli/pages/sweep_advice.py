"""Advice from the figures of a sweep: which choice of a key is better here, and what it costs.

Jobs are compared in pairs that differ in one key only. A choice is advised if it needs fewer seconds or bytes than every other choice in
every pair, by more than the saves of a job differ among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ADVISED = ("ckpt", "strategy", "save", "coordinator", "device", "load")
"""Keys, and groups of keys, that a user chooses for the checkpoints alone. The others are the work itself."""
_LEAST_GAIN = 1.1
"""A smaller ratio is not advised."""
_LEAST_GAIN_OF_ONE = 1.25
"""The same where both figures were measured once."""

Job = Mapping[str, Any]
"""A row of sweep.json."""


@dataclass(frozen=True)
class Measure:
    """A figure of a job.

    Attributes:
        key: in the row.
        fewer, more: clauses about a choice that needs less or more of it than another; `{}` is the ratio.
        where: the situation in which it counts most.
    """

    key: str
    fewer: str
    more: str
    where: str


_READ = Measure("bytes_read", "reads {} of the bytes", "reads {} times as many bytes", "storage is shared")
_LOAD = Measure("load_s", "loads in {} of the time", "takes {} times as long to load", "restarts are frequent")
_SAVE = Measure("save_s", "saves in {} of the time", "takes {} times as long to save", "saves are frequent")
_BLOCKED = Measure(
    "blocked_s", "blocks training for {} of the time", "blocks training {} times as long", "training must not wait"
)


@dataclass(frozen=True)
class _Effect:
    """How much of a measure one choice needs, as parts of what another one needs.

    Attributes:
        ratios: one for each pair of jobs; empty: not known for all of them.
        is_clear: every pair says the same, by more than the saves of its jobs differ among themselves.
    """

    measure: Measure
    ratios: Sequence[float]
    is_clear: bool

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(sum(map(math.log, self.ratios)) / len(self.ratios))

    @property
    def is_gain(self) -> bool:
        return self.is_clear and self.mean < 1

    def clause(self) -> str:
        if not self.is_clear and self.mean < 1.05:
            return f"{self.measure.key.removesuffix('_s')}s in about as much time"
        worded, form = (part, self.measure.fewer) if self.mean < 1 else (times, self.measure.more)
        least, most = min(self.ratios), max(self.ratios)
        if self.is_clear and most > 1.2 * least and worded(least) != worded(most):
            return form.format(f"{worded(least)} to {worded(most)}")
        return form.format(worded(self.mean))


def advice(jobs: Sequence[Job]) -> list[str]:
    """Return one sentence for each key that the figures support advice on.

    Example:
        >>> job = {"error": None, "save_s": 1.0, "blocked_s": 1.0}
        >>> direct = job | {"overrides": ["strategy=direct"], "load_s": 2.0, "bytes_read": 400}
        >>> staged = job | {"overrides": ["strategy=two-stage"], "load_s": 2.2, "bytes_read": 100}
        >>> advice([direct, staged])
        ['two-stage reads 1/4 of the bytes of direct and takes 1.1 times as long to load here: choose it where storage is shared.']
    """
    sound = [job for job in jobs if job["error"] is None]
    keys = [key for key in differing(jobs) if key.lstrip("+~").partition(".")[0] in _ADVISED]
    return [sentence for key in keys if (sentence := _advice_on(key, sound)) is not None]


def why_no_advice(jobs: Sequence[Job]) -> str:
    """Return why `advice` may have nothing to say of a sweep, as a sentence."""
    sound = [job for job in jobs if job["error"] is None]
    keys = [key for key in differing(jobs) if key.lstrip("+~").partition(".")[0] in _ADVISED]
    if len(sound) < 2:
        return f"No advice: it compares jobs, and {len(sound)} of {len(jobs)} ended without an error."
    if not keys:
        return f"No advice: the jobs differ in no choice for checkpoints ({', '.join(_ADVISED)})."
    return (
        f"No advice on {', '.join(keys)}: no choice needs less time or fewer bytes than the others in every pair of jobs, by more than the "
        "saves of one job differ among themselves. More saves in a job narrow that down."
    )


def differing(jobs: Sequence[Job]) -> list[str]:
    """Return the keys of the overrides that not all jobs share, in their order."""
    values = [overrides_of(job) for job in jobs]
    keys = dict.fromkeys(key for value in values for key in value)
    return [key for key in keys if any(value.get(key) != values[0].get(key) for value in values)]


def overrides_of(job: Job) -> dict[str, str]:
    """Return key -> value of a job's overrides."""
    return {key: value for key, _, value in (override.partition("=") for override in job["overrides"])}


def spread_of(job: Job, key: str) -> tuple[float, float]:
    """Return the least and the greatest figure of a job's saves; twice the figure where there is one."""
    each = job.get(f"{key}_each") or [job[key]]
    return min(each), max(each)


def _advice_on(key: str, jobs: Sequence[Job]) -> str | None:
    """Compare each choice of a key with every other, and speak for the one that gains most over its nearest rival."""
    by_choice: dict[str, dict[frozenset[tuple[str, str]], Job]] = {}
    for job in jobs:
        overrides = overrides_of(job)
        choice = overrides.pop(key, "")
        by_choice.setdefault(choice, {})[frozenset(overrides.items())] = job
    measures = [_READ, _LOAD, _SAVE, _BLOCKED] if any(map(_is_in_background, jobs)) else [_READ, _LOAD, _SAVE]
    found: list[tuple[float, str]] = []
    for choice, mine in by_choice.items():
        rivals = {
            other: {criterion: _effect(criterion, mine, theirs) for criterion in measures}
            for other, theirs in by_choice.items()
            if other != choice
        }
        for measure in measures:
            if rivals and all(effects[measure].is_gain for effects in rivals.values()):
                nearest = max(rivals, key=lambda other: rivals[other][measure].mean)
                sentence = _sentence(_label(key, choice), _label(key, nearest), measure, rivals[nearest])
                found.append((rivals[nearest][measure].mean, sentence))
    return min(found)[1] if found else None


def _is_in_background(job: Job) -> bool:
    save, blocked = job["save_s"], job["blocked_s"]
    return bool(save and blocked) and blocked < 0.95 * save


def _effect(measure: Measure, mine: Mapping[Any, Job], theirs: Mapping[Any, Job]) -> _Effect:
    """The effect on a measure over all pairs of jobs with equal other overrides; not clear where there are none."""
    pairs = [(job, theirs[others]) for others, job in mine.items() if others in theirs]
    ratios = [mine[measure.key] / other[measure.key] for mine, other in pairs if mine[measure.key] and other[measure.key]]
    if not ratios or len(ratios) < len(pairs):
        return _Effect(measure, (), False)
    is_clear = len({ratio < 1 for ratio in ratios}) == 1 and all(_is_clear(measure, *pair) for pair in pairs)
    return _Effect(measure, ratios, is_clear)


def _is_clear(measure: Measure, one: Job, other: Job) -> bool:
    less, more = sorted((spread_of(one, measure.key), spread_of(other, measure.key)))
    was_measured_once = measure is not _READ and less[0] == less[1] and more[0] == more[1]
    ratio = max(one[measure.key], other[measure.key]) / min(one[measure.key], other[measure.key])
    return less[1] < more[0] and ratio >= (_LEAST_GAIN_OF_ONE if was_measured_once else _LEAST_GAIN)


def _sentence(choice: str, rival: str, main: Measure, effects: Mapping[Measure, _Effect]) -> str:
    """The greatest gain, the other gains, and what it costs; from the costs follows where to choose it."""
    others = [effect for effect in effects.values() if effect.measure is not main]
    gains = [other for other in others if other.is_gain]
    costs = [other for other in others if other.is_clear and not other.is_gain]
    load = effects[_LOAD]
    if main is _READ and load.ratios and not load.is_clear:  # fewer bytes can take longer: say how long in any case
        (costs if load.mean >= 1.05 else gains).append(load)
    clauses = [f"{effects[main].clause()} of {rival}", *(effect.clause() for effect in [*gains, *costs])]
    listed = " and ".join([", ".join(clauses[:-1]), clauses[-1]] if len(clauses) > 1 else clauses)
    return f"{choice} {listed} here: choose it{f' where {main.where}' if costs else ''}."


def _label(key: str, choice: str) -> str:
    """A choice of a group by its name, a value of any other key with the key."""
    return choice if key in ("ckpt", "strategy", "device") else f"{key.lstrip('+~').rpartition('.')[2]}={choice}"


def part(ratio: float) -> str:
    """Return a ratio below 1 as `1/4`, or as `0.70`.

    Example:
        >>> part(0.2513), part(0.7), part(0.021), part(0.09)
        ('1/4', '0.70', '1/48', '1/11')
    """
    nearest = round(1 / ratio)
    if nearest >= 2 and abs(nearest * ratio - 1) < 0.05:
        return f"1/{nearest}"
    return f"{ratio:.2f}"


def times(ratio: float) -> str:
    """Return a ratio above 1 with two digits.

    Example:
        >>> times(1.1), times(3.04), times(47.6)
        ('1.1', '3.0', '48')
    """
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
