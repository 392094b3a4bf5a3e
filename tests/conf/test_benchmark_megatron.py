"""The benchmark against megatron-core, as far as it goes without megatron-core: its state, our side, its other side faked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.topology import Topology
from recipes.benchmark.megatron_state import OPTIMIZERS, RankHoldings, ShardArguments, data_parallel_ranks, shards_of
from recipes.benchmark.megatron_strategies import MEASUREMENT
from tests.conf.configs import config
from tests.support.ranks import run_ranks

KEYS = {"repeats": 1, "contenders": ["zarr"], "optimizer": "ranges", "in_place": False, "megatron_python": None}
GRIDS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (4, 2)]

FAKE = """#!{python}
import json, sys
for number, line in enumerate(sys.stdin):
    command = json.loads(line)
    if number == 0:
        answer = {{"megatron-core": "0.10.0"}}
    elif {lives}:
        seconds = 3.0 if command.get("two_stage") else 2.0
        answer = {{"seconds": seconds, "peak_mib": 3.0, "wrong": ["model lost"] * (command["do"] == "load")}}
    else:
        answer = {{"error": "no space left"}}
    print(json.dumps(answer), flush=True)
"""


def held(optimizer: str, tp: int, dp: int) -> list[RankHoldings]:
    numbers = {"vocabulary": 300, "context": 4, "layers": 2, "width": 8, "optimizer": optimizer, "tp": tp, "dp": dp}
    return [RankHoldings(**numbers, tp_rank=rank % tp, dp_rank=rank // tp) for rank in range(tp * dp)]


def element_numbers(shard: ShardArguments) -> torch.Tensor:
    """The row-major numbers, in the global tensor, of the elements that a shard stands for."""
    whole = torch.arange(torch.Size(shard.global_shape).numel()).reshape(shard.global_shape)
    sides = (1,) * shard.prepended + shard.local_shape
    chunk = whole[tuple(slice(at, at + side) for at, side in zip(shard.global_offset, sides, strict=True))]
    return chunk.reshape(-1)[shard.start : shard.stop]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("tp", "dp"), GRIDS)
def test_the_main_replicas_of_all_ranks_hold_each_element_once_and_others_hold_the_same(
    optimizer: str, tp: int, dp: int
) -> None:
    values: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    ranks = [shards_of(one) for one in held(optimizer, tp, dp)]
    shards = sorted((shard for rank in ranks for shard in rank.values()), key=lambda shard: any(shard.replica_id))
    for shard in shards:
        key, size = shard.key, torch.Size(shard.global_shape).numel()
        bits = shard.values().view(torch.int32).reshape(-1)
        at = element_numbers(shard)
        assert at.numel() == shard.num_elements == bits.numel() > 0
        if any(shard.replica_id):
            assert torch.equal(values[key][at], bits)
        else:
            values.setdefault(key, torch.zeros(size, dtype=torch.int32))[at] = bits
            counts.setdefault(key, torch.zeros(size, dtype=torch.int32))[at] += 1
    assert len(counts) == 3 * (2 + 12 + 2)
    assert all((count == 1).all() for count in counts.values())


def test_ranges_are_even_and_one_of_them_ends_inside_a_parameter() -> None:
    first, second = (shards_of(one) for one in held("ranges", 2, 2)[::2])
    moments = [[shard for name, shard in rank.items() if name.startswith("exp_avg ")] for rank in (first, second)]
    sizes = [sum(shard.num_elements for shard in rank) for rank in moments]
    assert abs(sizes[0] - sizes[1]) <= 1
    assert any(shard.start for shard in moments[1])


def test_a_value_that_differs_by_its_last_bit_or_its_kind_is_not_equal() -> None:
    shard = next(iter(shards_of(held("tensors", 1, 1)[0]).values()))
    got = shard.values()
    assert shard.is_equal(got) and shard.is_equal(got.clone())
    assert not shard.is_equal(got.reshape(-1)) and not shard.is_equal(got.view(torch.int32))
    got.view(torch.int32)[-1, -1] ^= 1
    assert not shard.is_equal(got)


@pytest.mark.parametrize("in_place", [False, True])
def test_our_strategies_are_measured_and_their_every_bit_compared(
    in_place: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = MEASUREMENT.checked_keys({**KEYS, "contenders": ["zarr", "tensorstore"], "in_place": in_place})
    with Topology.alone() as topology:
        result = MEASUREMENT.run(config(tmp_path, "model.size=nano", "train.batch_size=2") | {"benchmark": keys}, topology)
    assert list(result["medians"]) == ["zarr", "tensorstore"] and result["ratios"] == {}
    assert all(min(row[c] for c in ("save_s", "load_cold_s", "load_warm_s")) > 0 for row in result["medians"].values())
    for measured in result["contenders"].values():
        assert measured["wrong"] == []
        assert measured["files"] > 0 and measured["bytes"] > result["state_bytes"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
    assert json.loads((tmp_path / "benchmark.json").read_text()) == result
    MEASUREMENT.show(result)
    assert "TP 1 x DP 1, moments in flattened ranges" in " ".join(capsys.readouterr().out.split())


def test_ranks_that_hold_parts_measure_together_and_ratios_are_the_others_figures_over_ours(tmp_path: Path) -> None:
    keys = MEASUREMENT.checked_keys({**KEYS, "contenders": ["zarr", "megatron"], "megatron_python": fake(tmp_path)})
    cfg = config(tmp_path / "run", "model.size=nano", "parallel=ddp_tp", num_ranks=2) | {"benchmark": keys}
    result, _ = run_ranks(2, _benchmark, cfg)
    assert (result["tp"], result["dp"], result["ranks"]) == (2, 1, 2)
    assert result["layout"] == "TP 2 x DP 1, moments in flattened ranges"
    assert result["tensors"] == len({shard.key for rank in held("ranges", 2, 1) for shard in shards_of(rank).values()})
    assert result["ratios"]["zarr"]["save_s"] == 2.0 / result["medians"]["zarr"]["save_s"]
    wrong = {name: measured["wrong"] for name, measured in result["contenders"].items()}
    assert wrong == {"zarr": [], "megatron": ["model lost"]}, "what megatron-core loses is told, and ends nothing"
    assert result["versions"]["megatron"] == {"megatron-core": "0.10.0"}


def test_two_stage_loading_is_held_against_two_stage_loading(tmp_path: Path) -> None:
    names = ["zarr", "zarr/two-stage", "megatron", "megatron/two-stage"]
    keys = MEASUREMENT.checked_keys({**KEYS, "contenders": names, "optimizer": "tensors", "megatron_python": fake(tmp_path)})
    cfg = config(tmp_path / "run", "model.size=nano", "parallel=ddp_tp", "parallel.tp=1", num_ranks=2) | {
        "benchmark": keys
    }
    result = run_ranks(2, _benchmark, cfg, process_group=True)[0]
    assert list(result["medians"]) == names and (result["tp"], result["dp"]) == (1, 2)
    assert [result["contenders"][name]["wrong"] for name in names[:2]] == [[], []]
    assert list(result["ratios"]) == ["zarr", "zarr/two-stage"]
    for name in names[:2]:
        assert (
            result["ratios"][name]["load_warm_s"]
            == (3.0 if "/" in name else 2.0) / result["medians"][name]["load_warm_s"]
        )


def test_two_stage_loading_needs_somebody_to_send_to(tmp_path: Path) -> None:
    keys = MEASUREMENT.checked_keys({**KEYS, "contenders": ["zarr/two-stage"]})
    with Topology.alone() as topology, pytest.raises(ConfigurationError, match="two-stage loading sends between ranks"):
        MEASUREMENT.run(config(tmp_path / "run") | {"benchmark": keys}, topology)


def test_data_parallel_ranks_hold_alike() -> None:
    ranks = held("tensors", 2, 3)
    for tp_rank, instance in enumerate(data_parallel_ranks(ranks[0])):
        assert [ranks[rank].tp_rank for rank in instance] == [tp_rank] * 3
        assert [ranks[rank].dp_rank for rank in instance] == [0, 1, 2]


def test_what_the_other_side_fails_of_is_one_sentence(tmp_path: Path) -> None:
    keys = MEASUREMENT.checked_keys({**KEYS, "contenders": ["megatron"], "megatron_python": fake(tmp_path, lives=False)})
    with Topology.alone() as topology, pytest.raises(CheckpointError, match="no space left; what it wrote to stderr"):
        MEASUREMENT.run(config(tmp_path / "run") | {"benchmark": keys}, topology)
    assert list((tmp_path / "run").iterdir()) == []
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    with Topology.alone() as topology, pytest.raises(CheckpointError, match="it ended without an answer"):
        MEASUREMENT.run(config(tmp_path / "run") | {"benchmark": keys | {"megatron_python": str(silent)}}, topology)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"repeats": 0}, "benchmark.repeats=0: expected at least 1"),
        ({"repeat": 1}, "the benchmark has benchmark.repeats, "),
        ({"contenders": ["dcp"]}, "benchmark.contenders=.*expected some of zarr, tensorstore, .*megatron"),
        ({"contenders": []}, "benchmark.contenders=.*expected some of"),
        ({"optimizer": "halves"}, "benchmark.optimizer=halves: expected one of tensors, ranges"),
        ({"contenders": ["megatron"]}, "benchmark.megatron_python=null: give the Python of an environment"),
        ({"contenders": ["megatron"], "megatron_python": "/proc/x"}, "benchmark.megatron_python=/proc/x: there is no"),
    ],
)
def test_a_wrong_key_is_one_sentence(wrong: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        MEASUREMENT.checked_keys({**KEYS, **wrong})


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("parallel=pipeline", "parallel=pipeline lays out pp: this benchmark knows dp and tp"),
        ("model.size=huge", "model.size=huge: expected one of nano, tiny, gpt2"),
    ],
)
def test_a_layout_or_size_that_it_does_not_know_is_one_sentence(override: str, sentence: str, tmp_path: Path) -> None:
    cfg = config(tmp_path, override, "parallel.pp=1" if "pipeline" in override else "parallel=ddp")
    with Topology.alone() as topology, pytest.raises(ConfigurationError, match=sentence):
        MEASUREMENT.run(cfg | {"benchmark": MEASUREMENT.checked_keys(KEYS)}, topology)


def fake(folder: Path, *, lives: bool = True) -> str:
    """An "interpreter" that answers as recipes/benchmark/megatron_peer.py does, without doing anything."""
    path = folder / "python"
    path.write_text(FAKE.format(python=sys.executable, lives=lives))
    path.chmod(0o755)
    return str(path)


def _benchmark(topology: Topology, cfg: dict[str, object]) -> dict[str, object]:
    return MEASUREMENT.run(cfg, topology)
