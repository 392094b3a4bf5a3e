"""The training recipe on real ranks: every rank takes its part, and a resumed run is the run it continues, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.ranks.topology import Topology
from recipes.training.text import TextData
from recipes.training.training import train
from tests.conf.configs import config
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        pytest.param(3, [], id="3 ranks", marks=pytest.mark.full),
        pytest.param(3, ["data.dispatch=false"], id="3 ranks, each with its own data", marks=pytest.mark.full),
        pytest.param(
            2,
            ["model.tie_embeddings=true", "ckpt=tensorstore"],
            id="2 ranks, tied, tensorstore",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_resumed_run_equals_the_straight_one_bit_for_bit(
    tmp_path: Path, num_ranks: int, overrides: list[str]
) -> None:
    runs = [
        config(tmp_path / "straight", "train.steps=6", *overrides, num_ranks=num_ranks),
        config(tmp_path / "parts", "train.steps=3", *overrides, num_ranks=num_ranks),
        config(tmp_path / "parts", "train.steps=6", "resume=latest", *overrides, num_ranks=num_ranks),
    ]
    summaries = run_ranks(num_ranks, _train, runs, process_group=True)
    straight, _, resumed = summaries[0]
    assert resumed["first_step"] == 4 and resumed["losses"] == straight["losses"][3:]
    assert resumed["state_digest"] == straight["state_digest"]
    assert all(summary[2]["losses"] == resumed["losses"] for summary in summaries)


def test_one_data_parallel_rank_equals_the_single_layout(tmp_path: Path) -> None:
    runs = [
        train(config(tmp_path / layout, f"parallel={layout}", "train.steps=2"), Topology.alone())
        for layout in ("ddp", "single")
    ]
    assert runs[0]["losses"] == runs[1]["losses"] and runs[0]["state_digest"] == runs[1]["state_digest"]


def test_rank_0_draws_and_every_rank_takes_its_rows(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(i % 251 for i in range(1000)))
    data = TextData(path=str(tmp_path))
    cpu = torch.device("cpu")
    alone = data.loader(context=7, batch_size=6, seed=0, topology=Topology.alone(), device=cpu, share=(0, 1))
    expected = [alone.next_batch()[0] for _ in range(3)]
    parts = run_ranks(3, _draw, data, process_group=True)
    for step in range(3):
        assert torch.equal(torch.cat([torch.tensor(batches[step]) for batches, _ in parts]), expected[step])
    assert [state for _, state in parts] == [alone.state_dict()] * 3


def test_ranks_that_draw_for_themselves_share_no_sample(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(i % 251 for i in range(999)))
    parts = run_ranks(3, _draw, TextData(path=str(tmp_path), dispatch=False), process_group=True)
    rows = [tuple(row) for batches, _ in parts for batch in batches for row in batch]
    assert len(rows) == 18 and len(set(rows)) == 18


def _train(topology: Topology, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(cfg, topology) for cfg in runs]


def _draw(topology: Topology, data: TextData) -> tuple[list[Any], dict[str, Any]]:
    share, cpu = (topology.rank, topology.world_size), torch.device("cpu")
    loader = data.loader(context=7, batch_size=6, seed=0, topology=topology, device=cpu, share=share)
    return [loader.next_batch()[0].tolist() for _ in range(3)], loader.state_dict()
