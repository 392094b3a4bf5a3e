"""What the lead of a job and its rollouts tell each other."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckpt.engine.elastic.membership_store import MembershipStore
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.stores import serve


def test_a_rollout_that_answers_and_leaves_in_the_same_moment_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    board = MembershipStore(serve(LOOPBACK, timeout_s=300.0), "trainer 0")

    def dead(numbers: Iterable[int]) -> set[int]:
        board.reply(1, [3, 4, 5])
        return {1, 2} & set(numbers)

    monkeypatch.setattr(board, "dead", dead)
    assert board.replies([1, 2], 30.0) == {1: [3, 4, 5]}
