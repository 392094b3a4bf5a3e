"""Tensors are taken out of a checkpoint, and everything that is on record stays true: manifest, indexes, digests."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
import torch
import zarr

from ckpt import dist_checkpointing
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import ShardedObject, ShardedTensor
from ckpt.dist_checkpointing.folder import removing
from ckpt.dist_checkpointing.strategies.tensorstore import (
    TensorStoreLoadShardedStrategy,
    TensorStoreSaveShardedStrategy,
)
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
)
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, Index
from ckpt.format.manifest_parsing import parse_index
from ckpt.ranks.default_topology import use_topology
from ckpt.storage.stored import read_manifest
from tests.support.covering import sampled
from tests.support.ranks import Dead, Topology, run_ranks, run_threads
from tests.support.sharded_saves import SafetensorsSaveShardedStrategy
from tests.support.states import random_bits, same_bits

SAVES = {
    "zarr": ZarrSaveShardedStrategy(),
    "zarr, compressed": ZarrSaveShardedStrategy(
        compressors=[{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    ),
    "tensorstore, files": TensorStoreSaveShardedStrategy(kvstore="file"),
    "tensorstore, ocdbt": TensorStoreSaveShardedStrategy(),
}
TENSORS = {
    "model.w": random_bits((6, 4), torch.bfloat16, 1),
    "model.w2": random_bits((6,), torch.float32, 2),
    "optimizer.m": random_bits((5, 7), torch.float32, 3),
    "optimizer.v": random_bits((3, 2), torch.float32, 6),
    "optimizer.step": torch.tensor(9.0),
    "optimizer/état": random_bits((3,), torch.int64, 4),
    "empty": torch.zeros(0, 3),
    "z.optimizer": random_bits((4, 4), torch.float64, 5),
}
every_save = pytest.mark.parametrize("save", SAVES.values(), ids=SAVES.keys())
in_files = pytest.mark.parametrize("save", list(SAVES.values())[:3], ids=list(SAVES)[:3])


def part_of(key: str, tensor: torch.Tensor, topology: Topology) -> ShardedTensor:
    """One rank's part: rows, of which each rank writes its own, or runs of uneven length, or a replica."""
    rank, ranks = topology.rank, topology.world_size
    if tensor.dim() < 2 or not tensor.numel():
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
    if len(tensor) % ranks == 0:
        return ShardedTensor.from_rank_offsets(key, tensor.chunk(ranks)[rank], (0, rank, ranks))
    start, stop = (tensor.numel() * i * i // ranks**2 for i in (rank, rank + 1))
    return ShardedTensor.from_rank_offsets_flat(
        key, tensor.flatten()[start:stop], tuple(tensor.shape), flattened_range=slice(start, stop)
    )


def _save(topology: Topology, folder: Path, save: Any, tensors: Mapping[str, torch.Tensor] = TENSORS) -> None:
    with use_topology(topology):
        state: dict[str, Any] = {key: part_of(key, tensor, topology) for key, tensor in tensors.items()}
        state["rng"] = ShardedObject("rng", {"seed": torch.tensor(7)}, (1,), (0,), replica_id=topology.rank)
        dist_checkpointing.save(state | {"iteration": 3}, folder, save)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """Return the checkpoint of three ranks by this strategy, saved when it is first asked for."""
    found: dict[int, Path] = {}

    def get(save: Any) -> Path:
        if id(save) not in found:
            found[id(save)] = tmp_path_factory.mktemp("saved")
            run_threads(3, _save, found[id(save)], save, agree_s=30.0)
        return found[id(save)]

    return get


@pytest.fixture
def folder(tmp_path: Path, save: Any, saved: Callable[[Any], Path]) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(saved(save), tmp_path / "it")


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def indexes_of(folder: Path) -> list[Index]:
    return [parse_index(path.read_bytes()) for path in sorted(folder.glob("index-*.json"))]


def require_holds(folder: Path, keys: set[str]) -> None:
    """By every way to look: these tensors, to the bit, and no others; and the rest of the state as it was."""
    for load in (ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy()):
        assert set(load.load_tensors_metadata(folder)) == keys
        state: dict[str, Any] = {
            key: ShardedTensor.from_rank_offsets(key, torch.zeros_like(TENSORS[key])) for key in keys
        }
        state["rng"] = ShardedObject("rng", None, (1,), (0,))
        loaded = dist_checkpointing.load(state, folder, load)
        assert isinstance(loaded, dict)
        assert [key for key in keys if not same_bits(loaded[key], TENSORS[key])] == []
        assert (loaded["rng"]["seed"].item(), loaded["iteration"]) == (7, 3)


@every_save
def test_what_is_left_is_a_whole_checkpoint_of_the_other_tensors(folder: Path, save: Any) -> None:
    """S1.14: every key that starts with the prefix goes, wherever `/` stands, and no other."""
    assert verify_checkpoint(folder) == []
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    assert verify_checkpoint(folder) == []
    require_holds(folder, {"model.w", "model.w2", "empty", "z.optimizer"})
    wanted = ShardedTensor.from_rank_offsets("optimizer.m", torch.zeros(5, 7))
    with pytest.raises(MissingStateError, match="optimizer.m is asked for, and .* does not hold it"):
        dist_checkpointing.load({"m": wanted}, folder)
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        dist_checkpointing.save({"m": wanted}, folder)


@every_save
def test_manifest_and_indexes_say_of_the_rest_what_a_save_of_it_would_have_said(
    folder: Path, save: Any, tmp_path: Path
) -> None:
    """S1.14: size, checksum, writers, arrays; and no index lists a chunk or a file of what is gone."""
    before = sum(len(index.chunks) for index in indexes_of(folder))
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    kept = {key: tensor for key, tensor in TENSORS.items() if not key.startswith("optimizer")}
    (tmp_path / "again").mkdir()
    run_threads(3, _save, tmp_path / "again", save, kept, agree_s=30.0)
    found, again = read_manifest(folder), read_manifest(tmp_path / "again")
    assert found.arrays == again.arrays
    assert found.components == again.components
    for one, other in zip(indexes_of(folder), indexes_of(tmp_path / "again"), strict=True):
        assert (one.rank, one.pieces, one.chunks.keys()) == (other.rank, other.pieces, other.chunks.keys())
        assert _lasting(one.files) == _lasting(other.files)
    assert sum(len(index.chunks) for index in indexes_of(folder)) < before


def _lasting(files: Iterable[str]) -> set[str]:
    """Without the database's, and without the number that a file gets that takes the place of another one."""
    return {re.sub(r"(-\d)?\.safetensors$", "", path) for path in files if not path.startswith("arrays.ocdbt")}


@in_files
def test_descriptions_listed_in_the_manifest_of_an_older_save_go_like_those_in_indexes(folder: Path, save: Any) -> None:
    manifest = read_manifest(folder)
    for index in indexes_of(folder):
        for path in [path for path in index.files if path.endswith("zarr.json")]:
            record = index.files.pop(path)
            manifest.files[path] = record.size, record.rest
        data = index.to_bytes()
        (folder / manifest.index_paths()[index.rank]).write_bytes(data)
        manifest.files[manifest.index_paths()[index.rank]] = len(data), digest_of(data)
    (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    assert verify_checkpoint(folder) == []
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    assert verify_checkpoint(folder) == []
    require_holds(folder, {"model.w", "model.w2", "empty", "z.optimizer"})
    described = {path for path in read_manifest(folder).files if path.endswith("zarr.json")}
    assert {Path(path).parts[-2] for path in described if path.count("/") == 2} == {
        "model.w", "model.w2", "z.optimizer"
    }  # fmt: skip


@in_files
def test_the_arrays_themselves_are_gone_for_everybody(folder: Path, save: Any) -> None:
    """S1.14: in directories the bytes go, and what other libraries see is what the manifest says."""
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer.")
    assert {path.name for path in (folder / "sharded").iterdir()} == {
        "model.w", "model.w2", "optimizer%2F%C3%A9tat", "z.optimizer", "zarr.json",
    }  # fmt: skip
    assert set(zarr.open_group(folder / "sharded", mode="r").array_keys()) == {
        "model.w", "model.w2", "optimizer%2F%C3%A9tat", "z.optimizer",
    }  # fmt: skip


@pytest.mark.parametrize("save", [SAVES["tensorstore, ocdbt"]], ids=["ocdbt"])
def test_in_ocdbt_the_names_go_and_the_bytes_stay(folder: Path, save: Any) -> None:
    """S1.14: the joined database forgets the keys; the ranks' data files, which hold more than one array, stay as they were."""
    ranks = {name: data for name, data in files_of(folder).items() if "/rank-" in name}
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    keys = {key.decode().split("/")[1] for key in open_database(folder).list().result() if b"/" in key}
    assert keys == {"model.w", "model.w2", "z.optimizer", "zarr.json"}
    assert {name: data for name, data in files_of(folder).items() if "/rank-" in name} == ranks
    flipped = bytearray(data := max((data for _, data in ranks.values()), key=len))
    flipped[len(data) // 2] ^= 1
    (folder / next(name for name, (_, held) in ranks.items() if held == data)).write_bytes(flipped)
    assert verify_checkpoint(folder) != [], "also what nobody needs any more is answered for"


@every_save
def test_a_prefix_that_matches_nothing_changes_nothing(folder: Path, save: Any) -> None:
    """S1.14: not a byte, not a time; a prefix of names is not a part of names."""
    before = files_of(folder)
    for prefix in ("ptimizer", "sharded/model", "model.w22", "MODEL", "rng", "common", "model%2E", "^model", "*"):
        dist_checkpointing.remove_sharded_tensors(folder, prefix)
        assert files_of(folder) == before, prefix


@every_save
def test_everything_can_be_removed_step_by_step_or_at_once(folder: Path, save: Any) -> None:
    """S1.14: the common state and the objects stay."""
    for number, key in enumerate(sorted(TENSORS, reverse=True)):
        dist_checkpointing.remove_sharded_tensors(folder, key)
        assert verify_checkpoint(folder) == []
        assert {path.suffixes[0] for path in folder.glob("index-*.json")} == {f".{number + 1}"}
    require_holds(folder, set())
    assert read_manifest(folder).components["sharded"].size_bytes == 0


@every_save
def test_the_empty_prefix_is_every_tensor(folder: Path, save: Any) -> None:
    """S1.14: removal of everything."""
    dist_checkpointing.remove_sharded_tensors(folder, "")
    assert verify_checkpoint(folder) == []
    require_holds(folder, set())
    assert [path for path in (folder / "sharded").glob("*") if path.is_dir()] == []


def _remove(topology: Topology, folder: Path, prefix: str) -> None:
    with use_topology(topology):
        dist_checkpointing.remove_sharded_tensors(folder, prefix)
        with topology.phase("look"):
            assert set(dist_checkpointing.load_tensors_metadata(folder)) == {
                "model.w",
                "model.w2",
                "empty",
                "z.optimizer",
            }
        ZarrLoadShardedStrategy().remove_sharded_tensors(folder, "z")
        TensorStoreLoadShardedStrategy().remove_sharded_tensors(str(folder), "e")
        assert set(dist_checkpointing.load_tensors_metadata(folder)) == {"model.w", "model.w2"}


@pytest.mark.parametrize("save", [SafetensorsSaveShardedStrategy()], ids=["safetensors"])
def test_safetensors_files_are_left_as_they_are(folder: Path, save: Any) -> None:
    """S1.14: such a file has no gaps. No strategy of ours writes one here; a user's may."""
    before = files_of(folder)
    with pytest.raises(ConfigurationError, match="tensors cannot be removed from the safetensors files of"):
        dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    dist_checkpointing.remove_sharded_tensors(folder, "nothing starts so")
    assert files_of(folder) == before


@pytest.mark.parametrize("save", [SAVES["zarr"], SAVES["tensorstore, ocdbt"]], ids=["zarr", "ocdbt"])
def test_other_ranks_than_the_savers_remove_together(folder: Path, save: Any) -> None:
    """S1.14: collective; when it returns on a rank, it is done; also by either load strategy."""
    run_threads(2, _remove, folder, "optimizer", agree_s=30.0)
    assert verify_checkpoint(folder) == []
    require_holds(folder, {"model.w", "model.w2"})


def _remove_what_is_damaged(topology: Topology, folder: Path) -> tuple[str, int | None]:
    with use_topology(topology), pytest.raises(CorruptCheckpointError) as caught:
        dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize("save", [SAVES["zarr"]], ids=["zarr"])
def test_damaged_records_are_left_as_they_are_and_every_rank_says_so(folder: Path, save: Any) -> None:
    """S1.14: nothing is removed by an index that cannot be trusted."""
    index = folder / "index-00001.json"
    index.write_bytes(index.read_bytes().replace(b"optimizer", b"Optimizer"))
    before = files_of(folder)
    first, second = run_threads(2, _remove_what_is_damaged, folder, agree_s=30.0)
    assert first == second and first[1] == 0
    assert first[0].startswith(
        f"removal of optimizer* from {folder} failed in phase remove on rank 0: index-00001.json "
    )
    assert files_of(folder) == before
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        dist_checkpointing.remove_sharded_tensors(folder / "nowhere", "")
    with pytest.raises(CheckpointNotFoundError, match="not a distributed checkpoint"):
        dist_checkpointing.remove_sharded_tensors(folder / "sharded", "")


# Interrupted


class Fails:
    """Stands in for a call of the operating system; the n-th time it fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, n: int) -> None:
        self.left, self.really = n, getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        return self.really(*args, **options)


def require_whole_whether_or_not_removed(folder: Path, manifest_before: bytes) -> None:
    """What a load sees is all as it was, or all as it shall be; verify names what is left over, and nothing else."""
    is_as_before = (folder / "checkpoint_manifest.json").read_bytes() == manifest_before
    others = {key for key in TENSORS if not key.startswith("optimizer")}
    require_holds(folder, set(TENSORS) if is_as_before else others)
    odd = [
        problem for problem in verify_checkpoint(folder) if not problem.endswith(" does not belong to the checkpoint")
    ]
    if (folder / "arrays.ocdbt").exists() and is_as_before:  # the database changes just before the manifest
        odd = [problem for problem in odd if not problem.startswith("arrays.ocdbt/manifest.ocdbt ")]
    assert odd == []


@sampled("save", [SAVES["zarr"], SAVES["tensorstore, ocdbt"]], ids=["zarr", "ocdbt"])
@pytest.mark.parametrize("call", ["fsync", "replace", "unlink", "rmdir"])
def test_an_interrupted_removal_leaves_a_whole_checkpoint_and_the_next_one_ends_it(
    folder: Path, save: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1.14: before the manifest's rename nothing is changed, after it only files are left that belong to nothing."""
    before = (folder / "checkpoint_manifest.json").read_bytes()
    for n in range(1, 100):
        with monkeypatch.context() as patched:
            fails = Fails(patched, call, n)
            try:
                dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
            except OSError as error:
                assert "No space left on device" in str(error)
        require_whole_whether_or_not_removed(folder, before)
        if fails.left > 0:
            break
    assert n > 1 or (call == "rmdir" and save._storage().store != "zarr")
    assert verify_checkpoint(folder) == []
    require_holds(folder, {"model.w", "model.w2", "empty", "z.optimizer"})


def kill_between_database_and_manifest(folder: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left on device"):
        Fails(patched, "replace", 1)
        dist_checkpointing.remove_sharded_tensors(folder, prefix)
    assert any(problem.startswith("arrays.ocdbt/manifest.ocdbt ") for problem in verify_checkpoint(folder))


def open_database(folder: Path) -> ts.KvStore:
    base = {"driver": "file", "path": f"{folder}/arrays.ocdbt/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


@pytest.mark.parametrize("save", [SAVES["tensorstore, ocdbt"]], ids=["ocdbt"])
@pytest.mark.parametrize("later", ["optimizer", "z", "empty", "nothing starts so"])
def test_a_removal_of_anything_ends_one_that_was_killed_when_the_database_had_changed(
    folder: Path, save: Any, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1.14: also the locks that TensorStore leaves when it is killed go; what was not removed in the end, loads still find."""
    kill_between_database_and_manifest(folder, "optimizer", monkeypatch)
    (folder / "arrays.ocdbt/d/0123456789abcdef.__lock").write_bytes(b"half of it")
    require_holds(folder, set(TENSORS))
    dist_checkpointing.remove_sharded_tensors(folder, later)
    assert verify_checkpoint(folder) == []
    left = {key for key in TENSORS if not key.startswith(later)}
    require_holds(folder, left)
    assert list(folder.rglob("*.__lock")) == []
    before = files_of(folder)
    dist_checkpointing.remove_sharded_tensors(folder, "nothing starts so")
    assert files_of(folder) == before
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    assert verify_checkpoint(folder) == []
    require_holds(folder, {key for key in left if not key.startswith("optimizer")})


@pytest.mark.parametrize("save", [SAVES["tensorstore, ocdbt"]], ids=["ocdbt"])
@pytest.mark.parametrize("damage", ["flip the head", "empty the head", "lose the head", "flip a node", "lose a node"])
def test_a_database_that_is_damaged_is_not_put_on_record_as_if_it_were_sound(
    folder: Path, save: Any, damage: str
) -> None:
    """S1.14: what a killed removal leaves is told apart from damage."""
    head = folder / "arrays.ocdbt/manifest.ocdbt"
    file = head if damage.endswith("head") else max((folder / "arrays.ocdbt/d").iterdir())
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if damage.startswith("lose"):
        file.unlink()
    else:
        file.write_bytes(data if damage.startswith("flip") else b"")
    before = files_of(folder)
    for prefix in ("optimizer", "nothing starts so"):
        with pytest.raises(CorruptCheckpointError):
            dist_checkpointing.remove_sharded_tensors(folder, prefix)
        assert files_of(folder) == before
    assert verify_checkpoint(folder) != []


@pytest.mark.parametrize("save", [SAVES["tensorstore, ocdbt"]], ids=["ocdbt"])
def test_what_is_left_in_the_database_has_its_values_for_other_readers(folder: Path, save: Any) -> None:
    """S1.14: the references into the ranks' data files stay what they were, and every array is one that TensorStore opens."""
    before = {key: open_database(folder).read(key).result().value for key in open_database(folder).list().result()}
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    after = {key: open_database(folder).read(key).result().value for key in open_database(folder).list().result()}
    assert after == {key: value for key, value in before.items() if not key.startswith(b"sharded/optimizer")}
    assert len(before) > len(after) > 4 and all(after.values())
    for key in ("model.w2", "z.optimizer"):
        base = {"driver": "file", "path": f"{folder}/arrays.ocdbt/"}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"sharded/{key}/"},
            "fill_missing_data_reads": False,
        }
        stored = ts.open(spec, open=True).result().read().result()
        assert same_bits(torch.from_numpy(stored), TENSORS[key])


def test_many_arrays_leave_the_database_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1.14: however many go, no array is opened, and the database is written a few times (TensorStore may split a commit)."""
    tensors = {f"{'ab'[i % 2]}{i}": torch.arange(3.0) + i for i in range(200)}
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    dist_checkpointing.save(state, tmp_path, TensorStoreSaveShardedStrategy())
    versions = len(ts.ocdbt.dump(ts.KvStore.open(f"file://{tmp_path}/arrays.ocdbt/").result()).result()["versions"])
    with monkeypatch.context() as patched:
        patched.setattr(TensorStoreBackend, "list_arrays", None)
        patched.setattr(ts, "open", None)
        dist_checkpointing.remove_sharded_tensors(tmp_path, "a")
    dumped = ts.ocdbt.dump(ts.KvStore.open(f"file://{tmp_path}/arrays.ocdbt/").result()).result()
    assert 0 < len(dumped["versions"]) - versions < 20, "not one for each of the 100"
    assert verify_checkpoint(tmp_path) == []
    left = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(3)) for key in tensors if key.startswith("b")}
    loaded = dist_checkpointing.load(left, tmp_path)
    assert isinstance(loaded, dict)
    assert len(left) == 100 and all(same_bits(loaded[key], tensors[key]) for key in left)


@every_save
def test_the_lead_is_seen_to_move_at_every_step_of_a_removal(
    folder: Path, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1.14: else the others take it for absent when there is much to read, to digest and to delete."""
    steps: list[str] = []

    def watch(where: Any, name: str, said: str) -> None:
        really = getattr(where, name)

        def call(*args: Any, **options: Any) -> Any:
            steps.append(said)
            return really(*args, **options)

        monkeypatch.setattr(where, name, call)

    for name in ("read_index", "rest_digest", "read_listed_file"):
        watch(removing, name, name)
    watch(os, "unlink", "unlink")
    watch(os, "rmdir", "rmdir")
    watch(Topology, "progress", "progress")
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    by_store = {
        "ocdbt": {"rest_digest", "read_listed_file"},
        "zarr": {"rmdir"},
    }
    found = {"read_index", *by_store[save._storage().store]}
    assert found | {"unlink"} <= set(steps)
    alone = [(one, two) for one, two in itertools.pairwise(steps) if "progress" not in (one, two)]
    assert alone == []


def _die_at_the_rename(topology: Topology, folder: Path) -> None:
    os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    with use_topology(topology):
        dist_checkpointing.remove_sharded_tensors(folder, "optimizer")


@pytest.mark.parametrize("save", [SAVES["zarr"]], ids=["zarr"])
def test_who_is_killed_just_before_the_rename_has_changed_nothing(folder: Path, save: Any) -> None:
    """S1.14: not even what it had no time to clean up stays for ever."""
    before = files_of(folder)
    assert run_ranks(1, _die_at_the_rename, folder, expect_dead=[0]) == [Dead(-signal.SIGKILL)]
    assert {name: held for name, held in files_of(folder).items() if name in before} == before
    require_holds(folder, set(TENSORS))
    left = [problem.split(" does not belong")[0] for problem in verify_checkpoint(folder)]
    assert sorted(left)[1:] == [f"index-0000{rank}.1.json" for rank in range(3)]
    assert left[0].startswith(".checkpoint_manifest.json.")
    dist_checkpointing.remove_sharded_tensors(folder, "optimizer")
    assert verify_checkpoint(folder) == []
    require_holds(folder, {"model.w", "model.w2", "empty", "z.optimizer"})


def test_files_of_others_stay_whatever_they_look_like(tmp_path: Path) -> None:
    """Only what an index lists that the manifest has no more is removed, and the hidden folder of a dead save."""
    state = {key: ShardedTensor.from_rank_offsets(key, torch.arange(4)) for key in ("a", "b")}
    dist_checkpointing.save(state, tmp_path)
    others = {
        "sharded/mine/zarr.json": "{}",
        "sharded/mine/c/0": "x",
        "sharded/a/notes.txt": "x",
        "index-00000-of-00010.json": "x",
        "index-00009.json": "x",
        ".metadata.json.bak": "x",
        ".saving-notes": "x",
    }
    for path, text in others.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / ".saving-all-0a1b2c3d").mkdir()
    dist_checkpointing.remove_sharded_tensors(tmp_path, "a")
    assert {path: (tmp_path / path).read_text() for path in others if (tmp_path / path).exists()} == others
    assert not (tmp_path / ".saving-all-0a1b2c3d").exists() and not (tmp_path / "sharded/a/zarr.json").exists()
    assert set(dist_checkpointing.load_tensors_metadata(tmp_path)) == {"b"}
