"""Equal copies of a tensor that a model ties are loaded as one; unequal ones are an error that names them, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file, save_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt
from ckpt import Checkpointer, StateComponent
from ckpt.errors import CheckpointError, MissingStateError, ShapeMismatchError
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import Fitted, coordinator, random_bits, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

ROWS, WIDTH = 300, 8000
"""A little more than one piece that is compared at once."""


class Model(torch.nn.Module):
    """With an embedding that is also its head, if it is tied."""

    def __init__(self, seed: int, *, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = torch.nn.Embedding(ROWS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, ROWS, bias=False)
        self.norm = torch.nn.LayerNorm(3)
        if tied:
            self.head.weight = self.emb.weight


def _safetensors(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "both.safetensors")
    return folder / "both.safetensors"


def _torch_save(state: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save({"model": state}, folder / "both.pt")
    return folder / "both.pt"


def _dcp(state: dict[str, torch.Tensor], folder: Path) -> Path:
    dcp.save({"model": state}, checkpoint_id=folder / "both")
    return folder / "both"


def _ours(state: dict[str, torch.Tensor], folder: Path) -> Path:
    untied = Model(5, tied=False)
    untied.load_state_dict(state)
    with Checkpointer(folder / "both", model=untied, save_rng=False) as checkpoints:
        return Path(checkpoints.save(1))


def _state_dict(state: dict[str, torch.Tensor], folder: Path) -> Path:
    ckpt.save({"model": state}, folder / "1")
    return folder / "1"


WAYS: dict[str, Callable[[dict[str, torch.Tensor], Path], Path]] = {
    "safetensors": _safetensors, "torch.save": _torch_save, "dcp": _dcp, "ours": _ours, "ckpt.save": _state_dict,
}  # fmt: skip


def copies_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}


def restore(path: Path, into: torch.nn.Module, run: Path, **options: Any) -> Any:
    load = options.pop("load", "direct")
    with Checkpointer(run, model=into, save_rng=False, allow_pickle=True, load=load) as checkpoints:
        return checkpoints.restore(path, **options)


@sampled("load", ["direct", "two-stage"])
@pytest.mark.parametrize("way", WAYS)
def test_equal_copies_are_one_tensor(tmp_path: Path, way: str, load: str) -> None:
    saved, live = Model(0), Model(1)
    restore(WAYS[way](copies_of(saved), tmp_path), live, tmp_path / "run", load=load)
    assert live.head.weight is live.emb.weight
    for name, one in saved.state_dict().items():
        assert same_bits(live.state_dict()[name], one), name


@sampled("at", [0, ROWS * WIDTH - 1])
@pytest.mark.parametrize("way", WAYS)
def test_unequal_copies_are_refused_by_their_names_and_nothing_is_changed(tmp_path: Path, way: str, at: int) -> None:
    state, live = copies_of(Model(0)), Model(1)
    state["head.weight"].view(-1)[at] += 1
    path, before = WAYS[way](state, tmp_path), copies_of(live)
    with pytest.raises(
        MissingStateError, match=r"head\.weight differs from emb\.weight, and they are one tensor in this run"
    ):
        restore(path, live, tmp_path / "run")
    assert all(same_bits(live.state_dict()[name], one) for name, one in before.items())
    report = restore(path, live, tmp_path / "lax", strict=False)
    assert "head.weight (differs from emb.weight" in report.summary()
    assert same_bits(live.head.weight, state["emb.weight"])


def test_copies_of_other_shapes_or_types_do_not_fit(tmp_path: Path) -> None:
    for number, odd in enumerate((torch.ones(3), torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16))):
        state = copies_of(Model(0)) | {"head.weight": odd}
        (tmp_path / str(number)).mkdir()
        path = _safetensors(state, tmp_path / str(number))
        with pytest.raises(ShapeMismatchError, match=r"head\.weight"):
            restore(path, Model(1), tmp_path / f"run{number}")
        live = Model(1)
        assert "head.weight (found" in restore(path, live, tmp_path / f"lax{number}", strict=False).summary()
        assert same_bits(live.emb.weight, state["emb.weight"])


def test_a_file_that_has_the_second_name_alone_is_loaded(tmp_path: Path) -> None:
    """`save_model` of safetensors keeps one of the names, and not always the first."""
    saved, live = Model(0), Model(1)
    save_model(saved, str(tmp_path / "a.safetensors"))
    state = copies_of(saved)
    del state["emb.weight"]
    for number, path in enumerate((tmp_path / "a.safetensors", _safetensors(state, tmp_path))):
        restore(path, live, tmp_path / f"run{number}")
        assert same_bits(live.emb.weight, saved.emb.weight)


@pytest.mark.parametrize("lost", ["emb.weight", "head.weight", None])
def test_a_model_with_code_of_its_own_needs_one_name_too(tmp_path: Path, lost: str | None) -> None:
    saved, live = Model(0), Model(1)
    called: list[object] = []
    live.register_load_state_dict_post_hook(lambda module, keys: called.append(keys))
    state = {name: one for name, one in copies_of(saved).items() if name != lost}
    restore(_safetensors(state, tmp_path), live, tmp_path / "run")
    assert called and live.head.weight is live.emb.weight and same_bits(live.emb.weight, saved.emb.weight)


def test_equal_copies_fill_a_tied_state_dict(tmp_path: Path) -> None:
    saved, live = Model(0), Model(1)
    path = _safetensors(copies_of(saved), tmp_path)
    ckpt.load(path, into=dict(live.state_dict()))
    assert same_bits(live.head.weight, saved.head.weight)
    loaded = ckpt.load(path)
    assert loaded["head.weight"] is not loaded["emb.weight"] and same_bits(loaded["head.weight"], saved.head.weight)


def test_a_model_that_does_not_tie_gets_both(tmp_path: Path) -> None:
    saved, live = Model(0, tied=False), Model(1, tied=False)
    restore(_safetensors(copies_of(saved), tmp_path), live, tmp_path / "run")
    assert same_bits(live.head.weight, saved.head.weight) and same_bits(live.emb.weight, saved.emb.weight)


SHAPE = (7, 5)


def _rows(topology: Topology, whole: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (topology.world_size,))
    return distribute_tensor(whole, mesh, [Shard(0)])


def _load_shards(topology: Topology, root: Path) -> list[str]:
    want = random_bits(SHAPE, torch.float32, 1)
    said = []
    for name in ("equal", "unequal"):
        rows = _rows(topology, torch.zeros(SHAPE))
        held = Fitted({"emb": rows, "head": rows})
        made = coordinator(topology, root / "run", [StateComponent("model", held, "sharded")])
        try:
            made.load_checkpoint(checkpoint_path=root / f"{name}.safetensors")
        except CheckpointError as error:
            said.append(str(error))
            assert not rows.to_local().any()
        else:
            assert same_bits(rows.to_local(), _rows(topology, want).to_local())
    return said


def test_shards_are_compared_by_the_ranks_that_hold_them_and_all_refuse(tmp_path: Path) -> None:
    want = random_bits(SHAPE, torch.float32, 1)
    other = want.clone()
    other[-1, -1] = 3.0
    save_file({"emb": want, "head": want.clone()}, tmp_path / "equal.safetensors")
    save_file({"emb": want, "head": other}, tmp_path / "unequal.safetensors")
    found = run_ranks(3, _load_shards, tmp_path, process_group=True)
    assert len(found) == 3 and len({tuple(one) for one in found}) == 1
    (said,) = found[0]
    assert "head differs from emb" in said


class _Stage(Fitted):
    tied_names: ClassVar = {"head": "emb"}


def _load_stage(topology: Topology, root: Path) -> list[str]:
    said = []
    for name in ("equal", "unequal"):
        own = "emb" if topology.rank == 0 else "head"
        held = _Stage({own: torch.zeros(SHAPE)})
        made = coordinator(topology, root / "run", [StateComponent("model", held, "sharded")])
        try:
            made.load_checkpoint(checkpoint_path=root / f"{name}.safetensors")
        except CheckpointError as error:
            said.append(str(error))
            assert not held.state[own].any()
        else:
            assert same_bits(held.state[own], random_bits(SHAPE, torch.float32, 1))
    return said


def test_pipeline_stages_with_a_name_each_load_one_tensor(tmp_path: Path) -> None:
    want = random_bits(SHAPE, torch.float32, 1)
    save_file({"emb": want, "head": want.clone()}, tmp_path / "equal.safetensors")
    save_file({"emb": want, "head": random_bits(SHAPE, torch.float32, 2)}, tmp_path / "unequal.safetensors")
    found = run_ranks(2, _load_stage, tmp_path)
    assert found[0] == found[1] and "head differs from emb" in found[0][0] and len(found[0]) == 1
