"""`ckpt.save` and `ckpt.load` when something goes wrong: interrupted anywhere, into the wrong folder, mistakes of one rank, damage."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent, dist_checkpointing
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import ShardedObject, ShardedTensor
from ckpt.dist_checkpointing.folder import claim
from ckpt.dist_checkpointing.folder.claim import FolderClaim
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    RankAbsentError,
    ShapeMismatchError,
    ShardingError,
    StorageError,
)
from ckpt.format.manifest_parsing import parse_index
from ckpt.ranks.default_topology import use_topology
from ckpt.ranks.waiting import in_thread
from tests.support.covering import and_in_full, sampled
from tests.support.pace import patience
from tests.support.ranks import Dead, Topology, run_ranks
from tests.support.sharded_saves import (
    SAVES,
    both_formats,
    bytes_of,
    error_of,
    require_training_state,
    save_training_state,
    the_one,
    threads,
    training_state,
)
from tests.support.states import Held, coordinator, global_index
from tests.support.values import same_values

# Interrupted


class Faulty(Topology):
    """A topology that fails at the end, or at the beginning, of the n-th phase."""

    at: tuple[int, str] | None
    count: int
    names: list[str]

    @contextmanager
    def phase(self, name: str) -> Iterator[Any]:
        number, self.count = self.count, self.count + 1
        with super().phase(name) as phase:
            if self.at == (number, "before"):
                raise OSError(errno.ENOSPC, "No space left on device", name)
            yield phase
            self.names.append(name)
            if self.at == (number, "after"):
                raise OSError(errno.ENOSPC, "No space left on device", name)


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES.keys())
def test_saves_after_one_whose_last_finalizer_failed_have_memory_of_their_own(tmp_path: Path, save: Any) -> None:
    """A copy that lies in the memory of another save's waits for it, or is written over by it."""

    def fails() -> None:
        raise StorageError("the last finalizer")

    for number in range(3):
        (tmp_path / f"{number}").mkdir()
    request = dist_checkpointing.save(_one_tensor(0), tmp_path / "0", save, async_sharded_save=True)
    assert request is not None
    request.add_finalize_fn(fails)
    with pytest.raises(StorageError, match="the last finalizer"):
        request.execute_sync()
    made = [
        in_thread(partial(dist_checkpointing.save, _one_tensor(number), tmp_path / f"{number}", save, async_sharded_save=True), "save")
        for number in (1, 2)
    ]
    for number, one in enumerate(made, start=1):
        one.result(timeout=patience(20.0)).execute_sync()
        loaded = dist_checkpointing.load_plain_tensors(tmp_path / f"{number}")
        assert torch.equal(loaded["w"], global_index((300, 10)) + number)


def _one_tensor(number: int) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", global_index((300, 10)) + number)}


def _interrupt_every_phase(
    topology: Topology, folder: Path, save: Any, victim: int, when: str, is_async: bool
) -> list[str]:
    """Save into one folder over and over; in the n-th save the n-th phase fails on one rank. Return the phases of the last one."""
    topology.__class__ = Faulty
    assert isinstance(topology, Faulty)
    for number in range(100):
        topology.at, topology.count, topology.names = (number, when) if topology.rank == victim else None, 0, []
        try:
            request = dist_checkpointing.save(
                training_state(topology) | {"iteration": 3}, folder, save, async_sharded_save=is_async
            )
            if request is not None:
                request.execute_sync()
        except CheckpointError as error:
            message = str(error)
        else:
            break
        names, topology.at = topology.names, None
        assert f"on rank {victim}: No space left on device" in message, f"phase {number}, after {names}: {message}"
        if dist_checkpointing.check_is_distributed_checkpoint(folder):
            # Of a request whose finalizers have all run nobody knows any more what they did.
            assert f"; {folder} is complete all the same" in message or " failed in phase finalize on " in message, (
                message
            )
            return [*names, "complete"]
        assert error_of(lambda: dist_checkpointing.load(training_state(topology), folder)) == (
            CheckpointNotFoundError,
            f"load of {folder}: {folder} is not a distributed checkpoint: it has no metadata.json, which is written last; take a "
            "checkpoint whose save has ended",
        )
    return topology.names


def _require_survives_interruptions(folder: Path, save: Any, victim: int, when: str, is_async: bool = False) -> None:
    of_rank = threads(2, _interrupt_every_phase, folder, save, victim, when, is_async)
    phases = of_rank[1 - victim]
    assert len(phases) > 20 and {"destination", "plan", "record", "complete"} <= {*phases}
    assert verify_checkpoint(folder) == []
    threads(2, require_training_state, folder)


@sampled(("victim", "when"), [(0, "after"), (1, "before")])
def test_an_interrupted_save_leaves_no_checkpoint_and_the_next_save_makes_a_sound_one(
    tmp_path: Path, victim: int, when: str
) -> None:
    """S1.66, S1.67: each phase fails in turn, on one rank; all ranks raise, and what is left is removed by the next save."""
    _require_survives_interruptions(tmp_path, SAVES["zarr"], victim, when)


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "async"])
@pytest.mark.parametrize(("victim", "when"), list(product((0, 1), ("before", "after"))))
@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES.keys())
def test_wherever_any_save_is_interrupted_the_next_one_makes_a_sound_checkpoint(
    tmp_path: Path, save: Any, victim: int, when: str, is_async: bool
) -> None:
    """S1.66, S1.67: in every format, and in the background."""
    _require_survives_interruptions(tmp_path, save, victim, when, is_async)


class Deadly(Topology):
    """A topology that kills its process in the phase of this name."""

    deadly: str

    @contextmanager
    def phase(self, name: str) -> Iterator[Any]:
        with super().phase(name) as phase:
            if name == self.deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            yield phase


class _KillsAt:
    """Stands in for `os.replace`: kills the process when a file of this name is about to be replaced."""

    def __init__(self, name: str) -> None:
        self.name, self.really = name, os.replace

    def __call__(self, source: Path, target: Path) -> None:
        if Path(target).name == self.name:
            os.kill(os.getpid(), signal.SIGKILL)
        self.really(source, target)


def _save_and_die(topology: Topology, folder: Path, victim: int, where: str) -> tuple[type[CheckpointError], str]:
    if topology.rank == victim and where.endswith(".json"):
        os.replace = _KillsAt(where)  # type: ignore[assignment]
    elif topology.rank == victim:
        topology.__class__ = Deadly
        assert isinstance(topology, Deadly)
        topology.deadly = where
    with use_topology(topology):
        return error_of(lambda: dist_checkpointing.save(training_state(topology), folder))


@sampled(
    ("victim", "where"),
    [(1, "write"), (0, "checkpoint_manifest.json"), (0, "metadata.json"), (1, "count objects"), (0, "record")],
    3,
)
def test_a_rank_that_is_killed_leaves_no_checkpoint_and_a_folder_that_can_be_saved_into(
    tmp_path: Path, victim: int, where: str
) -> None:
    """S1.66, S1.67: real processes; the others say who is gone, and other ranks try again."""
    outcomes = run_ranks(3, _save_and_die, tmp_path, victim, where, expect_dead=[victim], agree_s=5.0)
    assert outcomes.pop(victim) == Dead(-signal.SIGKILL)
    kind, message = the_one(outcomes)
    assert kind is RankAbsentError and f"rank {victim} " in message
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    assert any(tmp_path.rglob(f".{where}.*")) == where.endswith(".json"), "what was to take its place"
    assert where != "metadata.json" or (tmp_path / "common").exists(), "all of it was moved already"
    threads(2, save_training_state, tmp_path)
    assert verify_checkpoint(tmp_path) == []
    threads(2, require_training_state, tmp_path)


# What a save finds in the folder


def _save_where_nothing_may_be(topology: Topology, folder: Path) -> tuple[Any, ...]:
    return error_of(lambda: dist_checkpointing.save(training_state(topology), folder))


def test_a_folder_that_is_missing_or_holds_a_checkpoint_is_refused_by_all_and_left_alone(
    tmp_path: Path,
) -> None:
    """S1.67: the user makes the folder; what is whole is never written over, whoever wrote it."""
    assert the_one(threads(2, _save_where_nothing_may_be, tmp_path / "missing")) == (
        CheckpointNotFoundError,
        f"save into {tmp_path / 'missing'} failed in phase destination on rank 0: {tmp_path / 'missing'} does not exist: make the folder "
        "that a checkpoint is to be saved into",
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "ours").mkdir()
    threads(2, save_training_state, tmp_path / "ours")
    model = StateComponent("model", Held({"w": torch.arange(20_000.0), "lr": 0.5}), "global")
    coordinator(Topology.alone(), tmp_path, [model]).save_checkpoint(checkpoint_id="00000007")
    (theirs,) = tmp_path.glob("checkpoint-*")
    (tmp_path / "megatrons").mkdir()
    (tmp_path / "megatrons" / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    for folder in (tmp_path / "ours", theirs, tmp_path / "megatrons", tmp_path / "ours" / "common"):
        before = bytes_of(folder)
        kind, message = the_one(threads(2, _save_where_nothing_may_be, folder))
        assert kind is CheckpointExistsError
        assert f"on rank 0: {folder} holds a checkpoint already" in message
        assert bytes_of(folder) == before
    assert verify_checkpoint(theirs) == verify_checkpoint(tmp_path / "ours") == []


GROUP = '{"zarr_format": 3, "node_type": "group", "attributes": {}}'
USERS = {
    "common/mine.py": "x",
    "common/common/precious.txt": "x",
    "objects/a/b": "x",
    "objects/objects/zarr.json": GROUP,
    "sharded/data.bin": "x",
    "sharded/x/y": "x",
    "sharded/mine/zarr.json": '{"zarr_format": 3, "node_type": "array"}',
    "sharded/mine/c/0": "x",
    "arrays.ocdbt/mine.bin": "x",
    "arrays.ocdbt/manifest.ocdbt": "x",
    "index-00000.json": "x",
    "index-00001.2.json": "{}",
    "checkpoint_manifest.json": "x",
    "common": "x",
    "zarr.json": GROUP,
}
"""Files of a user's by path, under names that a save uses."""


def put(folder: Path, path: str, text: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


@sampled(
    "note", [None, "", '{"names": ["%s"], "manifests": {}, "last": "metadata.json"}'], ids=["no save", "a save", "a save that moved it"]
)
@pytest.mark.parametrize("name", USERS)
def test_files_of_others_under_a_name_that_a_save_uses_are_never_removed(
    tmp_path: Path, name: str, note: str | None
) -> None:
    """S1.67: only what a dead save has written is removed, whatever else looks like a save's."""
    put(tmp_path, name, USERS[name])
    if note is not None:
        put(tmp_path, f".saving-all-0a1b2c3d/{'moving.json' if note else 'x'}", note and note % name.partition("/")[0])
    before = bytes_of(tmp_path)
    kind, message = the_one(threads(2, _save_where_nothing_may_be, tmp_path))
    assert kind is CheckpointExistsError
    assert f"{tmp_path / name.partition('/')[0]}" in message or f"{tmp_path} holds a checkpoint already" in message
    assert bytes_of(tmp_path) == before


@contextmanager
def killed(folder: Path, save: Any = None, *, phase: str = "complete", moved: bool = True) -> Iterator[None]:
    """In the block the folder holds what a save has left that was killed in a phase; `moved`: when all but metadata.json was there."""
    with pytest.MonkeyPatch.context() as patched, pytest.raises(CheckpointError):
        if moved and phase == "complete":
            patched.setattr(claim, "save_config", _fail)
        threads(2, _fail_in, folder, save or SAVES["zarr"], "none" if moved else phase)
    yield


def _fail(*_: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def _fail_in(topology: Topology, folder: Path, save: Any, phase: str) -> None:
    """Fail in a phase; the claim is let go as by the end of a process."""
    topology.__class__ = FailsIn
    assert isinstance(topology, FailsIn)
    topology.fails_in = phase
    dist_checkpointing.save(training_state(topology) | {"iteration": 3}, folder, save)


class FailsIn(Topology):
    """A topology that fails on the lead at the beginning of the phase of this name."""

    fails_in: str

    @contextmanager
    def phase(self, name: str) -> Iterator[Any]:
        with super().phase(name) as phase:
            if name == self.fails_in and self.is_lead:
                raise OSError(errno.EIO, "Input/output error", name)
            yield phase


@sampled("save", [SAVES["zarr"], SAVES["tensorstore, ocdbt"]], ids=["zarr", "ocdbt"])
@pytest.mark.parametrize(
    "name",
    [
        "common/mine.py",
        "common/common/plain.json.bak",
        "objects/objects/rank-00000/notes.txt",
        "sharded/mine/zarr.json",
        "sharded/mine/c/0",
        "sharded/w/c/notes.txt",
        "arrays.ocdbt/mine.bin",
        "arrays.ocdbt/rank-00000/d/notes.txt",
        "index-00007.json",
    ],
)
def test_a_file_that_somebody_has_put_among_the_rest_of_a_killed_save_stays_with_all_the_rest(
    tmp_path: Path, save: Any, name: str
) -> None:
    """S1.67: nothing at all is removed then; without that file the next save goes through."""
    with killed(tmp_path, save):
        put(tmp_path, name, "precious")
        before = bytes_of(tmp_path)
        kind, message = the_one(threads(2, _save_where_nothing_may_be, tmp_path))
        assert kind is CheckpointExistsError and " is in the way, and no save that was interrupted lists it" in message
        assert bytes_of(tmp_path) == before
        (tmp_path / name).unlink()
        other = "arrays.ocdbt" if save is SAVES["zarr"] else "sharded"  # a folder that this save has not
        if name.startswith(other):
            shutil.rmtree(tmp_path / other)
    threads(2, save_training_state, tmp_path)
    assert verify_checkpoint(tmp_path) == []


COPIED = {
    "a checkpoint of a coordinator": ["*"],
    "all but metadata.json": ["common", "sharded", "checkpoint_manifest.json", "index-*", "zarr.json"],
    "common state and tensors": ["common", "sharded"],
    "tensors": ["sharded"],
}


@sampled("phase", ["write", "complete", "moved"])
@pytest.mark.parametrize("what", COPIED)
def test_what_somebody_has_copied_in_place_of_the_rest_of_a_killed_save_stays(
    tmp_path: Path, what: str, phase: str
) -> None:
    """`rm -rf it/*` leaves the hidden folder, whose note may fit the copy: the digest of a manifest tells the two apart."""
    it, source = tmp_path / "it", tmp_path / "source"
    it.mkdir()
    source.mkdir()
    if "coordinator" in what:
        state = StateComponent("model", Held({"w": torch.arange(20_000.0)}), "global")
        coordinator(Topology.alone(), tmp_path, [state]).save_checkpoint(checkpoint_id="00000007")
        (source,) = tmp_path.glob("checkpoint-*")
    else:
        threads(2, save_training_state, source)
    with killed(it, phase="complete" if phase == "moved" else phase, moved=phase == "moved"):
        for path in [path for path in it.iterdir() if not path.name.startswith(".")]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in chain.from_iterable(source.glob(pattern) for pattern in COPIED[what]):
            shutil.copytree(path, it / path.name) if path.is_dir() else shutil.copy(path, it)
        before = bytes_of(it)
        kind, message = the_one(threads(2, _save_where_nothing_may_be, it))
        assert kind is CheckpointExistsError and (" holds a checkpoint already" in message or " in the way" in message)
        assert bytes_of(it) == before


def test_a_checkpoint_of_a_strategy_alone_that_was_killed_at_its_very_end_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is complete, and its hidden folder is left."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4))}
    with monkeypatch.context() as patched:
        patched.setattr(FolderClaim, "remove", FolderClaim.let_go)
        SAVES["zarr"].save(state, tmp_path)
    before = bytes_of(tmp_path)
    assert len([name for name in before if name.startswith(".saving-all-")]) == 1
    kind, message = error_of(lambda: dist_checkpointing.save(state, tmp_path))
    assert kind is CheckpointExistsError and f"{tmp_path} holds a checkpoint already" in message
    assert bytes_of(tmp_path) == before


@sampled("number", [1, 22, 43, 8, 15, 29, 36, 50, 57], 3)
def test_a_killed_removal_of_the_rest_of_a_killed_save_is_ended_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with killed(tmp_path):
        left, really = [number], os.unlink

        def unlink(*args: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.EIO, "Input/output error")
            really(*args, **options)

        with monkeypatch.context() as patched, suppress(CheckpointError):
            patched.setattr(os, "unlink", unlink)
            threads(2, save_training_state, tmp_path)
    if left[0] > 0:
        return
    threads(2, save_training_state, tmp_path)
    assert verify_checkpoint(tmp_path) == []


@sampled("number", [1, 3, 5])
def test_a_save_that_was_killed_while_it_moved_things_is_taken_back_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """S1.66, S1.67: some of it is in the folder, the rest still hidden."""
    left, really = [number], os.rename

    def rename(*args: Any) -> None:
        left[0] -= str(tmp_path / ".saving-all-") in str(args[0])
        if left[0] == 0:
            raise OSError(errno.EIO, "Input/output error")
        really(*args)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError):
        patched.setattr(os, "rename", rename)
        threads(2, save_training_state, tmp_path)
    shown = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(shown) == number - 1 and not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    threads(2, save_training_state, tmp_path)
    assert verify_checkpoint(tmp_path) == []
    threads(2, require_training_state, tmp_path)


def test_a_link_among_the_rest_of_a_killed_save_is_neither_followed_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "it").mkdir()
    with killed(tmp_path / "it"):
        (tmp_path / "it/sharded").rename(tmp_path / "elsewhere/sharded")
        (tmp_path / "it/sharded").symlink_to(tmp_path / "elsewhere/sharded")
        before = bytes_of(tmp_path / "elsewhere")
        kind, message = the_one(threads(2, _save_where_nothing_may_be, tmp_path / "it"))
    assert kind is CheckpointExistsError and f"{tmp_path}/it/sharded is in the way" in message
    assert bytes_of(tmp_path / "elsewhere") == before


@pytest.mark.parametrize(
    "note",
    [
        "mine",
        '{"names": [], "manifests": {}, "last": "metadata.json", "more": 1}',
        "[" * 100_000,
        '{"names": "sharded", "manifests": {}, "last": "metadata.json"}',
        '{"names": ["sharded"], "manifests": {"../up": 1}, "last": "metadata.json"}',
    ],
)
def test_a_note_that_no_save_writes_is_refused_and_stays(tmp_path: Path, note: str) -> None:
    put(tmp_path, ".saving-all-0a1b2c3d/moving.json", note)
    kind, message = the_one(threads(2, _save_where_nothing_may_be, tmp_path))
    assert kind is CheckpointExistsError and ".saving-all-0a1b2c3d is in the way" in message
    assert bytes_of(tmp_path) == {".saving-all-0a1b2c3d/moving.json": note.encode()}


def test_a_note_moves_nothing_but_what_lies_under_names_of_a_save(tmp_path: Path) -> None:
    """Whatever somebody writes into it."""
    names = '["sharded/../../x", "../x", "notes.txt", "logs", "index-00000-of-00002.json"]'
    put(tmp_path, "it/.saving-all-0a1b2c3d/moving.json", f'{{"names": {names}, "manifests": {{}}, "last": "metadata.json"}}')
    others = {"x": "1", "it/notes.txt": "3", "it/logs/a/c/0": "4", "it/index-00000-of-00002.json": "5"}
    for path, text in others.items():
        put(tmp_path, path, text)
    threads(2, save_training_state, tmp_path / "it")
    assert {path: (tmp_path / path).read_text() for path in others} == others


def test_other_files_stay_and_belong_to_no_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S1.67: a folder that is not empty is warned of, once; it was an error in older versions of the source."""
    others = {"notes.txt": b"x", "index-mine.json": b"y", "logs/common": b"z", "index-00000.json.old": b""}
    for name, data in others.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with caplog.at_level(logging.WARNING, "ckpt"):
        threads(2, save_training_state, tmp_path)
    warned = [record.getMessage() for record in caplog.records if "not empty" in record.getMessage()]
    assert warned == [
        f"{tmp_path} is not empty: index-00000.json.old and what else is there stays, and belongs to no checkpoint"
    ]
    assert {name: data for name, data in bytes_of(tmp_path).items() if name in others} == others
    assert verify_checkpoint(tmp_path) == [f"{name} does not belong to the checkpoint" for name in sorted(others)]
    threads(2, require_training_state, tmp_path)


@and_in_full(("first", "second"), list(pairwise([*SAVES, next(iter(SAVES))])), product(SAVES, repeat=2))
def test_whatever_a_killed_save_has_left_is_removed_by_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, second: str
) -> None:
    """S1.67: by whichever strategy; the manifest, files that were to take another's place, objects that are not saved now."""
    with killed(tmp_path, SAVES[first]):
        manifest = (tmp_path / "checkpoint_manifest.json").read_bytes()
        (tmp_path / ".metadata.json.0a1b2c3d").write_bytes(b"{")
        (tmp_path / ".checkpoint_manifest.json.0a1b2c3d").write_bytes(manifest)
    caplog.clear()
    threads(2, save_training_state, tmp_path, SAVES[second], {"rng": None})
    assert sum("what an interrupted save has left" in record.getMessage() for record in caplog.records) == 1
    assert verify_checkpoint(tmp_path) == []
    assert set(dist_checkpointing.load_sharded_metadata(tmp_path)) == {"w", "p", "step"}
    assert not (tmp_path / "objects").exists()


def test_a_checkpoint_of_a_strategy_alone_is_not_taken_for_the_rest_of_a_save(tmp_path: Path) -> None:
    """It has no metadata.json, and is complete."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(4))}
    SAVES["zarr"].save(state, tmp_path)
    before = bytes_of(tmp_path)
    kind, message = error_of(lambda: dist_checkpointing.save(state, tmp_path))
    assert kind is CheckpointExistsError and "holds a checkpoint already" in message
    assert bytes_of(tmp_path) == before


def test_a_strategy_alone_removes_what_a_dead_save_has_left(tmp_path: Path) -> None:
    with killed(tmp_path):
        SAVES["zarr"].save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(4))}, tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".") or path.name in ("common", "objects")]


# Mistakes of one rank


def _two_main_replicas(topology: Topology) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}


def _a_hole(topology: Topology) -> dict[str, Any]:
    count = topology.world_size + 1
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, topology.rank, count))}


def _a_gap_between_runs(topology: Topology) -> dict[str, Any]:
    run = slice(4 * topology.rank, 4 * topology.rank + 4 - topology.rank)
    data = torch.zeros(run.stop - run.start)
    return {"w": ShardedTensor.from_rank_offsets_flat("w", data, (3, 4), flattened_range=run)}


def _another_type(topology: Topology) -> dict[str, Any]:
    data = torch.zeros(2, dtype=torch.float64 if topology.rank == 2 else torch.float32)
    return {"w": ShardedTensor.from_rank_offsets("w", data, (0, topology.rank, topology.world_size))}


def _no_main_replica(topology: Topology) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=topology.rank + 1)}


def _an_object_twice(topology: Topology) -> dict[str, Any]:
    return {"o": ShardedObject("o", topology.rank, (3,), (min(topology.rank, 1),))}


def _break(topology: Topology, folder: Path, state: Callable[[Topology], dict[str, Any]], check: bool) -> list[Any]:
    broken = state(topology)
    outcomes = [error_of(lambda: dist_checkpointing.save(broken, folder, validate_access_integrity=check))]
    with topology.phase("look"):
        assert not dist_checkpointing.check_is_distributed_checkpoint(folder)
    return outcomes


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (_two_main_replicas, "w: the shard [0:2] of the global shape [2] has 3 main replicas, on ranks 0-2"),
        (
            _a_hole,
            "w: no rank has the main replica of the shard [6:8] of the global shape [8]; the rest of w is on ranks 0-2",
        ),
        (
            _a_gap_between_runs,
            "w: elements 7 to 8 of the shard [0:3, 0:4] of the global shape [3, 4] are in no main replica's",
        ),
        (_another_type, "w has dtype float64 on rank 2, and has dtype float32 on rank 0"),
        (_no_main_replica, "w: no rank has the main replica of the shard [0:2]"),
        (_an_object_twice, "o: the object [1:2] of the global shape [3] has 2 main replicas, on ranks 1-2"),
    ],
)
def test_shards_that_make_up_no_state_are_an_error_of_every_rank_before_anything_is_written(
    tmp_path: Path, state: Any, says: str
) -> None:
    """S1.72: in the source rank 0 raises, and the others hang."""
    ((kind, message),) = the_one(threads(3, _break, tmp_path, state, True))
    assert kind is ShardingError and says in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "kind", "says"),
    [
        (_a_hole, ShardingError, "sharded/w: the ranks hold 6 of the 8 elements of global shape [8]"),
        (_a_gap_between_runs, ShardingError, "sharded/w: the ranks hold 9 of the 12 elements"),
        (_another_type, ShapeMismatchError, "sharded/w is float64 [6] on rank 2 and float32 [6] on rank 0"),
    ],
)
def test_without_that_check_the_plan_refuses_what_would_not_be_whole(
    tmp_path: Path, state: Any, kind: type[CheckpointError], says: str
) -> None:
    """S1.72: a checkpoint with a hole is never written."""
    ((found, message),) = the_one(threads(3, _break, tmp_path, state, False))
    assert found is kind and says in message


def _load_badly(topology: Topology, folder: Path) -> list[Any]:
    rank, ranks = topology.rank, topology.world_size
    good = {key: one for key, one in training_state(topology).items() if key != "rng"}
    other_shape = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4), (0, rank, ranks))
    calls: list[dict[str, Any]] = [
        good | {"more": ShardedTensor.from_rank_offsets("no such key", torch.zeros(1), replica_id=rank)},
        good | {"w": other_shape},
        good | {"rng": ShardedObject("rng", None, (ranks + 1,), (rank,))},
        good | {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4, 4))},
    ]
    checked = [error_of(partial(dist_checkpointing.load, state, folder)) for state in calls[3:]]
    return [
        *(
            error_of(partial(dist_checkpointing.load, state, folder, validate_access_integrity=False))
            for state in calls[:3]
        ),
        *checked,
    ]


def test_what_one_asks_for_and_is_not_there_is_an_error_of_every_rank(tmp_path: Path) -> None:
    """S1.31, S1.32, S1.68, S1.72: keys, shapes, objects, and a load that is no partition."""
    threads(2, save_training_state, tmp_path)
    missing, shape, an_object, twice = the_one(threads(2, _load_badly, tmp_path))
    assert missing[0] is MissingStateError and "no such key is asked for, and" in missing[1]
    assert shape[0] is ShapeMismatchError and "w: the checkpoint holds global shape [4, 4], the sharded" in shape[1]
    assert "asks for [6, 4]" in shape[1]
    assert an_object[0] is MissingStateError and "object rng/shard_0_3 is asked for, and" in an_object[1]
    assert (
        twice[0] is ShardingError
        and "w: the shard [0:4, 0:4] of the global shape [4, 4] has 2 main replicas" in twice[1]
    )


# Damage


def place_that_is_read(file: str, folder: Path) -> int | None:
    """The number of a byte that a load of everything reads of a file; None if it reads none."""
    if file.endswith("zarr.json"):
        return None
    indexes = [parse_index(path.read_bytes()) for path in folder.glob("index-*.json")]
    chunks = chain.from_iterable(by_number.values() for index in indexes for by_number in index.chunks.values())
    of_file = [extent.offset + extent.length // 2 for extent in chunks if extent.file == file]
    if of_file or file.startswith("arrays.ocdbt/"):
        return min(of_file, default=None)
    return (folder / file).stat().st_size // 2


def _load_damaged(topology: Topology, folder: Path) -> tuple[type[CheckpointError], str] | None:
    try:
        dist_checkpointing.load(training_state(topology), folder)
    except CheckpointError as error:
        return type(error), str(error)
    return None


@pytest.mark.full
@both_formats
def test_whichever_file_is_damaged_verify_names_it_and_a_load_that_reads_it_refuses(tmp_path: Path, save: Any) -> None:
    """S1.66, S1.75, S1.76: one byte in the middle, or the whole file gone: chunks, plain values, objects, indexes, manifests."""
    threads(2, save_training_state, tmp_path, save, {"iteration": 3, "t": torch.arange(9)})
    files = sorted(set(bytes_of(tmp_path)) - {"metadata.json"})
    assert {"common/common/plain.json", "objects/index-00001.json", "checkpoint_manifest.json"} < set(files)
    places = {file: place_that_is_read(file, tmp_path) for file in files}
    assert sum(place is not None for place in places.values()) >= 14
    for file, how in product(files, ("flipped", "removed")):
        with damaged(tmp_path / file, None if how == "removed" else places[file] or 0):
            outcome = the_one(threads(2, _load_damaged, tmp_path))
            if (file, how) == ("checkpoint_manifest.json", "removed"):
                assert error_of(lambda: verify_checkpoint(tmp_path))[0] is CheckpointNotFoundError
                assert issubclass(outcome[0], CheckpointError)
                continue
            problems = verify_checkpoint(tmp_path)
        below, _, rest = file.partition("/")
        if below in ("common", "objects") and rest != "checkpoint_manifest.json":
            assert any(problem.startswith(f"{below}: ") and rest in problem for problem in problems), (file, problems)
        else:
            assert any(file in problem for problem in problems), (file, problems)
        if places[file] is not None:
            assert outcome is not None and outcome[0] is CorruptCheckpointError, f"{file} {how}: {outcome}"
            assert Path(file).name in outcome[1], (file, outcome)
            assert below in outcome[1] or "/" not in file or below == "arrays.ocdbt", (file, outcome)
        else:
            assert outcome is None, (file, outcome)
    assert verify_checkpoint(tmp_path) == []
    threads(2, require_training_state, tmp_path)


@contextmanager
def damaged(path: Path, place: int | None) -> Iterator[None]:
    """Flip a bit of one byte, or remove the file; put it back."""
    before = path.read_bytes()
    try:
        if place is None:
            path.unlink()
        else:
            flipped = bytearray(before)
            flipped[place] ^= 1
            path.write_bytes(flipped)
        yield
    finally:
        path.write_bytes(before)


def test_no_flipped_bit_of_metadata_json_makes_a_load_return_anything_else(tmp_path: Path) -> None:
    """S1.69: it is refused, or says the same still."""
    values = global_index((3, 4))
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", values), "iteration": 3}, tmp_path)
    before = (tmp_path / "metadata.json").read_bytes()
    refused = 0
    for bit in range(8 * len(before)):
        flipped = bytearray(before)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "metadata.json").write_bytes(flipped)
        try:
            got = dist_checkpointing.load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4))}, tmp_path)
        except (CorruptCheckpointError, ConfigurationError):
            refused += 1
        else:
            assert same_values(got, {"w": values, "iteration": 3}), bytes(flipped)
    assert refused > 4 * len(before)


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.full)], ids=["one of each byte", "all"])
def test_verify_names_metadata_json_whichever_bit_of_it_flips_and_when_it_is_gone(tmp_path: Path, bits: int) -> None:
    """S1.69: like every other file of a checkpoint."""
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3))}, tmp_path)
    path = tmp_path / "metadata.json"
    before = path.read_bytes()
    for at, turn in product(range(len(before)), range(bits)):
        flipped = bytearray(before)
        flipped[at] ^= 1 << (at + turn) % 8
        path.write_bytes(flipped)
        assert any("metadata.json" in problem for problem in verify_checkpoint(tmp_path)), bytes(flipped)
    path.unlink()
    assert any("metadata.json" in problem for problem in verify_checkpoint(tmp_path))


def test_a_checkpoint_that_lost_its_manifest_is_never_read_as_an_empty_one(tmp_path: Path) -> None:
    """S1.75: by the entry points that ask for no key."""
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3)), "iteration": 3}, tmp_path)
    (tmp_path / "checkpoint_manifest.json").unlink()
    calls: list[Callable[[], object]] = [
        lambda: dist_checkpointing.load_plain_tensors(tmp_path),
        lambda: dist_checkpointing.load_tensors_metadata(tmp_path),
        lambda: dist_checkpointing.load({}, tmp_path),
        lambda: dist_checkpointing.remove_sharded_tensors(tmp_path, "w"),
    ]
    for call in calls:
        assert "checkpoint_manifest.json" in error_of(call)[1]


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES.keys())
def test_one_element_of_a_strided_tensor_is_saved(tmp_path: Path, save: Any) -> None:
    """S1.23: torch calls it contiguous, whatever its stride: the first row of a column."""
    one = global_index((4, 3))[:1, 1]
    state = {"w": ShardedTensor.from_rank_offsets("w", one), "plain": one}
    dist_checkpointing.save(state, tmp_path, save)
    assert same_values(dist_checkpointing.load_plain_tensors(tmp_path), {"w": torch.tensor([1.0])})
    assert same_values(dist_checkpointing.load_common_state_dict(tmp_path), {"plain": torch.tensor([1.0])})
