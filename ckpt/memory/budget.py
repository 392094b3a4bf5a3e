"""One budget for the host memory of a rank that checkpointing takes beside the state, shared out over what takes it. Pure arithmetic.

Saves and loads of a coordinator come one after another. What they keep between two of them counts for both, so the parts are added up.
Python's own objects, such as plans, indexes and plain values, are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ckpt.errors import Argument, refused
from ckpt.storage.host_memory import HUGE_PAGE, MemoryUse, power_of_two

MIB = 1 << 20


class Limited(Protocol):
    """A part of checkpointing that works with more memory or less: the buffers of a backend, a loading strategy."""

    def memory_range(self, use: MemoryUse) -> tuple[int, int]:
        """Return the fewest bytes of host memory with which it works, and those that it takes without a limit."""

    def limit_memory(self, num_bytes: int, use: MemoryUse) -> None:
        """Take at most so many bytes from now on. No save or load is under way."""


class Needs(NamedTuple):
    """What checkpointing needs in one run, in bytes.

    Attributes:
        chunk: of chunks and packed arrays on their way, which are joined, laid out or encoded in memory.
        pinned: of page-locked memory that copies from a device pass through.
        writing, reading: the fewest, and those without a limit.
        staging: the fewest for copies of the state; None: saves make none.
        copies: the most copies of what a rank saves that are in memory at a time.
        in_powers: memory for copies is page-locked, and torch rounds it up to a power of two.
    """

    chunk: int
    pinned: int
    writing: tuple[int, int]
    reading: tuple[int, int]
    staging: int | None = None
    copies: int = 0
    in_powers: bool = False

    @property
    def fixed(self) -> int:
        return self.chunk + self.pinned

    @property
    def least(self) -> int:
        """The smallest budget."""
        return self.fixed + self.writing[0] + self.reading[0] + (self.staging or 0)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The most bytes that each part takes; None: as many as without a budget.

    Attributes:
        writing: of buffers of the backend.
        reading: of the loading strategy.
        staging: for copies of the state.
    """

    writing: int | None = None
    reading: int | None = None
    staging: int | None = None

    @classmethod
    def shared_out(cls, mib: int | None, needs: Needs) -> MemoryBudget:
        """Share a budget out: to each part what it needs, and the rest in proportion; half of the rest to copies, where saves make some.

        Raises:
            ConfigurationError: it is too small.
        """
        if mib is None:
            return cls()
        spare = mib * MIB - needs.least
        if spare < 0:
            raise refused(
                "memory_budget_mib",
                mib,
                f"at least {_mib(needs.least)}, for this backend, strategy, device and mode",
            )
        (least_w, usual_w), (least_r, usual_r) = needs.writing, needs.reading
        span = usual_w - least_w + usual_r - least_r
        grown = min(span, spare if needs.staging is None else spare // 2)
        writing = least_w + (grown * (usual_w - least_w) // span if span else 0)
        reading = least_r + (grown * (usual_r - least_r) // span if span else 0)
        staging = None
        if needs.staging is not None:
            staging = needs.staging + spare - grown
            staging = power_of_two(staging) if needs.in_powers else staging // HUGE_PAGE * HUGE_PAGE
        return cls(writing, reading, staging)

    def sentence(self, needs: Needs) -> str:
        """What a run may take, in one line."""
        writing = needs.writing[1] if self.writing is None else self.writing
        reading = needs.reading[1] if self.reading is None else self.reading
        parts = {"buffers of saves": writing, "chunks on their way": needs.chunk, "copies from the device": needs.pinned}
        staging = 0 if needs.staging is None else self.staging
        parts |= {"reads": reading, "copies of the state": staging or 0}
        listed = ", ".join(f"{_mib(size)} for {name}" for name, size in parts.items() if size)
        more = ""
        if staging is None:
            more = f", and {'a copy' if needs.copies == 1 else f'{needs.copies} copies'} of what it saves"
        most = f"at most {_mib(sum(parts.values()))} MiB of host memory of each rank beside the state{more}"
        return f"checkpointing takes {most}: {listed}"


def more_memory() -> Argument:
    """The argument that gives more, as a message names it."""
    return Argument("memory_budget", None, "memory_budget_mib")


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // MIB)
