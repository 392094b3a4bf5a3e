"""The campaign's crash points of saves by kimi-engine, in every mode."""

from __future__ import annotations

import pytest

from tests.adversarial import crashes
from tests.adversarial.conftest import Campaign


@pytest.mark.full
def test_a_save_by_kimi_engine_that_is_killed_or_refused_at_any_call_loses_nothing(
    campaign: Campaign, seed: int
) -> None:
    campaign(crashes.save_cases(seed, "kimi-engine"))
