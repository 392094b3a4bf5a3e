"""Arguments that a message names, as data: the library says `strict=False`, and a command `load.strict=false`.

    raise MissingStateError("no ema is saved: ", leave_out("ema"), ", or load with ", Argument("load.strict", False))

An error keeps them beside its text (`CheckpointError.arguments`), and `sentence` says each in the words of whoever shows the error.
"""

from __future__ import annotations

from typing import Any, Self


class Argument(str):
    """The part of a message that names an argument, or advises to give one; as a text, what the library says.

    Attributes:
        name: of the argument, after what it is given to: "load.strict", "saves.mode", "backend". Advice has a name of its own: "leave_out".
        value: that was found, or is advised.

    Example:
        >>> Argument("load.strict", False), Argument("saves.mode", "sync", "saves.mode=sync").name
        ('strict=False', 'saves.mode')
    """

    __slots__ = ("name", "value")
    name: str
    value: Any

    def __new__(cls, name: str, value: Any, said: str | None = None) -> Self:
        self = super().__new__(cls, f"{name.rpartition('.')[2]}={value}" if said is None else said)
        self.name, self.value = name, value
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(self.to_json())

    def to_json(self) -> list[Any]:
        """What `Argument(*...)` makes the same of; a value that is not plain as its text."""
        is_plain = self.value is None or isinstance(self.value, str | int | float | dict)
        return [self.name, self.value if is_plain else str(self.value), str(self)]


def declare(component: str, **settings: Any) -> Argument:
    """The advice to declare a component with other settings.

    Example:
        >>> declare("rng", sharing_pattern="per_group", process_group_name="tp")
        'declare component rng with sharing_pattern=per_group and process_group_name=tp'
    """
    named = " and ".join(f"{name}={value}" for name, value in settings.items())
    return Argument("declare", {component: settings}, f"declare component {component} with {named}")


def leave_out(component: str) -> Argument:
    """The advice to leave a component out of a load.

    Example:
        >>> leave_out("ema")
        'leave component ema out'
    """
    return Argument("leave_out", component, f"leave component {component} out")


LOAD_EARLIER = Argument("load_earlier", None, ". Load an earlier checkpoint.")
"""The advice at the end of a sentence about damage: it is for loads, and commands that load nothing say something else."""
