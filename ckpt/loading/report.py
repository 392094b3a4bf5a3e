"""Report of a load, component by component: pure data, and the lines for people; the figures in the line of a save, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from ckpt.errors import CheckpointError, leave_out, printable
from ckpt.format.places import step_of
from ckpt.storage.objects.store import transfer_figures

Refusal = TypeVar("Refusal", bound=CheckpointError)

MAX_NAMED = 5
"""Keys that a sentence names; of the others it gives the number."""


class Status(Enum):
    """Result of a load for one component. The strings are those of `LoadReport.summary`."""

    RESTORED = "restored"
    """All its values were loaded, and all saved ones were used."""
    PARTLY = "partly"
    """Some keys were left out, as `strict=False` allows; they keep their values."""
    SKIPPED = "skipped"
    """It is not in the checkpoint, or does not match it; the object keeps its state."""
    FAILED = "failed"
    """It is damaged, or the object refused it on some rank. Optional components only: the load goes on without it."""


@dataclass(frozen=True, slots=True)
class Misfits:
    """Keys of one component that a load leaves out.

    Attributes:
        only_saved: keys only in the checkpoint.
        only_wanted: keys only wanted: the object has them, the checkpoint does not.
        unfit: key -> shape and data type found and expected.
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
    """Result of a load for one component, equal on every rank.

    Attributes:
        reason: why it was skipped or failed; "" otherwise.
        restored: elements that were filled, summed over the ranks; a plain value counts as one.
        wanted: elements that the objects of all ranks asked for, counted alike.
        misfits: the keys that were left out.
        changed: the object made its state for these ranks, from other ranks' copies or anew (`elastic`).
        converted: data types, such as "bfloat16 to float32", of tensors that the load converted.
        arguments: `Argument.to_json` of those that the reason may name.
    """

    key: str
    status: Status
    reason: str = ""
    restored: int = 0
    wanted: int = 0
    misfits: Misfits = field(default_factory=Misfits)
    changed: bool = False
    converted: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()

    @property
    def fraction(self) -> float:
        """The share of wanted elements that was restored, from 0 to 1; 1 if none was wanted."""
        if self.status in (Status.SKIPPED, Status.FAILED):
            return 0.0
        return self.restored / self.wanted if self.wanted else 1.0

    def __str__(self) -> str:
        if self.reason:
            reason = self.reason.removeprefix(f"component {self.key}").removeprefix(self.key).lstrip(": ")
            return f"{self.key}: {self.status.value}: {reason}"
        what = "partly restored" if self.status is Status.PARTLY else self.status.value
        how = ", adapted to these ranks" if self.changed else ""
        how += f", converted from {' and '.join(self.converted)}" if self.converted else ""
        left_out = f"; {self.misfits}" if self.misfits else ""
        return f"{self.key}: {what}, {self._elements}{how}{left_out}"

    @property
    def _elements(self) -> str:
        """Such as "all 1,200 elements", or "600 of 1,200 elements (50%)"; the percentage is rounded down."""
        elements = f"{self.wanted:,} element{'' if self.wanted == 1 else 's'}"
        if self.restored == self.wanted:
            return f"all {elements}" if self.wanted > 1 else elements
        return f"{self.restored:,} of {elements} ({math.floor(100 * self.fraction)}%)"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of a load.

    Attributes:
        path: of the checkpoint that was loaded.
        checkpoint_id: the id it was saved under; the name of the folder, for one without a manifest.
        load_s: of the slowest rank, in seconds.
        bytes_read: from storage, summed over ranks; less than `bytes_needed` where ranks share reads. What a two-stage load finds in
            the page cache counts once per host.
        bytes_needed: by all ranks together.
        config_text: the config of the run that saved it; "" if it gave none.
        fell_back_from: damaged newer checkpoints that were passed over, newest first.
        components: one report each, in the order in which they were declared.
        run_id: of the run that saved it; None: unknown.
        history: run id -> the largest commit number of its history: of this run its own, and of those that it went on from. The id is
            None for checkpoints of versions that gave none; empty: it has no manifest.
        metrics, metadata: as the checkpoint was saved with.
        slowest_rank: which took longest to read; None: there is one rank.
        requests: to the object store, of all ranks: see `SaveReport`.
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
    history: Mapping[str | None, int] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    slowest_rank: int | None = None
    requests: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line.

        Example:
            >>> print(LoadReport("runs/checkpoint-2", "2", 0.5, 4_800_000, 4_800_000, ""))
            restored runs/checkpoint-2 at step 2: 0.500 s, 4.8 MB, 0.01 GB/s
        """
        step = step_of(self.checkpoint_id)
        return f"restored {self.path}{'' if step is None else f' at step {step}'}: {self.figures()}"

    def figures(self) -> str:
        """Seconds, bytes read, their rate, and requests to the object store."""
        return transfer_figures(self.bytes_read, self.load_s, self.requests, self.slowest_rank)

    def summary(self) -> str:
        """One readable line per component.

        Example:
            >>> model = ComponentReport("model", Status.RESTORED, restored=1200, wanted=1200)
            >>> ema = ComponentReport("ema", Status.SKIPPED, "not in the checkpoint")
            >>> print(LoadReport("runs/checkpoint-2", "2", 0.5, 4800, 4800, "", components=(model, ema)).summary())
            model: restored, all 1,200 elements
            ema: skipped: not in the checkpoint
        """
        return "\n".join(printable(str(component)) for component in self.components)


def refusal(kind: type[Refusal], key: str, *sentence: str) -> Refusal:
    """The error of a component that a load can leave out, which is its last advice. `sentence`: its sentence, after the component's key."""
    return kind(f"component {key}", *sentence, ", or ", leave_out(key), ".", component=key)


def some_of(names: Sequence[str], most: int = MAX_NAMED) -> str:
    """The names; of more than `most` their number, the first ones, and the number of the others."""
    first = ", ".join(names[:most])
    more = len(names) - most
    return f"{len(names):,} ({first} and {more:,} more)" if more > 0 else first
