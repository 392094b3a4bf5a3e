"""How people give an argument: as one of Python's, as a key of a config, or as an option of `ckpt`. Sentences name it as they do."""

from __future__ import annotations

import json
from collections.abc import Callable

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


def spell(spelling: Spelling) -> None:
    """Have all sentences of this process name arguments so. A command calls it before its work, in each of its processes."""
    global _spelling
    _spelling = spelling


def argument(name: str, value: object = True) -> str:
    """Return how an argument is given here.

    Args:
        name: the key, such as "load.allow_pickle"; its last part is the name of an option, and of Python's argument.
        value: a text stands as it is.
    """
    return _spelling(name, value)
