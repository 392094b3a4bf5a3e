"""The campaign: a small sample by default, all of it marked full. What is tried, and what must be so, say the modules beside this one.

The crash points of saves take half of the time: a file for each backend, so that several of pytest's workers share them.

python -m pytest -m full tests/adversarial          1,200 crash points, 550 crafts and more; the table comes at the end
CKPT_SEED=7 python -m pytest tests/adversarial      another sample
"""

from __future__ import annotations

import pytest

from tests.adversarial import crashes, damage, foreign, foreign_folders, neighbours
from tests.adversarial.conftest import Campaign


def test_a_sample_of_the_campaign_holds(campaign: Campaign, seed: int) -> None:
    campaign(
        [
            *crashes.sample_of_save_cases(seed),
            *crashes.load_cases(seed, points=2, sample=1),
            *damage.cases(seed, flips=1, sample=1),
            *foreign.cases(seed, sample=4),
            *neighbours.cases(rounds=2, sample=True),
        ]
    )


@pytest.mark.full
def test_a_load_that_is_refused_any_bytes_raises_or_gives_the_right_ones(campaign: Campaign, seed: int) -> None:
    campaign(crashes.load_cases(seed, points=60))


@pytest.mark.full
def test_any_damage_to_any_file_is_told_and_gives_no_other_bits(campaign: Campaign, seed: int) -> None:
    campaign(damage.cases(seed, flips=100))


@pytest.mark.full
def test_all_crafts_of_a_stranger_get_nothing_in_and_stop_nothing(campaign: Campaign, seed: int) -> None:
    campaign([*foreign.cases(seed), *foreign_folders.cases()])


@pytest.mark.full
def test_processes_that_share_a_root_and_clocks_that_go_wrong_lose_nothing(campaign: Campaign) -> None:
    campaign(neighbours.cases(rounds=100))
