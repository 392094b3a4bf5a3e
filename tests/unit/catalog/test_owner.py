"""One run at a time in a folder: the second is told who is there, and a dead owner blocks nobody."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckpt.catalog import owner
from ckpt.catalog.owner import FolderLock
from ckpt.errors import FolderInUseError
from tests.support.covering import sampled
from tests.support.pace import patience

OTHER_RUN = """
import sys
from pathlib import Path
from ckpt.catalog.owner import FolderLock
lock = FolderLock(Path(sys.argv[1]), run_id="other", what="the folder", advice="go elsewhere")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / ".run.owner.json"


@pytest.fixture(autouse=True)
def quick_and_tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(owner, "HEARTBEAT_S", 0.02)
    descriptors, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    yield
    gc.collect()
    assert [t.name for t in threading.enumerate() if "heartbeat" in t.name and t not in threads] == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def lock_on(file: Path, stale_s: float = 60.0) -> FolderLock:
    return FolderLock(file, run_id="mine", what="the folder", advice="go elsewhere", stale_s=stale_s)


@contextmanager
def held(file: Path) -> Iterator[FolderLock]:
    lock = lock_on(file)
    lock.acquire()
    yield lock
    lock.release()


@contextmanager
def helper_of(file: Path, pid: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps the lock of an owner: of the one of that number, which does not hold it any more."""
    lock = lock_on(file)
    lock.acquire()
    with subprocess.Popen(["sleep", "0.3"], pass_fds=[lock.fileno()]) as helper:
        said = json.loads(file.read_text()) | {"pid": pid}
        os.pwrite(lock.fileno(), json.dumps(said).ljust(4096).encode(), 0)
        assert lock._claim is not None
        lock._claim.let_go()
        yield helper


def leave(file: Path, silent_s: float, **about: object) -> None:
    """Leave the owner file of a process that holds no lock that is seen here."""
    said = {"run_id": "far", "host": "elsewhere", "pid": 7, "since": "2026-01-01T00:00:00+00:00", "machine": "another"}
    file.write_text(json.dumps(said | about))
    os.utime(file, (time.time() - silent_s,) * 2)


@contextmanager
def another_run(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", OTHER_RUN, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_run_is_told_who_is_there_until_that_one_is_dead(file: Path) -> None:
    with another_run(file) as process:
        os.utime(file, (time.time() - 10_000,) * 2)  # however silent: its lock is seen
        with pytest.raises(FolderInUseError) as caught:
            lock_on(file, stale_s=0.0).acquire()
        assert "the folder is in use since 20" in str(caught.value)
        assert f"by run other (pid {process.pid} on {os.uname().nodename}), whose last sign of life was" in str(
            caught.value
        )
        assert str(caught.value).endswith(" s ago: go elsewhere")
        process.kill()
        process.wait()
        with held(file):  # at once: its lock has ended with it
            assert json.loads(file.read_text())["pid"] == os.getpid()
    assert os.listdir(file.parent) == []


def test_the_locks_of_one_process_share_a_claim_until_the_last_is_given_back(file: Path) -> None:
    first, second = lock_on(file), lock_on(file)
    first.acquire()
    second.acquire()
    first.release()
    first.release()
    assert file.exists()
    second.release()
    assert not file.exists()


def test_a_lock_that_nobody_has_any_more_is_given_back(file: Path) -> None:
    lock = lock_on(file)
    lock.acquire()
    del lock
    gc.collect()
    assert not file.exists()


def test_an_owner_on_another_machine_is_refused_as_soon_as_its_heart_beats(file: Path) -> None:
    leave(file, silent_s=0.0)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.01):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(
            FolderInUseError, match=r"since 2026-01-01T00:00:00\+00:00 by run far \(pid 7 on elsewhere\)"
        ):
            lock_on(file, stale_s=60.0).acquire()
    finally:
        stop.set()
        thread.join()


def test_an_owner_on_another_machine_is_dead_once_it_has_been_silent(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave(file, silent_s=59.9)
    moves: list[None] = []
    with caplog.at_level(logging.WARNING), held(file) as lock:
        lock.acquire(lambda: moves.append(None))
        assert json.loads(file.read_text())["run_id"] == "mine"
    assert "was in use by run far (pid 7 on elsewhere): waiting 0 s for a sign of life" in caplog.text


def test_a_lock_that_is_collected_while_another_is_acquired_keeps_no_thread_waiting(file: Path, tmp_path: Path) -> None:
    """The collector may run in the thread that the acquiring one starts, and waits for."""
    other = tmp_path / "other" / file.name
    other.parent.mkdir()
    forgotten = [lock_on(other)]
    forgotten[0].acquire()
    leave(file, silent_s=0.0)
    has_ended: list[bool] = []

    def forget() -> None:  # while the lock on `file` is acquired
        if forgotten:
            thread = threading.Thread(target=forgotten.clear)
            thread.start()
            thread.join(patience(2.0))
            has_ended.append(not thread.is_alive())

    lock = lock_on(file, stale_s=0.2)
    lock.acquire(forget)
    lock.release()
    assert has_ended == [True]
    assert not other.exists(), "it was given back"


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_owner_file_counts_as_another_machines(file: Path, said: bytes) -> None:
    file.write_bytes(said)
    os.utime(file, (time.time() - 90,) * 2)
    with held(file):
        assert json.loads(file.read_text())["run_id"] == "mine"


def test_of_two_that_replace_a_dead_owner_without_locks_only_one_wins(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    leave(file, silent_s=90.0)
    put = os.replace

    def replaced_again(source: Path, target: Path) -> None:
        put(source, target)
        monkeypatch.setattr(os, "replace", put)
        leave(file.with_name("theirs"), silent_s=0.0)
        put(file.with_name("theirs"), target)
        os.utime(target, (time.time() + 1,) * 2)

    monkeypatch.setattr(os, "replace", replaced_again)
    sleep = time.sleep

    def beaten(seconds: float) -> None:
        sleep(seconds)
        os.utime(file)

    monkeypatch.setattr(owner.time, "sleep", beaten)
    with pytest.raises(FolderInUseError, match="by run far"):
        lock_on(file).acquire()
    assert json.loads(file.read_text())["run_id"] == "far"


def test_where_links_do_not_exist_the_file_is_made_exclusively(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with held(file), another_process_is_refused(file):
        pass
    assert os.listdir(file.parent) == []


@contextmanager
def another_process_is_refused(file: Path) -> Iterator[None]:
    command = [sys.executable, "-c", OTHER_RUN, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert "FolderInUseError: the folder is in use since" in done.stderr
    assert f"by run mine (pid {os.getpid()} on " in done.stderr
    yield


def test_a_lock_whose_file_was_removed_is_acquired_again_at_the_next_look(file: Path) -> None:
    with held(file) as lock:
        file.unlink()
        lock.acquire()
        assert json.loads(file.read_text())["run_id"] == "mine"


def test_a_claim_that_another_thread_gives_back_meanwhile_does_not_stand(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = owner.Owner(file.parent / ".unpublished-1", "run")
    has_name = owner._has_name

    def given_back_meanwhile(name: Path, descriptor: int) -> bool:
        claim.let_go()
        return has_name(name, descriptor)

    monkeypatch.setattr(owner, "_has_name", given_back_meanwhile)
    assert not claim.stands


def test_a_lock_that_was_taken_over_is_not_removed_by_its_former_owner(file: Path) -> None:
    lock = lock_on(file)
    lock.acquire()
    leave(file.with_name("theirs"), silent_s=0.0)
    os.replace(file.with_name("theirs"), file)
    lock.release()
    assert json.loads(file.read_text())["run_id"] == "far"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_neither_holds_the_lock_nor_removes_the_file(file: Path) -> None:
    lock = lock_on(file)
    lock.acquire()
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert file.exists()
    lock.release()


def test_a_dead_owners_helpers_keep_the_folder_until_the_last_of_them_has_ended(file: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    with helper_of(file, dead.pid) as helper, held(file):
        assert helper.poll() is not None or helper.wait(0.2) == 0, "the lock was free while the helper lived"
    assert not file.exists()


def test_a_living_owners_helper_is_not_waited_for(file: Path) -> None:
    began = time.monotonic()
    with helper_of(file, os.getppid()), pytest.raises(FolderInUseError, match=f"pid {os.getppid()}"):
        lock_on(file).acquire()
    assert time.monotonic() - began < owner._HELPERS_S


@pytest.mark.parametrize(
    ("of_folder", "of_file"), [(0o755, 0o600), (0o700, 0o600), (0o2775, 0o660), (0o770, 0o660), (0o777, 0o666)]
)
@sampled("umask", [0o022, 0o002, 0o077])
def test_only_those_who_may_write_a_folder_may_open_its_lock_whatever_the_umask(
    file: Path, of_folder: int, of_file: int, umask: int
) -> None:
    """Who can open a file can lock it; and a colleague of the group must be able to."""
    file.parent.chmod(of_folder)
    before = os.umask(umask)
    try:
        with held(file):
            folder = owner.Owner(file.parent / ".unpublished-1", "run")
            made = [file.stat(), folder.file.stat()]
            folder.release()
    finally:
        os.umask(before)
    assert [(one.st_mode & 0o777, one.st_gid) for one in made] == [(of_file, file.parent.stat().st_gid)] * 2


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o770, 0o600), (0o777, 0o666)])
def test_a_lock_file_is_not_its_groups_where_it_cannot_have_the_folders_group(
    file: Path, monkeypatch: pytest.MonkeyPatch, of_folder: int, of_file: int
) -> None:
    """Else all of the owner's own group could lock it."""

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    file.parent.chmod(of_folder)
    mode, group = owner._lockers(file.parent)
    monkeypatch.setattr(owner, "_lockers", lambda _: (mode, group + 1))
    monkeypatch.setattr(os, "fchown", refused)
    with held(file):
        assert file.stat().st_mode & 0o777 == of_file


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_a_folder_with_the_owner_file_of_another_user_says_how_to_free_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the parents of tmp_path are root's alone
        file = Path(folder) / "run.owner.json"
        file.write_text("{}")
        file.chmod(0o600)
        (Path(folder) / ".claim-0123abcd").touch(0o600)
        os.chown(folder, 4321, -1)
        os.seteuid(4321)
        try:
            with pytest.raises(FolderInUseError, match="by user 0, .* remove this file if that run has ended, else"):
                FolderLock(file, run_id="1", what="the folder", advice="wait").acquire()
        finally:
            os.seteuid(0)


@contextmanager
def locked_by_a_stranger(file: Path) -> Iterator[None]:
    """Another process, which has only read permission, holds a lock on the file."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with subprocess.Popen(["sleep", "60"], pass_fds=[descriptor]) as holder:
            yield
            holder.kill()
    finally:
        os.close(descriptor)


def test_nobody_who_may_not_write_can_keep_a_dead_runs_lock(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions made files that everybody may read, and so lock."""
    monkeypatch.setattr(owner, "_HELPERS_S", 0.1)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for about in ({"machine": owner.machine(), "pid": dead.pid}, {"machine": "another"}):
        leave(file, silent_s=90.0, **about)
        file.chmod(0o644)
        with locked_by_a_stranger(file), held(file):
            assert json.loads(file.read_text())["run_id"] == "mine"
            assert file.stat().st_mode & 0o777 == 0o600


def test_a_living_owner_keeps_a_lock_that_others_may_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an earlier version, however long it was stopped."""
    monkeypatch.setattr(owner, "_HELPERS_S", 0.1)
    leave(file, silent_s=90.0, machine=owner.machine(), pid=os.getppid())
    file.chmod(0o644)
    with locked_by_a_stranger(file), pytest.raises(FolderInUseError, match=f"pid {os.getppid()}"):
        lock_on(file).acquire()


def test_nobody_who_may_not_write_keeps_the_rest_of_a_dead_save(tmp_path: Path) -> None:
    folder = tmp_path / ".unpublished-1-00000000"
    folder.mkdir()
    file = owner.owner_file(folder)
    for mode, counts_as_dead in ((0o644, True), (0o600, False)):
        leave(file, silent_s=90.0)
        file.chmod(mode)
        with (
            locked_by_a_stranger(file),
            owner.abandoned(folder, "mine", owner.file_system_now(tmp_path), 60.0) as is_dead,
        ):
            assert is_dead is counts_as_dead
