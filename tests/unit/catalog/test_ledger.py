"""What a ledger promises: a kill, a full disk or another run never costs a committed checkpoint."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.catalog import owner
from ckpt.catalog.committed import Committed
from ckpt.catalog.ledger import Ledger
from ckpt.catalog.owner import Owner, owner_file
from ckpt.errors import ConfigurationError, StorageError
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, CheckpointManifest

START = datetime(2026, 1, 1, tzinfo=UTC)


class Killed(BaseException):
    """Stands for kill -9: no handler of the product catches it."""


class Clock:
    """Timestamps one microsecond apart, so that commit order is the order of calls."""

    def __init__(self) -> None:
        self.version = 0

    def fill(self, folder: Path, saved_as: str | None = None) -> int:
        """Write a manifest and a payload that names this version; return the version."""
        self.version += 1
        (folder / "model").mkdir()
        (folder / "model" / "payload").write_text(str(self.version))
        time = START + timedelta(microseconds=self.version)
        files = {"model/payload": (len(str(self.version)), digest_of(str(self.version).encode()))}
        manifest = CheckpointManifest(saved_as or folder.name, time, 1, {}, {}, {}, files)
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        return self.version


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture(autouse=True)
def no_thread_or_descriptor_is_left() -> Iterator[None]:
    descriptors, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    assert [t.name for t in threading.enumerate() if "heartbeat" in t.name and t not in threads] == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def save(ledger: Ledger, clock: Clock, checkpoint_id: str, **options: object) -> Path:
    unpublished = ledger.open(checkpoint_id)
    clock.fill(unpublished, checkpoint_id)
    return ledger.publish(unpublished, checkpoint_id, **options)  # type: ignore[arg-type]


def versions(ledger: Ledger) -> dict[str, int]:
    """What a reader finds: id -> version of its payload, the oldest commit first."""
    return {one.id: int((one.path / "model" / "payload").read_text()) for one in ledger.committed()}


def hidden(root: Path, kind: str) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith(f".{kind}-"))


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def die(ledger: Ledger) -> None:
    """Do to this process' claims what its death would do: locks open, heartbeats stop, files stay."""
    for claim in list(ledger._opened.values()):
        claim.let_go()


# committed checkpoints


def test_a_missing_root_holds_no_checkpoint_and_is_not_created_by_reading(root: Path) -> None:
    ledger = Ledger(root, run_id="a")
    assert ledger.committed() == []
    assert ledger.newest() is None
    assert not root.exists()


def test_a_published_folder_is_the_newest_checkpoint_and_leaves_nothing_hidden(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "00000001")
    path = save(ledger, clock, "00000002")
    assert path == root / "checkpoint-00000002"
    assert ledger.newest() == Committed("00000002", path, START + timedelta(microseconds=2))
    assert sorted(os.listdir(root)) == ["checkpoint-00000001", "checkpoint-00000002"]


def test_commit_order_follows_the_manifests_not_the_names_nor_the_mtimes(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    for number, checkpoint_id in enumerate(["9", "10", "best", "1"]):
        age(save(ledger, clock, checkpoint_id), seconds=number * 100)
    assert list(versions(ledger)) == ["9", "10", "best", "1"]


def test_equal_timestamps_are_ordered_by_id(root: Path) -> None:
    ledger = Ledger(root, run_id="a")
    for checkpoint_id in ("b", "a"):
        save(ledger, Clock(), checkpoint_id)
    assert [one.id for one in ledger.committed()] == ["a", "b"]


@pytest.mark.parametrize("damage", [b"", b"\xff\x00 no json", b'{"timestamp": "2026-13-45"}', b'{"timestamp": "\xff"}'])
def test_a_manifest_without_a_readable_timestamp_sorts_by_its_mtime(root: Path, clock: Clock, damage: bytes) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "old")
    manifest = save(ledger, clock, "damaged") / MANIFEST_NAME
    manifest.write_bytes(damage)
    os.utime(manifest, (1.0, 1.0))
    assert [one.id for one in ledger.committed()] == ["damaged", "old"]
    assert ledger.committed()[0].timestamp == datetime.fromtimestamp(1.0, UTC)


def test_a_timestamp_at_the_edge_of_time_does_not_stop_the_listing(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    (save(ledger, clock, "1") / MANIFEST_NAME).write_text('{"timestamp": "0001-01-01T00:00:00+05:00"}')
    assert [one.id for one in ledger.committed()] == ["1"]


def test_folders_without_a_manifest_file_and_plain_files_are_no_checkpoints(root: Path) -> None:
    (root / "checkpoint-1").mkdir(parents=True)
    (root / "checkpoint-2" / MANIFEST_NAME).mkdir(parents=True)
    (root / "checkpoint-3").write_text("a file")
    (root / "model-4").mkdir()
    assert Ledger(root, run_id="a").committed() == []


# the order of commits


def put(root: Path, checkpoint_id: str, **keys: object) -> None:
    """A committed checkpoint whose manifest says this."""
    folder = root / f"checkpoint-{checkpoint_id}"
    folder.mkdir(parents=True)
    (folder / MANIFEST_NAME).write_text(json.dumps({"format_version": 1, **keys, "checkpoint_id": checkpoint_id}))


def now_plus(**ahead: float) -> str:
    return (datetime.now(UTC) + timedelta(**ahead)).isoformat()


def test_commits_are_ordered_by_their_number_and_before_those_by_time(root: Path) -> None:
    put(root, "old", timestamp=now_plus(hours=-3))
    put(root, "older", timestamp=now_plus(hours=-4))
    put(root, "first", timestamp=now_plus(hours=0), commit_number=1, run_id="ab12")
    put(root, "second", timestamp=now_plus(hours=-1), commit_number=2)
    ledger = Ledger(root, run_id="a")
    assert [one.id for one in ledger.committed()] == ["older", "old", "first", "second"]
    assert [one.run_id for one in ledger.committed()] == [None, None, "ab12", None]
    assert ledger.next_commit().number == 3


def test_the_next_commit_is_later_than_all_that_are_there_whatever_the_clock_says(root: Path) -> None:
    put(root, "1", timestamp=now_plus(hours=1), commit_number=7)
    ledger = Ledger(root, run_id="a")
    (before,) = ledger.committed()
    commit = ledger.next_commit()
    assert (commit.number, commit.timestamp) == (8, before.timestamp + timedelta(microseconds=1))
    assert timedelta(minutes=59) < commit.behind < timedelta(hours=1)


@pytest.mark.parametrize("number", [None, -1, 2.5, "9", 10**12, 10**12 + 1, 2**53, 10**400])
@pytest.mark.parametrize("timestamp", ["2099-01-01T00:00:00+00:00", "9999-12-31T23:59:59.999999+00:00"])
def test_a_checkpoint_with_an_absurd_time_and_number_shadows_nothing(
    root: Path, number: object, timestamp: str
) -> None:
    put(root, "foreign", timestamp=timestamp, **({} if number is None else {"commit_number": number}))
    put(root, "old", timestamp=now_plus(hours=-1))
    ledger = Ledger(root, run_id="a")
    if number != 10**12:  # the largest that counts
        newest = ledger.newest()
        assert newest is not None and newest.id == "old"
    for checkpoint_id in ("1", "2"):
        commit = ledger.next_commit()
        assert abs(commit.timestamp - datetime.now(UTC)) < timedelta(minutes=1)
        put(root, checkpoint_id, timestamp=commit.timestamp.isoformat(), commit_number=commit.number)
        newest = ledger.newest()
        assert newest is not None and newest.id == checkpoint_id


@pytest.mark.parametrize("said", [{}, {"run_id": "ab12", "timestamp": "2020-01-01T00:00:00+00:00"}])
def test_a_damaged_manifest_has_the_place_that_the_time_of_its_file_suggests(root: Path, said: dict[str, str]) -> None:
    for number in (1, 2, 3):
        put(root, str(number), timestamp=now_plus(hours=number - 4), commit_number=number)
    put(root, "damaged", **said)
    ledger = Ledger(root, run_id="a")
    assert [one.id for one in ledger.committed()] == ["1", "2", "3", "damaged"]
    age(root / "checkpoint-damaged" / MANIFEST_NAME, seconds=1.5 * 3600)
    assert [one.id for one in ledger.committed()] == ["1", "2", "damaged", "3"]


@pytest.mark.parametrize("rot", [b"\xb2", b"\x02", b"\\u", b"\\"])
def test_an_id_that_cannot_be_read_leaves_its_checkpoint_in_its_place(root: Path, clock: Clock, rot: bytes) -> None:
    ledger = Ledger(root, run_id="a")
    for checkpoint_id in "123":
        save(ledger, clock, checkpoint_id)
    manifest = root / "checkpoint-2" / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(b'"checkpoint_id": "2"', b'"checkpoint_id": "2' + rot + b'"'))
    assert [(one.id, one.says_id) for one in ledger.committed()] == [("1", True), ("2", False), ("3", True)]
    save(ledger, clock, "4")
    assert ledger.next_commit().number == 1


def test_old_checkpoints_that_were_all_written_by_a_clock_ahead_keep_their_order(root: Path) -> None:
    for year in ("2098", "2099"):
        put(root, year, timestamp=f"{year}-01-01T00:00:00+00:00")
    assert [one.id for one in Ledger(root, run_id="a").committed()] == ["2098", "2099"]


def test_a_manifest_whose_keys_stand_elsewhere_is_read_too(root: Path) -> None:
    put(root, "1", topology="x" * 50_000, timestamp=now_plus(hours=-1), commit_number=3, run_id="ab12")
    (one,) = Ledger(root, run_id="a").committed()
    assert (one.number, one.run_id) == (3, "ab12")


# opening


def test_an_open_save_is_invisible_to_readers(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    unpublished = ledger.open("1")
    clock.fill(unpublished)
    assert ledger.committed() == []
    about = json.loads(owner_file(unpublished).read_text())
    assert (about["run_id"], about["pid"]) == ("a", os.getpid())
    ledger.discard(unpublished)


def test_a_discarded_save_leaves_nothing(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    unpublished = ledger.open("1")
    clock.fill(unpublished)
    ledger.discard(unpublished)
    ledger.discard(unpublished)
    assert os.listdir(root) == []


def test_a_checkpoint_of_any_name_is_removed_at_once_and_deleted_by_the_next_save(root: Path, clock: Clock) -> None:
    later: list[Path] = []
    (root / "step-5").mkdir(parents=True)
    clock.fill(root / "step-5")
    Ledger(root, run_id="a", delete=later.append).remove(root / "step-5")
    assert os.listdir(root) == [later[0].name]
    ledger = Ledger(root, run_id="a")
    ledger.discard(ledger.open("1"))
    assert os.listdir(root) == []


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "..\\x/", "über", "x" * 201, "a b", "a\n"])
def test_an_id_that_is_no_file_name_is_refused(root: Path, bad: str) -> None:
    with pytest.raises(ConfigurationError, match=r"checkpoint id .* is part of a folder's name"):
        Ledger(root, run_id="a").open(bad)
    assert not root.exists()


@pytest.mark.parametrize("keep_last", [0, -1])
def test_keeping_fewer_than_one_checkpoint_is_refused(root: Path, keep_last: int) -> None:
    with pytest.raises(ConfigurationError, match=f"keep_last is {keep_last}; expected a whole number"):
        Ledger(root, run_id="a", keep_last=keep_last)


def test_a_root_that_cannot_be_created_is_one_sentence() -> None:
    with pytest.raises(StorageError) as caught:
        Ledger(Path("/proc/x/checkpoints"), run_id="a").open("1")
    assert str(caught.value) == (
        "checkpoint root /proc/x/checkpoints cannot be written; choose another folder: "
        "No such file or directory: '/proc/x'"
    )


def test_a_full_disk_on_which_no_root_can_be_made_is_no_wrong_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageError, match=r"cannot be written: No space left on device: '.*' \([0-9,]+ bytes are free\)$"):
        Ledger(root, run_id="a").open("1")


def test_a_file_where_the_root_should_be_is_one_sentence(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    for root in (in_the_way, in_the_way / "checkpoints"):
        with pytest.raises(StorageError, match=r"cannot be written; .* (File exists|Not a directory): '.*file"):
            Ledger(root, run_id="a").open("1")
        with pytest.raises(StorageError, match="cannot be read: Not a directory"):
            Ledger(root, run_id="a").committed()


def test_a_discarded_save_that_cannot_be_moved_away_is_cleared_by_the_next_save(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has no room for a name refuses the rename; the owner file stays, and says whose folder it is."""
    run = Ledger(root, run_id="run")
    unpublished = run.open("1")
    clock.fill(unpublished)
    with monkeypatch.context() as full:
        full.setattr(os, "rename", refuse)
        run.discard(unpublished)
    assert unpublished.exists() and owner_file(unpublished).exists()
    again = Ledger(root, run_id="run")
    again.discard(again.open("2"))
    assert list(root.iterdir()) == []


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_be_made_leaves_no_owner_behind(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir

    def full(self: Path, *args: object, **options: object) -> None:
        if self.name.startswith(".unpublished-"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        make(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageError, match="No space left on device"):
        Ledger(root, run_id="a").open("1")
    assert os.listdir(root) == []


def test_a_disk_too_full_for_the_owner_file_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner.os, "write", full)
    with pytest.raises(StorageError, match="No space left on device"):
        Ledger(root, run_id="a").open("1")
    assert os.listdir(root) == []


# ownership


def test_the_heartbeat_keeps_the_owner_file_young_until_the_save_ends(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "HEARTBEAT_S", 0.01)
    ledger = Ledger(root, run_id="a")
    unpublished = ledger.open("1")
    age(owner_file(unpublished), seconds=1000)
    deadline = time.monotonic() + 10
    while time.time() - owner_file(unpublished).stat().st_mtime > 500 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert time.time() - owner_file(unpublished).stat().st_mtime < 500
    assert len([t for t in threading.enumerate() if "heartbeat" in t.name]) == 1
    clock.fill(unpublished)
    ledger.publish(unpublished, "1")
    assert [t for t in threading.enumerate() if "heartbeat" in t.name] == []


LOCKED_BY_ANOTHER_PROCESS = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("run_id", ["mine", "other"])
def test_a_folder_locked_by_a_living_process_is_never_removed_however_silent(root: Path, run_id: str) -> None:
    folder = abandon(root, run_id="other", silent_s=10_000)
    owner_file(folder).chmod(0o600)  # a lock counts that only those can hold who may write the folder
    command = [sys.executable, "-I", "-c", LOCKED_BY_ANOTHER_PROCESS, str(owner_file(folder))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        ledger = Ledger(root, run_id=run_id, stale_s=60)
        ledger.discard(ledger.open("2"))
        assert folder.exists()
        assert owner_file(folder).exists()
        process.communicate(b"")
    ledger.discard(ledger.open("2"))
    assert os.listdir(root) == []


def test_a_run_removes_at_once_what_a_dead_process_of_its_own_left(root: Path) -> None:
    abandon(root, run_id="a", silent_s=0)
    ledger = Ledger(root, run_id="a", stale_s=60)
    ledger.discard(ledger.open("2"))
    assert os.listdir(root) == []


def test_the_dead_save_of_another_run_is_removed_only_when_its_heartbeat_is_old(root: Path) -> None:
    young = abandon(root, run_id="b", silent_s=30)
    old = abandon(root, run_id="b", silent_s=90)
    ledger = Ledger(root, run_id="a", stale_s=60)
    ledger.discard(ledger.open("2"))
    assert young.exists()
    assert not old.exists()
    assert not owner_file(old).exists()


def test_an_owner_file_that_was_cut_short_counts_as_another_runs(root: Path) -> None:
    folder = abandon(root, run_id="a", silent_s=0)
    for cut in (b"", b'{"run', b"[]"):
        owner_file(folder).write_bytes(cut)
        ledger = Ledger(root, run_id="a", stale_s=60)
        ledger.discard(ledger.open("2"))
        assert folder.exists()


def test_an_unpublished_folder_without_owner_goes_by_its_own_age(root: Path) -> None:
    young, old = abandon(root, run_id="a", silent_s=0), abandon(root, run_id="a", silent_s=0)
    owner_file(young).unlink()
    owner_file(old).unlink()
    age(old, seconds=90)
    ledger = Ledger(root, run_id="b", stale_s=60)
    ledger.discard(ledger.open("2"))
    assert young.exists()
    assert not old.exists()


def test_an_owner_file_without_folder_is_removed_like_any_other_leftover(root: Path) -> None:
    abandon(root, run_id="a", silent_s=0).rmdir()
    ledger = Ledger(root, run_id="a")
    ledger.discard(ledger.open("2"))
    assert os.listdir(root) == []


@pytest.mark.parametrize("killed_in", ["write", "rename"])
def test_a_kill_before_the_owner_file_is_complete_leaves_nothing_to_the_next_save(
    root: Path, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    def kill(*_: object) -> None:
        raise Killed

    ledger = Ledger(root, run_id="a")
    with monkeypatch.context() as patch:
        patch.setattr(owner.os, killed_in, kill)
        with pytest.raises(Killed):
            ledger.open("1")
    assert hidden(root, "unpublished") == []
    assert len(hidden(root, "claim")) == 1
    ledger.discard(ledger.open("2"))
    assert os.listdir(root) == []


def test_where_locks_do_not_exist_only_a_silent_heartbeat_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    alive, dead = abandon(root, run_id="a", silent_s=1), abandon(root, run_id="a", silent_s=90)
    ledger = Ledger(root, run_id="a", stale_s=60)
    ledger.discard(ledger.open("2"))
    assert alive.exists()
    assert not dead.exists()


def test_the_two_saves_of_one_ledger_leave_each_other_alone(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a", stale_s=0.0)
    first = ledger.open("1")
    clock.fill(first, "1")
    second = ledger.open("2")
    clock.fill(second, "2")
    ledger.publish(first, "1")
    ledger.publish(second, "2")
    assert versions(ledger) == {"1": 1, "2": 2}


def test_an_owner_file_swept_away_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".unpublished-1-00000000"
    lock, swept = fcntl.flock, []

    def swept_once(descriptor: int, how: int) -> None:
        if not swept:
            swept.append(next(tmp_path.glob(".claim-*")).unlink())
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", swept_once)
    claim = Owner(folder, "a")
    assert json.loads(owner_file(folder).read_text())["run_id"] == "a"
    claim.release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_that_outlives_the_lead_does_not_hold_its_lock(root: Path) -> None:
    ledger = Ledger(root, run_id="a")
    folder = ledger.open("1")
    ours, childs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        childs.send(b"forked")
        childs.recv(1)
        os._exit(0)
    childs.close()
    assert ours.recv(6) == b"forked"
    die(ledger)
    after = Ledger(root, run_id="a")
    after.discard(after.open("2"))
    assert not folder.exists()
    ours.close()
    os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_lead_killed_for_real_leaves_its_lock_free(root: Path, clock: Clock) -> None:
    save(Ledger(root, run_id="a"), clock, "1")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        folder = Ledger(root, run_id="a").open("1")
        clock.fill(folder)
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    ledger = Ledger(root, run_id="a")
    ledger.discard(ledger.open("2"))
    assert len(hidden(root, "unpublished")) == 2  # alive: the folder and its owner stay
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(write)
    os.close(read)
    ledger.discard(ledger.open("2"))
    assert os.listdir(root) == ["checkpoint-1"]
    assert versions(ledger) == {"1": 1}


# publishing


def test_publishing_without_a_manifest_is_refused_and_commits_nothing(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    unpublished = ledger.open("1")
    with pytest.raises(StorageError, match=r"checkpoint-1 cannot be published: it holds no manifest"):
        ledger.publish(unpublished, "1")
    ledger.discard(unpublished)
    assert versions(ledger) == {"1": 1}


def test_a_folder_that_another_run_swept_away_cannot_be_published(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    unpublished = ledger.open("1")
    clock.fill(unpublished)
    shutil.rmtree(unpublished)
    with pytest.raises(StorageError, match="cannot be published"):
        ledger.publish(unpublished, "1")
    ledger.discard(unpublished)
    assert os.listdir(root) == []


def test_saving_a_committed_id_again_replaces_it(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    save(ledger, clock, "2")
    save(ledger, clock, "1")
    assert versions(ledger) == {"2": 2, "1": 3}
    assert sorted(os.listdir(root)) == ["checkpoint-1", "checkpoint-2"]


def test_what_a_commit_replaces_is_deleted_after_the_commit_is_known(root: Path, clock: Clock) -> None:
    told: list[tuple[str, dict[str, int]]] = []
    ledger = Ledger(root, run_id="a", delete=lambda folder: told.append((folder.name[:8], versions(ledger))))
    for _ in range(2):
        save(ledger, clock, "1", committed=lambda path: told.append((path.name, versions(ledger))))
    assert told == [("checkpoint-1", {"1": 1}), ("checkpoint-1", {"1": 2}), (".removed", {"1": 2})]


def test_the_root_is_synced_after_the_rename_that_commits(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(root, run_id="a")
    unpublished = ledger.open("1")
    clock.fill(unpublished)
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (root / "checkpoint-1").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    ledger.publish(unpublished, "1")
    assert synced == [(str(unpublished), False), (str(root), True)]


@contextmanager
def refusing_to_publish(monkeypatch: pytest.MonkeyPatch, fails: str, root: Path, unpublished: Path) -> Iterator[None]:
    """In the block the rename of a folder fails, or the sync of the root after it."""
    with monkeypatch.context() as patch:
        if fails == "rename":
            refuse_when(patch, "rename", lambda source, target: source == unpublished)
        else:
            refuse_when(patch, "fsync", lambda fd: os.readlink(f"/proc/self/fd/{fd}") == str(root))
        yield


@pytest.mark.parametrize("fails", ["rename", "fsync"])
def test_a_file_system_that_refuses_the_commit_leaves_the_old_checkpoint_in_place(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    unpublished = ledger.open("1")
    clock.fill(unpublished)
    with (
        refusing_to_publish(monkeypatch, fails, root, unpublished),
        pytest.raises(StorageError, match=r"checkpoint-1 cannot be published: Input/output error"),
    ):
        ledger.publish(unpublished, "1")
    ledger.discard(unpublished)
    assert versions(ledger) == {"1": 1}
    assert os.listdir(root) == ["checkpoint-1"]


@pytest.mark.parametrize("fails", ["rename", "fsync"])
@pytest.mark.parametrize("is_empty_folder", [True, False])
def test_a_checkpoint_with_a_name_of_its_own_is_given_it_durably_or_not_at_all(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, fails: str, is_empty_folder: bool
) -> None:
    ledger, target = Ledger(root, run_id="a"), root / "weights"
    unpublished = ledger.open("weights")
    clock.fill(unpublished)
    if is_empty_folder:
        target.mkdir()
    with (
        refusing_to_publish(monkeypatch, fails, root, unpublished),
        pytest.raises(StorageError, match=r"weights cannot be published: Input/output error"),
    ):
        ledger.publish_at(unpublished, target)
    assert not target.exists()
    ledger.publish_at(unpublished, target)
    assert os.listdir(root) == ["weights"] and (target / MANIFEST_NAME).exists()


def test_a_file_system_that_cannot_sync_folders_still_commits(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_when(monkeypatch, "fsync", lambda fd: True, error=errno.EINVAL)
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    assert versions(ledger) == {"1": 1}


def test_what_cannot_be_deleted_is_told_and_does_not_fail_the_save(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    with monkeypatch.context() as patch:
        refuse_when(patch, "rmdir", lambda *args, **options: True, error=errno.ENOTEMPTY)
        save(ledger, clock, "1")
    assert versions(ledger) == {"1": 2}
    assert "cannot delete" in caplog.text and "the next save tries again" in caplog.text
    assert len(hidden(root, "removed")) == 1
    save(ledger, clock, "2")
    assert sorted(os.listdir(root)) == ["checkpoint-1", "checkpoint-2"]


def test_a_replacement_killed_between_its_renames_still_reads_as_the_old_checkpoint(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    save(ledger, clock, "2")
    (root / "checkpoint-2").rename(root / ".replaced-2-0123abcd")
    newest = ledger.newest()
    assert newest is not None
    assert (newest.id, newest.path.name) == ("2", ".replaced-2-0123abcd")
    assert versions(ledger) == {"1": 1, "2": 2}

    ledger.discard(ledger.open("3"))
    assert sorted(os.listdir(root)) == ["checkpoint-1", "checkpoint-2"]
    assert versions(ledger) == {"1": 1, "2": 2}


def test_a_replacement_killed_before_the_old_one_was_removed_reads_as_the_new_one(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1").rename(root / ".replaced-1-0123abcd")
    save_without_cleaning(root, clock, "1")
    assert versions(ledger) == {"1": 2}
    ledger.discard(ledger.open("3"))
    assert os.listdir(root) == ["checkpoint-1"]
    assert versions(ledger) == {"1": 2}


def test_of_two_left_aside_the_later_commit_is_the_checkpoint(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1").rename(root / ".replaced-1-ffffffff")
    save_without_cleaning(root, clock, "1").rename(root / ".replaced-1-00000000")
    assert versions(ledger) == {"1": 2}
    ledger.discard(ledger.open("3"))
    assert os.listdir(root) == ["checkpoint-1"]
    assert versions(ledger) == {"1": 2}


def test_readers_never_miss_a_checkpoint_that_is_being_replaced(root: Path, clock: Clock) -> None:
    writer, reader = Ledger(root, run_id="a"), Ledger(root, run_id="b")
    save(writer, clock, "1")
    stop = threading.Event()
    missed: list[str] = []

    def read() -> None:
        while not stop.is_set():
            if [one.id for one in reader.committed()] != ["1"]:
                missed.append("missed")

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(50):
        save(writer, clock, "1")
    stop.set()
    thread.join()
    assert missed == []


# quarantine


def test_a_checkpoint_that_was_refused_is_kept_in_quarantine_with_the_reason(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    damaged = save(ledger, clock, "2")
    save(ledger, clock, "2", refused={damaged: "model: block 3 of h.0 is bad"})
    assert versions(ledger) == {"1": 1, "2": 3}
    folder, reason = hidden(root, "quarantined")
    assert (root / folder / "model" / "payload").read_text() == "2"
    assert reason == f"{folder}.reason.txt"
    text = (root / reason).read_text()
    assert text.startswith("model: block 3 of h.0 is bad\n")
    assert "checkpoint-2 by run a" in text


def test_a_reason_that_cannot_be_written_is_not_left_half_written(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the way is kept all the same, and the save goes on; a rename that fails leaves no reason behind."""
    (root / "checkpoint-1").mkdir(parents=True)
    ledger = Ledger(root, run_id="run")
    unpublished = ledger.open("1")
    clock.fill(unpublished)
    with monkeypatch.context() as full:
        full.setattr(os, "rename", refuse)
        with pytest.raises(StorageError, match="cannot be published"):
            ledger.publish(unpublished, "1")
    assert hidden(root, "quarantined") == []

    really = os.fsync
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", lambda fd: refuse() if os.path.isfile(f"/proc/self/fd/{fd}") else really(fd))
        ledger.publish(unpublished, "1")
    assert len(hidden(root, "quarantined")) == 1 and "reason.txt: No space left" in caplog.text


def test_only_the_refused_checkpoint_whose_name_is_needed_is_quarantined(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    damaged = save(ledger, clock, "2")
    save(ledger, clock, "3", refused={damaged: "model: damaged"})
    assert versions(ledger) == {"2": 1, "3": 2}
    save(ledger, clock, "2", refused={damaged: "model: damaged"})
    assert versions(ledger) == {"3": 2, "2": 3}
    assert "model: damaged" in (root / hidden(root, "quarantined")[1]).read_text()


def test_a_refused_checkpoint_that_was_read_from_aside_is_quarantined_under_its_new_name(
    root: Path, clock: Clock
) -> None:
    ledger = Ledger(root, run_id="a")
    aside = save(ledger, clock, "1").rename(root / ".replaced-1-0123abcd")
    save(ledger, clock, "1", refused={aside: "damaged"})
    assert versions(ledger) == {"1": 2}
    assert len(hidden(root, "quarantined")) == 2
    assert hidden(root, "replaced") == []


def test_checkpoints_that_share_damage_are_quarantined_together_and_what_was_just_saved_is_not(
    root: Path, clock: Clock
) -> None:
    ledger = Ledger(root, run_id="a")
    paths = [save(ledger, clock, str(number)) for number in range(1, 5)]
    kept = save(ledger, clock, "2", refused={paths[1]: "shared file bad"})
    moved = ledger.quarantine(
        {
            paths[0]: "shared file bad",
            paths[1]: "shared file bad",
            paths[3]: "shared too",
            root / "checkpoint-9": "gone",
        },
        keep=kept,
    )
    assert versions(ledger) == {"3": 3, "2": 5}
    assert [one.name.split("-")[1] for one in moved] == ["1", "4"]
    assert [(one / "model" / "payload").read_text() for one in moved] == ["1", "4"]
    reasons = [one.with_name(f"{one.name}.reason.txt").read_text() for one in moved]
    assert reasons[0].startswith("shared file bad\nmoved here from checkpoint-1 by run a at ")
    assert reasons[1].startswith("shared too\n")
    assert len(hidden(root, "quarantined")) == 6  # with the one whose name was needed
    assert ledger.quarantine({}, keep=kept) == []


def test_a_checkpoint_that_was_put_back_is_quarantined_by_the_name_it_was_read_under(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    aside = save(ledger, clock, "1").rename(root / ".replaced-1-0123abcd")
    other = save(ledger, clock, "2")  # which puts the first one back
    assert versions(ledger) == {"1": 1, "2": 2}
    assert len(ledger.quarantine({aside: "damaged"}, keep=other)) == 1
    assert versions(ledger) == {"2": 2}


def test_what_cannot_be_quarantined_is_told_and_the_others_are(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(root, run_id="a")
    first, second, kept = (save(ledger, clock, str(number)) for number in range(3))
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        if source == first:
            raise OSError(errno.EACCES, "Permission denied", str(source))
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    assert len(ledger.quarantine({first: "bad", second: "bad"}, keep=kept)) == 1
    assert versions(ledger) == {"0": 1, "2": 3}
    assert f"cannot move {first} into quarantine: Permission denied" in caplog.text


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_checkpoint_but_has_the_name_is_kept_in_quarantine(root: Path, clock: Clock, kind: str) -> None:
    root.mkdir(parents=True)
    in_the_way = root / "checkpoint-1"
    if kind == "folder":
        in_the_way.mkdir()
        (in_the_way / "model_state.pt").write_text("an older program's")
    elif kind == "file":
        in_the_way.write_text("a file")
    else:
        in_the_way.symlink_to("nowhere")
    ledger = Ledger(root, run_id="a")
    save(ledger, clock, "1")
    assert versions(ledger) == {"1": 1}
    folder, reason = hidden(root, "quarantined")
    assert os.path.lexists(root / folder)
    assert "it is no checkpoint" in (root / reason).read_text()


# retention


def test_retention_keeps_the_newest_and_says_what_it_removed(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a", keep_last=2)
    for checkpoint_id in ("1", "2", "3", "4"):
        kept = save(ledger, clock, checkpoint_id)
    assert ledger.retain(keep=kept) == [root / "checkpoint-1", root / "checkpoint-2"]
    assert versions(ledger) == {"3": 3, "4": 4}
    assert hidden(root, "removed") == []


def test_without_a_limit_nothing_is_removed(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a")
    for checkpoint_id in ("1", "2", "3"):
        kept = save(ledger, clock, checkpoint_id)
    assert ledger.retain(keep=kept) == []
    assert list(versions(ledger)) == ["1", "2", "3"]


def test_what_was_just_committed_is_kept_even_if_a_clock_went_backwards(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a", keep_last=2)
    kept = save(ledger, clock, "1")
    for checkpoint_id in ("2", "3"):
        save(ledger, clock, checkpoint_id)
    assert ledger.retain(keep=kept) == [root / "checkpoint-2"]
    assert versions(ledger) == {"1": 1, "3": 3}


def test_retention_neither_counts_nor_removes_links_and_other_folders(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a", keep_last=2)
    for checkpoint_id in ("1", "2"):
        kept = save(ledger, clock, checkpoint_id)
    (root / "checkpoint-latest").symlink_to("checkpoint-2")
    (root / "checkpoint-notes").mkdir()
    assert ledger.retain(keep=kept) == []
    assert sorted(os.listdir(root)) == ["checkpoint-1", "checkpoint-2", "checkpoint-latest", "checkpoint-notes"]


def test_retention_counts_and_removes_what_belongs_to_the_run_alone(root: Path) -> None:
    for number, run_id in enumerate(["theirs", "ours", None, "ours", "before", "theirs", "ours"], 1):
        put(root, str(number), commit_number=number, **({} if run_id is None else {"run_id": run_id}))
    ledger = Ledger(root, run_id="a", saves_as="ours", keep_last=2)
    assert ledger.retain(keep=root / "checkpoint-7", history={"before": 5}) == [
        root / "checkpoint-2",
        root / "checkpoint-4",
    ]
    assert [one.id for one in ledger.committed()] == ["1", "3", "5", "6", "7"]
    removed = ledger.retain(keep=root / "checkpoint-7", history={"before": 5}, remove_others=True)
    assert removed == [root / f"checkpoint-{number}" for number in (1, 3, 6)]
    assert [one.id for one in ledger.committed()] == ["5", "7"]


def test_an_old_copy_left_aside_does_not_come_back_when_retention_removes_its_successor(
    root: Path, clock: Clock
) -> None:
    ledger = Ledger(root, run_id="a", keep_last=1)
    save(ledger, clock, "1").rename(root / ".replaced-1-0123abcd")
    save_without_cleaning(root, clock, "1")
    kept = save_without_cleaning(root, clock, "2")
    assert ledger.retain(keep=kept) == [root / "checkpoint-1"]
    assert versions(ledger) == {"2": 3}


def test_a_removal_that_was_killed_is_finished_by_the_next_save(root: Path, clock: Clock) -> None:
    ledger = Ledger(root, run_id="a", keep_last=1)
    save(ledger, clock, "1").rename(root / ".removed-1-0123abcd")
    (root / ".removed-1-0123abcd" / "model" / "payload").unlink()
    assert ledger.committed() == []
    save(ledger, clock, "2")
    assert os.listdir(root) == ["checkpoint-2"]


def test_a_checkpoint_that_cannot_be_removed_is_told_and_not_reported_as_removed(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(root, run_id="a", keep_last=1)
    save(ledger, clock, "1")
    kept = save(ledger, clock, "2")
    refuse_when(monkeypatch, "rename", lambda source, target: source.name == "checkpoint-1", error=errno.EACCES)
    assert ledger.retain(keep=kept) == []
    assert "cannot remove" in caplog.text
    assert versions(ledger) == {"1": 1, "2": 2}


# killed anywhere


def test_a_save_killed_before_any_step_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    survivors = []
    for step in range(100):
        root, clock = tmp_path / str(step), Clock()
        first = Ledger(root, run_id="a", keep_last=1)
        save(first, clock, "1")
        killed = not survives(first, step, lambda ledger, clock=clock: replace_and_retain(ledger, clock))
        survivors.append(versions(Ledger(root, run_id="b"))["1"])
        after = Ledger(root, run_id="a", keep_last=1)
        after.discard(after.open("9"))
        assert os.listdir(root) == ["checkpoint-1"]
        assert versions(after) == {"1": survivors[-1]}
        if not killed:
            break
    assert survivors == sorted(survivors)
    assert set(survivors) == {1, 2}
    assert len(survivors) > 8


SAVE = st.tuples(st.just("save"), st.sampled_from(["1", "2", "3"]))
EVENT = st.tuples(st.one_of(SAVE, st.tuples(st.just("retain"), st.just(""))), st.none() | st.integers(0, 25))


@given(events=st.lists(EVENT, min_size=1, max_size=8), keep_last=st.none() | st.integers(1, 3))
def test_no_sequence_of_saves_kills_and_retentions_loses_the_newest_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[tuple[str, str], int | None]], keep_last: int | None
) -> None:
    """After any kill a reader finds the state before the event or the one after it, each payload whole.

    Retention may have come part of the way: it removes the oldest first, so what is left is the end of what was there.
    """
    root, clock = tmp_path_factory.mktemp("ledger"), Clock()
    known: dict[str, int] = {}
    for (what, checkpoint_id), kill_at in events:
        ledger = Ledger(root, run_id="a", keep_last=keep_last)
        before = dict(known)
        if what == "save":
            version = clock.version + 1
            survives(ledger, kill_at, lambda ledger, id=checkpoint_id: save(ledger, clock, id))
            clock.version = version
            after = {id: v for id, v in before.items() if id != checkpoint_id} | {checkpoint_id: version}
            known = versions(Ledger(root, run_id="b"))
            assert known in (before, after)
            assert list(known) == sorted(known, key=known.__getitem__)
        elif before:
            newest = ledger.newest()
            assert newest is not None
            survives(ledger, kill_at, lambda ledger, keep=newest.path: ledger.retain(keep=keep))
            known = versions(Ledger(root, run_id="b"))
            assert list(known.items()) == list(before.items())[len(before) - len(known) :]
            assert len(known) >= min(len(before), keep_last or len(before))
            if kill_at is None and keep_last is not None:
                assert len(known) <= keep_last
    shutil.rmtree(root)


def replace_and_retain(ledger: Ledger, clock: Clock) -> None:
    ledger.retain(keep=save(ledger, clock, "1"))


def survives(ledger: Ledger, steps: int | None, work: Callable[[Ledger], object]) -> bool:
    """Run `work`, killed before its step number `steps` that changes the disk; False if it was killed."""
    left = [10**9 if steps is None else steps]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "unlink", "rmdir", "mkdir", "utime", "fsync"):
            patch.setattr(os, name, killing(getattr(os, name), left))
        try:
            work(ledger)
        except Killed:
            return False
        finally:
            patch.undo()
            die(ledger)
    return True


def killing(step: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def counted(*args: object, **options: object) -> object:
        if threading.current_thread() is threading.main_thread():
            if left[0] == 0:
                raise Killed
            left[0] -= 1
        return step(*args, **options)

    return counted


def refuse_when(patch: pytest.MonkeyPatch, name: str, when: Callable[..., bool], error: int = errno.EIO) -> None:
    """Make one function of `os` fail with this error for the arguments that `when` picks."""
    real = getattr(os, name)

    def refusing(*args: object, **options: object) -> object:
        if when(*args, **options):
            raise OSError(error, os.strerror(error))
        return real(*args, **options)

    patch.setattr(os, name, refusing)


def abandon(root: Path, run_id: str, silent_s: float) -> Path:
    """Leave what a process of `run_id` leaves that was killed while saving, `silent_s` ago."""
    folder = root / f".unpublished-1-{secrets.token_hex(4)}"
    folder.mkdir(parents=True)
    owner_file(folder).write_text(json.dumps({"run_id": run_id, "host": "elsewhere", "pid": 1}))
    age(owner_file(folder), silent_s)
    return folder


def save_without_cleaning(root: Path, clock: Clock, checkpoint_id: str) -> Path:
    folder = root / f"checkpoint-{checkpoint_id}"
    folder.mkdir()
    clock.fill(folder, checkpoint_id)
    return folder
