"""What the benchmark measures: one way to save a state and to load it back into the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class Contender:
    """Every method is collective.

    Attributes:
        measures: which of "save", "load_cold" and "load_warm" it takes part in.
        fills: whether a load fills the state, which is scrambled before and compared afterwards.
    """

    measures: ClassVar[tuple[str, ...]] = ("save", "load_cold", "load_warm")
    fills: ClassVar[bool] = True

    def save(self, folder: Path) -> None:
        """Write the state to a folder that exists; all bytes and entries below it are on the disk when the lead returns."""

    def load(self, folder: Path) -> dict[str, int]:
        """Read the state, on the ranks that load. Returns further figures, of all these ranks together."""
        return {}
