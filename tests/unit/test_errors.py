"""An error travels from the rank that met it to all others as JSON, and arrives as the same class with the same sentence."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import errors
from ckpt.errors import (
    Argument,
    CheckpointError,
    ConfigurationError,
    StorageError,
    describe,
    leave_out,
    needing,
    printable,
    rebuild,
    refused,
    sentence,
)

FAMILY = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CheckpointError)]


@given(
    message=st.text(),
    rank=st.none() | st.integers(0, 9999),
    phase=st.none() | st.text(),
    component=st.none() | st.text(),
)
def test_every_class_of_the_family_survives_the_journey(
    message: str, rank: int | None, phase: str | None, component: str | None
) -> None:
    for kind in FAMILY:
        arrived = rebuild(json.loads(json.dumps(describe(kind(message, rank=rank, phase=phase, component=component)))))
        assert type(arrived) is kind
        assert (str(arrived), arrived.rank, arrived.phase, arrived.component) == (
            printable(message),
            rank,
            phase,
            component,
        )


def test_the_family_is_the_built_in_errors_it_resembles() -> None:
    builtins = {
        kind.__name__: [base.__name__ for base in kind.__bases__] for kind in FAMILY if kind is not CheckpointError
    }
    assert builtins == {
        "ConfigurationError": ["CheckpointError", "ValueError"],
        "DeviceUnavailableError": ["CheckpointError", "RuntimeError"],
        "DeviceMemoryError": ["CheckpointError", "RuntimeError"],
        "ShapeMismatchError": ["CheckpointError", "ValueError"],
        "ShardingError": ["CheckpointError", "ValueError"],
        "ReplicationError": ["CheckpointError", "ValueError"],
        "StateChangedError": ["CheckpointError", "RuntimeError"],
        "SaveAbandonedError": ["CheckpointError", "RuntimeError"],
        "MissingStateError": ["CheckpointError", "KeyError"],
        "WorldSizeError": ["CheckpointError", "ValueError"],
        "CheckpointNotFoundError": ["CheckpointError", "FileNotFoundError"],
        "CheckpointGoneError": ["CheckpointNotFoundError"],
        "CheckpointExistsError": ["CheckpointError", "FileExistsError"],
        "FolderInUseError": ["CheckpointError", "RuntimeError"],
        "CorruptCheckpointError": ["CheckpointError", "ValueError"],
        "StorageError": ["CheckpointError", "OSError"],
        "RankAbsentError": ["CheckpointError", "TimeoutError"],
        "RankLeftError": ["RankAbsentError"],
    }


@pytest.mark.parametrize("kind", FAMILY)
def test_a_sentence_is_printed_as_it_is_whatever_built_in_the_class_is(kind: type[CheckpointError]) -> None:
    assert str(kind("model: 'w' is missing; found 3, expected 4")) == "model: 'w' is missing; found 3, expected 4"


def _disk(path: str, *, free_blocks: int = 3, free_files: int = 7) -> os.statvfs_result:
    """A disk with blocks of 4096 bytes; nothing below /data is there."""
    if path != "/data":
        raise FileNotFoundError(path)
    return os.statvfs_result((4096, 4096, 100, 5, free_blocks, 10, free_files, free_files, 0, 255))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_arrives_as_a_storage_error_that_says_what_is_needed_and_what_is_free(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "statvfs", _disk)
    full = OSError(code, "No space left on device", "/data/a/w")
    assert sentence(full) == "No space left on device: '/data/a/w' (12,288 bytes are free)"
    with (
        pytest.raises(OSError, match="No space"),
        needing("the part of rank 1", lambda: 70_000),
        needing("w", lambda: 20),
    ):
        raise full
    told = (
        "No space left on device: '/data/a/w' (70,000 bytes are needed for the part of rank 1, 12,288 bytes are free)"
    )
    assert sentence(full) == sentence(pickle.loads(pickle.dumps(full))) == told
    monkeypatch.setattr(os, "statvfs", partial(_disk, free_blocks=300))
    assert sentence(full) == told, "as it was when the write failed"
    assert type(rebuild(describe(full))) is StorageError


def test_a_full_disk_says_what_was_free_before_the_save_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", partial(_disk, free_blocks=0))
    for needed, clause in (
        (70_000, "70,000 bytes are"),
        (40_960, "40,960 bytes and metadata are"),
        (0, "20 bytes and metadata are"),
    ):
        full = OSError(errno.ENOSPC, "No space left on device", "/data/a/w")
        with (
            pytest.raises(OSError, match="No space"),
            needing("it", lambda n=needed: n),
            needing("it", lambda: 20, 40_960),
        ):
            raise full
        assert sentence(full).endswith(f" ({clause} needed for it, 40,960 bytes were free before)")


def test_a_disk_with_room_but_no_file_left_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", partial(_disk, free_files=0))
    full = OSError(errno.ENOSPC, "No space left on device", "/data/w")
    assert sentence(full).endswith("(12,288 bytes are free, no file more can be made)")


def test_a_limit_of_the_length_of_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    with pytest.raises(OSError, match="large") as caught, needing("w", lambda: 5000):
        raise OSError(errno.EFBIG, "File too large", "/data/w")
    says = "(5,000 bytes are needed for w, ulimit -f allows 4,096 bytes for a file)"
    assert sentence(caught.value) == f"File too large: '/data/w' {says}"


@pytest.mark.parametrize(
    ("error", "read"),
    [
        (OSError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (OSError("no number"), "OSError: no number"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (ZeroDivisionError(), "ZeroDivisionError"),
        (RuntimeError("two\n   lines"), "RuntimeError: two lines"),
        (ConfigurationError("tp=3 does not divide 4"), "tp=3 does not divide 4"),
    ],
)
def test_any_error_reads_as_one_line_that_says_something(error: Exception, read: str) -> None:
    assert sentence(error) == read
    assert str(rebuild(describe(error))) == read


def test_an_error_that_is_not_ours_arrives_as_the_head_of_the_family() -> None:
    assert type(rebuild(describe(KeyError("weight")))) is CheckpointError


def test_the_arguments_of_an_error_go_with_it_as_json_and_as_a_pickle() -> None:
    more = [Argument("saves.mode", object(), "mode")]
    error = ConfigurationError("load with ", Argument("load.strict", False), ", or ", leave_out("e\nma"), arguments=more)
    for arrived in (rebuild(json.loads(json.dumps(describe(error)))), pickle.loads(pickle.dumps(error))):
        assert str(arrived) == str(error) == "load with strict=False, or leave component e\\nma out"
        assert [(one.name, one.value) for one in arrived.arguments[:2]] == [("load.strict", False), ("leave_out", "e\nma")]
        assert sentence(arrived, lambda one: f"<{one.name}>") == "load with <load.strict>, or <leave_out>"


def test_of_two_arguments_that_begin_alike_each_is_said_once() -> None:
    found = [refused("a.x", number, "2") for number in (1, 16)]
    both = ConfigurationError("; ".join(map(str, found)), arguments=[argument for error in found for argument in error.arguments])
    assert sentence(both, lambda one: f"{one.name}={one.value}") == "a.x=1: expected 2; a.x=16: expected 2"
