"""Ratios of the figures of two benchmark runs, each with a confidence interval: is the later one slower?

An interval is a bootstrap: rounds are drawn with replacement, and each draw gives a ratio of medians. Where both runs have equally many
rounds, the n-th of one is drawn with the n-th of the other, so that runs that took turns share the machine's ups and downs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.cli.arguments import argued
from ckpt.errors import ConfigurationError
from ckpt.format.places import local_path
from recipes.benchmark.tables import numbers, print_table

DRAWS = 10_000
SEED = 0
COVERED = (2.5, 97.5)
"""Percentiles of the draws that bound an interval: 95 % of them."""

Rounds = Mapping[str, Sequence[Mapping[str, Any]]]
"""Contender -> its figures of each round."""


@dataclass
class CompareKeys:
    """The keys of the command."""

    a: str = argued("a benchmark's JSON file")
    b: str = argued("a benchmark's JSON file")
    relative_to: str | None = None
    tolerance: float = 0.05
    json: bool = False

    def validate(self) -> None:
        """Raise ConfigurationError where a or b is an address, or the tolerance is negative."""
        for name in ("a", "b"):
            local_path(getattr(self, name), name)
        if not self.tolerance >= 0:
            raise ConfigurationError(f"tolerance={self.tolerance}: expected a fraction of at least 0, such as 0.05")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of a contender in run b, over the same in run a.

    Attributes:
        a, b: medians; of relative figures if `relative_to` is given.
        least, most: the interval of `ratio`.
    """

    contender: str
    figure: str
    a: float
    b: float
    ratio: float
    least: float
    most: float


def compare(keys: CompareKeys) -> int:
    """Print the ratios; return 1 if a figure is larger in b by more than the tolerance, all of its interval, else 0."""
    a, b = rounds_at("a", keys.a), rounds_at("b", keys.b)
    found = ratios(_relative("a", a, keys.relative_to), _relative("b", b, keys.relative_to))
    if not found:
        raise ConfigurationError(f"{keys.a} and {keys.b} have no figure of a contender in common")
    worse = [ratio for ratio in found if ratio.least > 1 + keys.tolerance]
    if keys.json:
        print(json.dumps({"ratios": [asdict(ratio) for ratio in found], "larger": [asdict(ratio) for ratio in worse]}, indent=2))
    else:
        rows = {
            f"{'* ' if ratio in worse else ''}{ratio.contender}, {ratio.figure}": {
                "a": f"{ratio.a:.3f}", "b": f"{ratio.b:.3f}", "b / a": f"{ratio.ratio:.3f}",
                "95 % of draws": f"{ratio.least:.3f}..{ratio.most:.3f}",
            }
            for ratio in found
        }  # fmt: skip
        over = f", over those of {keys.relative_to} in the same round" if keys.relative_to else ""
        counts = " and ".join(str(max(map(len, side.values()))) for side in (a, b))
        print(f"* larger by more than {keys.tolerance:.0%}, all of the interval: {len(worse)} of {len(found)} figures")
        print_table(f"medians of {counts} rounds{over}", rows)
    return 1 if worse else 0


def rounds_at(side: str, path: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rounds of a result, or of all results in a folder and below it, in the order of their paths.

    Args:
        side: the key that names it, for errors.

    Raises:
        ConfigurationError: there is no result, or a file is none.
    """
    root = Path(path)
    files = sorted(root.rglob("benchmark*.json")) if root.is_dir() else [root]
    if not files:
        raise ConfigurationError(f"{side}={path}: there is no benchmark*.json below it")
    joined: dict[str, list[Mapping[str, Any]]] = {}
    for file in files:
        try:
            rounds = json.loads(file.read_text(encoding="utf-8"))["rounds"]
            for name, rows in rounds.items():
                joined.setdefault(name, []).extend(dict(row) for row in rows)
        except FileNotFoundError as error:
            raise ConfigurationError(f"{side}={path} does not exist") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(f"{side}: {file} is not the JSON file of a benchmark, which has rounds") from error
    return {name: rows for name, rows in joined.items() if rows}


def ratios(a: Rounds, b: Rounds) -> list[Ratio]:
    """Return a ratio for each number that a contender has in every round of both runs, unless it is 0 in run a."""
    draw = np.random.default_rng(SEED)
    found = []
    for name in [name for name in a if name in b]:
        of_b = dict(numbers(b[name]))
        for figure, before in numbers(a[name]):
            if figure in of_b and np.median(before) > 0:
                found.append(_ratio(name, figure, np.asarray(before), np.asarray(of_b[figure]), draw))
    return found


def _ratio(
    name: str, figure: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], draw: np.random.Generator
) -> Ratio:
    chosen = draw.integers(len(a), size=(DRAWS, len(a)))
    others = chosen if len(a) == len(b) else draw.integers(len(b), size=(DRAWS, len(b)))
    below = np.median(a[chosen], axis=1)
    drawn = np.median(b[others], axis=1)[below > 0] / below[below > 0]
    least, most = np.percentile(drawn, COVERED)
    middle_a, middle_b = float(np.median(a)), float(np.median(b))
    return Ratio(name, figure, middle_a, middle_b, middle_b / middle_a, float(least), float(most))


def _relative(side: str, rounds: Rounds, to: str | None) -> Rounds:
    """Divide each round's figures by those of one contender in the same round."""
    if to is None:
        return rounds
    if to not in rounds:
        raise ConfigurationError(f"relative_to={to} is no contender of {side}, which has {', '.join(rounds)}")
    limits = rounds[to]
    return {
        name: [
            {figure: row[figure] / limit[figure] for figure, _ in numbers([row]) if limit.get(figure)}
            for row, limit in zip(rows, limits, strict=False)
        ]
        for name, rows in rounds.items()
        if name != to
    }
