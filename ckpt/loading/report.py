"""What a load did, component by component: pure data, and the lines that a person reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

MAX_NAMED = 5
"""How many keys a sentence names before it says how many more there are."""


class Status(Enum):
    """How a component came out of a load. The strings are the ones of `LoadReport.summary`."""

    RESTORED = "restored"
    """All of it, and all that was saved of it."""
    PARTLY = "partly"
    """Some keys were left out, as `strict=False` allows; those keep their values."""
    SKIPPED = "skipped"
    """It is not in the checkpoint, or does not match it; the object keeps its state."""
    FAILED = "failed"
    """It is damaged, or the object refused it on some rank. An optional one only: the load goes on without it."""


@dataclass(frozen=True, slots=True)
class Misfits:
    """Keys of one component that a load leaves out.

    Attributes:
        only_saved: keys only in the checkpoint.
        only_wanted: keys only wanted: the object has them, the checkpoint does not.
        unfit: key -> what was found, and what was expected.
    """

    only_saved: tuple[str, ...] = ()
    only_wanted: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.only_saved or self.only_wanted or self.unfit)

    def __str__(self) -> str:
        kinds = (
            ("only in the checkpoint", self.only_saved),
            ("only wanted", self.only_wanted),
            ("does not fit", [f"{key} ({what})" for key, what in self.unfit.items()]),
        )
        return "; ".join(f"{kind}: {some_of(keys)}" for kind, keys in kinds if keys)


@dataclass(frozen=True, slots=True)
class ComponentReport:
    """What a load did to one component, the same on every rank.

    Attributes:
        reason: why it was skipped or failed; "" otherwise.
        restored: elements that were filled, summed over the ranks; a plain value counts as one.
        wanted: elements that the objects of all ranks asked for, counted alike.
        misfits: the keys that were left out.
        changed: whether the object made its state from other ranks' copies (`elastic`).
    """

    key: str
    status: Status
    reason: str = ""
    restored: int = 0
    wanted: int = 0
    misfits: Misfits = field(default_factory=Misfits)
    changed: bool = False

    @property
    def fraction(self) -> float:
        """How much of what was wanted is restored, from 0 to 1; nothing of nothing is all of it."""
        if self.status in (Status.SKIPPED, Status.FAILED):
            return 0.0
        return self.restored / self.wanted if self.wanted else 1.0

    def __str__(self) -> str:
        if self.reason:
            reason = self.reason.removeprefix(f"component {self.key}").removeprefix(self.key).lstrip(": ")
            return f"{self.key}: {self.status.value}: {reason}"
        what = "partly restored" if self.status is Status.PARTLY else self.status.value
        share = math.floor(100 * self.fraction) / 100  # 1.00 means all
        how = ", made from other ranks' copies" if self.changed else ""
        left_out = f"; {self.misfits}" if self.misfits else ""
        return f"{self.key}: {what}, {share:.2f} of {self.wanted:,} elements{how}{left_out}"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    Attributes:
        path: of the checkpoint that was loaded.
        checkpoint_id: the id it was saved under; the name of the folder, for one without a manifest.
        load_s: of the slowest rank, in seconds.
        bytes_read: from storage, summed over ranks; less than `bytes_needed` where ranks share reads.
        bytes_needed: by all ranks together.
        config_text: the config of the run that saved it; "" if it gave none.
        fell_back_from: damaged newer checkpoints that were passed over, the newest first.
        components: one report each, in the order in which they were declared.
        run_id: of the training history that the checkpoint belongs to; None: it does not say.
    """

    path: str
    checkpoint_id: str
    load_s: float
    bytes_read: int
    bytes_needed: int
    config_text: str
    fell_back_from: tuple[str, ...] = ()
    components: tuple[ComponentReport, ...] = ()
    run_id: str | None = None

    def summary(self) -> str:
        """One readable line per component.

        Example:
            >>> model = ComponentReport("model", Status.RESTORED, restored=1200, wanted=1200)
            >>> ema = ComponentReport("ema", Status.SKIPPED, "not in the checkpoint")
            >>> print(LoadReport("runs/checkpoint-2", "2", 0.5, 4800, 4800, "", components=(model, ema)).summary())
            model: restored, 1.00 of 1,200 elements
            ema: skipped: not in the checkpoint
        """
        return "\n".join(str(component) for component in self.components)


def some_of(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
