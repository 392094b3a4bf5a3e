"""A checkpoint goes over into every format with all that it holds, and comes back byte for byte, or nothing is left of the attempt."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import StateComponent, dist_checkpointing
from ckpt.backends.base import Backend
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import ShardedObject, ShardedTensor
from ckpt.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_plain_tensors,
    remove_sharded_tensors,
)
from ckpt.errors import CheckpointError, CheckpointExistsError, ConfigurationError, CorruptCheckpointError, StorageError
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import raw_bytes
from ckpt.format.manifest import ArrayEntry, CheckpointManifest, Index, index_name
from ckpt.format.records import CLIPPED_STORES
from ckpt.interop.rewriting import rewrite
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.state_digest import state_digest
from ckpt.storage.extents import ExtentReader
from ckpt.storage.stored import read_index, read_manifest
from tests.support.anonymous_memory import most_anonymous_bytes
from tests.support.covering import sampled
from tests.support.crafts import edit_json
from tests.support.ranks import run_threads
from tests.support.sharded_saves import bytes_of, save_training_state, threads
from tests.support.states import ALL_DTYPES, Held, coordinator, random_bits, same_bits

ZSTD = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
FORMATS = ("zarr", "ocdbt", "kimi")
PATTERNS = ("global", "replicated", "per_rank", "per_group", "per_node", "sharded")
FEW_DTYPES = (torch.bool, torch.float32, torch.bfloat16, torch.complex128)
CONFIG = "ckpt: as it was\n"
TILED = (13, 8003)
"""416 kB, cut into four tiles that are not alike: chunks at the edges are shorter."""


def made(name: str) -> Backend:
    match name:
        case "zarr":
            return ZarrBackend()
        case "zstd":
            return ZarrBackend(compressors=ZSTD)
        case "kimi":
            return KimiEngineBackend(pool=False)
        case _:
            return TensorStoreBackend(kvstore=name)


def of_sharded(topology: Topology) -> dict[str, Any]:
    """Four tiles, two of them on the last of three ranks; and tensors of a stage."""
    tiles = [
        ShardedTensor.at("t", random_bits(TILED, torch.float32, 5)[rows, columns].contiguous(), TILED, offsets)
        for rows, columns, offsets in (
            (slice(0, 7), slice(0, 4002), (0, 0)),
            (slice(0, 7), slice(4002, None), (0, 4002)),
            (slice(7, None), slice(0, 4002), (7, 0)),
            (slice(7, None), slice(4002, None), (7, 4002)),
        )
    ]
    mine = tiles[topology.rank :: 4]
    return {
        "t": mine[0],
        f"stage.{topology.rank}": random_bits((3, 5), torch.float32, topology.rank),
        "of": {f"rank {topology.rank}": topology.rank},
    }


def state_of(pattern: str, topology: Topology) -> dict[str, Any]:
    if pattern == "sharded":
        return of_sharded(topology)
    seed = {"per_rank": topology.rank, "per_group": 10 + topology.rank % 2, "per_node": 20 + topology.node_rank}.get(
        pattern, 30
    )
    large = random_bits((150, 120), torch.float32, seed)
    dtypes = ALL_DTYPES if pattern == "global" else FEW_DTYPES
    small = {str(dtype).removeprefix("torch."): random_bits((2, 3), dtype, seed) for dtype in dtypes}
    odd = {"0-dim": random_bits((), torch.bfloat16, seed), "empty": torch.zeros(0, 4), "__metadata__": torch.ones(2)}
    plain = {"seed": seed, "é/../": [1.5, None, True], "bytes": b"\x00\xff"}
    return {"w": large, "tied": large, **small, **odd, "plain": plain}


def components_of(topology: Topology, *, blank: bool = False) -> list[StateComponent]:
    states = {pattern: state_of(pattern, topology) for pattern in PATTERNS}
    if blank:
        states = {pattern: blanked(state) for pattern, state in states.items()}
    return [
        StateComponent(f"of_{key}", Held(state), key, process_group_name="dp" if key == "per_group" else None)
        for key, state in states.items()
    ]


def blanked(state: dict[str, Any]) -> dict[str, Any]:
    """The same structure with other values, to be loaded into."""
    empty: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, ShardedTensor):
            assert value.data is not None
            empty[key] = replace(value, data=torch.full_like(value.data, 7))
        else:
            empty[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else {}
    if "tied" in empty:
        empty["tied"] = empty["w"]
    return empty


def groups_of(topology: Topology) -> dict[str, list[int]]:
    return {"dp": [topology.rank % 2, topology.rank % 2 + 2]}


def save_every_pattern(topology: Topology, root: Path, backend: str) -> None:
    components = components_of(topology)
    saver = coordinator(
        topology, root, components, backend=made(backend), process_groups=groups_of(topology), config_text=CONFIG
    )
    saver.save_checkpoint(checkpoint_id="1")


def require_every_pattern(topology: Topology, path: Path) -> None:
    components = components_of(topology, blank=True)
    loader = coordinator(topology, path.parent, components, process_groups=groups_of(topology))
    loader.load_checkpoint(path)
    for component in components:
        assert isinstance(component.stateful, Held) and component.stateful.loaded is not None
        for key, value in state_of(component.pattern.value, topology).items():
            got = component.stateful.loaded[key]
            if isinstance(value, ShardedTensor):
                assert same_bits(got.data, value.data), key
            elif isinstance(value, torch.Tensor):
                assert same_bits(got, value), (component.key, key)
            elif component.key == "of_sharded":
                assert got == {f"rank {rank}": rank for rank in range(4)}
            else:
                assert got == value


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same state in every format, saved by four ranks of two hosts."""
    root = tmp_path_factory.mktemp("saved")
    for name in (*FORMATS, "zstd"):
        run_threads(4, save_every_pattern, root / name, name, nodes=[2, 2], agree_s=60.0, timeout_s=120.0)
    return {name: root / name / "checkpoint-1" for name in (*FORMATS, "zstd")}


def indexes_of(path: Path) -> dict[int, Index]:
    manifest = read_manifest(path)
    return {rank: read_index(path, manifest, rank) for rank in manifest.index_paths()}


def said_of_arrays(path: Path) -> dict[str, ArrayEntry]:
    """What the manifest says of arrays, wherever they are stored."""
    return {name: replace(entry, store=None) for name, entry in read_manifest(path).arrays.items()}


def require_the_same_checkpoint(src: Path, dst: Path) -> None:
    """All that is recorded of a checkpoint, but for its files."""
    old, new = read_manifest(src), read_manifest(dst)
    assert said_of_arrays(src) == said_of_arrays(dst)
    assert list(old.arrays) == list(new.arrays)
    for name in ("checkpoint_id", "timestamp", "world_size", "topology", "training_args_hash", "pytorch_version"):
        assert getattr(old, name) == getattr(new, name), name
    for key, component in old.components.items():
        assert replace(new.components[key], checksum=None) == replace(component, checksum=None)
    before, after = indexes_of(src), indexes_of(dst)
    for rank in {*before, *after}:
        one, other = before.get(rank, Index(rank)), after.get(rank, Index(rank))
        assert one.pieces == other.pieces and one.packed == other.packed
        assert {p: set(c) for p, c in one.chunks.items()} == {p: set(c) for p, c in other.chunks.items()}
    for path in ("config.yaml", *(p.relative_to(src) for p in src.rglob("plain.json"))):
        assert (src / path).read_bytes() == (dst / path).read_bytes()


def crossings() -> list[Any]:
    """All pairs; by default a round through the formats, and out of one that is compressed."""
    by_default = {("zarr", "kimi"), ("kimi", "ocdbt"), ("ocdbt", "zarr"), ("zstd", "kimi")}
    pairs = [(name, to) for name in (*FORMATS, "zstd") for to in FORMATS]
    return [pytest.param(*pair, marks=() if pair in by_default else pytest.mark.full) for pair in pairs]


@pytest.mark.parametrize(("name", "to"), crossings())
def test_every_format_goes_over_into_every_other_and_loads_as_it_was(
    saved: dict[str, Path], tmp_path: Path, name: str, to: str
) -> None:
    before = bytes_of(saved[name])
    moved: list[int] = []
    rewrite(saved[name], tmp_path / "new", made(to), Topology.alone(moved.append))
    require_the_same_checkpoint(saved[name], tmp_path / "new")
    assert verify_checkpoint(tmp_path / "new") == []
    assert sum(moved) >= sum(map(len, bytes_of(tmp_path / "new").values()))
    assert {entry.store for entry in read_manifest(tmp_path / "new").arrays.values()} == {made(to).store, None}
    assert bytes_of(saved[name]) == before, "the old one is left as it is"
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
    run_threads(4, require_every_pattern, tmp_path / "new", nodes=[2, 2], agree_s=60.0, timeout_s=120.0)


@sampled("by", ["ocdbt", "kimi"])
def test_there_and_back_is_the_same_to_the_byte(saved: dict[str, Path], tmp_path: Path, by: str) -> None:
    rewrite(saved["zarr"], tmp_path / "between", made(by), Topology.alone())
    rewrite(tmp_path / "between", tmp_path / "back", ZarrBackend(), Topology.alone())
    assert bytes_of(tmp_path / "back") == bytes_of(saved["zarr"])


def test_what_is_compressed_there_and_raw_here_is_what_a_raw_save_would_have_written(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    rewrite(saved["zstd"], tmp_path / "raw", ZarrBackend(), Topology.alone())
    assert all(
        extent.raw
        for index in indexes_of(tmp_path / "raw").values()
        for c in index.chunks.values()
        for extent in c.values()
    )
    raw, wanted = bytes_of(tmp_path / "raw"), bytes_of(saved["zarr"])
    assert raw.pop("checkpoint_manifest.json") != wanted.pop("checkpoint_manifest.json"), (
        "they were saved one after the other"
    )
    assert raw == wanted
    rewrite(tmp_path / "raw", tmp_path / "small", ZarrBackend(compressors=ZSTD), Topology.alone())
    small = bytes_of(tmp_path / "small")
    assert small == bytes_of(saved["zstd"])


@sampled("to", ["ocdbt", "kimi"])
def test_digests_go_over_with_the_chunks_that_both_store_alike(saved: dict[str, Path], tmp_path: Path, to: str) -> None:
    rewrite(saved["zarr"], tmp_path / "new", made(to), Topology.alone())
    old, new = indexes_of(saved["zarr"]), indexes_of(tmp_path / "new")
    entry = read_manifest(saved["zarr"]).arrays["of_sharded/t"]
    differ = {
        (path, number)
        for rank, index in old.items()
        for path, chunks in index.chunks.items()
        for number, extent in chunks.items()
        if extent.digests != new[rank].chunks[path][number].digests
    }
    is_clipped = made(to).store in CLIPPED_STORES
    assert differ == ({(entry.path, number) for number in (1, 2, 3)} if is_clipped else set())


def digest_of_model(topology: Topology, path: Path, rows: Sequence[int]) -> str:
    """Load `t` cut into rows, and return the digest of it."""
    ends = [sum(rows[: at + 1]) for at in range(len(rows))]
    first = ends[topology.rank] - rows[topology.rank]
    data = torch.full((rows[topology.rank], TILED[1]), -1.0)
    state = {"t": ShardedTensor.at("t", data, TILED, (first, 0))}
    model = Held(state)
    one = StateComponent("of_sharded", model, "sharded")
    coordinator(topology, path.parent, [one]).load_checkpoint(path, strict=False)
    return state_digest({"model": model}, topology)


@sampled("to", FORMATS)
def test_another_layout_loads_the_same_digest_from_every_format(
    saved: dict[str, Path], tmp_path: Path, to: str
) -> None:
    rewrite(saved["kimi"], tmp_path / "new", made(to), Topology.alone())
    (wanted,) = set(run_threads(2, digest_of_model, saved["kimi"], [6, 7], agree_s=60.0))
    assert set(run_threads(3, digest_of_model, tmp_path / "new", [1, 12, 0], agree_s=60.0)) == {wanted}


def test_what_an_incremental_save_has_linked_is_copied(tmp_path: Path) -> None:
    state = {"kept": random_bits((400, 100), torch.float32, 0), "changed": random_bits((200, 100), torch.float32, 1)}
    saver = coordinator(
        Topology.alone(),
        tmp_path / "root",
        [StateComponent("model", Held(state), "global")],
        backend=made("ocdbt"),
        saves=SaveSettings(incremental=True),
    )
    saver.save_checkpoint(checkpoint_id="1")
    state["changed"].add_(1)
    src = Path(saver.save_checkpoint(checkpoint_id="2"))
    assert any(path.stat().st_nlink == 2 for path in src.rglob("*") if path.is_file())
    assert indexes_of(src)[0].dead
    rewrite(src, tmp_path / "new", made("zarr"), Topology.alone())
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "new").rglob("*") if path.is_file())
    assert not indexes_of(tmp_path / "new")[0].dead
    loaded = Held({key: torch.zeros_like(value) for key, value in state.items()})
    coordinator(Topology.alone(), tmp_path, [StateComponent("model", loaded, "global")]).load_checkpoint(
        tmp_path / "new"
    )
    assert all(same_bits(loaded.state[key], value) for key, value in state.items())


@sampled("backend", ["zarr", "kimi", "ocdbt", "zstd"])
def test_damage_of_the_old_one_is_found_and_nothing_new_appears(
    saved: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    """A byte of a file of each kind that the new one is made of."""
    src = shutil.copytree(saved[backend], tmp_path / "src")
    kinds = {
        "zarr": ["of_sharded/t/c/1/1", "of_per_rank/rank-00002/packed-bool-00002/c/0"],
        "zstd": ["of_sharded/t/c/1/1", "of_per_rank/rank-00002/packed-bool-00002/c/0"],
        "ocdbt": ["arrays.ocdbt/rank-00001/d/*", "arrays.ocdbt/rank-00003/d/*"],
        "kimi": ["of_sharded/rank-00003-float32*", "of_per_rank/rank-00002/*complex128*"],
    }[backend]
    records = ["config.yaml", "of_per_rank/rank-00002/plain.json", "index-00003.json", "checkpoint_manifest.json"]
    for kind in (*kinds, *records):
        (file,) = src.glob(kind)
        whole = file.read_bytes()
        place = len(whole) - 1 if backend == "kimi" else len(whole) // 2  # whose header has room to spare
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CorruptCheckpointError):
            rewrite(src, tmp_path / "new", made("kimi" if backend == "zarr" else "zarr"), Topology.alone())
        file.write_bytes(whole)
    assert list(tmp_path.iterdir()) == [src]


def test_an_error_names_the_tensor(saved: dict[str, Path], tmp_path: Path) -> None:
    src = shutil.copytree(saved["kimi"], tmp_path / "src")
    extent = next(
        index.chunks[path] for index in indexes_of(src).values() for path in index.chunks if path == "of_sharded/t"
    )
    at = next(iter(extent.values()))
    with (src / at.file).open("r+b") as file:
        file.seek(at.offset)
        file.write(b"\x01\x02\x03\x04")
    with pytest.raises(CorruptCheckpointError, match="of_sharded: t: bytes .* are not those that were saved"):
        rewrite(src, tmp_path / "new", made("zarr"), Topology.alone())


def test_a_chunk_that_changes_in_memory_is_not_written(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ExtentReader.read

    def changing(self: ExtentReader, chunk: Any, parts: Any, stretches: Any = None) -> None:
        read(self, chunk, parts, stretches)
        raw_bytes(parts[0].out)[-1] ^= 1

    monkeypatch.setattr(ExtentReader, "read", changing)
    with pytest.raises(StorageError, match="was changed in memory between the snapshot and the disk"):
        rewrite(saved["zarr"], tmp_path / "new", made("kimi"), Topology.alone())
    assert list(tmp_path.iterdir()) == []


def put_on_record(src: Path, manifest: CheckpointManifest, index: Index) -> None:
    """Make a checkpoint that says this, and whose digests are right."""
    data = index.to_bytes()
    (src / index_name(index.rank)).write_bytes(data)
    manifest.files[index_name(index.rank)] = len(data), digest_of(data)
    (src / "checkpoint_manifest.json").write_bytes(manifest.to_bytes())


def test_an_index_that_lacks_a_chunk_is_told(saved: dict[str, Path], tmp_path: Path) -> None:
    src = shutil.copytree(saved["zarr"], tmp_path / "src")
    manifest = read_manifest(src)
    index = read_index(src, manifest, 2)
    del index.chunks["of_per_rank/rank-00002/w"]
    put_on_record(src, manifest, index)
    with pytest.raises(
        CorruptCheckpointError,
        match="index-00002.json: it lists 0 chunks of 'of_per_rank/rank-00002/w', of which rank 2 wrote 1",
    ):
        rewrite(src, tmp_path / "new", made("zarr"), Topology.alone())


class FullDisk(ZarrBackend):
    def join(self, root: Path, writers: Sequence[int], progress: Any = None) -> list[str]:
        raise OSError(28, "No space left on device", str(root))


class Forgetful(ZarrBackend):
    def join(self, root: Path, writers: Sequence[int], progress: Any = None) -> list[str]:
        (root / "of_replicated" / "w" / "c" / "0" / "0").write_bytes(bytes(150 * 120 * 4))
        return []


@pytest.mark.parametrize(
    ("backend", "error", "says"),
    [
        (
            FullDisk,
            StorageError,
            "rewrite into .*new: No space left on device: '",
        ),
        (Forgetful, StorageError, "what was written for .*new is not what is read back: of_replicated: w: bytes 0 to "),
    ],
)
def test_what_cannot_be_written_or_read_back_leaves_nothing(
    saved: dict[str, Path], tmp_path: Path, backend: type[ZarrBackend], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        rewrite(saved["kimi"], tmp_path / "new", backend(), Topology.alone())
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_made_is_told(saved: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file cannot be written; choose another folder: File exists: "):
        rewrite(saved["kimi"], tmp_path / "file" / "below", made("zarr"), Topology.alone())


def test_nothing_is_written_over(saved: dict[str, Path], tmp_path: Path) -> None:
    for there in ("folder", "file", "link"):
        (tmp_path / "folder" / "inside").mkdir(parents=True, exist_ok=True)
        (tmp_path / "file").touch()
        if there == "link":
            (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        with pytest.raises(CheckpointExistsError, match=f".*{there} is (a folder that is not empty|no folder)"):
            rewrite(saved["kimi"], tmp_path / there, made("zarr"), Topology.alone())
    (tmp_path / "empty").mkdir()
    rewrite(saved["kimi"], tmp_path / "empty", made("zarr"), Topology.alone())
    assert verify_checkpoint(tmp_path / "empty") == []


@pytest.mark.parametrize(("save", "to"), [("zarr", "ocdbt"), ("tensorstore", "zarr")])
def test_a_sharded_state_dict_goes_over_with_its_objects_and_common_state(tmp_path: Path, save: str, to: str) -> None:
    src = tmp_path / "src"
    src.mkdir()
    threads(3, save_training_state, src, (save, 1), {"common": {"step": 7, "t": torch.arange(3)}})
    rewrite(src, tmp_path / "new", made(to), Topology.alone())
    assert verify_checkpoint(tmp_path / "new") == []
    named = {"ocdbt": "tensorstore"}.get(to, to)
    assert ckpt.storage.metadata.maybe_load_config(tmp_path / "new").sharded_backend == named
    threads(2, _require_the_tensors, src, tmp_path / "new")
    assert load_common_state_dict(tmp_path / "new")["common"]["step"] == 7
    unique = [f"rng/shard_{rank}_3" for rank in range(3)]
    loaded = load({key: ShardedObject.empty_from_unique_key(key) for key in unique}, tmp_path / "new")
    assert isinstance(loaded, dict) and [loaded[key]["seed"].item() for key in unique] == [0, 1, 2]


def _require_the_tensors(topology: Topology, src: Path, new: Path) -> None:
    old, found = load_plain_tensors(src), load_plain_tensors(new)
    assert old.keys() == found.keys() and all(same_bits(old[key], found[key]) for key in old)


def test_a_sharded_state_dict_has_no_name_for_safetensors(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with use_topology(Topology.alone()):
        save_training_state(Topology.alone(), tmp_path / "src")
    with pytest.raises(ConfigurationError, match="knows as zarr or tensorstore alone, not as safetensors; choose one"):
        rewrite(tmp_path / "src", tmp_path / "new", made("kimi"), Topology.alone())
    assert not (tmp_path / "new").exists()


def test_gaps_that_a_removal_has_left_are_closed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    tensors = {key: random_bits((0, 3) if key == "e" else (40, 3), torch.float32, at) for at, key in enumerate("abcde")}
    with use_topology(Topology.alone()):
        dist_checkpointing.save(
            {k: ShardedTensor.from_rank_offsets(k, v) for k, v in tensors.items()}, tmp_path / "src", ("tensorstore", 1)
        )
        remove_sharded_tensors(tmp_path / "src", "b")
        remove_sharded_tensors(tmp_path / "src", "d")
    rewrite(tmp_path / "src", tmp_path / "new", made("zarr"), Topology.alone())
    found = load_plain_tensors(tmp_path / "new")
    assert found.keys() == {"a", "c", "e"} and all(same_bits(found[key], tensors[key]) for key in found)
    assert verify_checkpoint(tmp_path / "new") == []


def test_gaps_in_a_pack_are_closed(saved: dict[str, Path], tmp_path: Path) -> None:
    """No removal of ours leaves any, as what it removes from is not packed; but an index may say so."""
    src = shutil.copytree(saved["zarr"], tmp_path / "src")
    manifest = read_manifest(src)
    index = read_index(src, manifest, 1)
    gone = "of_per_rank/rank-00001/float32"
    index.pieces.pop(gone)
    manifest.arrays.pop(gone)
    rest = "of_per_rank/rank-00001/bool"
    moved = next(name for name in index.pieces if name.startswith("of_per_rank/rank-00001/") and "0-dim" in name)
    put_on_record(src, manifest, index)
    edit_json(src, f"{gone.rpartition('/')[0]}/plain.json", lambda rows: [one for one in rows if one[0] != ["float32"]])
    rewrite(src, tmp_path / "new", made("kimi"), Topology.alone())
    new = indexes_of(tmp_path / "new")[1]
    assert gone not in new.pieces and {rest, moved} <= set(new.pieces)
    assert verify_checkpoint(tmp_path / "new") == []


@pytest.mark.full
@pytest.mark.parametrize(("name", "to"), [("zarr", "kimi"), ("kimi", "ocdbt"), ("ocdbt", "zarr")])
def test_memory_is_needed_for_a_chunk_and_the_buffers_of_a_writer(tmp_path: Path, name: str, to: str) -> None:
    """512 MiB in chunks of at most 64, written from 32."""
    state = {str(at): random_bits((1 << 22, 4), torch.float32, at) for at in range(8)}
    saver = coordinator(
        Topology.alone(), tmp_path / "root", [StateComponent("model", Held(state), "global")], backend=made(name)
    )
    src = saver.save_checkpoint(checkpoint_id="1")
    imports = """
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.interop.rewriting import rewrite
from ckpt.ranks.topology import Topology
made = {"zarr": ZarrBackend, "ocdbt": TensorStoreBackend, "kimi": lambda: KimiEngineBackend(pool=False)}
"""
    measured = "rewrite(Path(sys.argv[1]), Path(sys.argv[2]), made[sys.argv[3]](), Topology.alone())"
    assert most_anonymous_bytes(imports, measured, src, tmp_path / "new", to) < 160 << 20


def test_every_error_is_one_of_ours(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint: it has no checkpoint_manifest.json"):
        rewrite(tmp_path, tmp_path / "new", made("zarr"), Topology.alone())
