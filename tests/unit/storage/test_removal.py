"""What is deleted, and that nothing else in the package deletes."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import ckpt
from ckpt.storage.files import Same, empty, own_name, remove

PACKAGE = Path(ckpt.__file__).parent
DELETES = {"unlink", "rmdir", "rmtree", "removedirs"}
"""Methods and functions of these names, of whatever they are."""
OF_MODULES = {"os.remove", "os.replace", "shutil.move"}
ALLOWED = {
    ("storage/files.py", "os.unlink"): "the one function",
    ("storage/files.py", "os.rmdir"): "the one function",
    ("storage/files.py", "shutil.rmtree"): "the one function",
    ("storage/files.py", "os.replace"): "a file of a checkpoint that the caller writes or changes",
    ("catalog/owner.py", "os.replace"): "the owner file of a dead owner, or an empty one that this call has made",
    ("storage/sink.py", "self._memory.unlink"): "memory of this process",
    ("backends/linked_values.py", "self._sink.unlink"): "calls the function",
}
"""(File, call) -> why it may delete without the function."""


def _deletions(file: Path) -> set[str]:
    """The calls in a file that may delete, as text; those under another name by an import are not allowed at all."""
    tree = ast.parse(file.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            names = {one.name for one in node.names}
            found |= {name for name in names if name in DELETES or f"{node.module}.{name}" in OF_MODULES}
        if isinstance(node, ast.Attribute) and (node.attr in DELETES or ast.unparse(node) in OF_MODULES):
            found.add(ast.unparse(node))
    return found


def test_every_other_deletion_in_the_package_is_listed_with_its_reason() -> None:
    found = {
        (str(file.relative_to(PACKAGE)), call) for file in sorted(PACKAGE.rglob("*.py")) for call in _deletions(file)
    }
    assert found - ALLOWED.keys() == set(), "delete with ckpt.storage.files.remove, and a proof"
    assert ALLOWED.keys() - found == set(), "it deletes no more"


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint-1",
        "removed-1-0123abcd",
        ".removed-1-0123abcdx",
        ".quarantined-1-0123abcd",
        ".abandoned-1-0123abcd",
        ".replaced-1-0123abcd",
        ".claim-mine",
        "notes.txt",
    ],
)
def test_a_name_that_others_may_have_given_proves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert not remove(tmp_path / name, own_name)
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize(
    "name",
    [
        ".removed-1-0123abcd",
        ".unpublished-1-0123abcd",
        ".unpublished-1-0123abcd.owner.json",
        ".converting-a-0123abcd",
        ".saving-all-0123abcd",
        ".claim-0123abcd",
        ".checkpoint_manifest.json.0123abcd",
    ],
)
def test_a_name_of_our_own_is_proof_for_files_folders_and_links(tmp_path: Path, name: str) -> None:
    path, kept = tmp_path / name, tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    path.write_text("ours")
    assert remove(path, own_name)
    (path / "inside").mkdir(parents=True)
    (path / "inside" / "link").symlink_to(kept)
    assert remove(path, own_name)
    path.symlink_to(kept)
    assert remove(path, own_name)
    assert not remove(path, own_name), "it is gone"
    assert os.listdir(tmp_path) == ["kept"] and (kept / "file").exists()


def test_another_file_of_the_same_name_is_not_the_same(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as file:
        made = Same.of(file.fileno())
        path.rename(tmp_path / "moved")
        path.write_text("of somebody else")
        assert not remove(path, made)
        assert path.exists()
        assert remove(tmp_path / "moved", made)


def test_what_holds_something_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert not remove(tmp_path / "file", empty) and not remove(tmp_path / "link", empty)
    with pytest.raises(OSError, match="not empty"):
        remove(tmp_path / "folder", empty)
    assert remove(tmp_path / "folder" / "file", empty) and remove(tmp_path / "folder", empty)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
