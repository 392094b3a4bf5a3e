"""Our strategies and megatron-core's on one state. Equal shards, equal durability; every bit that is loaded is compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.table import Table

from ckpt.dist_checkpointing.serialization import load, save
from ckpt.dist_checkpointing.strategies.base import LoadShardedStrategy, SaveShardedStrategy
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from ckpt.dist_checkpointing.strategies.zarr import ZarrSaveShardedStrategy
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from ckpt.ranks.job import use_topology
from ckpt.ranks.topology import Topology
from ckpt.state.sharded_tensor import ShardedTensor
from recipes.benchmark.benchmarking import SCRATCH, require_counts, typed_keys
from recipes.benchmark.comparison import print_table
from recipes.benchmark.measuring import PeakMemory, forget_cache, make_durable, timed, together
from recipes.benchmark.megatron_state import (
    OPTIMIZERS,
    RankHoldings,
    ShardArguments,
    data_parallel_ranks,
    sharded,
    shards_of,
)
from recipes.support.config import made
from recipes.training.gpt import SIZES

PEER = "megatron"
TWO_STAGE = "/two-stage"
"""What the names of contenders end in that load once per group of data-parallel ranks, and send."""
COLUMNS = ("save_s", "load_cold_s", "load_warm_s", "save_peak_mib", "load_peak_mib")
LEAST_MIB = 1.0
"""Less than this is what an allocator keeps or not: no ratio is made of it."""
_OURS: dict[str, Callable[[], SaveShardedStrategy]] = {
    "zarr": ZarrSaveShardedStrategy,
    "tensorstore": TensorStoreSaveShardedStrategy,
}


@dataclasses.dataclass
class MegatronBenchmarkKeys:
    repeats: int
    contenders: list[str]
    optimizer: str
    in_place: bool
    megatron_python: str | None


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one save or load: seconds of the slowest rank, the most memory that any rank took, and tensors that came back wrong."""

    seconds: float
    peak_mib: float
    wrong: list[str]


@dataclasses.dataclass
class Measured:
    """All rounds of one contender.

    Attributes:
        rounds: figures of the slowest, or most needy, rank.
        wrong: tensors that any rank got back wrong, once for each round.
        files, bytes: of its last checkpoint.
    """

    rounds: list[dict[str, float]] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    files: int = 0
    bytes: int = 0

    def figures(self) -> dict[str, float]:
        """The median of seconds; and the most memory, because what an allocator kept from an earlier round costs nothing."""
        return {c: (statistics.median if c.endswith("_s") else max)([row[c] for row in self.rounds]) for c in COLUMNS}


class Contender(Protocol):
    """One way to save the state to a folder that exists, and to load it. Collective; ends when all ranks are done."""

    def save(self, folder: Path) -> Cost: ...

    def load(self, folder: Path) -> Cost: ...


class Ours:
    """One of our saving strategies, and one of our loading strategies.

    Args:
        data: the tensors of `shards`, which all contenders of this side share.
        fills: whether a load fills these tensors.
    """

    def __init__(
        self,
        shards: Mapping[str, ShardArguments],
        data: Mapping[str, torch.Tensor],
        saving: SaveShardedStrategy,
        loading: LoadShardedStrategy,
        topology: Topology,
        *,
        fills: bool,
    ) -> None:
        self._shards = shards
        self._data = data
        self._save = saving
        self._load = loading
        self._topology = topology
        self._fills = fills

    def save(self, folder: Path) -> Cost:
        def work() -> None:
            save(self._state(), folder, self._save)
            if self._topology.is_lead:
                make_durable(folder)  # it is, already; the other side needs this, and both pay for it

        return self._measured(work)

    def load(self, folder: Path) -> Cost:
        loaded: dict[str, Any] = {}
        for tensor in self._data.values() if self._fills else []:
            tensor.zero_()
        cost = self._measured(lambda: loaded.update(load(self._state(), folder, self._load)))
        wrong = [name for name, shard in self._shards.items() if not shard.is_equal(loaded[name])]
        return dataclasses.replace(cost, wrong=wrong)

    def _state(self) -> dict[str, Any]:
        return sharded(self._shards, self._data, ShardedTensor)

    def _measured(self, work: Callable[[], None]) -> Cost:
        together(self._topology)
        memory = PeakMemory()
        with use_topology(self._topology):
            seconds = timed(work, self._topology)
        return Cost(seconds, memory.mib(), [])


class Megatron:
    """megatron-core's zarr saver and one of its loaders, in a process of another interpreter beside each of our ranks."""

    def __init__(self, peer: Peer, *, two_stage: bool) -> None:
        self._peer = peer
        self._two_stage = two_stage

    def save(self, folder: Path) -> Cost:
        return self._peer.cost({"do": "save", "folder": str(folder)})

    def load(self, folder: Path) -> Cost:
        return self._peer.cost({"do": "load", "folder": str(folder), "two_stage": self._two_stage})


class Peer:
    """The process beside this rank, which does as it is told (recipes/benchmark/megatron_peer.py)."""

    def __init__(self, python: str, topology: Topology) -> None:
        self.versions: dict[str, Any] = {}
        self._topology = topology
        # Neither the variables nor the folder by which our interpreter finds its packages: it has others of the same names.
        arguments = [python, "-E", "-P", str(Path(__file__).with_name("megatron_peer.py"))]
        with topology.phase("start megatron-core"):
            self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def join(self, held: RankHoldings, store: Path, *, in_place: bool) -> None:
        """Let the processes of all ranks find each other and make their state.

        Args:
            store: a file that does not exist yet.
        """
        start = {
            "rank": self._topology.rank,
            "num_ranks": self._topology.world_size,
            "store": str(store),
            "threads": torch.get_num_threads(),
            "in_place": in_place,
            "held": dataclasses.asdict(held),
        }
        self.versions = self._ask(start)[0]

    def close(self) -> None:
        """End the process. If it hangs in a collective, it is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def cost(self, command: dict[str, Any]) -> Cost:
        """Let all ranks do what the command says, together."""
        answers = self._ask(command)
        seconds, peak_mib = (max(answer[name] for answer in answers) for name in ("seconds", "peak_mib"))
        return Cost(seconds, peak_mib, [name for answer in answers for name in answer.get("wrong", [])])

    def _ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """Give the processes of all ranks their command, and return all answers. One that fails is killed: the others wait."""
        with self._topology.phase("megatron-core") as phase:
            assert self._process.stdin is not None and self._process.stdout is not None
            try:
                print(json.dumps(command), file=self._process.stdin, flush=True)
                line = self._process.stdout.readline()
            except BrokenPipeError:
                line = ""
            answer = json.loads(line) if line else {"error": "it ended without an answer"}
            if "error" in answer:
                self._process.kill()
                raise CheckpointError(
                    f"megatron-core in {self._process.args[0]}: {answer['error']}; what it wrote to stderr is above"  # type: ignore[index]
                )
            phase.payload = answer
        return phase.payloads


def check_benchmark(wanted: Any) -> dict[str, Any]:
    """Return the benchmark's own keys with their right types.

    Raises:
        ConfigurationError: there is no such key, contender or optimizer, or no interpreter where one is needed.
    """
    keys = typed_keys(MegatronBenchmarkKeys, wanted)
    require_counts({"repeats": keys["repeats"]})
    if not keys["contenders"] or {name.removesuffix(TWO_STAGE) for name in keys["contenders"]} - {*_OURS, PEER}:
        raise ConfigurationError(
            f"benchmark.contenders={keys['contenders']}: expected some of {', '.join([*_OURS, PEER])}, also with {TWO_STAGE}"
        )
    if keys["optimizer"] not in OPTIMIZERS:
        raise ConfigurationError(f"benchmark.optimizer={keys['optimizer']}: expected one of {', '.join(OPTIMIZERS)}")
    if any(is_peer(name) for name in keys["contenders"]):
        keys["megatron_python"] = _interpreter(keys["megatron_python"])
    return keys


def benchmark(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Run all rounds and return the figures. Every rank calls it."""
    keys = cfg["benchmark"]
    held = _held(cfg, topology)
    scratch = Path(cfg["run_dir"]) / SCRATCH
    if topology.is_lead:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    together(topology)
    measured = {name: Measured() for name in keys["contenders"]}
    try:
        with ExitStack() as started:
            contenders, peer = _contenders(held, scratch, keys, topology, started)
            for number, name in itertools.product(range(keys["repeats"]), contenders):
                _measure(contenders[name], scratch / f"{name.replace('/', '-')}-{number}", measured[name], topology)
                if measured[name].wrong and not is_peer(name):
                    raise CorruptCheckpointError(
                        f"{name}: what was loaded is not what was saved, first in {measured[name].wrong[0]}"
                    )
                if topology.is_lead:
                    print(f"round {number + 1} {name}: {_line(measured[name])}", flush=True)
    finally:
        if topology.is_lead:
            shutil.rmtree(scratch, ignore_errors=True)
    figures = {name: one.figures() for name, one in measured.items()}
    result = {
        "model": cfg["model"]["size"],
        "optimizer": keys["optimizer"],
        "in_place": keys["in_place"],
        "ranks": topology.world_size,
        "tp": held.tp,
        "dp": held.dp,
        "state_bytes": _state_bytes(held, topology),
        "versions": {"torch": torch.__version__} | ({} if peer is None else {PEER: peer.versions}),
        "cores": os.cpu_count(),
        "contenders": {name: dataclasses.asdict(one) for name, one in measured.items()},
        "figures": figures,
        "ratios": _ratios(figures),
    }
    if topology.is_lead:
        where = Path(cfg["run_dir"]) / "benchmark_megatron.json"
        where.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print the figures as a table, and how many times as much megatron-core takes."""
    contenders = result["contenders"]
    rounds = max(len(one["rounds"]) for one in contenders.values())
    cut = "cut like the weights" if result["optimizer"] == "tensors" else "in flattened ranges"
    title = (
        f"{result['state_bytes'] / 1e9:.2f} GB of state, moments {cut}, tensor parallel {result['tp']} x data parallel "
        f"{result['dp']}, {result['cores']} cores, {rounds} rounds: median seconds to save and to load (cold, warm), the most MiB taken "
        "on top of the state, and tensors that came back wrong"
    )
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for heading in ("save s", "cold s", "warm s", "save MiB", "load MiB", "files", "wrong"):
        table.add_column(heading, justify="right")
    for name, of_all in result["figures"].items():
        figures = [f"{of_all[c]:.2f}" if c.endswith("_s") else f"{of_all[c]:.0f}" for c in COLUMNS]
        table.add_row(name, *figures, str(contenders[name]["files"]), str(len(contenders[name]["wrong"])))
    for name, ratios in result["ratios"].items():
        table.add_row(
            f"{counterpart(name)} / {name}", *("" if ratios[c] is None else f"{ratios[c]:.2f}" for c in COLUMNS), "", ""
        )
    print_table(table)


def _interpreter(path: str | None) -> str:
    if path is None:
        raise ConfigurationError(
            "benchmark.megatron_python=null: give the Python of an environment with megatron-core 0.10 (its file, megatron_peer.py, says "
            "how to make one), or leave megatron out of benchmark.contenders"
        )
    if not os.access(path, os.X_OK) or not Path(path).is_file():
        raise ConfigurationError(f"benchmark.megatron_python={path}: there is no interpreter that can be run")
    return str(Path(path).absolute())  # not resolved: by its own path an interpreter knows its environment


def _held(cfg: Mapping[str, Any], topology: Topology) -> RankHoldings:
    layout = made(cfg["parallel"])
    sizes, place = layout.sizes(topology.world_size), layout.position(topology.rank, topology.world_size)
    if not set(sizes) <= {"dp", "tp"}:
        raise ConfigurationError(
            f"parallel={layout.name} lays out {', '.join(sizes)}: this benchmark knows dp and tp, as parallel=ddp_tp has them"
        )
    if cfg["model"]["size"] not in SIZES:
        raise ConfigurationError(
            f"model.size={cfg['model']['size']}: there is no such size; it is one of {', '.join(SIZES)}"
        )
    size = SIZES[cfg["model"]["size"]]
    return RankHoldings(
        vocabulary=size.vocabulary,
        context=size.context,
        layers=size.layers,
        width=size.width,
        optimizer=cfg["benchmark"]["optimizer"],
        tp_rank=place.get("tp", 0),
        tp=sizes.get("tp", 1),
        dp_rank=place.get("dp", 0),
        dp=sizes.get("dp", 1),
    )


def _contenders(
    held: RankHoldings, scratch: Path, keys: Mapping[str, Any], topology: Topology, started: ExitStack
) -> tuple[dict[str, Contender], Peer | None]:
    """Make all contenders. Those of one side share its tensors, and those of the other side its processes."""
    names = keys["contenders"]
    group = _data_parallel_group(held, topology) if any(name.endswith(TWO_STAGE) for name in names) else None
    shards = shards_of(held)
    data = {name: shard.values() for name, shard in shards.items()} if not all(map(is_peer, names)) else {}
    peer: Peer | None = None
    if any(map(is_peer, names)):
        peer = Peer(keys["megatron_python"], topology)
        started.callback(peer.close)
        peer.join(held, scratch / "store", in_place=keys["in_place"])
    found: dict[str, Contender] = {}
    for name in names:
        two_stage = name.endswith(TWO_STAGE)
        if is_peer(name):
            assert peer is not None
            found[name] = Megatron(peer, two_stage=two_stage)
            continue
        loading = (
            _two_stage(group) if two_stage else TensorStoreLoadShardedStrategy(load_directly_on_device=keys["in_place"])
        )
        saving = _OURS[name.removesuffix(TWO_STAGE)]()
        found[name] = Ours(shards, data, saving, loading, topology, fills=two_stage or keys["in_place"])
    return found, peer


def _two_stage(group: dist.ProcessGroup | None) -> LoadShardedStrategy:
    from ckpt.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

    strategy: LoadShardedStrategy = TwoStageDataParallelLoadShardedStrategy(group, cpu_transfer=True)
    return strategy


def _data_parallel_group(held: RankHoldings, topology: Topology) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold what this one holds. Collective.

    Raises:
        ConfigurationError: there is one rank, and so no process group.
    """
    with topology.phase("the data-parallel group"):
        if not dist.is_initialized():
            raise ConfigurationError(
                f"benchmark.contenders: {TWO_STAGE[1:]} loading sends between ranks, and there is one: give launch.nproc_per_node=2 or "
                "more"
            )
    groups = [dist.new_group(ranks) for ranks in data_parallel_ranks(held)]
    return groups[held.tp_rank]


def _measure(contender: Contender, folder: Path, measured: Measured, topology: Topology) -> None:
    """One round of one contender: a save and two loads. Its folder is gone afterwards."""
    if topology.is_lead:
        folder.mkdir()
    together(topology)
    costs = {"save": contender.save(folder)}
    forget_cache(folder, topology)
    costs["load_cold"] = contender.load(folder)
    costs["load_warm"] = contender.load(folder)
    mine = {f"{name}_s": cost.seconds for name, cost in costs.items()}
    mine |= {"save_peak_mib": costs["save"].peak_mib, "load_peak_mib": costs["load_cold"].peak_mib}
    with topology.phase("figures") as phase:
        phase.payload = [mine, [name for cost in costs.values() for name in cost.wrong]]
    measured.rounds.append({name: max(figures[name] for figures, _ in phase.payloads) for name in mine})
    measured.wrong += sorted({name for _, names in phase.payloads for name in names})
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    measured.files, measured.bytes = len(sizes), sum(sizes)
    together(topology)
    if topology.is_lead:
        shutil.rmtree(folder)


def _state_bytes(held: RankHoldings, topology: Topology) -> int:
    """Of the whole state, replicas once."""
    mine = sum(4 * shard.num_elements for shard in shards_of(held).values() if not any(shard.replica_id))
    with topology.phase("bytes") as phase:
        phase.payload = mine
    return sum(phase.payloads)


def is_peer(name: str) -> bool:
    return name.removesuffix(TWO_STAGE) == PEER


def counterpart(name: str) -> str:
    """Return what one of ours is held against: the loader that goes about it in the same way."""
    return PEER + TWO_STAGE if name.endswith(TWO_STAGE) else PEER


def _ratios(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """How many times as much megatron-core takes as each of ours; None of memory where ours takes next to none."""
    pairs = {name: counterpart(name) for name in figures if not is_peer(name) and counterpart(name) in figures}
    return {
        name: {
            c: figures[peer][c] / figures[name][c] if c.endswith("_s") or figures[name][c] >= LEAST_MIB else None
            for c in COLUMNS
        }
        for name, peer in pairs.items()
    }


def _line(measured: Measured) -> str:
    figures = ", ".join(f"{name} {value:.3f}" for name, value in measured.rounds[-1].items())
    return figures + (f"; came back wrong so far: {', '.join(measured.wrong)}" if measured.wrong else "")
