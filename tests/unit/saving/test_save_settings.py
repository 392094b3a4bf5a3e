"""Settings of saves that contradict each other, or that there are not, are refused before anything is saved."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.errors import ConfigurationError
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.saving.host_cache import memories_of
from ckpt.saving.save_settings import SaveSettings


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"mode": "later"}, "saves.mode=later: expected one of sync, async"),
        ({"when_busy": "drop"}, "saves.when_busy=drop: expected one of wait, skip, queue"),
        ({"on_async_error": "ignore"}, "saves.on_async_error=ignore: expected one of raise, warn"),
        ({"overlap": True}, "saves.overlap=True has no effect with saves.mode=sync"),
        ({"writer_cores": 2}, "saves.writer_cores=2 has no effect with saves.mode=sync"),
        ({"writer_mib_s": 100}, "saves.writer_mib_s=100 has no effect with saves.mode=sync"),
        ({"when_busy": "queue"}, "saves.when_busy=queue has no effect with saves.mode=sync"),
        ({"when_busy": "skip"}, "saves.when_busy=skip has no effect with saves.mode=sync"),
        ({"on_async_error": "warn"}, "saves.on_async_error=warn has no effect with saves.mode=sync"),
        ({"writer_cores": 0}, "saves.writer_cores=0: expected at least 1, or nothing for no limit"),
        ({"writer_mib_s": -1}, "saves.writer_mib_s=-1: expected at least 1"),
        ({"writer_mib_s": float("nan")}, "saves.writer_mib_s=nan: expected at least 1"),
        ({"pattern_check": "all"}, "pattern_check=all: expected one of warn, error, off"),
        ({"stale_s": -1}, "stale_s is -1; expected a number of seconds from 0 on"),
        ({"shared_root": 1}, "shared_root is 1; expected True or False"),
        ({"grace_s": -0.5}, "saves.grace_s=-0.5: expected at least 0 seconds"),
        ({"incremental_min_live": 0.0}, "saves.incremental_min_live=0.0: expected a fraction above 0, at most 1"),
        ({"incremental_min_live": float("nan")}, "saves.incremental_min_live=nan: expected a fraction"),
    ],
)
def test_what_cannot_be_is_one_sentence_that_names_the_key(chosen: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SaveSettings(**chosen)
    assert str(caught.value).startswith(told)


def test_settings_that_say_nothing_save_while_training_waits() -> None:
    assert not SaveSettings().is_async
    assert SaveSettings(mode="async", overlap=True).is_async


def test_a_backend_that_delegates_to_another_keeps_saves_and_brings_its_transport_as_that_one() -> None:
    class Delegating:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    inner, outer, strategy = KimiEngineBackend(), Delegating(), TwoStageLoad()
    assert memories_of(outer) is inner.memories is not None  # type: ignore[arg-type]
    strategy.bind(outer)  # type: ignore[arg-type]
    assert strategy._transports.choice == inner.transport
