"""Many small checks of the stand-in in one process each rank: to start one for every check would take a minute."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


class Checks:
    """Functions that raise where the stand-in is wrong, by name; the name is a sentence."""

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., None]] = {}

    def __call__(self, function: Callable[..., None]) -> Callable[..., None]:
        self._functions[function.__name__.strip("_")] = function
        return function

    @property
    def names(self) -> list[str]:
        return list(self._functions)

    def run(self, *args: Any) -> dict[str, str]:
        """Run all, and return the traceback of each; "" if it went well."""
        return {name: _outcome(function, *args) for name, function in self._functions.items()}


@contextmanager
def settings(**values: int) -> Iterator[None]:
    """Environment variables for a while; the stand-in looks at most of them every time."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _outcome(function: Callable[..., None], *args: Any) -> str:
    try:
        function(*args)
    except BaseException:
        return traceback.format_exc()
    return ""
