"""Small tensors that lie end to end are found, and filled from whatever stretches of the chunk arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.format.box import Box, whole
from ckpt.format.dtypes import raw_bytes
from ckpt.storage.wanted_bytes import FEW, SMALL_BYTES, TensorRun, WantedBox, find_runs
from tests.support.states import ALL_DTYPES, random_bits

SHAPES = ((), (1,), (7,), (16,), (3, 5), (2, 1, 4))


def parts_of(shapes: list[tuple[int, ...]], dtype: torch.dtype, base: int = 0) -> list[WantedBox]:
    """Parts that lie end to end, each with memory that holds something else."""
    found = []
    for number, shape in enumerate(shapes):
        out = random_bits(shape, dtype, number + 1000)
        found.append(WantedBox(base, shape, whole(shape), out, f"t{number}"))
        base += out.nbytes
    return found


@given(
    shapes=st.lists(st.sampled_from(SHAPES), min_size=FEW, max_size=12),
    dtype=st.sampled_from(ALL_DTYPES),
    first=st.integers(0, 3),
    data=st.data(),
)
def test_a_run_is_filled_from_stretches_cut_anywhere_in_any_order(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, first: int, data: st.DataObject
) -> None:
    parts = parts_of(shapes, dtype, first * 16)
    (run,), others = find_runs(data.draw(st.permutations(parts)))
    assert others == [] and (run.start, run.stop) == (first * 16, parts[-1].base + parts[-1].out.nbytes)
    values = random_bits((sum(part.out.numel() for part in parts),), dtype, 7)
    chunk = torch.cat(
        [torch.zeros(run.start, dtype=torch.uint8), raw_bytes(values), torch.zeros(40, dtype=torch.uint8)]
    )
    cuts = data.draw(st.sets(st.integers(1, (len(chunk) - 1) // 16).map(lambda unit: unit * 16), max_size=4))
    edges = [0, *sorted(cuts), len(chunk)]
    for start, stop in data.draw(st.permutations(list(pairwise(edges)))):
        if start < run.stop and stop > run.start:
            run.place(start, stop, chunk[start:stop].clone())
    found = torch.cat([raw_bytes(part.out) for part in parts])
    assert torch.equal(found, raw_bytes(values))


def test_only_small_whole_tensors_without_gaps_between_them_or_in_them_make_a_run() -> None:
    shapes = [(4,)] * (3 * FEW)
    parts = parts_of(shapes, torch.float32)
    strided = parts[FEW]
    strided.out = torch.zeros(8)[::2]
    cut = parts[2 * FEW + 1]
    cut.region, cut.box, cut.out = (4,), Box((1,), (3,)), torch.zeros(3)
    runs, others = find_runs(parts)
    assert [len(run.parts) for run in runs] == [FEW, FEW]
    assert {part.name for part in others} == {f"t{n}" for n in (FEW, *range(2 * FEW + 1, 3 * FEW))}
    large = parts_of([(SMALL_BYTES // 4 + 1,)] * FEW, torch.float32)
    gaps = [
        WantedBox(part.base * 2, part.region, part.box, part.out, part.name) for part in parts_of(shapes, torch.int8)
    ]
    types = [part for n in range(FEW) for part in parts_of([(4,)], (torch.int32, torch.float32)[n % 2], 16 * n)]
    for none in (large, gaps, types, parts_of(shapes, torch.int8)[: FEW - 1]):
        assert find_runs(none) == ([], none)


def test_two_tensors_that_want_the_same_bytes_are_in_no_run_together() -> None:
    parts = parts_of([(4,)] * FEW, torch.float32)
    again = WantedBox(parts[1].base, (4,), whole((4,)), torch.zeros(4), "again")
    runs, others = find_runs([*parts, again])
    assert all(a.stop <= b.start for a, b in pairwise(runs))
    assert sum(len(run.parts) for run in runs) + len(others) == FEW + 1


@pytest.mark.parametrize(("byte", "name"), [(0, "t0"), (15, "t0"), (16, "t1"), (47, "t2"), (63, "t3")])
def test_a_run_names_the_tensor_that_a_byte_belongs_to(byte: int, name: str) -> None:
    assert TensorRun(parts_of([(4,)] * FEW, torch.float32)).name_of(byte) == name
