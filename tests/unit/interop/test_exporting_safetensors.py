"""What is exported is read, tensor by tensor and bit for bit, by plain safetensors and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt import StateComponent, dist_checkpointing
from ckpt.backends.zarr import ZarrBackend
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    StorageError,
)
from ckpt.format.box import whole
from ckpt.format.dtypes import raw_bytes
from ckpt.interop.new_files import WrittenRun
from ckpt.interop.opened import Piece
from ckpt.interop.registry import source_at
from ckpt.interop.safetensors import writing as exporting_safetensors
from ckpt.interop.safetensors.writing import (
    Exported,
    Selection,
    export,
    model_files_in,
    select,
    select_of_megatron,
)
from ckpt.loading.direct import DirectLoad
from ckpt.loading.sources import ManifestSource
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from ckpt.storage.files import read_once
from tests.golden.megatron.truth import truth
from tests.support.anonymous_memory import most_anonymous_bytes
from tests.support.crafts import edit_manifest
from tests.support.ranks import run_threads
from tests.support.states import ALL_DTYPES, Held, coordinator, random_bits, same_bits

LARGE = 1 << 62
ZSTD = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]


def saved(root: Path, state: dict[str, Any], backend: Any = "zarr", key: str = "model") -> Path:
    """A checkpoint of one rank."""
    one = StateComponent(key, Held(state), "global")
    return Path(coordinator(Topology.alone(), root, [one], backend=backend).save_checkpoint(checkpoint_id="1"))


def selected(src: Path, component: str | None = "model") -> Selection:
    source = source_at(src, Topology.alone(), DirectLoad(read_at=read_once))
    assert isinstance(source, ManifestSource)
    return select(source, src, component)


def exported(src: Path, dst: Path, most: int = LARGE, component: str | None = "model") -> Exported:
    return export(selected(src, component), dst, most, Topology.alone())


def as_stored(value: torch.Tensor) -> torch.Tensor:
    """How a tensor is found in a file: the format knows no complex128 and no complex32, and counts the halves of float4."""
    if value.dtype is torch.float4_e2m1fn_x2 and value.dim() == 0:
        return value.view(1)
    return torch.view_as_real(value) if value.dtype in (torch.complex128, torch.complex32) else value


@pytest.mark.parametrize("backend", ["zarr", "ocdbt", ZarrBackend(compressors=ZSTD)], ids=["zarr", "ocdbt", "zstd"])
def test_every_type_and_shape_is_read_by_name_bit_for_bit(tmp_path: Path, backend: Any) -> None:
    shapes = ((), (0, 3), (7,), (90, 1000))
    state = {f"{dtype}.{shape}".replace("torch.", ""): random_bits(shape, dtype, at) for dtype in ALL_DTYPES for at, shape in enumerate(shapes)}  # fmt: skip # noqa: E501
    done = exported(saved(tmp_path, state, backend), tmp_path / "plain")
    assert [path.name for path in (tmp_path / "plain").iterdir()] == ["model.safetensors"] == list(done.files)
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(same_bits(found[name], as_stored(value)) for name, value in state.items())
    assert sorted(done.as_pairs) == sorted(name for name in state if name.startswith(("complex128", "complex32")))
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_what_takes_more_becomes_several_files_and_an_index_as_hugging_face_has_it(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 30, "c": 200, "d": 20, "e": 20, "f": 21}
    state = {name: random_bits((size, 25), torch.float32, size) for name, size in sizes.items()}
    done = exported(saved(tmp_path, state), tmp_path / "plain", 4000)
    names = [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert list(done.files) == names
    index = json.loads((tmp_path / "plain" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in state.values())}
    assert index["weight_map"] == dict(
        zip(state, [names[0]] * 2 + [names[1]] + [names[2]] * 2 + [names[3]], strict=True)
    )
    assert index.keys() == {"metadata", "weight_map"}
    for name, value in state.items():
        assert same_bits(load_file(tmp_path / "plain" / index["weight_map"][name])[name], value)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [*names, "model.safetensors.index.json"]


def test_of_tied_tensors_the_first_is_written_and_the_others_are_told(tmp_path: Path) -> None:
    wte = random_bits((300, 100), torch.bfloat16, 0)
    src = saved(tmp_path, {"wte": {"weight": wte}, "lm_head": {"weight": wte}, "bias": torch.arange(5)})
    selection = selected(src)
    assert selection.aliases == {"lm_head.weight": "wte.weight"}
    export(selection, tmp_path / "plain", LARGE, Topology.alone())
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == {"wte.weight", "bias"}


def _save_of_ranks(topology: Topology, root: Path) -> None:
    rows = slice(3 * topology.rank, 3 * topology.rank + 3)
    tile = ShardedTensor.at(
        "w", random_bits((12, 5000), torch.float32, 0)[rows].contiguous(), (12, 5000), (rows.start, 0)
    )
    small = random_bits((4, 4), torch.float32, 1)[topology.rank]
    states = {
        "model": {"w": tile, "small": ShardedTensor.at("small", small[None].clone(), (4, 4), (topology.rank, 0))},
        "rng": {"state": random_bits((80,), torch.uint8, topology.rank), "seed": topology.rank},
    }
    components = [
        StateComponent("model", Held(states["model"]), "sharded"),
        StateComponent("rng", Held(states["rng"]), "per_rank"),
    ]
    coordinator(topology, root, components, backend="ocdbt").save_checkpoint(checkpoint_id="1")


def test_what_four_ranks_hold_together_is_whole_tensors(tmp_path: Path) -> None:
    run_threads(4, _save_of_ranks, tmp_path, agree_s=60.0)
    src = tmp_path / "checkpoint-1"
    exported(src, tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert same_bits(found["w"], random_bits((12, 5000), torch.float32, 0))
    assert same_bits(found["small"], random_bits((4, 4), torch.float32, 1))
    copies = "rank-00000, rank-00001, rank-00002, rank-00003"
    with pytest.raises(
        ConfigurationError,
        match=f"rng is per_rank and holds {copies}; choose one copy, such as component=rng/rank-00000$",
    ):
        selected(src, "rng")
    exported(src, tmp_path / "rng", component="rng/rank-00002")
    assert same_bits(load_file(tmp_path / "rng" / "model.safetensors")["state"], random_bits((80,), torch.uint8, 2))
    exported(src, tmp_path / "all", component=None)
    names = {"model/w", "model/small", *(f"rng/rank-0000{rank}/state" for rank in range(4))}
    assert load_file(tmp_path / "all" / "model.safetensors").keys() == names


@pytest.mark.parametrize("name", ["tp2", "dp2", "old-names", "zero-dim"])
def test_tensors_that_megatron_core_wrote_are_exported_without_its_pickles(tmp_path: Path, name: str) -> None:
    src = shutil.copytree(truth(name).path, tmp_path / "src")
    for pickled in src.rglob("*.pt"):
        pickled.write_bytes(b"?")
    export(select_of_megatron(src, None, Topology.alone()), tmp_path / "plain", LARGE, Topology.alone())
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == truth(name).tensors.keys()
    assert all(same_bits(found[key], as_stored(tensor)) for key, tensor in truth(name).tensors.items())


@pytest.mark.parametrize("grid", [[10**9, 10**9], [10**9, 1]])
@pytest.mark.parametrize("is_raw", [True, False])
def test_a_forged_shape_is_refused_before_it_is_cut_into_pieces(tmp_path: Path, is_raw: bool, grid: list[int]) -> None:
    big = torch.arange(40_000.0).reshape(200, 200)
    src = saved(tmp_path / "saved", {"w": big}, "zarr" if is_raw else ZarrBackend(compressors=ZSTD))
    chunks = 10**9 // grid[1]
    change = {"shape": [10**9, 10**9], "grid": grid, "writers": [[0, 0, chunks]]}
    edit_manifest(src, lambda tree: tree["arrays"]["model/w"].update(change))
    with pytest.raises(CorruptCheckpointError, match="w"):
        source_at(src, Topology.alone(), DirectLoad())


@pytest.mark.parametrize("change", [{"shape": [10**8] * 2}, {"shape": [10**8] * 2, "chunks": [10**8] * 2}])
def test_so_is_one_of_megatron_core(tmp_path: Path, change: dict[str, Any]) -> None:
    src = shutil.copytree(truth("tp2").path, tmp_path / "src")
    for described in [one for one in src.rglob(".zarray") if one.stat().st_size]:
        document = json.loads(described.read_text())
        if len(document["shape"]) == 2:
            described.write_text(json.dumps(document | change))
    with pytest.raises(CorruptCheckpointError, match=r"chunk .* (is missing|has \d+ bytes)"):
        select_of_megatron(src, None, Topology.alone())


def test_of_a_sharded_state_dict_a_component_is_how_keys_begin(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    tensors = {
        key: random_bits((5, 4), torch.float32, at)
        for at, key in enumerate(("model.a", "model.b.c", "optimizer.model.a"))
    }
    with use_topology(Topology.alone()):
        dist_checkpointing.save(
            {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}, tmp_path / "src"
        )
    exported(tmp_path / "src", tmp_path / "plain")
    found = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == {"a", "b.c"} and same_bits(found["b.c"], tensors["model.b.c"])
    exported(tmp_path / "src", tmp_path / "all", component=None)
    assert load_file(tmp_path / "all" / "model.safetensors").keys() == tensors.keys()
    with pytest.raises(
        MissingStateError,
        match="holds no tensor of component=mode; it has model, optimizer. Choose another, or component=None",
    ):
        selected(tmp_path / "src", "mode")


def test_a_name_that_the_format_keeps_for_itself_is_told(tmp_path: Path) -> None:
    done = exported(saved(tmp_path, {"__metadata__": torch.ones(3), "w": torch.ones(2)}), tmp_path / "plain")
    assert done.renamed == {"__metadata__": "__metadata__[0:3]"}
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == {"__metadata__[0:3]", "w"}


@pytest.mark.usefixtures("turns")
@settings(max_examples=15)
@given(data=st.data())
def test_any_tensor_goes_over_in_pieces_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("pieces")
    shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=3)))
    value = random_bits(shape, data.draw(st.sampled_from(ALL_DTYPES)), 0)
    most = data.draw(st.integers(16, 200))
    src = saved(root, {"w": value})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting_safetensors, "AT_ONCE_BYTES", most)
        selection = selected(src)
        tensor = selection.tensors["w"]
        entry = replace(tensor.entry, grid=(data.draw(st.integers(1, 4)), *shape[1:]) if shape else ())
        selection = replace(selection, tensors={"w": tensor._replace(entry=entry)})
        _, *sections = exporting_safetensors._sections(
            "file", [Piece("w", whole(shape), entry.dtype)], selection.tensors
        )
        pieces = [bytes(piece.data) for piece in exporting_safetensors._placed(selection, root, sections)]
    assert b"".join(pieces) == raw_bytes(value).numpy().tobytes()
    assert all(len(piece) <= most for piece in pieces)
    shutil.rmtree(root)


def test_damage_is_found_and_nothing_appears(tmp_path: Path) -> None:
    src = saved(tmp_path / "root", {"w": random_bits((300, 100), torch.float32, 0), "b": torch.ones(3)})
    chunk = src / "model" / "w" / "c" / "0" / "0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pytest.raises(CorruptCheckpointError, match="model: w: bytes 0 to 120000 of .* are not those that were saved"):
        exported(src, tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


def test_what_is_not_read_back_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = saved(tmp_path / "root", {"w": torch.ones(300, 100)})
    write = exporting_safetensors.write_pieces

    def forgetful(*args: Any) -> list[WrittenRun]:
        runs = write(*args)
        with runs[0].path.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"\xff")
        return runs

    monkeypatch.setattr(exporting_safetensors, "write_pieces", forgetful)
    with pytest.raises(StorageError, match="is not what is read back: bytes 0 to .* of model.safetensors were changed"):
        exported(src, tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


def test_mistakes_are_one_sentence_before_a_byte_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = saved(tmp_path / "root", {"w": torch.ones(3)})
    (tmp_path / "taken").touch()
    with pytest.raises(CheckpointExistsError, match="taken is no folder"):
        exported(src, tmp_path / "taken")
    with pytest.raises(MissingStateError, match="holds no tensor of component=other; it has model. Choose another"):
        selected(src, "other")
    with pytest.raises(CheckpointNotFoundError, match="is not a checkpoint"):
        selected(tmp_path)
    monkeypatch.setattr(exporting_safetensors, "MOST_HEADER_BYTES", 100)
    with pytest.raises(
        ConfigurationError, match="model.safetensors would hold 1 tensors, .* set a smaller max_shard_size"
    ):
        exported(src, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.full
def test_memory_is_needed_for_a_piece_of_a_tensor(tmp_path: Path) -> None:
    """One tensor of 512 MiB: 64 MiB are written while the next 64 MiB are read."""
    src = saved(tmp_path / "root", {"w": random_bits((1 << 22, 32), torch.float32, 0)})
    taken = most_anonymous_bytes(
        "from ckpt.interop.registry import source_at\nfrom ckpt.interop.safetensors.writing import export, select\n"
        "from ckpt.loading.direct import DirectLoad\nfrom ckpt.ranks.topology import Topology",
        "one, src = Topology.alone(), Path(sys.argv[1]); source = source_at(src, one, DirectLoad()); "
        'export(select(source, src, "model"), Path(sys.argv[2]), 300 << 20, one)',
        src,
        tmp_path / "plain",
    )
    assert taken < 150 << 20


def test_files_beside_a_model_are_copied_piece_by_piece_and_links_are_left_out(tmp_path: Path) -> None:
    """A stranger's folder may hold files of any size: none of them is read into memory whole."""
    src = coordinator(Topology.alone(), tmp_path, [StateComponent("model", Held({"w": torch.arange(9)}), "replicated")])
    path = src.save_checkpoint(checkpoint_id="1")
    assert path is not None
    (beside := tmp_path / "beside").mkdir()
    contents = {"config.json": b"{}", "merges.txt": b"", "tokenizer.model": os.urandom((1 << 20) + 5)}
    for name, content in contents.items():
        (beside / name).write_bytes(content)
    (beside / "vocab.txt").symlink_to(__file__)
    with (beside / "large.model").open("wb") as file:
        file.truncate(96 << 20)
    tracemalloc.start()
    try:
        files = model_files_in(beside)
        export(selected(Path(path)), tmp_path / "dst", LARGE, Topology.alone(), beside=files)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 16 << 20
    found = {one.name: one for one in (tmp_path / "dst").iterdir()}
    assert set(found) == {*contents, "large.model", "model.safetensors"}
    assert all(found[name].read_bytes() == content for name, content in contents.items())
    assert found["large.model"].stat().st_size == 96 << 20
