"""measure=saves: every contender saves one state and loads it, cold and warm; every loaded bit is compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import MISSING

from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark import harness
from recipes.benchmark.adapters import adapted
from recipes.benchmark.contenders import LIMITS, OURS, PEERS, RAW, contenders_of
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import PeakMemory, forget_cache, gathered, largest, timed, wait_for_ranks
from recipes.benchmark.tables import Rows, quotients
from recipes.benchmark.workloads import SHARINGS, Contender, State, Workload, described, facts_of, prepared

SECONDS = {"save s": "save_s", "load s, cold": "load_cold_s", "load s, warm": "load_warm_s"}
SMALL_TENSORS = make_dataclass("SmallTensorKeys", [("count", int, MISSING), ("elements", int, MISSING), ("sharing", str, MISSING)])
ADAPTERS = make_dataclass("AdapterKeys", [("hidden_size", int, MISSING), ("layers", int, MISSING), ("rank", int, MISSING)])
MEMORY = {"save / load peak MiB": "save_peak_mib load_peak_mib", "read / needed": "bytes_read/bytes_needed"}


def _check(keys: dict[str, Any]) -> None:
    names, rate, small = keys["contenders"], keys["store_mib_s"], keys["small_tensors"]
    if small is not None:
        harness.require_choice("benchmark.small_tensors.sharing", small["sharing"], SHARINGS)
    if rate is not None and not rate > 0:
        raise ConfigurationError(f"benchmark.store_mib_s={rate}: expected more than 0, or null")
    if rate is not None and not set(names) <= set(OURS):
        raise ConfigurationError(
            f"benchmark.store_mib_s={rate} slows the reads of our loads alone: leave "
            f"{', '.join(name for name in names if name not in OURS)} out of benchmark.contenders"
        )


def benchmark(cfg: dict[str, Any], topology: Topology) -> Figures:
    keys = cfg["benchmark"]
    with state_asked_for(cfg, topology) as workload, harness.scratch_folder(cfg, topology) as folders:
        contenders, left_out = contenders_of(cfg, workload, folders)
        identity = workload.identity(workload.saved)
        facts = facts_of(cfg, workload) | {
            "load_ranks": workload.num_loading,
            "loaded_bytes": workload.loaded_bytes,
            "store_mib_s": keys["store_mib_s"],
        }
        harness.announce(f"{described(facts)}, loaded on {workload.num_loading}", contenders, keys, topology, left_out)

        def take_turn(name: str, number: int) -> Figures:
            with harness.turn_folder(folders, name, number, topology) as folder:
                return _measured(name, contenders[name], folder, workload, identity)

        rounds = harness.interleaved(contenders, keys["repeats"], take_turn, topology, _line)
    return facts | {"left_out": left_out, "rounds": rounds}


def state_asked_for(cfg: Mapping[str, Any], topology: Topology) -> AbstractContextManager[Workload]:
    """Make the state of a training, many small tensors, or that of a fine-tune. Collective. Raises as `prepared`."""
    adapters = cfg["benchmark"]["adapters"]
    return prepared(cfg, topology, None if adapters is None else adapted(instantiate(cfg["device"]), topology, **adapters))


def _measured(name: str, contender: Contender, folder: Path, workload: Workload, identity: str) -> Figures:
    """One round of one contender: seconds of the slowest rank, and the most memory that each rank took on top of the state."""
    topology, loaded = workload.saved.topology, workload.loaded
    mine: Figures = {}
    if "save" in contender.measures:
        wait_for_ranks(topology)
        memory = PeakMemory()
        mine["save_s"] = timed(partial(contender.save, folder), topology)
        mine["save_peak_mib"] = memory.mib()

    def load_all(state: State) -> None:
        mine.update(contender.load(folder) or {})
        state.device.synchronize()

    for load in [load for load in contender.measures if load != "save"]:
        if load == "load_cold":
            # Twice, and the second counts: in the first, kernel time of copies varies with the files' layout (docs/figures.md).
            forget_cache(folder, topology)
            if loaded is not None:
                load_all(loaded)
            forget_cache(folder, topology)
        if loaded is not None:
            if contender.fills:
                loaded.scramble()
                loaded.device.synchronize()
            memory = PeakMemory()
            mine[f"{load}_s"] = timed(partial(load_all, loaded), loaded.topology, loaded.group)
            mine["load_peak_mib"] = max(mine.get("load_peak_mib", 0.0), memory.mib())
        if contender.fills:
            found = identity if loaded is None else workload.identity(loaded)
            with topology.phase("compare"):
                if found != identity:
                    raise CorruptCheckpointError(f"{name}, {load}: what was loaded is not what was saved")
    of_ranks = gathered(mine, topology)
    figures = largest(of_ranks)
    memories = [figure for figure in figures if figure.endswith("_mib")]
    return figures | {f"{figure}_of_ranks": [of_rank.get(figure) for of_rank in of_ranks] for figure in memories}


def compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ratios` of medians: by heading, name of ours and column. "best raw" is the fastest raw contender in each column."""
    medians, seconds = result["medians"], SECONDS.values()
    ours = {name: row for name, row in medians.items() if name in OURS}
    raw = [row for name, row in medians.items() if name in RAW]
    best = {c: min(row[c] for row in raw if c in row) for c in seconds if any(c in row for row in raw)}
    ratios = {
        f"{peer} / ours": {name: quotients(row, own, seconds) for name, own in ours.items()}
        for peer, row in medians.items()
        if peer in PEERS
    }
    ratios["direct / two-stage"] = {
        staged: quotients(own, ours[staged], ("load_cold_s", "load_warm_s"))
        for name, own in ours.items()
        if (staged := f"{name}/two-stage") in ours
    }
    for limit, row in {"best raw": best, **{name: row for name, row in medians.items() if name in LIMITS}}.items():
        ratios[f"ours / {limit}"] = {name: quotients(own, row, seconds) for name, own in ours.items()}
    return {"ratios": ratios}


def _tables(result: Mapping[str, Any]) -> dict[str, Rows]:
    """Return the ratios of ours that exist: of save, cold load and warm load; of both loads; or of warm loads alone."""
    left_out = {f"ours / {name}" for name in RAW}  # "best raw" stands for them
    headings = {heading: of for heading, of in result["ratios"].items() if any(of.values()) and heading not in left_out}
    rows = {
        name: {
            heading: "  ".join(f"{of[name][c]:.2f}" for c in SECONDS.values() if c in of.get(name, {}))
            for heading, of in headings.items()
        }
        for name in result["medians"]
        if name in OURS
    }
    return {"ratios of medians: save, load cold, load warm": rows}


def _title(result: Mapping[str, Any]) -> str:
    loaded = "" if result["load_ranks"] == result["ranks"] else f", loaded on {result['load_ranks']}"
    store = "" if result["store_mib_s"] is None else f", read through a store of {result['store_mib_s']:g} MiB/s"
    return f"{described(result)}{loaded}{store}"


def _line(figures: Figures) -> str:
    seconds = {name.removesuffix("_s").replace("_", " "): v for name, v in figures.items() if name.endswith("_s")}
    return ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())


MEASUREMENT = harness.Measurement(
    {
        "workload": str, "repeats": int, "contenders": list[str], "load_ranks": int | None, "store_mib_s": float | None,
        "small_tensors": SMALL_TENSORS | None, "adapters": ADAPTERS | None, "plot": bool | None,
    },
    benchmark,
    _title,
    SECONDS | MEMORY,
    compare=compared,
    tables=_tables,
    contenders={"the machine": LIMITS, "others": PEERS, "ours": OURS},
    check=_check,
    scratch=True,
)
