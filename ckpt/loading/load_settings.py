"""Settings of loads that a coordinator is given, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ckpt.errors import unlike


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of loads; equal on all ranks.

    Attributes:
        verify: check every byte that a load reads.
        allow_pickle: read a checkpoint without a manifest, named by its path, that is pickled in parts: tensors and plain values only
            (`ckpt.interop`).

    Raises:
        ConfigurationError: a setting is neither True nor False.
    """

    verify: bool = True
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(value := getattr(self, field.name), bool):
                raise unlike(field.name, value, "True or False")
