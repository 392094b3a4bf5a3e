"""Megatron-Core's `dist_checkpointing` with addresses in object stores: the same calls, and the same answers as with folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import dist_checkpointing
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing.mapping import ShardedTensorFactory
from ckpt.dist_checkpointing.strategies.async_utils import AsyncRequest
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    FolderInUseError,
)
from ckpt.format.places import place_of
from ckpt.ranks.topology import Topology
from ckpt.storage.objects import store
from tests.support.covering import sampled
from tests.support.object_server import ObjectServer
from tests.support.sharded_saves import (
    SAVES,
    require_training_state,
    save_training_state,
    the_one,
    threads,
    train,
    training_state,
)

AT = "s3://bucket/megatron/iter_7"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(store, "RETRY_S", 0.3)
    with ObjectServer() as server, server.used():
        yield server


@sampled("name", SAVES)
def test_two_ranks_save_and_others_load(server: ObjectServer, name: str) -> None:
    threads(2, save_training_state, AT, SAVES[name])
    threads(2, require_training_state, AT)
    (loaded,) = threads(1, lambda topology: dist_checkpointing.load_plain_tensors(AT))
    assert torch.equal(loaded["w"], torch.cat([training_state(_of(rank))["w"].data for rank in range(2)]))
    assert dist_checkpointing.check_is_distributed_checkpoint(AT)
    assert set(dist_checkpointing.load_tensors_metadata(AT)) == {"w", "p", "step"}
    assert verify_checkpoint(place_of(AT)) == []
    assert sorted(ckpt.load(AT)["sharded"]) == ["p", "step", "w"]
    assert not [key for key in server.objects["bucket"] if ".attempt-" in key]
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        the_one(threads(2, _failure_of, save_training_state, AT))


def test_a_background_save_is_complete_once_it_is_finalized(server: ObjectServer) -> None:
    def save(topology: Topology) -> None:
        state = training_state(topology)
        request = dist_checkpointing.save(state, AT, async_sharded_save=True)
        train(state)
        assert isinstance(request, AsyncRequest)
        assert not dist_checkpointing.check_is_distributed_checkpoint(AT)
        with pytest.raises(CheckpointExistsError, match="is under way"):
            dist_checkpointing.save(state, AT)
        request.execute_sync()

    threads(2, save)
    threads(2, require_training_state, AT)


@pytest.mark.parametrize("step", ["first put", "data", "manifest", "metadata.json"])
def test_what_a_failed_save_has_left_is_no_checkpoint_and_the_next_one_removes_it(server: ObjectServer, step: str) -> None:
    def fault(number: int, operation: str, key: str) -> str | None:
        met = {
            "first put": "put" in operation and "iter_7/" in key,
            "data": "/c/" in key or "packed" in key,
            "manifest": key.endswith("iter_7/checkpoint_manifest.json") and operation == "put",
            "metadata.json": key.endswith("metadata.json") and operation == "put",
        }[step]
        return "500" if met else None

    server.fault = fault
    with pytest.raises(CheckpointError):
        the_one(threads(2, _failure_of, save_training_state, AT))
    server.forget()
    with pytest.raises(CheckpointNotFoundError):
        dist_checkpointing.load_common_state_dict(AT)
    threads(2, save_training_state, AT, None, {"rng": 5})
    state = dist_checkpointing.load_common_state_dict(AT)
    assert state == {"rng": 5}
    assert not dist_checkpointing.load_sharded_metadata(AT).keys() - {"w", "p", "step"}, "objects of the failed save are gone"
    of_save = [key for key in server.objects["bucket"] if "iter_7/" in key and "objects" in key]
    assert not of_save


def test_a_checkpoint_of_another_kind_and_a_save_of_another_process_are_left_alone(server: ObjectServer) -> None:
    ckpt.save({"a": torch.arange(3)}, AT)
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        the_one(threads(2, _failure_of, save_training_state, AT))
    assert torch.equal(ckpt.load(AT)["a"], torch.arange(3))

    other = place_of("s3://bucket/other")
    from ckpt.catalog import lease as leases
    from ckpt.catalog.lease import Lease

    held = Lease(other / ".saving.owner.json", run_id="b", what="it", advice="")
    held.acquire()
    taken = set(leases._HELD)
    leases._HELD.clear()  # as in another process
    try:
        with pytest.raises(FolderInUseError):
            the_one(threads(1, _failure_of, save_training_state, str(other)))
    finally:
        leases._HELD.update(taken)
        held.release()
    threads(1, save_training_state, str(other))


def test_damage_is_found_and_what_a_store_cannot_do_is_refused(server: ObjectServer) -> None:
    strategy = ZarrSaveShardedStrategy()
    threads(1, save_training_state, AT, strategy)
    with pytest.raises(ConfigurationError, match="expected a folder of a mounted file system"):
        threads(1, lambda topology: dist_checkpointing.remove_sharded_tensors(AT, "w"))
    (chunk,) = [key for key in server.objects["bucket"] if "/sharded/w/c/" in key]
    server.objects["bucket"][chunk].data[5] ^= 1
    for load in (None, ZarrLoadShardedStrategy()):
        with pytest.raises(CorruptCheckpointError, match="w"):
            threads(1, _load, load)
    with pytest.raises(CheckpointNotFoundError, match="s3://bucket/none"):
        dist_checkpointing.load_common_state_dict("s3://bucket/none")


def test_a_checkpoint_that_a_strategy_alone_has_saved_is_not_taken_for_a_leftover(server: ObjectServer) -> None:
    def alone(topology: Topology) -> None:
        state = {name: one for name, one in training_state(topology).items() if name != "rng"}
        ZarrSaveShardedStrategy().save(state, place_of(AT))

    threads(2, alone)
    kept = dict(server.objects["bucket"])
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        threads(2, save_training_state, AT)
    assert kept.keys() <= server.objects["bucket"].keys()
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        threads(2, alone)


def test_a_save_that_is_refused_on_another_rank_leaves_the_address_free(server: ObjectServer) -> None:
    def saves(topology: Topology) -> None:
        odd = {"odd": ShardedTensorFactory("odd", torch.zeros(1), _refuse, _refuse)} if topology.rank == 1 else {}
        dist_checkpointing.save(training_state(topology) | odd, AT)

    with pytest.raises(CheckpointError):
        threads(2, saves)
    threads(2, save_training_state, AT)
    threads(2, require_training_state, AT)


def test_parts_of_another_save_and_missing_ones_are_found(server: ObjectServer) -> None:
    threads(2, save_training_state, AT)
    threads(2, save_training_state, f"{AT}-other", None, {"more": 1})
    ours, bucket = dict(server.objects["bucket"]), server.objects["bucket"]

    def swap(part: str) -> None:
        for key in [key for key in bucket if f"iter_7/{part}/" in key]:
            del bucket[key]
        for key, one in ours.items():
            if f"iter_7-other/{part}/" in key:
                bucket[key.replace("iter_7-other", "iter_7")] = one

    for part in ("common", "objects"):
        swap(part)
        assert any("of another save than metadata.json tells of" in one for one in verify_checkpoint(place_of(AT)))
        with pytest.raises(CorruptCheckpointError, match="of another save"):
            threads(2, require_training_state, AT)
        bucket.clear()
        bucket.update(ours)
    for key in [key for key in bucket if "iter_7/common/" in key]:
        del bucket[key]
    assert any("common" in one for one in verify_checkpoint(place_of(AT)))
    bucket.update(ours)
    del bucket["megatron/iter_7/metadata.json"]
    assert any("metadata.json is missing" in one for one in verify_checkpoint(place_of(AT)))
    bucket.update(ours)
    assert verify_checkpoint(place_of(AT)) == []


def test_a_copy_in_a_folder_is_a_checkpoint_there(server: ObjectServer, tmp_path: Path) -> None:
    threads(2, save_training_state, AT)
    for key, one in server.objects["bucket"].items():
        if key.startswith("megatron/iter_7/"):
            file = tmp_path / "copy" / key.removeprefix("megatron/iter_7/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(one.data)
    threads(2, require_training_state, tmp_path / "copy")
    assert [one for one in verify_checkpoint(tmp_path / "copy") if "does not belong" not in one] == []


def _load(topology: Topology, strategy: Any) -> Any:
    return dist_checkpointing.load(training_state(topology), AT, strategy)


def _failure_of(topology: Topology, call: Any, *args: Any) -> None:
    call(topology, *args)


def _refuse(*_: Any) -> Any:
    raise ValueError("this rank cannot")


def _of(rank: int) -> Any:
    class Two:
        world_size = 2

    Two.rank = rank  # type: ignore[attr-defined]
    return Two
