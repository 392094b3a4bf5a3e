"""The harness of the benchmark commands: check the keys, let the contenders take turns in each round, leave the figures.

A command brings a module with `check_benchmark(keys)`, `benchmark(config, topology)` and `show(result)`. Contenders are interleaved in its
rounds, so that a busy moment of the machine slows all of them alike.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.version import __version__
from recipes.benchmark.measuring import make_durable
from recipes.support.config import by_dotted_key, checked
from recipes.support.launch import launch
from recipes.support.run_folder import RunFolder

SCRATCH = "scratch"
"""The folder in a run's own in which contenders save; removed at the end."""

EXTRA = "pip install -e '.[benchmark]'"
"""Installs the optional packages of the benchmarks."""

Figures = dict[str, Any]
"""Figures of one contender in one round, by name."""

CheckRun = Callable[[DictConfig], dict[str, Any]]


def measure(cfg: DictConfig, home: ModuleType, check_run: CheckRun = checked, *, scratch: bool = False) -> None:
    """Run a command's benchmark on the ranks that the config asks for, and print its tables on rank 0.

    Args:
        home: the command's module.
        check_run: checks the keys other than `benchmark`.
        scratch: the contenders save in `scratch_folder`, which the launcher also removes at the end, as killed ranks leave it.
    """
    folder = RunFolder(cfg, temporary=SCRATCH if scratch else None)
    result = launch(home.benchmark, checked_config(cfg, home, check_run), folder)
    if result is not None:
        home.show(result)


def checked_config(cfg: DictConfig, home: ModuleType, check_run: CheckRun = checked) -> dict[str, Any]:
    """Return the config as a plain dictionary with right types, the command's own keys under `benchmark`.

    Raises:
        ConfigurationError: naming the key, its value and the way out.
    """
    with open_dict(cfg):
        wanted = OmegaConf.to_container(cfg.pop("benchmark"))
    return check_run(cfg) | {"benchmark": home.check_benchmark(wanted)}


def checked_keys(kind: type, wanted: Any, contenders: Collection[str] = ()) -> dict[str, Any]:
    """Return the keys under `benchmark` with the types that a dataclass gives them.

    Args:
        contenders: that a key `contenders` may name.

    Raises:
        ConfigurationError: there is no such key, it has another type, or is missing; a whole number, always a count, is less than 1; a
            contender is unknown, or named twice, or there is none; or a plot is asked for and matplotlib is missing.
    """
    try:
        typed = OmegaConf.merge(OmegaConf.structured(kind), wanted)
        keys: Any = OmegaConf.to_container(typed, throw_on_missing=True)
    except OmegaConfBaseException as error:
        known = ", ".join(f"benchmark.{one.name}" for one in fields(kind))
        raise ConfigurationError(f"{str(error).splitlines()[0]}; the benchmark has {known}") from error
    for key, value in by_dotted_key({"benchmark": keys}).items():
        if type(value) is int and value < 1:
            raise ConfigurationError(f"{key}={value}: expected at least 1")
    names = keys.get("contenders")
    if names is not None and (not names or len(set(names)) < len(names) or not set(names) <= set(contenders)):
        raise ConfigurationError(f"benchmark.contenders={names}: expected some of {', '.join(contenders)}, each once")
    if keys.get("plot") and not has_matplotlib():
        raise ConfigurationError(
            f"benchmark.plot=true needs the package matplotlib, which is not installed: {EXTRA}; or leave the plot out with "
            "benchmark.plot=false"
        )
    return dict(keys)


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
    warm_up: bool = False,
) -> dict[str, list[Figures]]:
    """Run all rounds: in each, every contender takes its turn once. Return its figures of each round. Collective.

    Args:
        take_turn: given a contender's name and the number of the round, from 0; collective, with equal figures on all ranks.
        line: describes the figures of one turn, for the lead to print; None prints nothing.
        warm_up: these rounds are not counted, and printed as "first".
    """
    rounds: dict[str, list[Figures]] = {name: [] for name in names}
    for number in range(repeats):
        for name, of_name in rounds.items():
            of_name.append(take_turn(name, number))
            if line is not None:
                heading = "first" if warm_up else f"round {number + 1}/{repeats}"
                print_on_lead(f"{heading} {name}: {line(of_name[-1])}", topology)
    return rounds


def announce(
    what: str,
    names: Iterable[str],
    keys: Mapping[str, Any],
    topology: Topology,
    left_out: Mapping[str, str] | None = None,
) -> None:
    """Print the state and the contenders, on the lead, before the rounds.

    Args:
        left_out: contender -> why it cannot take part.
    """
    lines = [f"{what}; {keys['repeats']} rounds of {', '.join(names)}"]
    lines += [f"left out: {name}: {reason}" for name, reason in (left_out or {}).items()]
    if keys.get("plot", False) is None and not has_matplotlib():
        lines.append(f"there will be no plot: matplotlib is not installed: {EXTRA}")
    print_on_lead("\n".join(lines), topology)


def print_on_lead(text: str, topology: Topology) -> None:
    """Print a text on the lead."""
    if topology.is_lead:
        print(text, flush=True)


def write_result(
    result: Figures,
    cfg: Mapping[str, Any],
    name: str,
    topology: Topology,
    draw: Callable[[Figures, Path], None] | None = None,
) -> Figures:
    """Write `<name>.json` into the run's folder, on the lead, and `<name>.png` if `benchmark.plot` asks for it; return the result.

    The facts of the machine are added to it.
    """
    result = result | {"machine": machine_facts(Path(cfg["run_dir"]))}
    if topology.is_lead:
        path = Path(cfg["run_dir"]) / f"{name}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        if draw is not None and (has_matplotlib() if cfg["benchmark"]["plot"] is None else cfg["benchmark"]["plot"]):
            draw(result, path.with_suffix(".png"))
    return result


def machine_facts(folder: Path) -> dict[str, Any]:
    """Return facts of this machine that figures depend on. No names of it.

    Args:
        folder: on the file system that the contenders save to.
    """
    cpu = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", cpu.read_text() if cpu.exists() else "", re.MULTILINE)
    disks = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    mount = next((str(one) for one in (folder, *folder.parents) if str(one) in disks), "")
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
