"""A checkpoint root beside clocks that go back, other runs, and readers: nothing is shadowed, lost, or called damaged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.catalog import committed, ledger
from ckpt.catalog.ledger import ROOT_OWNER
from ckpt.catalog.retention import Retention
from ckpt.dist_checkpointing.serialization import load as load_sharded
from ckpt.dist_checkpointing.serialization import save as save_sharded
from ckpt.errors import (
    CheckpointExistsError,
    CheckpointGoneError,
    ConfigurationError,
    FolderInUseError,
)
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.ranks.topology import Topology
from ckpt.saving import manifest_writer
from ckpt.storage.stored import read_manifest
from tests.support.ranks import forkserver, run_ranks
from tests.support.states import Fitted, Held, coordinator

OTHER_RUN = """
import sys
from pathlib import Path
from ckpt.catalog.owner import FolderLock
lock = FolderLock(Path(sys.argv[1]), run_id="other", what="", advice="")
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def run_on(root: Path | str, state: dict[str, Any] | None = None, **options: Any) -> CheckpointCoordinator:
    held = Held({"n": 0, "w": torch.zeros(20_000)} if state is None else state)
    return coordinator(Topology.alone(), root, [StateComponent("model", held, "global")], **options)  # type: ignore[arg-type]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ROOT_OWNER)


# clocks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """How far the clock of this host is ahead, to be changed."""
    ahead = [timedelta(0)]

    class Changed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Self:
            return super().now(tz) + ahead[0]

    for module in (committed, manifest_writer):
        monkeypatch.setattr(module, "datetime", Changed)
    return ahead


def test_saves_after_the_clock_was_set_back_are_newer_than_those_before(
    tmp_path: Path, clock: list[timedelta], caplog: pytest.LogCaptureFixture
) -> None:
    with run_on(tmp_path, keep_last=2) as run:
        run.save_checkpoint(checkpoint_id="1")
        clock[0] = timedelta(hours=-1)
        for checkpoint_id in ("2", "3", "4"):
            run.save_checkpoint(checkpoint_id=checkpoint_id)
        assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
        run.load_checkpoint()
    assert run.last_load is not None and run.last_load.checkpoint_id == "4"
    manifests = [read_manifest(tmp_path / f"checkpoint-{n}") for n in (3, 4)]
    assert manifests[0].timestamp < manifests[1].timestamp
    assert [one.commit_number for one in manifests] == [3, 4]
    assert len([r for r in caplog.records if "the clock of this host is 0:59:5" in r.getMessage()]) == 1


def re_signed(folder: Path, **keys: object) -> None:
    """Change a manifest as an attacker would, or a host with another clock: its digest is right."""
    manifest = folder / MANIFEST_NAME
    body = manifest.read_text().rpartition('  "manifest_digest"')[0]
    for key, value in keys.items():
        lines = [f'  "{key}": {json.dumps(value)},' if f'  "{key}":' in line else line for line in body.split("\n")]
        body = "\n".join(lines)
    manifest.write_text(f'{body}  "manifest_digest": "{digest_of(body.encode())}"\n}}\n')


def test_a_checkpoint_from_2099_is_neither_loaded_nor_kept_instead_of_newer_ones(tmp_path: Path) -> None:
    with run_on(tmp_path / "elsewhere") as other:
        other.save_checkpoint(checkpoint_id="foreign")
    with run_on(tmp_path / "root", keep_last=2) as run:
        run.save_checkpoint(checkpoint_id="1")
        foreign = tmp_path / "root" / "checkpoint-foreign"
        shutil.copytree(tmp_path / "elsewhere" / foreign.name, foreign)
        re_signed(foreign, timestamp="2099-01-01T00:00:00+00:00", commit_number=2**52)
        for checkpoint_id in ("2", "3"):
            run.load_checkpoint()
            assert run.last_load is not None and run.last_load.checkpoint_id == str(int(checkpoint_id) - 1)
            run.save_checkpoint(checkpoint_id=checkpoint_id)
    assert names(tmp_path / "root") == ["checkpoint-2", "checkpoint-3", "checkpoint-foreign"]
    assert read_manifest(tmp_path / "root" / "checkpoint-3").timestamp < datetime.now(UTC) + timedelta(minutes=1)


# retention


@pytest.mark.parametrize("option", [{"overwrite": True}, {"keep_last": 1}])
def test_a_save_into_another_folder_removes_nothing_there(tmp_path: Path, option: dict[str, Any]) -> None:
    for checkpoint_id in ("1", "2", "best"):
        with run_on(tmp_path / "archive") as other:
            other.save_checkpoint(checkpoint_id=checkpoint_id)
    with run_on(tmp_path / "root") as before:
        before.save_checkpoint(checkpoint_id="before")
    with run_on(tmp_path / "root", **option) as run:
        for _ in range(2):
            run.save_checkpoint(tmp_path / "archive" / "checkpoint-best")
        aside, _, *left = names(tmp_path / "archive")
        assert (aside.startswith(".quarantined-best-"), left) == (
            True,
            ["checkpoint-1", "checkpoint-2", "checkpoint-best"],
        )
        assert not (tmp_path / "archive" / ROOT_OWNER).exists()
        run.save_checkpoint(checkpoint_id="1")
        left = [] if "overwrite" in option else ["checkpoint-before"]
        assert names(tmp_path / "root") == ["checkpoint-1", *left]


def test_retention_goes_on_over_a_resume_and_leaves_other_runs_alone(tmp_path: Path) -> None:
    with run_on(tmp_path) as other:
        other.save_checkpoint(checkpoint_id="theirs")
    with run_on(tmp_path, keep_last=2) as run:
        for checkpoint_id in ("1", "2"):
            run.save_checkpoint(checkpoint_id=checkpoint_id)
    with run_on(tmp_path, keep_last=2) as resumed:
        resumed.load_checkpoint(tmp_path / "checkpoint-2")
        resumed.save_checkpoint(checkpoint_id="3")
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-theirs"]


def test_checkpoints_of_old_versions_are_a_runs_own_once_it_has_loaded_one(tmp_path: Path) -> None:
    for checkpoint_id in ("1", "2"):
        with run_on(tmp_path) as old:
            old.save_checkpoint(checkpoint_id=checkpoint_id)
        manifest = tmp_path / f"checkpoint-{checkpoint_id}" / MANIFEST_NAME
        kept = [
            line for line in manifest.read_text().split("\n") if "commit_number" not in line and "run_id" not in line
        ]
        manifest.write_text("\n".join(kept))
        re_signed(manifest.parent)
    with run_on(tmp_path, keep_last=1) as fresh:
        fresh.save_checkpoint(checkpoint_id="fresh")
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-fresh"]
    with run_on(tmp_path, keep_last=1) as resumed:
        resumed.load_checkpoint(tmp_path / "checkpoint-2")
        resumed.save_checkpoint(checkpoint_id="3")
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-fresh"]


def test_restarts_count_the_checkpoints_of_all_lives_and_each_saves_under_its_own_id(
    tmp_path: Path,
) -> None:
    for life in range(1, 5):
        with run_on(tmp_path, keep_last=2) as run:
            if life > 1:
                run.load_checkpoint()
            for step in (1, 2) if life != 3 else (1,):
                run.save_checkpoint(checkpoint_id=f"{life}-{step}")
    assert names(tmp_path) == ["checkpoint-4-1", "checkpoint-4-2"]
    with run_on(tmp_path, keep_last=3) as run:
        run.load_checkpoint()
        run.save_checkpoint(checkpoint_id="5-1")
    found = [read_manifest(tmp_path / f"checkpoint-{id}") for id in ("4-2", "5-1")]
    assert found[0].run_id is not None and found[0].run_id != found[1].run_id
    assert found[1].history == {found[0].run_id: found[0].commit_number}


def test_a_best_checkpoint_of_a_life_long_past_still_counts(tmp_path: Path) -> None:
    rules = Retention(keep_best=1, metric="loss")
    for life, loss in enumerate((1.0, 3.0, 2.0, 0.5), 1):
        with run_on(tmp_path, keep_last=rules) as run:
            if life > 1:
                run.load_checkpoint()
            run.save_checkpoint(checkpoint_id=str(life), metrics={"loss": loss})
        assert names(tmp_path) == sorted({f"checkpoint-{life}", f"checkpoint-{1 if life < 4 else 4}"})


def test_of_its_history_a_run_counts_nothing_that_is_newer_than_what_it_loaded(tmp_path: Path) -> None:
    with run_on(tmp_path) as before:
        for checkpoint_id in ("1", "2", "3"):
            before.save_checkpoint(checkpoint_id=checkpoint_id)
    damaged = tmp_path / "checkpoint-3" / "index-00000.json"
    data, _ = damaged.read_bytes(), damaged.write_bytes(b"{}")
    with run_on(tmp_path, keep_last=1) as run:
        run.load_checkpoint()
        assert run.last_load is not None and run.last_load.checkpoint_id == "2"
        damaged.write_bytes(data)  # as it was: what damages a read need not be on the disk
        run.save_checkpoint(checkpoint_id="4")
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_an_older_checkpoint_is_not_continued_beside_newer_ones_of_any_life_after_it(tmp_path: Path) -> None:
    for checkpoint_id in ("1", "2", "3"):
        with run_on(tmp_path) as run:
            if checkpoint_id != "1":
                run.load_checkpoint()
            run.save_checkpoint(checkpoint_id=checkpoint_id)
    with run_on(tmp_path) as run:
        run.load_checkpoint(tmp_path / "checkpoint-1")
        with pytest.raises(CheckpointExistsError, match="newer checkpoints: checkpoint-2, checkpoint-3"):
            run.save_checkpoint(checkpoint_id="4")


# two runs


def test_each_of_two_runs_that_go_on_from_one_checkpoint_keeps_its_own(tmp_path: Path) -> None:
    with run_on(tmp_path) as before:
        before.save_checkpoint(checkpoint_id="base")
    with run_on(tmp_path, shared_root=True, keep_last=2) as a, run_on(tmp_path, shared_root=True, keep_last=2) as b:
        for run in (a, b):
            run.load_checkpoint()
        for number in (1, 2, 3):
            for name, run in (("a", a), ("b", b)):
                run.save_checkpoint(checkpoint_id=f"{name}-{number}")
        left = ["checkpoint-a-2", "checkpoint-a-3", "checkpoint-b-2", "checkpoint-b-3"]
        assert [name for name in names(tmp_path) if not name.startswith(".")] == left
        assert len(list(tmp_path.glob(".run-*.owner.json"))) == 2
        with pytest.raises(CheckpointExistsError, match="a-3 is of another run, .*, which lives and shares the root"):
            b.save_checkpoint(checkpoint_id="a-3")
    assert names(tmp_path) == left


@pytest.mark.parametrize("options", [{}, {"overwrite": True}], ids=str)
@pytest.mark.parametrize("named", [None, "a-1"])
def test_a_run_that_goes_on_from_a_living_runs_checkpoint_removes_none_of_that_run(
    tmp_path: Path, options: dict[str, Any], named: str | None
) -> None:
    with run_on(tmp_path, shared_root=True) as a:
        for number in (1, 2, 3):
            a.save_checkpoint(checkpoint_id=f"a-{number}")
        with run_on(tmp_path, shared_root=True, keep_last=1, **options) as b:
            b.load_checkpoint(tmp_path / f"checkpoint-{named}" if named else None)
            for number in (1, 2):
                b.save_checkpoint(checkpoint_id=f"b-{number}")
        left = ["checkpoint-a-1", "checkpoint-a-2", "checkpoint-a-3", "checkpoint-b-2"]
        assert [name for name in names(tmp_path) if not name.startswith(".run-")] == left
    with run_on(tmp_path, shared_root=True, keep_last=1) as c:  # `a` and `b` have ended
        c.load_checkpoint()
        c.save_checkpoint(checkpoint_id="c-1")
    counted = 1 if named else 0 if options else 3  # of `a`, by the history of `b`
    assert names(tmp_path) == [*left[counted:3], "checkpoint-c-1"]


def _shared_until_killed(root: Path) -> None:
    run = run_on(root, shared_root=True)
    run.save_checkpoint(checkpoint_id="killed")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("shared_root", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_the_checkpoint_of_a_run_that_has_ended_is_kept_when_another_run_saves_its_id(
    tmp_path: Path, shared_root: bool, killed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_on(tmp_path, shared_root=shared_root) as first:
        first.save_checkpoint(checkpoint_id="5")
    manifest = (tmp_path / "checkpoint-5" / MANIFEST_NAME).read_bytes()
    with run_on(tmp_path, shared_root=shared_root) as second:
        with monkeypatch.context() as kill:
            if killed:
                kill.setattr(ledger.Ledger, "_retire", lambda *_, **__: None)
            second.save_checkpoint(checkpoint_id="5")
        second.save_checkpoint(checkpoint_id="6")
        second.save_checkpoint(checkpoint_id="5")  # its own
    (aside,) = (path for path in tmp_path.glob(".quarantined-5-*") if path.is_dir())
    assert (aside / MANIFEST_NAME).read_bytes() == manifest
    assert "a run that did not go on from it has saved under this id" in caplog.text
    assert not list(tmp_path.glob(".replaced-*"))


@pytest.mark.parametrize("options", [{"overwrite": True}, {"load": True}])
def test_a_checkpoint_is_replaced_by_a_run_that_goes_on_from_it_or_may_overwrite_it(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    with run_on(tmp_path) as first:
        first.save_checkpoint(checkpoint_id="5")
    with run_on(tmp_path, overwrite="overwrite" in options) as second:
        if "load" in options:
            second.load_checkpoint()
        second.save_checkpoint(checkpoint_id="5")
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_a_killed_run_of_a_shared_root_lives_no_more_and_its_owner_file_goes(tmp_path: Path) -> None:
    child = forkserver().Process(target=_shared_until_killed, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".run-*.owner.json"))) == 1
    with run_on(tmp_path, shared_root=True, keep_last=1) as run:
        run.load_checkpoint()
        run.save_checkpoint(checkpoint_id="1")
    assert names(tmp_path) == ["checkpoint-1"]


def test_a_run_that_rolls_back_sets_nothing_aside_where_another_one_saves(tmp_path: Path) -> None:
    with run_on(tmp_path) as before:
        for checkpoint_id in ("1", "2"):
            before.save_checkpoint(checkpoint_id=checkpoint_id)
    with another_run_in(tmp_path), run_on(tmp_path, overwrite=True) as run:
        with pytest.raises(FolderInUseError, match="is in use since"):
            run.load_checkpoint(tmp_path / "checkpoint-1")
        assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]


@contextmanager
def another_run_in(root: Path) -> Iterator[int]:
    root.mkdir(exist_ok=True)
    command = [sys.executable, "-c", OTHER_RUN, str(root / ROOT_OWNER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        process.kill()


def _refused(topology: Topology, root: Path, pid: int) -> None:
    component = StateComponent("model", Held({"w": torch.arange(3)}), "replicated")
    with coordinator(topology, root, [component]) as run:
        for _ in range(2):
            with pytest.raises(FolderInUseError) as caught:
                run.save_checkpoint(checkpoint_id="1")
        said = str(caught.value)
        assert f": checkpoint root {root} is in use since 20" in said and f" by run other (pid {pid} on " in said
        assert said.endswith("or let several runs save there with shared_root=True")
        run.save_checkpoint(root.parent / "free" / "checkpoint-1")
    with coordinator(topology, root, [component], shared_root=True) as run:
        run.save_checkpoint(checkpoint_id="1")
    with coordinator(topology, root, [component]) as reader:
        reader.load_checkpoint()


def test_a_second_run_is_refused_on_every_rank_unless_the_root_is_shared(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with another_run_in(root) as pid:
        run_ranks(2, _refused, root, pid)
    assert names(root) == ["checkpoint-1"]
    assert sorted(path.name for path in (tmp_path / "free").iterdir()) == ["checkpoint-1"]
    with run_on(root) as run:  # the other one was killed
        run.save_checkpoint(checkpoint_id="2")
        with run_on(root) as same_process:
            same_process.save_checkpoint(checkpoint_id="3")
        assert (root / ROOT_OWNER).exists()
    assert not (root / ROOT_OWNER).exists()


# readers beside retention


class Removing(Fitted):
    """A state during whose load another run commits a newer checkpoint and removes the one that is being read."""

    def __init__(self, root: Path, removals: list[tuple[str, str]]) -> None:
        super().__init__({"n": 0, "w": torch.zeros(20_000)})
        self._root = root
        self._removals = removals

    def state_dict(self) -> dict[Any, Any]:
        if self._removals:
            old, new = self._removals.pop(0)
            if new:
                (self._root / f"later-{new}").rename(self._root / f"checkpoint-{new}")
            shutil.rmtree(self._root / f"checkpoint-{old}")
        return self.state


def saved_steps(root: Path, num: int) -> None:
    """A committed checkpoint 1, and later ones that are not there yet."""
    with run_on(root) as run:
        for number in range(1, num + 1):
            run._saver._run.components[0].stateful.state.update(n=number, w=torch.full((20_000,), float(number)))
            run.save_checkpoint(checkpoint_id=str(number))
    for number in range(2, num + 1):
        (root / f"checkpoint-{number}").rename(root / f"later-{number}")


def _load_beside_removals(topology: Topology, root: Path, required: bool) -> None:
    removals = [("1", "2"), ("2", "3")] if topology.is_lead else []
    held = Removing(root, removals)
    with coordinator(topology, root, [StateComponent("model", held, "global", required=required)]) as run:
        run.load_checkpoint()
    assert run.last_load is not None
    assert (run.last_load.checkpoint_id, run.last_load.fell_back_from) == ("3", ())
    assert torch.equal(held.state["w"], torch.full((20_000,), 3.0))


@pytest.mark.parametrize("required", [True, False])
def test_a_checkpoint_removed_under_a_load_is_not_damaged_and_the_newer_one_is_loaded(
    tmp_path: Path, required: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved_steps(tmp_path, 3)
    _load_beside_removals(Topology.alone(), tmp_path, required)
    assert "damaged" not in caplog.text


def test_all_ranks_go_on_to_the_newer_checkpoint_together(tmp_path: Path) -> None:
    saved_steps(tmp_path, 3)
    run_ranks(2, _load_beside_removals, tmp_path, True)


def test_a_named_checkpoint_that_is_removed_under_its_load_is_called_gone(tmp_path: Path) -> None:
    saved_steps(tmp_path, 1)
    held = Removing(tmp_path, [("1", "")])
    with (
        coordinator(Topology.alone(), tmp_path, [StateComponent("model", held, "global")]) as run,
        pytest.raises(CheckpointGoneError, match="checkpoint-1 was removed or replaced while it was read"),
    ):
        run.load_checkpoint(tmp_path / "checkpoint-1")


@pytest.mark.full
@pytest.mark.parametrize("backend", ["zarr", "ocdbt", "safetensors"])
def test_no_load_beside_a_trainer_that_keeps_one_checkpoint_says_damaged(
    tmp_path: Path, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    end = time.monotonic() + 10
    state = {"n": 0, "w": torch.zeros(200_000)}

    def train() -> None:
        with run_on(tmp_path, state, backend=backend, keep_last=1) as run:
            while time.monotonic() < end + 1:
                state["n"] += 1
                state["w"] += 1
                run.save_checkpoint(checkpoint_id=str(state["n"]))

    trainer = threading.Thread(target=train)
    trainer.start()
    num_loads = 0
    try:
        while not list(tmp_path.glob("checkpoint-*")):
            time.sleep(0.01)
        with run_on(tmp_path, {"n": 0, "w": torch.zeros(200_000)}, backend=backend) as reader:
            while time.monotonic() < end:
                reader.load_checkpoint()
                num_loads += 1
    finally:
        trainer.join()
    assert num_loads > 20 and state["n"] > 20
    assert "damaged" not in caplog.text


# addresses


@pytest.mark.parametrize(
    "address",
    [Path("s3://b/x"), "hdfs://n:1/x", "s3a://b/x", "s3:///x", "s3://key:secret@b/x", "gs://b/../x", "file://host/x"],
)
def test_an_address_is_refused_wherever_a_path_is_asked_for_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    told = "(expected|an address that has lost a slash|cannot be part of an object's key)"
    with pytest.raises(ConfigurationError, match=f"output_dir is .*{told}"):
        run_on(address)
    with run_on(tmp_path / "root") as run:
        with pytest.raises(ConfigurationError, match=f"checkpoint_path is .*{told}"):
            run.save_checkpoint(address)
        with pytest.raises(ConfigurationError, match=f"checkpoint_path is .*{told}"):
            run.load_checkpoint(address)
    with pytest.raises(ConfigurationError, match=f"checkpoint_dir is .*{told}"):
        save_sharded({}, address)
    with pytest.raises(ConfigurationError, match=f"checkpoint_dir is .*{told}"):
        load_sharded({}, address)
    assert list(tmp_path.iterdir()) == []
