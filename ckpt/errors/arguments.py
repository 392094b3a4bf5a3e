"""How people give an argument: as one of Python's, as a key of a config, or as an option of `ckpt`. Sentences name it as they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Spelling = Callable[[str, object], str]
"""(dotted name, value) -> how it is given."""


def as_python(name: str, value: object) -> str:
    """`allow_pickle=True`."""
    return f"{name.rpartition('.')[2]}={value if isinstance(value, str) else repr(value)}"


def as_key(name: str, value: object) -> str:
    """`load.allow_pickle=true`."""
    return f"{name}={value if isinstance(value, str) else json.dumps(value)}"


def as_option(name: str, value: object) -> str:
    """`--allow-pickle`, or `--limit 5`."""
    option = f"--{name.rpartition('.')[2].replace('_', '-')}"
    return option if value is True else f"{option} {'none' if value is None else value}"


_spelling: Spelling = as_python


@contextmanager
def spelled(spelling: Spelling) -> Iterator[None]:
    """Have all sentences of this process, of every thread, name arguments so inside the block: the work of a command, on each rank."""
    global _spelling
    before, _spelling = _spelling, spelling
    try:
        yield
    finally:
        _spelling = before


def argument(name: str, value: object = True) -> str:
    """Return how an argument is given here.

    Args:
        name: the key, such as "load.allow_pickle"; its last part is the name of an option, and of Python's argument.
        value: a text stands as it is.
    """
    return _spelling(name, value)
