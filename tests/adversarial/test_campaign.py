"""The campaign: a small sample of each part by default, all of it marked full. See the modules beside for what is tried."""

from __future__ import annotations

import pytest

from tests.adversarial import crashes, damage, foreign, foreign_folders, neighbours
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


def test_damage_to_a_file_is_told_and_gives_no_other_bits(campaign: Campaign, seed: int) -> None:
    campaign(damage.cases(tries_each=1, flips_each=2, seed=seed))


@pytest.mark.full
def test_any_damage_to_any_file_is_told_and_gives_no_other_bits(campaign: Campaign, seed: int) -> None:
    campaign(damage.cases(tries_each=0, flips_each=100, seed=seed))


def test_crafts_of_a_stranger_get_nothing_in_and_stop_nothing(campaign: Campaign, seed: int) -> None:
    campaign(foreign.cases(seed, sample=16))


@pytest.mark.full
def test_all_crafts_of_a_stranger_get_nothing_in_and_stop_nothing(campaign: Campaign, seed: int) -> None:
    campaign([*foreign.cases(seed), *foreign_folders.cases()])


def test_processes_that_share_a_root_and_clocks_that_go_wrong_lose_nothing(campaign: Campaign) -> None:
    campaign(neighbours.cases(rounds=8))


@pytest.mark.full
def test_processes_that_share_a_root_for_long_lose_nothing(campaign: Campaign) -> None:
    campaign(neighbours.cases(rounds=200))
