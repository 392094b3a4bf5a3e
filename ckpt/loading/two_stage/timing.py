"""Seconds of each step of a load on each rank, and over all ranks, also where ranks took different steps."""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from ckpt.ranks.merging import most, total
from ckpt.ranks.topology import Topology

_log = logging.getLogger("ckpt")
_P = ParamSpec("_P")
_T = TypeVar("_T")

Timers = defaultdict[str, list[float]]
"""Name -> seconds of every call."""

timers: Timers = defaultdict(list)
"""Of timed functions whose first argument has no timers of its own; Megatron-Core has one such dictionary under this name."""


def timed(verbose: bool = True) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that notes the seconds of each call under the function's name.

    The seconds go to `timers` of the object whose method it is, if that has any, else to `ckpt.loading.two_stage.timing.timers`.

    Args:
        verbose: also log, at level debug, the beginning of a call and its seconds.
    """

    def decorate(fn: Callable[_P, _T]) -> Callable[_P, _T]:
        name = fn.__name__

        @functools.wraps(fn)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if verbose:
                _log.debug("%s begins", name)
            started = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                _timers_of(args)[name].append(took)
                if verbose:
                    _log.debug("%s took %.4f s", name, took)

        return wrapped

    return decorate


def _timers_of(args: Sequence[Any]) -> Timers:
    own = getattr(args[0], "timers", None) if args else None
    return own if isinstance(own, defaultdict) else timers


def summarize(taken: Mapping[str, Sequence[float]], topology: Topology) -> dict[str, tuple[float, float]]:
    """Return for every name that any rank has the seconds of the slowest rank, and the mean over all ranks. Collective.

    A rank without a name spent no time on it. The lead logs a line for each.
    """
    with topology.phase("summarize the times") as phase:
        seconds = {name: sum(each) for name, each in taken.items()}
        phase.merge = {f"most {name}": most(took) for name, took in seconds.items()} | {"sums": total(seconds)}
    summary = {}
    for name, added in phase.merged["sums"].items():
        summary[name] = phase.merged[f"most {name}"], added / topology.world_size
        if topology.is_lead:
            _log.info("%s: %.4f s on the slowest rank, %.4f s on average", name, *summary[name])
    return summary
