"""measure=plan: plan saves of a GPT that does not exist, of any size on any number of ranks, by addresses alone.

Measured is the work of one rank in a save before it writes. The payloads of the other ranks are recorded before, so one process is enough.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from ckpt.errors import ConfigurationError
from ckpt.format.box import Box, chunk_box, whole
from ckpt.format.dtypes import item_bytes
from ckpt.planning.plan import Address, SavePlan, Table, TablePart, plan_save, table_to_json
from ckpt.ranks.topology import Phase, Topology
from ckpt.state.collect import Comparison, DistinctRanks, RankState, digest_of_json, exchange_tables, settle_plain
from ckpt.state.sharing import StateComponent
from recipes.benchmark import harness
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import PeakMemory
from recipes.benchmark.megatron_state import layer_of
from recipes.benchmark.weights import NamedTensors
from recipes.support.local_ranks import start_forkserver

OPTIMIZERS = ("replicated", "sharded")
_PATTERNS = {"model": "sharded", "optimizer": "sharded", "scheduler": "replicated", "rng": "per_rank"}


@dataclass(frozen=True)
class SyntheticGPT:
    """A GPT in bfloat16 with AdamW in float32 (main weights and two moments), as its ranks would describe it.

    Rank = (stage * dp + replica) * tp + slice. The word embedding is tied, so the first and the last stage both hold it.

    Attributes:
        tp, pp, dp: ranks per tensor, pipeline stages, replicas.
        shard_optimizer: cut optimizer state over the replicas too, along dimension 0.
    """

    tp: int
    pp: int
    dp: int
    layers: int
    width: int
    vocab: int
    shard_optimizer: bool

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_parameters(self) -> int:
        shapes = {name: shape for stage in range(self.pp) for name, (shape, _) in self._tensors(stage).items()}
        return sum(map(math.prod, shapes.values()))

    def table(self, rank: int) -> Table:
        """Return this rank's addresses."""
        replicas_and_stage, piece = divmod(rank, self.tp)
        stage, replica = divmod(replicas_and_stage, self.dp)
        model = []
        optimizer = []
        for name, (shape, dim) in self._tensors(stage).items():
            box = whole(shape) if dim is None else _cut(whole(shape), dim, self.tp, piece)
            model.append(Address(f"model/{name}", "bfloat16", shape, box))
            optimizer.append(Address(f"optimizer/state.{name}.step", "float32", (), Box((), ())))
            own = _cut(box, 0, self.dp, replica) if self.shard_optimizer else box
            optimizer += [
                Address(f"optimizer/state.{name}.{moment}", "float32", shape, own)
                for moment in ("main", "exp_avg", "exp_avg_sq")
            ]
        return Table((TablePart.of(model), TablePart.of(optimizer)))

    def _tensors(self, stage: int) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Return name -> shape, and the dimension that the `tp` ranks cut, of the parameters of one stage."""
        w, per_layer = self.width, layer_of(self.width)
        layers = range(self.layers * stage // self.pp, self.layers * (stage + 1) // self.pp)
        tensors = {f"h.{layer}.{name}": tensor for layer in layers for name, tensor in per_layer.items()}
        if stage in (0, self.pp - 1):
            tensors = {"wte.weight": ((self.vocab, w), 0), **tensors}
        if stage == self.pp - 1:
            tensors |= {"ln_f.weight": ((w,), None), "ln_f.bias": ((w,), None)}
        return tensors


class _EndOfRecording(Exception):
    """A rank has come to the end of the phase that is being recorded."""


class RecordedTopology:
    """A stand-in for a `Topology`: one rank, with the recorded payloads of all ranks.

    Attributes:
        payload: this rank's payload in the first phase that was not recorded, which ends the recording.
    """

    is_lead = False

    def __init__(self, rank: int, world_size: int, recorded: Sequence[bytes]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.nodes = (tuple(range(world_size)),)
        self.groups: dict[str, Any] = {}
        self.payload: Any = None
        self._recorded = list(recorded)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        phase = Phase(name)
        yield phase
        if not self._recorded:
            self.payload = phase.payload
            raise _EndOfRecording
        phase.payloads = json.loads(self._recorded.pop(0))


def record(world_size: int, act: Callable[[RecordedTopology], object], *, num_phases: int) -> list[bytes]:
    """Let every rank act, phase after phase, and return the payloads of all ranks in each, as JSON."""
    recorded: list[bytes] = []
    for _ in range(num_phases):
        ranks = [RecordedTopology(rank, world_size, recorded) for rank in range(world_size)]
        for rank in ranks:
            with suppress(_EndOfRecording):
                act(rank)
        recorded.append(json.dumps([rank.payload for rank in ranks], separators=(",", ":")).encode())
    return recorded


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    """Measure every case, each in a process of its own, and return the figures. A case that is given twice has two rounds."""
    keys = cfg["benchmark"]
    rounds: dict[str, list[Figures]] = {}
    for optimizer in keys["optimizer_state"]:
        for dp in keys["dp"]:
            shape = {name: keys[name] for name in ("tp", "pp", "layers", "width", "vocab")}
            case = SyntheticGPT(dp=dp, shard_optimizer=optimizer == "sharded", **shape)
            figures = {"optimizer": optimizer, "dp": dp, **_in_new_process(case)}
            rounds.setdefault(f"{case.world_size:,} ranks, {optimizer}", []).append(figures)
    return {  # the last case stands for all: they plan the same state
        "layout": f"{figures['parameters'] / 1e9:,.3f} billion parameters, TP {keys['tp']} x PP {keys['pp']}",
        "tensors": figures["arrays"],
        "bytes": figures["bytes"],
        "rounds": rounds,
    }


def measure(case: SyntheticGPT, distinct: DistinctRanks, recorded: Sequence[bytes]) -> dict[str, Any]:
    """Return the seconds that the rank in the middle plans in its first save and in later ones, and the figures of the plan."""
    rank = case.world_size // 2
    own = case.table(rank)
    memory = PeakMemory()
    started = time.perf_counter()
    tables, table_of_rank = exchange_tables(own, distinct, RecordedTopology(rank, case.world_size, recorded))
    received = time.perf_counter()
    plan = plan_save(tables, table_of_rank, item_bytes)
    planned = time.perf_counter()
    mine = plan.of_rank(rank)
    done = time.perf_counter()
    peak_mib = memory.mib()
    written = bytes_per_writer(plan, case.world_size)
    mean = sum(written) / case.world_size
    return {
        "ranks": case.world_size,
        "parameters": case.num_parameters,
        "arrays": len(plan.arrays),
        "chunks": sum(len(array.writers) for array in plan.arrays.values()),
        "own_chunks": len(mine.chunks),
        "received_bytes": sum(map(len, recorded)),
        "tables_s": received - started,
        "plan_s": planned - received,
        "own_s": done - planned,
        "total_s": done - started,
        "peak_mib": peak_mib,
        "cached_s": _cached_s(case, rank),
        "bytes": sum(written),
        "max_to_mean": max(written) / mean,
        "min_to_mean": min(written) / mean,
    }


def _in_new_process(case: SyntheticGPT) -> dict[str, Any]:
    tables = [case.table(rank) for rank in range(case.world_size)]
    distinct = DistinctRanks.of([digest_of_json(table_to_json(table)) for table in tables])
    recorded = record(case.world_size, lambda rank: exchange_tables(tables[rank.rank], distinct, rank), num_phases=2)
    start_forkserver([__name__])  # forked from this process it would begin with the memory of this one
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        figures: dict[str, Any] = process.submit(measure, case, distinct, recorded).result()
    return {"distinct_tables": len(distinct.senders), **figures}


def bytes_per_writer(plan: SavePlan, world_size: int) -> list[int]:
    """Return the bytes of tensors that each rank writes."""
    written = [0] * world_size
    for array in plan.arrays.values():
        item = item_bytes(array.dtype)
        for box, rank in array.packs.items():
            written[rank] += box.num_elements * item
        for number, rank in enumerate(array.writers):
            assert array.grid is not None, "packed arrays have no chunks"
            written[rank] += chunk_box(array.shape, array.grid, number).num_elements * item
    return written


def _check(keys: dict[str, Any]) -> None:
    harness.require_some("benchmark.optimizer_state", keys["optimizer_state"], OPTIMIZERS)
    if not keys["dp"]:
        raise ConfigurationError("benchmark.dp=[]: expected at least one number of replicas")


def _cached_s(case: SyntheticGPT, rank: int) -> float:
    """Return the seconds of a rank in a later save of the same state until it knows that the plan still holds, but for the agreement."""
    topology = cast(Topology, RecordedTopology(rank, case.world_size, []))
    comparison, phase = Comparison(topology), Phase("collect")
    components = {key: StateComponent(key, NamedTensors({}), pattern) for key, pattern in _PATTERNS.items()}
    plain = {key: {"step": [["step"], 1000]} for key in components}
    started = time.perf_counter()
    mine = RankState(components=components, table=case.table(rank), plain=plain)
    comparison.say(mine, phase)
    phase.verdict(None).encode()
    phase.from_lead = [2, {}, [], [], None]  # no rank differs
    settle_plain(mine, comparison.heard(phase), topology)
    return time.perf_counter() - started


def _cut(box: Box, dim: int, parts: int, number: int) -> Box:
    """Return one of the nearly equal parts of a box along a dimension, the later ones shorter or empty, as of torch.chunk."""
    side, step = box.shape[dim], -(-box.shape[dim] // parts)
    start, stop = (min(at * step, side) for at in (number, number + 1))
    offsets = (*box.offsets[:dim], box.offsets[dim] + start, *box.offsets[dim + 1 :])
    return Box(offsets, (*box.shape[:dim], stop - start, *box.shape[dim + 1 :]))


MEASUREMENT = harness.Measurement(
    {"tp": int, "pp": int, "dp": list[int], "layers": int, "width": int, "vocab": int, "optimizer_state": list[str]},
    benchmark,
    lambda result: f"{result['layout']}, {result['tensors']:,} arrays",
    {
        "distinct tables": "distinct_tables",
        "chunks": "chunks",
        "received, bytes": "received_bytes",
        "read the tables, s": "tables_s",
        "plan, s": "plan_s",
        "own share, s": "own_s",
        "together, s": "total_s",
        "peak memory, MiB": "peak_mib",
        "later saves, s": "cached_s",
        "busiest / least busy writer, over the mean": "max_to_mean min_to_mean",
    },
    check=_check,
    check_run=harness.checked_folder,
    digits=4,
    turned=True,
)
