"""Which checkpoints of a run stay after a save: the newest, every n-th step, and the best by a metric; and which keep all components.

Pure, but for reading metrics.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Protocol, TypeVar

from ckpt.errors import Argument, CheckpointError, ConfigurationError, logger_of, unlike
from ckpt.format.places import Place, step_of
from ckpt.storage.stored import read_manifest

_log = logger_of(__name__)


class Listed(Protocol):
    """A committed checkpoint, such as `ckpt.catalog.committed.Committed`."""

    @property
    def id(self) -> str: ...

    @property
    def path(self) -> Place: ...


Kind = TypeVar("Kind", bound=Listed)


@dataclass(frozen=True, slots=True)
class Retention:
    """The checkpoints of a run that stay. One stays if any rule keeps it; without rules all do.

    Attributes:
        keep_last: number of the newest that stay, the one just saved included. None: 1 if there is another rule, else all.
        keep_every: those stay whose step is a multiple of it.
        keep_best: number of those that stay with the best value of `metric`.
            A checkpoint that was saved without that metric cannot be compared, and stays.
        metric: name of a metric that `save_checkpoint` is given.
        greater_is_better: of `metric`.
        keep_last_of: component -> number of the newest checkpoints that keep it, the one just saved included, among those that stay. Older
            ones are incomplete then: they say so, and are not loaded by whoever asks for what they lack. None: all keep all.

    Raises:
        ConfigurationError: a value is of a wrong type, a number is below 1, or `keep_best` is without `metric`.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    greater_is_better: bool = False
    keep_last_of: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            number = getattr(self, name)
            if number is not None and not _is_count(number):
                otherwise = "to keep every checkpoint" if name == "keep_last" else "to switch the rule off"
                raise unlike(name, number, f"a whole number of at least 1, or None {otherwise}", f"saves.{name}")
        if not (self.metric is None or (isinstance(self.metric, str) and self.metric)):
            raise unlike("metric", self.metric, "a name, such as 'loss', or None")
        if not isinstance(self.greater_is_better, bool):
            raise unlike("greater_is_better", self.greater_is_better, "True, where the greatest value is the best, or False")
        given = {} if self.keep_last_of is None else self.keep_last_of
        if not isinstance(given, Mapping) or not all(isinstance(key, str) and _is_count(count) for key, count in given.items()):
            expected = "a dictionary: component -> number, of at least 1, of the newest checkpoints that keep it; or None"
            raise unlike("keep_last_of", given, expected, "saves.keep_last_of")
        if self.keep_best is not None and self.metric is None:
            raise ConfigurationError(f"keep_best={self.keep_best} needs metric, the name of the metric that it goes by")

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in asdict(self).items() if value)

    @property
    def removes(self) -> bool:
        """Whether any checkpoint is ever removed."""
        return (self.keep_last, self.keep_every, self.keep_best) != (None, None, None)

    @property
    def acts(self) -> bool:
        """Whether any checkpoint, or a component of one, is ever removed."""
        return self.removes or bool(self.keep_last_of)

    def require_components(self, keys: Collection[str], store: str) -> None:
        """Require that `keep_last_of` names components of a run, and that the storage format can do without one.

        Raises:
            ConfigurationError: it names another, or all arrays lie in one database.
        """
        for key in self.keep_last_of or ():
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]}?" if near else f"this run has {', '.join(keys)}"
                raise ConfigurationError(_keep_last_of(self), f": there is no component {key!r}; {hint}")
        if self.keep_last_of and store == "ocdbt":
            raise ConfigurationError(
                _keep_last_of(self), " frees nothing in an OCDBT database, which holds all components: save with ",
                Argument("backend.kvstore", "file"), ", or as zarr",
            )  # fmt: skip

    def require_metric(self, given: Mapping[str, float | None]) -> None:
        """Require the metric by which checkpoints are kept among those of a save; its value may be None.

        Raises:
            ConfigurationError: it is missing.
        """
        if self.keep_best is None or self.metric in given:
            return
        near = difflib.get_close_matches(str(self.metric), given, n=1)
        meant = f" Did you mean metric={near[0]!r}, or metrics={{{self.metric!r}: ...}}?" if near else ""
        raise ConfigurationError(
            f"metrics holds {', '.join(map(repr, given)) or 'nothing'}, without {self.metric!r}, which keep_best={self.keep_best} "
            f"goes by: give it to each save, as math.nan where there is no value.{meant}"
        )

    def surplus(self, older: Sequence[Kind], newest: Kind | None) -> list[Kind]:
        """Return those of `older` that no rule keeps.

        Args:
            older: all others of the run, the oldest first.
            newest: the checkpoint just committed, which stays; None: it is gone.
        """
        if not self.removes:
            return []
        kept = {commit.id for commit in older[max(0, len(older) + 1 - (self.keep_last or 1)) :]}
        if self.keep_every is not None:
            kept |= {commit.id for commit in older if (step := step_of(commit.id)) is not None and step % self.keep_every == 0}
        if self.keep_best is not None:
            metrics = {commit.id: metrics_of(commit.path) for commit in (*older, *([newest] if newest is not None else []))}
            kept |= {id for id, found in metrics.items() if found is None}  # unreadable now, perhaps the best
            kept |= {id for id, _ in self._ranked(metrics)[: self.keep_best]}
            unknown = [commit for commit in older if commit.id not in kept and self.metric not in (metrics[commit.id] or {})]
            for commit in unknown:
                _tell_of_unknown(commit.path, str(self.metric))
            kept |= {commit.id for commit in unknown}
        return [commit for commit in older if commit.id not in kept]

    def outdated(self, older: Sequence[Kind], newest: Kind | None) -> Iterator[tuple[Kind, list[str]]]:
        """Yield those of `older` that may not keep all components, the newest first, with the keys of those that go.

        Args:
            older: all others of the run that stay, the oldest first.
            newest: the checkpoint just committed, which keeps all; None: it is gone, and nothing goes.
        """
        for number, commit in enumerate(reversed(older), 1):
            keys = [key for key, count in (self.keep_last_of or {}).items() if number >= count]
            if keys and newest is not None:
                yield commit, keys

    def best(self, checkpoints: Sequence[Kind]) -> Kind | None:
        """Return the one with the best value of the metric, the newest of equal ones; None: none has the metric.

        Args:
            checkpoints: the oldest first.
        """
        ranked = self._ranked({checkpoint.id: metrics_of(checkpoint.path) for checkpoint in checkpoints})
        return next((checkpoint for checkpoint in checkpoints if ranked and checkpoint.id == ranked[0][0]), None)

    def _ranked(self, metrics: Mapping[str, Mapping[str, float | None] | None]) -> list[tuple[str, float]]:
        """Return (id, value) of those that have the metric, the best first; of equal ones the newest first."""
        values = [(id, found.get(self.metric or "")) for id, found in reversed([*metrics.items()]) if found]
        sign = -1 if self.greater_is_better else 1
        return sorted([(id, value) for id, value in values if value is not None], key=lambda row: sign * row[1])


def as_retention(keep_last: int | Retention | None) -> Retention:
    """Return rules as such; a number is that of the newest checkpoints."""
    return keep_last if isinstance(keep_last, Retention) else Retention(keep_last)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1


def _keep_last_of(rules: Retention) -> Argument:
    return Argument("saves.keep_last_of", dict(rules.keep_last_of or {}))


@cache
def _tell_of_unknown(path: Place, metric: str) -> None:
    _log.warning(
        "%s was saved without the metric %r, by which checkpoints are kept: it stays until you delete it", path, metric
    )


def metrics_of(path: Place) -> Mapping[str, float | None] | None:
    """Return the metrics of a checkpoint; None if its manifest cannot be read."""
    try:
        metrics: Mapping[str, float | None] = read_manifest(path).metrics
        return metrics
    except (CheckpointError, OSError, OverflowError):
        return None
