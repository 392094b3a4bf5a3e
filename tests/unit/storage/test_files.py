"""Writing files: whole chunks out of clipped ones, errors that name the file, and a sync of everything exactly once."""

from __future__ import annotations

import errno
import os
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.storage import files, sink
from ckpt.storage.files import FolderTree, make_durable, naming, write_all
from ckpt.storage.sink import padded_pieces


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=3), st.integers(5, 40))
def test_a_clipped_chunk_is_padded_with_zeros_to_its_cell(sides: list[tuple[int, int]], piece_bytes: int) -> None:
    shape, cell = tuple(n for n, _ in sides), tuple(n + more for n, more in sides)
    host = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.int16).reshape(shape)
    padded = torch.zeros(cell, dtype=torch.int16)
    padded[tuple(slice(0, n) for n in shape)] = host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "PIECE_BYTES", piece_bytes)
        found = list(padded_pieces(host, cell))
    assert b"".join(found) == padded.numpy().tobytes()


def test_a_whole_chunk_is_given_out_of_its_own_memory() -> None:
    host = torch.arange(6, dtype=torch.int32)
    (piece,) = padded_pieces(host, (6,))
    host[0] = 77
    assert piece[:4].tobytes() == (77).to_bytes(4, "little")


def test_an_error_of_a_descriptor_is_given_the_file_s_name(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="No space left on device: '.*/model/c/0'") as caught,
        naming(tmp_path / "model/c/0"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "model/c/0")


def test_an_error_that_names_a_file_already_keeps_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"), naming(tmp_path / "other"):
        os.stat(tmp_path / "nowhere")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: original(fd, data[:3]))
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), memoryview(b"0123456789"))
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_folders_are_made_once_and_shared_with_other_ranks(tmp_path: Path) -> None:
    first, second = FolderTree(tmp_path), FolderTree(tmp_path)
    first.make(tmp_path / "a/b/c")
    second.make(tmp_path / "a/b/d")
    assert first.made == {tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/c"}
    assert second.made == {tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/d"}


def synced(root: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Make `count` files durable and return what was synced one by one, and what as a file system."""
    one_by_one: list[str] = []
    at_once: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: one_by_one.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), root))
    )
    monkeypatch.setattr(files, "_syncfs", lambda folder: at_once.append(os.path.relpath(folder, root)))
    folders = FolderTree(root)
    folders.make(root / "model")
    sizes = {f"model/{number}": (root / f"model/{number}").write_bytes(b"x") for number in range(count)}
    make_durable(root, sizes, folders.made, lambda num_bytes: None)
    return sorted(one_by_one), at_once


def test_a_few_files_are_synced_one_by_one_and_their_folders_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert synced(tmp_path, 3, monkeypatch) == ([".", "model", "model/0", "model/1", "model/2"], [])


def test_many_files_are_synced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert synced(tmp_path, files.MANY_FILES + 1, monkeypatch) == ([], ["."])


def test_where_there_is_no_syncfs_every_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.sys, "platform", "darwin")
    one_by_one, at_once = synced(tmp_path, files.MANY_FILES + 1, monkeypatch)
    assert len(one_by_one) == files.MANY_FILES + 3 and at_once == []


@pytest.mark.parametrize("release", ["5.7.19-generic", "4.18.0-553.el8_10.x86_64", "3.10.0", "unknown"])
def test_on_a_kernel_whose_syncfs_hides_errors_every_file_and_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    told = types.SimpleNamespace(release=release)
    monkeypatch.setattr(files.os, "uname", lambda: told)
    one_by_one, at_once = synced(tmp_path, files.MANY_FILES + 1, monkeypatch)
    assert len(one_by_one) == files.MANY_FILES + 3 and at_once == []


@pytest.mark.parametrize("release", ["5.8.0", "5.15.167.4-microsoft-standard-WSL2", "6.18.44-fc-v657", "10.0-rc1"])
def test_a_kernel_whose_syncfs_tells_of_errors_is_known_by_its_release(release: str) -> None:
    assert files.syncfs_tells("linux", release) and not files.syncfs_tells("darwin", release)


def test_the_real_syncs_run_and_a_large_file_shows_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLE_BYTES", 1 << 20)
    moved: list[int] = []
    size = (tmp_path / "large").write_bytes(bytes(5 << 20))
    make_durable(tmp_path, {"large": size}, [tmp_path], moved.append)
    assert moved == [1 << 20] * 4
    files._syncfs(tmp_path)


def test_a_disk_that_fails_during_writeback_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: '.*/file'"):
        make_durable(tmp_path, {"file": 1}, [tmp_path], lambda num_bytes: None)
