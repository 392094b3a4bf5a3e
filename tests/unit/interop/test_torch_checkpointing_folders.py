"""Checkpoints that torch_checkpointing 0.1.1 wrote are loaded to the bit; damaged and crafted ones are refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.cli.main import run
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.interop.programs import format_at
from ckpt.interop.torch_checkpointing.shards import shards_of_metadata
from ckpt.ranks.topology import Topology
from tests.golden.torch_checkpointing.contents import RANKS, own, raw, state
from tests.support.ranks import run_ranks
from tests.support.states import same_bits

GOLDEN = Path(__file__).parents[2] / "golden" / "torch_checkpointing"


def expected(folder: str) -> dict[str, Any]:
    """What a golden checkpoint holds. Of `safetensors` the model has no kinds of tensors, and no plain one."""
    whole = state()
    if folder == "alone/step-7":
        return whole | {"own": own(0), "data/tokens": raw(0)}
    if folder == "sharded/step-8":
        return {name: whole[name] for name in ("model", "optimizer")}
    if folder == "safetensors/step-7":
        model = {name: one.detach().contiguous() for name, one in whole["model"].items() if name != "plain"}
        return {"model": {"inner": model}, "step": 7}
    of_ranks = {f"own_{rank}": own(rank) for rank in range(RANKS)} | {f"data/tokens_{rank}": raw(rank) for rank in range(RANKS)}
    return whole | of_ranks


FOLDERS = ("alone/step-7", "sharded/step-7", "sharded/step-8", "safetensors/step-7")


def require_golden(found: Any, folder: str, *, has_order: bool = True) -> None:
    """`has_order`: the dimensions of tensors are in the order of memory that they were in."""
    require_same(found, expected(folder), folder, has_order)


def require_same(found: Any, wanted: Any, where: str, has_order: bool) -> None:
    if isinstance(wanted, torch.Tensor):
        assert same_bits(found, wanted) and type(found) is type(wanted), where
        assert not has_order or found.stride() == wanted.stride(), where
    elif isinstance(wanted, dict):
        assert type(found) is dict and found.keys() == wanted.keys(), (where, found.keys())
        for key, value in wanted.items():
            require_same(found[key], value, f"{where}.{key}", has_order)
    else:
        assert type(found) is type(wanted) and repr(found) == repr(wanted), (where, found)  # NaN differs from itself


@pytest.mark.parametrize("folder", FOLDERS)
def test_all_of_it_is_loaded(folder: str) -> None:
    assert format_at(GOLDEN / folder) == "torch-checkpointing"
    require_golden(ckpt.load(GOLDEN / folder, allow_pickle=True), folder)


def _load(topology: Topology) -> None:
    for folder in FOLDERS:
        require_golden(ckpt.load(GOLDEN / folder, allow_pickle=True, load="two-stage", topology=topology), folder)


def test_it_is_loaded_on_three_ranks() -> None:
    run_ranks(3, _load)


def test_a_checkpointer_finds_the_model_and_the_step(tmp_path: Path) -> None:
    model = torch.nn.Module()
    wanted = {name: one for name, one in state()["model"].items() if name != "half"}  # a method of modules
    for name, one in wanted.items():
        model.register_buffer(name, torch.zeros_like(one))
    with Checkpointer(tmp_path, model=model, save_rng=False, allow_pickle=True) as checkpoints:
        assert checkpoints.restore(GOLDEN / "sharded/step-7", strict=False) == 7
    assert all(same_bits(model.state_dict()[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("to", ["zarr", "dcp", "torch"])
def test_it_is_converted_without_a_difference(tmp_path: Path, folder: str, to: str) -> None:
    src, dst = str(GOLDEN / folder), str(tmp_path / "step-7")
    assert run(["convert", src, dst, "--to", to, "--allow-pickle"]) == 0
    if to != "torch":  # which writes tensors by rows
        assert run(["diff", src, dst, "--allow-pickle"]) == 0
    require_golden(ckpt.load(tmp_path / "step-7", allow_pickle=True), folder, has_order=to != "torch")


def test_its_model_becomes_safetensors(tmp_path: Path) -> None:
    for folder in FOLDERS:
        dst = tmp_path / folder.replace("/", "-")
        assert run(["convert", str(GOLDEN / folder), str(dst), "--to", "safetensors", "--allow-pickle"]) == 0
        found = ckpt.load(dst)
        wanted = expected(folder)["model"]
        named = {f"inner.{name}": one for name, one in wanted["inner"].items()} if "inner" in wanted else wanted
        assert found.keys() == named.keys()
        assert all(same_bits(found[name], one.detach().contiguous()) for name, one in named.items())


def test_show_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(GOLDEN / "sharded/step-8"), "--allow-pickle"]) == 0
    assert "model.strided" in capsys.readouterr().out


def test_the_export_for_hugging_face_is_read_by_its_index() -> None:
    found = ckpt.load(GOLDEN / "safetensors/step-7/model.safetensors.index.json")
    wanted = expected("safetensors/step-7")["model"]["inner"]
    assert found.keys() == {f"inner.{name}" for name in wanted}
    assert all(same_bits(found[f"inner.{name}"], one) for name, one in wanted.items())


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_is_read_only_where_pickles_are_allowed(folder: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="torch_checkpointing, whose metadata.pkl and .pt files are pickles"):
        ckpt.load(GOLDEN / folder)


def test_no_code_of_its_metadata_runs(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    root = _copy("sharded/step-7", tmp_path)
    (root / "metadata.pkl").write_bytes(pickle.dumps({"metadata": Harmful(), "version": "2.0"}))
    with pytest.raises(CorruptCheckpointError):
        ckpt.load(root, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_what_several_ranks_hold_alike_is_one_item(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.arange(3)}, tmp_path / f"model_{rank}.pt")
        torch.save({"rank": rank}, tmp_path / f"other_{rank}.pt")
        torch.save(torch.full((2,), rank), tmp_path / f"random_{rank}.pt")
    found = ckpt.load(tmp_path, allow_pickle=True)
    assert found.keys() == {"model", "other_0", "other_1", "random_0", "random_1"}
    assert same_bits(found["random_1"], torch.ones(2, dtype=torch.int64))


def test_an_item_named_state_is_no_old_checkpoint(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "train_state_0.pt")
    assert same_bits(ckpt.load(tmp_path, allow_pickle=True)["train_state"]["w"], torch.arange(3))


def test_items_of_one_name_in_two_forms_keep_their_suffix(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "model_0.pt")
    (tmp_path / "model.json").write_text('{"layers": 2}')
    found = ckpt.load(tmp_path, allow_pickle=True)
    assert found.keys() == {"model.pt", "model.json"} and found["model.json"] == {"layers": 2}


def _copy(folder: str, to: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / folder, to / "saved"))


def _metadata(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def craft(root: Path) -> None:
        said = pickle.loads((root / "metadata.pkl").read_bytes())
        change(said)
        (root / "metadata.pkl").write_bytes(pickle.dumps(said))

    return craft


def _embed(**changes: Any) -> Callable[[Path], object]:
    """Change what is said of the sharding of the model's `embed`."""
    path = '["embed"]'
    return _metadata(
        lambda said: said["metadata"]["model"]["nested_path_to_metadata"][path][0]["sharding_metadata"]["data"].update(changes)
    )


def _layout(rank: int, path: Any) -> Callable[[Path], object]:
    layout = {"file_path": path, "serialization_format": {"type": "TorchSerialization"}}
    return _metadata(lambda said: said["metadata"]["model"]["rank_to_layout_info"].update({rank: layout}))


def _mesh(shape: Any, data: Any) -> dict[str, Any]:
    return {"device_type": "cpu", "mesh_shape": shape, "mesh_data": data, "mesh_dim_names": None}


def _linked(root: Path) -> None:
    (root / "model_1.pt").rename(root.parent / "elsewhere")
    (root / "model_1.pt").symlink_to(root.parent / "elsewhere")


_SHARED = [{"ranks": tuple(range(100_000))}]
_SHARD, _COPY = {"type": "Shard", "dim": 0}, {"type": "Replicate"}
CRAFTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a file of a rank is missing": ("sharded/step-7", lambda root: (root / "model_3.pt").unlink(), "model_3.pt is missing"),
    "the same without metadata": ("sharded/step-8", lambda root: (root / "model_3.pt").unlink(), "elements of model.both"),
    "all files are missing": ("sharded/step-7", lambda root: [one.unlink() for one in root.glob("model_*")], "is missing"),
    "a file is cut off": ("sharded/step-7", lambda root: os.truncate(root / "model_1.pt", 3000), "model_1.pt"),
    "a file is empty": ("sharded/step-8", lambda root: os.truncate(root / "model_1.pt", 0), "model_1.pt"),
    "safetensors are cut off": ("safetensors/step-7", lambda root: os.truncate(root / "model_1.safetensors", 900), "model_1"),
    "a file of safetensors is missing": ("safetensors/step-7", lambda root: (root / "model_1.safetensors").unlink(), "is missing"),
    "a file is a link": ("sharded/step-7", _linked, "model_1.pt"),
    "metadata are cut off": ("sharded/step-7", lambda root: os.truncate(root / "metadata.pkl", 900), "metadata.pkl"),
    "metadata are a list": ("sharded/step-7", lambda root: (root / "metadata.pkl").write_bytes(pickle.dumps(["metadata"])), "saved"),
    "a path that leads out": ("sharded/step-7", _layout(1, "../model_1.pt"), "no file below"),
    "an absolute path": ("sharded/step-7", _layout(1, "/etc/passwd"), "no file below"),
    "a path that is none": ("sharded/step-7", _layout(1, 7), "saved"),
    "two ranks of one file": ("sharded/step-7", _layout(1, "model_0.pt"), "one file for several ranks"),
    "a rank that is none": ("sharded/step-7", _layout("x", "a.pt"), "saved"),  # type: ignore[arg-type]
    "a huge tensor": ("sharded/step-7", _embed(global_shape=[1 << 40, 1 << 20]), "embed"),
    "a shape beyond all": ("sharded/step-7", _embed(global_shape=[1 << 70, 5]), "saved"),
    "a negative shape": ("sharded/step-7", _embed(global_shape=[-7, 5]), "saved"),
    "a shape of other dimensions": ("sharded/step-7", _embed(global_shape=[35]), "embed"),
    "another type": ("sharded/step-7", _embed(dtype="torch.int32"), "its sharding says int32"),
    "overlapping shards": ("sharded/step-7", _embed(placements=[_COPY, _COPY]), "its sharding says"),
    "no copies but parts": ("sharded/step-7", _embed(placements=[_SHARD, _SHARD]), "its sharding says"),
    "a dimension that is not there": ("sharded/step-7", _embed(placements=[_COPY, {"type": "Shard", "dim": 2}]), "saved"),
    "a negative dimension": ("sharded/step-7", _embed(placements=[_COPY, {"type": "Shard", "dim": -1}]), "saved"),
    "a split without end": (
        "sharded/step-7",
        _embed(placements=[_COPY, {"type": "StridedShard", "dim": 0, "split_factor": 1 << 40}]),
        "saved",
    ),
    "too few placements": ("sharded/step-7", _embed(placements=[_SHARD]), "saved"),
    "a mesh without this rank": ("sharded/step-7", _embed(mesh_spec=_mesh((2, 2), (4, 5, 6, 7))), "saved"),
    "a mesh of other ranks": ("sharded/step-7", _embed(mesh_spec=_mesh((2, 2), (0, 1))), "saved"),
    "a mesh in another order": ("sharded/step-7", _embed(mesh_spec=_mesh((2, 2), (1, 0, 3, 2))), "its sharding says"),
    "ranks that are none": (
        "sharded/step-7",
        _metadata(lambda said: said["metadata"]["model"]["nested_path_to_metadata"]['["embed"]'][0].update(ranks=5)),
        "saved",
    ),
    "a tensor that no file holds": (
        "sharded/step-7",
        _metadata(
            lambda said: said["metadata"]["model"]["nested_path_to_metadata"].update(
                {'["lost"]': said["metadata"]["model"]["nested_path_to_metadata"]['["embed"]']}
            )
        ),
        "hold 0 elements of model.lost",
    ),
    "ranks that many tensors share": (
        "sharded/step-7",
        _metadata(
            lambda said: said["metadata"]["model"]["nested_path_to_metadata"].update(
                {json.dumps([f"x{at}"]): _SHARED for at in range(3000)}
            )
        ),
        "one another too often",
    ),
    "a path that is no JSON": (
        "sharded/step-7",
        _metadata(lambda said: said["metadata"]["model"]["nested_path_to_metadata"].update({"[": []})),
        "saved",
    ),
    "a path of other things": (
        "safetensors/step-7",
        _metadata(lambda said: said["metadata"]["model"]["nested_path_to_metadata"].update({"[null, 1.5]": []})),
        "is no path",
    ),
    "a path without end": (
        "sharded/step-7",
        _metadata(lambda said: said["metadata"]["model"]["nested_path_to_metadata"].update({"[" * 100_000: []})),
        "saved",
    ),
    "JSON without end": ("sharded/step-7", lambda root: (root / "run_0.json").write_text("[" * 100_000), "run_0.json is no JSON"),
    "JSON that is none": ("sharded/step-7", lambda root: (root / "run_0.json").write_text("{"), "run_0.json is no JSON"),
    "an index that is none": ("safetensors/step-7", lambda root: (root / "model.safetensors.index.json").write_text("[]"), "index"),
}  # fmt: skip


@pytest.mark.parametrize("craft", CRAFTS)
def test_a_damaged_one_is_refused(tmp_path: Path, craft: str) -> None:
    folder, damage, message = CRAFTS[craft]
    root = _copy(folder, tmp_path)
    damage(root)
    with pytest.raises(CorruptCheckpointError, match=message) as error:
        ckpt.load(root, allow_pickle=True)
    assert "\n" not in str(error.value)


def test_bytes_that_were_lost_are_found_when_they_are_read(tmp_path: Path) -> None:
    root = _copy("sharded/step-7", tmp_path)
    (root / "data/tokens_1.bin").unlink()
    (root / "data/tokens_1.bin").symlink_to("/etc/passwd")
    with pytest.raises(CorruptCheckpointError, match=r"tokens_1\.bin"):
        ckpt.load(root, allow_pickle=True)


def test_a_save_that_was_not_finished_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "sharded/step-7", tmp_path / "tmp_step-7")
    with pytest.raises(ConfigurationError, match="tmp_step-7 is a save of torch_checkpointing that was not finished"):
        ckpt.load(tmp_path / "tmp_step-7", allow_pickle=True)


def test_metadata_of_another_program_beside_weights_are_left_alone(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps({"columns": ["a"]}))
    assert format_at(tmp_path) == "torch"


def test_another_version_is_refused(tmp_path: Path) -> None:
    root = _copy("sharded/step-7", tmp_path)
    _metadata(lambda said: said.update(version="3.0"))(root)
    with pytest.raises(ConfigurationError, match=r"is of version '3.0', where 2.0 is read"):
        ckpt.load(root, allow_pickle=True)


def test_one_odd_tensor_does_not_spoil_the_rest(tmp_path: Path) -> None:
    root = _copy("sharded/step-7", tmp_path)
    _embed(placements=[_COPY, {"type": "RaggedShard"}])(root)
    with pytest.raises(MissingStateError, match="model.embed .has the placement 'RaggedShard', which is not read here"):
        ckpt.load(root, allow_pickle=True)
    found = ckpt.load(root, allow_pickle=True, strict=False)
    assert found["model"].keys() == state()["model"].keys() - {"embed"}


SHARD, STRIDED = "Shard", "StridedShard"


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        ((7, 5), (3,), [(SHARD, 0, 1)]),
        ((2, 3), (4,), [(SHARD, 0, 1)]),
        ((6, 7), (2, 3), [(SHARD, 1, 1), (SHARD, 0, 1)]),
        ((11, 2), (2, 3), [(SHARD, 0, 1), (SHARD, 0, 1)]),
        ((12, 2), (2, 3), [(STRIDED, 0, 3), (SHARD, 0, 1)]),
        ((13, 2), (2, 3), [(STRIDED, 0, 3), (SHARD, 0, 1)]),
        ((3, 17), (2, 2, 2), [(STRIDED, 1, 4), (STRIDED, 1, 2), (SHARD, 1, 1)]),
        ((7, 2), (3, 2), [(STRIDED, 0, 2), (SHARD, 0, 1)]),
        ((27, 2), (3, 4), [(STRIDED, 0, 4), (SHARD, 0, 1)]),
        ((4, 0), (2,), [(SHARD, 0, 1)]),
        ((), (2,), [None]),
        ((9, 4), (2, 2), [None, (SHARD, 0, 1)]),
    ],
)
def test_parts_are_those_that_cutting_makes(shape: tuple[int, ...], mesh: tuple[int, ...], placements: list[Any]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = torch.full_like(whole, -1)
    ranks = torch.arange(torch.Size(mesh).numel()).reshape(mesh)
    said = [
        {"type": "Replicate"} if one is None else {"type": one[0], "dim": one[1], "split_factor": one[2]} for one in placements
    ]
    data = {"global_shape": list(shape), "dtype": "torch.int64", "placements": said, "mesh_spec": _mesh(mesh, ranks.flatten().tolist())}
    for rank in ranks.flatten().tolist():
        local = whole
        cuts = [*zip(mesh, (ranks == rank).nonzero()[0].tolist(), placements, strict=True)]
        for side, at, one in reversed(cuts) if STRIDED in str(placements) else cuts:  # FSDP cuts what others have left
            if one is not None:
                local = _cut(local, side, one[1])[at]
        box = shards_of_metadata({"type": "DTensorShardingMetadata", "data": data}, rank).box
        assert box.shape == tuple(local.shape)
        found[box.slices] = local
    assert torch.equal(found, whole)


def test_parts_that_lie_apart_are_not_read() -> None:
    said = [{"type": "Shard", "dim": 0}, {"type": "StridedShard", "dim": 0, "split_factor": 2}]
    data = {"global_shape": [8], "dtype": "torch.int64", "placements": said, "mesh_spec": _mesh((2, 2), range(4))}
    with pytest.raises(ConfigurationError, match="^is in parts that lie apart, which are not read here$"):
        shards_of_metadata({"type": "DTensorShardingMetadata", "data": data}, 0)


def _cut(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    chunks = list(tensor.chunk(count, dim))
    return chunks + [tensor.narrow(dim, 0, 0)] * (count - len(chunks))


def test_torch_checkpointing_loads_a_model_that_was_converted_to_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing")
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.hf.metadata import HuggingFaceSafetensorsDistributedMetadataFormat

    ckpt.save({"model": {name: one.detach() for name, one in state()["model"].items()}}, tmp_path / "ours")
    assert run(["convert", str(tmp_path / "ours"), str(tmp_path / "plain"), "--to", "safetensors"]) == 0
    config = CheckpointManager.Config.with_sync_save()
    config.items = {"model": ItemSpec(resharder=DefaultResharder())}
    manager = config.build()
    into = {name: torch.zeros_like(one.detach()) for name, one in state()["model"].items()}
    manager.load(tmp_path / "plain", into={"model": into}, metadata_format=HuggingFaceSafetensorsDistributedMetadataFormat)
    manager.close()
    assert all(same_bits(into[name], one.detach()) for name, one in state()["model"].items())
