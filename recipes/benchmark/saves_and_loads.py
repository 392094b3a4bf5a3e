"""measure=saves: every contender saves one state and loads it, cold and warm; every loaded bit is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from ckpt.cli.tables import console, full_line
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from recipes.benchmark import harness
from recipes.benchmark.contenders import LIMITS, OURS, PEERS, RAW, contenders_of
from recipes.benchmark.harness import Figures
from recipes.benchmark.measuring import PeakMemory, forget_cache, gathered, largest, timed, wait_for_ranks
from recipes.benchmark.tables import cores_and_rounds, draw, print_table, quotients, rows_of, summarized
from recipes.benchmark.workloads import SHARINGS, Contender, State, Workload, described, facts_of, prepared

SECONDS = {"save_s": "save s", "load_cold_s": "load s, cold", "load_warm_s": "load s, warm"}
MEMORY = {"save / load peak MiB": "save_peak_mib load_peak_mib", "read / needed": "bytes_read bytes_needed"}


@dataclass
class SmallTensorKeys:
    count: int = MISSING
    elements: int = MISSING
    sharing: str = MISSING


@dataclass
class SavesKeys:
    workload: str
    repeats: int
    contenders: list[str]
    load_ranks: int | None
    store_mib_s: float | None
    small_tensors: SmallTensorKeys | None
    plot: bool | None


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
    with prepared(cfg, topology) as workload, harness.scratch_folder(cfg, topology) as folders:
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
    return facts | {"left_out": left_out, "rounds": rounds} | compared(rounds)


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


def compared(rounds: Mapping[str, list[Figures]]) -> dict[str, Any]:
    """Return `medians`, `ranges` (least and most) and `ratios` of medians: by heading, name of ours and column.

    "best raw" is the fastest raw contender in each column.
    """
    summary = summarized(rounds)
    medians = summary["medians"]
    ours = {name: row for name, row in medians.items() if name in OURS}
    raw = [row for name, row in medians.items() if name in RAW]
    best = {c: min(row[c] for row in raw if c in row) for c in SECONDS if any(c in row for row in raw)}
    loads = [column for column in SECONDS if column != "save_s"]
    ratios = {
        f"{peer} / ours": {name: quotients(row, own, SECONDS) for name, own in ours.items()}
        for peer, row in medians.items()
        if peer in PEERS
    }
    ratios["direct / two-stage"] = {
        f"{name}/two-stage": quotients(own, ours[f"{name}/two-stage"], loads)
        for name, own in ours.items()
        if f"{name}/two-stage" in ours
    }
    for limit, row in {"best raw": best, **{name: row for name, row in medians.items() if name in LIMITS}}.items():
        ratios[f"ours / {limit}"] = {name: quotients(own, row, SECONDS) for name, own in ours.items()}
    return {**summary, "ratios": ratios}


def show(result: Mapping[str, Any]) -> None:
    """Print the figures and the ratios as tables."""
    title = f"{_title(result)} (least .. most); peak: of the rank that took most"
    print_table(title, *rows_of(result, {heading: figure for figure, heading in SECONDS.items()} | MEMORY))
    left_out = {f"ours / {name}" for name in RAW}  # "best raw" stands for them
    columns = {heading: of for heading, of in result["ratios"].items() if any(of.values()) and heading not in left_out}
    if columns:
        print_table(
            "ratios of medians: save, load cold, load warm",
            ["ours", *columns],
            [
                (name, *(_cell(of_ours.get(name, {})) for of_ours in columns.values()))
                for name in result["medians"]
                if name in OURS
            ],
        )
    for name, reason in result["left_out"].items():
        console().print(full_line(f"left out: {name}: {reason}"))


def _title(result: Mapping[str, Any]) -> str:
    loaded = "" if result["load_ranks"] == result["ranks"] else f", loaded on {result['load_ranks']}"
    store = "" if result["store_mib_s"] is None else f", read through a store of {result['store_mib_s']:g} MiB/s"
    return f"{described(result)}{loaded}{store}, {cores_and_rounds(result)}"


def _cell(ratios: Mapping[str, float]) -> str:
    """Join the ratios that exist: of save, cold load and warm load; of both loads; or of warm loads alone."""
    return "  ".join(f"{ratios[column]:.2f}" for column in SECONDS if column in ratios)


def _draw(result: Figures, path: Path) -> None:
    draw(result, path, _title(result), SECONDS, {"ours": OURS, "others": PEERS, "the machine": LIMITS})


def _line(figures: Figures) -> str:
    seconds = {name.removesuffix("_s").replace("_", " "): v for name, v in figures.items() if name.endswith("_s")}
    return ", ".join(f"{name} {value:.3f} s" for name, value in seconds.items())


MEASUREMENT = harness.Measurement(
    SavesKeys, benchmark, show, contenders=(*PEERS, *LIMITS, *OURS), check=_check, draw=_draw, scratch=True
)
