"""`recipes.convert` makes a sharded state dict of ours of Megatron-Core's `torch_dist`, and `torch_dist` of such a one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.catalog.verify import verify_checkpoint
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.cli.converting_megatron import sharded_parts
from ckpt.dist_checkpointing.mapping import ShardedObject
from ckpt.dist_checkpointing.serialization import load, load_common_state_dict, load_plain_tensors
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.interop.dcp.writing import export_dcp
from ckpt.interop.megatron.reading import open_sharded
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from tests.golden.torch_dist.contents import ARGUMENTS, RANGES, WHOLE_CHUNKS, common, random_state, values
from tests.support.dcp_runs import save_by_dcp
from tests.support.ranks import run_ranks
from tests.support.states import same_bits
from tests.support.values import same_values

GOLDEN = Path(__file__).parents[1] / "golden" / "torch_dist"


def converted(src: Path, dst: Path, **keys: Any) -> dict[str, Any]:
    command = ConvertKeys(src=str(src), dst=str(dst), load=LoadKeys(allow_pickle=True), **keys)
    return convert_on_ranks(run_of(command), Topology.alone())


def require_all(path: Path, version: str) -> None:
    """Tensors, objects and common state are those that Megatron-Core saved, but the enums."""
    cuts = WHOLE_CHUNKS | (RANGES if version == "core-0.10.0" else {})
    if (path / ".metadata").exists():
        assert open_sharded(path).tensors.keys() == cuts.keys()
        tensors: dict[str, Any] = {}
    else:
        tensors = dict(load_plain_tensors(path))
        assert tensors.keys() == cuts.keys()
    for key, tensor in tensors.items():
        assert same_bits(tensor, values(key, cuts[key].shape, cuts[key].dtype)), key
    objects = {f"rng_state/shard_{rank}_2": random_state(rank) for rank in (0, 1)} | {"rerun/shard_0_1": {"step": 5}}
    wanted = {"objects": {key: ShardedObject.empty_from_unique_key(key) for key in objects}}
    with use_topology(Topology.alone()):
        found = load(wanted, path, allow_pickle=True)
    assert isinstance(found, dict) and same_values(found.pop("objects"), objects)
    assert vars(found.pop("args")) == ARGUMENTS and same_values(found, common())


@pytest.mark.parametrize(("version", "to"), [("core-0.10.0", "zarr"), ("core-0.16.1", "tensorstore")])
def test_it_becomes_ours_and_goes_back_to_the_bit(tmp_path: Path, version: str, to: str) -> None:
    told = converted(GOLDEN / version, tmp_path / "ours", to=to, leave_out_unknown=True)
    assert told["held"]["left_out"] == [
        "common.pt: args.model_type (megatron.core.enums.ModelType)",
        "rerun/shard_0_1: mode (megatron.core.enums.ModelType)",
    ]
    assert verify_checkpoint(tmp_path / "ours") == []
    require_all(tmp_path / "ours", version)
    converted(tmp_path / "ours", tmp_path / "back", to="dcp")
    require_all(tmp_path / "back", version)
    said = json.loads((tmp_path / "back" / "metadata.json").read_text())
    assert said == json.loads((GOLDEN / version / "metadata.json").read_text()), "Megatron-Core takes no other keys"
    assert torch.load(tmp_path / "back" / "common.pt", weights_only=False)["iteration"] == 7
    converted(tmp_path / "back", tmp_path / "again")
    require_all(tmp_path / "again", version)


def _exported(topology: Topology, ours: Path, dst: Path) -> None:
    export_dcp(source_at(ours, topology, DirectLoad()), dst, topology, sharded=sharded_parts(ours))


@pytest.mark.full
def test_two_ranks_write_it(tmp_path: Path) -> None:
    converted(GOLDEN / "core-0.16.1", tmp_path / "ours", leave_out_unknown=True)
    run_ranks(2, _exported, tmp_path / "ours", tmp_path / "back", process_group=True)
    require_all(tmp_path / "back", "core-0.16.1")
    assert same_values(load_common_state_dict(tmp_path / "back", allow_pickle=True)["nested"], common()["nested"])


def test_tensors_that_are_empty_or_do_not_lie_row_major_come_over(tmp_path: Path) -> None:
    state = {"empty": torch.empty(0, 3), "turned": torch.arange(12).reshape(3, 4).T, "scalar": torch.tensor(5)}
    save_by_dcp(state, tmp_path / "src")
    torch.save({"iteration": 3}, tmp_path / "src" / "common.pt")
    shutil.copy(GOLDEN / "core-0.16.1" / "metadata.json", tmp_path / "src")
    converted(tmp_path / "src", tmp_path / "ours")
    found = load_plain_tensors(tmp_path / "ours")
    assert found.keys() == state.keys() and all(same_bits(found[key], one.contiguous()) for key, one in state.items())


def test_what_is_not_converted_is_told_in_a_sentence(tmp_path: Path) -> None:
    src, dst = GOLDEN / "core-0.16.1", tmp_path / "new"
    with pytest.raises(ConfigurationError, match="holds values of classes that are not built here: .*args.model_type"):
        converted(src, dst)
    with pytest.raises(ConfigurationError, match="which to=kimi-engine cannot hold: choose to=zarr"):
        converted(src, dst, to="kimi-engine")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_off_is_told(tmp_path: Path) -> None:
    src = tmp_path / "src"
    src.mkdir()
    for file in (GOLDEN / "core-0.16.1").iterdir():
        data = file.read_bytes()
        (src / file.name).write_bytes(data[: len(data) // 2] if file.name == "__1_0.distcp" else data)
    with pytest.raises(CorruptCheckpointError, match="__1_0.distcp was cut off"):
        converted(src, tmp_path / "new", leave_out_unknown=True)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_its_tensors_become_plain_files_and_all_of_it_one_file(tmp_path: Path) -> None:
    told = converted(GOLDEN / "core-0.16.1", tmp_path / "plain", to="safetensors")
    assert told["held"]["tensors"] == len(WHOLE_CHUNKS)
    converted(GOLDEN / "core-0.16.1", tmp_path / "all.pt", to="torch", leave_out_unknown=True)
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    assert all(same_bits(found[key], values(key, cut.shape, cut.dtype)) for key, cut in WHOLE_CHUNKS.items())
