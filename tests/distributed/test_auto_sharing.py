"""`sharing_pattern="auto"`: whatever the ranks hold comes back on each of them, or is refused on all."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt import StateComponent
from ckpt.errors import ConfigurationError, ReplicationError
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import ModelState
from ckpt.storage.stored import read_manifest
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Held, coordinator, same_bits

Values = dict[str, Any]

values = st.dictionaries(
    st.sampled_from("abcd"), st.integers(0, 2) | st.integers(0, 2).map(lambda n: torch.arange(3) + n), max_size=3
)


def equal(a: Values, b: Values) -> bool:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return same_bits(one, other)
        return type(one) is type(other) and bool(one == other)

    return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)


def _saved_and_loaded(topology: Topology, root: Path, saves: Sequence[Sequence[Values]]) -> None:
    """Save what each rank holds, time after time with one coordinator; then load each."""
    own = Held({})
    component = StateComponent("own", own, "auto")
    with coordinator(topology, root, [component]) as made:
        for number, by_rank in enumerate(saves):
            own.state = by_rank[topology.rank]
            made.save_checkpoint(checkpoint_id=number)
        for number, by_rank in enumerate(saves):
            own.state = {}
            made.load_checkpoint(root / f"checkpoint-{number:08d}")
            assert own.loaded is not None
            assert equal(own.loaded, by_rank[topology.rank]), number


_SAVES = st.integers(2, 4).flatmap(lambda n: st.lists(st.lists(values, min_size=n, max_size=n), min_size=1, max_size=3))


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(_SAVES)
def test_every_rank_gets_back_what_it_held_at_each_save(saves: list[list[Values]]) -> None:
    _require_each_its_own(saves)


@pytest.mark.full
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(_SAVES)
def test_every_rank_gets_back_what_it_held_at_many_more_saves(saves: list[list[Values]]) -> None:
    _require_each_its_own(saves)


def _require_each_its_own(saves: list[list[Values]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        run_threads(len(saves[0]), _saved_and_loaded, Path(root), saves)
        for number, by_rank in enumerate(saves):
            saved = read_manifest(Path(root, f"checkpoint-{number:08d}")).components["own"].sharing_pattern
            alike = all(equal(one, by_rank[0]) for one in by_rank)
            assert saved == ("replicated" if alike else "per_rank")


def _model_of(topology: Topology, differs: bool) -> ModelState:
    model = torch.nn.Linear(2, 2)
    model.weight.data.fill_(topology.rank if differs else 7)
    model.bias.data.fill_(1)
    return ModelState(model)


def _save_model(topology: Topology, root: Path, pattern_check: str, differs: bool) -> str:
    """Save twice; between the saves the weights change on one rank alone, as if a pattern had been equal by chance."""
    model = _model_of(topology, differs)
    with coordinator(topology, root, [StateComponent("model", model, "auto")], pattern_check=pattern_check) as made:
        try:
            made.save_checkpoint(checkpoint_id=1)
            if topology.rank == 1:
                model.module.weight.data.fill_(9)
            made.save_checkpoint(checkpoint_id=2)
        except ReplicationError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("pattern_check", ["warn", "error", "off"])
def test_copies_of_a_module_that_differ_are_refused_also_where_patterns_are_not_checked(
    tmp_path: Path, pattern_check: str
) -> None:
    refusals = set(run_threads(3, _save_model, tmp_path / "never equal", pattern_check, True))
    assert len(refusals) == 1
    assert "component model: ranks 0 and 1 hold different values of weight, which does not say" in refusals.pop()
    assert not list((tmp_path / "never equal").glob("checkpoint-*"))


def test_copies_of_a_module_that_diverge_after_the_first_save_are_refused_by_the_next(tmp_path: Path) -> None:
    refusals = set(run_threads(3, _save_model, tmp_path, "warn", False))
    assert len(refusals) == 1
    assert "model should be the same on ranks 0, 1, 2, but differs from rank 0 in weight" in refusals.pop()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000001"]


def _save_mixed(topology: Topology, root: Path, differs: bool) -> str:
    """An object with a DTensor, and beside it a tensor that is no part of a larger one."""
    mesh = init_device_mesh("cpu", (topology.world_size,))
    cut = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])
    own = Held({"cut": cut, "rng": torch.tensor([topology.rank if differs else 5])})
    with coordinator(topology, root, [StateComponent("app", own, "auto")]) as made:
        try:
            made.save_checkpoint(checkpoint_id=1)
        except ReplicationError as error:
            return str(error)
    return ""


def test_what_differs_beside_dtensors_is_refused_and_not_lost(tmp_path: Path) -> None:
    assert run_ranks(2, _save_mixed, tmp_path / "equal", False, process_group=True) == ["", ""]
    assert read_manifest(tmp_path / "equal" / "checkpoint-00000001").components["app"].sharing_pattern == "sharded"
    refusals = run_ranks(2, _save_mixed, tmp_path / "differs", True, process_group=True)
    assert refusals[0] == refusals[1]
    assert "component app: ranks 0 and 1 hold different values of rng" in refusals[0]


def _save_failing(topology: Topology, root: Path) -> None:
    class Failing(Held):
        def state_dict(self) -> dict[Any, Any]:
            if topology.rank == 1:
                raise OSError("no state today")
            return {"a": 1}

    parts = [
        StateComponent("failing", Failing({}), "auto", required=False),
        StateComponent("fine", Held({"b": topology.rank}), "auto"),
    ]
    with coordinator(topology, root, parts) as made:
        made.save_checkpoint(checkpoint_id=1)


def test_an_optional_object_that_fails_on_one_rank_is_left_out(tmp_path: Path) -> None:
    run_threads(2, _save_failing, tmp_path)
    assert list(read_manifest(tmp_path / "checkpoint-00000001").components) == ["fine"]


@pytest.mark.parametrize(
    ("declared", "error"),
    [
        ({"process_group_name": "dp"}, "process_group_name=dp goes with sharing_pattern=per_group, not with auto"),
        ({"validate_replication": True}, "copies that should be equal, which auto does not have"),
        ({"elastic": "rescale"}, "elastic=rescale does not apply to auto components"),
    ],
)
def test_what_goes_with_one_pattern_does_not_go_with_auto(declared: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        StateComponent("model", Held({}), "auto", **declared)
