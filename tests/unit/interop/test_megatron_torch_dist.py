"""`torch_dist` checkpoints that the real Megatron-Core wrote are loaded to the bit, alone and on three ranks; damaged ones are refused."""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer, dist_checkpointing
from ckpt.dist_checkpointing import ShardedObject, ShardedTensor
from ckpt.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from tests.golden.torch_dist.contents import ARGUMENTS, RANGES, WHOLE_CHUNKS, Cut, common, random_state, values
from tests.support.ranks import run_ranks
from tests.support.states import same_bits

GOLDEN = Path(__file__).parents[2] / "golden" / "torch_dist"
VERSIONS = ["0.10.0", "0.16.1"]
OLD = GOLDEN / "core-0.10.0"


def tensors_of(version: str) -> dict[str, Cut]:
    return WHOLE_CHUNKS | (RANGES if version == "0.10.0" else {})


def require_all(loaded: dict[str, Any], version: str) -> None:
    for key, cut in tensors_of(version).items():
        assert same_bits(loaded[key], values(key, cut.shape, cut.dtype)), key
    for rank in (0, 1):
        found, expected = loaded[f"rng_state/shard_{rank}_2"][0], random_state(rank)[0]
        assert same_bits(found.pop("torch_rng_state"), expected.pop("torch_rng_state")) and found == expected
    assert loaded["decoder.extra_state/shard_0_1"].getvalue() == b"extra"
    assert loaded["rerun/shard_0_1"]["step"] == 5
    expected = common()
    assert same_bits(loaded["tensor"], expected["tensor"])
    scale = expected["optimizer"]["grad_scaler"].pop("scale")
    assert same_bits(loaded["optimizer"]["grad_scaler"].pop("scale"), scale)
    assert {key: loaded[key] for key in expected if key != "tensor"} == {
        key: one for key, one in expected.items() if key != "tensor"
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_all_of_it_is_loaded_by_name_without_objects_of_unknown_classes(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ckpt"):
        loaded = ckpt.load(GOLDEN / f"core-{version}", allow_pickle=True)
    require_all(loaded, version)
    assert loaded["args"] == argparse.Namespace(**ARGUMENTS) and loaded["rerun/shard_0_1"] == {"step": 5}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "args.model_type (megatron.core.enums.ModelType is not built)" in said and "rerun/shard_0_1.mode" in said
    with pytest.raises(CheckpointNotFoundError, match=r"\.metadata is a pickle.* load with allow_pickle=True"):
        ckpt.load(GOLDEN / f"core-{version}")


# on several ranks, cut anew


def _rows(topology: Topology, key: str, cut: Cut) -> tuple[slice, ShardedTensor]:
    """A rank's rows of a tensor, as it asks for them."""
    first, stop = (cut.shape[0] * rank // topology.world_size for rank in (topology.rank, topology.rank + 1))
    data = torch.full((stop - first, *cut.shape[1:]), 7, dtype=cut.dtype)
    return slice(first, stop), ShardedTensor.at(key, data, cut.shape, (first, *[0] * (len(cut.shape) - 1)))


def _load_rows(topology: Topology) -> None:
    for version in VERSIONS:
        asked = {key: _rows(topology, key, cut) for key, cut in tensors_of(version).items()}
        objects = {"rng": ShardedObject("rng_state", None, (2,), (topology.rank % 2,), replica_id=topology.rank)}
        with use_topology(topology):
            loaded = dist_checkpointing.load(
                {"model": {key: one for key, (_, one) in asked.items()}, "objects": objects},
                GOLDEN / f"core-{version}",
                allow_pickle=True,
                validate_access_integrity=False,
            )
        assert isinstance(loaded, dict) and loaded["iteration"] == 7
        for key, (rows, _) in asked.items():
            cut = tensors_of(version)[key]
            assert same_bits(loaded["model"][key], values(key, cut.shape, cut.dtype)[rows]), (version, key)
        found = loaded["objects"]["rng"][0]["torch_rng_state"]
        assert same_bits(found, random_state(topology.rank % 2)[0]["torch_rng_state"])


class _Held:
    """A component: all tensors of a checkpoint, cut by rows; and one that a value holds."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def _resume(topology: Topology, own: Path) -> None:
    """A checkpointer takes tensors of the model, and of the common state; the reading is spread over the ranks, too."""
    for load in ("direct", "two-stage"):
        model = _Held({key: torch.zeros(cut.shape, dtype=cut.dtype) for key, cut in tensors_of("0.10.0").items()})
        optimizer = _Held({})
        with Checkpointer(
            own / load, model=model, optimizer=optimizer, save_rng=False, allow_pickle=True, load=load
        ) as checkpoints:
            checkpoints.restore(OLD)
        for key, cut in tensors_of("0.10.0").items():
            assert same_bits(model.tensors[key], values(key, cut.shape, cut.dtype)), (load, key)
        assert optimizer.tensors["grad_scaler"]["scale"].tolist() == [65536.0]


def test_three_ranks_load_what_two_have_saved(tmp_path: Path) -> None:
    run_ranks(3, _load_and_resume, tmp_path, process_group=True)


def _load_and_resume(topology: Topology, own: Path) -> None:
    _load_rows(topology)
    _resume(topology, own)


def test_padded_rows_and_the_names_of_all_that_is_there() -> None:
    key = "embedding.word_embeddings.weight"
    cut = WHOLE_CHUNKS[key]
    wanted = ShardedTensor.from_rank_offsets(key, torch.ones(20, 5, dtype=cut.dtype), allow_shape_mismatch=True)
    loaded = dist_checkpointing.load({"x": wanted}, OLD, allow_pickle=True)
    assert isinstance(loaded, dict)
    assert same_bits(loaded["x"][:16], values(key, cut.shape, cut.dtype)) and not loaded["x"][16:].any()
    strategy = TorchDistLoadShardedStrategy(allow_pickle=True)
    known = dist_checkpointing.load_sharded_metadata(OLD, strategy)
    assert known.keys() == {*tensors_of("0.10.0"), "rng_state/shard_0_2", "rng_state/shard_1_2",
                            "decoder.extra_state/shard_0_1", "rerun/shard_0_1"}  # fmt: skip
    assert {key: one.global_shape for key, one in known.items() if isinstance(one, ShardedTensor)} == {
        key: cut.shape for key, cut in tensors_of("0.10.0").items()
    }


def test_pickles_are_refused_and_a_missing_object_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"common\.pt is a pickle, which is read only where that is asked for"):
        dist_checkpointing.load({}, OLD)
    wanted = ShardedObject("rng_state", None, (3,), (2,))
    with pytest.raises(MissingStateError, match="object rng_state/shard_2_3 is not in "):
        dist_checkpointing.load({"x": wanted}, OLD, allow_pickle=True, validate_access_integrity=False)


# damage

KEY = "optimizer.state.exp_avg.decoder.linear_qkv"


def _shape_told(shape: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        metadata.mcore_data[KEY] = {"nd_reformulated_orig_global_shape": shape}
        file.write_bytes(pickle.dumps(metadata))

    return change


def _common(value: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / "common.pt")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "another shape": _shape_told((8, 7)),
    "a shape of other dimensions": _shape_told((48,)),
    "a negative shape": _shape_told((-8, -6)),
    "a huge shape": _shape_told((1 << 40, 6)),
    "no shape": _shape_told("8x6"),
    "no common state": lambda folder: (folder / "common.pt").unlink(),
    "a common state that was cut off": lambda folder: (folder / "common.pt").write_bytes(
        (OLD / "common.pt").read_bytes()[:900]
    ),
    "a list as common state": _common([1]),
    "a common state without end": _common({"a": reduce(lambda below, _: [below, below], range(64), [])}),
    "a name that is there twice": _common({"output_layer.bias": 1}),
    "a common state that is a link": lambda folder: (
        (folder / "common.pt").rename(folder / "other.pt"),
        (folder / "common.pt").symlink_to(folder / "other.pt"),
    ),
    "a missing file": lambda folder: (folder / "__1_0.distcp").unlink(),
    "a file that was cut off": lambda folder: (folder / "__0_0.distcp").write_bytes(b"PK"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: str) -> None:
    folder = shutil.copytree(OLD, tmp_path / "saved")
    DAMAGE[damage](folder)
    with pytest.raises(CorruptCheckpointError, match=str(folder)):
        ckpt.load(folder, allow_pickle=True)


@pytest.mark.parametrize("load", ["direct", "two-stage"])
def test_an_empty_tensor_of_the_common_state_is_loaded(tmp_path: Path, load: str) -> None:
    folder = shutil.copytree(OLD, tmp_path / "saved")
    _common({"buffers": (torch.empty(3, 0, dtype=torch.int16), torch.ones(2))})(folder)
    empty, ones = ckpt.load(folder, load=load, allow_pickle=True)["buffers"]
    assert (empty.shape, empty.dtype, ones.tolist()) == ((3, 0), torch.int16, [1, 1])


def test_a_folder_with_other_metadata_is_one_of_dcp(tmp_path: Path) -> None:
    folder = shutil.copytree(OLD, tmp_path / "saved")
    (folder / "metadata.json").write_text(json.dumps({"format": "mine"}))
    assert "iteration" not in ckpt.load(folder, allow_pickle=True)
