"""Several people in one folder: files follow the umask, and colleagues of a group go on with each other's runs."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt.backends.registry import BACKENDS
from ckpt.errors import StorageError, sentence
from ckpt.saving.save_settings import SaveSettings
from tests.support.covering import sampled
from tests.support.forked_ranks import RunForked, forked_from
from tests.support.ranks import Dead
from tests.support.users import GROUP

ONE, OTHER, STRANGER = 61001, 61002, 61003
OPTIONS: dict[str, dict[str, Any]] = {
    "the other's are removed": {"keep_last": 1},
    "the other's are linked": {"mode": SaveSettings(incremental=True)},
}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture(scope="module")
def run() -> Iterator[RunForked]:
    with forked_from("tests.support.users") as run:
        yield run


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a group, as a cluster makes them: what is made in it is the group's."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))  # the parents of tmp_path are root's alone
    os.chown(made, ONE, GROUP)
    made.chmod(0o2775)
    yield made
    shutil.rmtree(made)


@sampled("umask", [0o002, 0o027, 0o077])
def test_all_files_and_folders_follow_the_umask(run: RunForked, tmp_path: Path, umask: int) -> None:
    run(1, "saves_in_all_ways", tmp_path, umask)
    found = {
        one.relative_to(tmp_path): stat.S_IMODE(one.lstat().st_mode)
        for one in tmp_path.rglob("*")
        if one.name != "dist"
    }
    assert len(found) > 100
    wrong = {
        str(path): oct(mode)
        for path, mode in found.items()
        if mode != (0o777 if (tmp_path / path).is_dir() else 0o666) & ~umask
    }
    assert wrong == {}


@as_root
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@sampled("format", BACKENDS)
def test_two_people_of_a_group_go_on_with_each_others_run(
    run: RunForked, folder: Path, format: str, options: dict[str, Any]
) -> None:
    def trains(user: int, *more: bool) -> Any:
        return run(1, "trains_as", user, 0o002, folder / "run", {"format": format, **options}, *more)[0]

    assert [trains(ONE), trains(OTHER), trains(ONE, True), trains(OTHER, True), trains(ONE)] == [
        2,
        4,
        Dead(-9),
        Dead(-9),
        10,
    ]
    assert [one.name for one in folder.glob("run/.*")] == []
    (folder / "run").chmod(0o2755)
    assert run(1, "reads_as", STRANGER, folder / "run") == [["10", "model", "rng"]]


@as_root
@pytest.mark.parametrize(
    ("umask", "said"),
    [
        (
            0o022,
            "run cannot be written; choose another folder: .*/run' is of user 61001, group 61234, mode 2755; this is user 61002",
        ),
        (0o077, "run cannot be read: .*/run' is of user 61001, group 61234, mode 2700; this is user 61002"),
    ],
)
def test_a_run_that_is_another_persons_alone_says_so(run: RunForked, folder: Path, umask: int, said: str) -> None:
    assert run(1, "trains_as", ONE, umask, folder / "run", {}, True) == [Dead(-9)]
    (error,) = run(1, "trains_as", OTHER, 0o002, folder / "run", {})
    with pytest.raises(StorageError, match=said):
        raise StorageError(error)


def test_a_missing_permission_names_the_owner_of_the_file_or_of_the_folder_that_is_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    found = tmp_path.stat()
    for denied in (tmp_path, tmp_path / "new", tmp_path / "new" / "newer"):
        text = sentence(PermissionError(13, "Permission denied", str(denied)))
        assert text == (
            f"Permission denied: '{denied}' ('{tmp_path}' is of user {found.st_uid}, group {found.st_gid}, mode 0750; this is user "
            f"{os.geteuid()})"
        )
    assert sentence(PermissionError(13, "Permission denied", "beside")) == "Permission denied: 'beside'"
