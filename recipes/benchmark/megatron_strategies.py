"""measure=megatron: our strategies and megatron-core's save and load one sharded state; every bit is compared."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckpt.dist_checkpointing.serialization import load, save
from ckpt.dist_checkpointing.strategies.base import LoadShardedStrategy, SaveShardedStrategy
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from ckpt.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from ckpt.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from ckpt.state.sharded_tensor import ShardedTensor
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import PeakMemory, forget_cache, gathered, largest, timed, wait_for_ranks
from recipes.benchmark.megatron_state import OPTIMIZERS, RankHoldings, Side, data_parallel_ranks, shards_of
from recipes.benchmark.tables import Rows
from recipes.support.config import made
from recipes.training.gpt import SIZES

PEER = "megatron"
TWO_STAGE = "/two-stage"
"""Suffix of contenders that load once per group of data-parallel ranks, and send."""

OURS: dict[str, Callable[[], SaveShardedStrategy]] = {
    "zarr": ZarrSaveShardedStrategy,
    "tensorstore": TensorStoreSaveShardedStrategy,
}
SECONDS = {"save s": "save_s", "cold s": "load_cold_s", "warm s": "load_warm_s"}
COLUMNS = (*SECONDS.values(), "save_peak_mib", "load_peak_mib")
LEAST_MIB = 1.0
"""No ratio is made of less memory: an allocator may keep it or not."""

Cost = dict[str, Any]
"""Cost of one save or load: `seconds` and `peak_mib`; of a load also `wrong`, the names of tensors that came back wrong."""

Do = Callable[[str, Path], Cost]
"""A contender: does "save" or "load" with a folder that exists. Collective; returns when all ranks are done."""


class Peer:
    """The process of megatron-core beside this rank (recipes/benchmark/megatron_peer.py)."""

    def __init__(self, python: str, topology: Topology) -> None:
        self._python, self._topology = python, topology
        # Neither the variables nor the folder by which our interpreter finds its packages: it has others of the same names.
        arguments = [python, "-E", "-P", str(Path(__file__).with_name("megatron_peer.py"))]
        with topology.phase("start megatron-core"):
            self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def join(self, held: RankHoldings, store: Path, *, in_place: bool) -> dict[str, str]:
        """Let the processes of all ranks find each other and make their state; return the versions of their packages.

        Args:
            store: a file that does not exist yet.
        """
        place = {"rank": self._topology.rank, "num_ranks": self._topology.world_size, "store": str(store)}
        return self._ask(place | {"threads": torch.get_num_threads(), "in_place": in_place, "held": dataclasses.asdict(held)})

    def cost(self, what: str, folder: Path, *, two_stage: bool) -> Cost:
        """Save or load on all ranks together."""
        return self._ask({"do": what, "folder": str(folder), "two_stage": two_stage})

    def close(self) -> None:
        """End the process by the end of its stdin. If it hangs in a collective, it is killed."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Give the processes of all ranks a command, and return the answer of ours. One that fails is killed: the others wait."""
        with self._topology.phase("megatron-core"):
            assert self._process.stdin is not None and self._process.stdout is not None
            line = ""
            with suppress(BrokenPipeError):
                print(json.dumps(command), file=self._process.stdin, flush=True)
                line = self._process.stdout.readline()
            answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended without an answer"}
            if "error" in answer:
                self._process.kill()
                raise CheckpointError(f"megatron-core in {self._python}: {answer['error']}; what it wrote to stderr is above")
        return answer


def _check(keys: dict[str, Any]) -> None:
    harness.require_choice("benchmark.optimizer", keys["optimizer"], OPTIMIZERS)
    if any(is_peer(name) for name in keys["contenders"]):
        keys["megatron_python"] = _interpreter(keys["megatron_python"])


def _interpreter(path: str | None) -> str:
    if path is None:
        raise ConfigurationError(
            "benchmark.megatron_python=null: give the Python of an environment with megatron-core 0.10 (its file, megatron_peer.py, says "
            "how to make one), or leave megatron out of benchmark.contenders"
        )
    if not os.access(path, os.X_OK) or not Path(path).is_file():
        raise ConfigurationError(f"benchmark.megatron_python={path}: there is no interpreter that can be run")
    return str(Path(path).absolute())  # not resolved: by its own path an interpreter knows its environment


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    keys = cfg["benchmark"]
    names = keys["contenders"]
    held = _held(cfg, topology)
    versions: dict[str, Any] = {}
    with harness.scratch_folder(cfg, topology) as folders, ExitStack() as started:
        contenders = _ours(names, held, keys["in_place"], topology)
        if any(map(is_peer, names)):
            peer = Peer(keys["megatron_python"], topology)
            started.callback(peer.close)
            versions[PEER] = peer.join(held, folders / "store", in_place=keys["in_place"])
            contenders |= {name: partial(peer.cost, two_stage=name != PEER) for name in names if is_peer(name)}

        def take_turn(name: str, number: int) -> Figures:
            with harness.turn_folder(folders, name, number, topology) as folder:
                figures = _measured(contenders[name], folder, topology)
            if figures["wrong"] and not is_peer(name):
                raise CorruptCheckpointError(f"{name}: what was loaded is not what was saved, first in {figures['wrong'][0]}")
            return figures

        rounds = harness.interleaved(names, keys["repeats"], take_turn, topology, _line)
    shards = shards_of(held).values()
    main = [shard.num_elements for shard in shards if not any(shard.replica_id)]
    keys_of_ranks, sizes = zip(*gathered([[shard.key for shard in shards], 4 * sum(main)], topology), strict=True)
    cut = "cut like the weights" if held.optimizer == "tensors" else "in flattened ranges"
    counted = {name: [{column: row[column] for column in COLUMNS} for row in rows] for name, rows in rounds.items()}
    return {
        "model": cfg["model"]["size"],
        "optimizer": keys["optimizer"],
        "in_place": keys["in_place"],
        "ranks": topology.world_size,
        "tp": held.tp,
        "dp": held.dp,
        "layout": f"TP {held.tp} x DP {held.dp}, moments {cut}{', into tensors that exist' if keys['in_place'] else ''}",
        "tensors": len({*chain(*keys_of_ranks)}),
        "state_bytes": sum(sizes),
        "versions": versions,
        "contenders": {
            name: {"wrong": [wrong for row in rows for wrong in row["wrong"]]} | {of: rows[-1][of] for of in ("files", "bytes")}
            for name, rows in rounds.items()
        },
        "rounds": counted,
    }


def _held(cfg: Mapping[str, Any], topology: Topology) -> RankHoldings:
    layout = made(cfg["parallel"])
    sizes, place = layout.sizes(topology.world_size), layout.position(topology.rank, topology.world_size)
    if not set(sizes) <= {"dp", "tp"}:
        raise ConfigurationError(
            f"parallel={layout.name} lays out {', '.join(sizes)}: this benchmark knows dp and tp, as parallel=ddp_tp has them"
        )
    harness.require_choice("model.size", cfg["model"]["size"], SIZES)
    size = SIZES[cfg["model"]["size"]]
    places = {"tp_rank": place.get("tp", 0), "tp": sizes.get("tp", 1), "dp_rank": place.get("dp", 0), "dp": sizes.get("dp", 1)}
    model = {name: getattr(size, name) for name in ("vocabulary", "context", "layers", "width")}
    return RankHoldings(**model, optimizer=cfg["benchmark"]["optimizer"], **places)


def _ours(names: Sequence[str], held: RankHoldings, in_place: bool, topology: Topology) -> dict[str, Do]:
    """Make our contenders, which share their tensors. Collective."""
    ours = [name for name in names if not is_peer(name)]
    group = _data_parallel_group(held, topology) if any(name.endswith(TWO_STAGE) for name in names) else None
    if not ours:
        return {}
    side = Side(shards_of(held), ShardedTensor, save, load, partial(_timed, topology), topology.is_lead)

    def contender(name: str) -> Do:
        two_stage = name.endswith(TWO_STAGE)
        saving = OURS[name.removesuffix(TWO_STAGE)]()
        loading: LoadShardedStrategy = TensorStoreLoadShardedStrategy(load_directly_on_device=in_place)
        if two_stage:
            loading = TwoStageDataParallelLoadShardedStrategy(group, cpu_transfer=True)
        load_it = partial(side.load, strategy=loading, fills=two_stage or in_place)
        return lambda what, folder: side.save(folder, saving) if what == "save" else load_it(folder)

    return {name: contender(name) for name in ours}


def _timed(topology: Topology, work: Callable[[], None]) -> Cost:
    wait_for_ranks(topology)
    memory = PeakMemory()
    with use_topology(topology):
        seconds = timed(work, topology)
    return {"seconds": seconds, "peak_mib": memory.mib()}


def _data_parallel_group(held: RankHoldings, topology: Topology) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold the same part of the model. Collective.

    Raises:
        ConfigurationError: there is one rank, and so no process group.
    """
    if topology.world_size == 1:
        raise ConfigurationError(
            f"benchmark.contenders: {TWO_STAGE[1:]} loading sends between ranks, and there is one: give launch.nproc_per_node=2 or more"
        )
    return dist.new_subgroups_by_enumeration(data_parallel_ranks(held))[0]


def _measured(do: Do, folder: Path, topology: Topology) -> Figures:
    """One round of one contender: figures of the slowest or most needy rank, and all tensors that came back wrong."""
    costs = {"save": do("save", folder)}
    forget_cache(folder, topology)
    costs |= {"load_cold": do("load", folder), "load_warm": do("load", folder)}
    mine = {f"{name}_s": cost["seconds"] for name, cost in costs.items()}
    mine |= {"save_peak_mib": costs["save"]["peak_mib"], "load_peak_mib": costs["load_cold"]["peak_mib"]}
    wrong = [name for cost in costs.values() for name in cost.get("wrong", [])]
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    figures, wrong_of_ranks = zip(*gathered([mine, wrong], topology), strict=True)
    return largest(figures) | {"wrong": sorted({*chain(*wrong_of_ranks)}), "files": len(sizes), "bytes": sum(sizes)}


def is_peer(name: str) -> bool:
    return name.removesuffix(TWO_STAGE) == PEER


def counterpart(name: str) -> str:
    """Return the contender of megatron-core that one of ours is compared with: the loader of the same kind."""
    return PEER + TWO_STAGE if name.endswith(TWO_STAGE) else PEER


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ratios`: megatron-core's medians over ours; None of memory where ours takes next to none."""
    medians = result["medians"]
    pairs = {name: counterpart(name) for name in medians if not is_peer(name) and counterpart(name) in medians}
    return {
        "ratios": {
            name: {
                c: medians[peer][c] / medians[name][c] if c.endswith("_s") or medians[name][c] >= LEAST_MIB else None
                for c in COLUMNS
            }
            for name, peer in pairs.items()
        }
    }


def _tables(result: Mapping[str, Any]) -> dict[str, Rows]:
    return {
        "what they left": {
            name: {"files": f"{left['files']:,}", "tensors that came back wrong": str(len(left["wrong"]))}
            for name, left in result["contenders"].items()
        }
    }


def _line(figures: Figures) -> str:
    wrong = f"; came back wrong: {', '.join(figures['wrong'])}" if figures["wrong"] else ""
    return ", ".join(f"{column} {figures[column]:.3f}" for column in COLUMNS) + wrong


MEASUREMENT = harness.Measurement(
    {"repeats": int, "contenders": list[str], "optimizer": str, "in_place": bool, "megatron_python": str | None},
    benchmark,
    lambda result: f"{result['state_bytes'] / 1e9:.2f} GB of state, {result['layout']}",
    SECONDS
    | {"save / load MiB": "save_peak_mib load_peak_mib", "megatron's seconds / ours": "save_s_ratio load_cold_s_ratio load_warm_s_ratio"},
    compare=compared,
    tables=_tables,
    contenders={kind: (*names, *(name + TWO_STAGE for name in names)) for kind, names in {"ours": OURS, "megatron": [PEER]}.items()},
    check=_check,
    scratch=True,
)
