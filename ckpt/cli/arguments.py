"""The arguments of a command as fields of a dataclass, from which each face makes its own: options of `ckpt`, keys of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any


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
