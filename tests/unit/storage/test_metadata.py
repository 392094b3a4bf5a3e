from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ckpt.errors import CheckpointError, CorruptCheckpointError, ShapeMismatchError, StorageError
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.metadata import (
    CONFIG_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)


def write(folder: Path, content: object) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / CONFIG_FNAME).write_bytes(data)


def test_code_that_catches_the_first_reference_s_exception_catches_all_of_ours() -> None:
    assert CheckpointingException is CheckpointError
    assert issubclass(ShapeMismatchError, CheckpointingException)


def test_what_is_saved_is_loaded_and_the_file_is_plain_json_under_upstream_s_name(tmp_path: Path) -> None:
    """S1.69: metadata.json names both backends and their versions."""
    config = CheckpointingConfig("tensorstore", 3, "yaml", 2)
    save_config(config, str(tmp_path))
    assert maybe_load_config(str(tmp_path)) == config
    written = json.loads((tmp_path / "metadata.json").read_bytes())
    assert len(written.pop("digest")) == 32
    assert written == {
        "sharded_backend": "tensorstore",
        "sharded_backend_version": 3,
        "common_backend": "yaml",
        "common_backend_version": 2,
    }


def test_the_common_part_is_json_unless_said_otherwise() -> None:
    """S1.69"""
    assert CheckpointingConfig("zarr") == CheckpointingConfig("zarr", 1, "json", 1)


def test_a_file_from_before_the_common_backend_was_named_means_torch(tmp_path: Path) -> None:
    """S1.69"""
    write(tmp_path, {"sharded_backend": "zarr", "sharded_backend_version": 1})
    assert maybe_load_config(tmp_path) == CheckpointingConfig("zarr", 1, "torch", 1)


def test_keys_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    """S1.69"""
    write(tmp_path, {"sharded_backend": "zarr", "common_backend": "json", "content_metadata": {"a": [1]}})
    assert maybe_load_config(tmp_path) == CheckpointingConfig("zarr")


def test_a_folder_without_the_file_is_no_distributed_checkpoint(tmp_path: Path) -> None:
    """S1.69"""
    (tmp_path / "file").write_bytes(b"{}")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        assert maybe_load_config(folder) is None
        assert not check_is_distributed_checkpoint(folder)
    write(tmp_path, {"sharded_backend": "zarr"})
    assert check_is_distributed_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no JSON"),
        (b'{"sharded_backend": "zarr"', "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (["zarr", 1], "holds a list, not an object"),
        ({}, "has no sharded_backend"),
        ({"backend": "zarr"}, "has no sharded_backend"),
        ({"sharded_backend": None}, "has sharded_backend: None, which should be a string"),
        ({"sharded_backend": "zarr", "common_backend": 1}, "has common_backend: 1, which should be a string"),
        (
            {"sharded_backend": "zarr", "sharded_backend_version": "1"},
            "sharded_backend_version: '1', which should be a",
        ),
        (
            {"sharded_backend": "zarr", "common_backend_version": True},
            "common_backend_version: True, which should be a",
        ),
        ({"sharded_backend": "zarr", "common_backend_version": 1.0}, "common_backend_version: 1.0, which should be a"),
    ],
)
def test_a_file_that_is_no_such_record_is_named_and_is_not_taken_for_none(
    tmp_path: Path, content: object, says: str
) -> None:
    """S1.69: a damaged file is an error, not another kind of checkpoint."""
    write(tmp_path, content)
    for ask in (maybe_load_config, check_is_distributed_checkpoint):
        with pytest.raises(CorruptCheckpointError) as refused:
            ask(tmp_path)
        assert says in str(refused.value)
        assert str(tmp_path / CONFIG_FNAME) in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(CheckpointFolder, "read", fail)
    with pytest.raises(StorageError, match="metadata.json cannot be read: Input/output error"):
        maybe_load_config(tmp_path)


def test_saving_replaces_the_file_in_one_step_after_its_bytes_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1.66: metadata.json says that all of a checkpoint is there, so no reader may meet half of it."""
    save_config(CheckpointingConfig("old"), tmp_path)
    steps = []
    sync, rename = os.fsync, os.replace

    def watched_sync(descriptor: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def watched_rename(source: Path, target: Path) -> None:
        assert maybe_load_config(tmp_path) == CheckpointingConfig("old")
        assert json.loads(source.read_bytes())["sharded_backend"] == "new"
        steps.append(f"rename {source.name} to {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_rename)
    save_config(CheckpointingConfig("new"), tmp_path)
    beside = steps[0].removeprefix("sync ")
    assert beside.startswith(".metadata.json.")
    assert steps == [f"sync {beside}", f"rename {beside} to metadata.json", f"sync {tmp_path.name}"]
    assert maybe_load_config(tmp_path) == CheckpointingConfig("new")
    assert os.listdir(tmp_path) == ["metadata.json"]


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_config(CheckpointingConfig("old"), tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="metadata.json cannot be written: No space left on device"):
        save_config(CheckpointingConfig("new"), tmp_path)
    assert maybe_load_config(tmp_path) == CheckpointingConfig("old")
    assert os.listdir(tmp_path) == ["metadata.json"]


def test_a_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written: No such file or directory"):
        save_config(CheckpointingConfig("zarr"), tmp_path / "nowhere")
    assert os.listdir(tmp_path) == []
