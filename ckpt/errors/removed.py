"""Arguments of former versions are refused by one sentence that names what took their place."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt.errors import Argument, ConfigurationError

SIZES = ("buffer_mib", "segment_mib", "packed_mib", "max_in_flight_mib", "pinned_mib", "staging_budget_mib")
"""Sizes of memory that were given one by one."""


def require_no_sizes(given: Iterable[str]) -> None:
    """Refuse the sizes among some names of arguments.

    Raises:
        ConfigurationError
    """
    for name in given:
        if name in SIZES:
            budget = Argument("memory_budget_mib", 512, "memory_budget_mib=512")
            raise ConfigurationError(
                f"{name} is no argument any more: one budget of a rank bounds all host memory beside the state; give the coordinator, or "
                "the Checkpointer, ", budget,
            )  # fmt: skip
