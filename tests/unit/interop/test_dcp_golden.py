"""DCP checkpoints that torch 2.13 and torchtitan 0.3 wrote on two ranks are loaded to the bit, on one rank and on three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt import Checkpointer
from ckpt.ranks.topology import Topology
from tests.golden.dcp.contents import bits_of, run_of
from tests.support.ranks import run_ranks
from tests.support.states import same_bits

GOLDEN = Path(__file__).parents[2] / "golden" / "dcp"
TORCH, TORCHTITAN = GOLDEN / "torch-2.13.0" / "step-7", GOLDEN / "torchtitan-0.3.0" / "step-7"


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def _resume(topology: Topology, own: Path) -> list[dict[str, Any]]:
    """A run with other values takes them all, from each checkpoint, by each strategy."""
    found = []
    for load in ("direct", "two-stage") if topology.world_size > 1 else ("direct",):
        for path in (TORCH, TORCHTITAN):
            model, optimizer = run_of(topology.world_size, filled=False)
            folder = own / load / path.parent.name
            with Checkpointer(
                folder, model=model, optimizer=optimizer, save_rng=False, allow_pickle=True, load=load
            ) as checkpoints:
                assert checkpoints.restore(path) == 7
            assert optimizer.param_groups[0]["lr"] == (0.25 if path == TORCH else 0.125)
            found.append({name: tensor.detach() for name, tensor in bits_of(model, optimizer).items()})
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_goes_on_from_them(tmp_path: Path, ranks: int) -> None:
    expected = bits_of(*run_of(1, filled=True))
    for by_rank in run_ranks(ranks, _resume, tmp_path, process_group=True):
        for found in by_rank:
            require_equal(found, expected)


def test_all_that_they_hold_is_loaded_by_name() -> None:
    expected = bits_of(*run_of(1, filled=True))
    of_torch = ckpt.load(TORCH, allow_pickle=True)
    of_torchtitan = ckpt.load(TORCHTITAN, allow_pickle=True)
    assert of_torch["step"] == 7 and of_torchtitan["train_state"] == {"step": 7, "ntokens_seen": 99}
    assert {"dataloader", "lr_scheduler"} < of_torchtitan.keys()
    for name in ("0.weight", "0.bias", "1.weight"):
        assert same_bits(of_torch["model"][name], expected[name])
        assert same_bits(of_torchtitan[name], expected[name])
        assert same_bits(of_torch["optimizer"]["state"][name]["exp_avg"], expected[f"{name}.exp_avg"])
        assert same_bits(of_torchtitan["optimizer"][f"state.{name}.exp_avg"], expected[f"{name}.exp_avg"])
