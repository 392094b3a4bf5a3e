"""Each validation level, over whole saves: what it finds, that the level below it misses that, and that all ranks hear the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import StateComponent
from ckpt.backends.base import Writer
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import CheckpointError, ConfigurationError, ReplicationError, ShapeMismatchError
from ckpt.ranks.topology import Topology
from ckpt.state.replication import MAX_NAMED
from recipes.benchmark.validation_costs import MEASUREMENT
from tests.conf.configs import config
from tests.support.covering import sampled
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import ALL_DTYPES, Held, coordinator, random_bits, same_bits

LEVELS = ("none", "quick", "tensor", "full")
SHAPE = (200, 120)
OUTSIDE = 15
"""An element that the sample of the level "quick" does not hold; the tests of `replication` show that most are like it."""


def optimizer_state() -> dict[str, Any]:
    """As torch's Adam gives it, three levels deep, with moments in bfloat16, and a step of no dimensions."""
    moments = {name: random_bits(SHAPE, torch.bfloat16, seed) for seed, name in enumerate(("exp_avg", "exp_avg_sq"))}
    state: dict[str, Any] = {"state": {0: {"step": torch.tensor(7.0), **moments}}, "param_groups": [{"lr": 0.1}]}
    state["all"] = {str(dtype): random_bits((30, 20), dtype, 3) for dtype in ALL_DTYPES}
    return state


def flip_lowest_bit(tensor: torch.Tensor, at: int = OUTSIDE) -> None:
    flat = tensor.view(-1)
    if tensor.dtype is torch.bool:
        flat[at] = ~flat[at]
    else:
        flat[at : at + 1].view(torch.uint8)[0] ^= 1


def a_missing_key(state: dict[str, Any]) -> None:
    del state["state"][0]["exp_avg_sq"]


def a_key_too_many(state: dict[str, Any]) -> None:
    state["state"][1] = {"step": torch.tensor(7.0)}


def another_type(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].view(torch.float16)


def another_shape(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].view(SHAPE[1], SHAPE[0])


def another_step_of_no_dimensions(state: dict[str, Any]) -> None:
    state["state"][0]["step"] += 1


def another_plain_value(state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] = 0.2


def moments_that_went_apart(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"].neg_()


def one_low_bit_three_levels_deep(state: dict[str, Any]) -> None:
    flip_lowest_bit(state["state"][0]["exp_avg_sq"])


def one_low_bit_of_each(dtypes: Sequence[torch.dtype]) -> Callable[[dict[str, Any]], None]:
    def plant(state: dict[str, Any]) -> None:
        for dtype in dtypes:
            flip_lowest_bit(state["all"][str(dtype)])

    return plant


IN_FIVES = [ALL_DTYPES[at : at + MAX_NAMED] for at in range(0, len(ALL_DTYPES), MAX_NAMED)]
"""A sentence names as many."""

PLANTED: dict[str, tuple[Callable[[dict[str, Any]], None], str, str | tuple[str, ...]]] = {
    "a missing key": (a_missing_key, "quick", "state.0.exp_avg_sq on rank 2 (which only rank 0 has)"),
    "a key too many": (a_key_too_many, "quick", "state.1.step on rank 2 (which alone has it)"),
    "another type": (another_type, "quick", "state.0.exp_avg on rank 2 (float16, not bfloat16)"),
    "another shape": (another_shape, "quick", "state.0.exp_avg on rank 2 (shape [120, 200], not [200, 120])"),
    "a step of no dimensions": (another_step_of_no_dimensions, "quick", "state.0.step on rank 2"),
    "a plain value": (another_plain_value, "quick", "param_groups on rank 2 ([{'lr': 0.2}], not [{'lr': 0.1}])"),
    "moments that went apart": (moments_that_went_apart, "quick", "state.0.exp_avg on rank 2"),
    "one low bit": (one_low_bit_three_levels_deep, "tensor", "state.0.exp_avg_sq on rank 2"),
    **{
        f"one low bit of each {', '.join(map(str, dtypes))}": (
            one_low_bit_of_each(dtypes),
            "tensor",
            tuple(f"all.{dtype} on rank 2" for dtype in dtypes),
        )
        for dtypes in IN_FIVES
    },
}
REFUSED_WITHOUT_COMPARING = {"another type", "another shape"}
"""No checkpoint can hold an array of two types or shapes, so the plan of the save refuses these by itself."""


def save_at_every_level(topology: Topology, root: Path, plant: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    state = optimizer_state()
    if topology.rank == 2:
        plant(state)
    said: dict[str, Any] = {}
    for level in LEVELS:
        component = StateComponent(
            "optimizer", Held(state), "replicated", validate_replication=True, validation_level=level
        )
        made = coordinator(topology, root / level, [component], pattern_check="off")
        try:
            made.save_checkpoint(checkpoint_id="1")
        except CheckpointError as error:
            said[level] = error
    return said


@sampled("planted", PLANTED, 9)
def test_a_planted_difference_is_found_by_its_level_and_missed_by_the_one_below(tmp_path: Path, planted: str) -> None:
    plant, found_from, says = PLANTED[planted]
    said = run_threads(3, save_at_every_level, tmp_path, plant)
    finding = LEVELS[LEVELS.index(found_from) :]
    missing = [level for level in LEVELS if level not in finding]
    for of_rank in said:
        for level in missing:
            if planted in REFUSED_WITHOUT_COMPARING:
                assert isinstance(of_rank[level], ShapeMismatchError)
            else:
                assert level not in of_rank
        for level in finding:
            assert type(of_rank[level]) is ReplicationError
            assert str(of_rank[level]) == str(said[0][level])
            text = str(of_rank[level])
            assert "component optimizer should be the same on ranks 0, 1, 2, but differs from rank 0 in " in text
            if level != "full":
                assert all(one in text for one in ((says,) if isinstance(says, str) else says)), text
            assert not list((tmp_path / level).glob("*checkpoint-*"))


def test_full_says_how_many_elements_differ_where_and_how_far(tmp_path: Path) -> None:
    def plant(state: dict[str, Any]) -> None:
        moments = state["state"][0]["exp_avg"]
        moments.copy_(optimizer_state()["state"][0]["exp_avg"].nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1))
        moments[150, 30] += 1

    def clean(state: dict[str, Any]) -> None:
        plant(state)
        state["state"][0]["exp_avg"][150, 30] -= 1

    def save(topology: Topology, root: Path) -> str:
        state = optimizer_state()
        clean(state)
        if topology.rank == 2:
            plant(state)
        component = StateComponent("o", Held(state), "replicated", validate_replication=True, validation_level="full")
        with pytest.raises(ReplicationError) as caught:
            coordinator(topology, root, [component]).save_checkpoint(checkpoint_id="1")
        return str(caught.value)

    (said,) = set(run_threads(3, save, tmp_path))
    assert "in state.0.exp_avg on rank 2 (1 element, the first at [150, 30], by up to 1). Choose another" in said


class Meddling(ZarrBackend):
    """Storage during whose writing a training step goes on."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def writer(self, *args: Any) -> Writer:
        for weight in self.weights.values():
            weight.add_(1)
        return super().writer(*args)


def save_while_training(topology: Topology, root: Path) -> dict[str, str]:
    said = {}
    for level in LEVELS:
        weights = {f"w{n}": torch.zeros(300, 400) for n in range(6)}  # so that every rank writes of them
        component = StateComponent(
            "model", Held({"h": weights}), "replicated", validate_replication=True, validation_level=level
        )
        backend = Meddling(weights) if topology.rank == 1 else ZarrBackend()
        made = coordinator(topology, root / level, [component], backend=backend)
        try:
            made.save_checkpoint(checkpoint_id="1")
        except ReplicationError as error:
            said[level] = str(error)
            assert error.rank == 1
    return said


def test_full_alone_finds_a_tensor_that_was_changed_while_it_was_being_saved(tmp_path: Path) -> None:
    """All copies were equal when they were compared, and what was written holds parts of two moments."""
    said = run_threads(3, save_while_training, tmp_path)
    assert said[0] == said[1] == said[2]
    assert list(said[0]) == ["full"]
    assert (
        "component model was changed while it was being saved, in h.w0, h.w1, h.w2, h.w3, h.w4 and 1 more; "
        in said[0]["full"]
    )
    assert not list((tmp_path / "full").glob("*checkpoint-*"))
    weights = {f"w{n}": torch.full((300, 400), -1.0) for n in range(6)}
    loaded = Held({"h": weights})
    coordinator(
        Topology.alone(), tmp_path / "tensor", [StateComponent("model", loaded, "replicated")]
    ).load_checkpoint()
    assert {value for weight in weights.values() for value in weight.unique().tolist()} == {0.0, 1.0}


GROUPS = {"pairs": [[0, 2], [1, 3]]}


def save_within_sets(topology: Topology, root: Path, pattern: str, odd_one: int) -> dict[str, str]:
    """Four ranks on two hosts, each set of equal ranks with a value of its own; one rank differs from its set."""
    pair = next(ranks for ranks in GROUPS["pairs"] if topology.rank in ranks)
    seed = {"replicated": 0, "per_group": pair[0], "per_node": 10 + topology.node_rank}[pattern]
    w = random_bits(SHAPE, torch.bfloat16, seed)
    if topology.rank == odd_one:
        flip_lowest_bit(w)
    said = {}
    for level in LEVELS:
        component = StateComponent(
            "x",
            Held({"a": {"b": {"w": w}}}),
            pattern,
            process_group_name="pairs" if pattern == "per_group" else None,
            validate_replication=True,
            validation_level=level,
        )
        groups = {"pairs": pair}
        made = coordinator(topology, root / level, [component], process_groups=groups, pattern_check="off")
        try:
            made.save_checkpoint(checkpoint_id="1")
        except ReplicationError as error:
            said[level] = str(error)
    return said


@pytest.mark.parametrize(
    ("pattern", "odd_one", "says"),
    [
        ("replicated", 3, "on ranks 0, 1, 2, 3, but differs from rank 0 in a.b.w on rank 3"),
        ("per_group", 3, "on ranks 1, 3, but differs from rank 1 in a.b.w on rank 3"),
        ("per_group", 0, "on ranks 0, 2, but differs from rank 0 in a.b.w on rank 2"),
        ("per_node", 3, "on ranks 2, 3, but differs from rank 2 in a.b.w on rank 3"),
    ],
)
def test_copies_are_compared_inside_groups_and_nodes(tmp_path: Path, pattern: str, odd_one: int, says: str) -> None:
    said = run_threads(4, save_within_sets, tmp_path, pattern, odd_one, nodes=[2, 2])
    for of_rank in said:
        assert of_rank == said[0]
        assert list(of_rank) == ["tensor", "full"]
        assert says in of_rank["tensor"]


def test_groups_and_nodes_whose_copies_are_equal_are_saved(tmp_path: Path) -> None:
    for pattern in ("replicated", "per_group", "per_node"):
        assert run_threads(4, save_within_sets, tmp_path / pattern, pattern, -1, nodes=[2, 2]) == [{}] * 4


def _real_ranks(topology: Topology, root: Path) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 64, dtype=torch.bfloat16)).float().square().sum().backward()
    optimizer.step()
    if topology.rank == 1:
        flip_lowest_bit(optimizer.state[model.weight]["exp_avg"])
    said = []
    for level in ("quick", "tensor", "full"):
        declared = [
            StateComponent("model", model, "replicated", validate_replication=True, validation_level=level),
            StateComponent(
                "optimizer",
                torch.optim.AdamW(model.named_parameters()) if level == "quick" else Held(optimizer.state_dict()),
                "replicated",
                validate_replication=True,
                validation_level=level,
            ),
        ]
        try:
            coordinator(topology, root / level, declared).save_checkpoint(checkpoint_id="1")
        except ReplicationError as error:
            said.append(str(error))
    return said


def test_a_real_optimizer_on_real_ranks_is_compared_to_the_bit(tmp_path: Path) -> None:
    said = run_ranks(2, _real_ranks, tmp_path)
    assert said[0] == said[1]
    at_tensor, at_full = said[0]
    assert (
        "component optimizer should be the same on ranks 0, 1, but differs from rank 0 in state.0.exp_avg on rank 1"
        in at_tensor
    )
    assert "state.0.exp_avg on rank 1 (1 element, the first at [0, 15], by up to " in at_full


class Wrapper(Held):
    """A wrapped optimizer that keeps notes of its rank beside what is the same everywhere."""

    rank_private = ("note.*", "device")


def wrapped(rank: int) -> dict[str, Any]:
    buffers = {f"buffer{n}": torch.full((300, 100), rank) for n in range(4)}  # large enough to be spread over the ranks
    notes = {"of_rank": rank, "scalar": torch.tensor(rank), **buffers}
    return {"w": random_bits(SHAPE, torch.float32, 1), "lr": 0.1, "note": notes, "device": f"cuda:{rank}"}


def save_wrapped(topology: Topology, root: Path, kind: type[Held], level: str | None) -> str | None:
    component = StateComponent(
        "optimizer",
        kind(wrapped(topology.rank)),
        "replicated",
        validate_replication=level is not None,
        validation_level=level,
    )
    try:
        coordinator(topology, root, [component]).save_checkpoint(checkpoint_id="1", validate=level == "tensor")
    except ReplicationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("level", [None, "quick", "tensor", "full"])
def test_entries_that_are_each_rank_s_own_are_left_out_and_the_first_rank_s_are_saved_whole(
    tmp_path: Path, level: str | None
) -> None:
    assert run_threads(3, save_wrapped, tmp_path, Wrapper, level) == [None] * 3
    held = Held(wrapped(-1))
    coordinator(Topology.alone(), tmp_path, [StateComponent("optimizer", held, "replicated")]).load_checkpoint()
    assert held.loaded is not None
    for n in range(4):
        assert same_bits(held.state["note"][f"buffer{n}"], torch.zeros(300, 100, dtype=torch.int64))
    assert (held.loaded["note"]["of_rank"], held.loaded["device"], held.loaded["lr"]) == (0, "cuda:0", 0.1)


def test_a_wrapper_that_does_not_name_its_own_entries_is_refused_with_their_names(tmp_path: Path) -> None:
    (said,) = set(run_threads(3, save_wrapped, tmp_path, Held, "tensor"))
    assert said is not None
    for text in ("note.buffer3 on rank 1, 2", "note.scalar on rank 1, 2", "list the entries that are each rank's own",
                 "rank_private", "component optimizer with validation_level=none"):  # fmt: skip
        assert text in said
    (said,) = set(run_threads(3, save_wrapped, tmp_path, Held, None))
    assert said is not None
    assert "device on rank 1 ('cuda:1', not 'cuda:0'), 2 ('cuda:2', not 'cuda:0')" in said


def test_a_wrapper_whose_owner_wants_nothing_compared_is_saved_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_threads(2, save_wrapped, tmp_path, Held, "none") == [None] * 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("optimizer is declared REPLICATED, but ranks 0 and 1 differ in `note.scalar`")
    assert warning.endswith("(loses state)")


def save_with_levels_of_their_own(topology: Topology, root: Path) -> str:
    level = ("tensor", "quick")[topology.rank]
    component = StateComponent(
        "m", Held({"w": torch.zeros(500)}), "replicated", validate_replication=True, validation_level=level
    )
    with pytest.raises(ConfigurationError) as caught:
        coordinator(topology, root, [component]).save_checkpoint(checkpoint_id="1")
    return str(caught.value)


def test_ranks_that_compare_at_different_levels_are_told_so(tmp_path: Path) -> None:
    (said,) = set(run_threads(2, save_with_levels_of_their_own, tmp_path))
    assert (
        "component m is compared at the level tensor on rank 0 and quick on rank 1; all ranks must declare the same"
        in said
    )


def save_pieces(topology: Topology, root: Path, odd_one: int) -> str | None:
    """A replicated component that holds a sharded tensor: ranks 0 and 2 have its first rows, 1 and 3 its last."""
    from ckpt.dist_checkpointing import ShardedTensor

    half = random_bits((100, 120), torch.bfloat16, topology.rank % 2)
    if topology.rank == odd_one:
        flip_lowest_bit(half)
    state = {"w": ShardedTensor.from_rank_offsets("w", half, (0, topology.rank % 2, 2)), "norm": torch.ones(5)}
    component = StateComponent("m", Held(state), "replicated", validate_replication=True)
    try:
        coordinator(topology, root, [component]).save_checkpoint(checkpoint_id="1")
    except ReplicationError as error:
        return str(error)
    return None


def test_pieces_of_a_tensor_in_a_replicated_component_are_compared_with_their_like(tmp_path: Path) -> None:
    assert run_threads(4, save_pieces, tmp_path / "equal", -1) == [None] * 4
    (said,) = set(run_threads(4, save_pieces, tmp_path / "differing", 3))
    assert said is not None
    assert "but differs from rank 1 in w [100:200, 0:120] of [200, 120] on rank 3" in said


def test_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    for level in LEVELS:
        component = StateComponent(
            "m", Held(optimizer_state()), "replicated", validate_replication=True, validation_level=level
        )
        coordinator(Topology.alone(), tmp_path / level, [component]).save_checkpoint(checkpoint_id="1", validate=True)
        assert (tmp_path / level / "checkpoint-1").is_dir()


def test_the_costs_are_measured_beside_a_save_that_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config(tmp_path, "model.size=nano", "train.batch_size=2", f"data.path={Path(__file__).parent}")
    result = MEASUREMENT.run(cfg | {"benchmark": MEASUREMENT.checked_keys({"repeats": 2})}, Topology.alone())
    assert list(result["medians"]) == [*LEVELS, "doctor", "bare hash", "save"]
    assert all(len(rows) == 2 and min(row["total_s"] for row in rows) > 0 for rows in result["rounds"].values())
    none, full, save = (result["rounds"][name][0] for name in ("none", "full", "save"))
    assert (none["more_s"], save["more_s"]) == (0, save["total_s"])
    assert full["more_s"] == full["total_s"] - none["total_s"]
    assert full["per_gb_s"] == pytest.approx(full["more_s"] * 1e9 / result["bytes"])
    assert [path.name for path in tmp_path.iterdir()] == ["benchmark.json"]
    MEASUREMENT.show(result)
    assert "on 1 rank, ddp" in " ".join(capsys.readouterr().out.split())
    for wrong in ({"repeats": 0}, {"repeats": "x"}, {"repeat": 1}):
        with pytest.raises(ConfigurationError, match=r"benchmark\.repeats"):
            MEASUREMENT.checked_keys(wrong)
