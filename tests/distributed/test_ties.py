"""Tied tensors of real ranks, some of which hold nothing of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt import StateComponent
from ckpt.errors import ShardingError
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_manifest
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Held, coordinator, random_bits, same_bits

SHAPE = (2, 70_000)  # two rows: of three ranks the last holds none


def _rows(topology: Topology, whole: torch.Tensor) -> Held:
    """One tensor under two names, as a tied embedding has after FSDP."""
    rows = distribute_tensor(whole, init_device_mesh("cpu", (topology.world_size,)), [Shard(0)])
    return Held({"wte": rows, "head": rows})


def _save_tied(topology: Topology, root: Path) -> None:
    held = _rows(topology, random_bits(SHAPE, torch.float32, 1))
    assert held.state["head"].to_local().numel() == (70_000 if topology.rank < 2 else 0)
    coordinator(topology, root, [StateComponent("model", held, "sharded")]).save_checkpoint(checkpoint_id="1")


def _load_tied(topology: Topology, root: Path) -> None:
    held, wanted = _rows(topology, torch.zeros(SHAPE)), _rows(topology, random_bits(SHAPE, torch.float32, 1))
    made = coordinator(topology, root, [StateComponent("model", held, "sharded")])
    made.load_checkpoint()
    for name in ("wte", "head"):
        assert same_bits(held.state[name].to_local(), wanted.state[name].to_local())
    assert made.last_load is not None
    assert made.last_load.bytes_read == 4 * 2 * 70_000


@pytest.mark.parametrize("loaded_by", [2, 3])
def test_a_tied_tensor_is_saved_once_by_ranks_of_which_one_holds_nothing_of_it(tmp_path: Path, loaded_by: int) -> None:
    run_ranks(3, _save_tied, tmp_path, process_group=True)
    manifest = read_manifest(tmp_path / "checkpoint-1")
    assert manifest.arrays["model/head"].alias_of == "model/wte"
    assert manifest.arrays["model/wte"].alias_of is None
    run_ranks(loaded_by, _load_tied, tmp_path, process_group=True)


def _save_half_tied(topology: Topology, root: Path) -> str:
    w = torch.arange(6.0)
    held = Held({"wte": w, "head": w if topology.rank == 1 else w.clone()})
    with pytest.raises(ShardingError) as refused:
        coordinator(topology, root, [StateComponent("model", held, "sharded")]).save_checkpoint(checkpoint_id="1")
    return str(refused.value)


def test_a_tie_that_one_rank_lacks_is_refused_on_every_rank_and_nothing_is_committed(tmp_path: Path) -> None:
    (said,) = set(run_threads(3, _save_half_tied, tmp_path))
    assert "model/head is tied to model/wte on rank 1, not on rank 0, which holds it as a tensor of its own" in said
    assert list(tmp_path.glob("checkpoint-*")) == []
