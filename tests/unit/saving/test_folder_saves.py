"""Saves into folders that a framework names and retires."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.backends.zarr import ZarrBackend
from ckpt.catalog import ledger
from ckpt.errors import CheckpointError, ConfigurationError, StorageError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.new_folder import FolderSaves, as_folder_settings
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.collect import RankState, collect
from ckpt.state.sharing import StateComponent
from ckpt.state.statefuls import Given
from ckpt.storage import files
from ckpt.storage.stored import read_manifest

QUEUE = SaveSettings(mode="async", when_busy="queue")


def state(value: int) -> Callable[[], RankState]:
    given = Given({"a": torch.full((3,), value)})
    return lambda: collect([StateComponent("state", given, "replicated")], Topology.alone())


def saves(settings: str | SaveSettings = "sync") -> FolderSaves:
    return FolderSaves(Topology.alone(), ZarrBackend(), as_folder_settings(settings))


def value_in(path: Path) -> int:
    return int(ckpt.load(path)["a"][0])


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def fill() -> None:
        def refuse(*_: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(ManifestWriter, "write", refuse)

    return fill


@pytest.mark.parametrize("can_swap", [True, False])
def test_a_checkpoint_is_replaced_and_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(files, "_RENAMEAT2", None)
    one = saves()
    for value in (1, 2, 3):
        one.save(tmp_path / "last.ckpt", state(value))
        assert value_in(tmp_path / "last.ckpt") == value
    (tmp_path / "link").symlink_to("last.ckpt")
    one.save(tmp_path / "link", state(4))
    assert (value_in(tmp_path / "last.ckpt"), value_in(tmp_path / "link")) == (3, 4)
    assert not (tmp_path / "link").is_symlink()
    assert names_in(tmp_path) == ["last.ckpt", "link"]


def test_a_reader_finds_a_checkpoint_at_every_moment_of_a_replacement(tmp_path: Path) -> None:
    if not files.exchange(*(Path(tempfile.mkdtemp(dir=tmp_path)) for _ in range(2))):
        pytest.skip("this file system cannot swap two names")
    one, manifest = saves(), tmp_path / "last.ckpt" / MANIFEST_NAME
    one.save(tmp_path / "last.ckpt", state(0))
    looks, is_over = [], threading.Event()

    def look() -> None:
        while not is_over.is_set():
            looks.append(manifest.exists())

    reader = threading.Thread(target=look)
    reader.start()
    try:
        for value in range(20):
            one.save(tmp_path / "last.ckpt", state(value))
    finally:
        is_over.set()
        reader.join()
    assert len(looks) > 20 and all(looks)


def test_a_kill_between_two_renames_leaves_the_old_checkpoint_under_a_visible_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves().save(tmp_path / "last.ckpt", state(1))
    rename = os.rename

    def dying(old: Path, new: Path) -> None:
        if Path(new) == tmp_path / "last.ckpt":
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(ledger, "exchange", lambda *_: False)
        patched.setattr(os, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            saves().save(tmp_path / "last.ckpt", state(2))
    (old,) = tmp_path.glob("last.replaced-*.ckpt")
    assert value_in(old) == 1


@pytest.mark.parametrize("name", ["epoch=1-step=3.ckpt", "a b, ü.ckpt", "x" * 230, "~"])
def test_any_name_of_a_folder_will_do(tmp_path: Path, name: str) -> None:
    saves().save(tmp_path / name, state(1))
    ckpt.save({"a": torch.tensor([2])}, tmp_path / f"{name[:-1]}2")
    assert (value_in(tmp_path / name), value_in(tmp_path / f"{name[:-1]}2")) == (1, 2)


def test_what_is_no_checkpoint_is_kept_under_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file.ckpt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    for name in ("file.ckpt", "folder"):
        saves().save(tmp_path / name, state(1))
        assert value_in(tmp_path / name) == 1
    (file,) = tmp_path.glob("file.replaced-*.ckpt")
    (folder,) = tmp_path.glob("folder.replaced-*")
    assert file.read_text() == (folder / "file").read_text() == "mine"
    assert caplog.text.count("is no checkpoint of this package") == 2
    saves().remove(file)
    assert file.exists()


def test_a_copy_under_the_name_of_a_later_save_is_the_users(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves().save(tmp_path / "a", state(1))
    for name in ("last", "mine"):
        shutil.copytree(tmp_path / "a", tmp_path / name)
    saves().remove(tmp_path / "mine")
    saves().save(tmp_path / "last", state(2))
    saves().save(tmp_path / "last", state(3))
    assert "mine is not removed" in caplog.text
    (aside,) = tmp_path.glob("last.replaced-*")
    assert [value_in(tmp_path / name) for name in ("mine", "last", aside.name)] == [1, 3, 1]


@pytest.mark.parametrize(
    "settings",
    ["async", QUEUE],
    ids=["wait", "queue"],
)
def test_saves_in_the_background_are_made_in_order_and_what_they_replace_is_removed_after_them(
    tmp_path: Path, settings: str | SaveSettings
) -> None:
    one = saves(settings)
    for value in range(1, 6):
        one.save(tmp_path / f"{value}", state(value))
        one.save(tmp_path / "last", state(value))
        if value > 1:
            one.remove(tmp_path / f"{value - 1}")
    one.close()
    assert names_in(tmp_path) == ["5", "last"]
    assert (value_in(tmp_path / "5"), value_in(tmp_path / "last")) == (5, 5)


def test_a_path_that_is_saved_to_again_is_not_removed_any_more(tmp_path: Path) -> None:
    one = saves(QUEUE)
    one.save(tmp_path / "a", state(1))
    one.remove(tmp_path / "a")
    one.save(tmp_path / "a", state(2))
    one.close()
    assert value_in(tmp_path / "a") == 2


def test_hidden_names_do_not_contain_that_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, seen = ManifestWriter.write, []

    def looking(self: ManifestWriter, checkpoint_id: str, record: Callable[[bytes], None]) -> int:
        seen.extend(names_in(tmp_path))
        return write(self, checkpoint_id, record)

    monkeypatch.setattr(ManifestWriter, "write", looking)
    monkeypatch.setattr(ledger, "delete_folder", lambda folder: seen.append(folder.name))
    saves().save(tmp_path / "hpc_ckpt_1.ckpt", state(1))
    saves().remove(tmp_path / "hpc_ckpt_1.ckpt")
    assert [name.split("-")[0] for name in seen] == [".unpublished", ".unpublished", ".removed"]
    assert not any("hpc_ckpt_" in name for name in seen), "Lightning would take it for a checkpoint"


def test_a_process_that_can_start_no_thread_deletes_what_was_replaced_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "deletion":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    one = saves("async")
    for value in (1, 2):
        one.save(tmp_path / "last", state(value))
    one.close()
    assert (names_in(tmp_path), value_in(tmp_path / "last")) == (["last"], 2)


def test_an_error_after_the_commit_says_that_the_checkpoint_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise RuntimeError("of deleting")

    saves().save(tmp_path / "last", state(1))
    monkeypatch.setattr(ledger, "delete_folder", fail)
    with pytest.raises(CheckpointError, match=f"of deleting.*{tmp_path / 'last'} is committed"):
        saves().save(tmp_path / "last", state(2))
    assert value_in(tmp_path / "last") == 2


def test_the_error_of_a_save_that_no_call_has_reported_is_logged(
    tmp_path: Path, full_disk: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    full_disk()
    one = saves("async")
    one.save(tmp_path / "1", state(1))
    one.release()
    assert f"a save has failed in the background: save into {tmp_path / '1'}" in caplog.text
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("on_async_error", ["raise", "warn"])
def test_nothing_is_removed_for_a_save_that_fails(
    tmp_path: Path, full_disk: Callable[[], None], caplog: pytest.LogCaptureFixture, on_async_error: str
) -> None:
    one = saves(SaveSettings(mode="async", on_async_error=on_async_error))
    one.save(tmp_path / "1", state(1))
    one.finalize(blocking=True)
    full_disk()
    one.save(tmp_path / "2", state(2))
    one.remove(tmp_path / "1")
    if on_async_error == "raise":
        with pytest.raises(StorageError, match=f"save into {tmp_path / '2'}.*No space left on device"):
            one.save(tmp_path / "3", state(3))
    one.close()
    assert names_in(tmp_path) == ["1"]
    assert f"not removed, because a save has failed: {tmp_path / '1'}" in caplog.text


def test_settings_that_could_cost_checkpoints_or_have_no_effect_are_refused() -> None:
    for settings, word in (({"overlap": True}, "overlap"), ({"when_busy": "skip"}, "skip")):
        with pytest.raises(ConfigurationError, match=word):
            as_folder_settings(SaveSettings(mode="async", **settings))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="saves.incremental"):
        as_folder_settings(SaveSettings(incremental=True))
    with pytest.raises(ConfigurationError, match="mode is 'sometimes'; expected one of sync, async, or a SaveSettings"):
        as_folder_settings("sometimes")


@pytest.mark.parametrize("name", ["step-1", "checkpoint_0", "epoch=1-step=2.ckpt", "checkpoint-7", "a b"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_users_file_comes_back_to_its_folder_if_the_removal_is_killed(
    tmp_path: Path, name: str, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves().save(tmp_path / name, state(1))
    (tmp_path / name / "notes.txt").write_text("mine")
    with monkeypatch.context() as kill:
        kill.setattr(ledger.Ledger, "_finish_removal", lambda *_: None)
        if replaced:
            kill.setattr(ledger.Ledger, "_remove", lambda *_: True)
            saves().save(tmp_path / name, state(2))
        else:
            saves().remove(tmp_path / name)
    assert not (tmp_path / name / "notes.txt").exists()
    monkeypatch.setattr(ledger, "abandoned", lambda *_: nullcontext(True))
    saves().save(tmp_path / "next", state(3))
    assert (tmp_path / name / "notes.txt").read_text() == "mine"
    assert names_in(tmp_path) == sorted([name, "next"])
    assert not replaced or value_in(tmp_path / name) == 2


@pytest.mark.parametrize("id", ["..", "../outside", "/outside"])
def test_what_a_manifest_says_leads_no_file_out_of_its_folder(tmp_path: Path, id: str) -> None:
    root = tmp_path / "root"
    saves().save(root / "1", state(1))
    manifest = dataclasses.replace(read_manifest(root / "1"), checkpoint_id=id)
    (root / "1" / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    (root / "1" / "notes.txt").write_text("mine")
    (root / "1").rename(root / f".removed-{ledger.safe_id(id)}-0123abcd")
    saves().save(root / "2", state(1))
    assert names_in(tmp_path) == ["root"]
    assert len([*root.rglob("notes.txt")]) == 1
