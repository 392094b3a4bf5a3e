"""Settings of saves that a coordinator is given, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ckpt.errors import Argument, ConfigurationError, check_choice, refused, unlike
from ckpt.state.pattern_check import PATTERN_CHECKS

MODES = ("sync", "async")
_CHOICES = {
    "mode": MODES,
    "when_busy": ("wait", "skip", "queue"),
    "on_async_error": ("raise", "warn"),
}
_AT_LEAST_ONE = ("writer_cores", "writer_mib_s")
_OF_THE_BACKGROUND = ("overlap", "writer_cores", "writer_mib_s", "when_busy", "on_async_error")
"""Settings of saves in the background; their defaults have no effect."""
OF_A_ROOT = ("pattern_check", "overwrite", "shared_root", "stale_s", "retry_s")
"""Settings of a run that has a checkpoint root; not of saves whose folders a framework names."""
_FLAGS = ("overlap", "incremental")
_NUMBERS = ("grace_s", "incremental_min_live", *_AT_LEAST_ONE)


@dataclass(frozen=True, slots=True)
class SaveSettings:
    """Settings of saves; equal on all ranks. With `mode="sync"` the settings of saves in the background are refused.

    Attributes:
        mode: "sync": `save_checkpoint` returns when the checkpoint is committed. "async": once the state is copied to host memory,
            or, with `overlap`, once that can go on by itself; the rest is done in the background.
        overlap: copy state that only an optimizer's step changes during the next forward and backward; that step waits for it.
        writer_cores: number of cores that the writer of a rank may use; None: all.
        writer_mib_s: MiB a second that the writer of a rank may write; None: no limit.
        when_busy: when a save begins before the one before it is committed: "wait" for that one, "skip" the new one, or "queue" it: copy
            its state at once, and write it later.
        on_async_error: when a save failed in the background, the next call of the coordinator raises ("raise"), or warns ("warn").
        grace_s: seconds that a save in the background may go on after SIGTERM, before it is given up.
        incremental: link chunks that have not changed since the checkpoint before, and do not write them again.
        incremental_min_live: write a data file anew when less than this fraction of it would still be used, so that removed
            checkpoints free their bytes.
        pattern_check: before the first save of several ranks, compare one hash over all state with the sharing patterns: "warn" refuses
            a pattern that would lose state and warns of a wasteful or suspicious one, "error" refuses both, "off" does not compare.
        overwrite: the first commit removes all checkpoints that were in the root, of any run that lives no more, but no copied or renamed
            ones. After a load of one of them by its path, only newer ones go, at once: they are renamed `.abandoned-<id>-<nonce>`.
        shared_root: several runs may save into the root at a time, under ids of each run's own; none touches the checkpoints of another
            one that lives. Otherwise the first save claims the root, until the coordinator is closed or its process ends, and saves of
            other runs are refused.
        stale_s: silence after which another run's unfinished save counts as abandoned, in seconds.
        retry_s: seconds in which this process tries requests to object stores that fail again; None: 60, or what it was told before.

    Raises:
        ConfigurationError: a setting, which it names, has a wrong type or value, or no effect.
    """

    mode: str = "sync"
    overlap: bool = False
    writer_cores: int | None = None
    writer_mib_s: int | None = None
    when_busy: str = "wait"
    on_async_error: str = "raise"
    grace_s: float = 20.0
    incremental: bool = False
    incremental_min_live: float = 0.5
    pattern_check: str = "warn"
    overwrite: bool = False
    shared_root: bool = False
    stale_s: float = 60.0
    retry_s: float | None = None

    def __post_init__(self) -> None:
        for name in (*_FLAGS, *_NUMBERS):
            value, is_flag = getattr(self, name), name in _FLAGS
            if isinstance(value, bool) != is_flag or not isinstance(value, int | float | None):
                raise unlike(f"saves.{name}", value, "True or False" if is_flag else "a number")
        for name, choices in _CHOICES.items():
            self._require(getattr(self, name) in choices, name, f"one of {', '.join(choices)}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            self._require(value is None or value >= 1, name, "at least 1, or nothing for no limit")
        if self.mode == "sync":
            for field in fields(self):
                if field.name in _OF_THE_BACKGROUND and getattr(self, field.name) != field.default:
                    raise self.without_effect(field.name)
        self._require(self.grace_s >= 0, "grace_s", "at least 0 seconds")
        self._require(0 < self.incremental_min_live <= 1, "incremental_min_live", "a fraction above 0, at most 1")
        check_choice("pattern_check", self.pattern_check, PATTERN_CHECKS)
        for name in ("overwrite", "shared_root"):
            if not isinstance(value := getattr(self, name), bool):
                raise unlike(name, value, "True or False")
        for name in ("stale_s", "retry_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and value >= 0) and not (name == "retry_s" and value is None):
                raise unlike(name, value, "a number of seconds from 0 on")

    def _require(self, is_right: bool, name: str, expected: str) -> None:
        if not is_right:
            found = setting(name, getattr(self, name))
            raise refused(found.name, found.value, expected, found)

    @property
    def is_async(self) -> bool:
        return self.mode == "async"

    def without_effect(self, name: str) -> ConfigurationError:
        """The error of a setting of background saves with `mode="sync"`."""
        found, sync, background = setting(name, getattr(self, name)), setting("mode", "sync"), setting("mode", "async")
        because = ", for training waits until the checkpoint is committed: leave it out, or give "
        return ConfigurationError(found, " has no effect with ", sync, because, background)


def setting(name: str, value: Any) -> Argument:
    """A setting of saves, as a message names it."""
    return Argument(f"saves.{name}", value, f"saves.{name}={value}")


def as_saves(given: SaveSettings | str, called: str = "saves") -> SaveSettings:
    """Return the settings of saves: those given, or the defaults of a mode, "sync" or "async". `called`: the caller's argument."""
    if isinstance(given, str) and given in MODES:
        return SaveSettings(mode=given)
    if not isinstance(given, SaveSettings):
        raise unlike(called, given, f"one of {', '.join(MODES)}, or a SaveSettings, such as SaveSettings(mode='async')", "saves")
    return given
