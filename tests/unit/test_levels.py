"""Tests hear what they would hear alone."""

from __future__ import annotations

import logging

import pytest


@pytest.mark.parametrize("turn", [0, 1])
def test_levels_that_a_test_sets_do_not_outlive_it(turn: int, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("ckpt").info("turn %d", turn)
    assert caplog.messages == []
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger("ckpt").setLevel(logging.DEBUG)
