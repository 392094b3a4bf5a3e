"""What the four levels look at, entry by entry; ranks are made up, or threads."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import ConfigurationError, ReplicationError
from ckpt.format.dtypes import raw_bytes
from ckpt.ranks.topology import Topology
from ckpt.state import replication
from ckpt.state.flatten import flatten
from ckpt.state.replication import (
    SAMPLE,
    Difference,
    Distance,
    Fingerprint,
    ValidationLevel,
    differences,
    fingerprints,
    measure,
    plain_differences,
    private_keys,
    replication_error,
    require_unchanged,
)
from ckpt.state.sharing import StateComponent, level_of
from tests.support.covering import sampled
from tests.support.ranks import run_threads
from tests.support.states import ALL_DTYPES, Held, random_bits

BOTH = [(0, 1)]
QUICK, TENSOR, FULL = ValidationLevel.QUICK, ValidationLevel.TENSOR, ValidationLevel.FULL
LARGE = (300, 200)


def with_one_bit(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """The same tensor, the lowest bit of one byte turned around."""
    changed = tensor.clone()
    flat = changed.reshape(-1) if tensor.dim() else changed.view(1)
    if tensor.dtype is torch.bool:
        flat[at] = ~flat[at]
    else:
        flat[at : at + 1].view(torch.uint8)[0] ^= 1
    return flat.view(tensor.shape)


def found_by(level: ValidationLevel, mine: Any, theirs: Any) -> list[Difference]:
    return differences([fingerprints({"w": one}, level) for one in (mine, theirs)], BOTH)


def trained_adam() -> dict[str, Any]:
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = random_bits(tuple(parameter.shape), torch.int16, 3).to(torch.bfloat16)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@sampled("shape", [LARGE, (), (1,)], 2, ids=str)
def test_one_bit_of_any_type_is_seen_by_tensor_and_one_element_that_is_sampled_by_quick(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    one = random_bits(shape, dtype, 1)
    for level in (QUICK, TENSOR, FULL):
        assert not found_by(level, one, one.clone())
        (found,) = found_by(level, one, with_one_bit(one, 0))  # the first element is in every sample
        assert (found.key, found.rank, found.reference, found.how) == ("w", 1, 0, "")


def test_quick_misses_a_bit_outside_of_its_sample_and_tensor_does_not() -> None:
    one = random_bits(LARGE, torch.bfloat16, 1)
    missed = [at for at in range(1000) if not found_by(QUICK, one, with_one_bit(one, at))]
    assert len(missed) > 900
    assert all(found_by(TENSOR, one, with_one_bit(one, at)) for at in missed[:50])


def test_quick_looks_all_over_a_tensor_and_not_at_one_row_or_column() -> None:
    one = torch.zeros(4096, 4096, dtype=torch.uint8)
    for part in (one[2048:], one[:, 2048:], one[::2], one[:, 1::2], one[:1000, :], one[:, :1000]):
        other = one.clone()
        part.fill_(1)
        assert found_by(QUICK, one, other)
        part.fill_(0)


def test_quick_looks_at_as_much_of_a_large_tensor_as_of_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs does not depend on the size; counted in bytes, for a clock says nothing on a busy machine."""
    hashed: list[int] = []
    monkeypatch.setattr(replication, "raw_bytes", lambda host: hashed.append(host.nbytes) or raw_bytes(host))
    for side in (16, 256, 4096):
        fingerprints({"w": torch.zeros(side, side, dtype=torch.float64).t()}, QUICK)
    assert hashed == [8 * (SAMPLE + 2)] * 3


def test_optimizer_tensors_three_levels_deep_are_compared() -> None:
    one, other = trained_adam(), trained_adam()
    other["state"] = {
        **one["state"],
        0: {**one["state"][0], "exp_avg_sq": with_one_bit(one["state"][0]["exp_avg_sq"], 5)},
    }
    copies = [fingerprints(flatten(state, "optimizer").tensors) for state in (one, other)]
    assert [found.key for found in differences(copies, BOTH)][:1] == ["state.0.exp_avg_sq"]
    assert "state.0.step" in copies[0]


@pytest.mark.parametrize(
    ("theirs", "how"),
    [
        ({}, "which only rank 0 has"),
        ({"w": torch.zeros(6), "v": torch.zeros(6)}, "which alone has it"),
        ({"w": torch.zeros(6, dtype=torch.float64)}, "float64, not float32"),
        ({"w": torch.zeros(3, dtype=torch.float64)}, "float64, not float32"),
        ({"w": torch.zeros(2, 3)}, "shape [2, 3], not [6]"),
        ({"w": -torch.zeros(6)}, ""),
    ],
)
def test_a_difference_says_what_it_is(theirs: dict[str, torch.Tensor], how: str) -> None:
    for level in (QUICK, TENSOR, FULL):
        (found,) = differences([fingerprints({"w": torch.zeros(6)}, level), fingerprints(theirs, level)], BOTH)
        assert found.how == how


def test_equal_bytes_of_another_type_or_shape_are_not_equal() -> None:
    one = random_bits((8, 4), torch.int16, 1)
    for other in (one.view(torch.float16), one.view(torch.bfloat16), one.view(4, 8), one.view(32), one.view(8, 4, 1)):
        assert found_by(QUICK, one, other)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_strides_do_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "PIECE_BYTES", 96)  # so that a tensor is hashed in many parts
    one = random_bits((17, 5, 3), dtype, 2)
    wide = random_bits((17, 10, 3), dtype, 3)
    wide[:, ::2] = one
    for other in (one.permute(2, 1, 0).contiguous().permute(2, 1, 0), wide[:, ::2], one[:, :, :].clone()):
        assert other.shape == one.shape
        for level in (QUICK, TENSOR):
            assert not found_by(level, one, other)


def test_a_lazily_conjugated_tensor_is_what_it_stands_for() -> None:
    one = torch.randn(500, dtype=torch.complex64)
    for level in (QUICK, TENSOR):
        assert not found_by(level, one.conj(), one.conj().resolve_conj())
        assert found_by(level, one.conj(), one)


def test_an_empty_tensor_has_a_fingerprint_of_type_and_shape() -> None:
    assert not found_by(TENSOR, torch.empty(0, 3), torch.empty(0, 3))
    assert found_by(QUICK, torch.empty(0, 3), torch.empty(0, 4))
    assert found_by(QUICK, torch.empty(0, 3), torch.empty(0, 3, dtype=torch.int32))


def test_no_tensor_is_copied_whole_to_be_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    whole = torch.Tensor.contiguous

    def contiguous(tensor: torch.Tensor) -> torch.Tensor:
        made = whole(tensor)
        if made.data_ptr() != tensor.data_ptr():
            copied.append(made.nbytes)
        return made

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    one = torch.arange(6 << 20, dtype=torch.float32).view(3 << 10, 2 << 10)
    fingerprints({"contiguous": one, "a view of rows": one[5:]})
    assert copied == []
    fingerprints({"transposed": one.t()})
    assert 0 < max(copied) <= replication.PIECE_BYTES
    assert sum(copied) == one.nbytes


def piece(first: int, values: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.at("w", values, (8, 3), (first, 0))


def test_a_piece_is_compared_with_the_same_piece_only() -> None:
    upper, lower = random_bits((4, 3), torch.float32, 1), random_bits((4, 3), torch.float32, 2)
    states = [
        {"w": piece(0, upper)},
        {"w": piece(4, lower)},
        {"w": piece(0, upper.clone())},
        {"w": piece(4, -lower)},
        {},
    ]
    found = differences([fingerprints(state) for state in states], [(0, 1, 2, 3, 4)])
    assert [(one.rank, one.reference, one.place) for one in found] == [(3, 1, "[4:8, 0:3] of [8, 3]")]
    assert "but differs from rank 1 in w [4:8, 0:3] of [8, 3] on rank 3." in str(
        replication_error("m", [(0, 1, 2, 3, 4)], found)
    )


def test_plain_values_differ_by_value_by_presence_and_by_nesting() -> None:
    rows = {"same": [["same"], 1], "lr": [["lr"], 0.1], "gone": [["gone"], 2], "nested": [["a", "b"], 3]}
    theirs = {"same": [["same"], 1], "lr": [["lr"], 0.2], "nested": [["a.b"], 3], "new": [["new"], "x" * 100]}
    found = {one.key: one.how for one in plain_differences([rows, theirs], BOTH)}
    assert found == {
        "lr": "0.2, not 0.1",
        "gone": "which only rank 0 has",
        "nested": "nested otherwise",
        "new": "which alone has it",
    }


def test_the_error_lists_entries_ranks_and_reasons() -> None:
    zeros = torch.zeros(6)
    states = [
        {"a": zeros, "b": zeros, **{f"c{n}": zeros for n in range(5)}},
        {"a": zeros.double(), "b": zeros, **{f"c{n}": zeros + 1 for n in range(5)}},
        {"a": zeros, **{f"c{n}": zeros + 1 for n in range(5)}},
    ]
    found = differences([fingerprints(state) for state in states], [(0, 1, 2)])
    distances = {one: Distance(6, (0,), 1.0) for one in found if one.key == "c0" and one.rank == 2}
    assert str(replication_error("m", [(0, 1, 2)], found, distances)) == (
        "component m should be the same on ranks 0, 1, 2, but differs from rank 0 in a on rank 1 (float64, not float32); "
        "b on rank 2 (which only rank 0 has); c0 on rank 1, 2 (6 elements, the first at [0], by up to 1); c1 on rank 1, 2; "
        "c2 on rank 1, 2; and in 2 more entries. Choose another sharing_pattern, or list the "
        "entries that are each rank's own in the object's attribute rank_private, or compare nothing: declare component m "
        "with validation_level=none."
    )


def test_a_set_whose_copies_agree_is_not_blamed_for_another_one() -> None:
    copies = [fingerprints({"w": torch.tensor(value)}) for value in (1, 2, 1, 3)]
    found = differences(copies, [(0, 2), (1, 3)])
    assert "on ranks 1, 3, but differs from rank 1 in w on rank 3." in str(
        replication_error("m", [(0, 2), (1, 3)], found)
    )


@pytest.mark.parametrize(
    ("validate", "level", "all_of_them", "is_compared_by"),
    [
        (False, None, False, "none"),
        (False, "full", False, "none"),
        (True, None, False, "tensor"),
        (True, "none", False, "none"),
        (True, "quick", False, "quick"),
        (True, "full", False, "full"),
        (False, None, True, "tensor"),
        (True, "quick", True, "tensor"),
        (False, "quick", True, "tensor"),
        (False, "full", True, "full"),
        (True, "none", True, "none"),
    ],
)
def test_the_level_follows_from_the_declaration_and_from_what_the_save_asks_for(
    validate: bool, level: str | None, all_of_them: bool, is_compared_by: str
) -> None:
    component = StateComponent("m", Held({}), "replicated", validate_replication=validate, validation_level=level)
    assert level_of(component, validate_all=all_of_them).value == is_compared_by


def test_an_unknown_level_is_refused_with_the_four_there_are() -> None:
    with pytest.raises(ConfigurationError, match="validation_level=deep: expected one of none, quick, tensor, full"):
        StateComponent("m", Held({}), "replicated", validation_level="deep")
    for level in ("none", "quick", "tensor", "full"):
        assert StateComponent("m", Held({}), "replicated", validation_level=level).validation_level == level


def test_every_level_covers_itself_and_those_before_it() -> None:
    levels = list(ValidationLevel)
    for number, level in enumerate(levels):
        assert [other for other in levels if level.covers(other)] == levels[: number + 1]


def test_entries_of_a_rank_s_own_are_named_by_patterns() -> None:
    held = Held({})
    keys = ["w", "wrapper.rank", "wrapper.device", "local_rank"]
    assert private_keys(held, keys) == set()
    held.rank_private = ["wrapper.*", "local_rank"]  # type: ignore[attr-defined]
    assert private_keys(held, keys) == {"wrapper.rank", "wrapper.device", "local_rank"}
    for mistake in ("wrapper.*", [1]):
        held.rank_private = mistake  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match="Held.rank_private is .*; give a list of patterns of joined keys"):
            private_keys(held, keys)


def test_a_tensor_that_changed_since_it_was_compared_is_named() -> None:
    tensors = {"a": torch.zeros(5), "b": torch.ones(7)}
    before = fingerprints(tensors)
    require_unchanged("m", before, tensors)
    tensors["b"][3] += 1
    with pytest.raises(ReplicationError, match="component m was changed while it was being saved, in b; "):
        require_unchanged("m", before, tensors)


def measured(topology: Topology, dtype: torch.dtype, shape: tuple[int, ...], changed: dict[int, int]) -> Distance:
    """Compare a tensor with rank 1's, which has other values at some places; both ranks learn the distance."""
    one = torch.arange(math.prod(shape)).remainder(2 if dtype is torch.bool else 50).to(dtype).view(shape)
    if topology.rank == 1:
        for at, value in changed.items():
            one.view(-1)[at] = value
        if len(shape) == 2:
            one = one.t().contiguous().t()  # other strides must not mean other parts
    tensors = {"w": one}
    with topology.phase("show") as phase:
        phase.payload = fingerprints(tensors)
    copies = [msgspec.convert(said, dict[str, Fingerprint]) for said in phase.payloads]
    (distance,) = measure(differences(copies, BOTH), copies, tensors, topology).values()
    return distance


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d is not torch.bool and d.itemsize > 1], ids=str)
def test_full_tells_how_many_elements_where_and_how_far(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "PIECE_BYTES", 256)
    changed = {33 * 5 + 2: 0, 33 * 5 + 3: 100, 39 * 5 + 4: 49}  # were 17, 18 and 49
    wanted = Distance(2, (33, 2), 82.0)
    assert run_threads(2, measured, dtype, (40, 5), changed) == [wanted, wanted]


@pytest.mark.parametrize(
    ("dtype", "shape", "changed", "wanted"),
    [
        (torch.bool, (3, 4), {5: 0}, Distance(1, (1, 1), 1.0)),
        (torch.float32, (), {0: 3}, Distance(1, (), 3.0)),
        (torch.int64, (9,), {2: 2**60 + 2}, Distance(1, (2,), float(2**60))),
        (torch.float32, (9,), {2: float("nan"), 3: 5}, Distance(2, (2,), 2.0)),
        (torch.float32, (9,), {1: float("inf")}, Distance(1, (1,), math.inf)),
        (torch.float32, (9,), {0: -0.0}, Distance(1, (0,), 0.0)),
    ],
    ids=str,
)
def test_full_counts_elements_that_arithmetic_would_call_equal_or_nothing(
    dtype: torch.dtype, shape: tuple[int, ...], changed: dict[int, Any], wanted: Distance
) -> None:
    assert run_threads(2, measured, dtype, shape, changed) == [wanted, wanted]


def test_what_is_never_a_number_has_no_distance() -> None:
    distance, _ = run_threads(2, measured, torch.float32, (9,), {4: float("nan")})
    assert (distance.num_differing, distance.first) == (1, (4,))
    assert math.isnan(distance.largest)
    found = Difference("w", 1, 0, None, "")
    assert "(1 element, the first at [4], NaN on one side)" in str(
        replication_error("m", BOTH, [found], {found: distance})
    )
