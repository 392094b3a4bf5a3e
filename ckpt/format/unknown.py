"""Inert stand-ins for objects in checkpoints whose classes are not built here, and how messages show them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar

_NAMED = 8
"""Number of arguments that `repr` shows."""


class UnknownObject:
    """An inert stand-in for an object of a class that may not be built here.

    Attributes:
        name: full name of its class, or of the function that would make it.
        args: arguments of that call; None: the file holds the class or function itself.
        state: argument of `__setstate__`, or content of `__dict__`; None if there is none.
        items: of a subclass of a dictionary, list or set: its items, or pairs of key and value.
    """

    name: ClassVar[str] = ""
    args: tuple[Any, ...] | None
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any) -> UnknownObject:
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.items.extend(values)

    add = append

    def __call__(self, *args: Any) -> UnknownObject:
        """Stand in for what a method would make."""
        return type(self)(*args)

    def __repr__(self) -> str:
        given = "" if self.args is None else f"({', '.join(map(shown, self.args[:_NAMED]))})"
        return f"<unknown {self.name}{given}>"


class _Shown(reprlib.Repr):
    """Shows the first items of containers, to a depth of two: a pickle of 1 KB can describe a tree of 2^64 nodes."""

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < _MOST_SHOWN_BITS else "<int>"

    def repr_instance(self, x: Any, level: int) -> str:
        if x is None or isinstance(x, bool | float):
            return repr(x)
        return f"<unknown {x.name}>" if isinstance(x, UnknownObject) else f"<{type(x).__name__}>"


_shown = _Shown()
_shown.maxlevel = 2
_MOST_SHOWN_BITS = 256


def shown(value: Any) -> str:
    """Return a value of a pickle for a message, in at most 80 characters, at a cost that does not grow with the value."""
    return f"{_shown.repr(value):.80}"
