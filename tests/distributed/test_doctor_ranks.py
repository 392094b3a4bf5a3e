"""The doctor over whole saves: right declarations are saved without a word, wrong ones refused on all ranks before a byte moves."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import recipes.doctor
from ckpt import StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CheckpointError, ConfigurationError, ReplicationError
from ckpt.ranks.topology import Topology
from ckpt.state import replication
from ckpt.state.pattern_check import examine
from ckpt.storage.stored import read_manifest
from recipes.commands import patterns
from tests.conf.configs import config
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Held, coordinator, random_bits

SHAPE = (120, 50)


def grid_of(topology: Topology) -> dict[str, list[int]]:
    """Neighbours hold different shards of one model, ranks 0 and 2 and ranks 1 and 3 the same."""
    rank = topology.rank
    return {"tp_group": [rank // 2 * 2, rank // 2 * 2 + 1], "dp_group": [rank % 2, rank % 2 + 2]}


def state_by(number: int) -> dict[str, Any]:
    """An optimizer's state of one shard, three levels deep."""
    moments = {name: random_bits(SHAPE, torch.bfloat16, 10 * number + at) for at, name in enumerate(("m", "v"))}
    state = {"h.0.attn.weight": {"step": torch.tensor(3.0), **moments}}
    return {"state": state, "param_groups": {"h.0.attn.weight": {"lr": 0.1}}}


def stage_of(number: int) -> dict[str, Any]:
    return {f"h.{number}.weight": random_bits(SHAPE, torch.float32, number), "norm": torch.ones(50)}


def held_as(what: str, topology: Topology) -> dict[str, Any]:
    """A state of each kind: what is equal on all ranks, in each column or row of the grid, or nowhere."""
    rank, column = topology.rank, topology.rank % 2
    match what:
        case "all":
            return state_by(7)
        case "column":
            return state_by(column)
        case "row":
            return state_by(rank // 2)
        case "rank":
            return {"cpu": list(range(rank, rank + 5)), "seed": 3}
        case "stages":
            return stage_of(column)
        case "pieces":
            half = random_bits(SHAPE, torch.float32, column)
            return {"w": ShardedTensor.from_rank_offsets("w", half, (0, column, 2))}
        case "torn pieces":
            half = random_bits(SHAPE, torch.float32, rank)
            return {"w": ShardedTensor.from_rank_offsets("w", half, (0, column, 2))}
        case "wrapper":
            return {**state_by(7), "device": f"cuda:{rank}"}
        case "rank 0":
            return {"log": torch.arange(5.0)} if rank == 0 else {}
    raise AssertionError(what)


def save_declared(topology: Topology, root: Path, what: str, declared: str, check: str) -> str | None:
    pattern, _, group = declared.partition(" ")
    component = StateComponent("optimizer", Held(held_as(what, topology)), pattern, process_group_name=group or None)
    made = coordinator(topology, root, [component], process_groups=grid_of(topology), pattern_check=check)
    try:
        made.save_checkpoint(checkpoint_id="1")
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return None


RIGHT = {
    "all": ("replicated",),
    "column": ("per_group dp_group",),
    "row": ("per_group tp_group", "per_node"),
    "rank": ("per_rank",),
    "stages": ("sharded", "per_group dp_group"),
    "pieces": ("sharded", "replicated", "global"),
    "wrapper": ("per_rank",),
    "rank 0": ("global",),
}
LOSING = {
    ("column", "per_group tp_group"): "optimizer is declared PER_GROUP tp_group, but its members differ in "
    "`state.h.0.attn.weight.m` and 1 more of 4 entries: ranks 0 and 1; the group whose members agree is dp_group",
    ("column", "replicated"): "but ranks 0 and 1 differ in `state.h.0.attn.weight.m` and 1 more of 4 entries",
    ("column", "global"): "which keeps what rank 0 holds, but others differ from it in `state.h.0.attn.weight.m`",
    ("column", "per_node"): "but the ranks of one host differ in `state.h.0.attn.weight.m`",
    ("column", "sharded"): "but ranks 0 and 1 both hold `state.h.0.attn.weight.m`, and not the same",
    (
        "row",
        "per_group dp_group",
    ): "but its members differ in `state.h.0.attn.weight.m` and 1 more of 4 entries: ranks 0 and 2; "
    "the group whose members agree is tp_group",
    ("row", "replicated"): "but ranks 0 and 2 differ in `state.h.0.attn.weight.m`",
    ("stages", "global"): "but others differ from it in `h.0.weight` and 1 more of 3 entries",
    ("torn pieces", "sharded"): "but ranks 0 and 2 both hold `w` [0:120, 0:50] of [240, 50], and not the same",
}
WASTEFUL = {
    (
        "all",
        "per_rank",
    ): "but ranks 0 and 1 hold equal bits, which are saved once for each of 4 copies, 0.072012 MB more than need be; "
    "as REPLICATED nothing is saved twice",
    ("all", "global"): "so rank 0 writes it alone, but all 4 ranks hold equal bits of it",
    ("all", "per_node"): "but ranks 0 and 2 hold equal bits",
    ("column", "per_rank"): "as PER_GROUP dp_group nothing is saved twice",
    ("stages", "per_rank"): "as SHARDED nothing is saved twice",
    ("rank", "global"): "but others differ from it in `cpu`",
}


@pytest.mark.parametrize(("what", "declared"), [(what, one) for what, ones in RIGHT.items() for one in ones])
def test_a_right_declaration_is_saved_without_a_word(
    tmp_path: Path, what: str, declared: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_threads(4, save_declared, tmp_path, what, declared, "error", nodes=[2, 2]) == [None] * 4
    assert caplog.records == []


@pytest.mark.parametrize(("what", "declared"), LOSING)
def test_a_declaration_that_loses_state_is_refused_on_all_ranks_before_a_byte_moves(
    tmp_path: Path, what: str, declared: str
) -> None:
    for check in ("warn", "error"):
        said = run_threads(4, save_declared, tmp_path, what, declared, check, nodes=[2, 2])
        assert said == said[:1] * 4
        assert "ReplicationError: save of checkpoint-1: optimizer is declared " in str(said[0])
        assert LOSING[what, declared] in str(said[0])
        assert str(said[0]).endswith("To save in spite of it, set pattern_check=off.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("what", "declared"), WASTEFUL)
def test_what_is_wasteful_or_suspicious_is_told_once_or_refused_by_error(
    tmp_path: Path, what: str, declared: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_threads(4, save_declared, tmp_path, what, declared, "warn", nodes=[2, 2]) == [None] * 4
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert WASTEFUL[what, declared] in record.getMessage()
    said = run_threads(4, save_declared, tmp_path / "refused", what, declared, "error", nodes=[2, 2])
    assert said == said[:1] * 4
    assert WASTEFUL[what, declared] in str(said[0])
    assert str(said[0]).endswith("To save in spite of it, set pattern_check=warn.")
    assert not (tmp_path / "refused").exists()


def save_unseen(topology: Topology, root: Path) -> list[str]:
    """A component of each wrong declaration, in one save."""
    components = []
    for what, declared in [*LOSING, *WASTEFUL]:
        pattern, _, group = declared.partition(" ")
        key = f"{what}-as-{declared}".replace(" ", "-")
        held = Held(held_as(what, topology))
        components.append(StateComponent(key, held, pattern, process_group_name=group or None))
    made = coordinator(topology, root, components, process_groups=grid_of(topology), pattern_check="off")
    made.save_checkpoint(checkpoint_id="1")
    return [one.key for one in components]


def test_a_name_with_half_a_surrogate_pair_is_compared_like_any_other(tmp_path: Path) -> None:
    def save(topology: Topology) -> None:
        component = StateComponent("model", Held({"a\ud800": torch.full((3,), float(topology.rank))}), "per_rank")
        with coordinator(topology, tmp_path, [component]) as made:
            made.save_checkpoint(checkpoint_id="1")

    run_threads(2, save)
    assert (tmp_path / "checkpoint-1").is_dir()


def test_off_does_not_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = run_threads(4, save_unseen, tmp_path, nodes=[2, 2])
    assert caplog.records == []
    assert set(read_manifest(tmp_path / "checkpoint-1").components) == set(saved[0])
    assert len(saved[0]) == len(LOSING) + len(WASTEFUL)


def test_a_check_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="pattern_check=on: expected one of warn, error, off"):
        coordinator(Topology.alone(), tmp_path, [], pattern_check="on")


def save_twice(topology: Topology, root: Path, validate: bool) -> list[str]:
    """The second save has state that the first could not show."""
    state: dict[str, Any] = {"w": torch.zeros(500)}
    made = coordinator(topology, root, [StateComponent("model", Held(state), "replicated")])
    made.save_checkpoint(checkpoint_id="1")
    state["w"] += topology.rank
    said = []
    try:
        made.save_checkpoint(checkpoint_id="2", validate=validate)
    except ReplicationError as error:
        said.append(str(error))
    return said


def test_the_doctor_looks_at_the_first_save_only(tmp_path: Path) -> None:
    """What later differs is the business of validate_replication, which costs at every save."""
    assert run_threads(2, save_twice, tmp_path, False) == [[], []]


def _hashed_in_the_first_save(topology: Topology, root: Path, is_torn: bool) -> tuple[list[int], str]:
    """Save DTensors that are cut over all ranks, over pairs with a copy in each, and held whole; return the bytes of each tensor
    hashed, and the error."""
    whole, pairs = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    state = {
        "over all": distribute_tensor(random_bits((40, 8), torch.float32, 1), whole, [Shard(0)]),
        "over both": distribute_tensor(random_bits((48, 8), torch.float32, 2), pairs, [Shard(0), Shard(1)]),
        "over pairs": distribute_tensor(random_bits((56, 8), torch.float32, 3), pairs, [Replicate(), Shard(0)]),
        "whole": random_bits((64, 8), torch.float32, 4),
    }
    if is_torn and topology.rank == 3:
        state["over pairs"].to_local()[5, 5] += 1
    hashed, digest_of_all = [], replication._digest_of_all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replication, "_digest_of_all", lambda local: hashed.append(local.nbytes) or digest_of_all(local))
        made = coordinator(topology, root, [StateComponent("model", Held(state), "sharded")])
        try:
            made.save_checkpoint(checkpoint_id="1")
        except ReplicationError as error:
            return hashed, str(error)
    return hashed, ""


def test_pieces_that_no_other_rank_can_hold_are_not_hashed(tmp_path: Path) -> None:
    outcomes = run_ranks(4, _hashed_in_the_first_save, tmp_path, False, process_group=True)
    assert outcomes == [([28 * 8 * 4, 64 * 8 * 4], "")] * 4


def test_pieces_that_other_ranks_hold_are(tmp_path: Path) -> None:
    outcomes = run_ranks(4, _hashed_in_the_first_save, tmp_path, True, process_group=True)
    assert len({said for _, said in outcomes}) == 1
    assert "ranks 1 and 3 both hold `over pairs` [28:56, 0:8] of [56, 8], and not the same" in outcomes[0][1]


def save_sharded_twice(topology: Topology, root: Path) -> str:
    """Both ranks hold the same piece, which the second save finds different."""
    w = torch.zeros(500)
    state = {"w": ShardedTensor.from_rank_offsets("w", w)}
    made = coordinator(topology, root, [StateComponent("model", Held(state), "sharded")])
    made.save_checkpoint(checkpoint_id="1", validate=True)
    w += topology.rank
    with pytest.raises(ReplicationError) as caught:
        made.save_checkpoint(checkpoint_id="2", validate=True)
    return str(caught.value)


def test_a_save_that_is_to_be_validated_compares_the_copies_of_sharded_tensors_too(tmp_path: Path) -> None:
    (said,) = set(run_threads(2, save_sharded_twice, tmp_path))
    assert "model is declared SHARDED, but ranks 0 and 1 both hold `w` [0:500] of [500], and not the same" in said
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["checkpoint-1"]


def save_again_after_a_refusal(topology: Topology, root: Path) -> list[bool]:
    state = {"w": torch.full((500,), float(topology.rank))}
    made = coordinator(topology, root, [StateComponent("model", Held(state), "replicated")])
    refused = []
    for value in (None, None, 0.0):
        if value is not None:
            state["w"].fill_(value)
        try:
            made.save_checkpoint(checkpoint_id="1")
            refused.append(False)
        except ReplicationError:
            refused.append(True)
    return refused


def test_a_refused_save_is_examined_again_until_it_is_right(tmp_path: Path) -> None:
    assert run_threads(2, save_again_after_a_refusal, tmp_path) == [[True, True, False]] * 2


def declare_by_rank(topology: Topology, root: Path) -> str:
    pattern = ("replicated", "per_rank")[topology.rank]
    made = coordinator(topology, root, [StateComponent("model", Held({"n": 1}), pattern)])
    with pytest.raises(ConfigurationError) as caught:
        made.save_checkpoint(checkpoint_id="1")
    return str(caught.value)


def test_ranks_that_declare_different_things_are_told_so(tmp_path: Path) -> None:
    (said,) = set(run_threads(2, declare_by_rank, tmp_path))
    assert (
        "component model is declared REPLICATED on rank 0 and PER_RANK on rank 1; all ranks must declare the same"
        in said
    )


def count_bytes_sent(topology: Topology, root: Path) -> list[int]:
    """How much each rank sends to the lead for a component that all hold, and for one that goes by columns."""
    sent: list[int] = []
    exchange = topology.exchange

    def counted(name: str, outgoing: Any, sources: Any) -> Any:
        sent.append(sum(map(len, outgoing.values())))
        return exchange(name, outgoing, sources)

    topology.exchange = counted  # type: ignore[method-assign]
    components = [
        StateComponent("same", Held({f"w{n}": torch.zeros(3) for n in range(500)}), "replicated"),
        StateComponent("columns", Held(state_by(topology.rank % 2)), "per_group", process_group_name="dp_group"),
    ]
    made = coordinator(topology, root, components, process_groups=grid_of(topology))
    verdicts = [one.verdict.value for one in made.diagnose()]
    assert verdicts == ["ok", "ok"]
    return sent


def test_only_what_differs_is_sent_by_one_rank_of_each_kind_and_to_the_lead_alone(tmp_path: Path) -> None:
    zero, one, two, three = run_threads(4, count_bytes_sent, tmp_path)
    assert two == three == [0]
    assert 0 < zero[0] < 1000 and 0 < one[0] < 1000  # four entries, not five hundred
    assert list(tmp_path.iterdir()) == []


def _real_ranks(topology: Topology, root: Path) -> list[dict[str, Any]]:
    """A real run of two ranks: a module, its stepped optimizer, the generators; one declaration is right, two are not."""
    torch.manual_seed(0)
    model = nn.Linear(300, 100)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(3, 300)).square().sum().backward()
    optimizer.step()
    torch.manual_seed(topology.rank)
    components = [
        StateComponent("model", model, "replicated"),
        StateComponent("optimizer", optimizer, "per_rank"),
        StateComponent("rng", Held({"cpu": torch.get_rng_state()}), "replicated"),
    ]
    made = coordinator(topology, root, components)
    found = [one.to_json() for one in made.diagnose()]
    with pytest.raises(ReplicationError, match="rng is declared REPLICATED, but ranks 0 and 1 differ in `cpu`"):
        made.save_checkpoint(checkpoint_id="1")
    return found


def test_real_ranks_hear_the_same_diagnosis(tmp_path: Path) -> None:
    found, others = run_ranks(2, _real_ranks, tmp_path)
    assert found == others
    assert [(one["component"], one["found"][0], one["verdict"]) for one in found] == [
        ("model", "REPLICATED", "ok"),
        ("optimizer", "REPLICATED", "wasteful"),
        ("rng", "PER_RANK", "loses state"),
    ]
    assert list(tmp_path.iterdir()) == []


def test_one_rank_is_found_to_be_right_whatever_it_declares(tmp_path: Path) -> None:
    components = [StateComponent(pattern, Held({"w": torch.ones(3)}), pattern) for pattern in ("global", "per_rank")]
    found = coordinator(Topology.alone(), tmp_path, components, pattern_check="error").diagnose()
    assert [one.verdict.value for one in found] == ["ok", "ok"]
    assert examine({}, {}, Topology.alone()) == []


def _examine(topology: Topology, cfg: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = patterns.examine(cfg | {"doctor": {"steps": 1}}, topology)["components"]
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "ddp_tp",
        *(
            pytest.param(layout, marks=pytest.mark.full)
            for layout in ("ddp", "accelerate", "fsdp", "hsdp", "tp_fsdp", "pipeline", "ddp_pipeline")
        ),
    ],
)
def test_what_conf_declares_of_a_layout_is_what_the_doctor_finds(tmp_path: Path, layout: str) -> None:
    size = "tiny" if layout == "pipeline" else "nano"  # which has too few layers for four stages
    cfg = config(tmp_path, f"parallel={layout}", f"model.size={size}", f"data.path={logging.__file__}", num_ranks=4)
    for of_rank in run_ranks(4, _examine, cfg, process_group=True):
        found = {one["component"]: one for one in of_rank}
        assert list(found) == ["model", "optimizer", "scheduler", "dataset", "rng"]
        assert all((one["verdict"], one["sentence"]) == ("ok", "") for one in found.values())
        for key in ("model", "optimizer"):
            assert found[key]["found"][0] == found[key]["declared"]


@pytest.mark.full
def test_the_three_common_mistakes_of_data_parallel_runs_are_told_apart(tmp_path: Path) -> None:
    mistakes = ["model.sharing_pattern=global", "model.validate_replication=false", "optimizer.sharing_pattern=per_rank",
                "rng.sharing_pattern=replicated", "rng.elastic=null"]  # fmt: skip
    overrides = [f"components.{mistake}" for mistake in mistakes]
    cfg = config(tmp_path, *overrides, "model.size=nano", f"data.path={logging.__file__}", num_ranks=2)
    model, optimizer, _, _, rng = run_ranks(2, _examine, cfg, process_group=True)[0]
    assert (model["verdict"], optimizer["verdict"], rng["verdict"]) == ("wasteful", "wasteful", "loses state")
    assert (
        "model is declared GLOBAL, so rank 0 writes it alone, but all 2 ranks hold equal bits of it"
        in model["sentence"]
    )
    assert "optimizer is declared PER_RANK, but ranks 0 and 1 hold equal bits" in optimizer["sentence"]
    assert "rng is declared REPLICATED, but ranks 0 and 1 differ in `python`" in rng["sentence"]
    assert rng["sentence"].endswith("every rank has its own: set components.rng.sharing_pattern=per_rank")


def run_doctor(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> int:
    """Call the recipe as the command line would; return its exit code, and check that it wrote nothing."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    text = Path(logging.__file__)
    monkeypatch.setattr(
        sys, "argv", ["doctor", f"data.path={text}", "model.size=nano", "train.batch_size=2", *overrides]
    )
    try:
        recipes.doctor.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    assert list(folder.iterdir()) == []
    return code


def test_the_command_prints_what_each_component_is_and_exits_by_the_worst(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = [
        "components.rng.sharing_pattern=replicated",
        "components.rng.elastic=null",
        "components.optimizer.sharing_pattern=per_rank",
    ]
    assert run_doctor(monkeypatch, tmp_path / "two", *wrong, "launch.nproc_per_node=2") == 1
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    for start in ("model REPLICATED REPLICATED ok", "optimizer PER_RANK REPLICATED wasteful", "optimizer is declared PER_RANK, but",
                  "rng REPLICATED PER_RANK loses state", "rng is declared REPLICATED, but ranks 0 and 1 differ in"):  # fmt: skip
        assert any(line.startswith(start) for line in lines), lines
    assert run_doctor(monkeypatch, tmp_path / "one", "json=true", "doctor.steps=0") == 0
    tree = json.loads(capfd.readouterr().out)
    assert tree["ok"] is True
    assert [one["verdict"] for one in tree["components"]] == ["ok"] * 5


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("doctor.steps=-1", "doctor.steps=-1: expected at least 0"),
        ("+doctor.stps=1", "doctor.stps: there is no such key; did you mean doctor.steps?"),
        ("doctor.steps=two", "doctor.steps=two: expected a whole number"),
        ("pattern_check=on", "pattern_check=on: expected one of warn, error, off"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, says: str
) -> None:
    assert run_doctor(monkeypatch, tmp_path / "here", override) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err and len(err.splitlines()) == 1
