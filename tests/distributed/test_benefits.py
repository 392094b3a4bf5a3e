"""What sharing patterns are for: the ten benefits that their inventors name, each shown by one test.

explicit, dynamic, automatic, validated, composable, debuggable, extensible, without redundancy, type-safe, for all trainers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import ConfigurationError, CorruptCheckpointError, ReplicationError
from ckpt.format.manifest import Index
from ckpt.ranks.topology import Topology
from ckpt.storage.stored import read_index, read_manifest
from recipes.support import CONF
from recipes.training.training import Training
from tests.conf.configs import config
from tests.distributed.test_layouts import LAYOUTS
from tests.support.ranks import run_threads
from tests.support.states import Held, coordinator, cpu, global_index, random_bits, same_bits

LARGE = (64, 1000)  # 256 kB of float32


def saved(root: Path, world_size: int, component: Any, **options: Any) -> Path:
    """Save `component(topology)` from all ranks, each calling the very same function, and return the checkpoint."""

    def save(topology: Topology) -> str:
        made = component(topology)
        return coordinator(topology, root, made if isinstance(made, list) else [made], **options).save_checkpoint(
            checkpoint_id="1"
        )

    paths = run_threads(world_size, save)
    assert len(set(paths)) == 1
    return Path(paths[0])


def indexes(checkpoint: Path) -> list[Index]:
    manifest = read_manifest(checkpoint)
    return [read_index(checkpoint, manifest, rank) for rank in manifest.index_ranks()]


def test_explicit_the_declaration_alone_says_what_is_kept_and_stands_in_the_checkpoint(tmp_path: Path) -> None:
    kept = {}
    for pattern in ("global", "replicated", "per_rank"):
        path = saved(tmp_path / pattern, 3, lambda t, p=pattern: StateComponent("x", Held({"n": [1, 2]}), p))
        manifest = read_manifest(path)
        assert manifest.components["x"].sharing_pattern == pattern
        kept[pattern] = sorted(str(file.relative_to(path / "x")) for file in (path / "x").rglob("plain.json"))
    assert kept["global"] == kept["replicated"] == ["plain.json"]
    assert kept["per_rank"] == [f"rank-0000{rank}/plain.json" for rank in range(3)]


@pytest.mark.parametrize(("dispatch", "pattern"), [(True, "global"), (False, "per_rank")])
def test_dynamic_the_loader_decides_at_run_time_whose_its_position_is(
    tmp_path: Path, dispatch: bool, pattern: str
) -> None:
    cfg = config(tmp_path, f"data.dispatch={dispatch}")
    training = Training(cfg, Topology.alone(), cpu())
    training.join()
    assert cfg["components"]["dataset"]["sharing_pattern"] is None
    assert {one.key: one.pattern.value for one in training.components()}["dataset"] == pattern


def test_automatic_every_rank_makes_the_same_calls_and_none_asks_who_it_is(tmp_path: Path) -> None:
    """`saved` and the loop below hold no condition on the rank, and yet one checkpoint holds what each should."""
    whole = random_bits(LARGE, torch.float32, 1)
    path = saved(tmp_path, 4, lambda topology: StateComponent("model", Held({"w": whole.clone()}), "replicated"))

    def load(topology: Topology) -> bool:
        held = Held({"w": torch.zeros(LARGE)})
        coordinator(topology, tmp_path, [StateComponent("model", held, "replicated")]).load_checkpoint()
        return same_bits(held.state["w"], whole)

    assert run_threads(4, load) == [True] * 4
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_validated_a_bit_that_differs_between_ranks_or_from_what_was_written_is_named(tmp_path: Path) -> None:
    def component(topology: Topology) -> StateComponent:
        whole = random_bits(LARGE, torch.float32, 1)
        if topology.rank == 2:
            whole.view(torch.int32)[63, 999] ^= 1
        return StateComponent("model", Held({"h": {"w": whole}}), "replicated", validate_replication=True)

    with pytest.raises(ReplicationError, match=r"component model .* differs from rank 0 in h\.w on rank 2"):
        saved(tmp_path / "differing", 3, component)
    assert not list((tmp_path / "differing").glob("checkpoint-*"))

    path = saved(
        tmp_path / "sound", 3, lambda topology: StateComponent("model", Held({"w": global_index(LARGE)}), "replicated")
    )
    file = path / "model" / "w" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    held = StateComponent("model", Held({"w": torch.zeros(LARGE)}), "replicated")
    with pytest.raises(CorruptCheckpointError, match="model: w"):
        coordinator(Topology.alone(), tmp_path, [held]).load_checkpoint(path)


def test_composable_data_and_tensor_parallel_ranks_are_saved_together_and_loaded_by_one(tmp_path: Path) -> None:
    """Ranks in a 2 x 2 grid: neighbours hold halves of each weight, the two pairs hold equal halves."""
    whole = random_bits(LARGE, torch.float32, 7)

    def components(topology: Topology) -> list[StateComponent]:
        half = whole[topology.rank % 2 * 32 :][:32].clone()
        sharded = ShardedTensor.from_rank_offsets("w", half, (0, topology.rank % 2, 2), replica_id=topology.rank // 2)
        counters = {"seen": torch.full((3,), topology.rank // 2)}
        return [
            StateComponent("model", Held({"w": sharded}), "sharded"),
            StateComponent("counters", Held(counters), "per_group", process_group_name="tp"),
        ]

    def groups(topology: Topology) -> dict[str, list[int]]:
        return {"tp": [topology.rank // 2 * 2, topology.rank // 2 * 2 + 1]}

    paths = run_threads(
        4,
        lambda t: coordinator(t, tmp_path, components(t), process_groups=groups(t)).save_checkpoint(checkpoint_id="1"),
    )
    held = Held({"w": torch.zeros(LARGE)})
    alone = coordinator(Topology.alone(), tmp_path, [StateComponent("model", held, "replicated")])
    alone.load_checkpoint(paths[0], leave_out=["counters"])
    assert same_bits(held.state["w"], whole)
    counters = read_manifest(Path(paths[0])).components["counters"]
    assert (counters.group_name, counters.replicated_across) == ("tp", [0, 1, 2, 3])


def test_debuggable_the_manifest_and_its_indexes_are_the_complete_inventory(tmp_path: Path) -> None:
    def components(topology: Topology) -> list[StateComponent]:
        large, small = random_bits(LARGE, torch.float32, 1), random_bits((3, 5), torch.bfloat16, topology.rank)
        return [
            StateComponent("model", Held({"w": large}), "replicated"),
            StateComponent("own", Held({"b": small, "rank": topology.rank}), "per_rank"),
        ]

    path = saved(tmp_path, 3, components, config_text="a: 1\n")
    listed = set(read_manifest(path).files) | {file for index in indexes(path) for file in index.files}
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert found - listed == {"checkpoint_manifest.json"} and listed <= found
    readable = json.loads((path / "checkpoint_manifest.json").read_text())
    assert readable["world_size"] == 3 and set(readable["components"]) == {"model", "own"}
    assert readable["components"]["own"]["ranks"] == [0, 1, 2]


def test_extensible_a_way_of_sharing_that_nobody_foresaw_is_a_rule_for_addresses(tmp_path: Path) -> None:
    """Here: rank r of three holds columns r, r + 3, ... of `w`, and ranks 0 and 2, but not 1, hold halves of `v`."""
    whole = random_bits((700, 9), torch.float32, 3)

    def named(topology: Topology, source: torch.Tensor) -> list[StateComponent]:
        stripes = {f"w/{at}": source[:, at].clone() for at in range(topology.rank, 9, 3)}
        extra = (
            {}
            if topology.rank == 1
            else {"v": ShardedTensor.from_rank_offsets("v", source[:4].clone(), (1, topology.rank // 2, 2))}
        )
        return [StateComponent("striped", Held(stripes | extra), "sharded")]

    path = saved(tmp_path, 3, lambda topology: named(topology, whole))
    held = Held({f"w/{at}": torch.zeros(700) for at in range(9)} | {"v": torch.zeros(4, 18)})
    coordinator(Topology.alone(), tmp_path, [StateComponent("striped", held, "sharded")]).load_checkpoint(path)
    assert all(same_bits(held.state[f"w/{at}"], whole[:, at].contiguous()) for at in range(9))
    assert same_bits(held.state["v"], whole[:4].repeat(1, 2))


def test_without_redundancy_equal_copies_are_written_once_by_all_their_holders(tmp_path: Path) -> None:
    shape = (1024, 1024)  # 4 MiB, four chunks
    state = {f"layer {at}": random_bits(shape, torch.float32, at) for at in range(4)}
    path = saved(tmp_path, 4, lambda topology: StateComponent("model", Held(dict(state)), "replicated"))
    written = [
        sum(extent.length for chunks in index.chunks.values() for extent in chunks.values()) for index in indexes(path)
    ]
    assert sum(written) == 4 * 4 * 2**20
    assert written == [4 * 2**20] * 4


def test_type_safe_a_declaration_that_makes_no_sense_cannot_be_made(tmp_path: Path) -> None:
    for sentence, arguments in {
        "sharing_pattern=replicate: expected one of global, per_rank": {"sharing_pattern": "replicate"},
        "sharing_pattern=per_group needs process_group_name": {"sharing_pattern": "per_group"},
        "process_group_name=dp goes with sharing_pattern=per_group": {
            "sharing_pattern": "global",
            "process_group_name": "dp",
        },
        "validate_replication=True compares copies": {"sharing_pattern": "per_rank", "validate_replication": True},
    }.items():
        with pytest.raises(ConfigurationError, match=f"component x: {sentence}"):
            StateComponent("x", Held({}), **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="dict has no state_dict/load_state_dict pair"):
        StateComponent("x", {"a": 1}, "global")  # type: ignore[arg-type]


def test_for_all_trainers_no_layout_goes_untested() -> None:
    """The tests beside this file train, save, resume and reshard every choice of `parallel=` on 2, 3 and 4 ranks."""
    choices = {path.stem for path in (CONF / "parallel").glob("*.yaml")}
    assert {name.partition(" ")[0] for name in LAYOUTS} == choices
    for choice in choices - {"single"}:
        ranks = {number for name, (number, _) in LAYOUTS.items() if name.partition(" ")[0] == choice}
        assert ranks == {2, 3, 4} - ({3} if choice in ("tp_fsdp", "ddp_tp") else set())
