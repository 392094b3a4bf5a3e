"""Settings of saves that contradict each other, or that there are not, are refused before anything is saved."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.errors import ConfigurationError
from ckpt.save_settings import SaveSettings


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ({"mode": "later"}, "saves.mode=later: expected one of sync, async"),
        ({"writer": "fork"}, "saves.writer=fork: expected one of thread, process"),
        ({"when_busy": "drop"}, "saves.when_busy=drop: expected one of wait, skip, queue"),
        ({"on_async_error": "ignore"}, "saves.on_async_error=ignore: expected one of raise, warn"),
        ({"overlap": True}, "saves.overlap=True copies the state beside training, which saves.mode=sync waits for"),
        ({"writer_cores": 0}, "saves.writer_cores=0: expected at least 1, or nothing for no limit"),
        ({"writer_mib_s": -1}, "saves.writer_mib_s=-1: expected at least 1"),
        ({"staging_budget_mib": 0}, "saves.staging_budget_mib=0: expected at least 1"),
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
