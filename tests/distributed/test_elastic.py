"""Components with a copy per rank, or one position of all, that go on where other ranks saved them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, MissingStateError, WorldSizeError
from ckpt.loading.report import Status
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Fitted, Held, coordinator, global_index, same_bits


class Queue(Held):
    """Documents still to be read, which any number of ranks can share out among them."""

    def __init__(self, topology: Topology, documents: Sequence[int] = (), *, mode: str = "sharded") -> None:
        super().__init__({"documents": list(documents), "mode": mode, "seen": torch.tensor([float(topology.rank)] * 3)})
        self.topology = topology
        self.mode = mode
        self.asked: list[Mapping[str, Any]] = []
        self.changed: list[Mapping[str, Any]] | None = None

    def fits(self, saved: Mapping[str, Any]) -> bool:
        self.asked.append(saved)
        return saved["mode"] == self.mode

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        self.changed = list(saved)
        left = [document for copy in saved for document in copy["documents"]]
        self.state["documents"] = left[self.topology.rank :: self.topology.world_size]


class Refusing(Queue):
    """Will not go on from other ranks' copies, on rank 1."""

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        if self.topology.rank == 1:
            raise ValueError(f"{len(saved)} queues cannot be shared out")
        super().load_changed(saved)


def component(queue: Queue, pattern: str = "per_rank", elastic: str = "repartition", **options: Any) -> StateComponent:
    group = "dp" if pattern == "per_group" else None
    return StateComponent("data", queue, pattern, elastic=elastic, process_group_name=group, **options)


def groups(topology: Topology) -> dict[str, list[int]]:
    """Neighbours in twos; a last one alone."""
    first = topology.rank - topology.rank % 2
    return {"dp": [rank for rank in (first, first + 1) if rank < topology.world_size]}


def _save(topology: Topology, root: Path, pattern: str = "per_rank", backend: str = "zarr") -> None:
    whose = {"per_rank": topology.rank, "per_node": topology.node_rank, "per_group": topology.rank // 2}.get(pattern, 0)
    queue = Queue(topology, [10 * whose + n for n in range(3)])
    queue.state["seen"] = torch.full((3,), float(whose))
    made = coordinator(topology, root, [component(queue, pattern)], backend=backend, process_groups=groups(topology))
    made.save_checkpoint(checkpoint_id="1")


def _load(
    topology: Topology, root: Path, pattern: str = "per_rank", elastic: str = "repartition", *, other_mode: int = -1
) -> tuple[list[int], list[list[int]] | None, list[list[float]]]:
    """What this rank has left to read; whose queues it was handed, and their tensors."""
    queue = Queue(topology, [-1], mode="dispatched" if topology.rank == other_mode else "sharded")
    made = coordinator(topology, root, [component(queue, pattern, elastic)], process_groups=groups(topology))
    made.load_checkpoint()
    assert made.last_load is not None
    (report,) = made.last_load.components
    assert (report.status, report.changed) == (Status.RESTORED, queue.changed is not None)
    if queue.changed is None:
        assert queue.loaded is not None
        return queue.loaded["documents"], None, []
    assert queue.loaded is None
    assert "seen" not in (queue.asked[0] if queue.asked else {}), "fits sees plain values only"
    return (
        queue.state["documents"],
        [copy["documents"] for copy in queue.changed],
        [copy["seen"].tolist() for copy in queue.changed],
    )


@pytest.mark.parametrize("elastic", ["derive", "repartition"])
def test_the_object_may_decide_under_every_pattern_but_sharded_and_must_be_able_to(elastic: str) -> None:
    queue = Queue(Topology.alone())
    for pattern in ("global", "replicated", "per_rank", "per_node", "per_group"):
        assert component(queue, pattern, elastic).elastic == elastic
    with pytest.raises(
        ConfigurationError, match=f"elastic={elastic} does not apply to sharded components.*set it to reshard"
    ):
        component(queue, "sharded", elastic)

    class Rigid(Queue):
        load_changed = None  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match="component data: .* Rigid lacks at least one; add it"):
        component(Rigid(Topology.alone()), "per_rank", elastic)
    with pytest.raises(ConfigurationError, match="component x: .* Held lacks at least one; add it"):
        StateComponent("x", Held({}), "global", elastic=elastic)


FOUR = [[0, 1, 2], [10, 11, 12], [20, 21, 22], [30, 31, 32]]


@sampled("backend", ["zarr", "ocdbt", "safetensors"])
def test_three_ranks_share_out_what_four_had_left(tmp_path: Path, backend: str) -> None:
    run_ranks(4, _save, tmp_path, "per_rank", backend)
    got = run_ranks(3, _load, tmp_path)
    assert [copies for _, copies, _ in got] == [FOUR] * 3
    assert [tensors for _, _, tensors in got] == [[[0.0] * 3, [1.0] * 3, [2.0] * 3, [3.0] * 3]] * 3
    assert sorted(document for left, _, _ in got for document in left) == sorted(n for copy in FOUR for n in copy)


def test_the_same_ranks_go_on_with_their_own_copies_and_share_out_only_if_one_of_them_must(tmp_path: Path) -> None:
    run_threads(2, _save, tmp_path)
    assert run_threads(2, _load, tmp_path) == [(FOUR[0], None, []), (FOUR[1], None, [])]
    got = run_threads(2, lambda topology: _load(topology, tmp_path, other_mode=1))
    assert [copies for _, copies, _ in got] == [FOUR[:2]] * 2
    assert [left for left, _, _ in got] == [[0, 2, 11], [1, 10, 12]]


@pytest.mark.parametrize(
    ("saved", "declared", "handed"),
    [
        ("per_rank", "global", FOUR[:2]),
        ("global", "per_rank", FOUR[:1]),
        ("replicated", "per_rank", FOUR[:1]),
        ("per_rank", "replicated", FOUR[:2]),
        ("per_group", "per_rank", FOUR[:1]),
        ("per_node", "per_group", FOUR[:1]),
        ("global", "replicated", FOUR[:1]),
    ],
)
def test_another_pattern_than_it_was_saved_under_is_a_change_too(
    tmp_path: Path, saved: str, declared: str, handed: list[list[int]]
) -> None:
    run_threads(2, _save, tmp_path, saved)
    for _, copies, _ in run_threads(2, _load, tmp_path, declared):
        assert copies == handed


@pytest.mark.parametrize("pattern", ["global", "replicated"])
def test_one_copy_for_all_fits_any_number_of_ranks_unless_the_object_says_otherwise(
    tmp_path: Path, pattern: str
) -> None:
    run_threads(2, _save, tmp_path, pattern)
    assert run_threads(3, _load, tmp_path, pattern) == [(FOUR[0], None, [])] * 3
    got = run_threads(3, lambda topology: _load(topology, tmp_path, pattern, other_mode=2))
    assert [copies for _, copies, _ in got] == [FOUR[:1]] * 3


def test_derive_is_given_the_first_copy_alone(tmp_path: Path) -> None:
    run_threads(3, _save, tmp_path)
    for _, copies, tensors in run_threads(2, _load, tmp_path, "per_rank", "derive"):
        assert (copies, tensors) == (FOUR[:1], [[0.0] * 3])


def test_nodes_and_groups_that_changed_are_shared_out_in_their_order(tmp_path: Path) -> None:
    run_ranks(4, _save, tmp_path / "node", "per_node", nodes=[2, 2])
    run_ranks(4, _save, tmp_path / "group", "per_group", nodes=[2, 2])
    for pattern in ("node", "group"):
        for _, copies, _ in run_ranks(3, _load, tmp_path / pattern, f"per_{pattern}", nodes=[2, 1]):
            assert copies == FOUR[:2]


def _load_after_model(topology: Topology, root: Path, required: bool) -> tuple[str, bool]:
    model, queue = Held({"w": torch.zeros(5, 4)}), Refusing(topology, [-1])
    data = component(queue, required=required)
    made = coordinator(topology, root, [data, StateComponent("model", model, "replicated")])
    try:
        made.load_checkpoint()
    except CheckpointError as error:
        said = str(error)
    else:
        assert made.last_load is not None
        said = made.last_load.summary()
    return said, same_bits(model.state["w"], global_index((5, 4)))


def _save_with_model(topology: Topology, root: Path) -> None:
    model = StateComponent("model", Held({"w": global_index((5, 4))}), "replicated")
    coordinator(topology, root, [component(Queue(topology, [topology.rank])), model]).save_checkpoint(checkpoint_id="1")


def test_an_object_that_cannot_follow_refuses_the_load_on_all_ranks_or_if_optional_only_itself(tmp_path: Path) -> None:
    run_threads(3, _save_with_model, tmp_path)
    required = run_threads(2, _load_after_model, tmp_path, True)
    assert {said for said, _ in required} == {
        "load of checkpoint-1 failed in phase apply on rank 1: data: ValueError: 3 queues cannot be shared out"
    }
    optional = run_threads(2, _load_after_model, tmp_path, False)
    assert (
        optional
        == [
            (
                "data: failed: ValueError: 3 queues cannot be shared out (rank 1)\nmodel: restored, all 40 elements",
                True,
            )
        ]
        * 2
    )


def _fail_elsewhere(topology: Topology, root: Path) -> tuple[str, bool]:
    queue = Queue(topology, [-1])
    model = StateComponent("model", Fitted({"w": torch.zeros(4, 4)}), "replicated")
    with pytest.raises(CheckpointError) as caught:
        coordinator(topology, root, [component(queue), model]).load_checkpoint()
    return str(caught.value), queue.changed is None


def test_nothing_is_handed_out_before_all_components_are_found_to_fit(tmp_path: Path) -> None:
    run_threads(3, _save_with_model, tmp_path)
    for said, untouched in run_threads(2, _fail_elsewhere, tmp_path):
        assert "the checkpoint holds global shape [5, 4]" in said
        assert untouched


def _load_refusing(topology: Topology, root: Path) -> str:
    with pytest.raises(WorldSizeError) as caught:
        coordinator(topology, root, [StateComponent("data", Queue(topology), "per_rank")]).load_checkpoint()
    return str(caught.value)


def test_the_same_object_without_elastic_still_refuses(tmp_path: Path) -> None:
    run_threads(3, _save, tmp_path)
    assert all("is per_rank and was saved by 3 ranks" in said for said in run_threads(2, _load_refusing, tmp_path))


def test_a_damaged_copy_of_another_rank_is_the_components_damage(tmp_path: Path) -> None:
    run_threads(3, _save_with_model, tmp_path)
    plain = tmp_path / "checkpoint-1" / "data" / "rank-00002" / "plain.json"
    plain.write_bytes(plain.read_bytes().replace(b"2", b"3", 1))

    def load_on(topology: Topology, required: bool, verify: bool) -> str:
        model = StateComponent("model", Held({"w": torch.zeros(5, 4)}), "replicated")
        data = component(Queue(topology, [-1]), required=required)
        made = coordinator(topology, tmp_path, [data, model], verify=verify)
        try:
            made.load_checkpoint(tmp_path / "checkpoint-1")
        except CorruptCheckpointError as error:
            return str(error)
        assert made.last_load is not None
        return made.last_load.summary()

    for verify in (True, False):  # found with the other files, or when the lead reads the copies
        for required in (True, False):
            said = run_threads(2, load_on, required, verify)
            assert len(set(said)) == 1
            assert "rank-00002/plain.json" in said[0]
            if not required:
                assert said[0].startswith("data: failed: ")
                assert said[0].endswith("model: restored, all 40 elements")


# Rebuilt, taken from any replica, refused

SMALL, LARGE = (3, 5), (48, 1000)  # packed with others, and an array of its own
OWN = ("per_rank", "per_node", "per_group")


def _state(topology: Topology, pattern: str, differing: str | None) -> dict[str, Any]:
    """Equal wherever it is held, but for one entry that says whose it is."""
    whose = {"per_rank": topology.rank, "per_node": topology.node_rank, "per_group": topology.rank // 2}.get(pattern, 0)
    small = global_index(SMALL).to(torch.bfloat16)
    state: dict[str, Any] = {"small": small, "large": global_index(LARGE), "table": {"n": [1, 2.5]}}
    state["again"] = state["large"]  # a second name of one tensor
    if differing == "n":
        state["table"]["n"][0] = whose
    elif differing is not None and whose:
        state[differing][-1, -1] = -1
    return state


def _save_one(topology: Topology, root: Path, pattern: str, differing: str | None, backend: str) -> None:
    group = "dp" if pattern == "per_group" else None
    one = StateComponent("x", Held(_state(topology, pattern, differing)), pattern, process_group_name=group)
    anchor = StateComponent("model", Held({"w": global_index((5, 4))}), "replicated")
    made = coordinator(topology, root, [anchor, one], backend=backend, process_groups=groups(topology))
    made.save_checkpoint(checkpoint_id="1")


def _load_one(topology: Topology, root: Path, pattern: str, elastic: str) -> tuple[str, bool, bool]:
    """What the load says; whether the object has the saved state of the first copy; whether it has its own still."""
    own = {"small": torch.full(SMALL, -7.0).to(torch.bfloat16), "large": torch.full(LARGE, -7.0), "table": {"n": 9}}
    own["again"] = own["large"]
    held = Held(own)
    group = "dp" if pattern == "per_group" else None
    one = StateComponent("x", held, pattern, elastic=elastic, process_group_name=group)
    model = Held({"w": torch.zeros(5, 4)})
    made = coordinator(
        topology, root, [StateComponent("model", model, "replicated"), one], process_groups=groups(topology)
    )
    try:
        made.load_checkpoint()
    except WorldSizeError as error:
        assert torch.all(model.state["w"] == 0), "nothing may have been read"
        said = str(error)
    else:
        assert made.last_load is not None
        assert same_bits(model.state["w"], global_index((5, 4)))
        said = made.last_load.summary().splitlines()[1]
    wanted = _state(Topology.alone(), pattern, None)
    has_saved = held.loaded is not None and held.loaded["table"] == wanted["table"]
    has_saved = has_saved and all(same_bits(held.loaded[key], wanted[key]) for key in ("small", "large", "again"))
    keeps_own = held.loaded is None and bool(torch.all(own["large"] == -7) and torch.all(own["small"] == -7))
    return said, has_saved, keeps_own


CHANGED = {
    "per_rank": "saved by 4 ranks, this run has 3",
    "per_node": "saved by nodes of ranks [[0, 1], [2, 3]], this run has [[0, 1], [2]]",
    "per_group": "saved by groups dp = [[0, 1], [2, 3]], this run has [[0, 1], [2]]",
}
CHANGED |= dict.fromkeys(("global", "replicated", "sharded"), CHANGED["per_rank"])


@pytest.mark.parametrize("pattern", CHANGED)
def test_what_is_to_be_rebuilt_stays_as_built_where_ranks_nodes_or_groups_have_changed(
    tmp_path: Path, pattern: str
) -> None:
    run_threads(4, _save_one, tmp_path, pattern, None, "zarr", nodes=[2, 2])
    for said, has_saved, keeps_own in run_threads(3, _load_one, tmp_path, pattern, "rebuild", nodes=[2, 1]):
        assert said == f"x: skipped: rebuilt: {CHANGED[pattern]}"
        assert keeps_own and not has_saved
    for said, has_saved, _ in run_threads(4, _load_one, tmp_path, pattern, "rebuild", nodes=[2, 2]):
        assert said.startswith("x: restored, all ")
        assert has_saved


@pytest.mark.parametrize("pattern", ["global", "replicated", "sharded"])
def test_what_all_ranks_share_may_refuse_another_number_of_them(tmp_path: Path, pattern: str) -> None:
    run_threads(2, _save_one, tmp_path, pattern, None, "zarr")
    for said, _, keeps_own in run_threads(3, _load_one, tmp_path, pattern, "refuse"):
        assert (
            "component x has elastic=refuse: saved by 2 ranks, this run has 3. Run on the ranks that saved it, " in said
        )
        assert keeps_own
    assert all(has_saved for _, has_saved, _ in run_threads(2, _load_one, tmp_path, pattern, "refuse"))


@sampled("backend", ["zarr", "ocdbt", "safetensors"])
@pytest.mark.parametrize("pattern", OWN)
def test_a_replica_is_taken_for_ranks_that_never_were_if_all_saved_copies_are_equal(
    tmp_path: Path, pattern: str, backend: str
) -> None:
    run_threads(4, _save_one, tmp_path, pattern, None, backend, nodes=[2, 2])
    for said, has_saved, _ in run_threads(3, _load_one, tmp_path, pattern, "replica", nodes=[2, 1]):
        assert said.startswith("x: restored, all ")
        assert has_saved


@pytest.mark.parametrize("differing", ["small", "large", "n"])
@pytest.mark.parametrize("pattern", OWN)
def test_one_value_that_differs_between_copies_refuses_to_take_any_of_them(
    tmp_path: Path, pattern: str, differing: str
) -> None:
    run_threads(4, _save_one, tmp_path, pattern, differing, "zarr", nodes=[2, 2])
    entry = "table.n" if differing == "n" else "large" if differing == "large" else differing
    for said, _, keeps_own in run_threads(3, _load_one, tmp_path, pattern, "replica", nodes=[2, 1]):
        assert (
            f"takes any copy where all are equal, but the saved ones differ in {entry}, and it was {CHANGED[pattern]}."
            in said
        )
        assert keeps_own


def test_a_replica_on_the_same_ranks_is_each_ranks_own(tmp_path: Path) -> None:
    def save_and_load(topology: Topology) -> None:
        own = global_index(SMALL) + topology.rank
        made = coordinator(topology, tmp_path, [StateComponent("x", Held({"w": own.clone()}), "per_rank")])
        made.save_checkpoint(checkpoint_id="1")
        held = Held({"w": torch.zeros(SMALL)})
        coordinator(topology, tmp_path, [StateComponent("x", held, "per_rank", elastic="replica")]).load_checkpoint()
        assert same_bits(held.state["w"], own)

    run_threads(3, save_and_load)


def test_rebuilding_does_not_excuse_a_changed_declaration(tmp_path: Path) -> None:
    run_threads(2, _save_one, tmp_path, "per_rank", None, "zarr")

    def load(topology: Topology) -> str:
        one = StateComponent("x", Held({}), "replicated", elastic="rebuild")
        with pytest.raises(MissingStateError) as caught:
            coordinator(topology, tmp_path, [one]).load_checkpoint()
        return str(caught.value)

    assert all("x was saved as per_rank and is now declared replicated" in said for said in run_threads(3, load))


def test_a_load_that_rebuilds_all_there_is_restores_nothing_and_says_so(tmp_path: Path) -> None:
    run_threads(2, _save_one, tmp_path, "per_rank", None, "zarr")

    def load(topology: Topology) -> str:
        one = StateComponent("x", Held({}), "per_rank", elastic="rebuild")
        with pytest.raises(MissingStateError) as caught:
            coordinator(topology, tmp_path, [one]).load_checkpoint()
        return str(caught.value)

    for said in run_threads(3, load):
        assert "nothing could be restored: x: skipped: rebuilt: saved by 2 ranks, this run has 3." in said
