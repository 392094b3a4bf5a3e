"""Checkpoints of torch.save files without a manifest: read only when asked for, by path, and without running their code."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.catalog.committed import Committed
from ckpt.catalog.ledger import Ledger
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    ShapeMismatchError,
    WorldSizeError,
)
from ckpt.loading.report import Status
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import OptimizerState
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import Held, coordinator, global_index, random_bits, same_bits

ALONE = Topology.alone()


def reader(root: Path, components: Sequence[StateComponent], topology: Topology = ALONE, **options: Any) -> CheckpointCoordinator:  # fmt: skip # noqa: E501
    return coordinator(topology, root, components, **({"allow_pickle": True} | options))


def model(seed: int, *, tied: bool = False) -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    made = torch.nn.ModuleDict(
        {"wte": torch.nn.Embedding(9, 4), "h": torch.nn.Linear(4, 4), "o": torch.nn.Linear(4, 9)}
    )
    if tied:
        made["o"].weight = made["wte"].weight
    return made


def train(made: torch.nn.ModuleDict, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        made["o"](made["h"](made["wte"](torch.arange(5)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def old(folder: Path, **states: Any) -> Path:
    """An old checkpoint: `model=...` becomes model_state.pt, `rng_rank_0=...` rng_state_rank_0.pt."""
    folder.mkdir(parents=True)
    for name, state in states.items():
        key, _, rest = name.partition("_")
        torch.save(state, folder / f"{key}_state{'_' if rest else ''}{rest}.pt")
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on_from_an_old_checkpoint_with_model_optimizer_and_scheduler(tmp_path: Path, tied: bool) -> None:
    trained = model(0, tied=tied)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, betas=(0.8, 0.95))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(trained, optimizer)
    scheduler.step()
    states = {"model": trained.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    folder = old(tmp_path / "checkpoint-500", **states)
    fresh = model(1, tied=tied)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    again = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    made = reader(
        tmp_path,
        [
            StateComponent("model", fresh, "replicated"),
            StateComponent("optimizer", OptimizerState(other, fresh), "replicated"),
            StateComponent("scheduler", again, "global"),
        ],
    )
    made.load_checkpoint(folder)
    for name, tensor in trained.state_dict().items():
        assert same_bits(fresh.state_dict()[name], tensor), name
    names = dict(fresh.named_parameters())
    for name, parameter in trained.named_parameters():
        for field, value in optimizer.state[parameter].items():
            assert same_bits(other.state[names[name]][field], value), (name, field)
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.005
    assert other.param_groups[0]["betas"] == (0.8, 0.95)
    assert again.state_dict() == scheduler.state_dict()
    assert made.last_load is not None
    assert made.last_load.checkpoint_id == "500"
    assert {report.status for report in made.last_load.components} == {Status.RESTORED}


def one(held: Held, key: str = "model", pattern: str = "global", **options: Any) -> list[StateComponent]:
    return [StateComponent(key, held, pattern, **options)]


def test_an_old_checkpoint_is_refused_without_the_switch_which_the_refusal_names(tmp_path: Path) -> None:
    folder = old(tmp_path / "checkpoint-1", model={"w": torch.ones(3)})
    held = Held({"w": torch.zeros(3)})
    with pytest.raises(
        CheckpointNotFoundError,
        match=r"has no checkpoint_manifest\.json.*looks like an old checkpoint.*model_state\.pt.*allow_pickle=True",
    ):
        reader(tmp_path, one(held), allow_pickle=False).load_checkpoint(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint: it is an empty folder"):
        reader(tmp_path, one(held)).load_checkpoint(tmp_path / "empty")
    assert torch.all(held.state["w"] == 0)


def test_an_old_checkpoint_is_never_found_only_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held({"w": torch.zeros(3)})
    folder = old(tmp_path / "checkpoint-9", model={"w": torch.full((3,), 9.0)})
    with pytest.raises(CheckpointNotFoundError, match="there is no committed checkpoint"):
        reader(tmp_path, one(held)).load_checkpoint()
    with monkeypatch.context() as patched:  # as if it had had a manifest until just now
        patched.setattr(Ledger, "committed", lambda ledger: [Committed("9", folder, datetime.now(UTC))])
        with pytest.raises(CheckpointNotFoundError, match="checkpoint-9 is not a checkpoint"):
            reader(tmp_path, one(held)).load_checkpoint()
    saver = reader(tmp_path, one(Held({"w": torch.ones(3)})))
    saver.save_checkpoint(checkpoint_id="1")
    (tmp_path / "checkpoint-1" / "model_state.pt").write_bytes(
        b""
    )  # a manifest makes it a new one, whatever lies beside
    reader(tmp_path, one(held)).load_checkpoint()
    assert torch.all(held.state["w"] == 1)
    (tmp_path / "checkpoint-1" / "checkpoint_manifest.json").unlink()
    (tmp_path / "checkpoint-1" / "model_state.pt").unlink()
    with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint"):
        reader(tmp_path, one(held)).load_checkpoint(tmp_path / "checkpoint-1")


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("writer", ["torch", "torch, old form", "pickle"])
def test_code_in_a_pickle_does_not_run(tmp_path: Path, writer: str) -> None:
    ran = tmp_path / "it ran"
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    error: type[CheckpointError] = ConfigurationError
    says = r"model_state\.pt holds \w+\.mkdir, and .*nothing but tensors and plain values"
    if writer == "pickle":
        (folder / "model_state.pt").write_bytes(pickle.dumps({"x": Malicious(ran)}))
        error, says = CorruptCheckpointError, r"model_state\.pt cannot be read as a file that torch\.save wrote"
    else:
        state = {"w": torch.ones(3), "x": Malicious(ran)}
        torch.save(state, folder / "model_state.pt", _use_new_zipfile_serialization=writer == "torch")
    held = Held({"w": torch.zeros(3)})
    for strict in (True, False):
        with pytest.raises(error, match=says):
            reader(tmp_path, one(held)).load_checkpoint(folder, strict=strict)
    assert not ran.exists()
    assert held.loaded is None


@pytest.mark.parametrize("damage", ["cut", "other", "empty"])
@pytest.mark.parametrize("required", [True, False])
def test_an_unreadable_file_is_damage(tmp_path: Path, damage: str, required: bool) -> None:
    folder = old(tmp_path / "checkpoint-1", model={"w": global_index((100,))}, other={"n": 1})
    file = folder / "model_state.pt"
    file.write_bytes({"cut": file.read_bytes()[:-200], "other": b"neither zip nor pickle", "empty": b""}[damage])
    held, other = Held({"w": torch.zeros(100)}), Held({"n": 0})
    made = reader(tmp_path, one(held, required=required) + one(other, "other"))
    if required:
        with pytest.raises(CorruptCheckpointError, match=r"model_state\.pt cannot be read"):
            made.load_checkpoint(folder)
        return
    made.load_checkpoint(folder)
    assert made.last_load is not None
    assert [report.status for report in made.last_load.components] == [Status.FAILED, Status.RESTORED]
    assert other.loaded == {"n": 1}


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_link_or_a_fifo_is_no_file_of_an_old_checkpoint(tmp_path: Path, kind: str) -> None:
    folder = old(tmp_path / "old", model={"a": torch.ones(3)})
    (file,) = folder.iterdir()
    if kind == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(CorruptCheckpointError, match="symbolic link|not a regular file"):
        reader(tmp_path, one(Held({"a": torch.zeros(3)})), allow_pickle=True).load_checkpoint(folder)


def test_missing_and_unfitting_parts_of_an_old_checkpoint_are_treated_as_in_a_new_one(tmp_path: Path) -> None:
    folder = old(tmp_path / "checkpoint-1", model={"a": global_index((4, 2)), "b": torch.ones(3), "c": torch.ones(1)})
    module = torch.nn.ParameterDict({"a": torch.zeros(4, 2), "b": torch.zeros(5), "d": torch.zeros(2)})
    components = [StateComponent("model", module, "replicated"), *one(Held({}), "ema")]
    with pytest.raises(ShapeMismatchError, match=r"model: b: the checkpoint holds global shape \[3\]"):
        reader(tmp_path, components[:1]).load_checkpoint(folder)
    with pytest.raises(MissingStateError, match="component ema is not in the checkpoint, which has: model"):
        reader(tmp_path, components[1:]).load_checkpoint(folder)
    made = reader(tmp_path, components)
    made.load_checkpoint(folder, strict=False)
    assert made.last_load is not None
    assert made.last_load.summary().splitlines() == [
        "model: partly restored, 8 of 15 elements (53%); only in the checkpoint: c; only wanted: d; does not fit: b (found "
        "float32 [3], expected float32 [5])",
        "ema: skipped: not in the checkpoint",
    ]
    assert same_bits(module["a"].detach(), global_index((4, 2)))
    assert torch.all(module["b"] == 0)


def optimizer_of(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> OptimizerState:
    module = torch.nn.ParameterDict({f"p{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    parameters = iter(module.parameters())
    groups = [{"params": [next(parameters) for _ in range(size)]} for size in sizes]
    return OptimizerState(torch.optim.AdamW(groups), module)


@pytest.mark.parametrize(
    ("shapes", "sizes", "says"),
    [
        ([(2,), (3,), (4,)], [3], r"for groups of \[2\] parameters, this optimizer has groups of \[3\]"),
        ([(2,), (3,)], [1, 1], r"for groups of \[2\] parameters, this optimizer has groups of \[1, 1\]"),
        ([(3,), (2,)], [2], r"exp_avg at position 0 was saved with shape \[2\], but p0 has \[3\] here"),
    ],
)
def test_optimizer_state_by_position_is_refused_unless_groups_and_shapes_are_the_same(
    tmp_path: Path, shapes: list[tuple[int, ...]], sizes: list[int], says: str
) -> None:
    saved = optimizer_of([(2,), (3,)], [2]).optimizer
    for parameter in saved.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    folder = old(tmp_path / "checkpoint-1", optimizer=saved.state_dict())
    other = optimizer_of(shapes, sizes)
    with pytest.raises(ShapeMismatchError, match=says):
        reader(tmp_path, [StateComponent("optimizer", other, "global")]).load_checkpoint(folder)
    assert not other.optimizer.state


def test_optimizer_state_that_holds_names_goes_by_them(tmp_path: Path) -> None:
    trained, fresh = model(0), model(1)
    named = torch.optim.AdamW(trained.named_parameters(), lr=0.01)
    train(trained, named)
    saved = named.state_dict()
    saved["state"][0]["step"] = 2  # as torch counted once
    folder = old(tmp_path / "checkpoint-1", optimizer=saved)
    other = torch.optim.AdamW(list(fresh.parameters())[::-1])
    components = [StateComponent("optimizer", OptimizerState(other, fresh), "global")]
    reader(tmp_path, components).load_checkpoint(folder)
    names = dict(fresh.named_parameters())
    for name, parameter in trained.named_parameters():
        assert same_bits(other.state[names[name]]["exp_avg_sq"], named.state[parameter]["exp_avg_sq"])
        assert same_bits(other.state[names[name]]["step"], torch.tensor(2.0))


FILES = {
    "per_rank": ["rank_0", "rank_1", "rank_2", "rank_3"],
    "per_node": ["node_0_rank_0", "node_1_rank_2"],
    "per_node, short": ["node_0", "node_1"],
    "per_group": ["group_dp_grank_0_rank_0", "group_dp_grank_0_rank_1"],
    "per_group, short": ["group_dp_rank_1", "group_dp_rank_0"],
    "per_group, numbered": ["dp_0", "dp_1"],
    "global": [""],
}
WHOSE = {"per_rank": [0, 1, 2, 3], "per_node": [0, 0, 1, 1], "per_group": [0, 1, 0, 1], "global": [0, 0, 0, 0]}


def load_each_naming(topology: Topology, root: Path) -> dict[str, str]:
    said = {}
    groups = {"dp": [topology.rank % 2, topology.rank % 2 + 2]} if topology.world_size == 4 else {"dp": [0, 1]}
    for naming in FILES:
        pattern = naming.partition(",")[0]
        held = Held({"w": torch.full((70, 300), -1, dtype=torch.bfloat16), "n": -1})
        part = StateComponent("x", held, pattern, process_group_name="dp" if pattern == "per_group" else None)
        made = coordinator(topology, root, [part], process_groups=groups, allow_pickle=True)
        try:
            made.load_checkpoint(root / naming)
        except (WorldSizeError, MissingStateError) as error:
            said[naming] = str(error)
            assert torch.all(held.state["w"] == -1)
            continue
        number = WHOSE[pattern][topology.rank]
        assert held.loaded is not None and held.loaded["n"] == number
        assert same_bits(held.state["w"], random_bits((70, 300), torch.bfloat16, number)), naming
        said[naming] = "loaded"
    return said


def test_every_naming_of_copies_gives_every_rank_its_own_and_other_ranks_an_error(tmp_path: Path) -> None:
    for naming, suffixes in FILES.items():
        order = [1, 0] if naming == "per_group, short" else range(4)
        copies = {
            f"x_{suffix}".strip("_"): {"w": random_bits((70, 300), torch.bfloat16, number), "n": number}
            for number, suffix in zip(order, suffixes, strict=False)
        }
        old(tmp_path / naming, **copies)
    assert run_ranks(4, load_each_naming, tmp_path, nodes=[2, 2]) == [dict.fromkeys(FILES, "loaded")] * 4
    said = run_ranks(2, load_each_naming, tmp_path)
    assert said[0] == said[1]
    for naming, sentence in said[0].items():
        if naming == "global":
            assert sentence == "loaded"
        else:
            assert re.search(
                r"is per_\w+, and the old checkpoint holds x_state_.*\.pt, where this run needs one", sentence
            )


def test_a_file_that_one_rank_alone_misses_is_an_error_on_all_and_another_pattern_is_named(tmp_path: Path) -> None:
    folder = old(tmp_path / "checkpoint-1", rng_rank_0={"n": 0}, rng_rank_1={"n": 1})

    def load_on(topology: Topology, pattern: str, name: str | None) -> str:
        if topology.rank == 1 and name:
            (folder / name).write_bytes(b"")
        try:
            reader(tmp_path, one(Held({"n": -1}), "rng", pattern), topology).load_checkpoint(folder)
        except CheckpointError as error:
            return str(error)
        return "loaded"

    assert run_threads(2, load_on, "per_rank", None) == ["loaded"] * 2
    said = run_threads(2, load_on, "replicated", None)
    assert len(set(said)) == 1
    assert "component rng was saved as per_rank and is now declared replicated" in said[0]
    said = run_threads(2, load_on, "per_rank", "rng_state_rank_1.pt")
    assert len(set(said)) == 1
    assert "failed in phase check on rank 1: rng: " in said[0]


def test_ranks_that_share_a_state_take_their_boxes_of_the_one_old_file(tmp_path: Path) -> None:
    whole = global_index((6, 5))
    folder = old(tmp_path / "checkpoint-1", model={"w": whole, "b": {"x": torch.ones(2), "n": 3}})

    def load_on(topology: Topology) -> tuple[list[list[float]], Any]:
        piece = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 5), (0, topology.rank, 3))
        held = Held({"w": piece, "b": {"x": torch.zeros(2), "n": 0}})
        made = reader(tmp_path, one(held, "model", "sharded"), topology)
        made.load_checkpoint(folder)
        assert held.loaded is not None and made.last_load is not None
        assert made.last_load.bytes_read == 4 * 30 + 3 * 4 * 2
        assert made.last_load.summary() == "model: restored, all 39 elements"
        return piece.data.tolist(), held.loaded["b"]["n"]

    assert run_threads(3, load_on) == [(whole[2 * r : 2 * r + 2].tolist(), 3) for r in range(3)]


def test_names_that_allow_two_answers_are_settled_by_the_declaration_or_refused(tmp_path: Path) -> None:
    folder = old(tmp_path / "checkpoint-1", x={"n": 5}, x_rank_0={"n": 6}, x_state={"n": 7})
    for pattern, n in (("global", 5), ("per_rank", 6)):
        held = Held({"n": 0})
        reader(tmp_path, one(held, "x", pattern)).load_checkpoint(folder)
        assert held.loaded == {"n": n}
    held = Held({"n": 0})
    reader(tmp_path, one(held, "x_state")).load_checkpoint(folder, leave_out=["x"])
    assert held.loaded == {"n": 7}
    with pytest.raises(
        MissingStateError, match="is declared per_node, and the old checkpoint has files of it for global and"
    ):
        reader(tmp_path, one(held, "x", "per_node")).load_checkpoint(folder)
    with pytest.raises(MissingStateError, match="component y is not in the checkpoint, which has: x"):
        reader(tmp_path, one(held, "y")).load_checkpoint(folder)


def test_copies_of_an_old_checkpoint_can_be_shared_out_over_other_ranks(tmp_path: Path) -> None:
    class Queue(Held):
        def fits(self, saved: Mapping[str, Any]) -> bool:
            return True

        def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
            self.loaded = {
                "left": [n for copy in saved for n in copy["left"]],
                "seen": [copy["seen"] for copy in saved],
            }

    copies = {f"data_rank_{n}": {"left": [n], "seen": torch.full((2,), float(n))} for n in (0, 1, 2, 10)}
    folder = old(tmp_path / "checkpoint-1", **copies)

    def load_on(topology: Topology) -> dict[str, Any]:
        queue = Queue({})
        reader(tmp_path, one(queue, "data", "per_rank", elastic="repartition"), topology).load_checkpoint(folder)
        assert queue.loaded is not None
        return {"left": queue.loaded["left"], "seen": torch.stack(queue.loaded["seen"])[:, 0].tolist()}

    assert run_threads(2, load_on) == [{"left": [0, 1, 2, 10], "seen": [0.0, 1.0, 2.0, 10.0]}] * 2


def test_a_file_whose_tensors_repeat_their_elements_to_more_than_any_memory_is_refused(tmp_path: Path) -> None:
    """Whatever takes what was saved would get memory for all of it."""
    folder = old(tmp_path / "checkpoint-1", model={"w": torch.ones(1).expand(1 << 40)})
    for held in (Held({"w": torch.zeros(4)}), Held({})):
        run = reader(tmp_path, [StateComponent("model", held, "replicated")])
        with pytest.raises(ConfigurationError, match=r"model_state\.pt repeats elements: .* would have 4398046511104"):
            run.load_checkpoint(folder)
