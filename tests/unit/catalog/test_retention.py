"""Which checkpoints stay: every rule by itself, all together, and what cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt.catalog.retention import Retention, as_retention
from ckpt.errors import ConfigurationError
from ckpt.format.manifest import MANIFEST_NAME, CheckpointManifest


@dataclass(frozen=True)
class One:
    id: str
    path: Path


def checkpoints(root: Path, losses: dict[int, float | None]) -> list[One]:
    """Folders that hold nothing but a manifest, by step; None: saved without the metric."""
    found = []
    for step, loss in losses.items():
        one = One(f"{step:08d}", root / f"checkpoint-{step:08d}")
        one.path.mkdir(parents=True, exist_ok=True)
        metrics = {} if loss is None else {"loss": loss}
        manifest = CheckpointManifest(one.id, datetime.now(UTC), 1, {}, {}, {}, {}, metrics=metrics)
        (one.path / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        found.append(one)
    return found


def steps(found: list[One]) -> list[int]:
    return [int(one.id) for one in found]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    losses=st.dictionaries(st.integers(0, 40), st.none() | st.integers(0, 5).map(float), min_size=1, max_size=12),
    last=st.none() | st.integers(1, 14),
    every=st.none() | st.integers(1, 8),
    best=st.none() | st.integers(1, 5),
    greater=st.booleans(),
)
def test_a_checkpoint_stays_if_any_rule_keeps_it(
    tmp_path_factory: pytest.TempPathFactory,
    losses: dict[int, float | None],
    last: int | None,
    every: int | None,
    best: int | None,
    greater: bool,
) -> None:
    *older, newest = checkpoints(tmp_path_factory.mktemp("root"), dict(sorted(losses.items())))
    rules = Retention(last, every, best, "loss" if best else None, greater)
    stay = [*(one for one in older if one not in rules.surplus(older, newest)), newest]
    if (last, every, best) == (None, None, None):
        assert stay == [*older, newest]
        return
    wanted = set(steps([*older, newest])[-(last or 1) :])
    wanted |= {step for step in losses if every and step % every == 0}
    by_value = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
    if greater:
        by_value = [(loss, step) for loss, step in sorted(((-a, b) for a, b in by_value))]
    wanted |= {-step for _, step in by_value[: best or 0]}
    wanted |= {step for step, loss in losses.items() if best and loss is None}
    assert set(steps(stay)) == wanted


def test_a_checkpoint_that_cannot_be_read_now_may_be_the_best_and_stays(tmp_path: Path) -> None:
    *older, newest = checkpoints(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0})
    (older[0].path / MANIFEST_NAME).write_bytes(b"{}")
    rules = Retention(keep_best=1, metric="loss")
    assert rules.surplus(older, newest) == []
    assert rules.best([*older, newest]) == older[1]
    assert rules.best([newest]) == newest
    assert rules.best([older[0]]) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"los": 1.0}, r"holds 'los', without 'loss', .* Did you mean metric='los', or metrics=\{'loss': ...\}\?"),
        ({"accuracy": 1.0, "f1": 0.5}, r"holds 'accuracy', 'f1', without 'loss', which keep_best=1 goes by"),
        ({}, "holds nothing, without 'loss'"),
    ],
)
def test_a_save_without_the_metric_that_checkpoints_are_kept_by_is_refused(given: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^metrics {told}"):
        Retention(keep_best=1, metric="loss").require_metric(given)
    Retention(keep_last=1, metric="loss").require_metric(given)
    Retention(keep_best=1, metric="loss").require_metric({"loss": None})


def test_older_checkpoints_without_the_metric_stay_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *older, newest = checkpoints(tmp_path, {1: None, 2: 2.0, 3: 1.0, 4: 3.0})
    for _ in range(2):
        assert Retention(keep_best=1, metric="loss").surplus(older, newest) == [older[1]]
    assert caplog.text.count("was saved without the metric 'loss', by which checkpoints are kept: it stays") == 1


@pytest.mark.parametrize("bad", [{"greater_is_better": "max"}, {"metric": ""}, {"metric": ["loss"]}])
def test_a_mistyped_direction_or_metric_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=rf"{next(iter(bad))} is .*; expected"):
        Retention(keep_last=1, **bad)  # type: ignore[arg-type]


def test_a_number_is_that_of_the_newest() -> None:
    assert as_retention(3) == Retention(keep_last=3)
    assert not as_retention(None).removes


@pytest.mark.parametrize(
    "bad", [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": True, "metric": "a"}, {"keep_last": 1.5}]
)
def test_rules_that_keep_nothing_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"keep_\w+ is .*; expected a whole number of at least 1"):
        Retention(**bad)  # type: ignore[arg-type]


def test_the_best_goes_by_a_metric() -> None:
    with pytest.raises(ConfigurationError, match="keep_best=2 needs metric"):
        Retention(keep_best=2)
    assert not Retention(metric="loss").removes


@given(num_older=st.integers(0, 8), counts=st.dictionaries(st.sampled_from(["model", "optimizer", "rng"]), st.integers(1, 10)))
def test_a_component_stays_in_as_many_of_the_newest_as_its_number_says(num_older: int, counts: dict[str, int]) -> None:
    *older, newest = [One(str(step), Path(f"checkpoint-{step}")) for step in range(num_older + 1)]
    rules = Retention(keep_last_of=counts)
    gone = {one.id: set(keys) for one, keys in rules.outdated(older, newest)}
    assert newest.id not in gone and all(gone.values())
    for key, count in counts.items():
        holding = [one.id for one in (*older, newest) if key not in gone.get(one.id, ())]
        assert holding == [one.id for one in (*older, newest)][-count:]
    assert [*rules.outdated(older, None)] == [] and rules.surplus(older, newest) == []
    assert (rules.acts, rules.removes) == (bool(counts), False)


@pytest.mark.parametrize("bad", [{"optimizer": 0}, {"optimizer": True}, {"optimizer": None}, {1: 1}, 1, ["optimizer"]])
def test_a_component_that_no_checkpoint_would_keep_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError, match="keep_last_of is .*; expected a dictionary: component -> number, of at least 1"):
        Retention(keep_last_of=bad)
