"""Ranks that convert different amounts: each joins in all readings of the others."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from ckpt import StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.loading import strategy as casting
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_threads
from tests.support.states import Fitted, coordinator, spreading

ROWS, COLUMNS = 64, 50


def _piece(begin: int, end: int, dtype: torch.dtype, fill: bool) -> ShardedTensor:
    values = torch.arange(begin * COLUMNS, end * COLUMNS).to(dtype).view(end - begin, COLUMNS)
    data = values if fill else torch.zeros_like(values)
    return ShardedTensor("w", data, dtype, (end - begin, COLUMNS), (ROWS, COLUMNS), (begin, 0), None)


def _component(cuts: list[int], rank: int, dtype: torch.dtype, *, fill: bool) -> tuple[StateComponent, ShardedTensor]:
    piece = _piece(cuts[rank], cuts[rank + 1], dtype, fill)
    return StateComponent("model", Fitted({"w": piece}), "sharded"), piece


@pytest.mark.parametrize("two_stage", [False, True])
def test_ranks_convert_pieces_of_other_sizes_than_those_that_saved(two_stage: bool, tmp_path: Path) -> None:
    def save(topology: Topology) -> None:
        component, _ = _component([0, 10, 64], topology.rank, torch.bfloat16, fill=True)
        with coordinator(topology, tmp_path, [component]) as saving:
            saving.save_checkpoint(checkpoint_id=1)

    def load(topology: Topology) -> bool:
        component, piece = _component([0, 1, 60, 64], topology.rank, torch.float32, fill=False)
        strategy = spreading() if two_stage else None
        with coordinator(topology, tmp_path, [component], strategy=strategy) as loading:
            loading.load_checkpoint(cast=True)
        assert loading.last_load is not None
        assert "converted from bfloat16 to float32" in loading.last_load.summary()
        begin = piece.global_offset[0] * COLUMNS
        assert piece.data is not None
        return torch.equal(piece.data, torch.arange(begin, begin + piece.data.numel()).bfloat16().float().view_as(piece.data))

    run_threads(2, save)
    with patch.object(casting, "SCRATCH_BYTES", 400), patch.object(casting, "MOST_BATCHES", 12):
        assert run_threads(3, load) == [True] * 3
