"""The memory budget: the parts never add up to more, the least that works is named, and what is given stays within it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ckpt.errors import ConfigurationError
from ckpt.loading.direct import DirectLoad
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.memory.budget import MIB, Limited, MemoryBudget, Needs
from ckpt.planning.plan import CHUNK_MAX_BYTES
from ckpt.storage.direct_io import Buffers
from ckpt.storage.host_memory import MemoryUse

RANGE = some.tuples(some.integers(0, 1 << 30), some.integers(0, 1 << 32)).map(lambda both: (both[0], sum(both)))
NEEDS = some.builds(
    Needs,
    chunk=some.integers(1, 1 << 30),
    pinned=some.integers(0, 1 << 30),
    writing=RANGE,
    reading=RANGE,
    staging=some.none() | some.integers(21, 30).map(lambda power: 1 << power),
    copies=some.integers(1, 4),
    in_powers=some.booleans(),
)


@given(NEEDS, some.integers(0, 1 << 14))
def test_the_parts_take_all_that_they_need_and_never_more_than_the_budget(needs: Needs, more_mib: int) -> None:
    mib = -(-needs.least // MIB) + more_mib
    budget = MemoryBudget.shared_out(mib, needs)
    assert budget.writing is not None and budget.reading is not None
    assert needs.writing[0] <= budget.writing <= needs.writing[1]
    assert needs.reading[0] <= budget.reading <= needs.reading[1]
    assert (budget.staging is None) is (needs.staging is None) and (budget.staging or 0) >= (needs.staging or 0)
    assert needs.fixed + budget.writing + budget.reading + (budget.staging or 0) <= mib * MIB


@given(NEEDS)
def test_a_budget_that_is_too_small_is_refused_by_the_smallest_that_works(needs: Needs) -> None:
    least = -(-needs.least // MIB)
    with pytest.raises(ConfigurationError, match=rf"^memory_budget_mib={least - 1}: expected at least {least}, "):
        MemoryBudget.shared_out(least - 1, needs)
    MemoryBudget.shared_out(least, needs)


@given(NEEDS, some.integers(0, 1 << 14), some.integers(0, 1 << 14))
def test_a_larger_budget_gives_no_part_less(needs: Needs, mib: int, more_mib: int) -> None:
    mib += -(-needs.least // MIB)
    budget, larger = (MemoryBudget.shared_out(size, needs) for size in (mib, mib + more_mib))
    for part in ("writing", "reading", "staging"):
        assert (getattr(budget, part) or 0) <= (getattr(larger, part) or 0)


def test_without_a_budget_nothing_is_limited() -> None:
    needs = Needs(64 * MIB, 0, (MIB, 32 * MIB), (4 * MIB, 8 * MIB), 66 * MIB, copies=2)
    budget = MemoryBudget.shared_out(None, needs)
    assert budget == MemoryBudget()
    assert "at most 104 MiB of host memory of each rank beside the state, and 2 copies of what it saves: 32 for" in budget.sentence(needs)
    small = MemoryBudget.shared_out(200, needs).sentence(needs)
    assert small.startswith("checkpointing takes at most 200 MiB of host memory of each rank beside the state: ")


@pytest.mark.parametrize("in_store", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: Buffers(direct_io=True), DirectLoad, TwoStageLoad], ids=["buffers", "direct", "two-stage"]
)
def test_each_part_keeps_within_its_limit_from_the_least_to_its_usual_size(make: type[Limited], on_device: bool, in_store: bool) -> None:
    use = MemoryUse(in_store, on_device, CHUNK_MAX_BYTES)
    least, usual = make().memory_range(use)
    assert 0 < least <= usual
    for limit in (least, least + 1, (least + usual) // 2, usual, 2 * usual):
        part = make()
        part.limit_memory(limit, use)
        smallest, now = part.memory_range(use)
        assert smallest == least <= now <= min(limit, usual)
    assert now == usual
