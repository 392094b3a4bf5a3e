"""What the lead of a job and its rollouts tell each other."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from torch._C._distributed_c10d import TCPStore

from ckpt.engine.board import Board


def test_a_rollout_that_answers_and_leaves_in_the_same_moment_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), "trainer 0")

    def dead(numbers: Iterable[int]) -> set[int]:
        board.reply(1, [3, 4, 5])
        return {1, 2} & set(numbers)

    monkeypatch.setattr(board, "dead", dead)
    assert board.replies([1, 2], 30.0) == {1: [3, 4, 5]}
