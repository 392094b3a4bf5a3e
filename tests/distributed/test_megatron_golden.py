"""Checkpoints that the real Megatron-Core wrote, loaded by `ckpt.load` as they are: any number of ranks, any cut, every bit.

S1.80: the ones that upstream itself can no longer read. What is in them says tests/golden/megatron/README.md; how each of
their files is read is the matter of tests/unit/interop/test_megatron_zarr.py, their conversion that of
tests/e2e/test_convert.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt import dist_checkpointing
from ckpt.catalog.verify import examine
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from ckpt.dist_checkpointing.strategies.base import LoadShardedStrategy
from ckpt.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from ckpt.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from ckpt.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from tests.golden.megatron.truth import Truth, truth
from tests.support.covering import sampled
from tests.support.cuts import (
    CUTS,
    Cut,
    along,
    chunks_of,
    fitted,
    flattened,
    layers_cut,
    on_every_rank,
    padded,
    padded_and_flattened,
)
from tests.support.ranks import run_ranks
from tests.support.states import same_bits
from tests.support.values import same_values

GOLDEN = ("tp2", "dp2", "tp2-dp2", "zero-dim", "old-names")
LIBRARIES: tuple[Callable[..., LoadShardedStrategy], ...] = (ZarrLoadShardedStrategy, TensorStoreLoadShardedStrategy)
ALL_ROUNDS = len(CUTS) + 1
"""So many loads, and every tensor has been loaded under every cut: in each a tensor takes the next one."""
WORDS = "model.embedding.word_embeddings.weight"
GATED = "model.decoder.layers.0.mlp.linear_fc1.weight"


# Any cut


def cut_in_round(number: int, at: int, key: str, expected: Truth) -> tuple[str, Cut]:
    """The cut of the tensor at place `at` of a checkpoint: over all rounds each of those that it can have, and as it was saved."""
    possible = [(name, cut) for name, (dims, cut) in CUTS.items() if expected.tensors[key].dim() >= dims]
    possible.append(("as saved", chunks_of(expected.chunks[key])))
    return possible[(number + at) % len(possible)]


def load_and_compare(
    topology: Topology, path: Path, held: dict[str, tuple[str, list[ShardedTensor]]], strategy: LoadShardedStrategy
) -> int:
    """Ask for pieces as they are held, compare all bits, and return how many elements there were.

    Args:
        held: key -> (what its cut is called, this rank's pieces with their true values).
    """
    asked = {key: [one.without_data() for one in pieces] for key, (_, pieces) in held.items()}
    with use_topology(topology):
        loaded = dist_checkpointing.load({"tensors": asked}, path, strategy, allow_pickle=True)
    assert isinstance(loaded, dict)
    found = loaded.get("tensors", {})
    assert found.keys() <= held.keys()
    for key, (name, pieces) in held.items():
        tensors = found.get(key, [])
        assert len(tensors) == len(pieces), (path, key, name)
        for one, tensor in zip(pieces, tensors, strict=True):
            assert one.data is not None and same_bits(tensor, one.data), (path, key, name, one, tensor)
    return sum(one.data.numel() for _, pieces in held.values() for one in pieces if one.data is not None)


def _load_in_rounds(
    topology: Topology,
    paths: Sequence[tuple[str, Path]],
    rounds: Iterable[int],
    libraries: Sequence[Callable[..., LoadShardedStrategy]],
) -> set[tuple[str, str, str]]:
    """Load each checkpoint once a round, through the libraries in turn; return (checkpoint, key, cut) of what had elements."""
    seen = set()
    for name, path in paths:
        expected = truth(name)
        for number in rounds:
            held = {}
            for at, (key, tensor) in enumerate(expected.tensors.items()):
                cut_name, cut = cut_in_round(number, at, key, expected)
                held[key] = cut_name, cut(key, tensor, topology.rank, topology.world_size)
            assert load_and_compare(topology, path, held, libraries[number % len(libraries)]()) > 0
            seen |= {(name, key, cut_name) for key, (cut_name, pieces) in held.items() if pieces}
    return seen


def every_cut(names: Iterable[str]) -> set[tuple[str, str, str]]:
    return {
        (name, key, cut_in_round(number, 0, key, expected)[0])
        for name in names
        for expected in [truth(name)]
        for key in expected.tensors
        for number in range(ALL_ROUNDS)
    }


def test_every_tensor_and_every_cut_of_each_checkpoint_loads_to_the_bit_on_two_ranks() -> None:
    """S1.1, S1.30, S1.80: tensor parallel 2 as saved, 1, other axes; flattened, stacked, padded; 0-dim. Each strategy in turn.

    Of each tensor a third of the cuts, another third of the next one; all of them where there are few tensors.
    """
    seen: set[tuple[str, str, str]] = set()
    for name in GOLDEN:
        rounds = range(0, ALL_ROUNDS, 3 if len(truth(name).tensors) >= len(CUTS) else 1)
        seen |= set.union(*run_ranks(2, _load_in_rounds, [(name, truth(name).path)], rounds, LIBRARIES))
    wanted = every_cut(GOLDEN)
    assert {(name, key) for name, key, _ in seen} == {(name, key) for name, key, _ in wanted}
    assert {(name, cut) for name, _, cut in seen} == {(name, cut) for name, _, cut in wanted}


def _two_stage() -> LoadShardedStrategy:
    assert dist.group.WORLD is not None
    return TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)


@sampled("names", [[*GOLDEN][:2], [*GOLDEN]], ids=["two of them", "all"])
def test_two_stages_load_every_tensor_too(names: list[str]) -> None:
    """S1.46, S1.57: what megatron-core wrote has no digests, and goes the same way: raw chunks as they are, others decoded once."""
    paths = [(name, truth(name).path) for name in names]
    seen = run_ranks(2, _load_in_rounds, paths, range(0, ALL_ROUNDS, 3), (_two_stage,), process_group=True)
    assert {(name, key) for name, key, _ in set.union(*seen)} == {(name, key) for name, key, _ in every_cut(names)}


def test_one_process_alone_loads_every_tensor() -> None:
    """S1.30, S1.80: data and tensor parallel 1, without a process group."""
    paths = [(name, truth(name).path) for name in GOLDEN]
    seen = _load_in_rounds(Topology.alone(), paths, range(0, ALL_ROUNDS, 5), LIBRARIES)
    assert {(name, key) for name, key, _ in seen} == {(name, key) for name, key, _ in every_cut(GOLDEN)}


def _load_on_four(topology: Topology) -> tuple[set[tuple[str, str, str]], list[str]]:
    paths = [(name, truth(name).path) for name in ("tp2", "dp2", "tp2-dp2")]
    seen = _load_in_rounds(topology, paths, range(1, ALL_ROUNDS, 4), LIBRARIES)
    for library in LIBRARIES:
        _load_padded_vocabulary(topology, library())
    other = {"w": ShardedTensor.from_rank_offsets(WORDS, torch.zeros(4, 6), (0, topology.rank, 4))}
    path = truth("dp2").path
    return seen, [
        _refusal(topology, dist_checkpointing.load, other, path, library(), allow_pickle=True) for library in LIBRARIES
    ]


def _load_padded_vocabulary(topology: Topology, strategy: LoadShardedStrategy) -> None:
    expected = truth("dp2").tensors
    for rows in (16, 24):
        held = {}
        for key in (WORDS, f"optimizer.state.exp_avg.{WORDS}"):
            pieces = padded(rows)(key, expected[key], topology.rank, 4)
            assert pieces[0].global_shape == (rows, 6) and expected[key].shape == (13, 6)
            held[key] = f"padded to {rows}", pieces
        key = f"optimizer.state.fp32_param.{WORDS}"
        held[key] = "padded and flattened", padded_and_flattened(key, expected[key], topology.rank, 4)
        load_and_compare(topology, truth("dp2").path, held, strategy)
        if topology.rank == 3:
            is_all_padding = [not pieces[0].data.any() for _, pieces in held.values() if pieces[0].data is not None]
            assert is_all_padding[:2] == [rows == 24] * 2


def _refusal(topology: Topology, call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The class and the sentence of what this rank raises."""
    with use_topology(topology), pytest.raises(CheckpointError) as caught:
        call(*args, **options)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_four_ranks_load_what_two_saved_and_a_rank_may_hold_nothing_but_padding() -> None:
    """S1.30, S1.31, S1.42: 13 rows as 16 and as 24 on 4 ranks; another shape than the stored one only where that is allowed."""
    results = run_ranks(4, _load_on_four)
    assert len(set.union(*(seen for seen, _ in results))) > 100
    for refusals in zip(*(said for _, said in results), strict=True):
        (said,) = set(refusals)
        assert said.startswith("ShapeMismatchError: ")
        assert f"{WORDS}: the checkpoint holds global shape [13, 6], the sharded state dict asks for [16, 6]." in said


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_tensor_loads_to_the_bit_under_every_cut_with_every_library(
    ranks: int, library: Callable[..., LoadShardedStrategy]
) -> None:
    """S1.30, S1.80"""
    paths = [(name, truth(name).path) for name in GOLDEN]
    seen = run_ranks(ranks, _load_in_rounds, paths, range(ALL_ROUNDS), [library], timeout_s=240)
    assert set.union(*seen) == every_cut(GOLDEN)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_was_converted_loads_under_other_cuts_with_either_library(tmp_path: Path, ranks: int) -> None:
    """S1.44, S1.80: into both formats, each of which both strategies read."""
    paths = []
    for name in GOLDEN:
        for to in ("zarr", "tensorstore"):
            dst = tmp_path / f"{name} {to}"
            src, keys = str(truth(name).path), LoadKeys(allow_pickle=True)
            convert_on_ranks(
                run_of(ConvertKeys(src=src, dst=str(dst), to=to, load=keys, leave_out_unknown=True)), Topology.alone()
            )
            assert examine(dst).problems == []
            paths.append((name, dst))
    rounds = range(ALL_ROUNDS) if ranks == 3 else range(0, ALL_ROUNDS, 7)
    seen = run_ranks(ranks, _load_in_rounds, paths, rounds, LIBRARIES, timeout_s=240)
    keys = {(name, key) for name, key, _ in set.union(*seen)}
    assert keys == {(name, key) for name, key, _ in every_cut(GOLDEN)}


# A program's whole state


def program_state(expected: Truth, rank: int, ranks: int) -> dict[str, Any]:
    """What a training program on `ranks` tensor-parallel ranks asks the checkpoint "tp2" for, nested as programs nest."""
    stacked = "model.decoder.layers.self_attention.linear_qkv.weight"
    return {
        "model": {
            "words": ShardedTensor.from_rank_offsets(
                WORDS, expected.tensors[WORDS].chunk(ranks)[rank], (0, rank, ranks), allow_shape_mismatch=True
            ),
            "layers": [
                {
                    "qkv": ShardedTensor.from_rank_offsets(
                        stacked, part.chunk(ranks)[rank], (0, layer, 3), (1, rank, ranks), prepend_axis_num=1
                    ),
                    "extra": ShardedObject(
                        "model.decoder.layers.self_attention.linear_qkv._extra_state",
                        None,
                        (3,),
                        (layer,),
                        (0, rank, 0),
                    ),
                }
                for layer, part in enumerate(expected.tensors[stacked])
            ],
            "gated": ShardedTensorFactory(
                GATED, gated_part(expected, rank, ranks), gated_shards(rank, ranks), torch.cat
            ),
        },
        "rng": ShardedObject("rng_state", None, (1, 2), (0, rank % 2), (0, rank // 2)),
        "folder": [ShardedObject("folder/of/object", None, (1,), (0,), (0, rank, 0))],
        "rank": LocalNonpersistentObject(rank),
        "iteration": -1,
    }


def gated_part(expected: Truth, rank: int, ranks: int) -> torch.Tensor:
    """This rank's gate, and behind it this rank's value: two parts that lie apart in the whole tensor."""
    gate, value = (half.chunk(ranks)[rank] for half in expected.tensors[GATED].chunk(2))
    return torch.cat([gate, value])


def gated_shards(rank: int, ranks: int) -> Callable[..., list[ShardedTensor]]:
    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        places = (rank, ranks + rank)
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, place, 2 * ranks), replica_id=replica_id)
            for half, place in zip(data.chunk(2), places, strict=True)
        ]

    return build


def _load_a_program(topology: Topology) -> None:
    """As a program that was written for Megatron-Core does: torch's process group is there, and no topology is named."""
    expected, rank, ranks = truth("tp2"), topology.rank, topology.world_size
    asked = program_state(expected, rank, ranks)
    loaded = dist_checkpointing.load(asked, expected.path, allow_pickle=True)
    assert isinstance(loaded, dict)
    assert isinstance(asked["model"]["words"], ShardedTensor), "what was asked with stays as it is"
    model, objects = loaded.pop("model"), expected.objects
    assert same_bits(model["words"], asked["model"]["words"].data)
    assert len(model["layers"]) == 3
    for layer, (found, wanted) in enumerate(zip(model["layers"], asked["model"]["layers"], strict=True)):
        assert same_bits(found["qkv"], wanted["qkv"].data)
        assert same_values(found["extra"], objects[f"{wanted['extra'].key}/shard_{layer}_3"])
    assert same_bits(model["gated"], gated_part(expected, rank, ranks))
    assert same_values(loaded.pop("rng"), objects[f"rng_state/shard_0.{rank % 2}_1.2"])
    assert same_values(loaded.pop("folder"), [objects["folder/of/object/shard_0_1"]])
    assert loaded.pop("rank") == rank
    assert same_values(loaded, expected.common)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_program_gets_its_whole_state_from_the_checkpoint_of_another(ranks: int) -> None:
    """S1.30, S1.64, S1.65, S1.68, S1.76: factories, objects, local values; the strategies are the checkpoint's own."""
    run_ranks(ranks, _load_a_program, process_group=True)


# What is pickled


def _load_pickled(topology: Topology) -> dict[str, str]:
    """Load all that is pickled, half of the objects as main replica; return the sentence of each refusal."""
    rank, cube = topology.rank, truth("old-names").path
    for name in GOLDEN:
        objects = [ShardedObject.empty_from_unique_key(key) for key in sorted(truth(name).objects)]
        for number, one in enumerate(objects):
            one.replica_id = int(number % 2 != rank)
        with use_topology(topology):
            loaded = dist_checkpointing.load(
                {"objects": {one.unique_key: one for one in objects}}, truth(name).path, allow_pickle=True
            )
        assert isinstance(loaded, dict) and same_values(loaded.pop("objects", {}), truth(name).objects)
        require_common(loaded, truth(name))
    words = ShardedTensor.from_rank_offsets("types.bool", torch.ones(4, 3).bool(), replica_id=rank)
    absent = ShardedObject("rng_state", None, (1, 3), (0, 2)), ShardedObject("cube", None, (1, 1, 3), (0, 0, 1))
    refuse = partial(_refusal, topology, dist_checkpointing.load)
    return {
        "not allowed": refuse({"w": words}, truth("tp2").path),
        "not allowed by its format": refuse({}, truth("tp2").path, common_strategy=("torch", 1)),
        "unknown": refuse({}, truth("tp2-dp2").path, None, TorchCommonLoadStrategy(allow_pickle=True)),
        "no such object": refuse({"one": absent[1 - rank]}, cube, validate_access_integrity=False, allow_pickle=True),
    }


def require_common(loaded: Any, expected: Truth) -> None:
    """Compare the common state; of a class of another program there is what is known of it."""
    named = vars(expected.common.get("args", argparse.Namespace())).pop("model_type", None)
    assert (named is not None) == (expected.path.name == "tp2-dp2")
    if named is not None:
        unknown = vars(loaded["args"]).pop("model_type")
        assert (unknown.name, unknown.args) == (named.type, (named.value,))
    assert same_values(loaded, expected.common)


def test_objects_come_when_pickles_are_allowed_and_else_one_sentence_on_every_rank() -> None:
    """S1.75, S1.76: also under the names of old files; beside an enum of the old program, which cannot be imported here."""
    first, second = run_ranks(2, _load_pickled)
    assert first == second
    says = {
        "not allowed": r"ConfigurationError: load of \S+/tp2: \S+/common\.pt is a pickle, which is read only where that",
        "not allowed by its format": r"ConfigurationError: load of \S+/tp2: \S+/common\.pt is a pickle, ",
        "unknown": r"ConfigurationError: .*/common\.pt holds .*: args\.model_type: megatron\.core\.enums\.ModelType",
        "no such object": r"MissingStateError: .* failed in phase \w+ on rank 1: object rng_state/shard_0\.2_1\.3 is not in ",
    }
    assert first.keys() == says.keys()
    for name, pattern in says.items():
        assert re.match(pattern, first[name]), first[name]


# Keys that one of the two does not have


def _load_strictly(topology: Topology) -> dict[str, Any]:
    """Rank 0 asks for a tensor that is not there, rank 1 for an object; what comes back is compared here."""
    path, rank = truth("tp2").path, topology.rank
    norm = "model.decoder.final_layernorm.weight"
    here = on_every_rank(norm, truth("tp2").tensors[norm], rank, 2)[0]
    new: Any = ShardedTensor.from_rank_offsets("new.weight", torch.ones(2))
    if rank:
        new = ShardedObject("new.object", None, (1,), (0,))
    found: dict[str, Any] = {}
    for strict in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        found[strict] = _refusal(
            topology, dist_checkpointing.load, {"norm": here, "new": new}, path, strict=strict, allow_pickle=True
        )
    for strict in ("log_unexpected", "log_all", "ignore_all", "return_unexpected", "return_all"):
        with use_topology(topology):
            loaded = dist_checkpointing.load({"norm": here, "new": new}, path, strict=strict, allow_pickle=True)
        state, *found[strict] = loaded if isinstance(loaded, tuple) else (loaded,)
        assert here.data is not None and same_bits(state.pop("norm"), here.data)
        assert same_values(state, truth("tp2").common), "what is not there is left out"
    return found


def test_keys_that_the_checkpoint_or_the_program_does_not_have_are_told_on_every_rank() -> None:
    """S1.70, S1.71: tensors and objects; missing is what no rank asks for, unexpected what a rank asks for in vain."""
    first, second = run_ranks(2, _load_strictly)
    held = {*truth("tp2").tensors, *(key.rpartition("/")[0] for key in truth("tp2").objects)}
    missing = held - {"model.decoder.final_layernorm.weight"}
    unexpected = "Unexpected keys (requested, not in the checkpoint): new.weight (rank 0), new.object (rank 1)."
    says = {
        "assume_ok_unexpected": r"failed in phase \w+ on rank 1: object new\.object/shard_0_1 is not in \S+/tp2\.",
        "raise_unexpected": rf"differ in their keys; {re.escape(unexpected)}",
        "raise_all": rf"differ in their keys; Missing keys \(in the checkpoint, not requested\): .*; {re.escape(unexpected)}",
    }
    for strict, pattern in says.items():
        assert first[strict] == second[strict] and first[strict].startswith("MissingStateError: ")
        assert re.search(pattern, first[strict]), first[strict]
    for found, new in ((first, "new.weight"), (second, "new.object")):
        assert found["return_all"] == [missing, {new}]
        assert found["return_unexpected"] == [set(), {new}]
        assert all(found[strict] == [] for strict in ("log_unexpected", "log_all", "ignore_all"))


# Damage

DAMAGED = {
    "a chunk": "types.int16/1.0",
    "a chunk of zeros": "zeros.weight/1.0",
    "the end of a chunk": "types.int16/1.0",
    "all of a chunk's bytes": "types.int16/1.0",
    "what an array is": "types.int16/.zarray",
    "the metadata of an array in part": "types.int16/.zarray",
    "a whole array": "types.int16",
    "the common state": "common.pt",
    "an object": "bytes/shard_0_1.pt",
    "what a checkpoint is": "metadata.json",
}
"""What is lost of the checkpoint "tp2", and where it was."""


def damaged(damage: str, path: Path) -> Path:
    place = shutil.copytree(truth("tp2").path, path) / DAMAGED[damage]
    if place.is_dir():
        shutil.rmtree(place)
    elif damage in ("the end of a chunk", "the metadata of an array in part"):
        place.write_bytes(place.read_bytes()[:-1])
    elif damage == "all of a chunk's bytes":
        place.write_bytes(b"")
    else:
        place.unlink()
    return path


def _load_damaged(topology: Topology, root: Path) -> dict[str, list[str]]:
    """What this rank raises, by damage, for each library. Rank 0 asks for nothing that the lost chunks hold."""
    found: dict[str, list[str]] = {}
    for damage in DAMAGED:
        for library in LIBRARIES:
            asked: dict[str, Any] = {
                key: along(0)(key, truth("tp2").tensors[key], topology.rank, 2)
                for key in ("types.int16", "zeros.weight")
            }
            asked["object"] = ShardedObject("bytes", None, (1,), (0,), topology.rank)
            said = _refusal(topology, dist_checkpointing.load, asked, root / damage, library(), allow_pickle=True)
            found.setdefault(damage, []).append(said)
    sound = {"types.int8": ("along 0", along(0)("types.int8", truth("tp2").tensors["types.int8"], topology.rank, 2))}
    load_and_compare(topology, root / "a chunk", sound, ZarrLoadShardedStrategy())
    return found


def test_what_is_lost_of_a_checkpoint_is_an_error_on_every_rank_and_never_zeros(tmp_path: Path) -> None:
    """S1.32, S1.43, S1.80: one sentence that names it, by either library; what is sound beside it can be loaded."""
    for damage in DAMAGED:
        damaged(damage, tmp_path / damage)
    first, second = run_ranks(2, _load_damaged, tmp_path)
    assert first == second
    corrupt = r"CorruptCheckpointError: .* failed in phase \w+ on rank 1: types.int16: chunk 1.0"
    says = {
        "a chunk": f"{corrupt} is missing, there is no ",
        "a chunk of zeros": r"CorruptCheckpointError: .* failed in phase \w+ on rank 1: zeros.weight: chunk 1.0 is missing",
        "the end of a chunk": f"{corrupt} has 11 bytes, and .* are 12: ",
        "all of a chunk's bytes": f"{corrupt} has 0 bytes, and .* are 12: ",
        "what an array is": "CorruptCheckpointError: .*types.int16: .*holds chunks of an array, and its .zarray is missing",
        "the metadata of an array in part": "CorruptCheckpointError: .*types.int16: .*does not describe a Zarr v2 array",
        "a whole array": "MissingStateError: .*: types.int16 is asked for, and .* does not hold it",
        "the common state": r"CorruptCheckpointError: .*common\.pt does not exist",
        "an object": "MissingStateError: .*object bytes/shard_0_1 is not in ",
        "what a checkpoint is": r"CheckpointNotFoundError: .* is not a distributed checkpoint: it has no metadata\.json",
    }
    for damage, pattern in says.items():
        assert len(first[damage]) == 2
        for said in first[damage]:
            assert re.match(pattern, said), (damage, said)


# Into tensors that the program holds


def _load_in_place(topology: Topology) -> list[str]:
    refusals = []
    for library in LIBRARIES:
        strategy = library(load_directly_on_device=True)
        _fill_parameters(topology, strategy)
        _fill_pieces(topology, strategy)
        none = ShardedTensor.from_rank_offsets("types.bool", torch.ones(4, 3).bool(), replica_id=topology.rank)
        asked = {"x": none.without_data()}
        refusals.append(
            _refusal(topology, dist_checkpointing.load, asked, truth("tp2").path, strategy, allow_pickle=True)
        )
    return refusals


def _fill_parameters(topology: Topology, strategy: LoadShardedStrategy) -> None:
    """Parameters that autograd watches: of the stored type, of another one, and not contiguous."""
    expected = truth("dp2").tensors
    held = {key: expected[key].chunk(3, 1)[topology.rank] for key in ("model.proj.weight",)}
    held |= {WORDS: expected[WORDS].chunk(2, 1)[topology.rank].float()}
    moment = "optimizer.state.exp_avg.model.proj.weight"
    held |= {moment: expected[moment]}
    model = {key: torch.nn.Parameter(torch.full_like(tensor, 7).contiguous()) for key, tensor in held.items()}
    model[moment] = torch.nn.Parameter(torch.full((9, 5), 7.0).T)
    asked = {
        "model.proj.weight": ShardedTensor.at(
            "model.proj.weight", model["model.proj.weight"], (5, 9), (0, 3 * topology.rank)
        ),
        WORDS: ShardedTensor.from_rank_offsets(WORDS, model[WORDS], (1, topology.rank, 2)),
        moment: ShardedTensor.from_rank_offsets(moment, model[moment], replica_id=topology.rank),
    }
    with use_topology(topology):
        loaded = dist_checkpointing.load(
            {"model": asked}, truth("dp2").path, strategy, validate_access_integrity=False, allow_pickle=True
        )
    assert isinstance(loaded, dict)
    for key, parameter in model.items():
        assert loaded["model"][key] is parameter and parameter.requires_grad and parameter.grad_fn is None
        assert same_bits(parameter.detach(), held[key]), key


def _fill_pieces(topology: Topology, strategy: LoadShardedStrategy) -> None:
    """Runs, layers and padding, in memory that holds something else before."""
    stacked = "model.decoder.layers.self_attention.linear_qkv.weight"
    cuts = {WORDS: padded(24), "bits.float32": flattened, stacked: layers_cut, "model.output_layer.weight": fitted}
    held = {key: cut(key, truth("tp2").tensors[key], topology.rank, topology.world_size) for key, cut in cuts.items()}
    asked = {key: [replace(one, data=torch.full_like(one.data, 7)) for one in pieces] for key, pieces in held.items()}
    with use_topology(topology):
        loaded = dist_checkpointing.load({"model": asked}, truth("tp2").path, strategy, allow_pickle=True)
    assert isinstance(loaded, dict)
    for key, pieces in held.items():
        for one, given, tensor in zip(pieces, asked[key], loaded["model"][key], strict=True):
            assert tensor is given.data and one.data is not None and same_bits(tensor, one.data), key


def test_the_tensors_that_a_program_holds_are_filled_and_come_back_themselves() -> None:
    """S1.39, S1.40: also parameters of another data type; who asks for that and holds none is refused on every rank."""
    for refusals in zip(*run_ranks(2, _load_in_place), strict=True):
        (said,) = set(refusals)
        assert (
            said.startswith("ConfigurationError: ")
            and "types.bool: load_directly_on_device=True fills the tensor" in said
        )


# What one may ask of a checkpoint


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Whatever torch.load has been called with."""
    calls: list[Any] = []
    read = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: (calls.append(args[0]), read(*args, **options))[1])
    return calls


@pytest.mark.parametrize("name", GOLDEN)
def test_one_process_may_ask_what_is_in_a_checkpoint(name: str, unpickled: list[Any]) -> None:
    """S1.36, S1.37, S1.45, S1.75: keys with `/` are listed, the folders of locks (`.sync`) are not; no pickle is opened."""
    expected = truth(name)
    assert list(expected.path.glob("*.sync")) != [] or name in ("tp2", "zero-dim")
    for strategy in (None, ("zarr", 1), *(library() for library in LIBRARIES)):
        tensors = dist_checkpointing.load_tensors_metadata(expected.path, strategy)
        assert tensors.keys() == expected.tensors.keys()
        for key, tensor in expected.tensors.items():
            one = tensors[key]
            assert (one.key, one.dtype, one.global_shape, one.data) == (key, tensor.dtype, tuple(tensor.shape), None)
            assert (one.local_shape, one.global_offset) == (one.global_shape, (0,) * tensor.dim())
        everything = dist_checkpointing.load_sharded_metadata(expected.path, strategy)
        assert everything.keys() == {*expected.tensors, *expected.objects}
        for key in expected.objects:
            assert everything[key].unique_key == key and everything[key].data is None
    whole = dist_checkpointing.load_plain_tensors(expected.path)
    assert whole.keys() == expected.tensors.keys()
    assert all(same_bits(whole[key], tensor) for key, tensor in expected.tensors.items())
    assert dist_checkpointing.check_is_distributed_checkpoint(expected.path)
    with pytest.raises(ConfigurationError, match=r"common\.pt is a pickle, which is read only where that is asked for"):
        dist_checkpointing.load_common_state_dict(expected.path)
    assert unpickled == []
    require_common(dist_checkpointing.load_common_state_dict(expected.path, allow_pickle=True), expected)
    assert unpickled != []


def test_the_classes_of_another_program_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """S1.75, S1.80: as in every checkpoint that Megatron-LM itself wrote."""
    path = truth("tp2-dp2").path
    with caplog.at_level(logging.WARNING, "ckpt"):
        dist_checkpointing.load_common_state_dict(path, allow_pickle=True)
    (record,) = caplog.records
    assert str(path) in record.message and "args.model_type (megatron.core.enums.ModelType)" in record.message


def _ask_alone(topology: Topology) -> None:
    """Rank 1 asks; rank 0 does not, and neither waits for the other."""
    if topology.rank == 1:
        with use_topology(topology):
            path = truth("dp2").path
            assert (
                len(dist_checkpointing.load_tensors_metadata(path)) == 15
                and len(dist_checkpointing.load_sharded_metadata(path)) == 17
            )
            assert len(dist_checkpointing.load_plain_tensors(path)) == 15
            assert dist_checkpointing.load_common_state_dict(path, allow_pickle=True)["iteration"] == 7
    with topology.phase("after that") as phase:
        phase.payload = topology.rank
    assert phase.payloads == [0, 1]


def test_a_rank_may_ask_alone_what_is_in_a_checkpoint() -> None:
    """S1.75: these calls are not collective."""
    run_ranks(2, _ask_alone)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sharded_backend", "hdf5"),
        ("sharded_backend_version", 2),
        ("common_backend", "msgpack"),
        ("common_backend_version", 3),
    ],
)
def test_what_another_version_or_backend_wrote_is_refused(tmp_path: Path, name: str, value: object) -> None:
    """S1.5, S1.37, S1.45: by the strategies that the checkpoint asks for, and by those that are given."""
    path = shutil.copytree(truth("zero-dim").path, tmp_path / "other")
    file = path / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {name: value}))
    given = TorchCommonLoadStrategy(allow_pickle=True)
    for sharded, common in ((None, None), *((library(), given) for library in LIBRARIES)):
        with pytest.raises(ConfigurationError, match=str(value)):
            dist_checkpointing.load({}, path, sharded, common)
        with pytest.raises(ConfigurationError, match=str(value)):
            dist_checkpointing.load_sharded_metadata(path, sharded, common)


def test_metadata_of_old_that_name_no_common_backend_mean_torch(tmp_path: Path) -> None:
    """S1.69"""
    path = shutil.copytree(truth("old-names").path, tmp_path / "older")
    (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    assert dist_checkpointing.load({}, path, allow_pickle=True) == truth("old-names").common


def test_tensors_that_are_removed_take_their_locks_along_and_the_rest_loads(tmp_path: Path) -> None:
    """S1.14, S1.75: a checkpoint without its optimizer is one all the same."""
    path, expected = shutil.copytree(truth("dp2").path, tmp_path / "dp2"), truth("dp2").tensors
    dist_checkpointing.remove_sharded_tensors(path, "optimizer.")
    left = {key: tensor for key, tensor in expected.items() if not key.startswith("optimizer.")}
    loaded = dist_checkpointing.load_plain_tensors(path)
    assert loaded.keys() == left.keys() and all(same_bits(loaded[key], tensor) for key, tensor in left.items())
    assert list(path.glob("*.sync")) == []
    dist_checkpointing.remove_sharded_tensors(path, "no such")
    assert dist_checkpointing.load_tensors_metadata(path).keys() == left.keys()


def test_what_somebody_has_put_into_the_folder_of_a_tensor_stays_when_that_is_removed(tmp_path: Path) -> None:
    path = shutil.copytree(truth("dp2").path, tmp_path / "dp2")
    keys = [key for key in truth("dp2").tensors if key.startswith("optimizer.")]
    for key in keys:
        (path / key / "notes.txt").write_text("precious")
    dist_checkpointing.remove_sharded_tensors(path, "optimizer.")
    for key in keys:
        assert [one.name for one in (path / key).iterdir()] == ["notes.txt"]
