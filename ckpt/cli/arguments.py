"""The arguments of a command as fields of a dataclass, from which each face makes its own: options of `ckpt`, keys of a recipe.

What a command prints names them as its face does; errors carry them as data (`ckpt.errors.Argument`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from typing import Any

from ckpt.errors import LOAD_EARLIER, Argument, sentence

Words = Callable[[Argument], str]
_OPTIONS = {
    "all", "base_from", "best", "check", "component", "config_from", "filter", "html", "last", "leave_out_unknown", "limit",
    "load.allow_pickle", "max_shard_size", "merge_adapters", "port", "to", "yes",
}  # fmt: skip
"""Arguments that are options of `ckpt`."""
_NAMELESS = {"run", "bad"}
"""Those that `ckpt` takes by their place."""


def as_option(argument: Argument) -> str:
    """`--allow-pickle`, or `--limit 5`; of what has no name here what it shall be; of what is no argument here what the library says."""
    if argument.name in _NAMELESS:
        return str(argument.value).strip("<>")
    if argument.name not in _OPTIONS:
        return str(argument)
    option, value = f"--{argument.name.rpartition('.')[2].replace('_', '-')}", argument.value
    return option if value is True else f"{option} {'none' if value is None else value}"


_words: Words = str


@contextmanager
def spelled(words: Words) -> Iterator[None]:
    """Have all that commands print in this process, of every thread, name arguments so inside the block."""
    global _words
    before, _words = _words, words
    try:
        yield
    finally:
        _words = before


def argument(name: str, value: object = True) -> str:
    """Return how an argument is given here, such as `all=True` in Python; for what is printed.

    Args:
        name: the key; its last part is the name of an option.
    """
    return _words(Argument(name, value))


def message_of(error: BaseException, words: Words | None = None) -> str:
    """Return the sentence of an error, without advice for loads. Without words those of `spelled`."""
    return sentence(error, lambda named: "" if named == LOAD_EARLIER else (words or _words)(named))


def argued(what: str, *, default: Any = MISSING, choices: Sequence[str] = ()) -> Any:
    """Declare a field that people give. Without a default it has to be given.

    Args:
        what: help, a phrase.
        choices: its values; empty: any of its type.
    """
    return field(default=default, metadata={"help": what, "choices": tuple(choices)})


@dataclass
class LoadKeys:
    """The keys of `load`, of a command that reads checkpoints of other programs."""

    allow_pickle: bool = argued("read the pickles of checkpoints of other programs; no code in them runs", default=False)
