"""Who writes and lists which file of a save, and that one sync of each rank covers all that it wrote."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from ckpt import StateComponent
from ckpt.catalog.verify import verify_checkpoint
from ckpt.format.manifest import CONFIG_NAME, MANIFEST_NAME
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import nap_s
from ckpt.storage.sink import FileSink
from ckpt.storage.stored import read_index, read_manifest
from tests.support.ranks import run_threads
from tests.support.states import BACKENDS, Held, coordinator, global_index


def _save(topology: Topology, root: Path, backend: str) -> None:
    model = {f"w{at}": global_index((300, 100)) + at for at in range(7)} | {"small": torch.arange(9)}
    own = {"seed": global_index((200, 150)) + topology.rank, "tiny": torch.tensor(topology.rank)}
    parts = [StateComponent("model", Held(model), "replicated"), StateComponent("rng", Held(own), "per_rank")]
    coordinator(topology, root, parts, backend=backend, config_text="seed: 1\n").save_checkpoint(checkpoint_id="1")


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_file_is_listed_once_by_the_rank_that_wrote_it(tmp_path: Path, backend: str) -> None:
    run_threads(3, _save, tmp_path, backend)
    folder = tmp_path / "checkpoint-1"
    manifest = read_manifest(folder)
    listed = [MANIFEST_NAME, *manifest.files]
    for rank in range(3):
        index = read_index(folder, manifest, rank)
        listed += index.files
        own = {path for path in index.files if "rank-" in path and not path.startswith("rng/zarr.json")}
        groups = {"rng/rank-00001/zarr.json", "rng/rank-00002/zarr.json"}  # the lead describes the groups of all
        assert all(f"rank-{rank:05d}" in path for path in own - groups), own
    assert sorted(listed) == sorted(files_below(folder))
    assert verify_checkpoint(folder) == []


@pytest.mark.parametrize("backend", ["zarr", "file"])
def test_descriptions_are_written_by_those_who_write_the_first_chunk(tmp_path: Path, backend: str) -> None:
    run_threads(3, _save, tmp_path, backend)
    manifest = read_manifest(tmp_path / "checkpoint-1")
    assert not [path for path in manifest.files if path.endswith("zarr.json")]
    indexes = [read_index(tmp_path / "checkpoint-1", manifest, rank) for rank in range(3)]
    described = [{path for path in index.files if path.endswith("zarr.json")} for index in indexes]
    for entry in manifest.arrays.values():
        if entry.path is not None:
            assert [f"{entry.path}/zarr.json" in paths for paths in described].index(True) == entry.writer_of(0)
    assert sum(map(len, described)) == len(set().union(*described))
    assert all(any(path.startswith("model/w") for path in paths) for paths in described)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_a_rank_is_written_after_its_one_sync(
    tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, set[str]]] = []
    original = FileSink.make_durable

    def make_durable(sink: FileSink) -> None:
        original(sink)
        synced.append((threading.current_thread().name, set(sink._sizes)))

    monkeypatch.setattr(FileSink, "make_durable", make_durable)
    run_threads(3, _save, tmp_path, backend)
    assert len(synced) == len({thread for thread, _ in synced}) == 3
    manifest = read_manifest(tmp_path / "checkpoint-1")
    # What the lead joins in the end.
    added = {path for path in manifest.files if path.startswith("arrays.ocdbt/") or path.endswith(".index.json")}
    covered = set().union(*(files for _, files in synced))
    assert files_below(tmp_path / "checkpoint-1") - covered - added == {MANIFEST_NAME, CONFIG_NAME}


def test_a_nap_is_a_fraction_of_the_wait_and_longer_where_many_ask() -> None:
    assert [nap_s(waited, 4) for waited in (0.0, 0.016, 10.0)] == [0.0002, 0.001, 0.005]
    assert nap_s(100.0, 64) == pytest.approx(0.02)
    assert all(ranks / nap_s(100.0, ranks) <= 3200.1 for ranks in (1, 16, 64, 1024, 4096))
