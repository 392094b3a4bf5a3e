"""Copies to later tiers: all ranks copy one save at a time, and training learns of it when nothing is copied any more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import CheckpointError
from ckpt.ranks.topology import Phase, Topology
from ckpt.saving.drains import Drains, Later
from tests.support.ranks import run_threads


def _kept(step: int) -> Any:
    return SimpleNamespace(folder=Path(f"checkpoint-{step}"), target=SimpleNamespace(checkpoint_id=str(step)))


class _Noting(Topology):
    """Calls a function at the end of the first agreement on what is copied next."""

    then: Callable[[], None]

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        with super().phase(name) as phase:
            yield phase
            if name == "next copy":
                self.then()

    def branch(self, name: str) -> Topology:
        made = super().branch(name)
        made.__class__ = _Noting
        made.then = lambda: self.then()  # type: ignore[attr-defined]
        return made


class _Copies(Drains):
    """Notes what it is to copy; "bad" fails, on one rank alone, with what is no error of checkpoints."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology, [Later("root", lambda _: True, lambda _: None, True)], lambda *_: None, lambda _: None)  # type: ignore[arg-type,return-value]
        self.copied: list[str] = []

    def _copy(self, kept: Any, tier: Later, branch: Topology) -> Any:
        if kept.target.checkpoint_id == "bad" and branch.rank == 1:
            raise ZeroDivisionError("a bug")
        with branch.operation(f"copy of {kept.target.checkpoint_id}"), branch.phase("write"):
            assert kept.folder in self.pinned()
            self.copied.append(kept.target.checkpoint_id)


def _give_one_meanwhile(topology: Topology) -> list[str]:
    topology.__class__ = _Noting
    assert isinstance(topology, _Noting)
    drains, second = _Copies(topology), [_kept(2)]
    topology.then = lambda: drains.give(second.pop()) if second and topology.rank == 0 else None
    drains.give(_kept(1))
    while topology.rank == 1 and not drains.copied:
        time.sleep(0.01)
    if topology.rank == 1:
        drains.give(second.pop())
    with topology.phase("given"):
        pass
    drains.wait()
    drains.close()
    return drains.copied


def test_a_save_that_one_rank_gives_during_the_agreement_waits_for_the_others() -> None:
    assert run_threads(2, _give_one_meanwhile) == [["1", "2"]] * 2


def _fail_on_one(topology: Topology) -> bool:
    drains = _Copies(topology)
    drains.give(SimpleNamespace(folder=Path("x"), target=SimpleNamespace(checkpoint_id="bad")))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        drains.wait()
    while drains._thread is not None and drains._thread.is_alive() and topology.rank == 1:
        time.sleep(0.01)
    drains.give(_kept(3))
    with pytest.raises(CheckpointError):
        drains.wait()
    drains.close()
    return not drains.copied or drains.copied == ["bad"]


def test_when_copies_end_on_one_rank_every_rank_hears_of_it_whenever_it_waits() -> None:
    assert run_threads(2, _fail_on_one) == [True, True]
