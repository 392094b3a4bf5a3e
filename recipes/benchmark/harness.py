"""The harness of the benchmark: check the keys, let the contenders take turns in each round, leave the figures.

A measurement is a module that ends with its `Measurement`. Contenders are interleaved in its rounds, so that a busy moment of the machine
slows all of them alike.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, datetime
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ckpt.cli.config_text import by_dotted_key
from ckpt.cli.tables import show
from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.version import __version__
from recipes.benchmark.measuring import make_durable
from recipes.benchmark.tables import Rows, draw, print_table, rounds_of, rows_of, summarized
from recipes.support.config import checked, command_keys, make_absolute, resolved
from recipes.support.launch import launch
from recipes.support.run_folder import RunFolder
from recipes.support.sentences import wrong_value

SCRATCH = "scratch"
"""The folder in a run's own in which contenders save; removed at the end."""

EXTRA = "pip install -e '.[benchmark]'"
"""Installs the optional packages of the benchmarks."""

Figures = dict[str, Any]
"""Figures of one contender in one round, by name."""

CheckRun = Callable[[DictConfig], dict[str, Any]]

MEASUREMENTS = {
    "saves": "saves_and_loads", "background": "background_saves", "sync": "weight_updates", "megatron": "megatron_strategies",
    "convert": "conversions", "device": "device_copies", "validation": "validation_costs", "plan": "plan_costs", "ranks": "agreements",
    "tiers": "recoveries",
}
"""Choice of `measure=` -> the module that measures it."""


@dataclass(frozen=True)
class Measurement:
    """What a module of this package measures.

    Attributes:
        keys: the keys under `benchmark`, and their types; one that is called `plot` asks for benchmark.png.
        benchmark: called on all ranks with the checked config; returns the figures, `rounds` by contender among them.
        title: of the table of the figures; the cores and rounds are added.
        columns: of that table, as of `rows_of`.
        compare: returns further figures, made of the medians and ranges: ratios.
        tables: returns further tables by title; an empty one is not printed.
        contenders: that `benchmark.contenders` may name, by the label of their kind in the plot.
        check: of the keys, beyond their types; raises ConfigurationError.
        check_run: returns the keys other than `benchmark` as a plain dictionary, checked.
        scratch: contenders save in `scratch_folder`, which the launcher also removes at the end, as killed ranks leave it.
        digits: of seconds in the table.
        turned: the table has a column for each contender.
    """

    keys: Mapping[str, Any]
    benchmark: Callable[[dict[str, Any], Topology], Figures]
    title: Callable[[Figures], str]
    columns: Mapping[str, str]
    compare: Callable[[Figures], Figures] = lambda result: {}
    tables: Callable[[Figures], Mapping[str, Rows]] = lambda result: {}
    contenders: Mapping[str, Collection[str]] = field(default_factory=dict)
    check: Callable[[dict[str, Any]], None] = lambda keys: None
    check_run: CheckRun = checked
    scratch: bool = False
    digits: int = 2
    turned: bool = False

    def checked(self, cfg: DictConfig) -> dict[str, Any]:
        """Return the config as a plain dictionary with right types, the measurement's own keys under `benchmark`.

        Raises:
            ConfigurationError: naming the key, its value and the way out.
        """
        with open_dict(cfg):
            wanted = OmegaConf.to_container(cfg.pop("benchmark"))
        return self.check_run(cfg) | {"benchmark": self.checked_keys(wanted)}

    def checked_keys(self, wanted: Any) -> dict[str, Any]:
        """Return the keys under `benchmark` with their types.

        Raises:
            ConfigurationError: there is no such key, it has another type, or is missing; a whole number, always a count, is less than 1; a
                contender is unknown, or named twice, or there is none; a plot is asked for and matplotlib is missing; or as `check` says.
        """
        try:
            typed = OmegaConf.merge(OmegaConf.structured(make_dataclass("Keys", self.keys.items())), wanted)
            keys: dict[str, Any] = OmegaConf.to_container(typed, throw_on_missing=True)  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            known = ", ".join(f"benchmark.{key}" for key in self.keys)
            raise ConfigurationError(f"{wrong_value(error, f'benchmark.{error.full_key}')}; the benchmark has {known}") from error
        for key, value in by_dotted_key({"benchmark": keys}).items():
            if any(type(number) is int and number < 1 for number in (value if isinstance(value, list) else [value])):
                raise ConfigurationError(f"{key}={value}: expected at least 1")
        if self.contenders:
            require_some("benchmark.contenders", keys["contenders"], [*chain(*self.contenders.values())], each_once=True)
        if keys.get("plot") and not has_matplotlib():
            raise ConfigurationError(
                f"benchmark.plot=true needs the package matplotlib, which is not installed: {EXTRA}; or give benchmark.plot=false"
            )
        self.check(keys)
        return keys

    def run(self, cfg: dict[str, Any], topology: Topology) -> Figures:
        """Measure, and return the figures, their medians and ranges, and the facts of the machine. Every rank calls it.

        The lead leaves benchmark.json in the run's folder, and benchmark.png.
        """
        result = self.benchmark(cfg, topology)
        folder = Path(cfg["run_dir"])
        result |= summarized(result["rounds"]) | {"machine": machine_facts(folder)}
        result |= self.compare(result)
        if topology.is_lead:
            (folder / "benchmark.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            plot = cfg["benchmark"].get("plot", False)
            if has_matplotlib() if plot is None else plot:
                panels = {heading: c for heading, c in self.columns.items() if c.isidentifier() and not c.endswith("_mib")}
                draw(result, folder / "benchmark.png", self._title(result), panels, self.contenders)
        return result

    def show(self, result: Figures) -> None:
        """Print the figures as tables."""
        rows = rows_of(result, self.columns, self.digits)
        for title, table in ({self._title(result): rows} | self.tables(result)).items():
            if any(table.values()):
                print_table(title, table, turned=self.turned)
        show(*left_out_lines(result.get("left_out", {})))

    def _title(self, result: Figures) -> str:
        return f"{self.title(result)}, {result['machine']['cores']} cores, {rounds_of(result)}"


def measurement_of(name: str) -> Measurement:
    """Return the measurement of a choice of `measure=`."""
    found: Measurement = import_module(f"recipes.benchmark.{MEASUREMENTS[name]}").MEASUREMENT
    return found


def measure(cfg: DictConfig, name: str) -> int:
    """Run what `measure=` names on the ranks that the config asks for, and print its tables on rank 0; return the exit code."""
    if name == "compare":
        from recipes.benchmark.comparison import CompareKeys, compare

        return compare(command_keys(cfg, CompareKeys))
    one = measurement_of(name)
    folder = RunFolder(cfg, temporary=SCRATCH if one.scratch else None)
    result = launch(run, one.checked(cfg) | {"measure": name}, folder)
    if result is not None:
        one.show(result)
    return 0


def run(cfg: dict[str, Any], topology: Topology) -> Figures:
    """Run a measurement on one of its ranks."""
    return measurement_of(cfg["measure"]).run(cfg, topology)


@dataclass
class FolderKeys:
    """The keys of a run that does not train."""

    run_name: str = MISSING
    output_dir: str = MISSING
    run_dir: str = MISSING


def checked_folder(cfg: DictConfig) -> dict[str, Any]:
    """Return the keys other than `benchmark` of a measurement that needs one rank and no training."""
    run = resolved(FolderKeys, cfg)
    make_absolute(run, "run_dir")
    return run | {"launch": {"nproc_per_node": 1}, "agree": {"timeout_s": 120.0}}


def require_some(key: str, values: Sequence[str], choices: Collection[str], *, each_once: bool = False) -> None:
    """Raise ConfigurationError if there is no value, or one that is none of the choices, or is given twice."""
    if not values or not set(values) <= set(choices) or (each_once and len(set(values)) < len(values)):
        raise ConfigurationError(f"{key}={values}: expected some of {', '.join(choices)}{', each once' if each_once else ''}")


def require_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigurationError if the value is none of the choices."""
    if value not in choices:
        raise ConfigurationError(f"{key}={value}: expected one of {', '.join(choices)}")


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def interleaved(
    names: Iterable[str],
    repeats: int,
    take_turn: Callable[[str, int], Figures],
    topology: Topology,
    line: Callable[[Figures], str] | None = None,
) -> dict[str, list[Figures]]:
    """Run all rounds: in each, every contender takes its turn once. Return its figures of each round. Collective.

    Args:
        take_turn: given a contender's name and the number of the round, from 1; collective, with equal figures on all ranks.
        line: describes the figures of one turn, for the lead to print; None prints nothing.
    """
    rounds: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(1, repeats + 1):
        for name, of_name in rounds.items():
            of_name.append(take_turn(name, number))
            if line is not None:
                print_on_lead(f"round {number}/{repeats} {name}: {line(of_name[-1])}", topology)
    return rounds


def announce(
    what: str, names: Iterable[str], keys: Mapping[str, Any], topology: Topology, left_out: Mapping[str, str] | None = None
) -> None:
    """Print the state and the contenders, on the lead, before the rounds.

    Args:
        left_out: contender -> why it cannot take part.
    """
    lines = [f"{what}; {keys['repeats']} rounds of {', '.join(names)}", *left_out_lines(left_out or {})]
    if keys.get("plot", False) is None and not has_matplotlib():
        lines.append(f"there will be no plot: matplotlib is not installed: {EXTRA}")
    print_on_lead("\n".join(lines), topology)


def left_out_lines(left_out: Mapping[str, str]) -> list[str]:
    """Return a line for each contender that cannot take part, with the reason."""
    return [f"left out: {name}: {reason}" for name, reason in left_out.items()]


def print_on_lead(text: str, topology: Topology) -> None:
    """Print a text on the lead."""
    if topology.is_lead:
        print(text, flush=True)


def machine_facts(folder: Path) -> dict[str, Any]:
    """Return facts of this machine that figures depend on. No names of it.

    Args:
        folder: on the file system that the contenders save to.
    """
    cpu = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", cpu.read_text() if cpu.exists() else "", re.MULTILINE)
    disks = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    mount = next((str(place) for place in (folder, *folder.parents) if str(place) in disks), "")
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": _accelerator_name(),
        "file_system": disks.get(mount),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ckpt": __version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _accelerator_name() -> str | None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    name = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    return accelerator.type if name is None else str(name(accelerator))


@contextmanager
def scratch_folder(cfg: Mapping[str, Any], topology: Topology) -> Iterator[Path]:
    """Make the folder `SCRATCH` of a run, and remove it at the end, after errors too. Collective."""
    folder = Path(cfg["run_dir"]) / SCRATCH
    with topology.phase("scratch"):
        if topology.is_lead:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        if topology.is_lead:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def turn_folder(folders: Path, name: str, number: int, topology: Topology) -> Iterator[Path]:
    """Make a folder for one turn of one contender; all earlier writes are on the disk before the turn begins. Collective.

    At the end its files are truncated, and removed with all others at the end of the run: for a minute after files were removed, ext4
    takes up to a millisecond for each that is made.
    """
    path = folders / f"{name.replace('/', '-')}-{number}"
    with topology.phase("folder"):
        if topology.is_lead:
            path.mkdir()
            make_durable(path)
    yield path
    with topology.phase("folder"):
        if topology.is_lead:
            for file in path.rglob("*"):
                if file.is_file():
                    os.truncate(file, 0)
            make_durable(path)
