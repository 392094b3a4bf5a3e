"""Universal checkpoints of DeepSpeed: a plain model with AdamW goes on from one to the bit; hostile ones are refused."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt.ranks.topology import Topology
from tests.ranks import run_ranks
from tests.states import same_bits


class Net(torch.nn.Module):
    """A model with buffers, tied weights, and a parameter that was never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.out = torch.nn.Linear(5, 6, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.embed(tokens))).square().mean()


def run_of(seed: int) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(seed)
    net = Net()
    groups = [{"params": [net.embed.weight], "weight_decay": 0.1}, {"params": net.norm.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (seed + 1))
    for _ in range(seed + 2):
        net(torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def write(folder: Path, net: Net, optimizer: torch.optim.AdamW, *, stage: int = 1) -> Path:
    """Write the files that `ds_to_universal.py` of deepspeed 0.19.8 writes, as its source has it."""
    root = folder / "global_step3_universal"
    trained = {"embed.weight": net.embed.weight, "norm.weight": net.norm.weight, "norm.bias": net.norm.bias}
    module = {name: one.bfloat16() if one.is_floating_point() else one for name, one in net.state_dict().items()}
    for name, one in module.items():  # what has no state of the optimizer is the module's, rounded
        (root / "zero" / name).mkdir(parents=True)
        if name not in trained and stage < 3:
            torch.save({"param": one.float()}, root / "zero" / name / "fp32.pt")
        elif name not in trained:
            (root / "zero" / name).rmdir()
    for name, parameter in trained.items():
        state = optimizer.state[parameter]
        for file, one in {"fp32": parameter.detach(), **state}.items():
            whole = one.flatten() if stage == 3 else {"param": one, "cat_dim": 0}
            if file != "step" or stage < 3:
                torch.save(one if file == "step" else whole, root / "zero" / name / f"{file}.pt")
    groups = [{k: v for k, v in one.items() if k != "params"} | {"params": [0]} for one in optimizer.param_groups]
    inner = {"state": {0: {"step": optimizer.state[net.embed.weight]["step"]}}, "param_groups": groups}
    more = {"optimizer_state_dict": inner} if stage == 3 else {}
    torch.save(
        more | {"param_groups": groups, "loss_scaler": Odd(), "zero_stage": stage}, root / "zero/optimizer_state.pt"
    )
    shapes = [OrderedDict([(name, one.shape) for name, one in trained.items()][a:b]) for a, b in [(0, 1), (1, 3)]]
    states = {
        "module": module,
        "buffer_names": [name for name, _ in net.named_buffers()],
        "param_shapes": shapes,
        "shared_params": {"out.weight": "embed.weight"},
        "lr_scheduler": {"last_epoch": 3},
        "ds_config": {"zero": Odd()},
    }
    torch.save(states, root / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(root.name)
    return root


class Odd:
    """Stands for objects of DeepSpeed in its files, such as a loss scaler."""


def require_same(net: Net, optimizer: torch.optim.AdamW, wanted: tuple[Net, torch.optim.AdamW]) -> None:
    for name, one in wanted[0].state_dict().items():
        own = net.state_dict()[name]
        assert same_bits(own, one.bfloat16().to(one.dtype) if "running" in name else one), name
    mine, theirs = optimizer.state_dict(), wanted[1].state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for position, state in theirs["state"].items():
        for name, one in state.items():
            assert same_bits(mine["state"][position][name], one), (position, name)


def as_saved(net: Net) -> Net:
    """A model whose buffers are of the type that DeepSpeed trained in: they are loaded as they lie."""
    for name in ("running_mean", "running_var"):
        setattr(net.norm, name, getattr(net.norm, name).bfloat16())
    return net


@pytest.mark.parametrize("by_tag", [False, True])
def test_a_plain_model_goes_on_from_it(tmp_path: Path, by_tag: bool) -> None:
    saved, (net, optimizer) = run_of(0), run_of(1)
    root = write(tmp_path / "ds", *saved)
    with Checkpointer(
        tmp_path / "own", model=as_saved(net), optimizer=optimizer, save_rng=False, allow_pickle=True
    ) as checkpoints:
        assert checkpoints.restore(root if by_tag else tmp_path / "ds") in (0, 3)
    require_same(net, optimizer, (as_saved(saved[0]), saved[1]))


def test_flat_parameters_of_stage_3_get_their_shapes(tmp_path: Path) -> None:
    net, optimizer = run_of(0)
    loaded = ckpt.load(write(tmp_path, net, optimizer, stage=3), allow_pickle=True)
    assert same_bits(loaded["model"]["embed.weight"], net.embed.weight)
    assert same_bits(loaded["optimizer"]["state"]["norm.bias"]["exp_avg"], optimizer.state[net.norm.bias]["exp_avg"])


def _load_on(topology: Topology, path: Path) -> dict[str, Any]:
    return ckpt.load(path, allow_pickle=True, load="two-stage", topology=topology)


@pytest.mark.full
def test_it_is_loaded_on_three_ranks(tmp_path: Path) -> None:
    net, optimizer = run_of(0)
    root = write(tmp_path, net, optimizer)
    for loaded in run_ranks(3, _load_on, root):
        assert same_bits(loaded["model"]["embed.weight"], net.embed.weight)
        assert loaded["lr_scheduler"] == {"last_epoch": 3}


def test_it_is_read_only_where_pickles_are_allowed(tmp_path: Path) -> None:
    write(tmp_path, *run_of(0))
    with pytest.raises(CheckpointNotFoundError, match="universal checkpoint of DeepSpeed.* allow_pickle=True"):
        ckpt.load(tmp_path)


def _saved(name: str, value: Any) -> Callable[[Path], object]:
    return lambda root: torch.save(value, root / name)


def _states(**changes: Any) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        file = root / "mp_rank_00_model_states.pt"
        torch.save(torch.load(file, weights_only=False) | changes, file)

    return change


CRAFTS: dict[str, Callable[[Path], object]] = {
    "latest leads out": lambda root: (root.parent / "latest_universal").write_text("../elsewhere"),
    "latest is nowhere": lambda root: (root.parent / "latest_universal").write_text("nothing"),
    "latest is empty": lambda root: (root.parent / "latest_universal").write_text(""),
    "no model states": lambda root: (root / "mp_rank_00_model_states.pt").unlink(),
    "a parameter is gone": lambda root: shutil.rmtree(root / "zero/norm.bias"),
    "a weight is gone": lambda root: (root / "zero/norm.bias/fp32.pt").unlink(),
    "a weight is a link": lambda root: (
        (root / "zero/norm.bias/fp32.pt").unlink(), (root / "zero/norm.bias/fp32.pt").symlink_to("/etc/passwd")
    ),
    "a weight is cut off": lambda root: (root / "zero/norm.bias/fp32.pt").write_bytes(b"PK\x03\x04"),
    "a weight without tensor": _saved("zero/norm.bias/fp32.pt", {"other": 1}),
    "a moment of another shape": _saved("zero/norm.bias/exp_avg.pt", {"param": torch.ones(9)}),
    "a flat weight of another size": _saved("zero/norm.bias/fp32.pt", torch.ones(9)),
    "shapes that are none": _states(param_shapes=[{"embed.weight": (-1, 2)}]),
    "groups that are none": _states(param_shapes=7),
    "a parameter that leads out": _states(param_shapes=[{"../../x": torch.Size([2])}]),
    "tied to nothing": _states(shared_params={"out.weight": "nowhere"}),
    "a buffer that is not there": _states(buffer_names=["nowhere"]),
}  # fmt: skip


@pytest.mark.parametrize("craft", CRAFTS)
def test_a_damaged_one_is_refused(tmp_path: Path, craft: str) -> None:
    root = write(tmp_path, *run_of(0))
    CRAFTS[craft](root)
    with pytest.raises(CorruptCheckpointError):
        ckpt.load(tmp_path, allow_pickle=True)


def test_options_that_fit_no_parameters_are_refused(tmp_path: Path) -> None:
    root = write(tmp_path, *run_of(0))
    torch.save({"param_groups": [{"lr": 1.0}, {"lr": 2.0}, {"lr": 3.0}]}, root / "zero/optimizer_state.pt")
    with pytest.raises(CheckpointError, match="3 groups with other options, for 2 groups"):
        ckpt.load(root, allow_pickle=True)
