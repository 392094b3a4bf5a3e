"""Claims on a root in an object store: alive, dead, silent, released, lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from ckpt.catalog import lease as leases
from ckpt.catalog.lease import Lease, living_runs
from ckpt.catalog.owner import about_process, has_ended
from ckpt.errors import FolderInUseError
from ckpt.format.places import ObjectPath
from ckpt.storage.objects.store import Store, store_of
from tests.support.object_server import ObjectServer
from tests.support.pace import patience

ROOT = ObjectPath("s3", "bucket", "run")
OWNER = ROOT / ".run.owner.json"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(leases, "_LOOK_S", 0.02)
    with ObjectServer() as server, server.used():
        yield server


@pytest.fixture
def store(server: ObjectServer) -> Store:
    return store_of(ROOT)


def lease(stale_s: float = 0.3) -> Lease:
    return Lease(OWNER, run_id="mine", what="checkpoint root X", advice="go elsewhere", stale_s=stale_s)


def claimed_by_another(store: Store, **about: object) -> None:
    said = about_process("other") | {"host": "far", "pid": 77, "machine": "another", "nonce": "n"} | about
    store.put(OWNER.key, json.dumps(said).encode())


def said(store: Store) -> dict[str, object]:
    found: dict[str, object] = json.loads(bytes(store.get(OWNER.key)[0]))
    return found


def test_a_free_root_is_claimed_and_released(store: Store) -> None:
    one = lease()
    assert not one.is_held
    one.acquire()
    assert one.is_held and said(store)["run_id"] == "mine"
    one.acquire()
    one.release()
    assert not one.is_held and said(store)["released"] is True
    began = time.monotonic()
    other = lease(stale_s=60.0)
    other.acquire()
    assert time.monotonic() - began < patience(5.0)
    other.release()


def test_leases_of_one_process_share_a_claim(store: Store) -> None:
    one, other = lease(), lease()
    one.acquire()
    other.acquire()
    one.release()
    assert "released" not in said(store)
    other.release()
    assert said(store)["released"] is True


def test_a_heartbeat_replaces_the_object_and_a_lost_one_is_noticed_and_claimed_again(store: Store) -> None:
    one = lease()
    one.acquire()
    until = time.monotonic() + patience(10.0)
    while "beat" not in said(store):
        assert time.monotonic() < until
        time.sleep(0.02)
    claimed_by_another(store)
    held = one._held
    assert held is not None
    while held.stands:
        assert time.monotonic() < until
        time.sleep(0.02)
    one.acquire()  # the other one is silent
    assert said(store)["run_id"] == "mine"
    one.release()


def test_an_owner_that_lives_is_named(store: Store, server: ObjectServer) -> None:
    claimed_by_another(store)
    beats = iter(range(1, 1000))
    server.after = lambda number, operation, key: claimed_by_another(store, beat=next(beats)) if operation == "get" else None
    with pytest.raises(FolderInUseError, match=r"checkpoint root X is in use since .* by run other \(pid 77 on far\): go elsewhere"):
        lease(stale_s=5.0).acquire()


def test_an_owner_that_ends_while_it_is_watched_may_have_saved_so_the_root_is_not_taken(store: Store, server: ObjectServer) -> None:
    """What it has committed meanwhile, this run has not seen: as a run that starts again does."""
    claimed_by_another(store)
    looks = iter(range(1000))
    server.after = lambda number, operation, key: (
        claimed_by_another(store, released=True) if operation == "get" and next(looks) == 1 else None
    )
    with pytest.raises(FolderInUseError, match="was in use until now by run other .*, which may have saved since .*: start again"):
        lease(stale_s=5.0).acquire()
    server.forget()
    free = lease()
    free.acquire()
    free.release()


def test_an_owner_that_has_been_silent_is_replaced(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    claimed_by_another(store)
    waited: list[int] = []
    began = time.monotonic()
    one = lease(stale_s=0.4)
    one.acquire(lambda: waited.append(1))
    assert time.monotonic() - began >= 0.4 and waited
    assert "was in use by run other (pid 77 on far): waiting up to" in caplog.text
    assert said(store)["run_id"] == "mine"
    one.release()


def test_an_owner_of_this_machine_that_has_ended_is_replaced_at_once(store: Store) -> None:
    store.put(OWNER.key, json.dumps(about_process("other") | {"pid": 1 << 22, "nonce": "n"}).encode())
    began = time.monotonic()
    one = lease(stale_s=60.0)
    one.acquire()
    assert time.monotonic() - began < patience(5.0)
    one.release()


def test_a_claimant_that_comes_second_looks_again(store: Store, server: ObjectServer) -> None:
    """Between its look at a dead owner and its put another one has claimed the root, and lives."""
    claimed_by_another(store, released=True)
    beats = iter(range(1, 1000))

    def after(number: int, operation: str, key: str) -> None:
        if operation == "get":
            claimed_by_another(store, nonce="faster", beat=next(beats))

    server.after = after
    with pytest.raises(FolderInUseError, match="by run other"):
        lease(stale_s=5.0).acquire()


def test_runs_that_share_a_root_are_known_by_their_heartbeats(store: Store, server: ObjectServer) -> None:
    for name, about in (
        (".run-a.owner.json", {"run_id": "a"}),
        (".run-b.owner.json", {"run_id": "b", "released": True}),
        (".run-c.owner.json", {"run_id": "c"}),
        (".run-mine.owner.json", {"run_id": "mine"}),
    ):
        store.put((ROOT / name).key, json.dumps({"machine": "another", "pid": 1} | about).encode())
    _, times = store.names(ROOT.key)
    times[".run-c.owner.json"] -= 100
    assert living_runs(ROOT, times, 60.0, ".run-mine.owner.json") == {"a"}


def test_a_process_of_another_container_on_this_machine_is_not_known_to_have_ended() -> None:
    gone = about_process("x") | {"pid": 2**22 + 1}
    assert has_ended(gone)
    assert not has_ended(gone | {"pids": "another namespace"})
    assert not has_ended(gone | {"machine": "another"})
    assert not has_ended(about_process("x"))
