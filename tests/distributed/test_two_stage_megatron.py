"""`TwoStageDataParallelLoadShardedStrategy`: what its model in Megatron-Core promises, and what that one's notes wish for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt import dist_checkpointing
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.dist_checkpointing.strategies.base import LoadShardedStrategy
from ckpt.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy
from ckpt.dist_checkpointing.strategies.two_stage import (
    ShardedTensorMetadata,
    TwoStageDataParallelLoadShardedStrategy,
    sharded_tensor_chunk_id,
)
from ckpt.errors import ConfigurationError, MissingStateError
from ckpt.loading.two_stage.spread_worker import timed, timers
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.sharded_saves import SAVES, blank
from tests.support.states import global_index, random_bits, same_bits

TP, DP = 2, 2


def in_a_grid(topology: Topology, fn: Callable[..., Any], *args: Any) -> Any:
    """Call fn(topology, group, *args) with the data-parallel group of this rank: TP 2 inside, DP 2 outside."""
    groups = [dist.new_group([tp, tp + TP]) for tp in range(TP)]
    with use_topology(topology):
        return fn(topology, groups[topology.rank % TP], *args)


def on_four(fn: Callable[..., Any], *args: Any, nodes: list[int] | None = None, **more: Any) -> list[Any]:
    return run_ranks(4, in_a_grid, fn, *args, nodes=nodes, process_group=True, **more)


def shards(topology: Topology) -> dict[str, ShardedTensor]:
    """A column-parallel and a row-parallel weight, one that all hold, halves of a flattened one, and two data types."""
    tp, dp = topology.rank % TP, topology.rank // TP
    whole = global_index((96, 512))
    flat = global_index((64, 64))[tp * 32 : tp * 32 + 32].reshape(-1)
    half = slice(dp * 1000, 1000 if dp == 0 else 2048)
    return {
        "column": ShardedTensor.from_rank_offsets("column", whole[tp * 48 :][:48].clone(), (0, tp, TP), replica_id=dp),
        "row": ShardedTensor.from_rank_offsets(
            "row", whole[:, tp * 256 :][:, :256].contiguous(), (1, tp, TP), replica_id=dp
        ),
        "bias": ShardedTensor.from_rank_offsets("bias", random_bits((333,), torch.bfloat16, 5), replica_id=(dp, tp)),
        "bytes": ShardedTensor.from_rank_offsets("bytes", random_bits((70_001,), torch.uint8, 6), replica_id=(dp, tp)),
        "moments": ShardedTensor.from_rank_offsets_flat(
            "moments", flat[half].clone(), (32, 64), (0, tp, TP), flattened_range=half, replica_id=0
        ),
    }


def save(topology: Topology, root: Path, strategy: str) -> dict[str, ShardedTensor]:
    state = shards(topology)
    with topology.phase("make the folder"):
        if topology.is_lead:
            root.mkdir()
    dist_checkpointing.save(dict(state), root, SAVES[strategy])
    return state


def _equals_direct(topology: Topology, group: Any, root: Path, strategy: str, cpu_transfer: bool) -> None:
    state = save(topology, root, strategy)
    loading = TwoStageDataParallelLoadShardedStrategy(group, cpu_transfer)
    assert isinstance(loading, LoadShardedStrategy)
    got = dist_checkpointing.load({key: blank(one) for key, one in state.items()}, root, loading)
    direct = dist_checkpointing.load(
        {key: blank(one) for key, one in state.items()}, root, TensorStoreLoadShardedStrategy()
    )
    for key, one in state.items():
        assert one.data is not None
        assert same_bits(got[key], one.data), key
        assert same_bits(direct[key], one.data), key


@sampled("strategy", ["zarr", "tensorstore, ocdbt"])
@pytest.mark.parametrize("cpu_transfer", [True, False])
def test_it_loads_what_direct_loading_does(tmp_path: Path, strategy: str, cpu_transfer: bool) -> None:
    """S1.46, S1.47, S1.57, S1.58: the group and the way to send are given; every bit is what direct loading finds, on any device type."""
    on_four(_equals_direct, tmp_path / "c", strategy, cpu_transfer, nodes=[2, 2] if strategy == "zarr" else None)


def _reads_once(topology: Topology, group: Any, root: Path) -> tuple[int, int]:
    state = save(topology, root, "zarr")
    counted: dict[tuple[int, int], int] = {}
    loading = TwoStageDataParallelLoadShardedStrategy(group)
    strategy = loading._strategy

    def counting() -> Any:
        made: Any = strategy()
        read_at = made._read_at

        def count(fd: int, buffers: Any, offset: int) -> int:
            got: int = read_at(fd, buffers, offset)
            counted[fd, offset] = counted.get((fd, offset), 0) + got
            return got

        made._read_at = count
        return made

    loading._strategy = counting  # type: ignore[method-assign]
    dist_checkpointing.load({key: blank(one) for key, one in state.items()}, root, loading)
    with topology.phase("count") as phase:
        phase.payload = sum(counted.values())
    return phase.payloads[topology.rank], sum(one.data.nbytes for one in state.values() if one.data is not None)


def test_each_data_parallel_group_reads_what_it_wants_once(tmp_path: Path) -> None:
    """S1.51, S1.57: both flattened ranges of a chunk, and all copies of a shard, cost one read in their group."""
    by_rank = on_four(_reads_once, tmp_path / "c")
    for tp in range(TP):
        read = by_rank[tp][0] + by_rank[tp + TP][0]
        alike = (
            by_rank[tp][1] - 1000 * 4
        )  # what both hold; the flattened range of the first has 1000 elements, the other 1048
        wanted = alike + 2048 * 4
        # Blocks are read whole, and a flattened range may be a part of one.
        assert wanted <= read <= wanted + 64 * 64 * 4


def _into_other_types(topology: Topology, group: Any, root: Path) -> None:
    state = save(topology, root, "zarr")
    wanted = {
        "column": replace(state["column"], data=torch.zeros(48, 512, dtype=torch.float64), dtype=torch.float64),
        "row": replace(state["row"], data=None),
    }
    given = wanted["column"].data
    got = dist_checkpointing.load(dict(wanted), root, TwoStageDataParallelLoadShardedStrategy(group))
    assert got["column"] is given
    assert torch.equal(got["column"], state["column"].data.double())  # type: ignore[union-attr]
    assert got["row"].dtype == torch.float32
    assert same_bits(got["row"], state["row"].data)


def test_the_stored_type_travels_and_receivers_convert(tmp_path: Path) -> None:
    """S1.56: one that is asked for in another type than the stored one arrives converted, in the tensor that was given."""
    on_four(_into_other_types, tmp_path / "c")


def _only_some(topology: Topology, group: Any, root: Path) -> None:
    state = save(topology, root, "zarr")
    wanted = {key: blank(one) for key, one in state.items() if topology.rank == 3 or (key == "bias" and topology.rank)}
    got = dist_checkpointing.load(
        dict(wanted), root, TwoStageDataParallelLoadShardedStrategy(group), validate_access_integrity=False
    )
    for key in wanted:
        assert same_bits(got[key], state[key].data)


def test_ranks_that_want_little_or_nothing_take_part(tmp_path: Path) -> None:
    on_four(_only_some, tmp_path / "c")


def _groups_made(topology: Topology, group: Any) -> tuple[list[int], str, bool]:
    loading = TwoStageDataParallelLoadShardedStrategy(group)
    assert loading.data_parallel_group is None
    loading.maybe_init_gloo_group()
    made = loading.data_parallel_group
    assert made is not None
    loading.maybe_init_gloo_group()
    total = torch.tensor([topology.rank])
    dist.all_reduce(total, group=made)
    assert total.item() == sum(loading.dp_group_ranks)
    kept = TwoStageDataParallelLoadShardedStrategy(group, cpu_transfer=False)
    kept.maybe_init_gloo_group()
    return (
        dist.get_process_group_ranks(made),
        dist.get_backend(made),
        kept.data_parallel_group is group and loading.data_parallel_group is made,
    )


def test_all_ranks_make_all_groups_in_one_order() -> None:
    """S1.49: each rank gets the gloo twin of its own group, made once; without cpu_transfer the group given is used."""
    by_rank = on_four(_groups_made)
    assert [ranks for ranks, _, _ in by_rank] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(backend == "gloo" and once for _, backend, once in by_rank)


def _uneven_groups(topology: Topology) -> str:
    mine = [dist.new_group([0, 1, 2]), dist.new_group([1, 2])][topology.rank > 0]
    with use_topology(topology), pytest.raises(ConfigurationError) as caught:
        TwoStageDataParallelLoadShardedStrategy(mine).maybe_init_gloo_group()
    return str(caught.value)


def test_groups_that_overlap_are_refused_on_every_rank() -> None:
    said = run_ranks(3, _uneven_groups, process_group=True)
    assert "data_parallel_group: rank 0 gives the instance [0, 1, 2], and rank 1 gives [1, 2]" in said[0]
    assert said == [said[0]] * 3


def _pieces(topology: Topology, group: Any, root: Path) -> None:
    state = save(topology, root, "zarr")
    loading = TwoStageDataParallelLoadShardedStrategy(group)
    metas = [
        ShardedTensorMetadata(rank, one.without_data(), rank // TP, (rank % TP, rank % TP + TP))
        for rank in (topology.rank, (topology.rank + TP) % 4)
        for one in state.values()
    ]
    kept = loading.deduplicate_chunks(metas)
    chunks = [sharded_tensor_chunk_id(one.sharded_tensor_no_data) for one in kept]
    assert chunks == sorted(set(chunks)) and len(chunks) == len(state)
    assert {one.dist_group_rank for one in kept} == {0}
    (moments,) = (one for one in kept if one.sharded_tensor_no_data.key == "moments")
    assert moments.sharded_tensor_no_data.flattened_range is not None
    tp = topology.rank % TP
    whole = loading.load_tensor_from_storage(root, moments)
    assert same_bits(whole, global_index((64, 64))[tp * 32 : tp * 32 + 32])
    assert len(loading.timers["load_tensor_from_storage"]) == 1
    with pytest.raises(MissingStateError):
        missing = replace(moments.sharded_tensor_no_data, key="nobody's")
        loading.load_tensor_from_storage(root, replace(moments, sharded_tensor_no_data=missing))


def test_chunks_are_told_apart_kept_once_and_read_whole(tmp_path: Path) -> None:
    """S1.50, S1.51, S1.52: key and global offset name a chunk; the lowest rank of the group; a flattened range is cut out later."""
    on_four(_pieces, tmp_path / "c")


def _summary(topology: Topology, group: Any, root: Path) -> tuple[dict[str, tuple[float, float]], list[str]]:
    state = save(topology, root, "zarr")
    loading = TwoStageDataParallelLoadShardedStrategy(group)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    logging.getLogger("ckpt").setLevel(logging.INFO)
    loading.timers["of even ranks"] += [] if topology.rank % 2 else [0.5, 0.5]
    summarized = dict(loading.summarize_load_times())
    dist_checkpointing.load({key: blank(one) for key, one in state.items()}, root, loading)
    return summarized, [line.partition(":")[0] for line in lines if "on the slowest rank" in line]


def test_the_times_of_a_load_are_summed_up_and_nobody_hangs(tmp_path: Path) -> None:
    """S1.54: a maximum and a mean for every step, though ranks know different ones."""
    by_rank = on_four(_summary, tmp_path / "c")
    for summary, _ in by_rank:
        assert summary == {"of even ranks": (1.0, 0.5)}
    assert {"maybe_init_gloo_group", "prepare", "storage", "network", "place", "wait"} < set(by_rank[0][1])
    assert by_rank[1][1] == []  # the lead tells


def test_timed_calls_are_noted_by_name_even_if_they_raise(caplog: pytest.LogCaptureFixture) -> None:
    """S1.53: by function name, in the object's own timers where it has some; verbose ones are logged."""

    @timed()
    def adds(a: int, b: int = 1) -> int:
        """Sum."""
        return a + b

    @timed(verbose=False)
    def fails() -> None:
        raise KeyError("x")

    timers.clear()
    with caplog.at_level(logging.DEBUG, logger="ckpt"):
        assert adds(2, b=3) == 5
        with pytest.raises(KeyError):
            fails()
    assert (adds.__name__, adds.__doc__) == ("adds", "Sum.")
    assert {name: len(taken) for name, taken in timers.items()} == {"adds": 1, "fails": 1}
    assert [message.split()[0] for message in caplog.messages] == ["adds", "adds"]
    timers.clear()
