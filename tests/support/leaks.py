"""What a test case left behind in its process: threads, descriptors, process groups, environment, and changed modules.

A process that runs case after case (tests/support/ranks.py) compares itself with what it was; one that differs is not used again.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import is_
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

_CACHES = (
    "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache",  # since 2.11
    "torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)
_PACKAGES = ("ckpt", "recipes", "tests")
_OTHERS = ("builtins", "gc", "os", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time")
_ENDS_S = 0.5
"""A thread that has been told to end may take so long."""

_STAYS = ("zarr_io", "asyncio_")
"""How threads are called that zarr starts once, and for all of its process's life."""

_KEPT = {"ckpt.memory.device": "_streams", "ckpt.loading.other_checkpoint": "_KNOWN"}
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
    spaces: dict[str, _Space]


def watch_audit_hooks() -> None:
    """From now on an audit hook, which can never be taken off again, is a trace."""
    add = sys.addaudithook

    def adding(hook: Any) -> None:
        _audited.append(hook)
        add(hook)

    sys.addaudithook = adding


def traces(before: Traces | None = None) -> Traces:
    """What there is now; quicker, where it is as before. In the thread that runs the cases."""
    return Traces(
        threads=frozenset(thread for thread in threading.enumerate() if not thread.name.startswith(_STAYS)),
        descriptors=_descriptors(),
        groups=dist.is_initialized(),
        children=_children(),
        environment=dict(os.environ),
        settings=_settings(),
        logging=[_of_logger(logging.getLogger(name)) for name in ("", "ckpt", "recipes")],
        spaces=dict(_spaces(before.spaces if before is not None else {})),
    )


def left_since(before: Traces) -> tuple[list[str], Traces]:
    """What a case has left, a few words each, nothing if the process is as it was; and what there is now."""
    _forget_meshes()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    end = time.monotonic() + _ENDS_S
    while (left := _differences(before, now := traces(before))) and time.monotonic() < end:
        time.sleep(0.05)
    return left, now


@functools.cache
def _clearing() -> list[Callable[[], object]]:
    """Functions that empty the caches that this torch has."""
    found = []
    for place in _CACHES:
        with suppress(ImportError, AttributeError):
            found.append(pkgutil.resolve_name(place))
    return found


def _forget_meshes() -> None:
    """Empty what DTensors keep of each mesh they have been on: it would hold the connections of the mesh's groups."""
    for clear in _clearing():
        clear()


def _differences(before: Traces, now: Traces) -> list[str]:
    left = [f"thread {thread.name}" for thread in now.threads - before.threads]
    left += [f"descriptor {kind}" for kind in now.descriptors - before.descriptors]
    left += [f"environment {name}" for name in _changed(before.environment, now.environment)]
    left += [f"setting {name}" for name in _changed(before.settings, now.settings)]
    for name in before.spaces.keys() & now.spaces.keys():
        left += [f"name {name}.{key}" for key in before.spaces[name].changed(now.spaces[name])]
    return left + [name for name in ("groups", "children", "logging") if getattr(before, name) != getattr(now, name)]


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [name for name in old.keys() | new.keys() if not _same(old.get(name), new.get(name))]


def _same(one: Any, other: Any) -> bool:
    """A module that is imported late makes a new name in its package, and the first object of a class below a protocol its `__init__`."""
    if one is None and (isinstance(other, ModuleType) or other is object.__init__):
        return True
    return one is other or (type(one) in (str, int, bool, tuple, _Contents) and one == other)


def _descriptors() -> Counter[str]:
    """How many there are of each kind: a file's path, "socket", "pipe" ...; but for where a case prints."""
    kinds: Counter[str] = Counter()
    for name in {*os.listdir("/proc/self/fd")} - {"1", "2"}:
        with suppress(OSError):  # that of the listing itself
            kinds[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return kinds


def _children() -> str:
    with open("/proc/thread-self/children") as file:
        return file.read()


def _settings() -> dict[str, Any]:
    return {
        "temporary folder": tempfile.tempdir or "",
        "path": tuple(sys.path),
        "collector": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "data type": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch threads": torch.get_num_threads(),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "audit hooks": len(_audited),
        "modules that a case has made up": _known_modules().made_up,
        "cores": tuple(sorted(os.sched_getaffinity(0))),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        **{f"handler of {number.name}": signal.getsignal(number) for number in _SIGNALS},
        **{name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
    }


def _of_logger(logger: logging.Logger) -> Any:
    return logger.level, logger.disabled, logger.propagate, list(logger.handlers), list(logger.filters)


@dataclass(frozen=True)
class _Contents:
    """A module's own dict, list or set, by what it held."""

    of: Any


@dataclass(frozen=True)
class _Space:
    """The names of a module or class and what they stand for; of its own dicts, lists and sets, what these held; and its classes."""

    names: dict[str, Any]
    held: dict[str, Any]
    classes: tuple[type, ...] = ()

    def has(self, names: dict[str, Any]) -> bool:
        """Whether these are its names, which is nearly always so, and quickly seen."""
        return len(names) == len(self.names) and all(map(is_, names.values(), self.names.values()))

    def changed(self, now: _Space) -> list[str]:
        return [] if self.has(now.names) and self.held == now.held else _changed(self._all(), now._all())

    def _all(self) -> dict[str, Any]:
        names = {key: value for key, value in self.names.items() if _counts(key, value)}
        return names | {key: _Contents(value) for key, value in self.held.items()}


def _counts(key: str, value: Any) -> bool:
    """But for what Python and msgspec keep in modules and classes; their methods do."""
    return not key.startswith("__") or (callable(value) and not isinstance(value, type))


def _spaces(before: Mapping[str, _Space]) -> Iterator[tuple[str, _Space]]:
    """Of every module that is compared, and of the classes defined in it."""
    for name in _known_modules().compared:
        module = _space(name, sys.modules[name], before.get(name))
        yield name, module
        for cls in module.classes:
            path = f"{name}.{cls.__qualname__}"
            yield path, _space(path, cls, before.get(path))


def _space(name: str, of: ModuleType | type, before: _Space | None) -> _Space:
    names = dict(vars(of))
    if kept := _KEPT.get(name):
        names.pop(kept, None)
    if before is not None and before.has(names):
        return _Space(names, _copied(names, before.held), before.classes)
    if name in _OTHERS:
        return _Space(names, {})
    classes = (
        [one for one in names.values() if isinstance(one, type) and one.__module__ == name]
        if isinstance(of, ModuleType)
        else []
    )
    return _Space(names, _held(names), tuple(classes))


def _held(names: dict[str, Any]) -> dict[str, Any]:
    own = [key for key, value in names.items() if type(value) in (dict, list, set) and not key.startswith("__")]
    return _copied(names, [key for key in own if len(names[key]) < 1000])


def _copied(names: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: copy.copy(names[key]) for key in keys}


@dataclass(frozen=True)
class _Modules:
    """Of the modules that there are: all names; those that are compared; those that nobody can import."""

    names: tuple[str, ...]
    compared: tuple[str, ...]
    made_up: tuple[str, ...]


def _known_modules() -> _Modules:
    """Looked at anew only when there are other modules than before."""
    global _modules
    names = tuple(sys.modules)
    if _modules is None or names != _modules.names:
        _modules = _Modules(
            names,
            tuple(name for name in names if _is_compared(name)),
            tuple(sorted(name for name in names if getattr(sys.modules[name], "__spec__", None) is None)),
        )
    return _modules


_modules: _Modules | None = None


def _is_compared(name: str) -> bool:
    is_ours = name.partition(".")[0] in _PACKAGES or name.startswith("test_")
    return (is_ours or name in _OTHERS) and name != __name__
