"""Checkpoints in object stores keep the promises of those in folders: the same programs, on an address."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt
from ckpt import Checkpointer
from ckpt.backends.tensorstore import TensorStoreBackend
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from ckpt.format.places import ObjectPath, place_of
from ckpt.integrations.dcp import CkptReader, CkptWriter
from ckpt.saving import saver
from ckpt.saving.save_settings import SaveSettings
from ckpt.storage.objects import files
from ckpt.storage.objects import store as stores
from tests.support.object_server import ObjectServer
from tests.support.pace import patience
from tests.support.states import buffered

SMALL_FILES = ("checkpoint_manifest.json", "plain.json")
FORMATS = ("zarr", "tensorstore", "kimi-engine")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(stores, "RETRY_S", 0.3)
    with ObjectServer() as server, server.used():
        yield server


IN_FULL = [pytest.param(scheme, marks=pytest.mark.full) for scheme in ("gs", "memory")]
REAL = json.loads(os.environ.get("CKPT_TEST_STORES", "[]"))
"""Stores of others that run beside the tests: see `tests/support/real_stores.py`."""


@pytest.fixture(params=["s3", *IN_FULL, *(f"real{number}" for number in range(len(REAL)))])
def root(request: pytest.FixtureRequest, server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> str:
    name = request.node.name.replace("[", "-").rstrip("]")
    address = f"{request.param}://bucket/{name}"
    if request.param.startswith("real"):
        real = REAL[int(request.param.removeprefix("real"))]
        address = f"{real['root']}/{name}"
        monkeypatch.setattr(stores, "RETRY_S", 20.0)
        for variable, value in real["environment"].items():
            monkeypatch.setenv(variable, value)
        stores.forget_clients()
        request.addfinalizer(stores.forget_clients)
    place = place_of(address)
    assert isinstance(place, ObjectPath)
    store = stores.store_of(place)
    store.delete([one.key for one in store.below(place.key)])
    return address


class Loop:
    """A program that trains, as it would with a folder."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 300)).square().sum().backward()
        self.optimizer.step()

    def checkpoints(self, root: str, **options: Any) -> Checkpointer:
        options = {"every": 2, "on_sigterm": False, "save_at_end": False} | options
        return Checkpointer(root, model=self.model, optimizer=self.optimizer, **options)

    def run(self, root: str, steps: int, **options: Any) -> int:
        with self.checkpoints(root, **options) as checkpoints:
            start = checkpoints.restore()
            for step in range(start + 1, steps + 1):
                self.step()
                checkpoints.step(step)
        return start

    def bits(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]


def is_equal(one: Loop, other: Loop) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.bits(), other.bits(), strict=True))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_run_goes_on_to_the_bit(root: str, format: str, mode: str) -> None:
    straight, first, second = Loop(), Loop(), Loop(seed=5)
    torch.manual_seed(1)
    for _ in range(8):
        straight.step()
    torch.manual_seed(1)
    assert first.run(root, 4, format=format, mode=mode) == 0
    assert second.run(root, 8, format=format, mode=mode) == 4
    assert is_equal(second, straight)
    catalog = catalog_at(place_of(root))
    assert [one.id for one in catalog.committed()] == ["00000002", "00000004", "00000006", "00000008"]
    for one in catalog.committed():
        assert verify_checkpoint(one.path) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_comes_back(root: str, format: str) -> None:
    half = torch.tensor(2.5, dtype=torch.bfloat16)
    state = {"w": torch.arange(70_000).reshape(7, -1), "b": half, "e": torch.empty(0, 3), "n": [1, "a", None]}
    report = ckpt.save(state, f"{root}/x", format=format)
    assert report.path == f"{root}/x"
    loaded = ckpt.load(f"{root}/x")
    assert all(torch.equal(loaded[key], state[key]) for key in ("w", "b", "e")) and loaded["n"] == state["n"]
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        ckpt.save(state, f"{root}/x")
    into = {"w": torch.zeros(7, 10_000, dtype=torch.int64), "b": torch.zeros((), dtype=torch.bfloat16), "e": torch.ones(0, 3), "n": None}
    ckpt.load(f"{root}/x", into=into)
    assert torch.equal(into["w"], state["w"]) and into["n"] == state["n"]


def test_retention_removes_every_object_of_what_it_does_not_keep(root: str) -> None:
    Loop().run(root, 10, keep_last=2, keep_every=4)
    place = place_of(root)
    assert isinstance(place, ObjectPath)
    assert [one.id for one in catalog_at(place).committed()] == ["00000004", "00000008", "00000010"]
    below = {one.key.removeprefix(f"{place.key}/").partition("/")[0] for one in stores.store_of(place).below(place.key)}
    assert below == {".run.owner.json", "checkpoint-00000004", "checkpoint-00000008", "checkpoint-00000010"}


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_named_and_the_checkpoint_before_is_loaded(server: ObjectServer, format: str) -> None:
    loop = Loop()
    loop.run("s3://bucket/d", 4, format=format)
    data = max((one.data for key, one in server.objects["bucket"].items() if "checkpoint-00000004/" in key), key=len)
    data[len(data) // 2] ^= 1
    assert verify_checkpoint(place_of("s3://bucket/d/checkpoint-00000004")) != []
    again = Loop(seed=3)
    with again.checkpoints("s3://bucket/d") as checkpoints:
        restored = checkpoints.restore()
        assert restored == 2 and restored.report is not None
        assert restored.report.fell_back_from == ("s3://bucket/d/checkpoint-00000004",)
        with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
            checkpoints.restore(4)


def test_a_bit_that_flips_on_the_way_is_found(server: ObjectServer) -> None:
    ckpt.save({"w": torch.arange(50_000.0)}, "s3://bucket/f")
    server.fault = lambda number, operation, key: "flip" if key.endswith("/c/0") else None
    with pytest.raises(CorruptCheckpointError, match="are not those that were saved"):
        ckpt.load("s3://bucket/f")


def test_a_missing_object_is_named_and_a_store_that_fails_is_not_taken_for_an_empty_one(server: ObjectServer) -> None:
    Loop().run("s3://bucket/m", 2)
    (gone,) = [key for key in server.objects["bucket"] if key.endswith("model/packed-float32-00000/c/0")]
    kept = server.objects["bucket"].pop(gone)
    with Loop().checkpoints("s3://bucket/m") as checkpoints, pytest.raises(CorruptCheckpointError, match=r"0\.weight"):
        checkpoints.restore(2)
    server.objects["bucket"][gone] = kept
    server.fault = lambda number, operation, key: "503"
    with Loop().checkpoints("s3://bucket/m") as checkpoints:
        with pytest.raises(StorageError, match=r"the store refuses \(503 SlowDown\)"):
            checkpoints.restore()
        server.forget()
        assert checkpoints.restore() == 2
    server.objects.pop("bucket")
    with Loop().checkpoints("s3://bucket/m") as checkpoints, pytest.raises(StorageError, match="there is no such bucket"):
        checkpoints.restore()


def test_what_is_no_checkpoint_is_said(root: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"is not a checkpoint: it has no checkpoint_manifest\.json"):
        ckpt.load(f"{root}/nothing")
    with Loop().checkpoints(root) as checkpoints:
        assert checkpoints.restore() == 0
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.restore(7)


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_saved(server: ObjectServer) -> None:
    server.ignores_conditions = True
    with pytest.raises(StorageError, match="ignores the condition of a put"):
        ckpt.save({"w": torch.arange(3)}, "s3://bucket/c")
    with pytest.raises(StorageError, match="ignores the condition of a put"):
        Loop().run("s3://bucket/c", 2)
    assert list(server.objects["bucket"]) == []


def test_a_checkpoint_of_another_run_that_has_ended_is_set_aside_and_not_lost(root: str) -> None:
    first, second = Loop(), Loop(seed=9)
    first.run(root, 2)
    with second.checkpoints(root, shared_root=True) as checkpoints:
        checkpoints.save(2)
    place = place_of(root)
    assert isinstance(place, ObjectPath)
    kept = [one.key for one in stores.store_of(place).below(place.key) if "/quarantined-" in one.key]
    assert sorted(key.rpartition(".")[2] for key in kept) == ["json", "txt"]
    assert verify_checkpoint(place / "checkpoint-00000002") == []


def test_going_on_from_an_older_checkpoint_sets_the_newer_ones_aside(root: str) -> None:
    Loop().run(root, 6)
    loop = Loop()
    with loop.checkpoints(root) as checkpoints:
        checkpoints.restore(2)
        with pytest.raises(CheckpointExistsError, match="holds newer checkpoints"):
            checkpoints.save(3)
    with loop.checkpoints(root, overwrite=True) as checkpoints:
        checkpoints.restore(2)
        checkpoints.save(3)
        assert [one.step for one in checkpoints.list()] == [2, 3]


def test_incremental_saves_copy_within_the_store(server: ObjectServer) -> None:
    frozen, state = torch.arange(2_200_000.0), {"n": 0}  # smaller arrays share an object of zarr's
    holder = {"frozen": frozen, "w": torch.zeros(30_000)}

    class Part:
        def state_dict(self) -> dict[str, Any]:
            return holder | state

        def load_state_dict(self, given: dict[str, Any]) -> None: ...

    options: dict[str, Any] = {"mode": SaveSettings(incremental=True), "save_rng": False, "on_sigterm": False}
    for format in FORMATS:
        with Checkpointer(f"s3://bucket/i-{format}", part=Part(), format=format, **options) as run:
            for step in (1, 2, 3):  # the second separates what changes from what does not, where files hold both
                server.forget()
                holder["w"] += 1
                run.save(step)
        counts = server.counts()
        assert counts["copy"][0] >= 1
        assert counts["put"][1] < 600_000 < frozen.nbytes, f"{format}: {counts}"
        for step in (1, 2, 3):
            assert verify_checkpoint(place_of(f"s3://bucket/i-{format}/checkpoint-0000000{step}")) == []


def test_a_save_takes_few_requests(server: ObjectServer) -> None:
    """One list, and what the commit takes; objects of a segment at most; nothing that was put is read back."""
    loop = Loop()
    with loop.checkpoints("s3://bucket/r", format=buffered(TensorStoreBackend(), segment_bytes=1 << 20), save_rng=False) as run:
        run.restore()
        run.save(1)
        server.forget()
        loop.step()
        run.save(2)
        state_bytes = sum(one.nbytes for one in loop.bits()) * 3
        counts = server.counts()
        segments = -(-state_bytes // (1 << 20))
        assert sum(number for number, _, _ in counts.values()) <= segments + 3 + 2 + 6 + 3, counts
        assert counts["list"][0] == 1
        assert max(len(one.data) for one in server.objects["bucket"].values()) <= 1 << 20
        told = run.coordinator.last_save
        assert told is not None and {kind: number for kind, (number, _) in told.requests.items()} == {
            kind.partition(" ")[0]: number for kind, (number, _, _) in counts.items()
        }
        assert told.requests["put"][1] == counts["put"][1]
        server.forget()
        restored = run.restore(2).report
        assert restored is not None and restored.bytes_read < restored.requests["get"][1] <= server.counts()["get"][2]
        server.forget()
        assert run.find_latest() == place_of("s3://bucket/r/checkpoint-00000002")
        assert server.counts()["list"][0] == 1


@pytest.mark.parametrize("format", FORMATS)
def test_a_two_stage_load_has_many_ranges_in_flight_and_reads_each_byte_once(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setattr(files, "RANGE_BYTES", 256 << 10)
    state = {f"w{number}": torch.randn(400, 500) for number in range(6)} | {"small": torch.arange(7)}
    ckpt.save(state, "s3://bucket/ahead", format=format)
    waiting, most = [0], [0]
    changing = threading.Lock()
    ask = stores.Store.get_range

    def counted(store: stores.Store, key: str, start: int, stop: int) -> memoryview:
        with changing:
            waiting[0] += 1
            most[0] = max(most[0], waiting[0])
        time.sleep(0.05)
        try:
            return ask(store, key, start, stop)
        finally:
            with changing:
                waiting[0] -= 1

    monkeypatch.setattr(stores.Store, "get_range", counted)
    server.forget()
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    ckpt.load("s3://bucket/ahead", into=into, load="two-stage")
    assert all(torch.equal(into[key], value) for key, value in state.items())
    assert most[0] > 8
    size = sum(value.nbytes for value in state.values())
    read = sum(one.bytes_down for one in server.requests if one.operation == "get" and one.key.split("/")[-1] not in SMALL_FILES)
    assert size <= read < 1.02 * size


def test_requests_are_tried_again_for_as_long_as_was_asked_for(server: ObjectServer) -> None:
    """Also in a process of its own that writes."""
    loop = Loop()
    with loop.checkpoints("s3://bucket/t", retry_s=0.4) as run:
        run.restore()
        server.fault = lambda number, operation, key: "500" if operation == "put" else None
        began = time.monotonic()
        with pytest.raises(StorageError, match="the store refuses"):
            run.save(1)
        assert time.monotonic() - began < patience(8.0)
        server.forget()
        run.save(1)


def test_no_secret_is_in_a_manifest_an_owner_or_a_report(server: ObjectServer, capfd: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    with loop.checkpoints("s3://bucket/s") as run:
        run.restore()
        print(run.save(1), run.list(), run.coordinator.last_save, repr(run.coordinator))
        server.fault = lambda number, operation, key: "403"
        with pytest.raises(StorageError) as refused:
            run.save(2)
    everything = capfd.readouterr()
    stored = [bytes(one.data).decode("latin-1") for one in server.objects["bucket"].values()]
    texts = [everything.out, everything.err, str(refused.value), *stored]
    assert not any("a-secret" in text or "nobody" in text for text in texts)
    owner = json.loads(bytes(server.objects["bucket"]["s/.run.owner.json"].data))
    assert {"run_id", "host", "pid", "since", "machine", "nonce"} <= owner.keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_saves_and_loads_through_its_own_calls(root: str) -> None:
    state = {"w": torch.arange(30_000.0).reshape(100, 300), "n": 5}
    dcp.save(state, storage_writer=CkptWriter(f"{root}/dcp", format="tensorstore"))
    into = {"w": torch.zeros(100, 300), "n": 0}
    dcp.load(into, storage_reader=CkptReader(f"{root}/dcp"))
    assert torch.equal(into["w"], state["w"]) and into["n"] == 5
    assert torch.equal(ckpt.load(f"{root}/dcp")["w"], state["w"])


def test_lightning_s_plugin_saves_again_and_removes(root: str) -> None:
    from ckpt.integrations.lightning import CkptCheckpointIO  # which takes seconds, in each worker

    io, path = CkptCheckpointIO(), f"{root}/epoch=1-step=3.ckpt"
    for number in (1, 2):
        io.save_checkpoint({"state_dict": {"a": torch.arange(5.0) + number}, "epoch": number, "global_step": number}, path)
        loaded = io.load_checkpoint(path)
        assert torch.equal(loaded["state_dict"]["a"], torch.arange(5.0) + number) and loaded["epoch"] == number
    io.remove_checkpoint(path)
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint(path)
    place = place_of(root)
    assert isinstance(place, ObjectPath)
    assert list(stores.store_of(place).below(place.key)) == []


def test_a_validated_save_is_read_back_before_it_is_committed(server: ObjectServer) -> None:
    loop = Loop()
    with loop.checkpoints("s3://bucket/v") as run:
        run.restore()
        run.coordinator.save_checkpoint(checkpoint_id=1, validate=True)
        server.fault = lambda number, operation, key: "flip" if operation == "get" and key.endswith("/c/0") else None
        with pytest.raises(CorruptCheckpointError, match="does not read back as it should"):
            run.coordinator.save_checkpoint(checkpoint_id=2, validate=True)
        server.forget()
        assert [one.step for one in run.list()] == [1]
    assert not [key for key in server.objects["bucket"] if "checkpoint-00000002" in key or ".attempt" in key]


def note_of_a_dead_attempt(server: ObjectServer, root: str, step: int) -> str:
    """Leave what a killed run leaves: a note, and objects that no manifest names. Returns their place."""
    run_id = json.loads(bytes(server.objects["bucket"][f"{root}/.run.owner.json"].data))["run_id"]
    name, nonce = f"checkpoint-{step:08}", f"{step:016x}"
    note = {"checkpoint": name, "nonce": nonce, "old": None, "run_id": f"of another run than {run_id}"}
    store = stores.store_of(ObjectPath("s3", "bucket"))
    store.put(f"{root}/.attempt-{step:08}-{nonce}.json", json.dumps(note).encode())
    store.put(f"{root}/{name}/{nonce}/model/w/c/0", b"left")
    return f"{root}/{name}/{nonce}"


def test_what_dead_attempts_have_left_goes_and_their_ids_can_be_saved_again(server: ObjectServer) -> None:
    Loop().run("s3://bucket/g", 2)
    left = [note_of_a_dead_attempt(server, "g", step) for step in (2, 4)]
    loop = Loop()
    assert loop.run("s3://bucket/g", 3, every=3) == 2
    assert not [key for key in server.objects["bucket"] if key.startswith(tuple(left)) or ".attempt" in key]
    catalog = catalog_at(place_of("s3://bucket/g"))
    assert [one.id for one in catalog.committed()] == ["00000002", "00000003"]
    assert verify_checkpoint(place_of("s3://bucket/g/checkpoint-00000002")) == []
    assert b"fence" in server.objects["bucket"]["g/checkpoint-00000004/checkpoint_manifest.json"].data
    for call in (lambda: ckpt.load("s3://bucket/g/checkpoint-00000004"), lambda: loop.checkpoints("s3://bucket/g").restore(4)):
        with pytest.raises(CheckpointNotFoundError):
            call()
    loop.run("s3://bucket/g", 4)
    assert [one.id for one in catalog.committed()][-1] == "00000004"


def test_a_checkpoint_that_was_copied_into_a_bucket_is_never_lost(server: ObjectServer, tmp_path: Path) -> None:
    """Its manifest names no place of its files: neither a sweep nor a save under its id, nor retention, changes or removes them."""
    Loop().run(str(tmp_path), 4)
    Loop().run("s3://bucket/h", 2)
    for file in (tmp_path / "checkpoint-00000004").rglob("*"):
        if file.is_file():
            server_store = stores.store_of(ObjectPath("s3", "bucket"))
            server_store.put(f"h/{file.relative_to(tmp_path).as_posix()}", file.read_bytes())
    copied = {key: bytes(one.data) for key, one in server.objects["bucket"].items() if "checkpoint-00000004" in key}
    note_of_a_dead_attempt(server, "h", 4)
    with Loop().checkpoints("s3://bucket/h", shared_root=True, keep_last=1) as run:
        run.save(3)
    now = server.objects["bucket"]
    assert all(key in now for key in copied)
    assert verify_checkpoint(place_of("s3://bucket/h/checkpoint-00000004")) == []
    with Loop().checkpoints("s3://bucket/h", shared_root=True) as run:
        run.save(4)
    names = {key.rpartition("/")[2].partition("-")[0] for key in now if "checkpoint-00000004/" in key}
    assert "quarantined" in names
    assert all(bytes(now[key].data) == data for key, data in copied.items() if "manifest" not in key)
    assert verify_checkpoint(place_of("s3://bucket/h/checkpoint-00000004")) == []


def test_a_commit_that_was_not_answered_is_whole_or_none(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The put is done, its answer is lost, and the store is away until the save has failed: what was committed keeps its objects."""
    loop = Loop()
    with loop.checkpoints("s3://bucket/u") as run:
        run.restore()
        run.save(1)
        seen: list[int] = []

        def fault(number: int, operation: str, key: str) -> str | None:
            if operation == "put" and key.endswith("checkpoint-00000002/checkpoint_manifest.json"):
                seen.append(number)
                return "lost" if len(seen) == 1 else "drop"
            return "drop" if seen and len(server.requests) < seen[0] + 60 and "checkpoint_manifest" in key else None

        server.fault = fault
        with pytest.raises(StorageError, match="has not answered the commit of .*, which is committed, or not, but whole if it is"):
            run.save(2)
        server.forget()
        assert [one.step for one in run.list()] == [1, 2]
        assert verify_checkpoint(place_of("s3://bucket/u/checkpoint-00000002")) == []
        run.save(3)
        assert verify_checkpoint(place_of("s3://bucket/u/checkpoint-00000002")) == []
    assert not [key for key in server.objects["bucket"] if ".attempt" in key]


def test_a_save_of_very_many_objects_is_told_of_once(
    root: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saver, "PACK_BELOW_IN_STORES", 0)
    monkeypatch.setattr(saver, "MANY_OBJECTS", 10)
    loop = Loop()
    loop.step()
    with loop.checkpoints(root, format="zarr") as run:
        run.restore()
        for step in (1, 2):
            run.save(step)
    assert len([one for one in caplog.messages if "in the format zarr makes about" in one]) == 1
