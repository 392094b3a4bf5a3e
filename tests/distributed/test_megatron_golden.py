"""Checkpoints that the real Megatron-Core wrote, loaded by `ckpt.load` as they are: any number of ranks, any cut, every bit.

S1.80: the ones that upstream itself can no longer read. What is in them says tests/golden/megatron/README.md; how each of
their files is read is the matter of tests/unit/test_megatron_zarr.py, their conversion that of tests/e2e/test_convert.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from ckpt.errors import (
    CheckpointError,
)
from ckpt.job import current_topology, use_topology
from ckpt.strategies.base import LoadShardedStrategy
from ckpt.strategies.common import TorchCommonLoadStrategy
from ckpt.strategies.tensorstore import TensorStoreLoadShardedStrategy
from ckpt.strategies.zarr import ZarrLoadShardedStrategy
from ckpt.topology import Topology
from ckpt.verify import examine
from recipes.converting import ConvertKeys, LoadKeys, convert
from tests.cuts import CUTS, Cut, chunks_of, padded, padded_and_flattened
from tests.golden.megatron.truth import Truth, truth
from tests.ranks import run_ranks
from tests.states import same_bits
from tests.values import same_values

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
        loaded = ckpt.load({"tensors": asked}, path, strategy, allow_pickle=True)
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


def test_every_tensor_loads_to_the_bit_under_every_cut_on_two_ranks() -> None:
    """S1.30, S1.80: tensor parallel 2 as saved, 1, other axes; flattened, stacked, padded; 0-dim. Each strategy in turn."""
    paths = [(name, truth(name).path) for name in GOLDEN]
    seen = run_ranks(2, _load_in_rounds, paths, range(ALL_ROUNDS), LIBRARIES)
    assert set.union(*seen) == every_cut(GOLDEN)


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
    return seen, [_refusal(topology, lambda: _ask_for_other_shapes(library)) for library in LIBRARIES]


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


def _ask_for_other_shapes(library: Callable[..., LoadShardedStrategy]) -> None:
    wanted = ShardedTensor.from_rank_offsets(WORDS, torch.zeros(4, 6), (0, current_topology().rank, 4))
    ckpt.load({"w": wanted}, truth("dp2").path, library(), allow_pickle=True)


def _refusal(topology: Topology, call: Callable[[], Any]) -> str:
    """The class and the sentence of what this rank raises."""
    with use_topology(topology), pytest.raises(CheckpointError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_four_ranks_load_what_two_saved_and_a_rank_may_hold_nothing_but_padding() -> None:
    """S1.30, S1.31: 13 rows as 16 and as 24 on 4 ranks; another shape than the stored one only where that is allowed."""
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
            convert(ConvertKeys(src=src, dst=str(dst), to=to, load=keys, leave_out_unknown=True))
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
                        "model.decoder.layers.self_attention.linear_qkv._extra_state", None, (3,), (layer,), (0, rank, 0)
                    ),
                }
                for layer, part in enumerate(expected.tensors[stacked])
            ],
            "gated": ShardedTensorFactory(GATED, gated_part(expected, rank, ranks), gated_shards(rank, ranks), torch.cat),
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
    loaded = ckpt.load(asked, expected.path, allow_pickle=True)
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
    """S1.30, S1.68, S1.76: nested, with factories, objects and what is local; the strategies are the checkpoint's own."""
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
            loaded = ckpt.load({"objects": {one.unique_key: one for one in objects}}, truth(name).path, allow_pickle=True)
        require_pickled(loaded, truth(name))
    words = ShardedTensor.from_rank_offsets("types.bool", torch.ones(4, 3).bool(), replica_id=rank)
    absent = ShardedObject("rng_state", None, (1, 3), (0, 2)), ShardedObject("cube", None, (1, 1, 3), (0, 0, 1))
    calls: dict[str, Callable[[], Any]] = {
        "not allowed": lambda: ckpt.load({"w": words}, truth("tp2").path),
        "not allowed by its format": lambda: ckpt.load({}, truth("tp2").path, common_strategy=("torch", 1)),
        "unknown": lambda: ckpt.load({}, truth("tp2-dp2").path, None, TorchCommonLoadStrategy(allow_pickle=True)),
        "no such object": lambda: ckpt.load(
            {"one": absent[1 - rank]}, cube, validate_access_integrity=False, allow_pickle=True
        ),
    }
    return {name: _refusal(topology, call) for name, call in calls.items()}


def require_pickled(loaded: Any, expected: Truth) -> None:
    """Compare objects and common state; of a class of another program there is what is known of it."""
    assert same_values(loaded.pop("objects", {}), expected.objects)
    named = vars(expected.common.get("args", argparse.Namespace())).pop("model_type", None)
    assert (named is not None) == (expected.path.name == "tp2-dp2")
    if named is not None:
        unknown = vars(loaded["args"]).pop("model_type")
        assert (unknown.name, unknown.args) == (named.type, (named.value,))
    assert same_values(loaded, expected.common)


def test_objects_and_common_state_come_when_pickles_are_allowed_and_else_one_sentence_on_every_rank() -> None:
    """S1.75, S1.76: also under the names of old files; beside an enum of the old program, which cannot be imported here."""
    first, second = run_ranks(2, _load_pickled)
    assert first == second
    says = {
        "not allowed": r"ConfigurationError: load of \S+/tp2: \S+/common\.pt is a pickle, which is read only where that",
        "not allowed by its format": r"ConfigurationError: load of \S+/tp2: \S+/common\.pt is a pickle, ",
        "unknown": r"ConfigurationError: .*/common\.pt holds .*: args\.model_type: megatron\.core\.enums\.ModelType",
        "no such object": r"MissingStateError: .* failed on rank 1: object rng_state/shard_0\.2_1\.3 is not in ",
    }
    assert first.keys() == says.keys()
    for name, pattern in says.items():
        assert re.match(pattern, first[name]), first[name]
