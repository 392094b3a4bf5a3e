"""Every sharing pattern over real ranks: who writes, who reads what back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    MissingStateError,
    ReplicationError,
    ShapeMismatchError,
    ShardingError,
    WorldSizeError,
)
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import (
    ALL_DTYPES,
    BACKENDS,
    Held,
    coordinator,
    global_index,
    random_bits,
    same_bits,
    zero_bits,
)

PATTERNS = ("global", "replicated", "per_rank", "per_group", "per_node", "sharded")
LARGE = (48, 1000)  # 192 kB of float32: an array of its own
SMALL = (3, 5)


def groups_of(topology: Topology) -> dict[str, list[int]]:
    """Members {0, 2} and {1, 3}, as far as there are such ranks: instances that are no neighbours."""
    return {"dp": list(range(topology.rank % 2, topology.world_size, 2))}


def seed_of(pattern: str, topology: Topology) -> int:
    """Equal exactly where the pattern says that ranks hold equal state."""
    return {
        "per_rank": topology.rank,
        "per_group": 100 + topology.rank % 2,
        "per_node": 200 + topology.node_rank,
    }.get(pattern, 300)


def state_of(pattern: str, topology: Topology) -> dict[str, object]:
    seed = seed_of(pattern, topology)
    if pattern == "sharded":
        rows = LARGE[0] // topology.world_size
        whole = random_bits(LARGE, torch.float32, seed)
        mine = whole[topology.rank * rows : (topology.rank + 1) * rows].clone()
        return {
            "w": ShardedTensor.from_rank_offsets("w", mine, (0, topology.rank, topology.world_size)),
            f"stage.{topology.rank}": random_bits(SMALL, torch.float32, topology.rank),
            "plain": {f"of rank {topology.rank}": topology.rank, "common": seed},
        }
    return {"w": random_bits(LARGE, torch.float32, seed), "b": random_bits(SMALL, torch.bfloat16, seed), "n": seed}


def components_of(states: dict[str, Held]) -> list[StateComponent]:
    return [
        StateComponent(p, states[p], p, process_group_name="dp" if p == "per_group" else None) for p in PATTERNS
    ]  # fmt: skip


def blank(state: dict[str, object]) -> dict[str, object]:
    """The same structure with other values, to be overwritten."""
    made: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, ShardedTensor):
            made[key] = ShardedTensor.at(key, torch.full_like(value.data, -1), value.global_shape, value.global_offset)
        else:
            made[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else {}
    return made


def _save_and_load_every_pattern(topology: Topology, root: Path, backend: str) -> None:
    wanted = {pattern: state_of(pattern, topology) for pattern in PATTERNS}
    saver = coordinator(
        topology,
        root,
        components_of({p: Held(s) for p, s in wanted.items()}),
        backend=backend,
        process_groups=groups_of(topology),
    )
    assert saver.save_checkpoint(checkpoint_id="1", validate=True) == str(root / "checkpoint-1")
    held = {pattern: Held(blank(state)) for pattern, state in wanted.items()}
    if topology.rank:
        held["global"].state["w"].fill_(topology.rank)
    loader = coordinator(topology, root, components_of(held), process_groups=groups_of(topology))
    loader.load_checkpoint()
    for pattern in PATTERNS:
        for key, value in wanted[pattern].items():
            got = held[pattern].loaded[key]
            if isinstance(value, ShardedTensor):
                assert same_bits(got.data, value.data), (pattern, key)
            elif isinstance(value, torch.Tensor):
                assert same_bits(got, value), (pattern, key)
                assert same_bits(held[pattern].state[key], value), (pattern, key)
            elif pattern != "sharded":
                assert got == value, (pattern, key)
    everyone = {f"of rank {rank}": rank for rank in range(topology.world_size)}
    assert held["sharded"].loaded["plain"] == {**everyone, "common": 300}


@sampled("backend", BACKENDS)
def test_every_pattern_gives_every_rank_its_own_state_back(tmp_path: Path, backend: str) -> None:
    run_ranks(4, _save_and_load_every_pattern, tmp_path, backend, nodes=[2, 2])
    manifest = json.loads((tmp_path / "checkpoint-1" / "checkpoint_manifest.json").read_text())
    components = manifest["components"]
    assert components["per_rank"]["ranks"] == [0, 1, 2, 3]
    assert components["global"]["ranks"] == [0]
    assert components["per_group"]["group_name"] == "dp"
    assert manifest["topology"] == {"nodes": [[0, 1], [2, 3]], "groups": {"dp": [[0, 2], [1, 3]]}}
    one_copy = 48 * 1000 * 4 + 3 * 5 * 2
    plain = {key: (tmp_path / "checkpoint-1" / key).rglob("plain.json") for key in components}
    for key, copies in {"global": 1, "replicated": 1, "per_rank": 4, "per_group": 2, "per_node": 2}.items():
        assert components[key]["size_bytes"] == copies * one_copy + sum(p.stat().st_size for p in plain[key]), key


def _save_all_dtypes(topology: Topology, root: Path, backend: str) -> None:
    state = {f"{d}".removeprefix("torch."): {s: random_bits(s, d, i) for i, s in enumerate(((), (0,), (7,), (90, 1000), (3, 0, 2)))} for d in ALL_DTYPES}  # fmt: skip # noqa: E501
    named = {kind: {str(shape): tensor for shape, tensor in by_shape.items()} for kind, by_shape in state.items()}
    coordinator(topology, root, [StateComponent("model", Held(named), "replicated")], backend=backend).save_checkpoint(
        checkpoint_id="1"
    )
    held = Held({kind: {name: zero_bits(tuple(t.shape), t.dtype) for name, t in tensors.items()} for kind, tensors in named.items()})
    other = "ocdbt" if backend == "zarr" else "zarr"
    coordinator(topology, root, [StateComponent("model", held, "replicated")], backend=other).load_checkpoint()
    for kind, tensors in named.items():
        for name, tensor in tensors.items():
            assert same_bits(held.state[kind][name], tensor), (kind, name)


@sampled("backend", BACKENDS, 2)
def test_every_dtype_and_shape_comes_back_bit_for_bit_whatever_backend_is_configured(
    tmp_path: Path, backend: str
) -> None:
    run_ranks(2, _save_all_dtypes, tmp_path, backend)


def _save(topology: Topology, root: Path, state: dict[str, object], pattern: str, **options: object) -> None:
    components = [StateComponent("model", Held(state), pattern, **options)]
    coordinator(topology, root, components, pattern_check="off").save_checkpoint(checkpoint_id="1")


REFUSED: dict[str, tuple[type[CheckpointError], str]] = {
    "plain differs": (
        ReplicationError,
        "model should be the same on ranks 0, 1, but differs from rank 0 in lr on rank 1",
    ),
    "plain of sharded differs": (ReplicationError, "lr is 0.1 on rank 1 and 0.0 on rank 0"),
    "hole": (ShardingError, "200 of the 500 elements"),
    "overlap": (ShardingError, "overlap without being equal"),
    "shapes differ": (ShapeMismatchError, "all ranks must save the same data type and shape"),
    "types differ": (ShapeMismatchError, "all ranks must save the same data type and shape"),
    "unpicklable": (ConfigurationError, "neither a tensor nor plain"),
}


def _refuse_each(topology: Topology, root: Path) -> dict[str, str]:
    rank = topology.rank
    w = torch.arange(20000.0)
    cases: dict[str, tuple[dict[str, object], str]] = {
        "plain differs": ({"w": w, "lr": 0.1 * rank}, "replicated"),
        "plain of sharded differs": ({"w": w, "lr": 0.1 * rank}, "sharded"),
        "hole": ({"w": ShardedTensor.at("w", w[:100], (500,), (100 * rank,))}, "sharded"),
        "overlap": ({"w": ShardedTensor.at("w", w[:300], (500,), (200 * rank,))}, "sharded"),
        "shapes differ": ({"w": w[: 1000 + rank]}, "replicated"),
        "types differ": ({"w": w.to(torch.float64 if rank else torch.float32)}, "replicated"),
        "unpicklable": ({"w": w, "f": print}, "per_rank"),
    }
    sentences = {}
    for case, (error, _) in REFUSED.items():
        state, pattern = cases[case]
        with pytest.raises(error) as caught:
            _save(topology, root, state, pattern)
        assert not list(root.glob("checkpoint-*"))
        assert not list(root.glob(".unpublished-*"))
        sentences[case] = str(caught.value)
    return sentences


def test_what_cannot_be_saved_is_refused_in_one_sentence_on_every_rank(tmp_path: Path) -> None:
    sentences = run_ranks(2, _refuse_each, tmp_path)
    assert sentences[0] == sentences[1]
    for case, (_, says) in REFUSED.items():
        assert says in sentences[0][case]


def _validate(topology: Topology, root: Path, declared: bool) -> str | None:
    w = torch.arange(1000.0).view(10, 100).to(torch.bfloat16)
    state = {"state": {"layer": {"exp_avg": w.clone(), "step": torch.tensor(3)}}}
    if topology.rank == 2:
        state["state"]["layer"]["exp_avg"][7, 5] *= -1
    component = StateComponent("optimizer", Held(state), "replicated", validate_replication=declared)
    try:
        coordinator(topology, root, [component]).save_checkpoint(checkpoint_id="1", validate=not declared)
    except ReplicationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("declared", [True, False])
def test_one_changed_bit_deep_in_a_bfloat16_optimizer_state_is_found_and_named(tmp_path: Path, declared: bool) -> None:
    sentences = run_ranks(3, _validate, tmp_path, declared)
    assert len(set(sentences)) == 1
    assert "differs from rank 0 in state.layer.exp_avg on rank 2" in str(sentences[0])
    assert not list(tmp_path.glob("checkpoint-*"))


def _optional_fails_on_rank_1(topology: Topology, root: Path, required: bool) -> None:
    class Broken(Held):
        def state_dict(self) -> dict[str, object]:
            if topology.rank == 1:
                raise RuntimeError("cache is gone")
            return {"x": torch.arange(4)}

    components = [
        StateComponent("model", Held({"w": torch.arange(3)}), "replicated"),
        StateComponent("cache", Broken({}), "per_rank", required=required),
    ]
    made = coordinator(topology, root, components)
    if required:
        with pytest.raises(CheckpointError, match=r"on rank 1: cache: RuntimeError: cache is gone"):
            made.save_checkpoint(checkpoint_id="1")
        return
    made.save_checkpoint(checkpoint_id="1")
    held = Held({"w": torch.zeros(3, dtype=torch.int64)})
    loader = [
        StateComponent("model", held, "replicated"),
        StateComponent("cache", Held({}), "per_rank", required=False),
    ]
    coordinator(topology, root, loader).load_checkpoint()
    assert held.state["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("required", [True, False])
def test_an_optional_component_that_fails_on_one_rank_is_left_out_and_a_required_one_stops_all(
    tmp_path: Path, required: bool
) -> None:
    run_ranks(2, _optional_fails_on_rank_1, tmp_path, required)
    assert [path.name for path in tmp_path.iterdir()] == ([] if required else ["checkpoint-1"])
    if not required:
        manifest = json.loads((tmp_path / "checkpoint-1" / "checkpoint_manifest.json").read_text())
        assert list(manifest["components"]) == ["model"]


def _one(
    topology: Topology, root: Path, pattern: str, state: dict[str, object], declared: str
) -> CheckpointCoordinator:
    """A coordinator of one component under root/<pattern>, where it was, or will be, saved by that pattern."""
    group = "dp" if declared == "per_group" else None
    component = StateComponent("x", Held(state), declared, process_group_name=group)
    groups = {"dp": list(range(topology.world_size))} if group else None
    return coordinator(topology, root / pattern, [component], process_groups=groups)


def _save_by_every_pattern(topology: Topology, root: Path) -> None:
    for pattern in PATTERNS:
        _one(topology, root, pattern, {"w": global_index((5, 4))}, pattern).save_checkpoint(checkpoint_id="1")


def _load_from_every_pattern(topology: Topology, root: Path) -> dict[str, str]:
    said = {}
    for pattern in PATTERNS:
        w = torch.full((5, 4), -1.0)
        try:
            _one(topology, root, pattern, {"w": w}, pattern).load_checkpoint()
        except WorldSizeError as error:
            assert torch.all(w == -1), "nothing may have been read"
            said[pattern] = str(error)
        else:
            assert same_bits(w, global_index((5, 4)))
            said[pattern] = "loaded"
    return said


def _load_with_other_declarations(topology: Topology, root: Path) -> None:
    for declared in ("global", "per_node", "sharded"):
        with pytest.raises(MissingStateError, match=f"was saved as per_rank and is now declared {declared}"):
            _one(topology, root, "per_rank", {"w": torch.zeros(5, 4)}, declared).load_checkpoint()
    w = torch.zeros(5, 4)
    _one(topology, root, "per_rank", {"w": w}, "per_rank").load_checkpoint()
    assert same_bits(w, global_index((5, 4)))


def test_a_changed_world_size_is_an_error_for_per_rank_state_only_a_changed_pattern_for_all(
    tmp_path: Path,
) -> None:
    run_ranks(2, _save_by_every_pattern, tmp_path)
    said = run_ranks(3, _load_from_every_pattern, tmp_path)
    assert said[0] == said[1] == said[2]
    for pattern, sentence in said[0].items():
        if pattern in ("global", "replicated", "sharded"):
            assert sentence == "loaded"
        else:
            assert f"x is {pattern} and was saved by" in sentence
            assert "leave component x out" in sentence
    run_ranks(2, _load_with_other_declarations, tmp_path)


def _load_by_other_groups(topology: Topology, root: Path) -> list[str]:
    rank = topology.rank
    groups = {
        "dp": [rank % 2, rank % 2 + 2],
        "tp": [rank - rank % 2, rank - rank % 2 + 1],
        "again": [rank % 2, rank % 2 + 2],
    }
    said = []
    for name in ("dp", "tp", "again"):
        held = Held({"n": rank % 2})
        made = coordinator(
            topology, root, [StateComponent("x", held, "per_group", process_group_name=name)], process_groups=groups
        )
        if name == "dp":
            made.save_checkpoint(checkpoint_id="1")
        held.state["n"] = -1
        try:
            made.load_checkpoint()
        except MissingStateError as error:
            said.append(str(error))
        else:
            assert held.loaded == {"n": rank % 2}
            said.append("loaded")
    return said


def test_another_group_is_refused_unless_it_has_the_same_members(tmp_path: Path) -> None:
    for said in run_ranks(4, _load_by_other_groups, tmp_path):
        assert said[0] == said[2] == "loaded"
        assert "x was saved per_group of dp and is now declared per_group of tp, whose members are others" in said[1]


def _group_that_is_not_there(topology: Topology, root: Path) -> None:
    component = StateComponent("x", Held({}), "per_group", process_group_name="tp")
    with pytest.raises(ConfigurationError, match="no process group 'tp'; this run has: dp"):
        coordinator(topology, root, [component], process_groups={"dp": [0, 1]})
    with pytest.raises(ConfigurationError, match="two state components have the key 'x'"):
        coordinator(topology, root, [StateComponent("x", Held({}), "global")] * 2)


def test_unknown_groups_and_duplicate_keys_are_refused_when_the_coordinator_is_made(tmp_path: Path) -> None:
    run_ranks(2, _group_that_is_not_there, tmp_path)
