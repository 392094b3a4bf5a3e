"""A process that writes for a rank: what it writes, what it tells, what becomes of both when either dies. All with real processes."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import tensorstore as ts
import torch
import zarr
from safetensors import safe_open

from ckpt import StateComponent
from ckpt.catalog.retention import Retention
from ckpt.errors import CheckpointError, ConfigurationError, MissingStateError, RankAbsentError, StorageError, sentence
from ckpt.memory.arena import Arena
from ckpt.memory.shared_memory import segment_of, shared_memory
from ckpt.ranks.topology import Topology
from ckpt.saving.background import writer_child, writer_process
from ckpt.saving.background.priority import NICE
from ckpt.saving.background.serialized_errors import deserialize_error, serialize_error
from ckpt.saving.background.snapshot import Snapshot, arena_bytes
from ckpt.saving.background.writer_process import WriterProcess
from ckpt.saving.checkpoint_root import CheckpointRoot, KnownRoots, SaveTarget
from ckpt.saving.prepared_save import PreparedSave
from ckpt.saving.saver import SavedRun, Saver
from ckpt.saving.writing import RankWritePlan, Staged, WriteJob
from tests import writer_trainer
from tests.pace import patience
from tests.ranks import forkserver
from tests.stand_in_shares import NoBackend, StandIn
from tests.states import ALL_DTYPES, BACKENDS, Held, backend_named, cpu, random_bits

pytestmark = pytest.mark.usefixtures("collected")

BACKEND: Any = NoBackend()
ENDS_S = 2.0
"""How soon a writer is gone when its trainer is."""


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WriterProcess]:
    """One for all tests; where it is started lies a file that is not to be taken for Python's own."""
    folder = tmp_path_factory.mktemp("started here")
    (folder / "json.py").write_text("raise SystemExit('a file of the user was taken for a library')\n")
    made = WriterProcess(num_cores=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path, ""])
        patch.setenv("PYTHONPATH", ".")
        began = time.monotonic()
        made.start(backend_named("zarr"))
        assert time.monotonic() - began < 1, "it is not waited for"
    yield made
    pid = made.pid
    made.close()
    assert pid is None or not psutil.pid_exists(pid)


def _items(memory: torch.Tensor, num_items: int = 3) -> Iterator[Staged]:
    for number in range(num_items):
        yield Staged(number, [memory[number * 64 :][:64].view(torch.int32)], [(number, 7)])


def _memory(num_bytes: int = 4096) -> torch.Tensor:
    memory = shared_memory(num_bytes)
    memory.copy_(random_bits((num_bytes,), torch.uint8, seed=num_bytes))
    return memory


def _write(writer: WriterProcess, share: StandIn, folder: Path, **other: Any) -> Any:
    given: dict[str, Any] = {"staged": _items(_memory()), "progress": lambda num_bytes: None, **other}
    return writer.write(share, WriteJob(folder, BACKEND, {}), given["staged"], given["progress"])  # type: ignore[arg-type]


def _until(is_so: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + patience(seconds)
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Real shares


def _prepared(root: Path, store: str, seed: int) -> PreparedSave[CheckpointRoot]:
    """The save of a state with large, small, empty and odd tensors."""
    state = {f"{dtype}".removeprefix("torch."): random_bits((37, 3), dtype, seed) for dtype in ALL_DTYPES}
    state |= {
        "large": random_bits((700, 1100), torch.float32, seed),
        "edge": random_bits((1025, 1023), torch.bfloat16, seed),
    }
    state |= {"none": torch.empty(0, 5), "one": random_bits((), torch.float64, seed), "step": seed, "name": "a name"}
    topology = Topology.alone()
    backend = backend_named(store)
    components = [StateComponent("model", Held(state), "global")]
    saver = Saver(SavedRun(components, topology, backend, cpu()), KnownRoots(root, "r", stale_s=1e9, shared_root=True))
    with topology.operation("save"):
        return saver.prepare(SaveTarget(root, "1", validate=False, refused={}, retention=Retention()))


def _staged(prepared: PreparedSave[CheckpointRoot], arena: Arena) -> Snapshot:
    snapshot = Snapshot(prepared.share, prepared.plan, prepared.mine, arena, watched=None, pinned_bytes=None)
    arena.grow(arena_bytes(prepared.share, is_pinned=False)[1], lambda: None)
    snapshot.take()
    return snapshot


def _files(folder: Path) -> dict[str, bytes]:
    """Content of all files, with those that have a random name under another."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name if "/d/" not in name else f"data of {name.partition('/d/')[0]}": data for name, data in found.items()}


@pytest.mark.parametrize("store", BACKENDS)
def test_the_process_writes_what_the_thread_writes(writer: WriterProcess, tmp_path: Path, store: str) -> None:
    arena = Arena(shared_memory)
    for seed in (1, 2):  # a share that is not known, and one that is, in memory that is used again
        prepared = _prepared(tmp_path, store, seed)
        by_thread, by_process = tmp_path / f"thread-{seed}", tmp_path / f"process-{seed}"
        votes = []
        for folder, write in ((by_thread, RankWritePlan.write), (by_process, writer.write)):
            folder.mkdir()
            moved: list[int] = []
            items = _staged(prepared, arena).items()
            job = WriteJob(folder, prepared.backend, prepared.plain)
            votes.append(write(prepared.share, job, items, moved.append))
            assert sum(moved) >= 700 * 1100 * 4
        assert votes[1].checksums == votes[0].checksums
        assert votes[1].sizes == votes[0].sizes and votes[1].total_bytes == votes[0].total_bytes
        assert votes[1].plain_files == votes[0].plain_files
        if store == "ocdbt":  # which writes down the time, and random names
            assert _files(by_process).keys() == _files(by_thread).keys()
        else:
            assert _files(by_process) == _files(by_thread)
        _require_readable(by_process, store, seed)


def _require_readable(folder: Path, store: str, seed: int) -> None:
    """Read a large tensor by the format's own library."""
    want = random_bits((700, 1100), torch.float32, seed).numpy().tobytes()
    if store == "ocdbt":
        ours = folder / "arrays.ocdbt" / "rank-00000"
        kvstore = {"driver": "ocdbt", "base": f"file://{ours}/", "path": "model/large/"}
        got = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result().read().result()
    elif store == "safetensors":
        with safe_open(folder / "model" / "rank-00000-float32.safetensors", "np") as file:
            got = file.get_tensor("large")
    else:
        got = zarr.open_array(str(folder / "model" / "large"), mode="r")[...]
    assert got.tobytes() == want


def test_memory_that_grows_between_two_saves_is_followed(writer: WriterProcess, tmp_path: Path) -> None:
    share = StandIn()
    for number, num_bytes in enumerate((4096, 9 << 20, 4096)):
        memory = _memory(num_bytes)
        last = memory[-64:].view(torch.int32)
        _write(writer, share, tmp_path / f"{number}", staged=[*_items(memory, 2), Staged(2, [last])])
        assert (tmp_path / f"{number}" / "2").read_bytes() == last.numpy().tobytes()
        del memory, last
    assert not any("ckpt-staging" in region.path for region in psutil.Process(writer.pid).memory_maps()), (
        "it lets go of all memory"
    )


def test_tensors_that_lie_elsewhere_are_sent(writer: WriterProcess, tmp_path: Path) -> None:
    memory = _memory()
    hosts = [random_bits((5, 3), dtype, 3) for dtype in ALL_DTYPES]
    strided = torch.arange(20).reshape(4, 5).t()
    mixed = [
        Staged(0, hosts, None),
        Staged(1, [memory[:16].view(2, 8)]),
        Staged(2, [strided, torch.empty(0, 3), memory[5:6]]),
    ]
    vote = _write(writer, StandIn(), tmp_path / "a", staged=mixed)
    here = StandIn().write(WriteJob(tmp_path / "b", BACKEND, {}), mixed, lambda num_bytes: None)
    assert _files(tmp_path / "a") == _files(tmp_path / "b")
    assert vote.checksums == here.checksums, "shapes, data types and digests"


def test_plain_values_slivers_and_what_came_before_arrive(writer: WriterProcess, tmp_path: Path) -> None:
    job = WriteJob(tmp_path / "a", BACKEND, {"p.json": ("model", b"[1]")}, {3: b"abc"}, "before")  # type: ignore[arg-type]
    vote: Any = writer.write(StandIn(), job, _items(_memory()), lambda _: None)  # type: ignore[arg-type]
    assert vote.plain_files == {"p.json": ["model", "[1]"]}
    assert vote.index == ["none", {3: b"abc"}, "before"]


def test_the_next_item_is_asked_for_when_the_one_before_is_written(writer: WriterProcess, tmp_path: Path) -> None:
    memory = _memory(64)

    def one_place_for_all() -> Iterator[Staged]:
        for number in range(3):
            memory.fill_(number)
            yield Staged(number, [memory])
            assert (tmp_path / "a" / f"{number}").read_bytes() == bytes([number]) * 64
            memory.fill_(99)

    _write(writer, StandIn("changes memory late"), tmp_path / "a", staged=one_place_for_all())
    assert [(tmp_path / "a" / f"{number}").read_bytes() for number in range(3)] == [bytes([n]) * 64 for n in range(3)]


def test_a_relative_folder_is_below_the_trainer_s(
    writer: WriterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _write(writer, StandIn(), Path("there"))
    assert (tmp_path / "there" / "2").exists()


def test_a_default_timeout_of_sockets_does_not_matter(tmp_path: Path) -> None:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(5)
    writer = WriterProcess()
    try:
        writer.start(BACKEND)
    finally:
        socket.setdefaulttimeout(before)
    _write(writer, StandIn(), tmp_path / "a")
    writer.close()


# What it is, and what it tells


def test_it_is_low_in_priority_takes_no_signals_and_keeps_off_devices(writer: WriterProcess, tmp_path: Path) -> None:
    _write(writer, StandIn("tells who it is"), tmp_path / "a")
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGTERM)
    os.kill(writer.pid, signal.SIGINT)
    _write(writer, StandIn("tells who it is"), tmp_path / "b")
    first, second = (json.loads((tmp_path / name / "who.json").read_text()) for name in "ab")
    assert first == second and first["pid"] == writer.pid
    assert first["nice"] == max(NICE, os.getpriority(os.PRIO_PROCESS, 0))
    assert first["cores"] == [max(os.sched_getaffinity(0))]
    assert first["ignores"] == [True, True]
    assert (first["threads"], first["has_cuda"], first["main"]) == (1, False, None)
    assert os.getpgid(writer.pid) == writer.pid, (
        "signals to the trainer's group do not reach it, not even while it starts"
    )


def test_what_it_logs_is_logged_by_the_trainer(
    writer: WriterProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ckpt"):
        _write(writer, StandIn("warns"), tmp_path / "a")
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        ("ckpt", logging.WARNING, "this is odd")
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, "ckpt"):
        _write(writer, StandIn("warns"), tmp_path / "b")
    assert [record.getMessage() for record in caplog.records] == ["this is odd", "a detail"]


def test_bytes_that_moved_are_all_told(writer: WriterProcess, tmp_path: Path) -> None:
    _write(writer, StandIn(), tmp_path / "before")  # it is up
    moved: list[int] = []
    _write(writer, StandIn(), tmp_path / "a", progress=moved.append)
    assert sum(moved) == 3 * 64


def test_bytes_that_moved_are_told_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noting:
        def send(self, message: Any) -> None:
            sent.append(message)

        def recv(self) -> Any:
            raise EOFError

    sent: list[Any] = []
    monkeypatch.setattr(writer_child, "_leave", lambda code: None)
    monkeypatch.setattr(writer_child, "TELL_S", 1e9)
    trainer = writer_child._Trainer(Noting())  # type: ignore[arg-type]
    for _ in range(2):
        trainer.tell("next")
        trainer.progress(5)
    trainer.tell("done")
    assert sent == [("next", None), ("next", None), ("moved", 10), ("done", None)]


# What goes wrong in it


def test_the_error_of_a_full_disk_keeps_its_number_and_file(writer: WriterProcess, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        _write(writer, StandIn("disk full"), tmp_path / "a")
    error = caught.value
    assert (type(error), error.errno, error.filename) == (OSError, errno.ENOSPC, str(tmp_path / "a" / "1"))
    assert (tmp_path / "a" / "aborted").read_text() == "OSError"


def test_a_full_disk_s_error_travels_though_others_free_bytes_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = itertools.count(10**6, 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_bavail=next(free), f_frsize=1, f_files=0, f_favail=0))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "1"))
    copy = deserialize_error(serialize_error(error, "a process"))
    assert type(copy) is OSError and (copy.errno, copy.filename) == (errno.ENOSPC, str(tmp_path / "1"))
    assert sentence(copy) == sentence(error)


def test_errors_keep_class_sentence_and_cause(writer: WriterProcess, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="^the disk is made of cheese$") as storage:
        _write(writer, StandIn("storage"), tmp_path / "a")
    assert storage.value.component == "model" and not hasattr(storage.value, "__notes__")
    with pytest.raises(MissingStateError, match="^nothing is called so$") as missing:
        _write(writer, StandIn("missing"), tmp_path / "b")
    assert repr(missing.value.__cause__) == "KeyError('so')"


def test_an_error_that_nobody_foresaw_comes_with_its_trace(writer: WriterProcess, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        _write(writer, StandIn("bug"), tmp_path / "a")
    (note,) = caught.value.__notes__
    assert note.startswith(f"in the writer process (pid {writer.pid}):\nTraceback") and "stand_in_shares.py" in note


@pytest.mark.parametrize(("befalls", "says"), [("cannot travel", "CannotTravel: 1 and 2"), ("exits", "SystemExit: no")])
def test_an_error_that_cannot_travel_says_what_it_was(
    writer: WriterProcess, tmp_path: Path, befalls: str, says: str
) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        _write(writer, StandIn(befalls), tmp_path / "a")
    assert isinstance(caught.value.__cause__, RuntimeError), "nobody foresaw it"
    assert "stand_in_shares.py" in caught.value.__notes__[0]


@pytest.mark.usefixtures("a_module_of_this_process_only")
def test_what_cannot_be_sent_is_refused_and_the_writer_goes_on(writer: WriterProcess, tmp_path: Path) -> None:
    share = StandIn()
    share.items = lambda: None  # type: ignore[assignment]
    with pytest.raises(
        ConfigurationError, match="what is to be saved cannot be sent to a writer process: .*saves.writer='thread'"
    ):
        _write(writer, share, tmp_path / "a")
    backend: Any = NoBackend()
    backend.store = _Unknown()
    with pytest.raises(
        ConfigurationError, match="the backend cannot be made anew in the writer process: .*in a module"
    ):
        writer.write(StandIn(), WriteJob(tmp_path / "b", backend, {}), _items(_memory()), lambda _: None)  # type: ignore[arg-type]
    _write(writer, StandIn(), tmp_path / "c")


class _Unknown:
    """Of a module that only this process has."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.modules["of_this_process_only"].make, ()


@pytest.fixture
def a_module_of_this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> None: ...

    make.__module__, make.__qualname__ = "of_this_process_only", "make"
    module: Any = type(sys)("of_this_process_only")
    module.make = make
    monkeypatch.setitem(sys.modules, "of_this_process_only", module)


def test_memory_that_the_system_does_not_let_it_map_is_an_error_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[int] = []
    monkeypatch.setattr(writer_child, "_leave", left.append)
    with pytest.raises(
        StorageError,
        match="cannot map the memory of its trainer: No such file or directory: .*; give saves.writer='thread'",
    ):
        writer_child._mapped(os.getppid(), 1 << 20)
    memory = _memory()
    segment, _ = segment_of(memory) or pytest.fail("it is shared")
    assert left == []
    writer_child._mapped(os.getpid(), segment.fd)
    assert left == [0], "a process that is not the parent is not the trainer"


# A save that is given up


def test_an_item_that_fails_ends_the_save_and_the_next_one_is_written(writer: WriterProcess, tmp_path: Path) -> None:
    def staged() -> Iterator[Staged]:
        yield next(_items(memory))
        raise MissingStateError("the copy failed")

    memory, pid = _memory(), writer.pid
    with pytest.raises(MissingStateError, match="^the copy failed$"):
        _write(writer, StandIn(), tmp_path / "a", staged=staged())
    assert (tmp_path / "a" / "aborted").exists(), "before the error is told"
    _write(writer, StandIn(), tmp_path / "b")
    assert writer.pid == pid


def test_progress_that_raises_ends_the_save_wherever_it_is(writer: WriterProcess, tmp_path: Path) -> None:
    def progress(num_bytes: int) -> None:
        if (tmp_path / "a" / "hangs").exists():
            raise RankAbsentError("the others have given up")  # an OSError, too

    closed: list[bool] = []

    def staged() -> Iterator[Staged]:
        try:
            yield from _items(_memory())
        finally:
            closed.append((tmp_path / "a" / "aborted").exists())

    pid = writer.pid
    with pytest.raises(RankAbsentError, match="the others have given up") as caught:
        _write(writer, StandIn("goes on and on"), tmp_path / "a", staged=staged(), progress=progress)
    assert closed == [True], "memory is let go of when nobody reads it any more, whoever keeps the error"
    assert caught.value.__traceback__ is not None
    _write(writer, StandIn(), tmp_path / "b")
    assert writer.pid == pid


# What dies


def test_a_writer_that_is_killed_fails_the_save_and_is_followed_by_another(
    writer: WriterProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(writer, StandIn(), tmp_path / "before")
    pid = writer.pid
    with pytest.raises(StorageError) as caught:
        _write(writer, StandIn("says its last and is killed"), tmp_path / "a")
    assert str(caught.value) == (
        f"the writer process (pid {pid}) was killed by SIGKILL while it wrote item 1 to {tmp_path / 'a'}; the kernel does that when "
        "memory runs out. It said: the roof is on fire"
    )
    assert not psutil.pid_exists(pid or 0), "it is no zombie either"
    _write(writer, StandIn(), tmp_path / "b")
    assert caplog.records == []
    os.kill(writer.pid or 0, signal.SIGKILL)
    _until(lambda: writer.pid is None)

    def give_up(num_bytes: int) -> None:
        if (tmp_path / "c" / "hangs").exists():
            pids.append(writer.pid)
            raise KeyboardInterrupt

    pids: list[int | None] = []
    monkeypatch.setattr(writer_process, "GIVE_UP_S", 0.2)
    with pytest.raises(KeyboardInterrupt):
        _write(writer, StandIn("hangs"), tmp_path / "c", progress=give_up)
    assert writer.pid is None and not psutil.pid_exists(pids[0] or 0), "one that cannot let go is killed"
    assert "killed by SIGKILL while it had nothing to do" in caplog.text and "another one is started" in caplog.text


def test_a_writer_that_stops_within_a_message_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "TAKE_S", 1)
    monkeypatch.setattr(writer_process, "END_S", 1)
    writer = WriterProcess()
    writer.start(BACKEND)
    ended = writer._child
    with pytest.raises(StorageError, match="does not answer any more, while it wrote item 1 to"):
        _write(writer, StandIn("stops within a message"), tmp_path / "a")
    assert writer.pid is None
    assert ended is not None and ended._connection.closed, "even while something keeps the error"
    _write(writer, StandIn(), tmp_path / "b")
    writer.close()


def test_a_writer_that_does_not_come_up_fails_the_save_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "START_TIMEOUT_S", 0.01)
    late = WriterProcess()
    signs: list[int] = []
    with pytest.raises(
        StorageError, match=r"the writer process \(pid \d+\) was not up after 0.01 s, and has been ended"
    ):
        _write(late, StandIn(), tmp_path / "a", progress=signs.append)
    assert late.pid is None and set(signs) == {1}
    monkeypatch.setattr(writer_process, "START_TIMEOUT_S", patience(30.0))
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "__init__.py").write_text("raise ImportError('this is not the one')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(
        StorageError, match=r"ended with exit code 1 before it was up. It said: .*ImportError: this is not the one"
    ):
        _write(late, StandIn(), tmp_path / "a")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ConfigurationError, match="saves.writer='process' needs sys.executable"):
        _write(late, StandIn(), tmp_path / "a")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(StorageError, match="the writer process cannot be started: No such file or directory"):
        _write(late, StandIn(), tmp_path / "a")


def test_a_writer_that_is_closed_or_forgotten_is_gone_and_a_save_that_waits_for_it_fails(tmp_path: Path) -> None:
    writer, forgotten = WriterProcess(), WriterProcess()
    forgotten.start(BACKEND)
    writer.start(BACKEND)
    processes = [psutil.Process(one.pid) for one in (writer, forgotten)]
    forgotten_pid = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert forgotten_pid() is None

    def close() -> None:
        _until((tmp_path / "a" / "hangs").exists)
        writer.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(StorageError, match=r"the writer process \(pid \d+\) was closed"):
        _write(writer, StandIn("hangs"), tmp_path / "a")
    closer.join()
    writer.close()
    with pytest.raises(StorageError, match="the writer process was closed; nothing more can be saved with it"):
        _write(writer, StandIn(), tmp_path / "b")
    assert not any(process.is_running() for process in processes)


def test_nothing_is_left_of_a_writer_whose_trainer_is_killed(tmp_path: Path) -> None:
    trainers, told = [], []
    for number, forks in enumerate((False, True)):
        here, there = forkserver().Pipe(duplex=False)
        trainer = forkserver().Process(target=writer_trainer.main, args=(tmp_path / f"{number}", forks, there))
        trainer.start()
        there.close()
        trainers.append((trainer, here))
    for _, here in trainers:
        assert here.poll(patience(60))
        told.append(here.recv())
    assert all(psutil.pid_exists(pid) for pid, _, _ in told)
    assert {inode for _, inode, _ in told} <= _inodes_in_use(), "the test sees the memory"
    for trainer, _ in trainers:
        trainer.kill()
        trainer.join()
    _until(lambda: not any(_runs(pid) for pid, _, _ in told), ENDS_S)
    for _, _, sleeper in told:
        if sleeper:  # what was forked by the trainer has its memory as long as it lives
            assert _runs(sleeper)
            os.kill(sleeper, signal.SIGKILL)
            _until(lambda pid=sleeper: not _runs(pid))  # type: ignore[misc]
    assert not {inode for _, inode, _ in told} & _inodes_in_use()
    for trainer, here in trainers:
        trainer.close()
        here.close()


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _inodes_in_use() -> set[int]:
    """Of the shared memory that any process has mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:
            continue
        found |= {int(line.split()[4]) for line in lines if "memfd:ckpt-staging" in line}
    return found


def test_python_that_ends_takes_its_writer_along_in_the_middle_of_a_save(tmp_path: Path) -> None:
    program = (
        "import sys, threading, time; from pathlib import Path; from tests.stand_in_shares import NoBackend, StandIn\n"
        "from ckpt.saving.background.writer_process import WriterProcess\nfrom ckpt.saving.writing import Staged, WriteJob\nimport torch\n"
        "class Own(NoBackend): pass\n"
        "writer, folder, staged = WriterProcess(), Path(sys.argv[1]), [Staged(n, [torch.ones(3)]) for n in range(3)]\n"
        "try: writer.write(StandIn(), WriteJob(folder, Own(), {}), staged, lambda n: None)\n"
        "except Exception as error: print(error)\n"
        "def work():\n"
        "    try: writer.write(StandIn('hangs'), WriteJob(folder, NoBackend(), {}), staged, lambda n: None)\n"
        "    except Exception as error: (folder / 'told').write_text(str(error))\n"
        "thread = threading.Thread(target=work, daemon=True)\n"
        "thread.start()\n"
        "while not (folder / 'hangs').exists(): time.sleep(0.01)\n"
        "print(writer.pid)\n"
        "import atexit; from ckpt.saving.background import writer_process\n"
        "atexit.unregister(writer_process._end_all)\n"
        "atexit.register(thread.join); atexit.register(writer_process._end_all)\n"  # it is given time to tell
    )
    command = [sys.executable, "-W", "error", "-c", program, str(tmp_path / "a")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    refused, pid = ended.stdout.splitlines()
    assert "Own" in refused and "not in the program itself" in refused
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not psutil.pid_exists(int(pid))
    assert (tmp_path / "a" / "told").read_text() == f"the writer process (pid {pid}) was ended, for this program ends"


# Shared memory


def test_shared_memory_is_found_by_address_and_closed_with_its_last_tensor() -> None:
    def num_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_fds()
    one, two = shared_memory(1000), shared_memory(3 << 20)
    assert (one.nbytes, two.nbytes, int(one.sum()), one.dtype) == (1000, 3 << 20, 0, torch.uint8)
    part = two[4096:8192].view(torch.float32).view(32, 32)
    first, second = segment_of(one), segment_of(part)
    assert first is not None and second is not None
    assert first[1] == 0 and second[1] == 4096 and first[0].number != second[0].number
    assert segment_of(torch.ones(3)) is None and segment_of(part[:0]) is None
    with mmap.mmap(second[0].fd, 3 << 20) as other:
        other[4096:4100] = b"\x00\x00\x80\x3f"
        assert part[0, 0] == 1.0
    fd = second[0].fd
    del two, second
    os.fstat(fd)
    del one, part, first
    with pytest.raises(OSError):
        os.fstat(fd)
    assert num_fds() == before
