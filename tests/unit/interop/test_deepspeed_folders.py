"""Universal checkpoints that DeepSpeed 0.19.8 made of ZeRO checkpoints of two ranks are loaded to the bit; damaged ones are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from tests.golden.deepspeed.contents import MOMENTS, STEPS, Net, run_of, values
from tests.support.ranks import run_ranks
from tests.support.states import same_bits

GOLDEN = Path(__file__).parents[2] / "golden" / "deepspeed"
TAG = "global_step3_universal"
STATES = {"stage1": "mp_rank_00_model_states.pt", "stage3": "zero_pp_rank_1_mp_rank_00_model_states.pt"}


def require_golden(loaded: dict[str, Any], stage: str) -> None:
    assert loaded.keys() == {"model", "optimizer", "lr_scheduler"}
    net, optimizer = run_of(filled=True)
    expected = net.state_dict()
    if stage == "stage3":  # parameters that are not trained are as they were trained with
        expected["frozen"] = expected["frozen"].bfloat16()
    assert loaded["model"].keys() == expected.keys()
    for name, one in expected.items():
        assert same_bits(loaded["model"][name], one), name
    assert loaded["optimizer"]["state"].keys() == values(net).keys()
    for name, one in values(net).items():
        found = loaded["optimizer"]["state"][name]
        assert found.keys() == {"step", *MOMENTS}
        assert same_bits(found["step"], torch.tensor(float(STEPS)))
        assert all(same_bits(found[kind], one[kind]) for kind in MOMENTS), name
    names = [["embed.weight"], ["norm.weight", "scale"]]
    for found, own, of_group in zip(loaded["optimizer"]["param_groups"], optimizer.param_groups, names, strict=True):
        assert found == own | {"params": of_group, "initial_lr": own["lr"]}
    assert loaded["lr_scheduler"]["last_epoch"] == STEPS


@pytest.mark.parametrize("stage", STATES)
def test_all_of_it_is_loaded(stage: str) -> None:
    for path in (GOLDEN / stage, GOLDEN / stage / TAG):
        loaded = ckpt.load(path, allow_pickle=True)
        require_golden(loaded, stage)
        assert loaded["model"]["out.weight"] is loaded["model"]["embed.weight"]


def _resume(topology: Topology) -> None:
    for stage in STATES:
        require_golden(ckpt.load(GOLDEN / stage, allow_pickle=True, load="two-stage", topology=topology), stage)


def test_it_is_loaded_on_three_ranks() -> None:
    run_ranks(3, _resume)


@pytest.mark.parametrize("stage", STATES)
def test_a_plain_model_goes_on_from_it(tmp_path: Path, stage: str) -> None:
    (net, optimizer), (saved, saved_optimizer) = run_of(filled=False), run_of(filled=True)
    if stage == "stage3":
        net.frozen.data, saved.frozen.data = net.frozen.data.bfloat16(), saved.frozen.data.bfloat16()
    with Checkpointer(tmp_path, model=net, optimizer=optimizer, save_rng=False, allow_pickle=True) as checkpoints:
        assert checkpoints.restore(GOLDEN / stage) == STEPS
    for name, one in saved.state_dict().items():
        assert same_bits(net.state_dict()[name], one), name
    mine, theirs = optimizer.state_dict(), saved_optimizer.state_dict()
    for found, own in zip(mine["param_groups"], theirs["param_groups"], strict=True):
        assert found == own | {"initial_lr": own["lr"]}
    for position, state in theirs["state"].items():
        for kind, one in state.items():
            assert same_bits(mine["state"][position][kind], one), (position, kind)


def test_plain_steps_of_deepspeeds_own_adam_become_tensors_that_torch_goes_on_from(tmp_path: Path) -> None:
    root = copy_of("stage1", tmp_path)
    for name in values(Net()):
        torch.save(STEPS, root / "zero" / name / "step.pt")
    require_golden(ckpt.load(root, allow_pickle=True), "stage1")
    net, optimizer = run_of(filled=False)
    with Checkpointer(tmp_path, model=net, optimizer=optimizer, save_rng=False, allow_pickle=True) as checkpoints:
        checkpoints.restore(root)
    saved, saved_optimizer = run_of(filled=True)
    for one, its in ((net, optimizer), (saved, saved_optimizer)):
        one(torch.arange(4)).backward()
        its.step()
    assert all(same_bits(one, own) for one, own in zip(net.parameters(), saved.parameters(), strict=True))


def test_it_is_read_only_where_pickles_are_allowed() -> None:
    with pytest.raises(CheckpointNotFoundError, match="universal checkpoint of DeepSpeed.* allow_pickle=True"):
        ckpt.load(GOLDEN / "stage1")


def copy_of(stage: str, to: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / stage, to / "copy")) / TAG


def _saved(name: str, value: Any) -> Callable[[Path, Path], object]:
    return lambda root, states: torch.save(value, root / name)


def _states(**changes: Any) -> Callable[[Path, Path], object]:
    return lambda root, states: torch.save(torch.load(states) | changes, states)


def _link(root: Path, states: Path) -> None:
    (root / "zero/scale/fp32.pt").unlink()
    (root / "zero/scale/fp32.pt").symlink_to(root / "zero/norm.weight/fp32.pt")


CRAFTS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "latest leads out": ("stage1", lambda root, _: (root.parent / "latest_universal").write_text("../elsewhere")),
    "latest is nowhere": ("stage1", lambda root, _: (root.parent / "latest_universal").write_text("nothing")),
    "latest is empty": ("stage1", lambda root, _: (root.parent / "latest_universal").write_text("")),
    "no model states": ("stage1", lambda _, states: states.unlink()),
    "model states are cut off": ("stage1", lambda _, states: states.write_bytes(states.read_bytes()[:-2000])),
    "a parameter is gone": ("stage1", lambda root, _: shutil.rmtree(root / "zero/scale")),
    "a weight is gone": ("stage1", lambda root, _: (root / "zero/scale/fp32.pt").unlink()),
    "a weight is a link": ("stage1", _link),
    "a weight is cut off": ("stage1", lambda root, _: (root / "zero/scale/fp32.pt").write_bytes(b"PK\x03\x04")),
    "a weight without tensor": ("stage1", _saved("zero/scale/fp32.pt", {"other": 1})),
    "a moment of another shape": ("stage1", _saved("zero/scale/exp_avg.pt", {"param": torch.ones(9)})),
    "a flat weight of another size": ("stage3", _saved("zero/scale/fp32.pt", torch.ones(9))),
    "shapes that are none": ("stage1", _states(param_shapes=[{"embed.weight": (-1, 2)}])),
    "shapes that are too large": ("stage3", _states(param_shapes=[{"scale": (1 << 40, 1 << 40)}])),
    "groups that are none": ("stage1", _states(param_shapes=7)),
    "a parameter that leads out": ("stage1", _states(param_shapes=[{"../../x": torch.Size([2])}])),
    "tied to nothing": ("stage1", _states(shared_params={"out.weight": "nowhere"})),
    "a buffer that is not there": ("stage1", _states(buffer_names=["nowhere"])),
    "a part of an untrained parameter is gone": ("stage3", lambda _, states: states.unlink()),
    "a part of an untrained parameter is short": ("stage3", _states(frozen_param_fragments={"frozen": torch.ones(1).bfloat16()})),
    "a part of an untrained parameter is of another type": ("stage3", _states(frozen_param_fragments={"frozen": torch.ones(3)})),
    "steps are no number": ("stage1", _saved("zero/scale/step.pt", "many")),
    "steps are negative": ("stage1", _saved("zero/scale/step.pt", -1)),
    "options are no list": ("stage1", _saved("zero/optimizer_state.pt", {"param_groups": 3})),
    "options without parameters": ("stage1", _saved("zero/optimizer_state.pt", {"param_groups": [{"lr": 1.0}]})),
}  # fmt: skip


@pytest.mark.parametrize("craft", CRAFTS)
def test_a_damaged_one_is_refused(tmp_path: Path, craft: str) -> None:
    stage, damage = CRAFTS[craft]
    root = copy_of(stage, tmp_path)
    damage(root, root / STATES[stage])
    with pytest.raises(CorruptCheckpointError):
        ckpt.load(root.parent, allow_pickle=True)


def test_options_that_fit_no_parameters_are_refused(tmp_path: Path) -> None:
    root = copy_of("stage1", tmp_path)
    torch.save({"param_groups": [{"lr": 1.0, "params": [0, 1, 2]}]}, root / "zero/optimizer_state.pt")
    with pytest.raises(ConfigurationError, match=r"the parts \[0, 1, 2\] of the optimizer, where 2 have parameters"):
        ckpt.load(root, allow_pickle=True)


def test_untrained_parts_of_tensor_parallel_ranks_are_refused(tmp_path: Path) -> None:
    root = copy_of("stage3", tmp_path)
    for states in root.glob("*_model_states.pt"):
        _states(mp_world_size=2)(root, states)
    with pytest.raises(ConfigurationError, match="frozen.* tensor parallel ranks"):
        ckpt.load(root, allow_pickle=True)


def test_parts_of_a_group_get_its_options_and_their_steps(tmp_path: Path) -> None:
    """ZeRO of stage 3 cuts a large group into several parts; a stage of a pipeline has no module."""
    root = copy_of("stage3", tmp_path)
    steps = {"state": {at: {"step": 7 + at, "exp_avg": torch.ones(1)} for at in range(3)}}
    groups = [{"lr": 1.0, "params": [0, 2], "step": 9}, {"lr": 2.0, "params": [1]}]
    torch.save({"param_groups": groups, "optimizer_state_dict": steps}, root / "zero/optimizer_state.pt")
    shapes = [{name: one.shape} for name, one in Net().named_parameters() if one.requires_grad]
    for states in root.glob("*_model_states.pt"):
        _states(param_shapes=shapes, module=None)(root, states)
    loaded = ckpt.load(root, allow_pickle=True)
    first, second, third = (name for shape in shapes for name in shape)
    assert loaded["optimizer"]["param_groups"] == [
        {"lr": 1.0, "params": [first, third]},
        {"lr": 2.0, "params": [second]},
    ]
    for at, name in enumerate((first, second, third)):
        assert same_bits(loaded["optimizer"]["state"][name]["step"], torch.tensor(7.0 + at))
    assert "norm.mean" not in loaded["model"]
