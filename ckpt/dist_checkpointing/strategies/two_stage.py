"""Megatron-Core's two-stage strategy, under its name, on this library's engine (`ckpt.loading.two_stage.two_stage`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from ckpt.dist_checkpointing.folder.loading import load_tensors
from ckpt.dist_checkpointing.mapping import ShardedStateDict
from ckpt.dist_checkpointing.strategies.sharded import LoadTensors
from ckpt.errors import logger_of
from ckpt.format.places import Place, place_of
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.loading.two_stage.network import TorchTransport, make_groups
from ckpt.loading.two_stage.spread_worker import Timers, summarize
from ckpt.loading.two_stage.spread_worker import timed as timed
from ckpt.loading.two_stage.spread_worker import timers as timers
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology, instances_of
from ckpt.state.sharded_tensor import ShardedTensor

logger = logger_of(__name__)


@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """A shard that a rank requests, in messages between the ranks of its data-parallel group.

    Attributes:
        global_rank: the requesting rank.
        dist_group_rank: its number in the group.
        dist_group_ranks: the global ranks of the group.
        data_size: bytes, if known.
    """

    global_rank: int
    sharded_tensor_no_data: ShardedTensor
    dist_group_rank: int
    dist_group_ranks: tuple[int, ...]
    data_size: int | None = None


class TwoStageDataParallelLoadShardedStrategy(LoadTensors):
    """Megatron-Core's two-stage loading: the shards of a data-parallel group are read from storage once, and spread in the group.

    A tensor is loaded into the `data` of its ShardedTensor, if it has any, and converted to its data type; messages have
    the stored data type. Without data a new host tensor replaces it.

    Args:
        data_parallel_group: process group whose ranks request the same shards, or nearly.
        cpu_transfer: see `TwoStageLoad`.

    Attributes:
        data_parallel_group: carries bytes between hosts: the group given or, with `cpu_transfer`, its twin on gloo.
        timers: see `TwoStageLoad`; and one for each method below.
    """

    library = "tensorstore"

    def __init__(self, data_parallel_group: dist.ProcessGroup, cpu_transfer: bool = True) -> None:
        super().__init__(load_directly_on_device=None)
        self.cpu_transfer = cpu_transfer
        self.data_parallel_group_orig = data_parallel_group
        self.data_parallel_group = None if cpu_transfer else data_parallel_group
        self.dp_group_ranks = tuple(sorted(dist.get_process_group_ranks(data_parallel_group)))
        self.dp_group_rank = dist.get_rank(data_parallel_group)
        self.global_rank = dist.get_rank()
        self.timers: Timers = defaultdict(list)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> ShardedStateDict:
        """Replace every ShardedTensor, in place, by the tensor it describes; return the state dict. Collective.

        Raises: those of `ckpt.dist_checkpointing.folder.loading.load_tensors`.
        """
        self.maybe_init_gloo_group()
        loaded = super().load(sharded_state_dict, checkpoint_dir)
        self.summarize_load_times()
        return loaded

    @timed()
    def maybe_init_gloo_group(self) -> None:
        """Make gloo twins of all data-parallel groups, once, if transfers go through host memory. Collective over all ranks.

        Every rank makes every group, in one order, including those that it is not in.
        """
        if self.data_parallel_group is not None:
            return
        topology = current_topology()
        with topology.phase("name the data-parallel groups") as phase:
            phase.to_lead = self.dp_group_ranks
            phase.answer = lambda: instances_of("data_parallel_group", phase.gathered)
        instances = phase.from_lead
        with topology.phase("make process groups"):
            self.data_parallel_group = make_groups(instances, "gloo", topology.timeout_s)[topology.rank]

    @timed()
    def deduplicate_chunks(self, ten_metas: Sequence[ShardedTensorMetadata]) -> list[ShardedTensorMetadata]:
        """Keep one shard for each chunk, that of the lowest rank of the group, in the order of the chunks' names.

        The load itself balances bytes over ranks instead (`ckpt.loading.two_stage.spread_blocks`).
        """
        of_chunk: dict[tuple[str, tuple[int, ...]], ShardedTensorMetadata] = {}
        for meta in sorted(ten_metas, key=lambda meta: meta.dist_group_rank):
            of_chunk.setdefault(sharded_tensor_chunk_id(meta.sharded_tensor_no_data), meta)
        return [of_chunk[chunk] for chunk in sorted(of_chunk)]

    @timed(verbose=False)
    def load_tensor_from_storage(self, checkpoint_dir: Place, ten_meta: ShardedTensorMetadata) -> torch.Tensor:
        """Read the whole chunk that contains a shard, of the stored data type, into new host memory. Not collective.

        A flattened range is not applied: each rank cuts its own.
        """
        whole = replace(ten_meta.sharded_tensor_no_data, data=None, flattened_range=None)
        alone = Topology.alone()
        loaded = load_tensors(
            {"whole": whole},
            place_of(checkpoint_dir),
            open_source=partial(self._open, place_of(checkpoint_dir), alone, DirectLoad()),
            into_data=False,
            topology=alone,
        )
        tensor: torch.Tensor = loaded["whole"]
        return tensor

    def summarize_load_times(self) -> dict[str, tuple[float, float]]:
        """Return step -> (seconds of the slowest rank, mean over the ranks), and clear the timers. Collective.

        Ranks exchange the names of their steps first, so different names do not hang.
        """
        summary = summarize(self.timers, current_topology())
        self.timers.clear()
        return summary

    def _strategy(self) -> LoadingStrategy:
        group = self.data_parallel_group
        assert group is not None, "load has made it"
        two_stage = TwoStageLoad(
            group=self.dp_group_ranks,
            cpu_transfer=self.cpu_transfer,
            transport=TorchTransport(group),
        )
        two_stage.timers = self.timers
        return two_stage


def sharded_tensor_chunk_id(sharded_tensor: ShardedTensor) -> tuple[str, tuple[int, ...]]:
    """The name of the chunk that contains a shard: the flattened ranges of one chunk share it."""
    return sharded_tensor.key, tuple(sharded_tensor.global_offset)
