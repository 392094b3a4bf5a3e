"""Copies between storages: the same bytes, on the way back too; after a kill, with damage, and beside others."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import StateComponent
from ckpt.catalog import copying
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.copying import copy_checkpoint
from ckpt.catalog.verify import examine, verify_checkpoint
from ckpt.cli.main import run
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.dist_checkpointing import save as save_sharded
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    FolderInUseError,
)
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import Place, place_of
from ckpt.ranks.topology import Topology
from ckpt.storage.objects import store as stores
from tests.support.object_server import ObjectServer
from tests.support.pace import patience
from tests.support.ranks import forkserver
from tests.support.states import Held, coordinator


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(stores, "RETRY_S", 0.3)
    with ObjectServer() as server, server.used():
        yield server


def state(seed: int = 0) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(700, 600, generator=generator), "b": torch.arange(9, dtype=torch.int16), "none": torch.zeros(0), "step": 3}


def saved(root: Path | str, steps: int = 2, backend: str = "zarr") -> Place:
    held = Held({})
    with coordinator(Topology.alone(), root, [StateComponent("model", held, "replicated")], backend=backend) as run:
        for step in range(steps):
            held.state = state(step)
            run.save_checkpoint(checkpoint_id=f"{step:08d}")
    return place_of(str(root))


def loaded(place: Place) -> dict[str, object]:
    found: dict[str, object] = ckpt.load(place)["model"]
    return found


def require_same(place: Place, seed: int) -> None:
    assert verify_checkpoint(place) == []
    whole = loaded(place)
    for key, value in state(seed).items():
        found = whole[key]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["zarr", "ocdbt", "safetensors"])
def test_a_copy_goes_to_a_store_and_back_and_is_the_same_to_the_bit(server: ObjectServer, tmp_path: Path, backend: str) -> None:
    src = saved(tmp_path / "run", backend=backend) / "checkpoint-00000001"
    away, back = place_of("s3://bucket/run/checkpoint-00000001"), tmp_path / "back" / "checkpoint-00000001"
    done = copy_checkpoint(src, away)
    assert done.num_found == 0 and done.num_files == examine(src).num_files
    copy_checkpoint(away, back)
    require_same(away, 1)
    require_same(back, 1)
    assert isinstance(src, Path)
    assert {file.relative_to(src): file.read_bytes() for file in src.rglob("*") if file.is_file()} == {
        file.relative_to(back): file.read_bytes() for file in back.rglob("*") if file.is_file()
    }
    assert catalog_at(back.parent).newest().path == back  # type: ignore[union-attr]


def test_the_checkpoint_of_a_sharded_state_dict_is_copied_with_those_inside_of_it(tmp_path: Path) -> None:
    (tmp_path / "iter").mkdir()
    tensor = ShardedTensor.from_rank_offsets("w", torch.arange(24.0).reshape(4, 6))
    save_sharded({"w": tensor, "common": {"lr": 0.1}}, str(tmp_path / "iter"))
    copy_checkpoint(tmp_path / "iter", tmp_path / "copy")
    assert verify_checkpoint(tmp_path / "copy") == []
    with pytest.raises(ConfigurationError, match="sharded state dicts are not supported in object stores"):
        copy_checkpoint(tmp_path / "iter", place_of("s3://bucket/iter"))


def _copy_until_it_is_compared(src: Place, dst: Place, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    copying._require_same = lambda *_: os._exit(9)  # type: ignore[assignment]
    copy_checkpoint(src, dst)


def _copy_until_it_is_told(src: Place, dst: Place, pipe: Connection) -> None:
    copying._require_same = lambda *_: (pipe.send("there"), pipe.recv(), sys.exit(3))  # type: ignore[assignment]
    copy_checkpoint(src, dst)


@pytest.mark.parametrize("to", ["folder", "store"])
def test_a_copy_that_was_killed_goes_on_with_what_is_there(server: ObjectServer, tmp_path: Path, to: str) -> None:
    src = saved(tmp_path / "run") / "checkpoint-00000001"
    dst = tmp_path / "copy" / "c" if to == "folder" else place_of("s3://bucket/copy/c")
    killed = forkserver().Process(target=_copy_until_it_is_compared, args=(src, dst, dict(os.environ)))
    killed.start()
    killed.join(patience(60.0))
    assert killed.exitcode == 9
    if isinstance(dst, Path):
        (cut,) = (file for file in (tmp_path / "copy").rglob("c/0/0"))
        with cut.open("r+b") as file:
            file.truncate(1000)
        assert not dst.exists()
    done = copy_checkpoint(src, dst)
    assert done.num_found == done.num_files - (2 if to == "folder" else 1)
    require_same(dst, 1)


def test_a_file_of_the_right_size_and_wrong_bytes_is_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, dst = saved(tmp_path / "run") / "checkpoint-00000000", tmp_path / "copy" / "checkpoint-00000000"
    write = copying.copy_files

    def damaged(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(copying, "copy_files", write)
        (file,) = (tmp_path / "copy").rglob("c/0/0")
        file.write_bytes(bytes(file.stat().st_size))

    monkeypatch.setattr(copying, "copy_files", damaged)
    copy_checkpoint(src, dst)
    require_same(dst, 0)


@pytest.mark.parametrize("damage", ["bytes", "cut", "gone"])
def test_a_damaged_checkpoint_is_not_copied(tmp_path: Path, damage: str) -> None:
    src, dst = saved(tmp_path / "run") / "checkpoint-00000000", tmp_path / "copy" / "checkpoint-00000000"
    assert isinstance(src, Path)
    (file,) = src.rglob("c/0/0")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage == "bytes" else data[:-5])
    if damage == "gone":
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"^(?!.*unpublished)"):
        copy_checkpoint(src, dst)
    assert not dst.parent.exists()


def test_nothing_is_written_over_and_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    src = saved(tmp_path / "run") / "checkpoint-00000000"
    with pytest.raises(CheckpointExistsError):
        copy_checkpoint(src, tmp_path / "run" / "checkpoint-00000001")
    with pytest.raises(CheckpointNotFoundError):
        copy_checkpoint(tmp_path, tmp_path / "copy")


def test_two_processes_do_not_make_the_same_copy_at_once(tmp_path: Path) -> None:
    src, dst = saved(tmp_path / "run") / "checkpoint-00000000", tmp_path / "copy" / "checkpoint-00000000"
    assert isinstance(src, Path)
    here, there = forkserver().Pipe()
    other = forkserver().Process(target=_copy_until_it_is_told, args=(src, dst, there))
    other.start()
    there.close()
    assert here.recv() == "there"
    with pytest.raises(FolderInUseError, match="is being made by another process"):
        copy_checkpoint(src, dst)
    here.send("go on")
    other.join(patience(60.0))
    assert other.exitcode == 3
    copy_checkpoint(src, dst)
    require_same(dst, 0)


def test_a_run_that_saves_where_a_copy_arrives_takes_it_for_nothing_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, root = saved(tmp_path / "run") / "checkpoint-00000000", tmp_path / "other"
    write = copying.copy_files

    def saved_meanwhile(*args: object) -> None:
        write(*args)  # type: ignore[arg-type]
        ckpt.save({"x": torch.arange(3)}, root / "checkpoint-beside")

    monkeypatch.setattr(copying, "copy_files", saved_meanwhile)
    copy_checkpoint(src, root / "checkpoint-00000000")
    require_same(root / "checkpoint-00000000", 0)
    assert verify_checkpoint(root / "checkpoint-beside") == []


def test_a_folder_is_copied_but_for_what_is_there(server: ObjectServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = saved(tmp_path / "run", steps=3)
    assert run(["copy", str(root), "s3://bucket/all", "--last", "2"]) == 0
    assert [one.id for one in catalog_at(place_of("s3://bucket/all")).committed()] == ["00000001", "00000002"]
    capsys.readouterr()
    assert run(["copy", str(root), "s3://bucket/all", "--json"]) == 0
    assert [row["copied"] for row in json.loads(capsys.readouterr().out)["checkpoints"]] == [True, False, False]
    assert run(["copy", "s3://bucket/all", str(tmp_path / "back")]) == 0
    for step in range(3):
        require_same(tmp_path / "back" / f"checkpoint-{step:08d}", step)


def test_a_checkpoint_of_the_same_name_with_another_content_stops_the_copy_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = saved(tmp_path / "run", steps=2)
    assert isinstance(root, Path)
    shutil.copytree(root / "checkpoint-00000000", tmp_path / "other" / "checkpoint-00000000")
    other = tmp_path / "other" / "checkpoint-00000000" / MANIFEST_NAME
    saved(tmp_path / "third", steps=1)
    shutil.copy(tmp_path / "third" / "checkpoint-00000000" / MANIFEST_NAME, other)
    assert run(["copy", str(root), str(tmp_path / "other")]) == 2
    assert "1 checkpoint of the same name with another content" in capsys.readouterr().err
    assert not (tmp_path / "other" / "checkpoint-00000001").exists()
