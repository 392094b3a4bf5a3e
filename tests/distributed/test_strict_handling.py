"""Keys, shards and common state of several ranks: what one finds wrong, all raise."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from ckpt.dist_checkpointing.mapping import ShardedObject
from ckpt.dist_checkpointing.validation import (
    StrictHandling,
    compare_common,
    determine_global_metadata,
    logger,
    validate_integrity_and_strict_load,
    validate_sharding_integrity,
)
from ckpt.errors import CheckpointError, ConfigurationError, MissingStateError, ShardingError
from ckpt.ranks.default_topology import current_topology, use_topology
from ckpt.ranks.topology import Phase, Topology
from ckpt.state.sharded_tensor import ShardedTensor
from tests.support.ranks import run_ranks, run_threads


class Watched:
    """A topology that remembers what its rank gave each phase."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.given: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topology, name)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        with self._topology.phase(name) as phase:
            yield phase
            said = (phase.payload, phase.to_lead, phase.from_lead)
            self.given[name] = next((one for one in said if one is not None), None)


def held_by(rank: int) -> dict[str, Any]:
    """Two copies of a model over two ranks each, a flattened state, and an object per rank."""
    part, copy = rank % 2, rank // 2
    meta = torch.empty(2, 3, device="meta")
    state: dict[str, Any] = {"layers": [], "rng": ShardedObject("rng", {"seed": rank}, (4,), (rank,))}
    for layer in range(3):
        key = f"layers.{layer}.w"
        state["layers"].append(
            ShardedTensor.from_rank_offsets(key, meta, (1, part, 2), replica_id=(0, copy), prepend_axis_num=0)
        )
    run = slice(0, 4) if copy == 0 else slice(4, 6)
    data = torch.empty(run.stop - run.start, dtype=torch.bfloat16, device="meta")
    state["moment"] = ShardedTensor.from_rank_offsets_flat(
        "moment", data, (2, 3), (0, np.int64(part), 2), flattened_range=run, allow_shape_mismatch=True
    )
    state["step"] = ShardedTensor.at("step", torch.tensor(rank), (), (), replica_id=(np.int64(rank), 0))
    return state


def _exchange(topology: Topology) -> Any:
    watched = Watched(topology)
    with use_topology(cast(Topology, watched)):
        local, everybodys = determine_global_metadata(held_by(topology.rank))
        validate_sharding_integrity(everybodys)
    assert [vars(one) for one in everybodys[topology.rank]] == [vars(one) for one in local]
    assert all(one.data is None for one in local)
    return [[vars(one) for one in of_rank] for of_rank in everybodys], watched.given["columns of metadata"]


def test_every_rank_knows_what_all_ranks_hold_and_nothing_is_sent_twice() -> None:
    """S1.72"""
    found = run_threads(4, _exchange)
    expected = [
        [vars(one.without_data()) for one in (*held["layers"], held["rng"], held["moment"], held["step"])]
        for held in map(held_by, range(4))
    ]
    assert [known for known, _ in found] == [expected] * 4
    sent = [digest for _, said in found for digest in said]
    assert len(sent) == len(set(sent))
    assert [len(said) for _, said in found] == [4, 2, 2, 2]  # keys and forms are alike, and rank 0's to send


def _give_a_plain_tensor(topology: Topology) -> str:
    held: dict[str, Any] = {"w": torch.zeros(2)} if topology.rank == 1 else held_by(topology.rank)
    with use_topology(topology), pytest.raises(ConfigurationError) as refused:
        determine_global_metadata(held)
    return str(refused.value)


def test_a_rank_that_gives_something_else_is_named_on_all_ranks() -> None:
    (said,) = set(run_threads(3, _give_a_plain_tensor))
    assert "failed on rank 1: the sharded part of a state dict holds a Tensor, and may hold ShardedTensor and" in said


def shards(*keys: str, rank: int = 0) -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, torch.empty(2, device="meta"), replica_id=rank) for key in keys}


SAVED = shards("a", "b", "c")
REQUESTED = (("a",), ("a", "x", "y"), ("a", "b", "y"))


def _load_strictly(topology: Topology, strict: str, exchange: bool) -> Any:
    requested = shards(*REQUESTED[topology.rank], rank=topology.rank)
    with use_topology(topology):
        local, everybodys = determine_global_metadata(requested) if exchange else (None, None)
        try:
            left, *misfits = validate_integrity_and_strict_load(
                requested, StrictHandling(strict), False, local, everybodys, SAVED
            )
        except MissingStateError as error:
            return str(error)
    return [sorted(left), *map(sorted, misfits)]


@pytest.mark.parametrize(
    ("strict", "says"),
    [
        (
            "raise_unexpected",
            "in their keys; Unexpected keys (requested, not in the checkpoint): x (rank 1), y (ranks 1-2).",
        ),
        (
            "raise_all",
            "in their keys; Missing keys (in the checkpoint, not requested): c; "
            "Unexpected keys (requested, not in the checkpoint): x (rank 1), y (ranks 1-2).",
        ),
    ],
)
def test_what_one_rank_requests_in_vain_all_ranks_raise(strict: str, says: str) -> None:
    """S1.70, S1.72: rank 0 requests nothing that is not there, and would go on alone."""
    (said,) = set(run_threads(3, _load_strictly, strict, strict == "raise_all"))
    assert says in said


def test_missing_keys_are_those_that_no_rank_requests_and_unexpected_ones_are_each_ranks_own() -> None:
    """S1.71"""
    assert run_threads(3, _load_strictly, "return_all", True) == [
        [["a"], ["c"], []],
        [["a"], ["c"], ["x", "y"]],
        [["a", "b"], ["c"], ["y"]],
    ]
    assert run_threads(3, _load_strictly, "return_unexpected", False)[1] == [["a"], [], ["x", "y"]]


def test_log_unexpected_leaves_the_keys_out_and_every_rank_logs_those_of_all(caplog: pytest.LogCaptureFixture) -> None:
    """S1.70"""
    with caplog.at_level(logging.WARNING):
        found = run_threads(3, _load_strictly, "log_unexpected", False)
    (message,) = {record.getMessage() for record in caplog.records}
    assert "Unexpected keys (requested, not in the checkpoint): x (rank 1), y (ranks 1-2)" in message
    assert len(caplog.records) == 3
    assert [left for left, *_ in found] == [["a"], ["a"], ["a", "b"]]


def _logged(topology: Topology) -> list[str]:
    """What this process logs while it loads, by a handler at the logger that programs written for Megatron-Core import."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for strict in ("log_unexpected", "log_all"):
            _load_strictly(topology, strict, strict == "log_all")
    finally:
        logger.removeHandler(handler)
    return messages


def test_every_process_logs_missing_and_unexpected_keys() -> None:
    """S1.70: each rank has its own log file, and a user looks into any of them."""
    first, second = run_ranks(2, _logged)
    assert first == second
    unexpected = "Unexpected keys (requested, not in the checkpoint): x (rank 1), y (rank 1)"
    missing = "Missing keys (in the checkpoint, not requested): b, c"
    assert [(unexpected in message, missing in message) for message in first] == [(True, False), (True, True)]


def _load_in_two_ways(topology: Topology) -> str:
    strict = StrictHandling.RAISE_UNEXPECTED if topology.rank else StrictHandling.ASSUME_OK_UNEXPECTED
    with use_topology(topology), pytest.raises(ConfigurationError) as refused:
        validate_integrity_and_strict_load(shards("a"), strict, False, None, None, SAVED)
    return str(refused.value)


def test_ranks_that_are_not_equally_strict_are_told() -> None:
    (said,) = set(run_threads(2, _load_in_two_ways))
    assert "strict is assume_ok_unexpected on rank 0 and raise_unexpected on rank 1; give the same on all ranks" in said


def _give_two_main_replicas(topology: Topology, root: Path) -> str:
    assert current_topology().world_size == 2
    _, everybodys = determine_global_metadata(shards("w"))
    with pytest.raises(ShardingError) as refused:
        validate_integrity_and_strict_load(
            shards("w"), StrictHandling.ASSUME_OK_UNEXPECTED, True, global_metadata=everybodys
        )
    return str(refused.value)


def test_ranks_of_torchs_own_process_group_all_raise_at_a_broken_sharding(tmp_path: Path) -> None:
    """S1.72: upstream's rank 0 raises alone, and the others wait for it."""
    (said,) = set(run_ranks(2, _give_two_main_replicas, tmp_path, process_group=True))
    assert said.startswith("w: the shard [0:2] of the global shape [2] has 2 main replicas, on ranks 0-1;")


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    lr: float
    names: tuple[str, ...]


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self) -> None: ...


def common_of(rank: int) -> dict[str, Any]:
    """What is equal on all ranks, in other objects, orders and memory."""
    entries: list[tuple[str, Any]] = [
        ("iteration", 7),
        ("nan", float("nan")),
        ("w", torch.arange(6.0).view(2, 3).T if rank else torch.arange(6.0).view(2, 3).T.contiguous()),
        ("array", np.arange(3)),
        ("args", argparse.Namespace(lr=0.1, dtype=torch.bfloat16, colour=Colour.RED, of=[Settings(0.5, ("a",))])),
        ("tuple", (1, torch.ones(2), {8, 0} if rank else {0, 8})),
        ("opaque", Opaque(rank)),
        ("partial", functools.partial(Opaque(rank), 1)),
        ("sparse", torch.zeros(2).to_sparse()),
        ("call", torch.relu),
        ("objects", np.array([1, "a"], dtype=object)),
        ("bytes", b"\x00"),
    ]
    state = dict(entries if rank else reversed(entries))
    state["itself"] = {"state": state}
    return state


def _change(rank: int, state: dict[str, Any]) -> None:
    if rank == 1:
        state["iteration"] = 8
        state["only_here"] = None
        state["args"].colour = Colour.BLUE
        state["args"].of[0].lr = 0.25
    if rank in (1, 2):
        state["w"] = state["w"].clone()
        state["w"].view(torch.int32)[2, 1] ^= 1
    if rank == 3:
        del state["bytes"]
        state["nan"] = 0.0
        state["tuple"] = (1.0, *state["tuple"][1:])
        state["array"] = state["array"].astype(np.int32)


def _compare(topology: Topology, change: bool, preprocess: Callable[[Any], Any] | None = None) -> Any:
    state = common_of(topology.rank)
    if change:
        _change(topology.rank, state)
    before = dict(state)
    watched = Watched(topology)
    with use_topology(cast(Topology, watched)):
        found = compare_common(state, preprocess)
    assert state.keys() == before.keys()
    return found, list(watched.given)


def test_equal_common_states_cost_one_phase_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """S1.73: tensors go by their bits, and what cannot be compared is not called different."""
    assert run_threads(4, _compare, False) == [({}, ["common state"])] * 4
    assert not caplog.records


def test_rank_0_names_the_paths_that_differ_and_the_ranks(caplog: pytest.LogCaptureFixture) -> None:
    """S1.73: all ranks take part, one warns, and the save goes on."""
    with caplog.at_level(logging.WARNING):
        found = run_threads(4, _compare, True)
    differing = {
        "iteration": [1],
        "only_here": [1],
        "args.colour": [1],
        "args.of.0.lr": [1],
        "w": [1, 2],
        "bytes": [3],
        "nan": [3],
        "tuple.0": [3],
        "array": [3],
    }
    assert [one for one, _ in found] == [differing] * 4
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("the common state dict of rank 0, which alone is saved, differs from other ranks' in ")
    assert "w (ranks 1-2)" in message
    assert message.endswith(" and 4 more)")


_WIDE = {f"layer.{number}": number for number in range(1000)}


def _compare_wide(topology: Topology) -> Any:
    """Rank 1 is like rank 0, rank 2 differs everywhere and in its number of paths, rank 3 in exactly the 100 that may be named."""
    state: dict[str, Any] = {
        0: _WIDE,
        1: dict(reversed(_WIDE.items())),
        2: dict.fromkeys(_WIDE, -1) | {"only_here": None},
        3: _WIDE | {f"layer.{number}": None for number in range(50, 150)},
    }[topology.rank]
    watched = Watched(topology)
    with use_topology(cast(Topology, watched)):
        return compare_common(state), watched.given


def test_a_rank_that_differs_sends_a_few_paths_and_the_warning_says_that_there_are_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S1.73: what every rank gets must not grow with ranks times paths."""
    with caplog.at_level(logging.WARNING):
        found = run_threads(4, _compare_wide)
    differing = {f"layer.{number}": [2] for number in range(50)}
    differing |= {f"layer.{number}": [2, 3] for number in range(50, 100)}
    differing |= {f"layer.{number}": [3] for number in range(100, 150)}
    assert [one for one, _ in found] == [differing] * 4
    digests, rows, paths = zip(*(sent.values() for _, sent in found), strict=True)
    assert [digests.index(one) for one in digests] == [0, 0, 2, 3]
    assert rows[0].keys() == {"the top level", *_WIDE} and {len(row) for row in rows[0].values()} == {16}
    assert rows[1:] == (None, None, None)
    assert paths == (None, None, [1001, list(_WIDE)[:100]], [100, list(_WIDE)[50:150]])
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith(
        "layer.4 (rank 2) and 145 more); of rank 2, with up to 1001 such paths, only the first 100 are looked at"
    )


def _compare_own_ranks(topology: Topology) -> Any:
    watched = Watched(topology)
    with use_topology(cast(Topology, watched)):
        return compare_common({"args": argparse.Namespace(rank=topology.rank // 2, seed=1)}), list(
            watched.given.values()
        )


def test_ranks_that_differ_from_rank_0_alike_send_their_paths_once() -> None:
    """S1.73"""
    found = run_threads(4, _compare_own_ranks)
    assert [one for one, _ in found] == [{"args.rank": [2, 3]}] * 4
    assert [sent[2] for _, sent in found] == [None, None, [1, ["args.rank"]], None]


def _drop(state: dict[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in ("sparse", "call")}


def _fail(state: dict[str, Any]) -> dict[str, Any]:
    raise KeyError("args")


def test_only_what_the_callers_function_leaves_is_compared() -> None:
    """S1.73"""
    assert run_threads(4, _compare, True, _drop) == [({}, ["common state"])] * 4


def _compare_badly(topology: Topology) -> str:
    with use_topology(topology), pytest.raises(CheckpointError) as refused:
        compare_common({"args": 1}, _fail if topology.rank == 1 else None)
    return str(refused.value)


def test_a_function_that_fails_on_one_rank_fails_on_all() -> None:
    """S1.73"""
    (said,) = set(run_threads(2, _compare_badly))
    assert "failed on rank 1: KeyError: 'args'" in said


def _validate_with_common(topology: Topology) -> None:
    with use_topology(topology):
        _, everybodys = determine_global_metadata(shards("w", rank=topology.rank))
        validate_sharding_integrity(everybodys, common_state_dict={"rank": topology.rank})


def test_the_common_state_can_be_compared_with_the_sharding(caplog: pytest.LogCaptureFixture) -> None:
    """S1.73"""
    with caplog.at_level(logging.WARNING):
        run_threads(3, _validate_with_common)
    assert [record.getMessage().partition(" in ")[2] for record in caplog.records] == ["rank (ranks 1-2)"]
