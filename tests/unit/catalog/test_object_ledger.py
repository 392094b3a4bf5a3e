"""The states of checkpoints in an object store, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from ckpt.catalog.lease import Lease
from ckpt.catalog.object_ledger import ObjectLedger
from ckpt.errors import CheckpointExistsError, ConfigurationError
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.places import ObjectPath
from ckpt.storage.objects.store import Store, store_of
from tests.support.object_server import ObjectServer

ROOT = ObjectPath("s3", "bucket", "run")


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server, server.used():
        yield server


@pytest.fixture
def store(server: ObjectServer) -> Store:
    return store_of(ROOT)


def ledger_of(run: str, *, claimed: bool = True) -> ObjectLedger:
    found = ObjectLedger(ROOT, run_id=run, saves_as=run)
    if claimed:
        lock = Lease(ROOT / ".run.owner.json", run_id=run, what="root", advice="")
        found.claim(lock, lambda: None)
    return found


def manifest(id: str, place: ObjectPath, number: int, run: str) -> bytes:
    of = {"world_size": 1, "topology": {}, "components": {}, "arrays": {}, "files": {}}
    return CheckpointManifest(
        checkpoint_id=id, timestamp=datetime.now(UTC), commit_number=number, run_id=run, data=place.name, **of  # type: ignore[arg-type]
    ).to_bytes()


def save(ledger: ObjectLedger, id: str, run: str) -> ObjectPath:
    place = ledger.open(id)
    store_of(ROOT).put((place / "x").key, b"x")
    ledger.record(place, manifest(id, place, ledger.next_commit().number, run))
    return ledger.publish(place, id)


def test_a_checkpoint_is_committed_listed_replaced_and_removed(store: Store) -> None:
    ledger = ledger_of("a")
    assert ledger.committed() == [] and ledger.newest() is None
    for id in ("1", "2", "1"):
        save(ledger, id, "a")
    assert [one.id for one in ledger.committed()] == ["2", "1"]
    assert [one.number for one in ledger.committed()] == [2, 3]
    assert len(list(store.below(f"{ROOT.key}/checkpoint-1"))) == 2
    ledger.remove(ROOT / "checkpoint-2")
    assert [one.id for one in ledger_of("reader", claimed=False).committed()] == ["1"]
    assert list(store.below(f"{ROOT.key}/checkpoint-2")) == []


def test_an_id_that_cannot_be_a_name_is_refused(store: Store) -> None:
    with pytest.raises(ConfigurationError, match="is part of a folder's name"):
        ledger_of("a").open("../x")


def test_runs_of_one_process_do_not_clean_up_after_each_other(store: Store) -> None:
    """They share the claim of the process."""
    one, other = ledger_of("a"), ledger_of("b")
    place = one.open("1")
    store.put((place / "x").key, b"x")
    save(other, "2", "b")
    one.record(place, manifest("1", place, 9, "a"))
    one.publish(place, "1")
    assert [checkpoint.id for checkpoint in one.committed()] == ["2", "1"]


def test_of_two_saves_of_one_id_the_second_to_commit_is_refused_and_leaves_nothing(store: Store) -> None:
    one, other = ledger_of("a"), ledger_of("a")
    first, second = one.open("1"), other.open("1")
    for place in (first, second):
        store.put((place / "x").key, b"x")
    one.record(first, manifest("1", first, 1, "a"))
    other.record(second, manifest("1", second, 2, "a"))
    one.publish(first, "1")
    with pytest.raises(CheckpointExistsError, match="was changed by another process since this save began"):
        other.publish(second, "1")
    other.discard_all()
    folders = {item.key.rpartition("/")[0] for item in store.below(f"{ROOT.key}/checkpoint-1")}
    assert folders == {f"{ROOT.key}/checkpoint-1", first.key}
    assert list(store.below(second.key)) == []
    assert [checkpoint.number for checkpoint in one.committed()] == [1]


def test_a_holder_of_the_root_looks_at_each_checkpoint_once(store: Store, server: ObjectServer) -> None:
    ledger = ledger_of("a")
    for id in ("1", "2", "3"):
        save(ledger, id, "a")
    server.forget()
    save(ledger, "4", "a")
    counts = {name: number for name, (number, _, _) in server.counts().items()}
    assert counts == {"list": 1, "get": 1, "head": 1, "put": 3, "delete many": 1}
