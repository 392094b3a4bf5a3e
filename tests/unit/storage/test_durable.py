"""Small files that are written durably: all of a file, or none of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckpt.errors import sentence
from ckpt.storage.files import replace_durably, write_durably


@pytest.mark.parametrize("write", [write_durably, replace_durably])
def test_a_file_that_cannot_be_written_whole_is_not_left_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "index.json", b"some bytes")  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []
    assert "(10 bytes and metadata are needed for " in sentence(caught.value)
    assert sentence(caught.value).endswith(" bytes were free before)")


def test_a_file_that_was_there_stays_when_another_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.json").write_bytes(b"before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "index.json", b"after")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]
