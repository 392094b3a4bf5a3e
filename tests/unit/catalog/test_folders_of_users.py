"""What people copy, rename, link and put into a checkpoint root: no save counts, moves, links or removes it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.catalog.ledger import Ledger
from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.manifest import FORMAT_VERSION, MANIFEST_NAME
from ckpt.saving.save_settings import SaveSettings
from ckpt.storage.stored import read_manifest
from tests.unit.catalog.test_shared_roots import names, run_on

SETTINGS = [{}, {"overwrite": True}, {"shared_root": True}, {"saves": SaveSettings(incremental=True)}]


def saved(root: Path, *ids: str, load: bool = False, **options: Any) -> None:
    with run_on(root, **options) as run:
        if load:
            run.load_checkpoint()
        for checkpoint_id in ids:
            run.save_checkpoint(checkpoint_id=checkpoint_id)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def kept(root: Path) -> dict[str, dict[str, bytes]]:
    """Make all that a user may want to keep in a root that holds checkpoints 1 and 2; return its content."""
    shutil.copytree(root / "checkpoint-2", root / "checkpoint-best")
    shutil.copytree(root / "checkpoint-2", root / "checkpoint-2.bak")
    shutil.copytree(root / "checkpoint-2", root / "checkpoint-linked", copy_function=os.link)
    (root / "checkpoint-1").rename(root / "checkpoint-1-keep")
    (root / "checkpoint-foo").mkdir()
    (root / "checkpoint-foo" / "mine.txt").write_text("mine")
    (root / "checkpoint-latest").symlink_to("checkpoint-best")
    return {path.name: content(path) for path in root.glob("checkpoint-*") if path.name != "checkpoint-2"}


@pytest.mark.parametrize("options", SETTINGS, ids=str)
@pytest.mark.parametrize("load", [True, False])
def test_copies_and_renamed_checkpoints_stay_whatever_a_run_does(
    tmp_path: Path, options: dict[str, Any], load: bool
) -> None:
    saved(tmp_path, "1", "2", **{name: value for name, value in options.items() if name == "saves"})
    before = kept(tmp_path)
    saved(tmp_path, "3", "4", "5", keep_last=1, load=load, **options)
    for name, files in before.items():
        assert content(tmp_path / name) == files
    left = {"checkpoint-2"} if not load and "overwrite" not in options else set()
    assert {*names(tmp_path)} == {"checkpoint-5", *before, *left}
    for name in ("checkpoint-best", "checkpoint-1-keep", "checkpoint-linked"):
        assert verify_checkpoint(tmp_path / name) == []


def test_renamed_checkpoints_are_not_counted(tmp_path: Path) -> None:
    saved(tmp_path, "1", "2", "3")
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-1-keep")
    saved(tmp_path, "4", load=True, keep_last=3)
    assert names(tmp_path) == ["checkpoint-1-keep", "checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert [one.id for one in Ledger(tmp_path, run_id="reader").committed()] == ["2", "3", "4"]
    assert Ledger(tmp_path, run_id="reader").renamed() == ["checkpoint-1-keep"]


def test_latest_passes_over_a_renamed_checkpoint_which_its_path_restores(tmp_path: Path) -> None:
    saved(tmp_path, "1", "2")
    (tmp_path / "checkpoint-2").rename(tmp_path / "checkpoint-2-bad")
    with run_on(tmp_path) as run:
        run.load_checkpoint()
        assert run.last_load is not None and run.last_load.checkpoint_id == "1"
        run.save_checkpoint(checkpoint_id="3")
        assert read_manifest(tmp_path / "checkpoint-3").commit_number == 3  # that of the renamed one is taken
        run.load_checkpoint(tmp_path / "checkpoint-2-bad")
        assert run.last_load is not None and run.last_load.checkpoint_id == "2"
        with pytest.raises(CheckpointExistsError, match="newer checkpoints: checkpoint-3"):
            run.save_checkpoint(checkpoint_id="4")


@pytest.mark.parametrize(
    "rot",
    [
        (b'"checkpoint_id": "2"', b'"checkpoint_id": "3"'),
        (b'"checkpoint_id": "2"', b'"checkpoint_id": "checkpoint-1"'),
        (b'"commit_number": 3', b'"commit_number": 1'),
        (b'"timestamp": "2', b'"timestamp": "1'),
    ],
    ids=str,
)
def test_damage_in_the_head_of_a_manifest_does_not_hide_the_newest_checkpoint(
    tmp_path: Path, rot: tuple[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "0", "1", "2")
    manifest = tmp_path / "checkpoint-2" / MANIFEST_NAME
    intact = manifest.read_bytes()
    manifest.write_bytes(intact.replace(*rot))
    assert manifest.read_bytes() != intact
    with run_on(tmp_path) as run:
        run.load_checkpoint()
        assert run.last_load is not None and run.last_load.checkpoint_id == "1"
        assert "checkpoint-2 is damaged and passed over" in caplog.text
        run.save_checkpoint(checkpoint_id="3")
    assert {"checkpoint-2", "checkpoint-3"} <= {*names(tmp_path)}


def test_a_root_with_nothing_but_a_renamed_checkpoint_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "1")
    (tmp_path / "checkpoint-1").rename(tmp_path / "checkpoint-best")
    with run_on(tmp_path) as run, pytest.raises(CheckpointNotFoundError, match="but for checkpoint-best, which has"):
        run.load_checkpoint()
    with Checkpointer(tmp_path, model=torch.nn.Linear(1, 1), on_sigterm=False, save_at_end=False) as checkpoints:
        assert checkpoints.restore() == 0
    assert "is empty but for checkpoint-best" in caplog.text


def test_a_save_under_the_name_of_a_users_folder_sets_it_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "1")
    copy = content(shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-2"))
    (tmp_path / "elsewhere").mkdir()
    saved(tmp_path / "elsewhere", "3")
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "elsewhere" / "checkpoint-3")
    saved(tmp_path, "2", "3", keep_last=1)
    aside = sorted(path for path in tmp_path.glob(".quarantined-*") if not path.name.endswith(".txt"))
    assert [path.name.rpartition("-")[0] for path in aside] == [".quarantined-2", ".quarantined-3"]
    assert content(aside[0]) == copy and aside[1].is_symlink()
    assert (tmp_path / "elsewhere" / "checkpoint-3" / MANIFEST_NAME).is_file()
    assert "does not say that it was saved as 2" in caplog.text


@pytest.mark.parametrize("backend", ["zarr", "ocdbt", "safetensors"])
@pytest.mark.parametrize("kill", ["", "before it is given back"])
def test_a_file_that_a_user_put_into_a_checkpoint_stays_when_the_checkpoint_is_removed(
    tmp_path: Path, backend: str, kill: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, "1", backend=backend, config_text="a: 1\n")
    (tmp_path / "checkpoint-1" / "NOTES.txt").write_text("the good one")
    (tmp_path / "checkpoint-1" / "evals").mkdir()
    if kill:
        (tmp_path / "checkpoint-1").rename(tmp_path / ".removed-1-0123abcd")
    saved(tmp_path, "2", "3", load=not kill, backend=backend, keep_last=1)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert sorted(os.listdir(tmp_path / "checkpoint-1")) == ["NOTES.txt", "evals"]
    assert "NOTES.txt stays, and belongs to no checkpoint" in caplog.text


@pytest.mark.parametrize("load", [True, False])
def test_a_users_file_under_a_name_that_the_newer_checkpoint_uses_stays(tmp_path: Path, load: bool) -> None:
    saved(tmp_path, "1")
    (tmp_path / "checkpoint-1" / "config.yaml").write_text("mine")
    saved(tmp_path, "2", load=load, keep_last=1, overwrite=not load, config_text="a: 1\n")
    assert content(tmp_path / "checkpoint-1") == {"config.yaml": b"mine"}


def test_a_file_that_a_user_put_into_a_checkpoint_moves_into_the_one_that_replaces_it(tmp_path: Path) -> None:
    saved(tmp_path, "1")
    (tmp_path / "checkpoint-1" / "NOTES.txt").write_text("the first")
    saved(tmp_path, "1", "1", load=True)
    assert names(tmp_path) == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1" / "NOTES.txt").read_text() == "the first"
    assert verify_checkpoint(tmp_path / "checkpoint-1") == ["NOTES.txt does not belong to the checkpoint"]


def test_a_checkpoint_that_does_not_tell_its_files_from_a_users_is_quarantined(
    tmp_path: Path,
) -> None:
    saved(tmp_path, "1")
    (tmp_path / "checkpoint-1" / "NOTES.txt").write_text("mine")
    manifest = tmp_path / "checkpoint-1" / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(b'"world_size": 1', b'"world_size": 2'))
    saved(tmp_path, "1")
    (aside,) = (path for path in tmp_path.glob(".quarantined-1-*") if path.is_dir())
    assert (aside / "NOTES.txt").read_text() == "mine"


@pytest.mark.parametrize("how", ["replaced", "surplus", "overwritten"])
def test_a_checkpoint_of_a_newer_format_is_quarantined_and_stops_no_save(tmp_path: Path, how: str) -> None:
    with run_on(tmp_path, keep_last=1 if how == "surplus" else None) as run:
        run.save_checkpoint(checkpoint_id="1")
        newer = replace(read_manifest(tmp_path / "checkpoint-1"), format_version=FORMAT_VERSION + 1)
        (tmp_path / "checkpoint-1" / MANIFEST_NAME).write_bytes(newer.to_bytes())
        if how != "overwritten":
            run.save_checkpoint(checkpoint_id="1" if how == "replaced" else "2")
    saved(tmp_path, "2", "3", overwrite=how == "overwritten")
    (aside,) = (path for path in tmp_path.glob(".quarantined-1-*") if path.is_dir())
    assert (aside / MANIFEST_NAME).read_bytes() == newer.to_bytes()
    assert not list(tmp_path.glob(".removed-*"))
    assert {"checkpoint-2", "checkpoint-3"} <= {*names(tmp_path)}


def test_the_best_by_steps_and_metrics_does_not_count_copies(tmp_path: Path) -> None:
    with Checkpointer(
        tmp_path, model=torch.nn.Linear(1, 1), every=1, keep_best=1, metric="loss", on_sigterm=False
    ) as checkpoints:
        checkpoints.step(1, metrics={"loss": 1.0})
        shutil.copytree(tmp_path / "checkpoint-00000001", tmp_path / "checkpoint-best")
        for step in (2, 3):
            checkpoints.step(step, metrics={"loss": float(step)})
        assert checkpoints.restore("best").path == tmp_path / "checkpoint-00000001"
        assert [one.step for one in checkpoints.list()] == [1, 3]
    assert (tmp_path / "checkpoint-best" / MANIFEST_NAME).is_file()


def test_a_checkpoint_saved_by_its_path_is_found_and_never_removed(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(2)}, tmp_path / "checkpoint-7")
    (found,) = Ledger(tmp_path, run_id="reader").committed()
    assert (found.id, found.says_id) == ("7", False)
    saved(tmp_path, "1", "2", overwrite=True, keep_last=1)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-7"]


def test_damage_shared_with_a_users_copy_moves_no_copy(tmp_path: Path) -> None:
    settings = SaveSettings(incremental=True)
    saved(tmp_path, "1", "2", saves=settings)
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-mine", copy_function=os.link)
    shared = next(
        path
        for path in sorted((tmp_path / "checkpoint-2" / "model").rglob("*"))
        if path.is_file() and path.stat().st_nlink > 2
    )
    with shared.open("r+b") as file:
        file.seek(shared.stat().st_size // 2)
        file.write(b"\xff" * 8)
    with run_on(tmp_path, saves=settings) as run:
        with pytest.raises(CorruptCheckpointError):
            run.load_checkpoint()
        run.save_checkpoint(checkpoint_id="3")
    assert {"checkpoint-3", "checkpoint-mine"} <= {*names(tmp_path)}
