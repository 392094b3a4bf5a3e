"""The campaign: a small sample of each part by default, all of it marked full. See the modules beside for what is tried."""

from __future__ import annotations

import pytest

from tests.adversarial import crashes
from tests.adversarial.conftest import Campaign


def test_a_save_that_is_killed_or_refused_at_some_call_loses_nothing(campaign: Campaign, seed: int) -> None:
    campaign(crashes.save_cases(points_each=2, points_by_process=0, seed=seed))


@pytest.mark.full
def test_a_save_that_is_killed_or_refused_at_any_call_loses_nothing(campaign: Campaign, seed: int) -> None:
    campaign(crashes.save_cases(points_each=36, points_by_process=8, seed=seed))


def test_a_load_that_is_refused_bytes_raises_or_gives_the_right_ones(campaign: Campaign, seed: int) -> None:
    campaign(crashes.load_cases(points_each=4, seed=seed))


@pytest.mark.full
def test_a_load_that_is_refused_any_bytes_raises_or_gives_the_right_ones(campaign: Campaign, seed: int) -> None:
    campaign(crashes.load_cases(points_each=60, seed=seed))
