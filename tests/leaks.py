"""What a test case left behind in its process: threads, descriptors, process groups, environment, and changed modules.

A process that runs case after case (tests/ranks.py) compares itself with what it was; one that differs is not used again.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_PACKAGES = ("ckpt", "recipes", "tests")
_OTHERS = ("builtins", "gc", "os", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time")
_ENDS_S = 0.5
"""A thread that has been told to end may take so long."""

_STAYS = ("zarr_io", "asyncio_")
"""How threads are called that zarr starts once, and for all of its process's life."""

_KEPT = (("ckpt.device", "_streams"),)
"""What the product keeps in modules for as long as its process lives."""

_LIMITS = ("RLIMIT_AS", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE")
_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGCHLD,
    signal.SIGHUP,
)

_audited: list[Any] = []


@dataclass(frozen=True)
class Traces:
    """A process, as far as a case could change it and the next one notice."""

    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    groups: bool
    children: str
    environment: dict[str, str]
    settings: dict[str, Any]
    logging: list[Any]
    modules: dict[str, dict[str, Any]]


def watch_audit_hooks() -> None:
    """From now on an audit hook, which can never be taken off again, is a trace."""
    add = sys.addaudithook

    def adding(hook: Any) -> None:
        _audited.append(hook)
        add(hook)

    sys.addaudithook = adding


def traces() -> Traces:
    """What there is now. In the thread that runs the cases."""
    return Traces(
        threads=frozenset(thread for thread in threading.enumerate() if not thread.name.startswith(_STAYS)),
        descriptors=_descriptors(),
        groups=dist.is_initialized(),
        children=_children(),
        environment=dict(os.environ),
        settings=_settings(),
        logging=[_of_logger(logging.getLogger(name)) for name in ("", "ckpt", "recipes")],
        modules={name: dict(_names_of(module)) for name, module in list(sys.modules.items()) if _is_compared(name)},
    )


def left_since(before: Traces) -> list[str]:
    """What a case has left, a few words each; nothing: the process is as it was."""
    _forget_meshes()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    end = time.monotonic() + _ENDS_S
    while (left := _differences(before, traces())) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _forget_meshes() -> None:
    """Empty what DTensors keep of each mesh they have been on: it would hold the connections of the mesh's groups."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def _differences(before: Traces, now: Traces) -> list[str]:
    left = [f"thread {thread.name}" for thread in now.threads - before.threads]
    left += [f"descriptor {kind}" for kind in now.descriptors - before.descriptors]
    left += [f"environment {name}" for name in _changed(before.environment, now.environment)]
    left += [f"setting {name}" for name in _changed(before.settings, now.settings)]
    for module in before.modules.keys() & now.modules.keys():
        left += [f"name {module}.{name}" for name in _changed(before.modules[module], now.modules[module])]
    return left + [name for name in ("groups", "children", "logging") if getattr(before, name) != getattr(now, name)]


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name in old.keys() | new.keys() if not _same(old.get(name), new.get(name))]


def _same(one: Any, other: Any) -> bool:
    """A module that is imported late makes a new name in its package."""
    if one is None and isinstance(other, ModuleType):
        return True
    return one is other or (type(one) in (str, int, bool, tuple, _Contents) and one == other)


def _descriptors() -> Counter[str]:
    """How many there are of each kind: a file's path, "socket", "pipe" ..."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return kinds


def _children() -> str:
    with open("/proc/thread-self/children") as file:
        return file.read()


def _settings() -> dict[str, Any]:
    return {
        "working folder": os.getcwd(),
        "temporary folder": tempfile.tempdir or "",
        "path": tuple(sys.path),
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "data type": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "audit hooks": len(_audited),
        "modules that a case has made up": _made_up(),
        "cores": tuple(sorted(os.sched_getaffinity(0))),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        **{f"handler of {number.name}": signal.getsignal(number) for number in _SIGNALS},
        **{name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
    }


def _made_up() -> tuple[str, ...]:
    return tuple(sorted(name for name, module in sys.modules.items() if getattr(module, "__spec__", None) is None))


def _of_logger(logger: logging.Logger) -> Any:
    return logger.level, logger.disabled, logger.propagate, list(logger.handlers), list(logger.filters)


@dataclass(frozen=True)
class _Contents:
    """A module's own dict, list or set, by what it held."""

    of: Any


def _names_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every name of a module, and of the classes defined in it, and what it stands for; but for what Python and msgspec keep there."""
    is_ours = module.__name__ not in _OTHERS
    for key, value in list(vars(module).items()):
        if key.startswith("__") or (module.__name__, key) in _KEPT:
            continue
        yield key, _held(value) if is_ours else value
        if is_ours and isinstance(value, type) and value.__module__ == module.__name__:
            for inner, one in list(vars(value).items()):
                if callable(one) or not inner.startswith("__"):
                    yield f"{key}.{inner}", _held(one)


def _is_compared(name: str) -> bool:
    return name.partition(".")[0] in _PACKAGES or name.startswith("test_") or name in _OTHERS


def _held(value: Any) -> Any:
    return _Contents(type(value)(value)) if type(value) in (dict, list, set) and len(value) < 1000 else value
