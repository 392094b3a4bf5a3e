"""The keeper of a host: it outlives who started it, serves its job alone, and leaves nothing that nobody needs any more."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from ckpt.errors import StorageError
from ckpt.ranks.addresses import LOOPBACK
from ckpt.storage.keeper import client
from ckpt.storage.keeper.client import OwnKeeper, Peer, Where, make_folder, own_keeper
from ckpt.storage.keeper.hosts import HERE, THERE, HostsStore
from ckpt.storage.keeper.wire import (
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
    WRITE,
    Request,
    prove_as_client,
    received,
    send_request,
)
from tests.support.pace import patience

_MIB = bytes(range(256)) * 4096


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a keeper, which is gone at the end."""
    made = tmp_path / "own" / "run"
    make_folder(made, is_private=True)
    yield made
    made = made.parent
    while _OPEN:
        _OPEN.pop()()
    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith(str(made)) for word in process.info["cmdline"] or []):
            with suppress(psutil.NoSuchProcess):
                process.kill()


_OPEN: list[Callable[[], None]] = []
"""What closes the connections of a test."""


def _keeper(folder: Path, keep_s: float = 60.0) -> OwnKeeper:
    keeper = own_keeper(folder, LOOPBACK, keep_s=keep_s, removes=True)
    _OPEN.append(partial(keeper.leave, has_ended=False))
    return keeper


def _peer(where: Where) -> Peer:
    peer = Peer(where)
    _OPEN.append(peer.close)
    return peer


def _soon(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + patience(10.0)
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return is_so()


def test_files_are_read_listed_and_copied_by_range(folder: Path, tmp_path: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "f").write_bytes(_MIB)
    peer = _peer(_keeper(folder).where)
    assert bytes(peer.read("a/f", 3, 1000)) == _MIB[3:1000]
    assert bytes(peer.read("a/f", len(_MIB) - 5, 2 * len(_MIB))) == _MIB[-5:]
    assert bytes(peer.read("a/f", len(_MIB) + 1, len(_MIB) + 9)) == b""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "g").write_bytes(_MIB * 20)
    (tmp_path / "source" / "empty").write_bytes(b"")
    moved: list[int] = []
    assert peer.copy(tmp_path / "source", "g", "b/c/g", moved.append) == sum(moved) == 20 * len(_MIB)
    assert peer.copy(tmp_path / "source", "empty", "b/empty", moved.append) == 0
    assert (folder / "b/c/g").read_bytes() == _MIB * 20
    assert peer.sizes("b") == {"b/c/g": 20 * len(_MIB), "b/empty": 0}
    assert peer.size_and_version("a/f")[0] == len(_MIB)


@pytest.mark.parametrize("path", ["../own.txt", "/etc/passwd", "a/../../x", ".keeper/lock", ".keeper", "link", ""])
def test_nothing_but_files_of_its_folder_is_served(folder: Path, path: str) -> None:
    (folder.parent / "own.txt").write_bytes(b"secret")
    (folder / "link").symlink_to(folder.parent / "own.txt")
    peer = _peer(_keeper(folder).where)
    with pytest.raises(OSError):
        peer.read(path, 0, 10)
    with pytest.raises(OSError):
        peer.copy(folder.parent, "own.txt", path, lambda _: None)
    assert (folder.parent / "own.txt").read_bytes() == b"secret"


def test_a_file_that_is_there_is_neither_replaced_nor_missed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(_MIB)
    (folder / "g").write_bytes(b"old")
    peer = _peer(_keeper(folder).where)
    with pytest.raises(OSError, match="File exists"):
        peer.copy(tmp_path, "g", "g", lambda _: None)
    with pytest.raises(FileNotFoundError):
        peer.read("none", 0, 3)
    assert bytes(peer.read("g", 0, 9)) == b"old"


def test_a_copy_that_breaks_off_leaves_no_file(folder: Path) -> None:
    where = _keeper(folder).where
    with socket.create_connection((where.host, where.port)) as link:
        prove_as_client(link, bytes.fromhex(where.secret))
        send_request(link, Request(WRITE, "b/g", 0, len(_MIB)))
        received(link, 9)
        link.sendall(_MIB[:1000])
        assert _soon((folder / "b" / "g").exists)
    assert _soon(lambda: not (folder / "b" / "g").exists())


def test_a_stranger_gets_a_nonce_and_keeps_nobody_out(folder: Path) -> None:
    (folder / "f").write_bytes(b"state")
    where = _keeper(folder).where
    with pytest.raises(ConnectionError):
        _peer(Where(where.host, where.port, "00" * 32)).read("f", 0, 5)
    with socket.create_connection((where.host, where.port)) as link:
        link.settimeout(patience(10.0))
        link.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
        assert received(link, len(GREETING) + NONCE_BYTES)[: len(GREETING)] == GREETING
        assert link.recv(1) == b""
    silent = [socket.create_connection((where.host, where.port)) for _ in range(300)]
    assert bytes(_peer(where).read("f", 0, 5)) == b"state"
    for link in silent:
        link.close()


def test_it_stays_while_ranks_may_come_back_and_goes_with_its_memory_after_that(folder: Path) -> None:
    (folder / "f").write_bytes(b"state")
    first = _keeper(folder, keep_s=patience(1.0))
    second = _keeper(folder)
    assert first.pid == second.pid and first.where == second.where
    first.leave(has_ended=False)
    second.leave(has_ended=False)
    third = _keeper(folder)
    assert third.pid == first.pid
    time.sleep(patience(1.5))
    assert third.is_there() and (folder / "f").exists()
    third.leave(has_ended=False)
    assert _soon(lambda: not folder.exists()) and _soon(lambda: psutil.Process(first.pid).status() == psutil.STATUS_ZOMBIE)


def test_the_end_of_the_job_frees_the_memory_before_the_last_rank_goes_on(folder: Path) -> None:
    first, second = _keeper(folder), _keeper(folder)
    first.leave(has_ended=True)
    assert second.is_there() and folder.exists()
    second.leave(has_ended=True)
    assert not folder.exists() and folder.parent.exists()


def test_a_connection_that_the_keeper_has_closed_is_made_again_and_a_silent_keeper_is_an_error_in_time(folder: Path) -> None:
    (folder / "f").write_bytes(b"state")
    keeper = _keeper(folder)
    peer = Peer(keeper.where, silence_s=0.5)
    _OPEN.append(peer.close)
    assert bytes(peer.read("f", 0, 5)) == b"state"
    (link,) = peer._free.queue
    link.shutdown(socket.SHUT_RDWR)
    assert bytes(peer.read("f", 0, 5)) == b"state"
    os.kill(keeper.pid, signal.SIGSTOP)
    assert _soon(lambda: psutil.Process(keeper.pid).status() == psutil.STATUS_STOPPED)  # its threads go on until then
    try:
        began = time.monotonic()
        with pytest.raises(OSError, match=f"host {LOOPBACK}: timed out"):
            peer.read("f", 0, 5)
        assert time.monotonic() - began < patience(5.0)
    finally:
        os.kill(keeper.pid, signal.SIGCONT)


def test_a_file_that_does_not_fit_is_refused_at_its_end_and_the_connection_serves_on(folder: Path, tmp_path: Path) -> None:
    keeper = _keeper(folder)
    peer = _peer(keeper.where)
    for name, data in (("zeros", bytes(30 << 20)), ("small", b"state")):
        (tmp_path / name).write_bytes(data)
    resource.prlimit(keeper.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(OSError, match="File too large"):
        peer.copy(tmp_path, "zeros", "a/zeros", lambda _: None)
    assert peer.copy(tmp_path, "small", "a/small", lambda _: None) == 5
    assert peer.sizes("a") == {"a/small": 5}


def test_a_connection_that_the_keeper_has_ended_is_not_used_again(folder: Path) -> None:
    (folder / "f").write_bytes(b"state")
    peer = _peer(_keeper(folder).where)
    assert bytes(peer.read("f", 0, 5)) == b"state"
    link = peer._free.get_nowait()
    link.shutdown(socket.SHUT_RDWR)  # as it does with those that say nothing for minutes
    peer._free.put(link)
    assert bytes(peer.read("f", 0, 5)) == b"state"
    assert link.fileno() == -1


def test_it_holds_nothing_that_the_process_which_started_it_had_open(folder: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    _keeper(folder)
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        assert select.select([pipe], [], [], patience(5.0))[0] and pipe.read() == b""


def test_a_keeper_that_hangs_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "f").write_bytes(b"state")
    first = _keeper(folder)
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setattr(client, "_CONNECT_S", patience(0.5))
    second = _keeper(folder)
    assert second.pid != first.pid and bytes(_peer(second.where).read("f", 0, 5)) == b"state"


def test_a_keeper_that_was_killed_or_told_to_end_leaves_the_files_to_the_next(folder: Path) -> None:
    (folder / "f").write_bytes(b"state")
    keeper = _keeper(folder)
    for number in (signal.SIGKILL, signal.SIGTERM):
        os.kill(keeper.pid, number)
        assert _soon(partial(_is_gone, keeper))
        keeper = _keeper(folder)
        assert bytes(_peer(keeper.where).read("f", 0, 5)) == b"state"


def _is_gone(keeper: OwnKeeper) -> bool:
    return not keeper.is_there()


def test_many_who_start_one_at_a_time_find_one(folder: Path) -> None:
    found: list[OwnKeeper] = []
    threads = [threading.Thread(target=lambda: found.append(_keeper(folder))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len({keeper.pid for keeper in found}) == 1


def test_memory_that_nobody_came_back_for_is_removed_by_the_next_keeper(folder: Path) -> None:
    left = {}
    for name in ("0" * 16, "1" * 16, "2" * 16):
        left[name] = folder.parent / name
        make_folder(left[name], is_private=True)
        keeper = _keeper(left[name], keep_s=600.0)
        if name != "2" * 16:
            os.kill(keeper.pid, signal.SIGKILL)
            assert _soon(partial(_is_gone, keeper))
        if name != "1" * 16:
            os.utime(left[name] / ".keeper" / "lock", (0, time.time() - 1000))
    (folder.parent / "mine").mkdir()
    run = folder.parent / ("3" * 16)
    make_folder(run, is_private=True)
    _keeper(run)
    assert _soon(lambda: not left["0" * 16].exists())
    assert left["1" * 16].exists() and left["2" * 16].exists() and (folder.parent / "mine").exists()


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o777)
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(StorageError, match="not a folder of this user alone"):
        make_folder(tmp_path / "shared" / "run", is_private=True)


def test_each_byte_comes_from_the_nearest_host_that_has_it(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "run"
    make_folder(other, is_private=True)
    own = tmp_path / "here"
    own.mkdir()
    try:
        there, far = _keeper(folder), _keeper(other)
        for place, name in ((own, "a"), (folder, "a"), (folder, "b"), (other, "b"), (other, "c"), (folder, "c")):
            (place / name).write_bytes(name.encode() * 100)
        (folder / "c").write_bytes(b"c" * 50)  # shorter than it was saved
        files = {"a": (100, [0, 1]), "b": (100, [1, 2]), "c": (100, [1, 2]), "d": (100, [1])}
        store = HostsStore(own, 0, {1: _peer(there.where), 2: _peer(far.where)}, files)
        assert bytes(store.get_range("a", 10, 500)) == b"a" * 90
        assert store.counts() == {HERE: [1, 90]}
        for key in ("a", "b"):
            memory = bytearray(120)
            buffers = [memoryview(memory)[:30], memoryview(memory)[30:30], memoryview(memory)[30:]]
            assert store.get_into(key, 20, 110, buffers) == 80 and memory == key.encode() * 80 + bytes(40)
        assert bytes(store.get_range("b", 0, 100)) == b"b" * 100
        os.kill(there.pid, signal.SIGKILL)
        assert bytes(store.get_range("b", 0, 100)) == b"b" * 100
        assert bytes(store.get_range("c", 60, 100)) == b"c" * 40
        assert store.counts()[THERE] == [4, 320]
        with pytest.raises(OSError):
            store.get_range("d", 0, 1)
        with pytest.raises(FileNotFoundError):
            store.get_range("none", 0, 1)
        store.close()
    finally:
        far.leave(has_ended=True)
